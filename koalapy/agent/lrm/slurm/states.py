"""Interpret Slurm's words for states of jobs and nodes, and for the reasons why jobs wait. Pure."""

import re
from collections.abc import Set as AbstractSet
from typing import Literal

from koalapy.agent.lrm.port import PREEMPTED, Fault, JobEnd, LrmJobState

CANCELLED_IN_SLURM = "cancelled in Slurm, and not by koalapy"
NodeState = Literal["idle", "planned", "busy", "down"]


def _parse_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_JOB_HOLDS_NODES = _parse_words(
    "RUNNING COMPLETING CONFIGURING SUSPENDED STOPPED SIGNALING RESIZING POWER_UP_NODE REBOOT"
)
_JOB_WAITS = _parse_words("PENDING REQUEUED REQUEUE REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT EXPEDITING")
_JOB_ENDED = _parse_words(
    "COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL BOOT_FAIL PREEMPTED DEADLINE OUT_OF_MEMORY REVOKED LAUNCH_FAILED "
    "RECONFIG_FAIL STAGE_OUT"
)
_JOB_LOST = {
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not boot",
    "RECONFIG_FAIL": "a node could not be configured",
    "LAUNCH_FAILED": "the job could not be launched",
    "PREEMPTED": PREEMPTED,
    "REVOKED": "another cluster has started it",
}
_NO_EXPLANATION = frozenset({"", "None", "NonZeroExitCode"})

_NODE_DOWN = _parse_words(
    "DOWN DRAIN DRAINING DRAINED FAIL FAILED FAILING ERROR FUTURE UNKNOWN INVALID INVALID_REG NOT_RESPONDING "
    "NO_RESPOND MAINT MAINTENANCE MAN_POWER_DOWN POWER_DOWN POWERING_DOWN POWER_DRAIN REBOOT REBOOT_ISSUED BLOCKED"
)
_NODE_BUSY = _parse_words("ALLOCATED MIXED COMPLETING RESERVED PERFCTRS")
_NODE_MIXED = _parse_words("MIXED CLOUD DYNAMIC_NORM")
"""All words that the state of a partly used node may contain."""
_NODE_IDLE = _parse_words("IDLE PLANNED CLOUD POWERED_DOWN DYNAMIC_NORM DYNAMIC_FUTURE RESUME UNDRAIN REBOOT_CANCELED")
"""All words that the state of an idle node may contain."""
_NODE_BECOMES_READY = _parse_words("POWERING_UP POWER_UP REBOOT_REQUESTED")
"""The node starts, or will start when it is idle. It gets no jobs until then."""
_NODE_STARTS = _NODE_BECOMES_READY | _parse_words("REBOOT REBOOT_ISSUED")
_NODE_SILENT = _parse_words("NOT_RESPONDING NO_RESPOND")
NODE_RESERVED = _parse_words("RESERVED MAINT MAINTENANCE")
_JOB_SUSPENDED = _parse_words("SUSPENDED STOPPED")
_JOB_STARTS = _parse_words("CONFIGURING POWER_UP_NODE")

_FAULT_BY_REASON: dict[str, Fault] = {
    "PartitionTimeLimit": "unsuitable",
    "QOSMaxWallDurationPerJobLimit": "unsuitable",
    "AssocMaxWallDurationPerJobLimit": "unsuitable",
    "InvalidAccount": "site",
    "InvalidQOS": "site",
    "QOSNotAllowed": "site",
}
_REASON_TEXTS = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"Resources$", "it waits for nodes"),
        (r"Priority$", "jobs of higher priority come first"),
        (r"ReqNodeNotAvail", "nodes that it needs are reserved for other jobs, or not up"),
        (r"QOS", "a limit of its quality of service"),
        (r"Assoc", "a limit of its account"),
        (r"Reservation", "its reservation has not begun, or has ended"),
        (r"Partition(Down|Inactive)", "its partition is not up"),
        (r"PartitionNodeLimit", "its partition gives a job fewer nodes, or too many of them are down"),
        (r"Licenses", "it waits for a licence"),
        (r"JobHeld", "a user or an operator holds it"),
    )
)


def job_state(states: AbstractSet[str]) -> LrmJobState:
    """Return a job's state. One that may still hold nodes is running; an unknown word never means ended."""
    if states & _JOB_HOLDS_NODES:
        return LrmJobState.RUNNING
    if states & _JOB_WAITS:
        return LrmJobState.QUEUED
    return LrmJobState.ENDED if states & _JOB_ENDED else LrmJobState.UNKNOWN


def job_end(states: AbstractSet[str], code: int, signal: int, slurm_reason: str, *, cancelled_by_us: bool) -> JobEnd:
    """Return how a job ended; ``code`` and ``signal`` are those of the batch script.

    The exit code is None if Slurm reports only a signal, which the reason names.
    """
    if not signal and 128 < code <= 128 + 64:  # srun and shells report so that a signal killed their child
        signal = code - 128
    exit_code = code or None
    killed = f"killed by signal {signal}" if signal else ""
    if "CANCELLED" in states:
        return JobEnd(exit_code, not cancelled_by_us, "cancelled" if cancelled_by_us else CANCELLED_IN_SLURM)
    if "TIMEOUT" in states:
        return JobEnd(exit_code, False, "walltime exceeded", "walltime")
    if "DEADLINE" in states:  # of the cluster's native_specification
        return JobEnd(exit_code, False, "the deadline of its Slurm job has passed", "walltime")
    if "OUT_OF_MEMORY" in states:
        return JobEnd(exit_code, False, "memory limit exceeded", "memory")
    for state, reason in _JOB_LOST.items():
        if state in states:
            return JobEnd(exit_code, True, f"{reason} ({killed})" if killed else reason)
    if "FAILED" not in states:
        return JobEnd(code, False, "")
    explanation = "" if slurm_reason in _NO_EXPLANATION else slurm_reason
    if killed or exit_code is None:
        return JobEnd(exit_code, True, "; ".join(filter(None, (killed, explanation))) or "Slurm gives no reason")
    return JobEnd(exit_code, False, explanation)


def is_job_starting(states: AbstractSet[str]) -> bool:
    """Return whether a job has its nodes, and Slurm is making them ready, for example by switching them on."""
    return bool(states & _JOB_STARTS)


def is_node_starting(states: AbstractSet[str]) -> bool:
    """Return whether a node starts or restarts."""
    return bool(states & _NODE_STARTS)


def node_state(states: AbstractSet[str], *, reserved: bool = False) -> NodeState:
    """Return a node's state; ``reserved``: whether an active reservation of grid jobs has it.

    ``idle``: a job would get it now. ``planned``: only the job for which the backfill scheduler keeps it. ``down``: no
    job, or the state has an unknown word, such as ``EXTERNAL`` of nodes that another system manages.

    Nodes that are switched off to save power are idle: a job gets them, and waits until they have started. A node that
    starts without a job gets none before it is up.
    """
    if reserved:
        states = states - NODE_RESERVED
    if states & _NODE_BECOMES_READY:
        states = states - _NODE_SILENT
    if states & _NODE_DOWN:
        return "down"
    if states & (_NODE_BUSY | _NODE_BECOMES_READY):
        return "busy"
    if "IDLE" not in states or not states <= _NODE_IDLE:
        return "down"
    return "planned" if "PLANNED" in states else "idle"


def is_partly_used(states: AbstractSet[str], *, reserved: bool = False) -> bool:
    """Return whether jobs use a part of a node and others may get the remaining one; ``reserved``: see
    ``node_state``."""
    return "MIXED" in states and (states - NODE_RESERVED if reserved else states) <= _NODE_MIXED


def waiting_fault(reason: str, *, has_several_partitions: bool = False) -> Fault | None:
    """Return the fault for which a waiting job will never start, by its reason; None if it may start.

    ``has_several_partitions``: it may run in one of several partitions, so that a reason about one proves nothing.
    """
    return None if has_several_partitions and reason.startswith("Partition") else _FAULT_BY_REASON.get(reason)


def is_job_suspended(states: AbstractSet[str]) -> bool:
    """Return whether a job has its nodes, and Slurm has suspended or stopped it."""
    return bool(states & _JOB_SUSPENDED)


def is_account_limit(reason: str) -> bool:
    """Return whether a job waits for a limit of its account or quality of service."""
    return reason.startswith(("QOS", "Assoc"))


def waiting_text(reason: str) -> str:
    """Return why a job waits, for users; empty if Slurm gives no reason."""
    if reason in ("", "None", "WaitingForScheduling"):
        return ""
    explanation = next((text for pattern, text in _REASON_TEXTS if pattern.match(reason)), "")
    return f"Slurm says {reason}" + (f" ({explanation})" if explanation else "")


def unavailable_nodes(reason: str) -> str:
    """Return the unavailable nodes that a job waits for, in Slurm's short form; empty if there are none."""
    match = re.search(r"UnavailableNodes:(\S+)", reason)
    return match[1] if match else ""
