"""Run times learned from jobs, and placement advice derived from them (semantics 9). Times are in seconds."""

from dataclasses import dataclass
from typing import NamedTuple

from koalapy.model.application import application_of
from koalapy.model.job import Job, JobId, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ClusterName

CLOCK_TOLERANCE_S = 1e-3
"""Rounding error of a time that is the difference of other times."""


class Size(NamedTuple):
    """The number of nodes of a run and of processes on each node; 0 processes: the default of the clusters."""

    nodes: int
    per_node: int = 0


class Run(NamedTuple):
    """A job that ran, with its clusters and its run time in seconds.

    The run time begins when the barrier opens, which holds the program until all nodes are ready.
    """

    application: str
    size: Size
    clusters: tuple[ClusterName, ...]
    seconds: float
    killed: bool = False
    """Whether the job was killed at its walltime, so that its full run time is longer."""


def run_size(spec: JobSpec) -> Size:
    """Return the size of the run that a job asks for."""
    return Size(spec.request.total_size, spec.processes_per_node or 0)


def completed_run_of(job: Job) -> Run | None:
    """Return the run of a job that succeeded or was killed at its walltime; else None.

    Also return None if its program has no application name.
    """
    attempt = job.attempt
    if attempt is None or attempt.barrier_at is None or attempt.ended_at is None:
        return None
    killed = job.state is JobState.FAILED and was_killed(
        job.spec.walltime, attempt.launched_at, attempt.ended_at, attempt.exit_code
    )
    application = application_of(job.spec)
    if not application or not (killed or job.state is JobState.SUCCEEDED):
        return None
    clusters = tuple(sorted({component.cluster for component in attempt.gang}))
    seconds = max(0.0, attempt.ended_at - attempt.barrier_at)
    return Run(application, run_size(job.spec), clusters, seconds, killed)


def was_killed(walltime: float | None, launched: float | None, ended: float, exit_code: int | None) -> bool:
    """Return whether a failed program was killed at its walltime: it has no exit code and ran at least that long."""
    if walltime is None or launched is None or exit_code is not None:
        return False
    return ended - launched >= walltime - CLOCK_TOLERANCE_S


@dataclass(frozen=True, slots=True)
class Option:
    """A set of clusters to run a job on, and its expected times in seconds."""

    clusters: tuple[ClusterName, ...]
    slowdown: float = 1.0
    """Expected run time relative to one cluster of the same speed."""
    wait: float | None = 0.0
    """Time until enough nodes are idle; None: not known."""
    transfer: float = 0.0
    """Time from the placement until the input files have arrived."""
    run: float | None = None
    """Expected run time; None until a run time of the application is known."""

    @property
    def response(self) -> float | None:
        """Return the expected time from now to the end of the job; None if its wait or run time is not known."""
        return None if self.run is None or self.wait is None else self.wait + self.transfer + self.run


@dataclass(frozen=True, slots=True)
class Advice:
    """The options that a policy compared; ``chosen`` is the index of the chosen one."""

    application: str
    options: tuple[Option, ...]
    chosen: int

    @property
    def chosen_option(self) -> Option:
        return self.options[self.chosen]


@dataclass(frozen=True, slots=True)
class AdvisedPlacement:
    """A placement by advice, with its predicted and actual run time; ``at`` in seconds since the epoch."""

    job: JobId
    generation: int
    at: float
    application: str
    clusters: int
    options: tuple[Option, ...]
    reason: str
    predicted: float | None = None
    """Predicted run time from the opened barrier to the end of the program."""
    actual: float | None = None
    """Actual run time; None until the job has succeeded."""

    @property
    def error(self) -> float | None:
        """Return the prediction error as a fraction of the actual run time; None until both times are known."""
        return self.predicted / self.actual - 1.0 if self.predicted is not None and self.actual else None


def record_advice(job: Job, timestamp: float, advice: Advice, reason: str) -> AdvisedPlacement:
    """Return the record of the advice by which a job has just been placed."""
    option = advice.chosen_option
    return AdvisedPlacement(
        job.id, job.generation, timestamp, advice.application, len(option.clusters), advice.options, reason, option.run
    )
