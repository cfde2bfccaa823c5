"""What Grid Engine's letters and numbers mean to us: states of jobs and queues, and how a job ended."""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from koalapy.agent.lrm.port import JobEnd, LrmJobState
from koalapy.agent.lrm.sge.qhost import read_size

NodeState = Literal["idle", "busy", "down"]

QUEUE_STATES: Mapping[str, NodeState] = {
    "a": "busy",  # load alarm: somebody's processes keep it busy, nothing is started there
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
BROKEN = "E"
DELETED = "d"
HELD = "h"
SUSPENDED = "sSTP"
AFTER_START = 100
"""Code of failure: killed by a signal."""
_ENFORCED: Mapping[int, str] = {37: "h_rt, h_cpu, or h_vmem", 44: "h_rt", 47: "h_rss", 52: "memory"}
"""Codes of failure of a job that was ended at a limit, of Grid Engine, Univa's and Gridware's, and which limits."""
_LIMIT_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU})
"""Signals by which Grid Engine tells a job that it has exceeded a limit."""
_WALLTIME_MARGIN = 60.0
"""Seconds before its limit at which a job that was ended for one of several may have run for too long."""


def queue_state(states: str) -> NodeState:
    """Of a queue on a host; a letter nobody knows means that it is out of order."""
    found = {QUEUE_STATES.get(letter, "down") for letter in states}
    return "down" if "down" in found else "busy" if "busy" in found else "idle"


def job_state(word: str) -> LrmJobState:
    """``d`` (to be deleted), ``h`` (held) and ``R`` (not the first time) stand before the others."""
    if "z" in word:
        return LrmJobState.ENDED
    if "E" in word:
        return LrmJobState.QUEUED
    if any(letter in word for letter in "rtsSTP"):
        return LrmJobState.RUNNING
    return LrmJobState.QUEUED if any(letter in word for letter in "qwhR") else LrmJobState.UNKNOWN


def is_broken(word: str) -> bool:
    """It waits, and will not start before somebody has mended something."""
    return "E" in word


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


def read_accounting(text: str) -> Sequence[AccountingRecord]:
    """What ``qacct -j`` prints; records that say too little are left out."""
    found = []
    for part in re.split(r"^=+\s*$", text, flags=re.MULTILINE):
        fields = dict(line.split(None, 1) for line in part.splitlines() if len(line.split(None, 1)) == 2)
        record = _record({name: value.strip() for name, value in fields.items()})
        if record is not None:
            found.append(record)
    return found


def end_of(record: AccountingRecord, *, cancelled: bool) -> JobEnd:
    """From its record; ``cancelled`` by us, then being killed is what was asked for."""
    code = record.exit_status
    enforced = _enforced_limits(record)
    killed = code > 128 and record.failed in (0, AFTER_START)
    if _is_walltime(record, enforced):
        return JobEnd(code or None, reason="walltime exceeded", exceeded="walltime")
    if enforced or (killed and not cancelled and _is_memory(record)):
        name = f" ({enforced})" if enforced else ""
        return JobEnd(code or None, reason=f"memory or CPU time limit exceeded{name}", exceeded="memory")
    if cancelled:
        return JobEnd(code if record.failed in (0, AFTER_START) else None, reason="cancelled")
    if killed:
        return JobEnd(code, lost=True, reason=f"ended by signal {code - 128}")
    if record.failed:
        return JobEnd(None, lost=True, reason=f"Grid Engine failed {record.failure} (code {record.failed})")
    return JobEnd(code)


def _enforced_limits(record: AccountingRecord) -> str:
    """Return the limits of which one was enforced, as Grid Engine names them; empty if none was."""
    told = re.search(r"enforced (.*?) ?limit", record.failure)
    return (told[1] if told else "") or _ENFORCED.get(record.failed, "")


def _is_walltime(record: AccountingRecord, enforced: str) -> bool:
    if enforced and not re.search(r"\b[hs]_rt\b", enforced):
        return False
    if re.fullmatch(r"[hs]_rt", enforced):
        return True
    if enforced:
        return record.limit is None or record.wallclock >= record.limit - min(_WALLTIME_MARGIN, record.limit / 10)
    return bool(record.limit and record.wallclock >= record.limit and record.exit_status > 128)


def _is_memory(record: AccountingRecord) -> bool:
    """Whether a job that a signal killed had exceeded a limit other than that of its walltime."""
    if record.exit_status - 128 in _LIMIT_SIGNALS:
        return True
    return record.memory_limit is not None and record.memory >= record.memory_limit


def _record(fields: Mapping[str, str]) -> AccountingRecord | None:
    failed = re.match(r"(\d+)\s*:?\s*(.*)", fields.get("failed", ""))
    status = re.match(r"\d+", fields.get("exit_status", ""))
    if failed is None or status is None or not fields.get("jobnumber", "").isdecimal():
        return None
    wallclock = re.match(r"[\d.]+", fields.get("ru_wallclock", ""))
    limit = re.search(r"h_rt=(\d+)", fields.get("category", ""))
    per_slot = read_size(found[1]) if (found := re.search(r"h_vmem=([^,\s]+)", fields.get("category", ""))) else None
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
        memory=read_size(fields.get("maxvmem", "")) or 0.0,
        memory_limit=per_slot * int(slots) if per_slot and slots.isdecimal() else None,
    )
