"""The states and priorities of jobs, and the orders of their lists. Imports little, since commands start with it."""

from enum import StrEnum


class JobState(StrEnum):
    QUEUED = "queued"
    HELD = "held"
    PLACED = "placed"
    CLAIMING = "claiming"
    STARTING = "starting"
    RUNNING = "running"
    UNKNOWN = "unknown"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in FINAL_STATES

    @property
    def is_active(self) -> bool:
        """Return whether the job holds nodes or is about to."""
        return self in ACTIVE_STATES

    @property
    def is_waiting(self) -> bool:
        """Return whether the job has no nodes yet and has not ended."""
        return self in WAITING_STATES


FINAL_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
WAITING_STATES = frozenset({JobState.QUEUED, JobState.HELD})
ACTIVE_STATES = frozenset({JobState.PLACED, JobState.CLAIMING, JobState.STARTING, JobState.RUNNING, JobState.UNKNOWN})


class Priority(StrEnum):
    HIGH = "high"
    LOW = "low"


class JobSort(StrEnum):
    """The order of a list of jobs."""

    NEWEST = "newest"
    QUEUE = "queue"
    """Running jobs first, then jobs that are about to run, then waiting jobs by their positions, then held jobs."""
    OLDEST = "oldest"
    NODES = "nodes"
    """Largest first."""
