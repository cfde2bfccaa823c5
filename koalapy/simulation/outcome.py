"""What came of a simulation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from koalapy.model.job import JobId, JobState
from koalapy.simulation.jobs import Gang, PlannedJob


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """One job that is over. Times in seconds, None for what never happened."""

    ident: JobId
    planned: PlannedJob
    state: JobState
    reason: str
    submitted: float
    """When it was let in: later than planned where the queue was full."""
    placed: float | None
    """JPT of its last attempt."""
    started: float | None
    """When the barrier of its last attempt opened."""
    ended: float
    gang: Gang
    """The clusters of its last attempt, and its nodes on each."""
    restarts: int
    attempts: int
    placement_tries: int
    claiming_tries: int
    start_delay: float = 0.0
    """From the start time that was estimated when it was placed first to that of its last attempt."""

    @property
    def response(self) -> float:
        """From the moment when its user wanted to submit it to its end."""
        return self.ended - self.planned.at

    @property
    def waited(self) -> float:
        """From that moment to its start; to its end, if it never started."""
        return (self.ended if self.started is None else self.started) - self.planned.at

    @property
    def nodes(self) -> int:
        return sum(nodes for _, nodes in self.gang)


@dataclass(frozen=True, slots=True)
class NotRun:
    """A job that was refused, and why; or that still waited when the simulation was over."""

    planned: PlannedJob
    reason: str
    is_refused: bool = True


@dataclass(slots=True)
class Outcome:
    """Jobs in the order in which they ended, those that were not run, and what the nodes were used for."""

    jobs: list[JobOutcome] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    nodes: int = 0
    """Of the grid."""
    lasted: float = 0.0
    """Virtual seconds until the last job was over."""
    node_seconds: float = 0.0
    """For which components of jobs had nodes."""
    local_node_seconds: float = 0.0
    """For which local users had."""
    steps: int = 0
    """Of the scheduler."""

    @property
    def utilisation(self) -> float:
        """The fraction of all node-seconds that jobs or local users had."""
        offered = self.nodes * self.lasted
        return (self.node_seconds + self.local_node_seconds) / offered if offered else 0.0

    def complete(self) -> "Outcome":
        """Itself; ``ValueError`` where a job was neither refused nor came to its end: then means are of some only."""
        left = [each for each in self.not_run if not each.is_refused]
        if left:
            raise ValueError(f"{len(left)} jobs did not come to their end, the first that of {left[0].planned.at:g} s")
        return self

    def succeeded(self) -> list[JobOutcome]:
        return [job for job in self.jobs if job.state is JobState.SUCCEEDED]

    def mean_response(self) -> float:
        """Seconds, over jobs that succeeded; ``ValueError`` where none did."""
        return mean([job.response for job in self.succeeded()])


def mean(values: Sequence[float]) -> float:
    """``ValueError`` that says so where there are none."""
    if not values:
        raise ValueError("there is no mean of no jobs")
    return fmean(values)
