"""Jobs as users see them, the results of actions on them, and the errors of actions that are not possible."""

from collections.abc import Mapping
from dataclasses import dataclass

from koalapy.model.array import format_task
from koalapy.model.errors import ConflictError, KoalaError, NotFoundError, ProblemCode
from koalapy.model.job import Job, JobId, JobState, TimelineEntry
from koalapy.scheduler.queries import Queries

ExpectedStates = Mapping[JobId, JobState]
"""The states of jobs that the user saw when choosing an action."""
NO_EXPECTED_STATES: ExpectedStates = {}


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job and the reason why it waits or ended."""

    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class JobChange:
    """A job after a change, and the new lines of its timeline with their numbers, from 1."""

    record: JobRecord
    timeline: tuple[tuple[int, TimelineEntry], ...]


@dataclass(frozen=True, slots=True)
class ActionResult:
    """The result of a bulk action for one job: the job, or the error."""

    job: JobId
    record: JobRecord | None = None
    error: KoalaError | None = None


def no_job_error(job: JobId) -> NotFoundError:
    return NotFoundError(
        f"there is no job {job}", field="job", value=job, hint="see koala history", code=ProblemCode.JOB_NOT_FOUND
    )


def already_ended_error(job: Job) -> ConflictError:
    return ConflictError(f"job {job.id} is already {job.state}", field="job", value=job.id)


def wrong_state_error(job: Job, rule: str, hint: str = "") -> ConflictError:
    return ConflictError(f"job {job.id} is {job.state}: {rule}", field="job", value=job.id, hint=hint)


def array_error(array: Job, rule: str, command: str) -> ConflictError:
    """Return the error of an action on an array that is possible for one of its tasks only."""
    task = format_task(array.id, array.spec.array.index_at(0) if array.spec.array else 1)
    hint = f"name a task, as in koala {command} '{task}'"
    return ConflictError(f"job {array.id} is an array: {rule}", field="job", value=array.id, hint=hint)


def unstarted_task_error(array: Job, task: JobId) -> NotFoundError:
    """Return the error for a task that has no record, since it was cancelled or its array failed before its start."""
    assert array.spec.array is not None
    name = format_task(array.id, array.spec.array.index_at(task - array.id - 1))
    has_failed = JobState.FAILED in (array.state, array.ending)
    problem = f"was never started: array {array.id} failed" if has_failed else "was cancelled before it started"
    return NotFoundError(
        f"task {name} {problem}",
        field="job",
        value=task,
        hint=f"see koala show {array.id}",
        code=ProblemCode.JOB_NOT_FOUND,
    )


def find_waiting_job(queries: Queries, job: Job) -> Job:
    """Return a waiting job as it is now, to be changed. Raise ``ConflictError`` for another; ``job``: as it was."""
    current = queries.job(job.id)
    if current is None:
        if job.array_job is None or queries.unfinished(job.id) is None:
            raise already_ended_error(job)
        hint = f"change the tasks of its array that were not started: koala change {job.array_job}"
        raise wrong_state_error(job, "it was not started", hint)
    if current.spec.internal:
        raise wrong_state_error(current, "jobs of the daemon cannot be changed")
    if current.state.is_waiting:
        return current
    if current.tasks is not None:
        raise wrong_state_error(current, "all of its tasks were started, and only waiting ones can be changed")
    hint = f"let it run, or cancel it and submit it again: koala cancel {job.id}"
    raise wrong_state_error(current, "only jobs that wait can be changed", hint)
