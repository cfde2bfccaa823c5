"""The durations of the adapters of resource managers that a test or an operator may vary, in one object."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LrmTimeouts:
    """All are seconds."""

    slurm_message_s: float = 10.0
    """How long Slurm's parts wait for each other, where its configuration does not say (Slurm's own default)."""
    drmaa_start_s: float = 30.0
    """How long a DRMAA library may take to begin a session."""
    drmaa_request_s: float = 30.0
    """How long a DRMAA library may take to answer a request; then its process is killed."""
    drmaa_start_wait_s: float = 1.0
    """How long a snapshot waits for the begin of a session; what the library says later is told later."""
    drmaa_first_restart_s: float = 1.0
    """How long a lost DRMAA process is not started anew. Each loss may leave the resource manager with a client that
    it believes in for minutes, and it takes only so many."""
    drmaa_max_restart_s: float = 60.0
    """The same after several losses, each of which doubles it up to this."""
    drmaa_refused_s: float = 2.0
    """How long a session that was refused in words is not asked for again: that leaves nothing behind."""


DEFAULT_TIMEOUTS = LrmTimeouts()
