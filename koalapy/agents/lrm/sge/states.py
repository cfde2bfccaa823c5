"""What Grid Engine's letters and numbers mean to us: states of jobs and queues, and how a job ended."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from koalapy.agents.lrm.port import JobEnd, LrmJobState

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
WALLTIME_EXCEEDED = 37
"""Code of failure: the master ended it at its limit."""
AFTER_START = 100
"""Code of failure: killed by a signal."""


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
    if record.failed == WALLTIME_EXCEEDED or (record.limit and record.wallclock >= record.limit and code > 128):
        return JobEnd(code or None, reason="walltime exceeded")
    if cancelled:
        return JobEnd(code if record.failed in (0, AFTER_START) else None, reason="cancelled")
    if code > 128 and record.failed in (0, AFTER_START):
        return JobEnd(code, lost=True, reason=f"ended by signal {code - 128}")
    if record.failed:
        return JobEnd(None, lost=True, reason=f"Grid Engine failed {record.failure} (code {record.failed})")
    return JobEnd(code)


def _record(fields: Mapping[str, str]) -> AccountingRecord | None:
    failed = re.match(r"(\d+)\s*:?\s*(.*)", fields.get("failed", ""))
    status = re.match(r"\d+", fields.get("exit_status", ""))
    if failed is None or status is None or not fields.get("jobnumber", "").isdecimal():
        return None
    wallclock = re.match(r"[\d.]+", fields.get("ru_wallclock", ""))
    limit = re.search(r"h_rt=(\d+)", fields.get("category", ""))
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
    )
