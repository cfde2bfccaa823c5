"""Checks for jobs that do not get all their nodes, jobs that starve, and users that flood the queue."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice
from shlex import quote

from koalapy.model.alert import Alert, AlertKind, AlertRules, Severity
from koalapy.model.job import ComponentState, Job, JobId, JobState
from koalapy.model.wording import format_list, format_nodes
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.queries import Queries
from koalapy.system.event_loop import iterate_in_slices

SLICE = 200
"""Jobs that are checked before other tasks run."""
MAX_STUCK = 20
"""Maximum number of jobs with stuck claims that are reported, the oldest first."""
MAX_STARVING = 5
MAX_LISTED = 20
"""Maximum number of jobs that a remedy lists."""


@dataclass(slots=True)
class Survey:
    """The unfinished jobs, sorted by their possible problems."""

    stuck: list[tuple[float, Job]] = field(default_factory=list)
    """Jobs with stuck claims, with the time of their requests."""
    waiting: list[tuple[float, Job]] = field(default_factory=list)
    """Jobs that have waited so long that they may starve, with the start of their wait."""
    active: list[Job] = field(default_factory=list)
    queued: Counter[str] = field(default_factory=Counter)
    """Numbers of queued jobs by owner."""
    queued_ids: list[JobId] = field(default_factory=list)


class JobChecks:
    """A check of all unfinished jobs, in slices."""

    def __init__(self, queries: Queries, rules: AlertRules) -> None:
        self._queries, self._rules = queries, rules

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        survey = await self._survey_jobs(now)
        await asyncio.sleep(0)
        for since, job in nsmallest(MAX_STUCK, survey.stuck, key=_age_key):
            yield self._stuck_alert(job, since, now)
        await asyncio.sleep(0)
        for since, job in nsmallest(MAX_STARVING, survey.waiting, key=_age_key):
            await asyncio.sleep(0)
            if overtaking_jobs := [later_job for later_job in survey.active if _has_overtaken(later_job, job, since)]:
                yield self._starving_alert(job, since, overtaking_jobs, survey.queued_ids)
        for alert in self._flood_alerts(survey.queued, now):
            yield alert

    async def _survey_jobs(self, now: float) -> Survey:
        """Sort users' jobs for the checks in one pass; pause between slices so that other tasks run."""
        survey, rules = Survey(), self._rules
        async for jobs in iterate_in_slices(self._queries.jobs(), SLICE):
            for job in jobs:
                if job.spec.internal:
                    continue
                if job.state is JobState.QUEUED:
                    survey.queued[job.spec.owner] += 1
                    survey.queued_ids.append(job.id)
                    since = max(job.waits_since, (job.attempt.ended_at or 0.0) if job.attempt else 0.0)
                    if not job.is_deferred and now - since >= rules.starving_after:
                        survey.waiting.append((since, job))
                elif job.state.is_active:
                    survey.active.append(job)
                    requested_at = _requested_at(job)
                    if requested_at is not None and now - requested_at >= rules.claim_stuck_after:
                        survey.stuck.append((requested_at, job))
        return survey

    def _stuck_alert(self, job: Job, since: float, now: float) -> Alert:
        """Return the alert for a job that holds nodes while it waits for others ``since`` a time."""
        missing = [c for c in job.attempt.gang if c.state in _MISSING] if job.attempt else []
        clusters = sorted({component.cluster for component in missing})
        held_nodes = sum(c.size for c in job.attempt.gang if c.state is ComponentState.CLAIMED) if job.attempt else 0
        drain = (
            f"; or place no jobs there: koala clusters drain {clusters[0]} --reason 'claims hang'" if clusters else ""
        )
        return Alert(
            AlertKind.CLAIM_STUCK,
            Severity.WARNING,
            f"job {job.id}",
            f"job {job.id} does not get all of its nodes, and holds {format_nodes(held_nodes)} meanwhile",
            explain(self._queries, job, (), now).headline,
            f"cancel it, and submit it again later: koala cancel {job.id}{drain}",
            since,
            cluster=clusters[0] if clusters else "",
            job=job.id,
            user=job.spec.owner,
        )

    def _starving_alert(self, job: Job, since: float, overtaking_jobs: list[Job], queued: list[JobId]) -> Alert:
        """Return the alert for a job that waits ``since`` a time, while later ones got nodes."""
        later = f"{len(overtaking_jobs)} later {'job' if len(overtaking_jobs) == 1 else 'jobs'}"
        return Alert(
            AlertKind.JOB_STARVES,
            Severity.WARNING,
            f"job {job.id}",
            f"job {job.id} waits for {format_nodes(job.spec.request.total_size)}, while {later} got some",
            self._queries.waiting_reason(job),
            self._starvation_remedy(job, queued),
            since,
            job=job.id,
            user=job.spec.owner,
        )

    def _starvation_remedy(self, job: Job, queued: list[JobId]) -> str:
        """Return what an operator can do for a starving job: the commands to hold the ``queued`` jobs after it."""
        if self._queries.reservation == job.id:
            return f"nodes are now reserved for it; see what it waits for: koala explain {job.id}"
        later = [str(job_id) for job_id in islice((job_id for job_id in queued if job_id > job.id), MAX_LISTED + 1)]
        permanent = "" if self._queries.rules.aging else "; permanently: rules.aging true in the configuration"
        if not later:
            return f"see what it waits for: koala explain {job.id}{permanent}"
        suffix = ", and the jobs after them" if len(later) > MAX_LISTED else ""
        return f"hold the later jobs{suffix}: koala hold {' '.join(later[:MAX_LISTED])} --reason starving{permanent}"

    def _flood_alerts(self, queued: Counter[str], now: float) -> list[Alert]:
        """Return an alert for each user with too large a part of the queue. Return none if only one user has jobs."""
        total = sum(queued.values())
        listing = "koala queue --state queued -q"
        return [
            Alert(
                AlertKind.QUEUE_FLOODED,
                Severity.WARNING,
                f"user {owner}",
                f"{count} of the {total} queued jobs belong to {owner}",
                f"other users have queued jobs as well: {format_list(sorted(set(queued) - {owner}))}",
                f"hold them: koala hold $({listing} --user {quote(owner)} --limit {count}) "
                f"--reason 'too many at once'; permanently: limits.users.{owner}.queued_jobs in the configuration",
                now,
                user=owner,
            )
            for owner, count in queued.items()
            if len(queued) > 1 and count >= self._rules.flood_jobs and count >= self._rules.flood_share * total
        ]


_MISSING = (ComponentState.PLACED, ComponentState.SUBMITTED, ComponentState.WAITING)


def _age_key(waiting: tuple[float, Job]) -> tuple[float, int]:
    return waiting[0], waiting[1].id


def _requested_at(job: Job) -> float | None:
    """Return when a job in state ``CLAIMING``, which waits for its nodes, had requested them and staged its files.

    Return None for jobs in other states, and while files are missing or no nodes are requested.
    """
    attempt = job.attempt
    if job.state is not JobState.CLAIMING or attempt is None:
        return None
    gang = attempt.gang
    if any(component.awaits_files for component in gang):
        return None
    submitted = [component.submitted_at for component in gang if component.submitted_at is not None]
    staged = [component.staged_at for component in gang if component.staged_at is not None]
    return max([min(submitted), *staged]) if submitted else None


def _has_overtaken(later_job: Job, job: Job, since: float) -> bool:
    """Return whether ``later_job``, of the same priority, got nodes while ``job`` waited since a time."""
    if later_job.id < job.id or later_job.placed_at is None or later_job.placed_at < since:
        return False
    return later_job.spec.priority == job.spec.priority
