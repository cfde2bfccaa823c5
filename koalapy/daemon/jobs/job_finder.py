"""Search unfinished and ended jobs, a page at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from koalapy.daemon.jobs.jobs import Jobs
from koalapy.model.errors import ForbiddenError
from koalapy.model.identity import Identity, Role
from koalapy.model.job import FINAL_STATES, Job, JobId
from koalapy.model.job_search import JobSearch
from koalapy.ports import JobFilter
from koalapy.scheduler.queries import Queries
from koalapy.system.event_loop import iterate_in_slices
from koalapy.validation.permissions import may_see_all_of

AT_ONCE = 500
"""Ended jobs that one query reads."""
MAX_LOOKED_AT = 5000
"""The most ended jobs that are examined for one page."""


@dataclass(frozen=True, slots=True)
class FoundJobs:
    """A page of matching jobs, newest first."""

    jobs: Sequence[Job]
    before: JobId | None
    """The id below which the next page starts; None on the last page."""
    unfinished: int
    """The number of matching unfinished jobs from this page on."""


class JobFinder:
    """The search of jobs. A job of another user is only found by its public fields."""

    def __init__(self, jobs: Jobs, queries: Queries, clock: Callable[[], float]) -> None:
        self._jobs, self._queries, self._clock = jobs, queries, clock

    async def find(
        self, search: JobSearch, by: Identity, *, before: JobId | None = None, limit: int = 100
    ) -> FoundJobs:
        """Return one page. Raise ``ForbiddenError`` for a search for another user's jobs by owner."""
        owner = search.single_value("user")
        if owner not in ("", by.user) and not by.has_role(Role.OPERATOR):
            raise ForbiddenError(
                f"user is {owner}, and you are {by.user}",
                field="q",
                value=f"user:{owner}",
                hint="leave it out: others' jobs are listed without their names",
            )
        now, sees_all = self._clock(), by.has_role(Role.OPERATOR)

        def is_meant(job: Job) -> bool:
            return search.matches(job, now, include_private=sees_all or may_see_all_of(by, job))

        unfinished = await self._unfinished(search, is_meant, before)
        over, horizon = await self._over(search, by, is_meant, before, limit)
        known = {job.id for job in unfinished}
        both = [job for job in (*unfinished, *over) if horizon is None or job.id >= horizon]
        both = [job for job in both if not (job.state in FINAL_STATES and job.id in known)]
        both.sort(key=lambda job: -job.id)
        following = both[limit - 1].id if len(both) > limit else horizon
        return FoundJobs(both[:limit], following, len(unfinished))

    async def _unfinished(self, search: JobSearch, is_meant: Callable[[Job], bool], before: JobId | None) -> list[Job]:
        if search.states <= FINAL_STATES:
            return []
        found: list[Job] = []
        async for some in iterate_in_slices(self._queries.jobs()):
            found += [job for job in some if (before is None or job.id < before) and is_meant(job)]
        return found

    async def _over(
        self, search: JobSearch, by: Identity, is_meant: Callable[[Job], bool], before: JobId | None, limit: int
    ) -> tuple[list[Job], JobId | None]:
        """Return ended jobs and the id down to which all were examined; None if no more exist."""
        states = search.states & FINAL_STATES
        if not states:
            return [], None
        # Private terms find only the caller's own jobs, unless the caller is an operator.
        is_private = any(not word.is_public for word in search.words)
        owner = search.single_value("user") or (by.user if is_private and not by.has_role(Role.OPERATOR) else "")
        which = JobFilter(
            tuple(sorted(states)),
            owner,
            search.single_value("name"),
            search.single_value("cluster"),
            search.single_value("home"),
            before,
            limit + 1,
            application=search.single_value("app"),
            priority=search.single_value("priority"),
            min_restarts=search.minimum("restarts"),
            max_restarts=search.maximum("restarts"),
            ids=search.ids,
        )
        found: list[Job] = []
        looked_at = 0
        while True:
            records, following = await self._jobs.list_page(which)
            looked_at += len(records)
            found += [record.job for record in records if is_meant(record.job)]
            if following is None or len(found) > limit or looked_at >= MAX_LOOKED_AT:
                return found, following
            which = replace(which, before=following, limit=AT_ONCE)
