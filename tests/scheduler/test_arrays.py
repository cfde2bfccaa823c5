"""Arrays: one entry of a queue, a job for each started task, limits, cancellations, failures and restarts."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koalapy.model.array import ArrayFail, TaskIndices
from koalapy.model.errors import ConflictError, NotFoundError, UsageError
from koalapy.model.job import JobId, JobState
from koalapy.model.job_spec import ClaimingMode, Priority
from koalapy.model.limits import Limits, LimitSettings, UserLimits
from koalapy.scheduler.effects import SubmitComponent
from koalapy.scheduler.events import JobCancelled, JobHeld
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import flexible, nonfixed
from tests.scheduler.world import World

SUCCEEDED, FAILED, CANCELLED, RUNNING, QUEUED = (
    JobState.SUCCEEDED,
    JobState.FAILED,
    JobState.CANCELLED,
    JobState.RUNNING,
    JobState.QUEUED,
)


def submit(world: World, text: str, nodes: int = 1, **options: Any) -> JobId:
    return world.submit(flexible(nodes), array=TaskIndices.parse(text), **options)


def counts(world: World, array: JobId) -> tuple[int, int, int, int, int]:
    """Return the numbers of waiting, unfinished, succeeded, failed and cancelled tasks."""
    tasks = world.job(array).tasks
    assert tasks is not None
    return tasks.waiting, tasks.live, tasks.succeeded, tasks.failed, tasks.cancelled


def started(world: World, array: JobId) -> list[int | None]:
    """Return the indices of the started tasks, in the order of their start."""
    return [job.array_index for job in world.jobs.values() if job.array_job == array]


def running_at_once(world: World, array: JobId) -> int:
    return sum(job.array_job == array and job.state is RUNNING for job in world.jobs.values())


def test_array_starts_each_index_once_and_succeeds() -> None:
    world = World({"north": 3})
    array = submit(world, "0-8:2,20", run_time=10.0)
    world.settle()
    assert counts(world, array) == (3, 3, 0, 0, 0)
    assert world.state(array) is QUEUED
    world.advance(15)
    assert counts(world, array) == (0, 3, 3, 0, 0)
    assert world.state(array) is RUNNING
    world.advance(100)
    assert world.state(array) is SUCCEEDED
    assert (world.job(array).exit_code, world.job(array).reason) == (0, "")
    assert started(world, array) == [0, 2, 4, 6, 8, 20]
    assert [job.id for job in world.jobs.values()] == [array + offset for offset in range(7)]


def test_co_allocated_tasks_run_over_clusters_within_the_limit() -> None:
    world = World({"north": 4, "south": 4})
    array = world.submit(nonfixed(3, 1), array=TaskIndices.parse("1-5%1"), run_time=10.0)
    world.settle()
    assert counts(world, array) == (4, 1, 0, 0, 0)
    assert world.queries.queued == 0
    assert world.queries.waiting_reason(world.job(array)) == "1 of its tasks run at once, as many as it allows"
    world.advance(200)
    assert world.state(array) is SUCCEEDED


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 12),
    limit=st.sampled_from([None, 1, 3]),
    queue=st.sampled_from(["scan", "head", "fcfs"]),
    claiming=st.sampled_from(ClaimingMode),
    nodes=st.integers(1, 3),
    restart_after=st.sampled_from([None, 3.0, 12.0]),
)
def test_every_index_succeeds_within_the_limit(
    size: int, limit: int | None, queue: Any, claiming: ClaimingMode, nodes: int, restart_after: float | None
) -> None:
    world = World({"north": 4, "south": 2}, Rules(queue=queue, claiming=claiming))
    array = submit(world, f"1-{size}" + (f"%{limit}" if limit else ""), nodes, run_time=5.0)
    other = world.submit(flexible(2), run_time=5.0)
    if restart_after is not None:
        world.advance(restart_after)
        world.restart()
        for name in world.sites:
            world.connect(name)
    world.advance(400)
    assert world.state(other) is SUCCEEDED
    assert world.state(array) is SUCCEEDED
    assert started(world, array) == list(range(1, size + 1))


def test_jobs_behind_an_array_start_when_it_has_reached_its_limit() -> None:
    world = World({"north": 4})
    array = submit(world, "1-100%2")
    job = world.submit(flexible(2))
    world.settle()
    assert counts(world, array)[1] == 2
    assert world.state(job) is not QUEUED


def test_tasks_are_placed_one_by_one_in_queue_order() -> None:
    world = World({"north": 2})
    first, second = submit(world, "1-3"), submit(world, "1-3")
    world.advance(12)
    assert (counts(world, first)[1:3], counts(world, second)[1:3]) == ((1, 2), (1, 0))


def test_wide_array_behind_a_narrow_one_gets_a_planned_start() -> None:
    world = World({"north": 4}, Rules(plan_after=0, scan_interval=10.0))
    narrow = submit(world, "1-1000", run_time=9.0)
    world.settle()
    wide = submit(world, "1-2", 4, run_time=9.0)
    world.advance(300)
    assert world.state(wide) is SUCCEEDED
    assert counts(world, narrow)[2] > 50


def test_failed_tasks_do_not_stop_an_array_that_continues() -> None:
    world = World({"north": 2})
    array = submit(world, "1-4", code=3, run_time=1.0)
    world.advance(60)
    assert world.state(array) is FAILED
    assert counts(world, array) == (0, 0, 0, 4, 0)
    assert (world.job(array).reason, world.job(array).exit_code) == ("4 failed", 3)


def test_first_failed_task_stops_the_array_on_request() -> None:
    world = World({"north": 2})
    array = submit(world, "5-99", code=3, run_time=1.0, array_fail=ArrayFail.STOP)
    world.advance(60)
    assert world.state(array) is FAILED
    waiting, live, succeeded, failed, cancelled = counts(world, array)
    assert (waiting, live, succeeded) == (0, 0, 0)
    assert 1 <= failed <= 2
    assert failed + cancelled == 95
    assert world.job(array).reason == f"task {array}[5] failed: the program exited with 3"
    assert len(started(world, array)) <= 3


def test_cancelling_an_array_cancels_its_waiting_and_running_tasks() -> None:
    world = World({"north": 2})
    array = submit(world, "1-1000000", run_time=100.0)
    world.settle()
    world.cancel(array)
    world.advance(10)
    assert world.state(array) is CANCELLED
    assert counts(world, array) == (0, 0, 0, 0, 1_000_000)
    assert world.queries.jobs() == []


def test_cancelling_some_indices_drops_waiting_and_ends_started_tasks() -> None:
    world = World({"north": 2})
    array = submit(world, "1-9", run_time=10.0)
    world.settle()
    world.step([JobCancelled(array, tasks=TaskIndices.parse("2-4,8"))])
    world.step([JobCancelled(array + 6)])
    world.advance(100)
    assert started(world, array) == [1, 2, 5, 7, 9]
    assert world.state(array) is CANCELLED
    assert counts(world, array)[2:] == (4, 0, 5)
    assert world.job(array).reason == "4 succeeded, 5 cancelled"


def test_cancelling_unknown_or_ended_tasks_is_refused() -> None:
    world = World({"north": 1})
    array, job = submit(world, "1-3", run_time=1.0), world.submit(flexible(1))
    world.advance(1.5)
    with pytest.raises(UsageError, match=r"its indices are 1-3"):
        world.step([JobCancelled(array, tasks=TaskIndices.parse("4-9"))])
    with pytest.raises(ConflictError, match=r"no task 1 of array 1 is left"):
        world.step([JobCancelled(array, tasks=TaskIndices.parse("1"))])
    with pytest.raises(ConflictError, match=r"is not an array"):
        world.step([JobCancelled(job, tasks=TaskIndices.parse("1"))])
    with pytest.raises(NotFoundError):
        world.step([JobCancelled(array + 1)])


def test_cancelling_every_second_index_of_a_large_array_is_refused() -> None:
    world = World({"north": 1})
    array = submit(world, "1-1000000")
    with pytest.raises(UsageError, match=r"by ranges with a step"):
        world.step([JobCancelled(array, tasks=TaskIndices.parse("1-1000000:2"))])
    with pytest.raises(ConflictError, match=r"at most 1000 are possible"):
        world.step([JobCancelled(array, tasks=TaskIndices.parse("1-9999:2"))])


def test_held_array_starts_no_task_until_it_is_released() -> None:
    world = World({"north": 1})
    array = submit(world, "1-3", run_time=10.0)
    world.settle()
    world.hold(array)
    world.advance(30)
    assert counts(world, array) == (2, 0, 1, 0, 0)
    assert world.state(array) is JobState.HELD
    world.release(array)
    world.advance(30)
    assert world.state(array) is SUCCEEDED


def test_waiting_task_can_be_cancelled_but_not_held() -> None:
    world = World({"north": 1})
    array = submit(world, "1-3")
    task = world.queries.unfinished(array + 2)
    assert task is not None
    assert (task.display_name, task.state) == (f"{array}[2]", QUEUED)
    assert world.queries.waiting_reason(task) == f"waits for its turn in array {array}"
    with pytest.raises(ConflictError, match=r"task 1\[2\] was not started"):
        world.step([JobHeld(array + 2)])
    world.cancel(array + 2)
    assert world.queries.unfinished(array + 2) is None


def test_priority_of_an_array_applies_to_its_next_tasks() -> None:
    world = World({"north": 1})
    array = submit(world, "1-3", run_time=5.0)
    world.settle()
    world.step([world.change_event(array, priority=Priority.HIGH)])
    world.advance(60)
    assert [job.spec.priority for job in world.jobs.values() if job.array_job] == ["low", "high", "high"]


def test_task_lost_with_its_node_is_retried_by_itself() -> None:
    world = World({"north": 2})
    array = submit(world, "1-2%2", run_time=20.0)
    world.advance(5)
    site = world.sites["north"]
    site.fail_component(world.tokens(array + 1)[0], "node lost")
    world.settle()
    assert counts(world, array)[1] == 2
    world.advance(100)
    assert world.state(array) is SUCCEEDED
    assert world.job(array + 1).restarts == 1


def test_tasks_that_are_never_placed_fail_with_the_array() -> None:
    world = World({"north": 2}, Rules(scan_interval=5.0))
    world.submit(flexible(2), run_time=1000.0)
    array = submit(world, "1-5", max_placement_tries=3)
    world.advance(60)
    assert world.state(array) is FAILED
    assert counts(world, array) == (0, 0, 0, 5, 0)
    assert world.job(array).reason.startswith("not placed in 3 tries")


def test_array_counts_as_one_queued_job_and_its_tasks_as_nodes() -> None:
    limits = Limits(LimitSettings(UserLimits(queued_jobs=1, nodes=2)))
    world = World({"north": 8}, limits=limits)
    array = submit(world, "1-6", owner="ann", run_time=5.0)
    world.settle()
    assert counts(world, array)[1] == 2
    world.advance(60)
    assert world.state(array) is SUCCEEDED


def test_memory_and_effects_do_not_grow_with_waiting_tasks() -> None:
    world = World({"north": 2})
    array = submit(world, "1-1000000", run_time=1.0)
    world.advance(20)
    assert len(world.queries.jobs()) == 3
    tasks = world.job(array).tasks
    assert tasks is not None
    assert len(tasks.pending) == 1


def test_rejected_task_keeps_the_next_tasks_from_the_cluster() -> None:
    world = World({"north": 4, "south": 2})
    world.sites["north"].rejection_fault = lambda _: "unsuitable"
    array = submit(world, "1-6", run_time=5.0)
    world.advance(100)
    assert world.state(array) is SUCCEEDED
    submitted = [command for command in world.sent if isinstance(command, SubmitComponent)]
    assert sum(command.cluster == "north" for command in submitted) <= 4


@pytest.mark.parametrize("fault", ["job", "unsuitable"])
def test_array_fails_with_the_first_task_that_every_cluster_rejects(fault: str) -> None:
    world = World({"north": 2})
    world.sites["north"].rejection_fault = lambda _: fault
    array = submit(world, "1-10000")
    world.advance(60)
    assert world.state(array) is FAILED
    assert counts(world, array) == (0, 0, 0, 10_000, 0)
    assert len(started(world, array)) <= 2
    assert "refused" in world.job(array).reason


def test_explanation_of_a_waiting_task_is_that_of_its_array() -> None:
    world = World({"north": 1})
    array = submit(world, "1-3%1")
    task = world.queries.unfinished(array + 2)
    assert task is not None
    explanation = explain(world.queries, task, (), world.now)
    assert explanation.job == array + 2
    assert explanation.headline.startswith(f"waits for its turn in array {array}: 1 of its tasks run at once")


def test_requeued_task_is_placed_before_the_rest_of_its_array() -> None:
    world = World({"north": 1})
    array = submit(world, "1-9", run_time=10.0)
    world.advance(3)
    world.submit(flexible(1), run_time=5.0, priority=Priority.HIGH)
    world.advance(4)
    (task,) = [job for job in world.jobs.values() if job.array_job == array]
    assert task.state is QUEUED
    world.advance(5)
    assert world.state(task.id) is RUNNING
    world.advance(200)
    assert counts(world, array) == (0, 0, 9, 0, 0)


def test_explanation_of_an_array_at_its_own_limit_offers_no_change() -> None:
    world = World({"north": 4})
    array = submit(world, "1-100%2")
    world.settle()
    explanation = explain(world.queries, world.job(array), (), world.now)
    assert explanation.state is QUEUED
    assert explanation.smallest_change is None
    assert not [note for note in explanation.notes if "there is room" in note]


def test_explanation_of_an_array_wider_than_the_grid_offers_a_smaller_size() -> None:
    world = World({"north": 4})
    for job in (submit(world, "1-3", 9), world.submit(flexible(9))):
        change = explain(world.queries, world.job(job), (), world.now).smallest_change
        assert change is not None
        assert change.text == "ask for 4 nodes"
