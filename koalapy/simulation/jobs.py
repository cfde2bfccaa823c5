"""Jobs and local users that a simulation runs, and its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean

from koalapy.model.errors import UsageError
from koalapy.model.job import JobId, JobState
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


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The result of one finished job. Times are in seconds; None for an event that did not occur."""

    ident: JobId
    planned: PlannedJob
    state: JobState
    reason: str
    submitted: float
    """Time at which the job entered the queue: later than planned if the queue was full."""
    placed: float | None
    """Placement time (JPT) of the last attempt."""
    started: float | None
    """Time at which the barrier of the last attempt opened."""
    ended: float
    gang: Gang
    """The clusters of the last attempt, with the number of nodes on each."""
    restarts: int
    attempts: int
    placement_tries: int
    claiming_tries: int
    start_delay: float = 0.0
    """Estimated start time of the last attempt minus that of the first placement."""

    @property
    def response(self) -> float:
        """Return the seconds from the planned submission to the end."""
        return self.ended - self.planned.arrives_at

    @property
    def waited(self) -> float:
        """Return the seconds from the planned submission to the start, or to the end if the job never started."""
        return (self.ended if self.started is None else self.started) - self.planned.arrives_at

    @property
    def nodes(self) -> int:
        return sum(nodes for _, nodes in self.gang)


@dataclass(frozen=True, slots=True)
class NotRun:
    """A job that was rejected, or that was unfinished when the simulation ended, with the reason."""

    planned: PlannedJob
    reason: str
    is_refused: bool = True


@dataclass(slots=True)
class Outcome:
    """Finished jobs in the order in which they ended, jobs that did not finish, and the use of nodes."""

    jobs: list[JobOutcome] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    nodes: int = 0
    """Number of nodes of the grid."""
    lasted: float = 0.0
    """Simulated seconds until the last job ended."""
    node_seconds: float = 0.0
    """Node-seconds used by components of jobs."""
    local_node_seconds: float = 0.0
    """Node-seconds used by local users."""
    steps: int = 0
    """Number of scheduler steps."""

    @property
    def utilisation(self) -> float:
        """Return the fraction of all node-seconds that jobs or local users used."""
        offered = self.nodes * self.lasted
        return (self.node_seconds + self.local_node_seconds) / offered if offered else 0.0

    def require_complete(self) -> "Outcome":
        """Return the outcome itself; raise ``ValueError`` if a job was neither rejected nor finished.

        Means over an incomplete outcome would cover only some of the jobs.
        """
        unfinished = [job for job in self.not_run if not job.is_refused]
        if unfinished:
            first = unfinished[0].planned.arrives_at
            raise ValueError(
                f"{len(unfinished)} jobs did not end in the simulation; the first of them arrived at {first:g} s"
            )
        return self

    def succeeded_jobs(self) -> list[JobOutcome]:
        return [job for job in self.jobs if job.state is JobState.SUCCEEDED]

    def mean_response(self) -> float:
        """Return the mean response time in seconds of jobs that succeeded; raise ``ValueError`` if none did."""
        return mean_of_jobs([job.response for job in self.succeeded_jobs()])


def mean_of_jobs(values: Sequence[float]) -> float:
    """Return the mean; raise ``ValueError`` for no values."""
    if not values:
        raise ValueError("there is no mean of no jobs")
    return fmean(values)
