"""What may be wrong with jobs: claims that stand still, jobs that starve, a user who floods the queue."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice
from shlex import quote

from koalapy.model.alert import Alert, AlertKind, AlertRules, Severity
from koalapy.model.job import Attempt, ComponentState, Job, JobId, JobState
from koalapy.model.wording import format_list, format_nodes
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.queries import Queries
from koalapy.system.event_loop import iterate_in_slices

SLICE = 200
"""Jobs that are looked at before others go on."""
MAX_TOLD = 20
"""Jobs of one kind of trouble that are told, the oldest."""
MAX_STARVING = 5
MAX_HELD = 50
"""Jobs that one remedy names."""


@dataclass(slots=True)
class Survey:
    """What one look at all jobs that are not over has found."""

    stuck: list[tuple[float, Job]] = field(default_factory=list)
    """Since when, and which."""
    waiting: list[tuple[float, Job]] = field(default_factory=list)
    """Those that have waited for so long that they may starve."""
    active: list[Job] = field(default_factory=list)
    queued: Counter[str] = field(default_factory=Counter)
    """By owner."""
    queued_ids: list[JobId] = field(default_factory=list)


class JobChecks:
    """Looks at the jobs that are not over, some at a time."""

    def __init__(self, queries: Queries, rules: AlertRules) -> None:
        self._queries, self._rules = queries, rules

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        survey = await self._survey(now)
        await asyncio.sleep(0)
        for since, job in nsmallest(MAX_TOLD, survey.stuck, key=_age):
            yield self._stuck(job, since, now)
        await asyncio.sleep(0)
        for since, job in nsmallest(MAX_STARVING, survey.waiting, key=_age):
            await asyncio.sleep(0)
            if overtook := [other for other in survey.active if _overtakes(other, job, since)]:
                yield self._starves(job, since, overtook, survey.queued_ids)
        for alert in self._flood(survey.queued, now):
            yield alert

    async def _survey(self, now: float) -> Survey:
        survey, rules = Survey(), self._rules
        async for some in iterate_in_slices(self._queries.jobs(), SLICE):
            for job in some:
                if job.spec.internal:
                    continue
                if job.state is JobState.QUEUED:
                    survey.queued[job.spec.owner] += 1
                    survey.queued_ids.append(job.id)
                    since = max(job.submitted_at, (job.attempt.ended_at or 0.0) if job.attempt else 0.0)
                    if now - since >= rules.starving_after:
                        survey.waiting.append((since, job))
                elif job.state.is_active:
                    survey.active.append(job)
                    asked = _asked_at(job)
                    if asked is not None and now - asked >= rules.claim_stuck_after:
                        survey.stuck.append((asked, job))
        return survey

    def _stuck(self, job: Job, since: float, now: float) -> Alert:
        missing = [c for c in job.attempt.gang if c.state in _MISSING] if job.attempt else []
        where = sorted({component.cluster for component in missing})
        why = explain(self._queries, job, (), now).headline
        drain = f"; or keep jobs from there: koala clusters drain {where[0]}" if where else ""
        return Alert(
            AlertKind.CLAIM_STUCK,
            Severity.WARNING,
            f"job {job.id}",
            f"job {job.id} asks for its nodes in vain, and holds {format_nodes(_held(job.attempt))} meanwhile",
            why,
            f"end it, and submit it again later: koala cancel {job.id}{drain}",
            since,
            cluster=where[0] if where else "",
            job=job.id,
            user=job.spec.owner,
        )

    def _starves(self, job: Job, since: float, overtook: list[Job], queued: list[JobId]) -> Alert:
        queries = self._queries
        later = f"{len(overtook)} {'job that came' if len(overtook) == 1 else 'jobs that came'} later"
        return Alert(
            AlertKind.JOB_STARVES,
            Severity.WARNING,
            f"job {job.id}",
            f"job {job.id} waits for {format_nodes(job.spec.request.total_size)}, while {later} got some",
            queries.waiting_reason(job),
            self._let_it_start(job, queued),
            since,
            job=job.id,
            user=job.spec.owner,
        )

    def _let_it_start(self, job: Job, queued: list[JobId]) -> str:
        """What helps a job that starves."""
        if self._queries.reservation == job.id:
            return f"nodes are kept for it from now on; what it waits for: koala explain {job.id}"
        younger = [str(other) for other in islice((other for other in queued if other > job.id), MAX_HELD + 1)]
        for_ever = "" if self._queries.rules.aging else "; for ever: rules.aging true in the configuration"
        if not younger:
            return f"see what it waits for: koala explain {job.id}{for_ever}"
        more = " and those after them" if len(younger) > MAX_HELD else ""
        return f"let those that came later wait: koala hold {' '.join(younger[:MAX_HELD])}{more}{for_ever}"

    def _flood(self, queued: Counter[str], now: float) -> list[Alert]:
        total = sum(queued.values())
        listing = "koala queue --state queued -q"
        return [
            Alert(
                AlertKind.QUEUE_FLOODED,
                Severity.WARNING,
                f"user {owner}",
                f"{count} of the {total} jobs that wait are {owner}'s",
                f"{len(queued) - 1} others wait as well: {format_list(sorted(set(queued) - {owner}))}",
                f"hold them: koala hold $({listing} --user {quote(owner)} --limit {count}); for ever: "
                f"limits.users.{owner}.queued_jobs in the configuration",
                now,
                user=owner,
            )
            for owner, count in queued.items()
            if len(queued) > 1 and count >= self._rules.flood_jobs and count >= self._rules.flood_share * total
        ]


_MISSING = (ComponentState.PLACED, ComponentState.SUBMITTED, ComponentState.WAITING)


def _age(waiting: tuple[float, Job]) -> tuple[float, int]:
    return waiting[0], waiting[1].id


def _asked_at(job: Job) -> float | None:
    """Since when a job has asked for nodes that it does not have; None of one that does not, or awaits files."""
    attempt = job.attempt
    if job.state is not JobState.CLAIMING or attempt is None:
        return None
    gang = attempt.gang
    if any(component.awaits_files for component in gang):
        return None
    asked = [c.submitted_at for c in gang if c.submitted_at is not None]
    there = [c.staged_at for c in gang if c.staged_at is not None]
    return max([min(asked), *there]) if asked else None


def _held(attempt: Attempt | None) -> int:
    """Nodes that an attempt has, while it waits for others."""
    return sum(c.size for c in attempt.gang if c.state is ComponentState.CLAIMED) if attempt else 0


def _overtakes(other: Job, job: Job, since: float) -> bool:
    """Whether a job that came later, and is of no higher priority, was given nodes while another waited."""
    if other.id < job.id or other.placed_at is None or other.placed_at < since:
        return False
    return other.spec.priority == job.spec.priority
