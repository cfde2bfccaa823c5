"""New jobs, and the tasks of arrays as jobs."""

from dataclasses import replace

from koalapy.model.array import ArrayFail, ArrayTasks
from koalapy.model.job import Job, JobId, JobSpec, JobState


def new_job(number: JobId, spec: JobSpec, now: float) -> Job:
    """Return a new job. The tasks of an array get the numbers after its own, by position."""
    if spec.array is None:
        return Job(number, spec, now)
    size = spec.array.size
    return Job(number, spec, now, tasks=ArrayTasks(size, ((0, size - 1),), now))


def task_of(array: Job, position: int, spec: JobSpec) -> Job:
    """Return the task at a position of an array, before it is placed. ``spec``: ``task_spec_of`` the array."""
    assert array.spec.array is not None
    return Job(
        array.id + 1 + position,
        spec,
        array.waits_since,
        JobState.HELD if array.state is JobState.HELD else JobState.QUEUED,
        queue_seq=array.queue_seq,
        refusals=array.refusals,
        array_job=array.id,
        array_index=array.spec.array.index_at(position),
    )


def task_spec_of(spec: JobSpec) -> JobSpec:
    """Return the specification of the tasks of an array. Notifications are about the whole array only."""
    return replace(
        spec, array=None, each_line=(), array_fail=ArrayFail.CONTINUE, mail_type=(), mail_user="", webhook=""
    )
