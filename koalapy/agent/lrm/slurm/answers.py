"""Read the columns of squeue and the JSON of sinfo, of Slurm 21.08 to 26.05. Pure.

squeue's JSON is not used: it always has the jobs of all users, and differs between releases. Its columns are the same
in all releases, except that an exit code is a wait status up to 22.05, and ``code:signal`` since.

sinfo's JSON changed in 23.02. A node's state was a string with separate flags, and is a list; numbers were plain, and
are ``{"set": …, "infinite": …, "number": …}``; it listed nodes, and lists groups of equal nodes. Invalid input raises
``SiteUnavailable``, and no other error.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from typing_extensions import TypeIs

from koalapy.agent.lrm.node_classes import KnownNode, NodePart
from koalapy.model.errors import SiteUnavailable
from koalapy.model.node_requirement import MAX_CORES, MAX_GPUS, WORD, Gpus, expand_host_list

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
"""Columns of fixed width; longer values are cut.

Free texts come last, and are much shorter together than the columns before them: the part of a text after a newline is
too short to look like the line of another job.
"""
_UNTIL_NAME = sum(_WIDTHS.values()) - _WIDTHS["Name"]
_HEADER = b"JOBID "
_UNTIL_USER = _UNTIL_NAME - _WIDTHS["Reason"]
"""Bytes of a line up to the end of that column."""
_COUNT = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)([KMGTP]?)", re.ASCII)
_UNITS = ("", "K", "M", "G", "T", "P")
_ALLOCATED = ("cpus", "memory", "gres")
_MEMORY_UNSET = 1
"""Megabytes that Slurm reports for a node without configured memory."""


@dataclass(frozen=True, slots=True)
class SlurmNode(KnownNode):
    """A node of the cluster's partitions. Nodes with the same properties are equal in all states."""

    words: frozenset[str] = field(default=frozenset(), compare=False)
    """All words of its state, in capitals."""
    reason: str = field(default="", compare=False)
    """Why it is down, as an operator wrote."""
    used: NodePart | None = field(default=None, compare=False)
    """What jobs use of it; None if Slurm does not report that of each node."""
    has_features: bool = True
    """Whether Slurm reports its features."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job of any user; ``code`` and ``signal`` are zero until it has ended."""

    id: str
    name: str
    uid: int
    words: frozenset[str]
    nodes: tuple[str, ...] = ()
    code: int = 0
    signal: int = 0
    reason: str = ""
    requested_nodes: int = 0
    hosts_cut: bool = False
    """Whether ``nodes`` is empty because their names did not fit into the column."""


def read_nodes(answer: bytes, partitions: Collection[str]) -> list[SlurmNode]:
    """Read the nodes of these partitions from sinfo's answer, each once.

    Entries that cannot be read are skipped. Raise ``SiteUnavailable`` for the first if no entry of these partitions
    can be read.
    """
    document = _document(answer, "sinfo")
    if "nodes" in document:
        entries, read_entry = _entries(document, "sinfo", "nodes"), _read_node
    else:
        entries, read_entry = _entries(document, "sinfo", "sinfo"), _read_group
    nodes: dict[str, SlurmNode] = {}
    problem: SiteUnavailable | None = None
    for entry in entries:
        # The partitions of a node, or the one of a group. An entry of other partitions need not be understood.
        value = entry.get("partitions", entry.get("partition"))
        value = value.get("name") if isinstance(value, dict) else value
        values: list[Any] = value if isinstance(value, list) else [value]
        if names := frozenset(partitions) & {name.rstrip("*") for name in values if isinstance(name, str)}:
            try:
                read = read_entry(entry, names)
            except SiteUnavailable as error:
                problem = problem or error
                continue
            for node in read:
                earlier = nodes.get(node.name, node).partitions
                nodes[node.name] = replace(node, partitions=node.partitions | earlier)
    if problem is not None and not nodes:
        raise problem
    return list(nodes.values())


def _document(answer: bytes, command: str) -> Mapping[str, Any]:
    """Parse the JSON output of a command; raise ``SiteUnavailable`` if it is invalid or reports errors."""
    try:
        # Names and reasons of other users may be any bytes. Wrapper scripts may print text around it.
        text = answer.decode(errors="replace")
        begin_of_document = re.search(r"^\s*[\[{]", text, re.MULTILINE)
        text = text[begin_of_document.start() :].lstrip() if begin_of_document else text
        document, _ = json.JSONDecoder(strict=False).raw_decode(text)
    except (ValueError, RecursionError):
        begin = answer[:80].decode(errors="replace").strip() or "nothing"
        raise SiteUnavailable(f"{command} answered no JSON: {' '.join(begin.split())}") from None
    if not isinstance(document, dict):
        _raise_not_understood(command, "it is not an object")
    if problems := document.get("errors"):  # the exit code is 0 all the same
        hint = f"see that slurmctld runs and is reachable; try {command} --json by hand"
        raise SiteUnavailable(f"{command}: {_error_text(problems)}", hint=hint)
    return document


def _error_text(problems: object) -> str:
    first = problems[0] if isinstance(problems, list) else problems
    if isinstance(first, dict):
        texts = [first.get(key) for key in ("description", "error", "source")]
        first = ": ".join(text for text in texts if isinstance(text, str) and text) or first
    return " ".join(str(first)[:200].split())


def _entries(document: Mapping[str, Any], command: str, key: str) -> list[dict[str, Any]]:
    values = document.get(key)
    entries = [entry for entry in values if isinstance(entry, dict)] if isinstance(values, list) else None
    if entries is None or (values and not entries):
        _raise_not_understood(command, f"it has no list of {key}")
    return entries


def _state_words(value: object, subject: str, command: str) -> frozenset[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values or not all(isinstance(text, str) for text in values):
        _raise_not_understood(command, f"{subject} has no state")
    return words_in(values)


def words_in(texts: Iterable[str]) -> frozenset[str]:
    """Return the single state words in capitals; texts may be ``IDLE+DRAIN`` or ``CANCELLED by 0``."""
    return frozenset(word for text in texts for part in text.upper().split("+") for word in part.split()[:1])


def _read_node(entry: Mapping[str, Any], partitions: frozenset[str]) -> list[SlurmNode]:
    """Convert an entry of sinfo to a list with one node."""
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        _raise_not_understood("sinfo", "a node without name")
    words = _state_words(entry.get("state"), f"node {name}", "sinfo")
    if flags := entry.get("state_flags"):
        words |= _state_words(flags, f"node {name}", "sinfo")
    used = None
    if _is_count(cpus := entry.get("alloc_cpus")) and _is_count(megabytes := entry.get("alloc_memory")):
        used = NodePart(cpus, megabytes << 20, read_gres(entry.get("gres_used")))
    reason = _reason(entry.get("reason"))
    return [SlurmNode(name, words=words, reason=reason, partitions=partitions, used=used, **_properties(entry))]


def _read_group(entry: Mapping[str, Any], partitions: frozenset[str]) -> list[SlurmNode]:
    """Return all nodes of one group of equal nodes."""
    nodes, node = entry.get("nodes"), entry.get("node")
    names = nodes.get("nodes") if isinstance(nodes, dict) else nodes
    try:
        texts = [names] if isinstance(names, str) else names
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            _raise_not_understood("sinfo", "a group without node names")
        hosts = [host for text in texts for host in expand_host_list(text)]
    except ValueError as error:
        raise SiteUnavailable(f"sinfo: {error}") from None
    state = node.get("state") if isinstance(node, dict) else entry.get("state")
    words = _state_words(state, f"node {hosts[0]}", "sinfo") if hosts else frozenset()
    reason, properties = _reason(entry.get("reason")), _properties(entry)
    used = _used_by_group(entry) if len(hosts) == 1 else None
    return [
        SlurmNode(host, words=words, reason=reason, partitions=partitions, used=used, **properties) for host in hosts
    ]


def _used_by_group(entry: Mapping[str, Any]) -> NodePart | None:
    """Return what jobs use of all nodes of a group; None if that is not reported."""
    cpus, memory, gres = (value if isinstance(value := entry.get(name), dict) else {} for name in _ALLOCATED)
    if not (_is_count(used := cpus.get("allocated")) and _is_count(megabytes := memory.get("allocated"))):
        return None
    return NodePart(used, megabytes << 20, read_gres(gres.get("used")))


def _is_count(value: object) -> TypeIs[int]:
    return type(value) is int and 0 <= value < 1 << 32


def _properties(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a node has, as fields of ``SlurmNode``.

    Its values are numbers (up to 22.05), or minimum and maximum of a group of equal nodes (since 23.02).
    """
    megabytes, weight, cpus = (_minimum(entry.get(name)) for name in ("real_memory", "weight", "cpus"))
    if "real_memory" not in entry:
        megabytes = _minimum(entry.get("memory"))
    features = _features(entry)
    return {
        "features": features or frozenset(),
        "has_features": features is not None,
        "memory": megabytes << 20 if megabytes > _MEMORY_UNSET else None,
        "weight": weight,
        "cores": cpus if 0 < cpus <= MAX_CORES else None,
        "gpus": read_gres(entry.get("gres")),
    }


def read_gres(value: object) -> tuple[Gpus, ...]:
    """Return the GPUs of generic resources such as ``gpu:a100:2(S:0-1),gpu:1,tape:4``, or of an object with them.

    A type that jobs cannot request counts as no type.
    """
    if isinstance(value, dict):
        value = value.get("total")
    counts = Counter[str]()
    for entry in re.sub(r"\([^()]*\)", "", value).split(",") if isinstance(value, str) else ():
        name, *parts = entry.strip().split(":")
        if name == "gpu":
            count = parts.pop() if parts and re.fullmatch(r"[0-9]{1,6}", parts[-1], re.ASCII) else "1"
            gpu_type = parts[0] if parts and WORD.fullmatch(parts[0]) else ""
            counts[gpu_type] += int(count)
    return tuple(Gpus(min(count, MAX_GPUS), gpu_type) for gpu_type, count in sorted(counts.items()) if count)


def _minimum(value: object) -> int:
    """Return a number, also from an object with the key ``minimum`` or ``number``; 0 for anything else."""
    if isinstance(value, dict):
        value = value.get("minimum", value.get("number"))
    return value if isinstance(value, int) and 0 <= value < 1 << 32 else 0


def _features(entry: Mapping[str, Any]) -> frozenset[str] | None:
    """Return a node's possible features: text with commas (up to 22.05), the same by kind (since 23.02), or a list."""
    value = entry.get("features")
    if isinstance(value, dict):
        value = value.get("total")
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return frozenset(name.strip() for name in names) - {"", "(null)"}


def _reason(value: object) -> str:
    text = value.get("description") if isinstance(value, dict) else value
    return " ".join(text.split()) if isinstance(text, str) else ""


def _raise_not_understood(command: str, problem: str) -> NoReturn:
    raise SiteUnavailable(f"the answer of {command} cannot be read: {problem}")


MIN_CUT_LINE = 2048
"""Bytes of a line that can be a part of a job's line: more than those of a name after a newline."""


def read_columns(answer: bytes, prefix: str, users: Collection[int]) -> tuple[list[SlurmJob], list[bytes]]:
    """Return the jobs of these users with names that begin with ``prefix``, and the lines of jobs that cannot be read.

    Other text is skipped, such as a site's banner, or the part of a name after a newline, which is too short for a
    line. Raise ``SiteUnavailable`` if the text has neither the header nor a line of squeue.
    """
    *lines, remainder = answer.split(b"\n")
    jobs, unreadable = [], [remainder] if remainder else []
    is_known = not answer.strip()
    for line in lines:
        user = _read_user(line) if len(line) >= _UNTIL_USER else None
        is_known = is_known or user is not None or line.startswith(_HEADER)
        if user is None:
            unreadable += [line] if len(line) >= MIN_CUT_LINE and not line.startswith(_HEADER) else []
        elif user in users:
            is_ours = line.startswith(prefix.encode(), _UNTIL_NAME)
            job = _read_job(line) if is_ours else None
            if job is not None:
                jobs.append(job)
            elif is_ours or len(line) < _UNTIL_NAME:
                unreadable.append(line)
    if not is_known:
        _raise_not_understood("squeue", quote_line(answer))
    return jobs, unreadable


def quote_line(line: bytes) -> str:
    """Return the begin of a line as text for users."""
    return " ".join(line.decode(errors="replace").split())[:80]


def _read_user(line: bytes) -> int | None:
    """Return the uid in a line, or None."""
    return read_uid(line[_UNTIL_USER - _WIDTHS["UserID"] : _UNTIL_USER].decode(errors="replace"))


def read_uid(text: str) -> int | None:
    """Return a user id, which Slurm prints as a signed number of 32 bits; None if the text is none."""
    if (number := re.fullmatch(r"\s*(-?[0-9]{1,10})\s*", text)) is None:
        return None
    value = int(number[1])
    return value % (1 << 32) if -(1 << 31) <= value < 1 << 32 else None


def _read_job(line: bytes) -> SlurmJob | None:
    """Parse a line of squeue in columns of fixed width; return None if it is malformed."""
    values, offset = [], 0
    for width in _WIDTHS.values():
        values.append(line[offset : offset + width].decode(errors="replace").strip())
        offset += width
    id, state, status, requested, nodes, _, reason, name = values
    uid = _read_user(line)
    try:
        code, colon, signal = status.partition(":")
        # A wait status up to 22.05.
        exit_code, signal_number = (int(code), int(signal)) if colon else (int(code) >> 8 & 0xFF, int(code) & 0x7F)
        hosts_cut = len(nodes) >= _WIDTHS["NodeList"]
        hosts = () if hosts_cut else tuple(expand_host_list(nodes))
        if not id.isdecimal() or not state or uid is None:
            return None
    except ValueError:
        return None
    # It is a range if the job may have more or fewer nodes.
    count = read_count(requested.partition("-")[0]) or 0
    return SlurmJob(id, name, uid, words_in([state]), hosts, exit_code, signal_number, reason, count, hosts_cut)


def read_hosts(answer: bytes) -> dict[str, tuple[str, ...]]:
    """Read lines of job and nodes. Skip lines with an invalid list of nodes."""
    hosts = {}
    for line in answer.decode(errors="replace").splitlines():
        job, _, nodes = line.strip().partition("|")
        with suppress(ValueError):
            hosts[job] = tuple(expand_host_list(nodes))
    return hosts


def read_count(text: str) -> int | None:
    """Return a count as Slurm prints it (``1536``, or ``1.5K``); None for other text, such as ``infinite``."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return None
    unit = 1024 ** _UNITS.index(match[2])
    return int(match[1]) * unit if match[1].isdecimal() else int(float(match[1]) * unit)


def read_lines(output: bytes) -> list[SlurmJob]:
    """Read lines of job, state, uid and name, of squeue or sacct."""
    lines = []
    for line in output.decode(errors="replace").splitlines():
        job, state, uid_text, name = [*line.strip().split("|", 3), "", "", ""][:4]
        if job.isdecimal() and (uid := read_uid(uid_text)) is not None:
            lines.append(SlurmJob(job, name, uid, words_in([state])))
    return lines
