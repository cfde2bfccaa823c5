"""Searches for ended jobs, which read only jobs that can match."""

from types import SimpleNamespace
from typing import Any, cast

from koalapy.daemon.jobs.job_finder import JobFinder
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Job, JobState
from koalapy.model.job_search import parse_search
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.ports import JobFilter

SPEC = JobSpec(FlexibleRequest(1), ("true",))


async def test_find_jobs_by_id_reads_only_these_jobs() -> None:
    filters: list[JobFilter] = []

    async def page(job_filter: JobFilter) -> tuple[list[Any], None]:
        filters.append(job_filter)
        return [], None

    finder = JobFinder(cast("Any", SimpleNamespace(list_page=page)), cast("Any", None), lambda: 0.0)
    await finder.find_jobs(parse_search("state:over id:12,13"), Identity("root", Role.ADMIN, "token 1"))
    assert [job_filter.ids for job_filter in filters] == [(12, 13)]


async def test_find_jobs_with_enough_unfinished_jobs_reads_no_older_ended_jobs() -> None:
    filters: list[JobFilter] = []

    async def page(job_filter: JobFilter) -> tuple[list[Any], None]:
        filters.append(job_filter)
        return [SimpleNamespace(job=Job(28, SPEC, 0.0, JobState.SUCCEEDED))], None

    queries = SimpleNamespace(jobs=lambda: [Job(ident, SPEC, 0.0) for ident in (*range(20, 28), 29, 30)])
    finder = JobFinder(cast("Any", SimpleNamespace(list_page=page)), cast("Any", queries), lambda: 0.0)
    root = Identity("root", Role.ADMIN, "token 1")
    found = await finder.find_jobs(parse_search("state:any"), root, limit=4)
    assert filters[0].first == 25, "the fifth newest"
    assert ([job.id for job in found.jobs], found.next_below) == ([30, 29, 28, 27], 27)
    await finder.find_jobs(parse_search("state:any"), root, limit=10)
    assert filters[1].first == 1
