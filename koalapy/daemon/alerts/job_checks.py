"""Checks for jobs that do not get all their nodes, jobs that starve, and users that flood the queue."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from heapq import nsmallest
from itertools import islice
from shlex import quote

from sortedcontainers import SortedList

from koalapy.daemon.engine.engine import Engine
from koalapy.model.alert import Alert, AlertKind, AlertRules, Severity
from koalapy.model.job import ComponentState, Job, JobId, JobState
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list, format_nodes
from koalapy.scheduler.explain.explain import NO_PLAN, explain, find_awaited_clusters
from koalapy.system.event_loop import iterate_in_slices

SLICE = 200
"""Jobs that are checked before other tasks run."""
MAX_STUCK = 20
"""Maximum number of jobs with stuck claims that are reported, the oldest first."""
MAX_STARVING = 5
MAX_LONG_WAITS = 20
"""Maximum number of jobs with the longest waits that are examined for starvation."""


Wait = tuple[float, JobId]
"""Since when a job waits for nodes, and the job."""


class JobChecks:
    """A check of all unfinished jobs of users. Its facts about queued jobs are updated with each change.

    There may be a million queued jobs. Active jobs are at most as many as nodes, and are examined in slices.
    """

    def __init__(self, engine: Engine, rules: AlertRules) -> None:
        self._queries, self._rules = engine.queries, rules
        self._queued: dict[JobId, Wait | None] = {}
        """The queued jobs, each with its ``Wait``, None for a deferred job."""
        self._waits = SortedList()
        """The waits of all queued jobs, the longest first."""
        self._queued_by_owner = Counter[str]()
        self._active: dict[JobId, Job] = {}
        for job in self._queries.jobs():
            self.note_change(job)
        engine.subscribe(self.note_change)

    def note_change(self, job: Job, previous_state: JobState | None = None) -> None:
        """Update the facts about a job after a change."""
        del previous_state  # a restored job has none
        if job.spec.internal:
            return
        owner, wait = job.spec.owner, _wait_of(job)
        was_queued, is_queued = job.id in self._queued, job.state is JobState.QUEUED
        previous_wait: Wait | None = self._queued.get(job.id)
        if wait != previous_wait:
            if previous_wait is not None:
                self._waits.remove(previous_wait)
            if wait is not None:
                self._waits.add(wait)
        if is_queued:
            self._queued[job.id] = wait
        elif was_queued:
            del self._queued[job.id]
        if is_queued is not was_queued:
            self._queued_by_owner[owner] += 1 if is_queued else -1
            if not self._queued_by_owner[owner]:
                del self._queued_by_owner[owner]
        if job.state.is_active:
            self._active[job.id] = job
        else:
            self._active.pop(job.id, None)

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        stuck: list[tuple[float, JobId, Job]] = []
        async for jobs in iterate_in_slices(list(self._active.values()), SLICE):
            for job in jobs:
                requested_at = _requested_at(job)
                if requested_at is not None and now - requested_at >= self._rules.claim_stuck_after:
                    stuck.append((requested_at, job.id, job))
        for since, _, job in nsmallest(MAX_STUCK, stuck):
            yield self._stuck_alert(job, since, now)
        starving = 0
        for since, ident in list(islice(self._waits, MAX_LONG_WAITS)):
            if now - since < self._rules.starving_after or starving >= MAX_STARVING:
                break
            await asyncio.sleep(0)
            waiting = self._queries.job(ident)
            if waiting is None or _wait_of(waiting) != (since, ident):
                continue
            overtaking_jobs = [job for job in self._active.values() if _has_overtaken(job, waiting, since)]
            if not overtaking_jobs:
                continue
            awaited, drained = find_awaited_clusters(self._queries, waiting)
            if drained or not awaited:
                starving += 1
                yield self._starving_alert(waiting, since, overtaking_jobs, drained, now)
        for alert in self._flood_alerts(now):
            yield alert

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

    def _starving_alert(
        self, job: Job, since: float, overtaking_jobs: list[Job], drained: list[ClusterName], now: float
    ) -> Alert:
        """Return the alert for a job that waits ``since`` a time, while later ones got nodes.

        ``drained``: clusters that are drained without an end, without which the job cannot run.
        """
        later = f"{len(overtaking_jobs)} later {'job' if len(overtaking_jobs) == 1 else 'jobs'}"
        explanation = explain(self._queries, job, (), now, high_priority_allowed=False)
        cause, ways = explanation.headline, [f"it starts with {event}" for event in explanation.suffices[:1]]
        if drained:
            cause = "; ".join(
                f"it cannot run without {name}, which is drained {drain.author}"
                for name in drained
                if (drain := self._queries.grid[name].drained) is not None
            )
            ways = [f"resume it: koala clusters resume {name}" for name in drained]
        elif NO_PLAN in explanation.notes:
            ways.insert(0, "have nodes kept for it: set rules.plan_after")
        change, size = explanation.smallest_change, job.spec.request.total_size
        if change is not None and change.field and 2 * change.spec.request.total_size >= size:
            ways.append(change.text)  # a job of far fewer nodes is another one
        return Alert(
            AlertKind.JOB_STARVES,
            Severity.WARNING,
            f"job {job.id}",
            f"job {job.id} waits for {format_nodes(size)}, while {later} got some",
            cause,
            "; or ".join([*ways, "see what it waits for"]) + f": koala explain {job.id}",
            since,
            job=job.id,
            user=job.spec.owner,
        )

    def _flood_alerts(self, now: float) -> list[Alert]:
        """Return an alert for each user with too large a part of the queue. Return none if only one user has jobs."""
        queued = self._queued_by_owner
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


def _wait_of(job: Job) -> Wait | None:
    """Return since when a queued job waits for nodes; None for a deferred job and in other states."""
    if job.state is not JobState.QUEUED or job.is_deferred:
        return None
    return max(job.waits_since, (job.attempt.ended_at or 0.0) if job.attempt else 0.0), job.id


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
