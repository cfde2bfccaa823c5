"""The orders of unfinished jobs, and their filters."""

from dataclasses import replace
from typing import Any, cast

import pytest

from koalapy.daemon.jobs.jobs import list_unfinished
from koalapy.model.job import Attempt, Component, Job, JobState
from koalapy.model.job_search import JobSort
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import FlexibleRequest
from koalapy.scheduler.queries import Queries
from koalapy.store.records import JobFilter


def make_job(ident: int, state: JobState, size: int = 1, owner: str = "ada", cluster: str = "") -> Job:
    job = Job(ident, JobSpec(FlexibleRequest(size), ("true",), owner=owner), 10.0 * ident, state)
    return replace(job, attempt=Attempt(1, (Component(0, cluster, size),), 1.0), generation=1) if cluster else job


JOBS = [
    make_job(1, JobState.RUNNING, 4, cluster="north"),
    make_job(2, JobState.QUEUED, 9),
    make_job(3, JobState.CLAIMING, cluster="south"),
    make_job(4, JobState.HELD, owner="bob"),
    make_job(5, JobState.QUEUED, owner="bob"),
    make_job(6, JobState.RUNNING, cluster="north"),
    make_job(7, JobState.QUEUED),
    replace(make_job(8, JobState.QUEUED), retry_at=99.0),
    replace(make_job(9, JobState.RUNNING), array_job=3, array_index=1),
]
QUEUES = {Priority.HIGH: [7], Priority.LOW: [5, 2]}


class FakeQueries:
    def jobs(self) -> list[Job]:
        return JOBS

    def waiting(self, priority: Priority) -> list[Job]:
        return [job for ident in QUEUES[priority] for job in JOBS if job.id == ident]


async def ids_of(job_filter: JobFilter, sort: JobSort = JobSort.QUEUE) -> list[int]:
    return [job.id for job in await list_unfinished(cast(Queries, FakeQueries()), job_filter, sort)]


@pytest.mark.parametrize(
    ("sort", "ids"),
    [
        (JobSort.QUEUE, [6, 1, 3, 7, 5, 2, 4, 8]),
        (JobSort.NEWEST, [8, 7, 6, 5, 4, 3, 2, 1]),
        (JobSort.OLDEST, [1, 2, 3, 4, 5, 6, 7, 8]),
        (JobSort.NODES, [2, 1, 8, 7, 6, 5, 4, 3]),
    ],
)
async def test_unfinished_jobs_are_sorted(sort: JobSort, ids: list[int]) -> None:
    assert await ids_of(JobFilter(), sort) == ids


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"owner": "bob"}, [5, 4]),
        ({"states": ("queued", "held")}, [7, 5, 2, 4, 8]),
        ({"cluster": "north"}, [6, 1]),
        ({"since": 30.0, "until": 60.0}, [3, 5, 4]),
        ({"array": 3}, [9]),
    ],
)
async def test_unfinished_jobs_are_filtered(fields: dict[str, Any], ids: list[int]) -> None:
    assert await ids_of(JobFilter(**fields)) == ids
