"""Submit jobs, act on jobs and clusters, and read their state."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import structlog

from koalapy.daemon.engine.database import find_by_key, query
from koalapy.daemon.engine.engine import RETRY_INTERVAL_S, Engine, WorkItem
from koalapy.daemon.jobs.bulk_actions import BulkActions
from koalapy.daemon.jobs.job_records import (
    JobChange,
    JobRecord,
    already_ended_error,
    find_waiting_job,
    no_job_error,
    unstarted_task_error,
)
from koalapy.daemon.jobs.output import OutputEnd, Outputs, OutputTail, OutputText
from koalapy.daemon.jobs.submissions import ChangedMeanwhile, RelatedJobs, ResolveFiles, Submissions, list_related
from koalapy.daemon.observability.audit import describe_request
from koalapy.model.application import summarize_job
from koalapy.model.array import TaskIndices
from koalapy.model.cluster import check_drain_times
from koalapy.model.errors import ConflictError, NotFoundError, StoreUnavailable, reject
from koalapy.model.identity import Identity
from koalapy.model.job import Attempt, Job, JobId, JobState, TimelineEntry
from koalapy.model.job_search import JobSort
from koalapy.model.job_spec import JobSpec, OutputStream, Priority, describe_changes
from koalapy.model.notification import AllowedRecipients
from koalapy.model.placement import Explanation
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list, format_utc
from koalapy.scheduler.events import (
    ClusterCleared,
    ClusterDrained,
    ClusterLost,
    ClusterResumed,
    Event,
    JobCancelled,
    JobChanged,
    JobHeld,
    JobReleased,
)
from koalapy.scheduler.explain.explain import explain, explain_submission
from koalapy.scheduler.queries import Queries
from koalapy.store.records import ClusterRecord, JobFilter
from koalapy.store.sql import JobStore
from koalapy.system.event_loop import iterate_in_slices
from koalapy.validation.permissions import SubmissionRules, check_job_access, check_reason, missing_reason

log = structlog.get_logger()

ApplyChange = Callable[[JobSpec], JobSpec]
"""Returns the changed specification of a job."""

TIMELINE_PAGE_SIZE = 500
"""Lines of a timeline that one query reads for a client that follows a job."""
KEEPALIVE_INTERVAL_S = 15.0
"""Pause after which a client that follows a silent output is shown that the daemon is there."""
MAX_LINE_NUMBER = 2**31
MAX_IDS_PER_QUERY = 500
MAX_PLANNED_DRAINS = 20
"""Maximum number of planned drains of a cluster."""


class Jobs:
    """The jobs and clusters of the daemon, as users see and change them."""

    def __init__(
        self,
        engine: Engine,
        queries: Queries,
        store: JobStore,
        outputs: Outputs,
        next_number: JobId,
        describe: Callable[[str], ClusterRecord],
        resolve_files: ResolveFiles | None = None,
        rules: SubmissionRules | None = None,
        recipients: AllowedRecipients | None = None,
    ) -> None:
        """See ``Submissions`` for the last parameters."""
        self._engine, self._queries, self._store, self._outputs = engine, queries, store, outputs
        self._describe = describe
        self.submissions = Submissions(
            engine, queries, store, next_number, self.get_many, resolve_files, rules, recipients
        )
        self.rules = self.submissions.rules
        self.bulk = BulkActions(queries, self.rules, self.commit_item, self.make_record, self.get_many)

    # Submitting and acting

    async def submit(
        self, spec: JobSpec, caller: Identity, idempotency_key: str | None = None
    ) -> tuple[JobRecord, bool]:
        """Store a job and try to assign it to clusters. Return it and whether it is new.

        If the user submitted the same spec with the same key before, return that job and False. Raise
        ``ConflictError`` for the same key with another spec, ``ForbiddenError`` for what the user may not submit.
        """
        (number,), is_new = await self.submissions.submit([spec], caller, idempotency_key, is_batch=False)
        return (await self.get(number) if is_new else await self.get_owned(number, caller)), is_new

    async def commit_item(self, item: WorkItem) -> None:
        """Pass a work item to the engine and wait until it is written."""
        await self._engine.database.await_outcome(self._engine.commit(item))

    async def cancel(
        self, job: JobId, caller: Identity, reason: str, *, warn: bool = False, tasks: TaskIndices | None = None
    ) -> JobRecord:
        """Cancel a job, or only some ``tasks`` of an array.

        With ``warn`` its program gets the warning signal and grace time that the job asked for.
        """
        event = JobCancelled(job, reason or f"cancelled by {caller.user}", caller.user, warn, tasks)
        return await self._act_on_job(job, caller, event, reason, "" if tasks is None else f"tasks {tasks}")

    async def hold(self, job: JobId, caller: Identity, reason: str) -> JobRecord:
        event = JobHeld(job, reason or f"held by {caller.user}", caller.user)
        return await self._act_on_job(job, caller, event, reason)

    async def release(self, job: JobId, caller: Identity) -> JobRecord:
        return await self._act_on_job(job, caller, JobReleased(job, caller.user))

    async def change(self, job: JobId, caller: Identity, apply_change: ApplyChange, reason: str) -> JobRecord:
        """Change ``CHANGEABLE_FIELDS`` of a waiting job. ``apply_change`` returns its changed specification.

        Raise the errors of a submission, and ``ConflictError`` if the job does not wait any more.
        """

        def make_events() -> tuple[Event, ...]:
            # In the engine's loop, so that the job is neither placed nor changed in between.
            if find_waiting_job(self._queries, record.job).spec != record.job.spec:
                raise ChangedMeanwhile(f"job {job} was changed by another request")
            self._queries.admit_change(spec)
            return (JobChanged(job, spec, reason, caller.user),)

        while True:
            record = await self.get_owned(job, caller)
            spec = self._check_change(record.job, caller, apply_change, reason)
            describe_request(f"job {job}", ": ".join(filter(None, (describe_changes(record.job.spec, spec), reason))))
            with suppress(ChangedMeanwhile):
                await self.commit_item(WorkItem(prepare=make_events))
                return await self.get(job)

    def _check_change(self, job: Job, caller: Identity, apply_change: ApplyChange, reason: str) -> JobSpec:
        """Return the changed specification of a waiting job, checked like a submission."""
        check_reason(caller, [job], reason)
        spec = apply_change(find_waiting_job(self._queries, job).spec)
        is_larger = spec.request.total_size > job.spec.request.total_size
        if spec.priority is not job.spec.priority or is_larger:
            self.rules.check_priority(spec.priority, caller, "leave size and priority, or give it low priority")
        self.submissions.check_spec(spec, self._queries.limits())
        return spec

    async def explain_change(self, job: JobId, caller: Identity, apply_change: ApplyChange, reason: str) -> Explanation:
        """Return what would happen to a waiting job if it were changed now. The change is checked; nothing is
        stored."""
        record = await self.get_owned(job, caller)
        spec = self._check_change(record.job, caller, apply_change, reason or "dry run")
        self._queries.admit_change(spec)
        current, now = find_waiting_job(self._queries, record.job), self._engine.clock()
        allowed = self.rules.high_priority.is_allowed_to(caller)
        return explain_submission(self._queries, spec, now, current.awaits, job=current, high_priority_allowed=allowed)

    async def _act_on_job(
        self, job: JobId, caller: Identity, event: Event, reason: str | None = None, tasks: str = ""
    ) -> JobRecord:
        """Apply an event to the caller's unfinished job. Raise ``ConflictError`` if it has ended.

        ``reason``: the caller's reason, required for another user's job; None for an action that needs none.
        """
        record = await self.get_owned(job, caller)
        if self._queries.unfinished(job) is None:
            raise already_ended_error(record.job)
        if reason is not None:
            check_reason(caller, [record.job], reason)
            describe_request(f"job {job}", ": ".join(filter(None, (tasks, reason))))
        await self.commit_item(WorkItem(events=(event,)))
        if record.job.array_job is not None and self._queries.unfinished(job) is None:
            job = record.job.array_job  # a task that was never started has no separate record
        return await self.get(job)

    async def clear_cluster(self, cluster: ClusterName) -> ClusterRecord:
        """Forget the errors of a cluster, so that the scheduler uses it again."""
        self.get_cluster(cluster)
        await self.commit_item(WorkItem(events=(ClusterCleared(cluster),)))
        return self._describe(cluster)

    async def drain_cluster(
        self,
        cluster: ClusterName,
        caller: Identity,
        reason: str,
        *,
        requeue: bool = False,
        begin: float | None = None,
        end: float | None = None,
    ) -> ClusterRecord:
        """Place no further jobs on a cluster, from ``begin`` (seconds since the epoch; None: now) to ``end`` (None:
        until it is resumed); with ``requeue`` stop and requeue those that are there at the begin.

        Raise ``UsageError`` without a reason or with impossible times, ``ConflictError`` with too many planned drains.
        """
        self.get_cluster(cluster)
        if not reason.strip():
            raise missing_reason(f"cluster {cluster} is to be drained", "all users see it")
        check_drain_times(begin, end, self._engine.clock())
        describe_request(f"cluster {cluster}", f"requeue: {reason}" if requeue else reason)

        def make_events() -> tuple[Event, ...]:
            if begin is not None and len(self._queries.grid[cluster].planned_drains) >= MAX_PLANNED_DRAINS:
                hint = f"withdraw them: koala clusters resume {cluster} --planned"
                raise ConflictError(f"{cluster} has {MAX_PLANNED_DRAINS} planned drains, the most at a time", hint=hint)
            return (ClusterDrained(cluster, caller.user, reason, requeue, begin, end),)

        await self.commit_item(WorkItem(prepare=make_events))
        return self._describe(cluster)

    async def resume_cluster(
        self, cluster: ClusterName, *, planned: bool = False, begin: float | None = None, ordered: float | None = None
    ) -> ClusterRecord:
        """Let the scheduler use a drained cluster again, or withdraw its ``planned`` drains: with ``begin`` (seconds
        since the epoch) the drain of that minute, also with ``ordered`` the drain ordered in that second.

        Raise ``ConflictError`` without such drains or with several, ``UsageError`` for ``ordered`` without ``begin``.
        """
        self.get_cluster(cluster)
        if begin is not None:
            describe_request(detail=f"the drain planned for {format_utc(begin, self._engine.clock())}")
        elif ordered is not None:
            reject("ordered", ordered, "is given without begin", "give the begin of that drain, too (--from)")

        def make_events() -> tuple[Event, ...]:
            status = self._queries.grid[cluster]
            if (planned or begin is not None) and not status.planned_drains:
                hint = "koala clusters show NAME shows them"
                raise ConflictError(f"cluster {cluster} has no planned drains", field="planned", value=True, hint=hint)
            if not planned and begin is None and status.drained is None:
                hint = "nothing to resume; koala clusters shows the drained ones"
                if status.planned_drains:
                    hint = f"to withdraw its planned drains: koala clusters resume {cluster} --planned"
                raise ConflictError(f"cluster {cluster} is not drained", field="cluster", value=cluster, hint=hint)
            if begin is None:
                return (ClusterResumed(cluster, planned),)
            drains = [d for d in status.planned_drains if ordered is None or d.at // 1 == ordered // 1]
            in_second = [d for d in drains if d.since // 1 == begin // 1]
            matching = in_second or [d for d in drains if d.since // 60 == begin // 60]
            now = self._engine.clock()
            if not matching:
                times = format_list([format_utc(drain.since, now) for drain in status.planned_drains])
                problem = f"cluster {cluster} has no planned drain that begins then"
                raise ConflictError(problem, field="begin", value=begin, hint=f"its planned drains begin at {times}")
            if ordered is None and len(matching) > 1:
                times = format_list([f"{format_utc(d.at, now, exact=True)} {d.author}" for d in matching])
                problem = f"cluster {cluster} has {len(matching)} planned drains that begin then"
                hint = f"give the time of its order, too (--ordered): {times}"
                raise ConflictError(problem, field="ordered", value=None, hint=hint)
            return (ClusterResumed(cluster, True, matching[0].since, matching[0].at),)

        await self.commit_item(WorkItem(prepare=make_events))
        return self._describe(cluster)

    async def declare_cluster_lost(self, cluster: ClusterName, caller: Identity, reason: str) -> ClusterRecord:
        """End all components on an unreachable cluster. Raise ``ConflictError`` if its agent is connected."""
        self.get_cluster(cluster)
        describe_request(detail=reason)
        await self.commit_item(WorkItem(events=(ClusterLost(cluster, caller.user, reason),)))
        return self._describe(cluster)

    # Reading

    async def get(self, job: JobId) -> JobRecord:
        """Return a job. Raise ``NotFoundError`` if it does not exist, also for a task that will never start."""
        stored = self._queries.unfinished(job) or await find_by_key(self._store.job, job)
        if stored is not None:
            return self.make_record(stored)
        array = await query(self._store.array_of, job)
        if array is not None:
            array = self._queries.job(array.id) or array
        has_unstarted = array is not None and array.tasks is not None and array.tasks.cancelled + array.tasks.failed > 0
        raise unstarted_task_error(array, job) if array is not None and has_unstarted else no_job_error(job)

    async def list_related(self, job: Job) -> RelatedJobs:
        """Return the jobs that a job depends on, and the unfinished ones that depend on it."""
        required = [dependency.job for clause in job.spec.after for dependency in clause]
        dependents = self._queries.dependents_of(job.id)
        return list_related(job, dependents, await self.get_many([*required, *dependents]))

    async def get_owned(self, job: JobId, caller: Identity) -> JobRecord:
        """Return a job. Raise ``ForbiddenError`` if the caller may not see and change all of it."""
        record = await self.get(job)
        check_job_access(caller, record.job)
        return record

    async def list_page(
        self, job_filter: JobFilter, *, may_be_empty: bool = False
    ) -> tuple[Sequence[JobRecord], JobId | None]:
        """Return matching jobs, newest first, and the id below which the next page starts; None on the last page.

        A page that is not the last has at least one job unless it ``may_be_empty``, but may have fewer than the limit.
        """
        page = await query(self._store.page, job_filter)
        while not page.jobs and page.before is not None and not may_be_empty:
            page = await query(self._store.page, replace(job_filter, before=page.before))
        return [self.make_record(job) for job in page.jobs], page.before

    async def count(self, job_filter: JobFilter) -> tuple[int, bool]:
        """Return the number of jobs that match a filter, and whether that is all; else at least so many match."""
        return await query(self._store.count, job_filter)

    async def list_unfinished(self, job_filter: JobFilter, sort: JobSort, offset: int) -> tuple[list[JobRecord], int]:
        """Return a page of the unfinished jobs that match a filter, in an order, and the number of all of them."""
        jobs = await list_unfinished(self._queries, job_filter, sort)
        return [self.make_record(job) for job in jobs[offset : offset + job_filter.limit]], len(jobs)

    async def get_many(self, jobs: Sequence[JobId]) -> dict[JobId, Job]:
        """Return the existing jobs of these ids in their order. Ended jobs are summaries."""
        ids, queries = tuple(dict.fromkeys(jobs)), self._queries
        by_id: dict[JobId, Job] = {}
        async for batch in iterate_in_slices(ids):
            by_id |= {ident: job for ident in batch if (job := queries.unfinished(ident)) is not None}
        ended_ids = tuple(ident for ident in ids if ident not in by_id)
        for start in range(0, len(ended_ids), MAX_IDS_PER_QUERY):
            chunk, below = ended_ids[start : start + MAX_IDS_PER_QUERY], None
            while True:
                ended, below = await self.list_page(JobFilter(limit=len(chunk), ids=chunk, before=below))
                by_id |= {record.job.id: summarize_job(record.job) for record in ended}
                if below is None:
                    break
        return {ident: by_id[ident] for ident in ids if ident in by_id}

    def make_record(self, job: Job) -> JobRecord:
        """Return a job with the reason why it waits, is suspended, or ended."""
        if job.state is JobState.QUEUED:
            return JobRecord(job, self._queries.waiting_reason(job))
        return JobRecord(job, (self._queries.lrm_waits.describe(job) if job.is_placed else "") or job.reason)

    async def read_timeline(self, job: JobId) -> Sequence[TimelineEntry]:
        """Return the timeline of a job; empty if there is no such job."""
        return await query(self._store.timeline, job)

    async def list_attempts(self, job: JobId, last: int | None = None) -> tuple[JobRecord, Sequence[Attempt]]:
        """Return a job and its attempts in order: all, or the ``last`` ones."""
        stored = await query(self._store.attempts, job, last)
        # Read after the attempts, so that these are never newer than the job.
        record = await self.get(job)
        newest = record.job.attempt
        if newest is None:
            return record, stored
        if newest.generation > 1 and (not stored or stored[-1].generation < newest.generation):
            # The newest attempt has just begun: wait until the end of the previous one is written.
            await self.commit_item(WorkItem())
            stored = await query(self._store.attempts, job, last)
        attempts = [*(attempt for attempt in stored if attempt.generation < newest.generation), newest]
        return record, attempts[-last:] if last else attempts

    async def explain_job(self, job: JobId, caller: Identity) -> Explanation:
        """Return why a job waits, where it runs, or how it ended, with changes that the caller may make."""
        record = await self.get(job)
        return self.explain_read_job(record.job, await self.read_timeline(job), caller)

    def explain_read_job(self, job: Job, timeline: Sequence[TimelineEntry], caller: Identity) -> Explanation:
        """Return the same for a job that was read with its timeline."""
        now, allowed = self._engine.clock(), self.rules.high_priority.is_allowed_to(caller)
        return explain(self._queries, self._queries.job(job.id) or job, timeline, now, high_priority_allowed=allowed)

    async def explain_submission(self, spec: JobSpec, caller: Identity) -> Explanation:
        """Return what would happen to a submission now. It is checked like a real one; nothing is stored."""
        spec = await self.submissions.complete_spec(spec, caller)
        awaits = await self.submissions.find_unmet_dependencies(spec, caller)
        allowed = self.rules.high_priority.is_allowed_to(caller)
        return explain_submission(self._queries, spec, self._engine.clock(), awaits, high_priority_allowed=allowed)

    async def wait_until_final(self, job: JobId, timeout: float) -> JobRecord:
        """Return a job once it is final, at latest after ``timeout`` seconds."""
        with self._engine.watch(job) as changed, suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not (await self.get(job)).job.state.is_final and not self._engine.draining:
                    await changed.wait()
                    changed.clear()
        return await self.get(job)

    async def follow_job(self, job: JobId, line_number: int) -> AsyncIterator[JobChange]:
        """Yield a job now and at each change until it is final, with the timeline after line ``line_number``.

        The first step raises ``NotFoundError`` if the job does not exist.
        """
        previous: Job | None = None
        line_number = min(line_number, MAX_LINE_NUMBER)
        with self._engine.watch(job) as changed:
            while True:
                record = await self.get(job)
                lines = await query(self._store.timeline, job, line_number, TIMELINE_PAGE_SIZE)
                if lines or record.job != previous:
                    yield JobChange(record, tuple(enumerate(lines, line_number + 1)))
                previous = record.job
                line_number += len(lines)
                if len(lines) == TIMELINE_PAGE_SIZE:
                    continue  # there may be more
                if record.job.state.is_final or self._engine.draining:
                    return
                await changed.wait()
                changed.clear()

    async def follow_output(
        self,
        job: JobId,
        follow: bool,
        component: int | None = None,
        stream: OutputStream | None = None,
        last_lines: int | None = None,
        attempt: int = 0,
        offsets: Mapping[int, int] | None = None,
    ) -> AsyncIterator[OutputText | OutputEnd | None]:
        """Yield the output of the last attempt in order of arrival; with ``follow`` until the job is final.

        Begin at the ``offsets`` of components if ``attempt`` is still the last one, else with the ``last_lines`` of
        each component, if they are given. A line replaces output that is not stored. ``None`` shows a waiting client
        that the daemon is there. ``OutputEnd`` comes last, unless the daemon ends before. The first step raises
        ``NotFoundError`` if the job does not exist.
        """
        record = (await self.get(job)).job
        reading = self._outputs.start_reading(record, stream, offsets if attempt == record.generation else None)
        if last_lines is not None and attempt in (0, record.generation):
            async for position in reading.skip_to_last_lines(record, component, last_lines):
                yield position
        with self._engine.watch(job) as changed:
            while True:
                try:
                    record = (await self.get(job)).job
                except NotFoundError:
                    return  # removed since
                except StoreUnavailable:
                    if not follow or self._engine.draining:
                        raise
                    yield None
                    await asyncio.sleep(RETRY_INTERVAL_S)  # the job goes on, so the client keeps following it
                    continue
                if record.generation != reading.generation:
                    reading = self._outputs.start_reading(record, stream)
                is_last = not follow or record.state.is_final
                async for text in reading.read_new(record, component, to_the_end=is_last):
                    yield text
                if is_last:
                    # What may still come while the job goes on is not missing.
                    entries = await self.read_timeline(job) if record.state.is_final else ()
                    is_missing = any(e.event == "output-missing" and e.generation == record.generation for e in entries)
                    yield OutputEnd(record.state, is_complete=not is_missing)
                if is_last or self._engine.draining:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(KEEPALIVE_INTERVAL_S):
                        await changed.wait()
                if not changed.is_set():
                    yield None
                changed.clear()

    async def read_output_tails(self, job: Job, max_bytes: int) -> Sequence[OutputTail]:
        """Return the ends of the output of the last attempt's components, ``max_bytes`` in total."""
        return await self._outputs.read_tails(job, max_bytes)

    def get_cluster(self, name: ClusterName) -> ClusterRecord:
        """Return a cluster. Raise ``NotFoundError`` if it does not exist."""
        self._engine.check_cluster(name)
        return self._describe(name)

    def list_clusters(self) -> Sequence[ClusterRecord]:
        return [self._describe(cluster.name) for cluster in self._queries.grid.clusters()]

    def list_policies(self) -> Sequence[dict[str, object]]:
        """Return ``name``, ``serves`` (request types) and ``summary`` of each policy."""
        return self._queries.policies.describe_policies()


async def list_unfinished(queries: Queries, job_filter: JobFilter, sort: JobSort) -> list[Job]:
    """Return all unfinished jobs that match a filter, in an order. The filter's limit and position are not used."""
    # Positions and jobs are read in one step, so that they belong together.
    waiting = [job.id for priority in (Priority.HIGH, Priority.LOW) for job in queries.waiting(priority)]
    all_jobs = queries.jobs()
    matching: list[Job] = []
    async for chunk in iterate_in_slices(all_jobs):
        matching += [job for job in chunk if _matches(job, job_filter)]
    matching.sort(key=_sort_key(sort, {job: position for position, job in enumerate(waiting)}))
    return matching


def _matches(job: Job, job_filter: JobFilter) -> bool:
    gang = job.attempt.gang if job.attempt is not None else ()
    spec = job.spec
    return (
        job.array_job == job_filter.array
        and (not job_filter.states or job.state in job_filter.states)
        and job_filter.owner in ("", spec.owner)
        and job_filter.name in ("", spec.name)
        and job_filter.home_site in ("", spec.home_site)
        and (not job_filter.cluster or any(component.cluster == job_filter.cluster for component in gang))
        and (job_filter.since is None or job.submitted_at >= job_filter.since)
        and (job_filter.until is None or job.submitted_at < job_filter.until)
    )


def _sort_key(sort: JobSort, positions: dict[JobId, int]) -> Callable[[Job], tuple[int, int, int]]:
    """Return the sort key of a job. ``positions``: the waiting jobs in the order of the placement queues."""

    def queue_key(job: Job) -> tuple[int, int, int]:
        if job.state.is_active:
            return 0 if job.state is JobState.RUNNING else 1, 0, -job.id
        position = positions.get(job.id)
        return (3, 0, job.id) if position is None else (2, position, job.id)

    match sort:
        case JobSort.QUEUE:
            return queue_key
        case JobSort.OLDEST:
            return lambda job: (0, 0, job.id)
        case JobSort.NODES:
            return lambda job: (-job.spec.request.total_size, 0, -job.id)
        case JobSort.NEWEST:
            return lambda job: (0, 0, -job.id)
