"""Search unfinished and ended jobs, a page at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from math import ceil

from koalapy.daemon.jobs.jobs import Jobs
from koalapy.model.errors import ForbiddenError
from koalapy.model.identity import Identity, Role
from koalapy.model.job import FINAL_STATES, Job, JobId
from koalapy.model.job_search import JobSearch
from koalapy.scheduler.queries import Queries
from koalapy.store.records import JobFilter
from koalapy.system.event_loop import iterate_in_slices
from koalapy.validation.permissions import may_see_all_of

AT_ONCE = 350
"""Ended jobs that one query reads."""
MAX_LOOKED_AT = 800
"""The most ended jobs that are loaded for one page: a job takes a tenth of a millisecond. Few terms need it, since the
database checks the others."""


@dataclass(frozen=True, slots=True)
class FoundJobs:
    """A page of matching jobs, newest first."""

    jobs: Sequence[Job]
    next_below: JobId | None
    """The id below which the next page starts; None on the last page."""


class JobFinder:
    """The search of jobs. A job of another user is only found by its public fields."""

    def __init__(self, jobs: Jobs, queries: Queries, clock: Callable[[], float]) -> None:
        self._jobs, self._queries, self._clock = jobs, queries, clock

    async def find_jobs(
        self, search: JobSearch, caller: Identity, *, below: JobId | None = None, limit: int = 100
    ) -> FoundJobs:
        """Return one page. Raise ``ForbiddenError`` for a search for another user's jobs by owner."""
        is_meant = self._make_test(search, caller)
        unfinished = await self._find_unfinished(search, is_meant, below)
        # Older ended jobs cannot be on this page.
        first = nlargest(limit + 1, (job.id for job in unfinished))[-1] if len(unfinished) > limit else 1
        ended, horizon = await self._find_ended(search, caller, is_meant, below, limit, first)
        unfinished_ids = {job.id for job in unfinished}
        jobs = [job for job in (*unfinished, *ended) if horizon is None or job.id >= horizon]
        jobs = [job for job in jobs if not (job.state in FINAL_STATES and job.id in unfinished_ids)]
        jobs.sort(key=lambda job: -job.id)
        next_below = jobs[limit - 1].id if len(jobs) > limit else horizon
        return FoundJobs(jobs[:limit], next_below)

    async def find_unfinished(self, search: JobSearch, caller: Identity) -> list[Job]:
        """Return all unfinished jobs that match, in no particular order. Raise ``ForbiddenError`` as ``find_jobs``."""
        return await self._find_unfinished(search, self._make_test(search, caller), None)

    def _make_test(self, search: JobSearch, caller: Identity) -> Callable[[Job], bool]:
        """Return whether a job matches as far as the caller may see it. Raise ``ForbiddenError`` for an owner."""
        owner = search.single_value("user")
        if owner not in ("", caller.user) and not caller.has_role(Role.OPERATOR):
            raise ForbiddenError(
                f"user is {owner}, and you are {caller.user}",
                field="q",
                value=f"user:{owner}",
                hint="leave it out: others' jobs are listed without their names",
            )
        now, sees_all = self._clock(), caller.has_role(Role.OPERATOR)
        if not search.terms:
            return lambda job: job.array_job is None and job.state in search.states

        def is_meant(job: Job) -> bool:
            if owner not in ("", job.spec.owner) or (job.array_job is not None and not search.finds_tasks):
                return False
            return search.matches(job, now, include_private=sees_all or may_see_all_of(caller, job))

        return is_meant

    async def _find_unfinished(
        self, search: JobSearch, is_meant: Callable[[Job], bool], below: JobId | None
    ) -> list[Job]:
        """Return the unfinished jobs that match, with ids under ``below``. Let other tasks run in between."""
        if search.states <= FINAL_STATES:
            return []
        jobs: list[Job] = []
        async for chunk in iterate_in_slices(self._queries.jobs()):
            jobs += [job for job in chunk if (below is None or job.id < below) and is_meant(job)]
        return jobs

    async def _find_ended(
        self,
        search: JobSearch,
        caller: Identity,
        is_meant: Callable[[Job], bool],
        below: JobId | None,
        limit: int,
        first: JobId,
    ) -> tuple[list[Job], JobId | None]:
        """Return ended jobs, from ``first`` on, and the id down to which all were examined; None if all were."""
        states = search.states & FINAL_STATES
        if not states:
            return [], None
        # Private terms find only the caller's own jobs, unless the caller is an operator.
        is_private = any(not term.is_public for term in search.terms)
        owner = search.single_value("user") or (
            caller.user if is_private and not caller.has_role(Role.OPERATOR) else ""
        )
        ended_since, ended_until = search.end_range(self._clock())
        job_filter = JobFilter(
            tuple(sorted(states)),
            owner,
            search.single_value("name"),
            search.single_value("cluster"),
            search.single_value("home"),
            below,
            limit + 1,
            application=search.single_value("app"),
            priority=search.single_value("priority"),
            min_restarts=search.minimum("restarts"),
            max_restarts=search.maximum("restarts"),
            min_size=search.minimum("size"),
            max_size=search.maximum("size"),
            ids=search.ids,
            first=first,
            array=search.array,
            ended_since=ended_since,
            ended_until=ended_until,
            texts=search.stored_texts,
        )
        jobs: list[Job] = []
        examined = 0
        while True:
            records, next_below = await self._jobs.list_page(job_filter, may_be_empty=True)
            examined += len(records)
            jobs += [record.job for record in records if is_meant(record.job)]
            # The database has examined as many jobs as it may for a page, too, if it returns fewer than requested.
            is_over = next_below is None or len(records) < job_filter.limit
            if is_over or len(jobs) > limit or examined >= MAX_LOOKED_AT:
                return jobs, next_below
            # About as many as are still missing, if matching jobs are as frequent as before.
            missing = ceil(1.2 * (limit + 1 - len(jobs)) * examined / len(jobs)) if jobs else AT_ONCE
            job_filter = replace(job_filter, before=next_below, limit=min(AT_ONCE, missing))
