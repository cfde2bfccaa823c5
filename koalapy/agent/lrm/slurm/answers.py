"""Read the columns of squeue and the JSON of sinfo, of Slurm 21.08 to 26.05. Pure.

squeue's JSON is not used: it has the jobs of all users, whichever are asked for, and differs between releases. Its
columns are the same in all of them, except that an exit code is a wait status up to 22.05, and ``code:signal`` since.
In sinfo's JSON a node's state is one string with flags beside it (up to 22.05) or a list (since 23.02), numbers are
plain or ``{"set": …, "infinite": …, "number": …}`` (since 23.02), and it lists the cluster's nodes (up to 22.05) or
groups of like ones (since 23.02). Input that is not understood raises ``SiteUnavailable``; no other error is raised.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from koalapy.agent.lrm.node_classes import expand_host_list
from koalapy.model.errors import SiteUnavailable

_WIDTHS = {
    "JobID": 24,
    "State": 32,
    "exit_code": 16,
    "NumNodes": 16,
    "NodeList": 8192,
    "UserID": 16,
    "Reason": 96,
    "Name": 256,
}
COLUMNS = "--Format=" + ",".join(f"{name}:{width}" for name, width in _WIDTHS.items())
"""Columns of fixed width; longer values are cut. Free texts come last, and are much shorter together than the columns
before them, so that a text with a newline cannot pass for the line of another job."""
_UNTIL_NAME = sum(_WIDTHS.values()) - _WIDTHS["Name"]
_UNTIL_USER = _UNTIL_NAME - _WIDTHS["Reason"]
"""Bytes of a line to the end of that column."""
_COUNT = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)([KMGTP]?)", re.ASCII)
_UNITS = ("", "K", "M", "G", "T", "P")
_MEMORY_UNSET = 1
"""Megabytes that Slurm tells of a node where its configuration says nothing of them."""


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node of our partition; ``words`` are all that Slurm says of its state, in capitals."""

    name: str
    words: frozenset[str]
    reason: str = ""
    """Why it is down, by those who took it down."""
    partitions: frozenset[str] = frozenset()
    """Those of ours that it is in."""
    features: frozenset[str] | None = None
    """By which jobs choose nodes; None where Slurm does not tell."""
    memory: int | None = None
    """Bytes; None where nobody has told Slurm."""
    weight: int = 0
    """Those that weigh less are given away first."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job of anyone's; ``code`` and ``signal`` are zero until it has ended."""

    id: str
    name: str
    user: int
    words: frozenset[str]
    nodes: tuple[str, ...] = ()
    code: int = 0
    signal: int = 0
    reason: str = ""
    wants: int = 0
    """Nodes asked for."""
    hosts_cut: bool = False
    """Whether ``nodes`` are still to be asked for: their names are longer than the column."""


def read_nodes(answer: bytes, partitions: Collection[str]) -> list[SlurmNode]:
    """Those of any of ``partitions`` in sinfo's answer, each once."""
    document = _document(answer, "sinfo")
    if "nodes" in document:
        entries, read_entry = _entries(document, "sinfo", "nodes"), _node
    else:
        entries, read_entry = _entries(document, "sinfo", "sinfo"), _group
    nodes: dict[str, SlurmNode] = {}
    for entry in entries:
        if ours := _partitions(entry, partitions):  # an entry of other partitions may be whatever it is
            for node in read_entry(entry, ours):
                before = nodes.get(node.name, node).partitions
                nodes[node.name] = replace(node, partitions=node.partitions | before)
    return list(nodes.values())


def _document(answer: bytes, command: str) -> Mapping[str, Any]:
    try:
        # Others' names and reasons are told in the bytes in which they were given, whatever these are.
        document = json.loads(answer.decode(errors="replace"), strict=False)
    except (ValueError, RecursionError):
        shown = answer[:80].decode(errors="replace").strip() or "nothing"
        raise SiteUnavailable(f"{command} answered what is no JSON: {' '.join(shown.split())}") from None
    if not isinstance(document, dict):
        _not_understood(command, "it is no object")
    if problems := document.get("errors"):  # the exit code is 0 all the same
        hint = f"see that slurmctld runs and can be reached; try {command} --json by hand"
        raise SiteUnavailable(f"{command}: {_error_text(problems)}", hint=hint)
    return document


def _error_text(problems: object) -> str:
    first = problems[0] if isinstance(problems, list) else problems
    if isinstance(first, dict):
        texts = [first.get(key) for key in ("description", "error", "source")]
        first = ": ".join(each for each in texts if isinstance(each, str) and each) or first
    return " ".join(str(first)[:200].split())


def _entries(document: Mapping[str, Any], command: str, key: str) -> list[dict[str, Any]]:
    entries = document.get(key)
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        _not_understood(command, f"it has no list of {key}")
    return entries


def _words(value: object, whose: str, command: str) -> frozenset[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values or not all(isinstance(each, str) for each in values):
        _not_understood(command, f"{whose} has no state")
    return words_in(values)


def words_in(texts: Iterable[str]) -> frozenset[str]:
    """Single state words in capitals, also of ``IDLE+DRAIN`` and ``CANCELLED by 0``."""
    return frozenset(word for text in texts for part in text.upper().split("+") for word in part.split()[:1])


def _node(entry: Mapping[str, Any], partitions: frozenset[str]) -> list[SlurmNode]:
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        _not_understood("sinfo", "a node without name")
    words = _words(entry.get("state"), f"node {name}", "sinfo")
    if flags := entry.get("state_flags"):
        words |= _words(flags, f"node {name}", "sinfo")
    return [SlurmNode(name, words, _reason(entry.get("reason")), partitions, _features(entry), *_size(entry))]


def _group(entry: Mapping[str, Any], partitions: frozenset[str]) -> list[SlurmNode]:
    """All nodes of one line of sinfo: they are alike."""
    nodes, node = entry.get("nodes"), entry.get("node")
    names = nodes.get("nodes") if isinstance(nodes, dict) else nodes
    try:
        texts = [names] if isinstance(names, str) else names
        if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
            _not_understood("sinfo", "a group without node names")
        hosts = [host for text in texts for host in expand_host_list(text)]
    except ValueError as error:
        raise SiteUnavailable(f"sinfo: {error}") from None
    state = node.get("state") if isinstance(node, dict) else entry.get("state")
    words = _words(state, f"node {hosts[0]}", "sinfo") if hosts else frozenset()
    reason, features = _reason(entry.get("reason")), _features(entry)
    return [SlurmNode(host, words, reason, partitions, features, *_size(entry)) for host in hosts]


def _size(entry: Mapping[str, Any]) -> tuple[int | None, int]:
    """Memory in bytes, and weight: numbers (up to 22.05), or the least and most of a group's nodes (since 23.02)."""
    megabytes, weight = (_least(entry.get(name)) for name in ("real_memory", "weight"))
    if "real_memory" not in entry:
        megabytes = _least(entry.get("memory"))
    return megabytes << 20 if megabytes > _MEMORY_UNSET else None, weight


def _least(value: object) -> int:
    """0 where that is not told in a way that is known."""
    if isinstance(value, dict):
        value = value.get("minimum", value.get("number"))
    return value if isinstance(value, int) and 0 <= value < 1 << 32 else 0


def _features(entry: Mapping[str, Any]) -> frozenset[str] | None:
    """Text with commas (up to 22.05), or that by kind (since 23.02), or a list: those that a node can have."""
    value = entry.get("features")
    if isinstance(value, dict):
        value = value.get("total")
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    return frozenset(word.strip() for word in words) - {"", "(null)"}


def _reason(value: object) -> str:
    text = value.get("description") if isinstance(value, dict) else value
    return " ".join(text.split()) if isinstance(text, str) else ""


def _partitions(entry: Mapping[str, Any], wanted: Collection[str]) -> frozenset[str]:
    """The wanted ones of a node, or of a group, which belongs to one."""
    value = entry.get("partitions", entry.get("partition"))
    value = value.get("name") if isinstance(value, dict) else value
    names: list[Any] = value if isinstance(value, list) else [value]
    return frozenset(wanted) & {name.rstrip("*") for name in names if isinstance(name, str)}


def _not_understood(command: str, what: str) -> NoReturn:
    raise SiteUnavailable(f"{command} answered what cannot be understood: {what}")


def read_columns(answer: bytes, prefix: str, users: Collection[int]) -> list[SlurmJob]:
    """Jobs of these users whose names begin with ``prefix``; ``SiteUnavailable`` for what is no answer to that.

    A name may have newlines. What is behind one is passed over: it is too short for a line, whatever it says.
    """
    *lines, rest = answer.split(b"\n")
    if rest or (lines and len(lines[0]) < _UNTIL_USER):
        _no_columns(rest or lines[0])
    theirs = [line for line in lines if len(line) >= _UNTIL_USER and _user(line) in users]
    if cut := next((line for line in theirs if len(line) < _UNTIL_NAME), b""):
        _no_columns(cut)  # perhaps ours, and not to be taken for one that is gone
    return [_job_in_columns(line) for line in theirs if line.startswith(prefix.encode(), _UNTIL_NAME)]


def _user(line: bytes) -> int | None:
    """None of a line that cannot be understood."""
    return read_uid(line[_UNTIL_USER - _WIDTHS["UserID"] : _UNTIL_USER].decode(errors="replace"))


def read_uid(text: str) -> int | None:
    """Return a user id, which Slurm prints as a signed number of 32 bits; None if the text is none."""
    if (number := re.fullmatch(r"\s*(-?[0-9]{1,10})\s*", text)) is None:
        return None
    value = int(number[1])
    return value % (1 << 32) if -(1 << 31) <= value < 1 << 32 else None


def _read_exit(text: str) -> tuple[int, int]:
    """Return exit code and signal from a wait status (up to 22.05) or ``code:signal``; ``ValueError``."""
    code, colon, signal = text.partition(":")
    return (int(code), int(signal)) if colon else (int(text) >> 8 & 0xFF, int(text) & 0x7F)


def _job_in_columns(line: bytes) -> SlurmJob:
    """The columns are as wide as that many bytes."""
    values, at = [], 0
    for width in _WIDTHS.values():
        values.append(line[at : at + width].decode(errors="replace").strip())
        at += width
    id, state, status, wants, nodes, _, reason, name = values
    user = _user(line)
    try:
        code, signal = _read_exit(status)
        hosts_cut = len(nodes) >= _WIDTHS["NodeList"]
        hosts = () if hosts_cut else tuple(expand_host_list(nodes))
        if not id.isdecimal() or not state or user is None:
            raise ValueError(line)
    except ValueError:
        _no_columns(line)
    # Of a job that may have more or fewer nodes it is a range.
    count = read_count(wants.partition("-")[0]) or 0
    return SlurmJob(id, name, user, words_in([state]), hosts, code, signal, reason, count, hosts_cut)


def _no_columns(line: bytes) -> NoReturn:
    _not_understood("squeue", " ".join(line.decode(errors="replace").split())[:80])


def read_hosts(answer: bytes) -> dict[str, tuple[str, ...]]:
    """Each job's nodes, from lines of both; ``SiteUnavailable`` for what is no list of nodes."""
    found = {}
    for line in answer.decode(errors="replace").splitlines():
        job, _, nodes = line.strip().partition("|")
        try:
            found[job] = tuple(expand_host_list(nodes))
        except ValueError as error:
            raise SiteUnavailable(f"squeue: nodes of job {job[:24]}: {error}") from None
    return found


def read_count(text: str) -> int | None:
    """Return a count as Slurm prints it for people (``1536``, or ``1.5K``); None for another text, as ``infinite``."""
    matched = _COUNT.fullmatch(text.strip())
    if matched is None:
        return None
    unit = 1024 ** _UNITS.index(matched[2])
    return int(matched[1]) * unit if matched[1].isdecimal() else int(float(matched[1]) * unit)
