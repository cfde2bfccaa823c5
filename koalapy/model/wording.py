"""Short texts for people, the same in every room."""

import signal
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches

SIGNAL_BASE = 128
"""What shells add to the number of a signal for an exit code."""
MAX_LISTED = 4
"""How much of a long list a one-line text shows."""
MAX_COMPARED_LENGTH = 200
"""Characters of a name that are compared with others."""


def listed(texts: Sequence[str], count: int | None = None, separator: str = ", ") -> str:
    """The first few texts in one line; ``count`` is how many there are in all, if more than ``texts`` holds."""
    shown = separator.join(texts[:MAX_LISTED])
    more = (len(texts) if count is None else count) - min(len(texts), MAX_LISTED)
    return f"{shown} and {more} more" if more > 0 else shown


def nodes(count: int, kind: str = "") -> str:
    """``1 node``, ``2 nodes``, ``2 idle nodes``."""
    return f"{count} {kind}{' ' if kind else ''}{'node' if count == 1 else 'nodes'}"


def are_idle(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'} idle"


def suggest_names(wrong: str, names: Iterable[str]) -> str:
    """The way out after a wrong name: the nearest one there is, then all of them."""
    known = sorted(names)
    near = get_close_matches(wrong[:MAX_COMPARED_LENGTH], known, 1)
    question = f"did you mean {near[0]}? " if near else ""
    return f"{question}known: {', '.join(known) or 'none'}"


def clock(at: float, now: float, *, exact: bool = False) -> str:
    """Seconds since the epoch in UTC: ``14:02``, with ``exact`` ``14:02:07``, on another day ``2026-11-20 14:02``."""
    moment, today = datetime.fromtimestamp(at, UTC), datetime.fromtimestamp(now, UTC)
    time = moment.strftime("%H:%M:%S" if exact else "%H:%M")
    return time if moment.date() == today.date() else f"{moment.date().isoformat()} {time}"


def duration(seconds: float | None) -> str:
    """``0:07``, ``1:02:03``, ``2-00:00:00``."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    days, rest = divmod(whole, 86400)
    hours, minutes, left = rest // 3600, rest // 60 % 60, rest % 60
    clock = f"{hours}:{minutes:02}:{left:02}" if hours or days else f"{minutes}:{left:02}"
    return f"{days}-{clock}" if days else clock


def days(seconds: float) -> str:
    """``30 days``; a time that is no number of days as ``duration`` has it."""
    number = seconds / 86400
    return f"{number:.0f} days" if number >= 2 and number.is_integer() else duration(seconds)


def format_three_digits(number: float) -> str:
    """``1234``, ``123``, ``12.3``, ``1.23``, ``0.123``: never as a power of ten."""
    digits = next((digits for digits, least in ((0, 100), (1, 10), (2, 1)) if number >= least), 3)
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
    """Whether a text can be encoded: JSON, file systems and arguments may bring lone surrogates, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def escape_surrogates(text: str) -> str:
    """A text for people, with what cannot be encoded as escapes."""
    return text.encode(errors="backslashreplace").decode()


def shortened(text: str, length: int) -> str:
    """Return a text of at most so many characters; a cut is marked by an ellipsis."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
