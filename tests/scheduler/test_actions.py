"""User actions on jobs in every state: cancel, hold, release and change of priority."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from koalapy.model.array import TaskIndices
from koalapy.model.dependency import Dependency
from koalapy.model.errors import ConflictError, KoalaError, NotFoundError
from koalapy.model.job import JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.scheduler.events import JobCancelled, JobChanged, JobHeld, JobReleased
from koalapy.scheduler.rules import QueueMode, Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.world import World


def submit_queued_job(world: World) -> int:
    world.submit(flexible(8), run_time=1000)
    return world.submit(flexible(8))


def submit_held_job(world: World) -> int:
    job = submit_queued_job(world)
    world.hold(job)
    return job


def submit_claiming_job(world: World) -> int:
    job = world.submit(flexible(8), run_time=1000)
    world.settle()
    return job


def submit_starting_job(world: World) -> int:
    world.manual = True
    for name in world.sites:
        world.deliver(name)
    job = world.submit(flexible(8), run_time=1000)
    for name, site in world.sites.items():
        world.run_commands(name)
        site.report_claimed(site.startable()[0])
        world.deliver(name)
    return job


def submit_running_job(world: World) -> int:
    job = world.submit(flexible(8), run_time=1000)
    world.advance(1)
    return job


def submit_unknown_job(world: World) -> int:
    job = submit_running_job(world)
    world.disconnect("south")
    world.advance(10)
    return job


STATES: dict[JobState, Callable[[World], int]] = {
    JobState.QUEUED: submit_queued_job,
    JobState.HELD: submit_held_job,
    JobState.CLAIMING: submit_claiming_job,
    JobState.STARTING: submit_starting_job,
    JobState.RUNNING: submit_running_job,
    JobState.UNKNOWN: submit_unknown_job,
}
IN_EVERY_STATE = pytest.mark.parametrize("state", STATES)


@IN_EVERY_STATE
def test_cancel_job_in_any_state_ends_cancelled(state: JobState) -> None:
    world = World({"north": 4, "south": 4})
    job = STATES[state](world)
    assert world.state(job) is state
    world.step([JobCancelled(job, "changed my mind")])
    world.start_automation()
    world.settle()
    cancelled = world.job(job)
    assert (cancelled.state, cancelled.reason) == (JobState.CANCELLED, "changed my mind")
    assert cancelled.ended_at == world.now
    assert world.timeline_events(job)[-1] == "cancelled"
    if state is JobState.UNKNOWN:
        world.connect("south")
    check_nothing_remains(world)
    with pytest.raises(NotFoundError):
        world.cancel(job)


@IN_EVERY_STATE
def test_hold_and_release_in_wrong_state_are_rejected(state: JobState) -> None:
    world = World({"north": 4, "south": 4})
    job = STATES[state](world)
    old_job = world.job(job)
    if state is not JobState.QUEUED:
        with pytest.raises(ConflictError, match=f"job {job} is {state}: only queued jobs can be held"):
            world.step([JobHeld(job)])
    if state is not JobState.HELD:
        with pytest.raises(ConflictError, match=f"job {job} is {state}: only held jobs can be released"):
            world.step([JobReleased(job)])
    assert world.job(job) is old_job


def raise_priority(world: World, job: int) -> JobChanged:
    return JobChanged(job, replace(world.job(job).spec, priority=Priority.HIGH), "a deadline", "ada")


@IN_EVERY_STATE
def test_priority_change_of_started_job_is_rejected(state: JobState) -> None:
    world = World({"north": 4, "south": 4})
    job = STATES[state](world)
    if state in (JobState.QUEUED, JobState.HELD):
        world.step([raise_priority(world, job), raise_priority(world, job)])
        assert world.job(job).spec.priority is Priority.HIGH
        assert world.timeline_events(job).count("changed") == 1
        return
    with pytest.raises(ConflictError, match=f"job {job} is {state}: only jobs that wait can be changed"):
        world.step([raise_priority(world, job)])
    assert world.job(job).spec.priority is Priority.LOW


def test_priority_change_moves_job_to_its_submission_position() -> None:
    world = World({"north": 4})
    world.submit(fixed(north=4), run_time=10, priority=Priority.HIGH)
    jobs = [world.submit(fixed(north=4), priority=Priority.HIGH if high else Priority.LOW) for high in (1, 0, 0, 1)]
    tries = world.queries.tries(jobs[1])
    world.step([raise_priority(world, jobs[1])])
    assert [world.queries.position(job) for job in jobs] == [1, 2, 1, 3]
    assert world.queries.queues.positions(world.job(job) for job in jobs) == dict(zip(jobs, [1, 2, 1, 3], strict=True))
    assert world.queries.tries(jobs[1]) == tries
    world.step([world.change_event(jobs[0], priority=Priority.LOW)])
    assert [world.queries.position(job) for job in jobs] == [1, 1, 2, 2]
    world.settle()
    check_nothing_remains(world)


def test_priority_raised_job_preempts_running_job() -> None:
    world = World({"north": 4})
    world.submit(fixed(north=4), run_time=1000)
    world.advance(5)
    job = world.submit(fixed(north=4), run_time=5)
    world.step([raise_priority(world, job)])
    world.advance(5)
    assert world.state(job) in (JobState.CLAIMING, JobState.RUNNING, JobState.SUCCEEDED)


def change_nothing(job: int) -> JobChanged:
    return JobChanged(job, JobSpec(fixed(north=4), ("program",)))


@pytest.mark.parametrize("action", [JobCancelled, JobHeld, JobReleased, change_nothing])
def test_action_on_unknown_job_raises_not_found(action: Callable[[int], JobCancelled]) -> None:
    world = World({"north": 4})
    with pytest.raises(NotFoundError, match="there is no unfinished job 17") as error:
        world.step([action(17)])
    assert isinstance(error.value, KoalaError)
    assert (error.value.field, error.value.value) == ("job", 17)


def test_hold_released_job_queues_at_tail() -> None:
    world = World({"north": 4})
    world.submit(fixed(north=4), run_time=10)
    job = world.submit(fixed(north=4))
    world.step([JobHeld(job, "not today")])
    assert (world.state(job), world.job(job).reason) == (JobState.HELD, "not today")
    next_job = world.submit(fixed(north=4), run_time=30)
    world.advance(20)
    assert (world.state(job), world.state(next_job)) == (JobState.HELD, JobState.RUNNING)
    world.release(job)
    assert world.state(job) is JobState.QUEUED
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.timeline_events(job)[:4] == ["submitted", "held", "released", "placed"]


def test_release_idle_cluster_starts_job_at_once() -> None:
    world = World({"north": 4})
    blocker = world.submit(fixed(north=4), run_time=10)
    job = world.submit(fixed(north=4))
    world.hold(job)
    world.advance(20)
    assert world.state(blocker) is JobState.SUCCEEDED
    world.release(job)
    assert world.state(job) is JobState.CLAIMING


@pytest.mark.parametrize("code", [0, 3])
def test_cancel_after_program_exit_keeps_result(code: int) -> None:
    world = World({"north": 4, "south": 4}, manual=True)
    job = submit_starting_job(world)
    for name in world.sites:
        world.run_commands(name)
    for token in world.tokens(job):
        world.site_of(token).exit_program(token, code)
    for name in world.sites:
        world.deliver(name)
    world.cancel(job)
    world.start_automation()
    world.advance(10)
    assert world.state(job) is (JobState.FAILED if code else JobState.SUCCEEDED)
    assert world.job(job).exit_code == code


def test_cancel_while_requeueing_cancels_job() -> None:
    world = World({"north": 4, "south": 4}, Rules(max_restarts=5), manual=True)
    job = submit_starting_job(world)
    world.sites["south"].fail_component(world.tokens(job)[1], "node lost")
    world.deliver("south")
    assert world.job(job).ending is JobState.QUEUED
    world.cancel(job)
    assert world.job(job).ending is JobState.CANCELLED
    world.cancel(job)  # a second cancel changes nothing
    world.start_automation()
    world.settle()
    assert world.state(job) is JobState.CANCELLED
    check_nothing_remains(world)


def test_changed_job_keeps_its_place_and_tries_and_is_tried_at_once() -> None:
    world = World({"north": 4}, Rules(queue="fcfs"))
    world.submit(fixed(north=2), run_time=1000)
    world.advance(1)
    first, second = world.submit(fixed(north=4)), world.submit(fixed(north=2), run_time=5)
    world.advance(100)
    tries = world.queries.tries(first)
    world.change(second, request=fixed(north=1))
    assert (world.state(second), world.queries.position(second)) == (JobState.QUEUED, 2), "it does not pass the first"
    world.change(first, request=fixed(north=3))
    assert (world.queries.position(first), world.queries.tries(first)) == (1, tries)
    assert world.reasons(first, "changed") == ["request fixed north:4 to fixed north:3"]
    world.change(first, request=fixed(north=2))
    assert world.state(first).is_active
    world.settle()
    check_nothing_remains(world)


@pytest.mark.parametrize("queue", ["scan", "head", "fcfs"])
def test_change_of_held_or_deferred_job_waits_for_its_release(queue: QueueMode) -> None:
    world = World({"north": 4}, Rules(queue=queue))
    held, running = world.submit(fixed(north=4), begin=1e6), world.submit(fixed(north=1), run_time=50)
    deferred = world.submit(fixed(north=4), after=((Dependency(running),),))
    world.hold(held)
    for job in (held, deferred):
        world.change(job, request=fixed(north=3))
        assert world.queries.position(job) is None
    assert (world.state(held), world.state(deferred)) == (JobState.HELD, JobState.QUEUED)
    world.advance(100)
    assert world.state(deferred) in (JobState.RUNNING, JobState.SUCCEEDED)
    assert world.job(deferred).attempt is not None
    assert sum(component.size for component in world.job(deferred).attempt.components) == 3  # type: ignore[union-attr]
    assert world.state(held) is JobState.HELD


def test_change_of_array_leaves_started_tasks_as_they_are() -> None:
    world = World({"north": 4})
    array = world.submit(fixed(north=3), array=TaskIndices.parse("1-3"), run_time=50)
    world.advance(1)
    assert world.state(array + 1).is_active
    world.change(array, request=fixed(north=1))
    assert [world.job(array + task).spec.request for task in (1, 2)] == [fixed(north=3), fixed(north=1)]
    assert world.state(array + 2).is_active
    world.advance(200)
    assert world.state(array) is JobState.SUCCEEDED
