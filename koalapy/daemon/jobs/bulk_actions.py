"""Actions on several jobs at once."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from koalapy.daemon.engine.engine import WorkItem
from koalapy.daemon.jobs.job_records import (
    NO_EXPECTED_STATES,
    ActionResult,
    ExpectedStates,
    JobRecord,
    already_ended_error,
    find_waiting_job,
    no_job_error,
    wrong_state_error,
)
from koalapy.daemon.observability.audit import describe_request
from koalapy.model.errors import ConflictError, ForbiddenError, KoalaError
from koalapy.model.identity import Identity
from koalapy.model.job import Job, JobId, JobState
from koalapy.model.job_spec import Priority
from koalapy.scheduler.events import Event, JobCancelled, JobChanged, JobHeld, JobReleased
from koalapy.scheduler.queries import Queries
from koalapy.validation.permissions import SubmissionRules, check_job_access, check_reason, may_see_all_of


class BulkActions:
    """Actions on several jobs, each with a separate result: an error of one job does not affect the others.

    A job that is already as requested is a success. With ``expected`` states, a job in another state is not changed.
    """

    def __init__(
        self,
        queries: Queries,
        rules: SubmissionRules,
        commit_item: Callable[[WorkItem], Awaitable[None]],
        make_record: Callable[[Job], JobRecord],
        get_many: Callable[[Sequence[JobId]], Awaitable[Mapping[JobId, Job]]],
    ) -> None:
        self._queries, self._rules = queries, rules
        self._commit_item, self._make_record, self._get_many = commit_item, make_record, get_many

    async def cancel_jobs(
        self,
        jobs: Sequence[JobId],
        caller: Identity,
        reason: str,
        expected: ExpectedStates = NO_EXPECTED_STATES,
        *,
        warn: bool = False,
    ) -> Sequence[ActionResult]:
        """Cancel jobs; with ``warn`` their programs get the warning signal and grace time that they asked for."""
        given_reason, reason = reason, reason or f"cancelled by {caller.user}"

        def make_event(job: Job) -> Event:
            return JobCancelled(job.id, reason, caller.user, warn)

        def cancel_pending(array: JobId, tasks: Sequence[JobId]) -> Event:
            indices = self._queries.select_pending(array, tasks)
            return JobCancelled(array, reason, caller.user, warn, indices)

        return await self._act_on_jobs(
            jobs, caller, make_event, expected, given_reason, target=JobState.CANCELLED, change_pending=cancel_pending
        )

    async def hold_jobs(
        self, jobs: Sequence[JobId], caller: Identity, reason: str, expected: ExpectedStates = NO_EXPECTED_STATES
    ) -> Sequence[ActionResult]:
        """Hold queued jobs: do not schedule them until released. Report an error for each job that cannot be held."""

        def make_event(job: Job) -> Event | None:
            if not job.state.is_waiting:
                raise wrong_state_error(job, "only queued jobs can be held", "cancel it instead")
            is_queued = job.state is JobState.QUEUED
            return JobHeld(job.id, reason or f"held by {caller.user}", caller.user) if is_queued else None

        return await self._act_on_jobs(jobs, caller, make_event, expected, reason)

    async def release_jobs(
        self, jobs: Sequence[JobId], caller: Identity, expected: ExpectedStates = NO_EXPECTED_STATES
    ) -> Sequence[ActionResult]:
        """Return held jobs to the queue. Report an error for each job that cannot be released."""

        def make_event(job: Job) -> Event | None:
            if not job.state.is_waiting:
                raise wrong_state_error(job, "only held jobs can be released")
            return JobReleased(job.id, caller.user) if job.state is JobState.HELD else None

        return await self._act_on_jobs(jobs, caller, make_event, expected)

    async def set_priority(
        self,
        jobs: Sequence[JobId],
        priority: Priority,
        caller: Identity,
        reason: str,
        expected: ExpectedStates = NO_EXPECTED_STATES,
    ) -> Sequence[ActionResult]:
        """Change the priority of waiting jobs. Raise ``ForbiddenError`` if the caller may not give this priority."""
        self._rules.check_priority(priority, caller, "leave it low")

        def make_event(job: Job) -> Event | None:
            find_waiting_job(self._queries, job)
            is_new = job.spec.priority is not priority
            return JobChanged(job.id, job.spec.with_fields(priority=priority), reason, caller.user) if is_new else None

        return await self._act_on_jobs(jobs, caller, make_event, expected)

    async def _act_on_jobs(
        self,
        jobs: Sequence[JobId],
        caller: Identity,
        make_event: Callable[[Job], Event | None],
        expected: ExpectedStates,
        reason: str | None = None,
        *,
        target: JobState | None = None,
        change_pending: Callable[[JobId, Sequence[JobId]], Event] | None = None,
    ) -> Sequence[ActionResult]:
        """Act on the caller's unfinished jobs. A job that ended in the state ``target`` is a success.

        ``reason``: the caller's reason, required for jobs of other users; None for an action that needs none.
        ``make_event`` returns None if a job is already as requested, and raises ``ConflictError`` if it cannot change.
        ``change_pending`` makes one event for all tasks of an array that were not started, or raises it too.
        """
        ids, queries = list(dict.fromkeys(jobs)), self._queries
        errors: dict[JobId, KoalaError] = {}

        def may_change(ident: JobId) -> bool:
            """Return whether the job is unfinished and the caller's. An array is cancelled with its tasks."""
            job = queries.unfinished(ident)
            if job is None or (target is JobState.CANCELLED and job.array_job in ids):
                return False
            return may_see_all_of(caller, job)

        def make_events() -> tuple[Event, ...]:
            """Return the events of jobs that may change. Keep the errors of the others in ``errors``.

            The scheduler rejects none of these events, since it would keep the effects of those before.
            """
            events: list[Event] = []
            pending: dict[JobId, list[JobId]] = {}
            changed: list[JobId] = []
            for ident in filter(may_change, ids):
                job = queries.unfinished(ident)
                assert job is not None
                try:
                    _check_state(job, expected)
                    if job.array_job is not None and queries.job(ident) is None:
                        if change_pending is None:
                            hint = f"hold, release or change array {job.array_job}"
                            raise wrong_state_error(job, "it was not started", hint)
                        pending.setdefault(job.array_job, []).append(ident)
                    elif (event := make_event(job)) is not None:
                        events.append(event)
                        changed.append(ident)
                except ConflictError as error:
                    errors[ident] = error
            for array, tasks in pending.items():
                assert change_pending is not None
                try:
                    events.append(change_pending(array, tasks))
                except ConflictError as error:
                    errors.update(dict.fromkeys(tasks, error))
                else:
                    changed += tasks
            if item.audited is not None:
                item.audited.targets = [f"job {ident}" for ident in changed]
            return tuple(events)

        unfinished = [job for ident in ids if (job := queries.unfinished(ident)) is not None]
        forbidden_ids = [str(job.id) for job in unfinished if not may_see_all_of(caller, job)]
        forbidden = f"not {caller.user}'s: {', '.join(forbidden_ids)}" if forbidden_ids else ""
        describe_request(f"jobs {', '.join(map(str, ids))}", "; ".join(filter(None, (reason, forbidden))))
        if reason is not None:
            check_reason(caller, (job for job in unfinished if may_see_all_of(caller, job)), reason)
        item = WorkItem(prepare=make_events)
        if any(map(may_change, ids)):
            await self._commit_item(item)
        jobs_after = await self._get_many(ids)
        if target is JobState.CANCELLED:  # a task that was never started has no stored record
            unstarted = [replace(job, state=target) for job in unfinished if job.array_job is not None]
            jobs_after = {job.id: job for job in unstarted} | dict(jobs_after)
        records = {ident: self._make_record(job) for ident, job in jobs_after.items()}
        return [_make_result(ident, records.get(ident), caller, errors.get(ident), target) for ident in ids]


def _check_state(job: Job, expected: ExpectedStates) -> None:
    """Raise ``ConflictError`` if a job has another state than the user saw."""
    state = expected.get(job.id, job.state)
    if state is not job.state:
        raise ConflictError(
            f"job {job.id} is {job.state} now, and was {state} when you chose it: it was not changed",
            field="job",
            value=job.id,
            hint="look at it and choose again",
        )


def _make_result(
    ident: JobId, record: JobRecord | None, caller: Identity, error: KoalaError | None, target: JobState | None
) -> ActionResult:
    """Return the outcome of an action on one job: its record, or why it failed or is hidden from the caller."""
    if record is None:
        return ActionResult(ident, error=no_job_error(ident))
    try:
        check_job_access(caller, record.job)
    except ForbiddenError as forbidden:
        error = forbidden
    if error is None and record.job.state.is_final and record.job.state is not target:
        error = already_ended_error(record.job)
    return ActionResult(ident, error=error) if error else ActionResult(ident, record)
