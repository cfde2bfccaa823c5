"""Mean times of jobs, as the store in memory tells them."""

from collections.abc import Iterable
from statistics import fmean

from koalapy.model.job import Job, JobState
from koalapy.ports import MeanTimes


def mean_times(over: list[Job]) -> MeanTimes:
    """Of those that ran to an end of their own."""
    ran = [
        (job, job.attempt)
        for job in over
        if job.state is not JobState.CANCELLED and job.attempt and job.attempt.barrier_at is not None
    ]

    def mean(spans: Iterable[tuple[float | None, float | None]]) -> float | None:
        lasted = [until - since for since, until in spans if since is not None and until is not None]
        return fmean(lasted) if lasted else None

    return MeanTimes(
        len(ran),
        mean((job.submitted_at, job.placed_at) for job, _ in ran),
        mean((job.submitted_at, job.started_at) for job, _ in ran),
        mean((job.placed_at, job.started_at) for job, _ in ran),
        mean((job.submitted_at, job.ended_at) for job, _ in ran),
        mean((job.first_start_estimate, attempt.start_estimate) for job, attempt in ran),
    )
