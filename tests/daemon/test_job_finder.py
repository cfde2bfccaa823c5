"""Searches for ended jobs, which read only jobs that can match."""

from types import SimpleNamespace
from typing import Any, cast

from koalapy.daemon.jobs.job_finder import JobFinder
from koalapy.model.identity import Identity, Role
from koalapy.model.job_search import parse_search
from koalapy.ports import JobFilter


async def test_find_jobs_by_id_reads_only_these_jobs() -> None:
    filters: list[JobFilter] = []

    async def page(job_filter: JobFilter) -> tuple[list[Any], None]:
        filters.append(job_filter)
        return [], None

    finder = JobFinder(cast("Any", SimpleNamespace(list_page=page)), cast("Any", None), lambda: 0.0)
    await finder.find_jobs(parse_search("state:over id:12,13"), Identity("root", Role.ADMIN, "token 1"))
    assert [job_filter.ids for job_filter in filters] == [(12, 13)]
