"""What Slurm's words for the states of jobs and nodes mean to us. Pure; total: any word gets an answer."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from koalapy.agents.lrm.port import LrmJobState

Standing = Literal["idle", "busy", "down"]


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
    "OUT_OF_MEMORY": "out of memory",
    "REVOKED": "another cluster has started it",
}
_NOT_A_REASON = frozenset({"", "None", "NonZeroExitCode"})

_NODE_DOWN = _set(
    "DOWN DRAIN DRAINING DRAINED FAIL FAILED FAILING ERROR FUTURE UNKNOWN INVALID INVALID_REG NOT_RESPONDING "
    "NO_RESPOND MAINT MAINTENANCE MAN_POWER_DOWN POWER_DOWN POWERING_DOWN POWER_DRAIN REBOOT REBOOT_ISSUED BLOCKED"
)
_NODE_BUSY = _set("ALLOCATED MIXED COMPLETING RESERVED PERFCTRS")


@dataclass(frozen=True, slots=True)
class End:
    """How a job ended, as ``LrmJob`` tells it."""

    exit_code: int | None
    lost: bool
    reason: str


def job_state(words: AbstractSet[str]) -> LrmJobState:
    """Of a job with these state words: one that may still hold nodes is running, and nothing is guessed to be ended."""
    if words & _HOLDS_NODES:
        return LrmJobState.RUNNING
    if words & _WAITS:
        return LrmJobState.QUEUED
    return LrmJobState.ENDED if words & _ENDED else LrmJobState.UNKNOWN


def job_end(words: AbstractSet[str], code: int, signal: int, slurm_reason: str, *, cancelled_by_us: bool) -> End:
    """How a job with these state words ended; ``code`` and ``signal`` are the batch script's."""
    if not signal and 128 < code <= 128 + 64:  # srun and shells say so that a signal killed their child
        signal = code - 128
    exit_code = code or (128 + signal if signal else None)
    killed = f"killed by signal {signal}" if signal else ""
    if "CANCELLED" in words:
        return End(exit_code, not cancelled_by_us, "cancelled" if cancelled_by_us else "cancelled in Slurm by others")
    if "TIMEOUT" in words:
        return End(exit_code, False, "walltime exceeded")
    for word, reason in _LOST.items():
        if word in words:
            return End(exit_code, True, f"{reason} ({killed})" if killed else reason)
    if "FAILED" not in words:
        return End(code, False, "")
    explained = "" if slurm_reason in _NOT_A_REASON else slurm_reason
    if killed or exit_code is None:
        return End(exit_code, True, "; ".join(filter(None, (killed, explained))) or "Slurm gives no reason")
    return End(exit_code, False, explained)


def node_standing(words: AbstractSet[str]) -> Standing:
    """Of a node with these state words: idle when it could be given to a job now, down when to none.

    Idle are also nodes that are planned for a waiting job (it may be ours) and those switched off to save power, which
    Slurm starts for a job.
    """
    if words & _NODE_DOWN:
        return "down"
    if words & _NODE_BUSY:
        return "busy"
    return "idle" if "IDLE" in words else "down"
