"""Jobs and local users that a simulation runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from koalapy.model.errors import UsageError
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ClusterName


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job that will be submitted. Times are in seconds.

    Jobs with equal specifications should share one ``spec`` object, since each object is validated once.
    """

    arrives_at: float
    """Submission time."""
    spec: JobSpec
    lasts: float
    """Run time of the program on one cluster of speed 1; a ``RunTime`` gives the factor for other placements."""
    exit_code: int = 0
    label: str = ""
    """Label of the job in the source of the workload."""

    def __post_init__(self) -> None:
        for name, value in (("arrives_at", self.arrives_at), ("lasts", self.lasts)):
            if not (isfinite(value) and value >= 0):
                raise UsageError(f"{name} is {value}, but must be at least 0", field=name, value=value)


@dataclass(frozen=True, slots=True)
class LocalUser:
    """A job of a local user, which waits in the resource manager's queue for its nodes. Times are in seconds."""

    at: float
    cluster: ClusterName
    nodes: int
    lasts: float


Gang = Sequence[tuple[ClusterName, int]]
"""(cluster, nodes) pairs; each cluster occurs once, however many components the job has there."""
RunTime = Callable[[PlannedJob, Gang], float]
"""Returns the factor by which ``PlannedJob.lasts`` is multiplied for a placement."""


def constant_run_time(job: PlannedJob, gang: Gang) -> float:
    """Return 1: the run time does not depend on the placement."""
    return 1.0
