"""Samples of the use of the grid, taken once a minute for the charts of the overview."""

from dataclasses import dataclass

SAMPLE_INTERVAL_S = 60.0
KEPT_S = 86400.0
"""Time for which samples are stored."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The use of the grid at a time in seconds since the epoch, and the events since the previous sample."""

    at: float
    ours: int
    """Nodes that jobs of this scheduler have or are claiming."""
    local: int
    """Nodes of the clusters' local users."""
    idle: int
    """Idle nodes of usable clusters with a current report."""
    queued: int
    """Queued jobs."""
    started: int
    """Jobs that started."""
    ended: int
    """Jobs that ended, in any state."""
    startup: float | None
    """Mean seconds from the placement to the start of the jobs that started; None without one."""
