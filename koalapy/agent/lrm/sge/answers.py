"""Read the answers of Grid Engine's commands, and interpret its letters and numbers. Pure.

Its XML contains names of jobs and users unchanged: not all are UTF-8, some have control characters, and some releases
leave ``&`` and ``<`` in them. Wrapper scripts print blank lines before it.
"""

import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree as Xml

from koalapy.agent.lrm.node_classes import KnownNode
from koalapy.agent.lrm.port import JOB_PREFIX, JobEnd, LrmJobState
from koalapy.model.errors import SiteUnavailable
from koalapy.model.node_requirement import MAX_CORES, MAX_GPUS, MAX_MEMORY, WORD, Gpus

_INVALID_CHARACTER = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_REFERENCE = re.compile("&#(?:([0-9]+)|x([0-9a-fA-F]+));")
_BARE_AMPERSAND = re.compile("&(?!(?:#[0-9]+|#x[0-9a-fA-F]+|amp|lt|gt|quot|apos);)")
_NAME_ELEMENT = re.compile("<(JB_name|JB_owner)>(.*?)</\\1>", re.DOTALL)
_XML_LINE = re.compile(r"\s*(?:<[^<>]*>(?:[^<>]*</[^<>]+>)?)?\s*")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_UNITS = {"": 1, "k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30, "t": 10**12, "T": 1 << 40}
"""Units of Grid Engine: small letters are decimal."""
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([kKmMgGtT]?)B?")

NodeState = Literal["idle", "busy", "down"]

DURATION_OFFSET_S = 60.0
"""Seconds before the end of a reservation at which its jobs are ended, Grid Engine's default of DURATION_OFFSET."""
START_TIME_S = 20.0
"""Seconds in which a job in a reservation must start."""
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
MAX_REASON_LENGTH = 200
_KILLED_BY_SIGNAL = 100
"""A failure code."""
_LIMIT_FAILURES: Mapping[int, str] = {37: "h_rt, h_cpu, or h_vmem", 44: "h_rt", 47: "h_rss", 52: "memory"}
"""Limits by the failure code of a job that exceeded them, for Grid Engine, Univa and Gridware."""
_LIMIT_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU})
"""Signals that Grid Engine sends to a job that has exceeded a limit."""
_WALLTIME_MARGIN_S = 60.0
"""A job that one of several limits ended this close to its walltime counts as beyond its walltime."""


@dataclass(frozen=True, slots=True)
class QueueInstance:
    """A queue on one host; ``states`` are letters, empty without problems."""

    queue: str
    host: str
    states: str
    used: int
    reserved: int
    total: int


@dataclass(frozen=True, slots=True)
class SgeJob:
    """A job; ``hosts`` are those on which it has slots, first the one where it was started."""

    id: str
    name: str
    owner: str
    state: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """The queue instances and jobs in an answer of ``qstat -f -g t -xml``."""

    instances: tuple[QueueInstance, ...]
    jobs: tuple[SgeJob, ...]
    unreadable: int = 0
    """Lines that were skipped. A job that is missing has not ended, then."""


@dataclass(frozen=True, slots=True)
class AdvanceReservation:
    """An advance reservation; times in seconds since the epoch."""

    id: str
    name: str
    owner: str
    begins: float
    ends: float
    hosts: frozenset[str] = frozenset()
    users: frozenset[str] = frozenset()
    """The accounts besides the owner that may use it."""

    def longest_walltime(self, now: float) -> float:
        """Return the seconds that a job may run in the reservation to end by its own limit.

        Grid Engine would kill a longer one without a reason that shows in its accounting.
        """
        return max(1.0, self.ends - max(now, self.begins) - DURATION_OFFSET_S - START_TIME_S)


@dataclass(frozen=True, slots=True)
class AccountingRecord:
    """The accounting record of a job on one host; ``limit`` and ``wallclock`` in seconds."""

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
    """Maximum bytes of virtual memory."""
    memory_limit: float | None = None
    """Bytes allowed in all its slots."""


def queue_state(states: str) -> NodeState:
    """Return the state of a queue instance for new jobs; it is down for an unknown letter."""
    node_states = {QUEUE_STATES.get(letter, "down") for letter in states}
    return "down" if "down" in node_states else "busy" if "busy" in node_states else "idle"


def job_state(letters: str) -> LrmJobState:
    """Return a job's state; ``d`` (to be deleted), ``h`` (held) and ``R`` (restarted) come before other letters."""
    if "z" in letters:
        return LrmJobState.ENDED
    if is_broken(letters):
        return LrmJobState.QUEUED
    if any(letter in letters for letter in "rtsSTP"):
        return LrmJobState.RUNNING
    return LrmJobState.QUEUED if any(letter in letters for letter in "qwhR") else LrmJobState.UNKNOWN


def is_broken(letters: str) -> bool:
    """Return whether a job waits in an error state, which an operator must clear."""
    return "E" in letters


def read_listing(text: bytes) -> Listing:
    """Read an answer of qstat. Raise ``SiteUnavailable`` for other text."""
    try:
        root, unreadable = _read_xml(text)
    except Xml.ParseError as error:
        raise SiteUnavailable(f"qstat's answer is not XML: {_quote_begin(text)} ({error})") from error
    if root.tag != "job_info" or root.find("queue_info") is None or root.find("job_info") is None:
        raise SiteUnavailable(f"qstat's answer is not about queues and jobs: {_quote_begin(text)}")
    instances: dict[tuple[str, str], QueueInstance] = {}
    for element in root.findall("./queue_info/Queue-List"):
        queue, _, host = _text(element, "name").partition("@")
        if queue and host:
            instances[queue, host] = _read_instance(element, queue, host)
    return Listing(tuple(instances.values()), tuple(_read_jobs(root)), unreadable)


def _read_xml(answer: bytes) -> tuple[Xml.Element, int]:
    """Return the root element, and the number of lines in it that are no XML and were skipped.

    Text around the document is skipped, and invalid characters are replaced. Raise ``Xml.ParseError`` for other errors.
    """
    text = _INVALID_CHARACTER.sub(_REPLACEMENT, answer.decode(errors="replace"))
    begin = re.search(r"<\?xml", text) or re.search(r"<[A-Za-z_]", text)
    text = text[begin.start() if begin else 0 : text.rfind(">") + 1]
    text = _NAME_ELEMENT.sub(lambda name: f"<{name[1]}>{name[2].replace('<', '&lt;')}</{name[1]}>", text)
    text = _BARE_AMPERSAND.sub("&amp;", text)
    text = _REFERENCE.sub(_replace_invalid, text)
    try:
        return Xml.fromstring(text), 0
    except Xml.ParseError:
        lines = text.splitlines()
        valid = [line for line in lines if _XML_LINE.fullmatch(line)]
        return Xml.fromstring("\n".join(valid)), len(lines) - len(valid)


def _replace_invalid(reference: re.Match[str]) -> str:
    digits = reference[1] or reference[2]
    code = int(digits, 10 if reference[1] else 16) if len(digits) < 20 else -1
    is_allowed = 0 <= code <= 0x10FFFF and not _INVALID_CHARACTER.match(chr(code))
    return reference[0] if is_allowed else _REPLACEMENT


def _quote_begin(text: bytes) -> str:
    return repr(" ".join(text[:200].decode(errors="replace").split())[:80])


def _read_instance(element: Xml.Element, queue: str, host: str) -> QueueInstance:
    """Return a queue instance; it is in error if one of its numbers is invalid."""
    states, numbers = _text(element, "state"), []
    for name in ("slots_used", "slots_resv", "slots_total"):
        try:
            numbers.append(max(0, int(_text(element, name) or "0")))
        except ValueError:
            states = "E"
            numbers.append(0)
    return QueueInstance(queue, host, states, *numbers)


def _read_jobs(root: Xml.Element) -> Iterator[SgeJob]:
    """Yield each job once; it has a row for each slot."""
    rows: dict[str, list[tuple[Xml.Element, str]]] = {}
    for queue in root.findall("./queue_info/Queue-List"):
        host = _text(queue, "name").partition("@")[2]
        for row in queue.findall("job_list"):
            rows.setdefault(_text(row, "JB_job_number"), []).append((row, host))
    for row in (*root.findall("./queue_info/job_list"), *root.findall("./job_info/job_list")):
        host = _text(row, "queue_name").partition("@")[2]
        rows.setdefault(_text(row, "JB_job_number"), []).append((row, host))
    for id, job_rows in rows.items():
        if not id.isdecimal():
            if any(_text(row, "JB_name").startswith(JOB_PREFIX) for row, _ in job_rows):
                raise SiteUnavailable(f"qstat shows a grid job without a number: {id!r}")
            continue
        # The host where it was started is listed once as MASTER, and again as a slave.
        job_rows.sort(key=lambda row_and_host: _text(row_and_host[0], "master") != "MASTER")
        first = job_rows[0][0]
        hosts = dict.fromkeys(host for _, host in job_rows if host)
        yield SgeJob(id, _text(first, "JB_name"), _text(first, "JB_owner"), _text(first, "state"), tuple(hosts))


def read_job_error(text: str) -> str:
    """Return why a job is in an error state, from the output of ``qstat -j``; empty if it does not say that."""
    lines = text.splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("error reason")), "")


def read_waiting_reason(text: str) -> str:
    """Return why a job waits, from the scheduling information in the output of ``qstat -j``; empty if there is none.

    A line about the parallel environment or a limit is about the whole job; each other line is about one queue.
    """
    _, heading, information = text.partition("scheduling info:")
    lines = [" ".join(line.split()) for line in information.splitlines()] if heading else []
    lines = [line for line in lines if line and not line.startswith("(")]
    decisive = [
        line for line in lines if re.search(r"cannot run in PE|exceeds limit|limit .* in rule|dropped because", line)
    ]
    return next(iter([*decisive, *lines]), "")[:MAX_REASON_LENGTH]


def read_reservations(text: bytes) -> Sequence[AdvanceReservation]:
    """Read an answer of ``qrstat -xml``, without reservations that are over. Raise ``SiteUnavailable`` for other text.

    Reservations that are unreadable are left out, but none with a name of koalapy: a missing one counts as removed.
    """
    try:
        root, unreadable = _read_xml(text)
    except Xml.ParseError as error:
        raise SiteUnavailable(f"qrstat's answer is not XML: {_quote_begin(text)} ({error})") from error
    if root.tag != "qrstat" or unreadable:
        raise SiteUnavailable(f"qrstat's answer is not about reservations, or not whole: {_quote_begin(text)}")
    reservations = []
    for element in root.findall("ar_summary"):
        id, name = _text(element, "id"), _text(element, "name")
        try:
            # Open Cluster Scheduler adds microseconds.
            times = [
                time.mktime(time.strptime(_text(element, field).partition(".")[0], "%Y-%m-%dT%H:%M:%S"))
                for field in ("start_time", "end_time")
            ]
        except (ValueError, OverflowError):
            times = []
        if not (times and id.isdecimal()):
            if name.startswith(JOB_PREFIX):
                raise SiteUnavailable(f"qrstat shows the reservation {name} without a number or its times")
            continue
        instances = [slots.get("queue_instance", "") for slots in element.findall("granted_slots_list/granted_slots")]
        hosts = frozenset(name.partition("@")[2] for name in instances if "@" in name)
        users = frozenset(user.get("user", "") for user in element.findall("acl_list/acl"))
        if _text(element, "state") not in ("x", "d"):
            reservations.append(AdvanceReservation(id, name, _text(element, "owner"), times[0], times[1], hosts, users))
    return reservations


def _text(element: Xml.Element, name: str) -> str:
    return (element.findtext(name) or "").strip()


GPU_COMPLEXES = frozenset({"gpu", "gpus", "ngpus", "num_gpus"})
"""Usual names of the consumable that counts a host's GPUs."""

FIXED_ON_HOST = "hf"
"""Marks a complex with a configured value of the host, which is no load value and not consumed."""
TRUE_VALUES = frozenset({"TRUE", "1", "1.000000"})


def read_hosts(text: bytes) -> dict[str, KnownNode]:
    """Return the hosts in an answer of ``qhost -F -xml`` by short name; empty for other text.

    Their GPUs are those that no job uses now. Features are the architecture, and configured boolean complexes that are
    true. Numbers are cut to the bounds of reports.
    """
    try:
        root, _ = _read_xml(text)
    except Xml.ParseError:
        return {}
    hosts = {}
    for host in root.iter("host"):
        values = {value.get("name", ""): (value.text or "").strip() for value in host.findall("hostvalue")}
        resources = [
            (value.get("name", ""), value.get("dominance", ""), (value.text or "").strip())
            for value in host.findall("resourcevalue")
        ]
        processors = values.get("num_proc", "")
        features = {name for name, kind, value in resources if kind == FIXED_ON_HOST and value in TRUE_VALUES}
        features |= {values["arch_string"]} if values.get("arch_string", "-") != "-" else set()
        gpus = max((_read_count(value) for name, _, value in resources if name in GPU_COMPLEXES), default=0)
        name = short_name(host.get("name", ""))
        hosts[name] = KnownNode(
            name,
            min(_read_size(values.get("mem_total", "")) or 0, MAX_MEMORY) or None,
            frozenset(feature for feature in features if WORD.fullmatch(feature)),
            cores=min(int(processors), MAX_CORES) if re.fullmatch(r"[1-9][0-9]{0,4}", processors, re.ASCII) else None,
            gpus=(Gpus(min(gpus, MAX_GPUS)),) if gpus else (),
        )
    return hosts


def _read_count(text: str) -> int:
    """Return the whole number of a text such as ``2.000000``; 0 for other text."""
    count = re.fullmatch(r"([0-9]{1,6})(?:\.0*)?", text, re.ASCII)
    return int(count[1]) if count else 0


def short_name(host: str) -> str:
    """Return a host's name without its domain: Grid Engine does not always include it."""
    return host.partition(".")[0]


def _read_size(text: str) -> int | None:
    """Return the bytes of a size such as ``1.2G``; None for other text."""
    size = _SIZE.fullmatch(text.strip())
    return None if size is None else int(float(size[1]) * _UNITS[size[2]])


def read_accounting(text: str) -> Sequence[AccountingRecord]:
    """Read the output of ``qacct -j``, without records that lack a job number, failure or exit status."""
    records = []
    for part in re.split(r"^=+\s*$", text, flags=re.MULTILINE):
        fields = dict(line.split(None, 1) for line in part.splitlines() if len(line.split(None, 1)) == 2)
        record = _read_record({name: value.strip() for name, value in fields.items()})
        if record is not None:
            records.append(record)
    return records


def _read_record(fields: Mapping[str, str]) -> AccountingRecord | None:
    """Convert the fields of one accounting record; return None if the end of the job cannot be read from them."""
    failed = re.match(r"(\d+)\s*:?\s*(.*)", fields.get("failed", ""))
    status = re.match(r"\d+", fields.get("exit_status", ""))
    if failed is None or status is None or not fields.get("jobnumber", "").isdecimal():
        return None
    wallclock = re.match(r"[0-9]{1,12}(?:\.[0-9]{1,9})?", fields.get("ru_wallclock", ""))
    limit = re.search(r"h_rt=(\d+)", fields.get("category", ""))
    vmem = re.search(r"h_vmem=([^,\s]+)", fields.get("category", ""))
    per_slot = _read_size(vmem[1]) if vmem else None
    slots = re.fullmatch(r"[1-9][0-9]{0,6}", fields.get("slots", "1"), re.ASCII)
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
        memory_limit=per_slot * int(slots[0]) if per_slot and slots else None,
    )


def end_of(record: AccountingRecord, *, cancelled: bool) -> JobEnd:
    """Return how a job ended, by its record; ``cancelled``: the agent has cancelled it."""
    code = record.exit_status
    match = re.search(r"enforced (.*?) ?limit", record.failure)
    enforced = (match[1] if match else "") or _LIMIT_FAILURES.get(record.failed, "")
    was_killed = code > 128 and record.failed in (0, _KILLED_BY_SIGNAL)
    exceeded_memory = code - 128 in _LIMIT_SIGNALS or (
        record.memory_limit is not None and record.memory >= record.memory_limit
    )
    if _exceeded_walltime(record, enforced):
        return JobEnd(code or None, reason="walltime exceeded", exceeded="walltime")
    if enforced or (was_killed and not cancelled and exceeded_memory):
        name = f" ({enforced})" if enforced else ""
        return JobEnd(code or None, reason=f"memory or CPU time limit exceeded{name}", exceeded="memory")
    if cancelled:
        return JobEnd(code if record.failed in (0, _KILLED_BY_SIGNAL) else None, reason="cancelled")
    if was_killed:
        return JobEnd(code, lost=True, reason=f"ended by signal {code - 128}")
    if record.failed:
        return JobEnd(None, lost=True, reason=f"Grid Engine failed {record.failure} (code {record.failed})")
    return JobEnd(code)


def _exceeded_walltime(record: AccountingRecord, enforced: str) -> bool:
    """Return whether a job ended at its walltime, by the limit that Grid Engine named or by its run time."""
    if enforced and not re.search(r"\b[hs]_rt\b", enforced):
        return False
    if re.fullmatch(r"[hs]_rt", enforced):
        return True
    if enforced:
        return record.limit is None or record.wallclock >= record.limit - min(_WALLTIME_MARGIN_S, record.limit / 10)
    return bool(record.limit and record.wallclock >= record.limit and record.exit_status > 128)
