"""New jobs, and the tasks of arrays as jobs."""

from dataclasses import replace

from koalapy.model.array import ArrayFail, ArrayTasks
from koalapy.model.dependency import Clause
from koalapy.model.job import Job, JobId, JobState
from koalapy.model.job_spec import JobSpec


def new_job(number: JobId, spec: JobSpec, now: float, awaits: tuple[Clause, ...] = ()) -> Job:
    """Return a new job. The tasks of an array get the numbers after its own, by position.

    ``awaits``: the clauses of its dependencies that do not hold yet.
    """
    tasks = None if spec.array is None else ArrayTasks(spec.array.size, ((0, spec.array.size - 1),), now)
    return Job(number, spec, now, tasks=tasks, awaits=awaits)


def task_of(array: Job, position: int, spec: JobSpec) -> Job:
    """Return the task at a position of an array, before it is placed. ``spec``: ``task_spec_of`` the array."""
    assert array.spec.array is not None
    return Job(
        array.id + 1 + position,
        spec,
        array.waits_since,
        JobState.HELD if array.state is JobState.HELD else JobState.QUEUED,
        queue_seq=array.queue_seq - 1,  # a task that returns to the queue is tried before the rest of its array
        refusals=array.refusals,
        array_job=array.id,
        array_index=array.spec.array.index_at(position),
    )


def task_spec_of(spec: JobSpec) -> JobSpec:
    """Return the specification of the tasks of an array.

    Notifications, dependencies and begin are those of the whole array only.
    """
    spec = replace(spec, array=None, each_line=(), array_fail=ArrayFail.CONTINUE, after=(), begin=None)
    return replace(spec, mail_type=(), mail_user="", webhook="")
