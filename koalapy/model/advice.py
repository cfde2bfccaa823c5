"""What is learned from jobs that ran, and what was advised for others because of it (semantics 9). Times in seconds."""

from dataclasses import dataclass
from typing import NamedTuple

from koalapy.model.application import application_of
from koalapy.model.job import Job, JobId, JobSpec, JobState
from koalapy.model.request import ClusterName

CLOCK_TOLERANCE_S = 1e-3
"""Seconds by which a moment may be off, for being worked out from others."""


class Size(NamedTuple):
    """How large a run is: nodes in all, and processes on each, where 0 stands for the clusters' own number."""

    nodes: int
    per_node: int = 0


class Run(NamedTuple):
    """A job that ran: where, and for how long from the opened barrier to its end."""

    application: str
    size: Size
    clusters: tuple[ClusterName, ...]
    seconds: float
    killed: bool = False
    """At its walltime: it would have run for longer than that."""


def run_size(spec: JobSpec) -> Size:
    return Size(spec.request.total_size, spec.processes_per_node or 0)


def completed_run_of(job: Job) -> Run | None:
    """What a job tells of its application; nothing if its program has no name.

    One that succeeded tells how long it takes, and one that was killed at its walltime that it takes longer than that.
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
    """Whether what failed was ended at its walltime: nothing else ends so late a program that has no exit code."""
    if walltime is None or launched is None or exit_code is not None:
        return False
    return ended - launched >= walltime - CLOCK_TOLERANCE_S


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a job. ``run`` is None while nothing is known of its application's run times."""

    clusters: tuple[ClusterName, ...]
    slowdown: float = 1.0
    """How many times longer it is taken to run than on one cluster of the same speed."""
    wait: float | None = 0.0
    """Until there is room; None when it is not known."""
    transfer: float = 0.0
    """Until its inputs are there, once it is placed."""
    run: float | None = None

    @property
    def response(self) -> float | None:
        """From now to its end."""
        return None if self.run is None or self.wait is None else self.wait + self.transfer + self.run


@dataclass(frozen=True, slots=True)
class Advice:
    """What a policy chose from, and what it took: ``chosen`` is a place in ``options``."""

    application: str
    options: tuple[Option, ...]
    chosen: int

    @property
    def chosen_option(self) -> Option:
        return self.options[self.chosen]


@dataclass(frozen=True, slots=True)
class AdvisedPlacement:
    """An advice that was followed when a job was placed, and what came of it; ``at`` in seconds since the epoch."""

    job: JobId
    generation: int
    at: float
    application: str
    clusters: int
    options: tuple[Option, ...]
    reason: str
    predicted: float | None = None
    """How long the program was to run, from the opened barrier to its end."""
    actual: float | None = None
    """How long it ran, once it has succeeded."""

    @property
    def error(self) -> float | None:
        """By what fraction of the actual time the prediction was too long; None while either is not known."""
        return self.predicted / self.actual - 1.0 if self.predicted is not None and self.actual else None


def record_advice(job: Job, at: float, advice: Advice, reason: str) -> AdvisedPlacement:
    """For the record of a job that has just been placed."""
    option = advice.chosen_option
    return AdvisedPlacement(
        job.id, job.generation, at, advice.application, len(option.clusters), advice.options, reason, option.run
    )
