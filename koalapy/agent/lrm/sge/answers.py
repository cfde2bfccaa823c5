"""Read the answers of Grid Engine's commands, and say what its letters and numbers mean. Pure: bytes in, values out.

Its XML has the bytes of other users' names as they are: not all are UTF-8, some are control characters, and some
releases leave ``&`` and ``<`` in them. Wrapper scripts print blank lines before it.
"""

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree as Xml

from koalapy.agent.lrm.port import JOB_PREFIX, JobEnd, LrmJobState
from koalapy.model.errors import SiteUnavailable

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_REFERENCE = re.compile("&#(?:([0-9]+)|x([0-9a-fA-F]+));")
_BARE = re.compile("&(?!(?:#[0-9]+|#x[0-9a-fA-F]+|amp|lt|gt|quot|apos);)")
_NAME = re.compile("<(JB_name|JB_owner)>(.*?)</\\1>", re.DOTALL)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_UNITS = {"": 1, "k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30, "t": 10**12, "T": 1 << 40}
"""As Grid Engine has them: small letters are decimal."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)B?")

NodeState = Literal["idle", "busy", "down"]

QUEUE_STATES: Mapping[str, NodeState] = {
    "a": "busy",  # load alarm: other processes keep it busy, nothing is started there
    "A": "busy",  # load so high that jobs are suspended
    "S": "busy",  # suspended in favour of another queue's jobs
    "P": "busy",  # preempted
    "u": "down",  # its host does not answer
    "d": "down",  # disabled
    "D": "down",  # disabled by the calendar
    "s": "down",  # suspended
    "C": "down",  # suspended by the calendar
    "E": "down",  # error
    "c": "down",  # contradictory configuration
    "o": "down",  # no longer configured, and still has jobs
}
UNREACHABLE = "u"
DELETED = "d"
HELD = "h"
SUSPENDED = "sSTP"
_AFTER_START = 100
"""Code of failure: killed by a signal."""
_ENFORCED: Mapping[int, str] = {37: "h_rt, h_cpu, or h_vmem", 44: "h_rt", 47: "h_rss", 52: "memory"}
"""Codes of failure of a job that was ended at a limit, of Grid Engine, Univa's and Gridware's, and which limits."""
_LIMIT_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU})
"""Signals by which Grid Engine tells a job that it has exceeded a limit."""
_WALLTIME_MARGIN = 60.0
"""Seconds before its limit at which a job that was ended for one of several may have run for too long."""


@dataclass(frozen=True, slots=True)
class QueueInstance:
    """A queue on one host; ``states`` are letters, none when all is well."""

    queue: str
    host: str
    states: str
    used: int
    reserved: int
    total: int


@dataclass(frozen=True, slots=True)
class SgeJob:
    """One job; ``hosts`` are those where it has slots, the one where it was started first."""

    id: str
    name: str
    owner: str
    state: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """One answer of ``qstat -f -g t -xml``."""

    instances: tuple[QueueInstance, ...]
    jobs: tuple[SgeJob, ...]


@dataclass(frozen=True, slots=True)
class AccountingRecord:
    """A job's part on one host in the accounting; ``limit`` and ``wallclock`` in seconds."""

    job: str
    host: str
    name: str
    owner: str
    failed: int
    failure: str
    exit_status: int
    wallclock: float
    limit: float | None
    memory: float = 0.0
    """Bytes of virtual memory that it had at most."""
    memory_limit: float | None = None
    """Bytes that it might have in all its slots."""


def queue_state(states: str) -> NodeState:
    """Return what a queue on a host is to a job; a letter that is not known means that it is out of order."""
    found = {QUEUE_STATES.get(letter, "down") for letter in states}
    return "down" if "down" in found else "busy" if "busy" in found else "idle"


def job_state(word: str) -> LrmJobState:
    """Return a job's state; ``d`` (to be deleted), ``h`` (held) and ``R`` (restarted) stand before the others."""
    if "z" in word:
        return LrmJobState.ENDED
    if is_broken(word):
        return LrmJobState.QUEUED
    if any(letter in word for letter in "rtsSTP"):
        return LrmJobState.RUNNING
    return LrmJobState.QUEUED if any(letter in word for letter in "qwhR") else LrmJobState.UNKNOWN


def is_broken(word: str) -> bool:
    """Return whether a job waits in an error state, which an operator has to clear."""
    return "E" in word


def read_listing(text: bytes) -> Listing:
    """Read an answer of qstat. Raise ``SiteUnavailable`` in one line for any other text."""
    try:
        root = _read_xml(text)
    except Xml.ParseError as error:
        raise SiteUnavailable(f"qstat's answer is no XML: {_begin_of(text)} ({error})") from error
    if root.tag != "job_info" or root.find("queue_info") is None or root.find("job_info") is None:
        raise SiteUnavailable(f"qstat's answer is not about queues and jobs: {_begin_of(text)}")
    instances = (_instance(each) for each in root.findall("./queue_info/Queue-List"))
    named = {(each.queue, each.host): each for each in instances if each is not None}
    return Listing(tuple(named.values()), tuple(_jobs(root)))


def _read_xml(answer: bytes) -> Xml.Element:
    """Return the root; replace what XML forbids. Raise ``Xml.ParseError`` if it still cannot be read."""
    text = _FORBIDDEN.sub(_REPLACEMENT, answer.decode(errors="replace")).lstrip()
    text = _NAME.sub(lambda found: f"<{found[1]}>{found[2].replace('<', '&lt;')}</{found[1]}>", text)
    text = _BARE.sub("&amp;", text)
    return Xml.fromstring(_REFERENCE.sub(_allowed, text))


def _allowed(reference: re.Match[str]) -> str:
    digits = reference[1] or reference[2]
    code = int(digits, 10 if reference[1] else 16) if len(digits) < 20 else -1
    is_allowed = 0 <= code <= 0x10FFFF and not _FORBIDDEN.match(chr(code))
    return reference[0] if is_allowed else _REPLACEMENT


def _begin_of(text: bytes) -> str:
    return repr(" ".join(text[:200].decode(errors="replace").split())[:80])


def _instance(element: Xml.Element) -> QueueInstance | None:
    """Return a queue on one host: out of order if its numbers are none, and None if it has no name."""
    queue, _, host = _text(element, "name").partition("@")
    if not queue or not host:
        return None
    used, reserved, total = (_number(element, name) for name in ("slots_used", "slots_resv", "slots_total"))
    if used is None or reserved is None or total is None:
        return QueueInstance(queue, host, "E", used or 0, reserved or 0, total or 0)
    return QueueInstance(queue, host, _text(element, "state"), used, reserved, total)


def _jobs(root: Xml.Element) -> Iterator[SgeJob]:
    """Yield each job once; where it has several slots there are as many rows."""
    rows: dict[str, list[tuple[Xml.Element, str]]] = {}
    for row, host in _rows(root):
        rows.setdefault(_text(row, "JB_job_number"), []).append((row, host))
    for id, found in rows.items():
        if not id.isdecimal():
            if any(_text(row, "JB_name").startswith(JOB_PREFIX) for row, _ in found):
                raise SiteUnavailable(f"qstat shows a job of ours without a number: {id!r}")
            continue
        # The host where it was started is listed once as MASTER, and again as one of the others.
        found.sort(key=lambda each: _text(each[0], "master") != "MASTER")
        first = found[0][0]
        hosts = dict.fromkeys(host for _, host in found if host)
        yield SgeJob(id, _text(first, "JB_name"), _text(first, "JB_owner"), _text(first, "state"), tuple(hosts))


def _rows(root: Xml.Element) -> Iterator[tuple[Xml.Element, str]]:
    for queue in root.findall("./queue_info/Queue-List"):
        host = _text(queue, "name").partition("@")[2]
        for row in queue.findall("job_list"):
            yield row, host
    for row in (*root.findall("./queue_info/job_list"), *root.findall("./job_info/job_list")):
        yield row, _text(row, "queue_name").partition("@")[2]


def _text(element: Xml.Element, name: str) -> str:
    return (element.findtext(name) or "").strip()


def _number(element: Xml.Element, name: str) -> int | None:
    try:
        return max(0, int(_text(element, name) or "0"))
    except ValueError:
        return None


def read_memory(text: bytes) -> dict[str, int]:
    """Return the bytes of each host in an answer of ``qhost -xml``, by its short name; nothing for any other text."""
    try:
        root = _read_xml(text)
    except Xml.ParseError:
        return {}
    found = {}
    for host in root.iter("host"):
        for value in host.findall("hostvalue"):
            if value.get("name") == "mem_total" and (memory := _read_size(value.text or "")):
                found[short_name(host.get("name", ""))] = memory
    return found


def short_name(host: str) -> str:
    """Return a host's name without its domain, with which Grid Engine names it or not."""
    return host.partition(".")[0]


def _read_size(text: str) -> int | None:
    """Return the bytes of a size as Grid Engine prints it, as ``1.2G``; None for any other text."""
    size = _SIZE.fullmatch(text.strip())
    return None if size is None else int(float(size[1]) * _UNITS[size[2]])


def read_accounting(text: str) -> Sequence[AccountingRecord]:
    """Read what ``qacct -j`` prints; leave out records without job number, failure or exit status."""
    found = []
    for part in re.split(r"^=+\s*$", text, flags=re.MULTILINE):
        fields = dict(line.split(None, 1) for line in part.splitlines() if len(line.split(None, 1)) == 2)
        record = _record({name: value.strip() for name, value in fields.items()})
        if record is not None:
            found.append(record)
    return found


def _record(fields: Mapping[str, str]) -> AccountingRecord | None:
    failed = re.match(r"(\d+)\s*:?\s*(.*)", fields.get("failed", ""))
    status = re.match(r"\d+", fields.get("exit_status", ""))
    if failed is None or status is None or not fields.get("jobnumber", "").isdecimal():
        return None
    wallclock = re.match(r"[\d.]+", fields.get("ru_wallclock", ""))
    limit = re.search(r"h_rt=(\d+)", fields.get("category", ""))
    per_slot = _read_size(found[1]) if (found := re.search(r"h_vmem=([^,\s]+)", fields.get("category", ""))) else None
    slots = fields.get("slots", "1")
    return AccountingRecord(
        job=fields["jobnumber"],
        host=fields.get("hostname", ""),
        name=fields.get("jobname", ""),
        owner=fields.get("owner", ""),
        failed=int(failed[1]),
        failure=failed[2].strip(),
        exit_status=int(status[0]),
        wallclock=float(wallclock[0]) if wallclock else 0.0,
        limit=float(limit[1]) if limit else None,
        memory=_read_size(fields.get("maxvmem", "")) or 0.0,
        memory_limit=per_slot * int(slots) if per_slot and slots.isdecimal() else None,
    )


def end_of(record: AccountingRecord, *, cancelled: bool) -> JobEnd:
    """Say how a job ended by its record; a job that the agent has cancelled was to be killed."""
    code = record.exit_status
    told = re.search(r"enforced (.*?) ?limit", record.failure)
    enforced = (told[1] if told else "") or _ENFORCED.get(record.failed, "")
    killed = code > 128 and record.failed in (0, _AFTER_START)
    if _is_walltime(record, enforced):
        return JobEnd(code or None, reason="walltime exceeded", exceeded="walltime")
    if enforced or (killed and not cancelled and _is_memory(record)):
        name = f" ({enforced})" if enforced else ""
        return JobEnd(code or None, reason=f"memory or CPU time limit exceeded{name}", exceeded="memory")
    if cancelled:
        return JobEnd(code if record.failed in (0, _AFTER_START) else None, reason="cancelled")
    if killed:
        return JobEnd(code, lost=True, reason=f"ended by signal {code - 128}")
    if record.failed:
        return JobEnd(None, lost=True, reason=f"Grid Engine failed {record.failure} (code {record.failed})")
    return JobEnd(code)


def _is_walltime(record: AccountingRecord, enforced: str) -> bool:
    if enforced and not re.search(r"\b[hs]_rt\b", enforced):
        return False
    if re.fullmatch(r"[hs]_rt", enforced):
        return True
    if enforced:
        return record.limit is None or record.wallclock >= record.limit - min(_WALLTIME_MARGIN, record.limit / 10)
    return bool(record.limit and record.wallclock >= record.limit and record.exit_status > 128)


def _is_memory(record: AccountingRecord) -> bool:
    """Return whether a job that a signal killed had exceeded a limit other than that of its walltime."""
    if record.exit_status - 128 in _LIMIT_SIGNALS:
        return True
    return record.memory_limit is not None and record.memory >= record.memory_limit
