"""Arrays: the next task to start, and what follows from the end of a task.

An array is one job record and one entry of a placement queue, with the shape of one task. A task becomes a separate
job when it is placed. From then on the array only counts it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sortedcontainers import SortedList

from koalapy.model.array import (
    MAX_PENDING_RANGES,
    MAX_STEPPED_INDICES,
    ArrayFail,
    IndexRange,
    Positions,
    TaskIndices,
    format_task,
    is_selected,
    join_indices,
    without_first,
    without_positions,
)
from koalapy.model.errors import ConflictError, reject
from koalapy.model.job import ArrayTasks, Job, JobId, JobState, add_refusal, task_of, task_spec_of
from koalapy.model.job_spec import JobSpec
from koalapy.scheduler.attempts.attempts import Attempts
from koalapy.scheduler.events import JobCancelled
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.state import SchedulerState


class Arrays:
    """The unfinished arrays and their started tasks."""

    def __init__(self, state: SchedulerState, attempts: Attempts, queues: PlacementQueues) -> None:
        self._ledger, self._attempts, self._queues = state.ledger, attempts, queues
        self._numbers: SortedList[JobId] = SortedList()
        """The unfinished arrays."""
        self._live: dict[JobId, set[JobId]] = {}
        """The started and unfinished tasks of each array that has any."""
        self._specs: dict[JobId, tuple[JobSpec, JobSpec]] = {}
        """The specification of an array when its last task was started, and that of the task; equal ones are shared."""

    def add(self, array: Job) -> None:
        """Add a new job if it is an array."""
        if array.tasks is not None:
            self._numbers.add(array.id)

    def restore(self, jobs: Iterable[Job]) -> None:
        """Add the arrays and tasks of an earlier daemon run."""
        for job in jobs:
            self.add(job)
            if job.array_job is not None:
                self._live.setdefault(job.array_job, set()).add(job.id)

    # Queries

    def live_tasks(self, array: JobId) -> list[JobId]:
        """Return the started and unfinished tasks of an array, by index."""
        return sorted(self._live.get(array, ()))

    def find_pending(self, task: JobId) -> tuple[Job, int] | None:
        """Return the array and the index of a task that was never started; None if there is no such task."""
        place = self._numbers.bisect_left(task) - 1
        if place < 0:
            return None
        array = self._ledger.jobs[self._numbers[place]]
        position = task - array.id - 1
        if array.tasks is None or array.spec.array is None or not array.tasks.is_pending(position):
            return None
        return array, array.spec.array.index_at(position)

    def select_pending(self, array: JobId, tasks: Sequence[JobId]) -> TaskIndices:
        """Return the indices of an array's tasks that were never started.

        Raise ``ConflictError`` if they cannot be cancelled together.
        """
        job = self._ledger.jobs[array]
        assert job.tasks is not None
        assert job.spec.array is not None
        positions = [(task - array - 1, task - array - 1) for task in sorted(tasks)]
        indices = TaskIndices(join_indices(job.spec.array.index_at(first) for first, _ in positions))
        remove_pending(array, job.tasks, indices, positions)
        return indices

    def pending_task(self, task: JobId) -> Job | None:
        """Return a task that was never started, as a job; None if there is no such task."""
        pending = self.find_pending(task)
        if pending is None:
            return None
        array, _ = pending
        return task_of(array, task - array.id - 1, self._task_spec(array))

    # Starting tasks

    def create_task(self, array: Job, now: float) -> Job:
        """Take the next task from an array that was placed, as a new job without an attempt.

        The array stays in its queue while another task may start.
        """
        tasks = array.tasks
        assert tasks is not None
        task = task_of(array, tasks.pending[0][0], self._task_spec(array))
        if array.planned_start is not None:
            task = replace(task, planned_start=array.planned_start)
        array = self._ledger.change_job(
            array,
            planned_start=None,
            tasks=replace(tasks, pending=without_first(tasks.pending), live=tasks.live + 1, waits_since=now),
            placed_at=now if array.placed_at is None else array.placed_at,
            started_at=now if array.started_at is None else array.started_at,
            placement_tries=0,
            counted_scan=self._queues[array.spec.priority].scans,
        )
        self._live.setdefault(array.id, set()).add(task.id)
        if array.may_start_task:
            self._queues.renew(array)
        else:
            self._update_state(self._queues.remove(array), now)
        self._ledger.record_event(task, now, "submitted", f"task {task.array_index} of array {array.id}")
        return task

    def _task_spec(self, array: Job) -> JobSpec:
        """Return the specification of an array's tasks. All tasks share one object."""
        cached = self._specs.get(array.id)
        if cached is None or cached[0] is not array.spec:
            cached = self._specs[array.id] = array.spec, task_spec_of(array.spec)
        return cached[1]

    # Ended tasks

    def count_ended_tasks(self, now: float) -> bool:
        """Count the tasks that have ended in their arrays, and return whether there were any.

        An array that was at its limit may then start another task. One of which a task failed may be stopped.
        """
        ended_tasks = self._ledger.ended_tasks
        had_any = bool(ended_tasks)
        while ended_tasks:
            task = ended_tasks.pop(0)
            assert task.array_job is not None
            self._live.get(task.array_job, set()).discard(task.id)
            array = self._ledger.get(task.array_job)
            if array is not None and array.tasks is not None:
                self._count_ended_task(array, array.tasks, task, now)
        return had_any

    def _count_ended_task(self, array: Job, tasks: ArrayTasks, task: Job, now: float) -> None:
        """Count a task that has ended, and stop the array if its first failed task is to do so."""
        live, has_failed = tasks.live - 1, task.state is JobState.FAILED
        match task.state:
            case JobState.SUCCEEDED:
                tasks = replace(tasks, live=live, succeeded=tasks.succeeded + 1)
            case JobState.FAILED:
                tasks = replace(tasks, live=live, failed=tasks.failed + 1)
            case _:
                tasks = replace(tasks, live=live, cancelled=tasks.cancelled + 1)
        array = self._ledger.change_job(array, tasks=tasks)
        if has_failed and tasks.failed == 1:
            reason = f"task {task.display_name} failed" + (f": {task.reason}" if task.reason else "")
            array = self._ledger.change_job(array, exit_code=task.exit_code)
            self._ledger.record_event(array, now, "task-failed", reason)
            if array.spec.array_fail is ArrayFail.STOP and array.ending is None:
                self._end(array, JobState.FAILED, reason, now)
                return
        self._update_state(array, now)

    def _update_state(self, array: Job, now: float) -> None:
        """Move an array to the state that follows from its tasks, and in or out of its queue."""
        tasks = array.tasks
        assert tasks is not None
        is_queued = self._queues.has(array)
        if is_queued and not array.may_start_task:
            array = self._queues.remove(array)
        if tasks.is_over:
            self._finish(array, tasks, now)
        elif not tasks.pending:
            if array.state is not JobState.RUNNING:
                reason = array.reason if array.ending is not None else ""
                self._ledger.change_state(array, JobState.RUNNING, now, "running", reason)
        elif array.is_in_queue and not is_queued:
            self._queues.requeue(self._ledger.change_job(array, tasks=replace(tasks, waits_since=now)))

    def _finish(self, array: Job, tasks: ArrayTasks, now: float) -> None:
        """End an array of which all tasks have ended."""
        state = JobState.FAILED if tasks.failed else JobState.CANCELLED if tasks.cancelled else JobState.SUCCEEDED
        reason = "" if state is JobState.SUCCEEDED else str(tasks)
        if array.ending is not None:
            state, reason = array.ending, array.reason
        self._specs.pop(array.id, None)
        self._live.pop(array.id, None)
        self._numbers.remove(array.id)
        code = array.exit_code if state is JobState.FAILED else 0 if state is JobState.SUCCEEDED else None
        self._ledger.change_state(array, state, now, str(state), reason, ended_at=now, ending=None, exit_code=code)

    # Ends from outside

    def give_up(self, array: Job, reason: str, now: float) -> None:
        """Fail the waiting tasks of an array that was not placed in its number of tries. Others go on."""
        tasks = array.tasks
        assert tasks is not None
        array = self._queues.remove(array)
        array = self._ledger.change_job(
            array,
            reason=reason,
            ending=JobState.FAILED,
            tasks=replace(tasks, pending=(), failed=tasks.failed + tasks.waiting),
        )
        self._ledger.record_event(array, now, "ending", reason)
        self._update_state(array, now)

    def give_up_array_of(self, job: Job, reason: str, now: float) -> None:
        """Fail the waiting tasks of a task's array, as they would be rejected for the same reason."""
        array = None if job.array_job is None else self._ledger.get(job.array_job)
        if array is not None and array.tasks is not None and array.tasks.pending:
            self.give_up(array, reason, now)

    def share_refusals(self, task: Job) -> bool:
        """Keep the waiting tasks of an array from the clusters that have rejected one; return whether that is new."""
        array = None if task.array_job is None else self._ledger.get(task.array_job)
        if array is None or array.tasks is None or not array.tasks.pending:
            return False
        refusals = array.refusals
        for refusal in task.refusals:
            refusals = add_refusal(refusals, refusal)
        if refusals == array.refusals:
            return False
        self._queues.regroup_job(self._ledger.change_job(array, refusals=refusals))
        return True

    def cancel(self, array: Job, event: JobCancelled, now: float) -> None:
        """Cancel an array, or the tasks that the event selects. Raise ``ConflictError`` if none of them is left."""
        if event.tasks is None:
            self._end(array, JobState.CANCELLED, event.reason, now, by=event.by, warn=event.warn)
            return
        tasks, indices = array.tasks, array.spec.array
        assert tasks is not None
        assert indices is not None
        positions = select_positions(array.id, indices, event.tasks)
        pending = remove_pending(array.id, tasks, event.tasks, positions)
        live = [task for task in self.live_tasks(array.id) if is_selected(task - array.id - 1, positions)]
        cancelled = tasks.waiting - sum(last - first + 1 for first, last in pending)
        if not cancelled and not live:
            raise ConflictError(
                f"no task {event.tasks} of array {array.id} is left to cancel", field="tasks", value=str(event.tasks)
            )
        if cancelled:
            array = self._ledger.change_job(
                array, tasks=replace(tasks, pending=pending, cancelled=tasks.cancelled + cancelled)
            )
            text = f"{cancelled} waiting tasks of {event.tasks}" + (f": {event.reason}" if event.reason else "")
            self._ledger.record_event(array, now, "tasks-cancelled", text, by=event.by)
            self._update_state(array, now)
        self._cancel_tasks(live, event.reason, now, by=event.by, warn=event.warn)

    def _end(self, array: Job, becomes: JobState, reason: str, now: float, *, by: str = "", warn: bool = False) -> None:
        """Cancel all unfinished tasks of an array, which then enters the state ``becomes``."""
        tasks = array.tasks
        assert tasks is not None
        live = self.live_tasks(array.id)
        if array.ending is None or tasks.pending:
            if self._queues.has(array):
                array = self._queues.remove(array)
            array = self._ledger.change_job(
                array,
                ending=becomes,
                reason=reason,
                tasks=replace(tasks, pending=(), cancelled=tasks.cancelled + tasks.waiting),
            )
            self._ledger.record_event(array, now, "ending", reason, by=by)
            self._update_state(array, now)
        self._cancel_tasks(live, reason, now, by=by, warn=warn)

    def _cancel_tasks(self, tasks: Iterable[JobId], reason: str, now: float, *, by: str, warn: bool) -> None:
        for number in tasks:
            if (task := self._ledger.get(number)) is not None:
                self._attempts.cancel(task, reason, now, by=by, warn=warn)


def select_positions(array: JobId, indices: TaskIndices, selected: TaskIndices) -> list[Positions]:
    """Return the positions of selected tasks as ranges. Raise ``UsageError`` if the array has none of them."""
    stepped = sum(index_range.size for index_range in selected.ranges if index_range.step != 1)
    if stepped > MAX_STEPPED_INDICES:
        problem = f"selects {stepped} indices by ranges with a step, and {MAX_STEPPED_INDICES} are possible"
        reject("tasks", str(selected), problem, "give ranges without a step")
    positions = list(indices.positions_of(selected))
    if not positions:
        array_indices = TaskIndices(indices.ranges)
        problem = f"is {selected}, but array {array} has no task {selected}; its indices are {array_indices}"
        reject("tasks", str(selected), problem, f"give some of these, as in {format_task(array, indices.index_at(0))}")
    return positions


def remove_pending(
    array: JobId, tasks: ArrayTasks, selected: TaskIndices, positions: Sequence[Positions]
) -> tuple[Positions, ...]:
    """Return the pending positions of an array without the selected ones.

    Raise ``ConflictError`` if they would be in too many ranges.
    """
    pending = without_positions(tasks.pending, positions)
    if len(pending) > MAX_PENDING_RANGES:
        raise ConflictError(
            f"the waiting tasks of array {array} would be in {len(pending)} ranges of indices; at most "
            f"{MAX_PENDING_RANGES} are possible",
            field="tasks",
            value=str(selected),
            hint="cancel whole ranges of indices, or the array",
        )
    return pending


def single(index: int) -> TaskIndices:
    """Return the selection of one task."""
    return TaskIndices((IndexRange(index, index),))
