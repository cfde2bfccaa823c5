"""What is done to many jobs at once: in one transaction, each by itself, and each once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.daemon.observability.audit import about
from koalapy.model.errors import ConflictError, ForbiddenError, KoalaError, NotFoundError, ProblemCode
from koalapy.model.identity import Identity
from koalapy.model.job import Job, JobId, JobState, Priority
from koalapy.scheduler.events import Event, JobCancelled, JobHeld, JobPriorityChanged, JobReleased
from koalapy.validation.permissions import SubmissionRules, check_is_theirs, may_see_all_of

if TYPE_CHECKING:
    from koalapy.daemon.jobs.jobs import JobRecord, Jobs

Shown = Mapping[JobId, JobState]
"""The states in which jobs were when somebody decided what to do with them."""
NOTHING_SHOWN: Shown = {}


@dataclass(frozen=True, slots=True)
class ActionResult:
    """What became of one of several jobs that were acted on together: the job as it is, or what stood against it."""

    job: JobId
    record: "JobRecord | None" = None
    error: KoalaError | None = None


@dataclass(frozen=True, slots=True)
class _Action:
    """``event``: what is to be done to a job that is not over, None where it is as it should be already; it raises
    ``ConflictError`` for one to which it cannot be done."""

    event: Callable[[Job], Event | None]
    is_done: Callable[[Job], bool]
    """Whether a job that is over is as it should be."""


class BulkActions:
    """What stands against one job keeps no other from it; one that is as it should be is told as such.

    With ``shown`` nothing is done to a job that is in another state than it was shown in: who decided did not know.
    """

    def __init__(self, jobs: "Jobs", engine: Engine, rules: SubmissionRules) -> None:
        self._jobs, self._engine, self._rules = jobs, engine, rules

    async def cancel(
        self, jobs: Sequence[JobId], by: Identity, reason: str, shown: Shown = NOTHING_SHOWN, *, warn: bool = False
    ) -> Sequence[ActionResult]:
        """With ``warn`` their programs have the grace that they asked for."""
        why = reason or f"cancelled by {by.user}"
        action = _Action(
            lambda job: JobCancelled(job.id, why, by.user, warn), lambda job: job.state is JobState.CANCELLED
        )
        return await self._act(jobs, by, action, shown)

    async def hold(
        self, jobs: Sequence[JobId], by: Identity, reason: str, shown: Shown = NOTHING_SHOWN
    ) -> Sequence[ActionResult]:
        why = reason or f"held by {by.user}"

        def event(job: Job) -> Event | None:
            if not job.state.waits:
                raise _wrong_state(job, "only queued jobs can be held", "cancel it instead")
            return JobHeld(job.id, why, by.user) if job.state is JobState.QUEUED else None

        return await self._act(jobs, by, _Action(event, _never), shown)

    async def release(
        self, jobs: Sequence[JobId], by: Identity, shown: Shown = NOTHING_SHOWN
    ) -> Sequence[ActionResult]:
        def event(job: Job) -> Event | None:
            if not job.state.waits:
                raise _wrong_state(job, "only held jobs can be released")
            return JobReleased(job.id, by.user) if job.state is JobState.HELD else None

        return await self._act(jobs, by, _Action(event, _never), shown)

    async def set_priority(
        self, jobs: Sequence[JobId], priority: Priority, by: Identity, reason: str, shown: Shown = NOTHING_SHOWN
    ) -> Sequence[ActionResult]:
        """Raise ``ForbiddenError`` if the caller may not give jobs this priority."""
        self._rules.check_priority(priority, by, "leave it low")

        def event(job: Job) -> Event | None:
            if not job.state.waits:
                raise _wrong_state(job, "only jobs that wait can be given another priority")
            is_new = job.spec.priority is not priority
            return JobPriorityChanged(job.id, priority, reason, by.user) if is_new else None

        return await self._act(jobs, by, _Action(event, _never), shown)

    async def _act(self, jobs: Sequence[JobId], by: Identity, action: _Action, shown: Shown) -> Sequence[ActionResult]:
        wanted = list(dict.fromkeys(jobs))
        queries = self._engine.queries
        refused: dict[JobId, KoalaError] = {}

        def is_theirs(job: JobId) -> bool:
            known = queries.job(job)
            return known is not None and may_see_all_of(by, known)

        def prepare() -> tuple[Event, ...]:
            events = []
            for ident in wanted:
                job = queries.job(ident)
                if job is None or not may_see_all_of(by, job):
                    continue
                try:
                    _check_is_as_shown(job, shown)
                    event = action.event(job)
                except ConflictError as error:
                    refused[ident] = error
                else:
                    events += [event] if event is not None else []
            return tuple(events)

        others = [str(job) for job in wanted if queries.job(job) is not None and not is_theirs(job)]
        about(f"jobs {', '.join(map(str, wanted))}", f"not {by.user}'s: {', '.join(others)}" if others else "")
        if any(is_theirs(job) for job in wanted):
            await self._jobs.commit(WorkItem(prepare=prepare))
        known = {ident: self._jobs.record(job) for ident, job in (await self._jobs.several(wanted)).items()}
        return [_result(job, known.get(job), by, refused.get(job), action) for job in wanted]


def no_job(job: JobId) -> NotFoundError:
    return NotFoundError(
        f"there is no job {job}", field="job", value=job, hint="see koala queue --all", code=ProblemCode.JOB_NOT_FOUND
    )


def over_already(job: Job) -> ConflictError:
    return ConflictError(f"job {job.id} is {job.state} already", field="job", value=job.id)


def _never(_: Job) -> bool:
    return False


def _wrong_state(job: Job, said: str, hint: str = "") -> ConflictError:
    return ConflictError(f"job {job.id} is {job.state}: {said}", field="job", value=job.id, hint=hint)


def _check_is_as_shown(job: Job, shown: Shown) -> None:
    before = shown.get(job.id, job.state)
    if before is not job.state:
        raise ConflictError(
            f"job {job.id} was {before} when it was chosen, and is {job.state} now: nothing was done to it",
            field="job",
            value=job.id,
            hint="look at it again",
        )


def _result(
    job: JobId, now: "JobRecord | None", by: Identity, refused: KoalaError | None, action: _Action
) -> ActionResult:
    error = refused
    if now is None:
        return ActionResult(job, error=no_job(job))
    try:
        check_is_theirs(by, now.job)
    except ForbiddenError as forbidden:
        error = forbidden
    if error is None and now.job.state.is_final and not action.is_done(now.job):
        error = over_already(now.job)
    return ActionResult(job, error=error) if error else ActionResult(job, now)
