"""Generate streams of jobs of one application on the DAS-3 and summarise their results (sonmez-2010, VI-B and C)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from statistics import fmean

from experiments.experiment import Value
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ComponentRequest, FlexibleRequest, NonFixedRequest
from koalapy.scheduler.rules import QueueMode, Rules
from koalapy.simulation.jobs import JobOutcome, Outcome, PlannedJob, mean_of_jobs

HOUR = 3600.0
DAY = 24 * HOUR
SIZES = (8, 16, 32)
"""Nodes of a job, with equal probabilities; every size fits on any cluster."""


def paper_rules(queue: QueueMode = "head") -> Rules:
    """Return the rules of the paper's KOALA: no reservations, no preemption. The mode ``head`` reproduces Table IV."""
    return Rules(queue=queue, plan_after=None, keeps_for_restart=False, preemption="never", error_threshold=1_000_000)


def request_one_cluster(size: int) -> JobSpec:
    """Request one cluster, chosen by Worst Fit."""
    return JobSpec(NonFixedRequest((ComponentRequest(size),)), ("program",), policy="worst-fit")


def request_few_clusters(size: int, limit: int | None = None) -> JobSpec:
    """Request as few clusters as possible, by FCM, and at most ``limit``."""
    return JobSpec(FlexibleRequest(size), ("program",), policy="cluster-minimization", coallocation=limit)


def generate_stream(
    specs: Mapping[int, JobSpec], lasts: float, utilisation: float, nodes: int, duration: float, seed: int
) -> Iterator[PlannedJob]:
    """Yield Poisson arrivals of jobs with uniformly drawn sizes.

    The jobs would use the fraction ``utilisation`` of ``nodes`` if each ran on one cluster. With the same seed, the
    sizes and their order do not depend on ``lasts``.
    """
    draws, sizes = Random(f"sonmez-2010/{seed}"), sorted(specs)
    rate = utilisation * nodes / (fmean(sizes) * lasts)
    arrival = draws.expovariate(1.0) / rate
    while arrival < duration:
        yield PlannedJob(arrival, specs[draws.choice(sizes)], lasts)
        arrival += draws.expovariate(1.0) / rate


def summarise_outcome(outcome: Outcome, duration: float) -> dict[str, Value]:
    """Summarise a run with arrivals during the first ``duration`` seconds."""
    jobs = outcome.require_complete().succeeded_jobs()
    early, late = ([_queue_time(job) for job in arrived_between(jobs, *when)] for when in _list_quarters(duration))
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


def _list_quarters(duration: float) -> Sequence[tuple[float, float]]:
    """Return the second quarter, when the grid has filled, and the last."""
    return (duration / 4, duration / 2), (duration * 3 / 4, duration)


def _queue_time(job: JobOutcome) -> float:
    assert job.placed is not None, "who succeeded was placed"
    return job.placed - job.planned.arrives_at
