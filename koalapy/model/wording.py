"""Format short texts for users, the same in all packages."""

import re
import signal
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from math import isfinite

SIGNAL_BASE = 128
"""Offset that shells add to a signal number to make an exit code."""
MAX_LISTED = 4
"""Entries of a long list that a one-line text shows."""
MAX_COMPARED_LENGTH = 200
"""Characters of a name that are compared with similar names."""


def format_list(texts: Sequence[str], count: int | None = None, separator: str = ", ") -> str:
    """Join the first few texts and say how many are left out.

    ``count`` is the total number of texts if ``texts`` holds only some of them.
    """
    listed = separator.join(texts[:MAX_LISTED])
    left_out = (len(texts) if count is None else count) - min(len(texts), MAX_LISTED)
    return f"{listed} and {left_out} more" if left_out > 0 else listed


def format_nodes(count: int, kind: str = "") -> str:
    """Format a number of nodes: ``1 node``, ``2 nodes``, ``2 idle nodes``."""
    return f"{count} {kind}{' ' if kind else ''}{'node' if count == 1 else 'nodes'}"


def format_hosts(hosts: Sequence[str]) -> str:
    """Format names of hosts as Slurm does: ``n[0-3,7],gpu1``. Consecutive numbers become a range."""
    groups: dict[tuple[str, str], list[str]] = {}
    for host in hosts:
        prefix, digits, suffix = re.fullmatch(r"(.*?)([0-9]{0,18})([^0-9]*)", host, re.DOTALL).groups()  # type: ignore[union-attr]
        groups.setdefault((prefix, suffix), []).append(digits)
    texts = []
    for (prefix, suffix), numbers in groups.items():
        ranges: list[list[str]] = []
        for digits in sorted(numbers, key=lambda digits: (int(digits or 0), digits)):
            last = ranges[-1][-1] if ranges else ""
            if last and digits == str(int(last) + 1).zfill(len(last)):
                ranges[-1][1:] = [digits]
            else:
                ranges.append([digits])
        listed = ",".join("-".join(ends) for ends in ranges)
        texts.append(f"{prefix}{listed if len(numbers) == 1 else f'[{listed}]'}{suffix}")
    return ",".join(texts)


def format_idle(count: int) -> str:
    """Format a number of idle nodes as a clause: ``1 is idle``, ``2 are idle``."""
    return f"{count} {'is' if count == 1 else 'are'} idle"


def suggest_names(unknown_name: str, names: Iterable[str]) -> str:
    """Return a hint for an unknown name: the most similar name, then all names."""
    sorted_names = sorted(names)
    from difflib import get_close_matches  # slow to import, and most commands need none

    similar = get_close_matches(unknown_name[:MAX_COMPARED_LENGTH], sorted_names, 1)
    question = f"did you mean {similar[0]}? " if similar else ""
    return f"{question}known: {', '.join(sorted_names) or 'none'}"


def format_time(timestamp: float, now: float, *, exact: bool = False) -> str:
    """Format a time in UTC: ``14:02``, with ``exact`` ``14:02:07``, on another day than today ``2026-11-20 14:02``.

    Both times are in seconds since the epoch.
    """
    moment, today = datetime.fromtimestamp(timestamp, UTC), datetime.fromtimestamp(now, UTC)
    time = moment.strftime("%H:%M:%S" if exact else "%H:%M")
    return time if moment.date() == today.date() else f"{moment.date().isoformat()} {time}"


def format_utc(timestamp: float, now: float, *, exact: bool = False) -> str:
    """Format a time as ``format_time`` does, with its zone: ``14:02 UTC``."""
    return f"{format_time(timestamp, now, exact=exact)} UTC"


def format_duration(seconds: float | None) -> str:
    """Format a duration: ``0:07``, ``1:02:03``, ``2-00:00:00``; ``-`` for None."""
    if seconds is None:
        return "-"
    days, day_seconds = divmod(int(seconds), 86400)
    hours, minutes, second = day_seconds // 3600, day_seconds // 60 % 60, day_seconds % 60
    time = f"{hours}:{minutes:02}:{second:02}" if hours or days else f"{minutes}:{second:02}"
    return f"{days}-{time}" if days else time


def format_days(seconds: float) -> str:
    """Format a whole number of at least 2 days as ``30 days``, any other duration as ``format_duration`` does."""
    days = seconds / 86400
    return f"{days:.0f} days" if days >= 2 and days.is_integer() else format_duration(seconds)


def format_three_digits(number: float) -> str:
    """Format a number with three significant digits and no exponent: ``1234``, ``123``, ``12.3``, ``0.123``."""
    digits = next((digits for digits, minimum in ((0, 100), (1, 10), (2, 1)) if number >= minimum), 3)
    return f"{number:.{digits}f}"


def describe_exit(code: int) -> str:
    """Return how a program ended: ``exited with 3``, ``was killed by signal 9 (SIGKILL)``.

    Codes above 128 are signals, as in shells and launchers, where there is a standard signal of that number.
    """
    number = code - SIGNAL_BASE
    if not 0 < number < signal.SIGRTMIN:
        return f"exited with {code}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exited with {code}"
    return f"was killed by signal {number} ({name})"


def is_utf8(text: str) -> bool:
    """Return whether a text has no lone surrogates, which JSON, file names and arguments may bring."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def escape_surrogates(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded, by escapes."""
    return text.encode(errors="backslashreplace").decode()


def format_share(value: float | None) -> str:
    """Format a share as a percentage, ``-`` for None."""
    return "-" if value is None else f"{value:.1%}"


def format_cpu_use(cpu_time: float | None, cpu_available: float | None, measured: int, nodes: int) -> str:
    """Format a program's use of processors: ``75.0% of 0:40``; ``unknown`` if no node was measured.

    ``measured``: the number of measured nodes of ``nodes``.
    """
    if cpu_time is None or not cpu_available:
        return "unknown"
    return f"{cpu_time / cpu_available:.1%} of {format_duration(cpu_available)}{_format_unmeasured(measured, nodes)}"


def format_memory_use(peak_memory: int | None, requested: int | None, measured: int, nodes: int) -> str:
    """Format a program's largest memory on one node: ``1.2 GB, 7.5% of 16 GB``; ``unknown`` if none was measured."""
    if peak_memory is None:
        return "unknown"
    share = f", {peak_memory / requested:.1%} of {format_bytes(requested)}" if requested else ""
    return f"{format_bytes(peak_memory)}{share}{_format_unmeasured(measured, nodes)}"


def _format_unmeasured(measured: int, nodes: int) -> str:
    return f"; unknown of {nodes - measured} of {format_nodes(nodes)}" if measured < nodes else ""


FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Signs with which a formula may begin, some of them in the wide form of East Asian keyboards."""


def escape_formula(value: object) -> object:
    """Quote a text that spreadsheets would run as a formula; return any other value unchanged."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_SIGNS) else value


def to_line(text: str) -> str:
    """Return a text with blanks in place of line breaks, control characters and characters that change the order of
    text. So it can neither add lines or headers nor alter a terminal."""
    return text if text.isprintable() else "".join(sign if sign.isprintable() else " " for sign in text)


def shorten(text: str, length: int) -> str:
    """Cut a text to ``length`` characters; an ellipsis marks the cut."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_POWERS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
BYTES = {"": 1.0, **{f"{prefix}B": power for prefix, power in (_POWERS | _BINARY).items()}}
BYTES_PER_SECOND = BYTES | {f"{prefix}bit": power / 8 for prefix, power in _POWERS.items()}
"""Units of bandwidth. Bits and bytes are written out, since ``b`` could mean either."""


_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,100}")


def parse_int(text: str) -> int | None:
    """Return the whole number that a text is; None if it is another text."""
    return int(text) if _WHOLE_NUMBER.fullmatch(text) else None


def parse_seconds(value: float | str) -> float:
    """Return the seconds of a number, or of a text with a unit. Raise ``ValueError`` with a hint for other values."""
    return _parse_quantity(value, SECONDS, "give seconds, or a number with ms or us: 0.5ms")


MIN_MEMORY = 10**6
"""Bytes; a smaller number is taken for one without its unit, since no node has so little memory."""


def parse_memory(value: float | str) -> int:
    """Return the bytes of a text with a unit, or of a number of bytes.

    Raise ``ValueError`` with a hint for other values, and for a number that lacks its unit.
    """
    hint = "give a number with a unit: 16GB, 512MiB"
    size = _parse_quantity(value, BYTES, hint)
    if not isfinite(size):
        raise ValueError(hint)
    if is_bare_memory(value):
        number = f"{size:.15g}"
        raise ValueError(f"give {number}GB or {number}MB" if size < MIN_MEMORY else f"give {number}B for bytes")
    return round(size)


def is_bare_memory(value: object) -> bool:
    """Return whether an amount of memory lacks its unit: a text without one, or a number of very few bytes."""
    if isinstance(value, str):
        return re.fullmatch(r"\s*\d+(?:\.\d*)?(?:[eE][-+]?\d+)?\s*", value, re.ASCII) is not None
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MIN_MEMORY


def parse_bandwidth(value: float | str) -> float:
    """Return the bytes per second of a number, or of a text with a unit.

    Raise ``ValueError`` with a hint for other values.
    """
    text = re.sub(r"/s$", "", value.strip()) if isinstance(value, str) else value
    return _parse_quantity(text, BYTES_PER_SECOND, "give bytes per second, or a number with a unit: 1Gbit, 100MB")


def format_bytes(size: float) -> str:
    """Format a number of bytes in decimal units with three digits: ``200 MB``, ``1.5 GB``, ``17 bytes``."""
    for unit, power in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= 0.9995 * power:
            return f"{size / power:.3g} {unit}"
    return f"{size:.3g} {'byte' if size == 1 else 'bytes'}"


def _parse_quantity(value: float | str, units: dict[str, float], hint: str) -> float:
    """Return a number, or a text converted by its unit. Raise ``ValueError`` with ``hint`` for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(hint)
    if not isinstance(value, str):
        return float(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*([A-Za-zµ]*)\s*", value)
    if not match or match[2] not in units:
        raise ValueError(hint)
    return float(match[1]) * units[match[2]]
