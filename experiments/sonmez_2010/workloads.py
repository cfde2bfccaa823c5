"""Streams of jobs of one application on the DAS-3, and what is measured of them (sonmez-2010, VI-B and VI-C)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from statistics import fmean

from experiments.experiment import Value
from koalapy.model.job import JobSpec
from koalapy.model.request import ComponentRequest, FlexibleRequest, NonFixedRequest
from koalapy.scheduler.rules import QueueMode, Rules
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.outcome import JobOutcome, Outcome, mean_of_jobs

HOUR = 3600.0
DAY = 24 * HOUR
SIZES = (8, 16, 32)
"""Nodes of a job, each as often as the others; every job fits on any cluster."""


def rules(queue: QueueMode = "head") -> Rules:
    """As the paper's KOALA: nobody reserves, nobody is preempted. ``head`` is what reproduces Table IV."""
    return Rules(queue=queue, aging=False, preemption="never", low_patience=None, error_threshold=1_000_000)


def whole(size: int) -> JobSpec:
    """On one cluster, by Worst Fit."""
    return JobSpec(NonFixedRequest((ComponentRequest(size),)), ("program",), policy="worst-fit")


def split(size: int, limit: int | None = None) -> JobSpec:
    """On as few clusters as possible, by FCM, and on no more than the limit."""
    return JobSpec(FlexibleRequest(size), ("program",), policy="cluster-minimization", coallocation=limit)


def stream(
    specs: Mapping[int, JobSpec], lasts: float, utilisation: float, nodes: int, duration: float, seed: int
) -> Iterator[PlannedJob]:
    """Poisson arrivals of jobs whose sizes are drawn uniformly, and which would use that fraction of so many nodes if
    each ran on one cluster. Of one seed, all have the same sizes in the same order, however long they last."""
    draws, sizes = Random(f"sonmez-2010/{seed}"), sorted(specs)
    rate = utilisation * nodes / (fmean(sizes) * lasts)
    at = draws.expovariate(1.0) / rate
    while at < duration:
        yield PlannedJob(at, specs[draws.choice(sizes)], lasts)
        at += draws.expovariate(1.0) / rate


def measured(outcome: Outcome, duration: float) -> dict[str, Value]:
    """Of a run that arrivals came to for so long."""
    jobs = outcome.require_complete().succeeded_jobs()
    early, late = ([_queued(job) for job in arrived_between(jobs, *when)] for when in _quarters(duration))
    used = sum(job.nodes * max(0.0, min(job.ended, duration) - (job.placed or 0.0)) for job in jobs)
    return {
        "response": mean_of_jobs([job.response for job in jobs]),
        "wait": mean_of_jobs([job.waited for job in jobs]),
        "queued early": mean_of_jobs(early),
        "queued late": mean_of_jobs(late),
        "used": used / (outcome.nodes * duration),
        "co-allocated": mean_of_jobs([float(len(job.gang) > 1) for job in jobs]),
    }


def arrived_between(jobs: Iterable[JobOutcome], begin: float, end: float) -> list[JobOutcome]:
    return [job for job in jobs if begin <= job.planned.arrives_at < end]


def _quarters(duration: float) -> Sequence[tuple[float, float]]:
    """The second one, when the grid has filled, and the last."""
    return (duration / 4, duration / 2), (duration * 3 / 4, duration)


def _queued(job: JobOutcome) -> float:
    assert job.placed is not None, "who succeeded was placed"
    return job.placed - job.planned.arrives_at
