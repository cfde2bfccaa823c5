"""What Slurm's words mean: for the states of jobs and nodes, and for why a job waits. Pure; any word gets an answer."""

import re
from collections.abc import Set as AbstractSet
from typing import Literal

from koalapy.agent.lrm.port import Fault, JobEnd, LrmJobState

NodeState = Literal["idle", "planned", "busy", "down"]


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_HOLDS_NODES = _set("RUNNING COMPLETING CONFIGURING SUSPENDED STOPPED SIGNALING RESIZING POWER_UP_NODE REBOOT")
_WAITS = _set("PENDING REQUEUED REQUEUE REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT EXPEDITING")
_ENDED = _set(
    "COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL BOOT_FAIL PREEMPTED DEADLINE OUT_OF_MEMORY REVOKED LAUNCH_FAILED "
    "RECONFIG_FAIL STAGE_OUT"
)
_LOST = {
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not boot",
    "RECONFIG_FAIL": "a node could not be configured",
    "LAUNCH_FAILED": "the job could not be launched",
    "PREEMPTED": "preempted by another job",
    "DEADLINE": "its deadline has passed",
    "REVOKED": "another cluster has started it",
}
_NOT_A_REASON = frozenset({"", "None", "NonZeroExitCode"})

_NODE_DOWN = _set(
    "DOWN DRAIN DRAINING DRAINED FAIL FAILED FAILING ERROR FUTURE UNKNOWN INVALID INVALID_REG NOT_RESPONDING "
    "NO_RESPOND MAINT MAINTENANCE MAN_POWER_DOWN POWER_DOWN POWERING_DOWN POWER_DRAIN REBOOT REBOOT_ISSUED BLOCKED"
)
_NODE_BUSY = _set("ALLOCATED MIXED COMPLETING RESERVED PERFCTRS")
_NODE_IDLE = _set("IDLE PLANNED CLOUD POWERED_DOWN DYNAMIC_NORM DYNAMIC_FUTURE RESUME UNDRAIN REBOOT_CANCELED")
"""All words that the state of an idle node may have."""
_NODE_COMES_BACK = _set("POWERING_UP POWER_UP REBOOT_REQUESTED")
"""It starts, or will at once when it is idle: nothing is given to it until it has."""
_NODE_STARTS = _NODE_COMES_BACK | _set("REBOOT REBOOT_ISSUED")
_NODE_SILENT = _set("NOT_RESPONDING NO_RESPOND")
_NODE_RESERVED = _set("RESERVED MAINT MAINTENANCE")
_JOB_STARTS = _set("CONFIGURING POWER_UP_NODE")

_NEVER_STARTS: dict[str, Fault] = {
    "PartitionTimeLimit": "unsuitable",
    "QOSMaxWallDurationPerJobLimit": "unsuitable",
    "AssocMaxWallDurationPerJobLimit": "unsuitable",
    "InvalidAccount": "site",
    "InvalidQOS": "site",
    "QOSNotAllowed": "site",
}
_WAITS_FOR = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"Resources$", "it waits for nodes"),
        (r"Priority$", "jobs of higher priority come first"),
        (r"ReqNodeNotAvail", "nodes that it needs are reserved for others, or not up"),
        (r"QOS", "a limit of its quality of service"),
        (r"Assoc", "a limit of its account"),
        (r"Reservation", "its reservation has not begun, or has ended"),
        (r"Partition(Down|Inactive)", "its partition is not up"),
        (r"PartitionNodeLimit", "its partition gives a job fewer nodes, or too many of them are down"),
        (r"Licenses", "it waits for a licence"),
        (r"JobHeld", "somebody holds it"),
    )
)


def job_state(words: AbstractSet[str]) -> LrmJobState:
    """Of a job with these state words: one that may still hold nodes is running, and nothing is guessed to be ended."""
    if words & _HOLDS_NODES:
        return LrmJobState.RUNNING
    if words & _WAITS:
        return LrmJobState.QUEUED
    return LrmJobState.ENDED if words & _ENDED else LrmJobState.UNKNOWN


def job_end(words: AbstractSet[str], code: int, signal: int, slurm_reason: str, *, cancelled_by_us: bool) -> JobEnd:
    """Say how a job with these state words ended; ``code`` and ``signal`` are the batch script's.

    There is no exit code where Slurm tells only of a signal: the reason names it.
    """
    if not signal and 128 < code <= 128 + 64:  # srun and shells say so that a signal killed their child
        signal = code - 128
    exit_code = code or None
    killed = f"killed by signal {signal}" if signal else ""
    if "CANCELLED" in words:
        return JobEnd(
            exit_code, not cancelled_by_us, "cancelled" if cancelled_by_us else "cancelled in Slurm by others"
        )
    if "TIMEOUT" in words:
        return JobEnd(exit_code, False, "walltime exceeded", "walltime")
    if "OUT_OF_MEMORY" in words:
        return JobEnd(exit_code, False, "memory limit exceeded", "memory")
    for word, reason in _LOST.items():
        if word in words:
            return JobEnd(exit_code, True, f"{reason} ({killed})" if killed else reason)
    if "FAILED" not in words:
        return JobEnd(code, False, "")
    explained = "" if slurm_reason in _NOT_A_REASON else slurm_reason
    if killed or exit_code is None:
        return JobEnd(exit_code, True, "; ".join(filter(None, (killed, explained))) or "Slurm gives no reason")
    return JobEnd(exit_code, False, explained)


def is_starting(words: AbstractSet[str]) -> bool:
    """Whether a job with these state words has its nodes, and Slurm makes them ready: it may have to start them."""
    return bool(words & _JOB_STARTS)


def node_starts(words: AbstractSet[str]) -> bool:
    """Whether a node with these state words starts, or starts anew."""
    return bool(words & _NODE_STARTS)


def node_state(words: AbstractSet[str], *, reserved: bool = False) -> NodeState:
    """Of a node with these state words: idle when it would be given to a job now, planned when only to one for which
    the backfill scheduler keeps it, down when to none, and for words that are not known, such as ``EXTERNAL`` of
    nodes that another system manages. ``reserved``: in a reservation of ours that has begun.

    Idle are also nodes switched off to save power: a job gets them, and waits until they have started. One that starts
    without a job is given to none before it is up.
    """
    if reserved:
        words = words - _NODE_RESERVED
    if words & _NODE_COMES_BACK:
        words = words - _NODE_SILENT
    if words & _NODE_DOWN:
        return "down"
    if words & (_NODE_BUSY | _NODE_COMES_BACK):
        return "busy"
    if "IDLE" not in words or not words <= _NODE_IDLE:
        return "down"
    return "planned" if "PLANNED" in words else "idle"


def fault_of_waiting(reason: str, *, choice: bool = False) -> Fault | None:
    """Of a job that was taken, by the reason for which it waits; None when it may start some day. ``choice``: it may go
    to one of several partitions, and what is said of one need not hold for the others."""
    return None if choice and reason.startswith("Partition") else _NEVER_STARTS.get(reason)


def waiting_text(reason: str) -> str:
    """Why a job waits, for people; empty while Slurm has not said."""
    if reason in ("", "None", "WaitingForScheduling"):
        return ""
    meant = next((words for pattern, words in _WAITS_FOR if pattern.match(reason)), "")
    return f"Slurm says {reason}" + (f" ({meant})" if meant else "")


def nodes_waited_for(reason: str) -> str:
    """The nodes, in Slurm's short form, whose absence a job waits out; empty when it is not that."""
    found = re.search(r"UnavailableNodes:(\S+)", reason)
    return found[1] if found else ""
