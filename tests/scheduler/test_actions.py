"""What users may do with their jobs, in every state."""

from collections.abc import Callable

import pytest

from koalapy.model.errors import ConflictError, KoalaError, NotFoundError
from koalapy.model.job import JobState, Priority
from koalapy.scheduler.events import JobCancelled, JobHeld, JobPriorityChanged, JobReleased
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.world import World


def queued(world: World) -> int:
    world.submit(flexible(8), run_time=1000)
    return world.submit(flexible(8))


def held(world: World) -> int:
    job = queued(world)
    world.hold(job)
    return job


def claiming(world: World) -> int:
    job = world.submit(flexible(8), run_time=1000)
    world.settle()
    return job


def starting(world: World) -> int:
    world.manual = True
    for name in world.sites:
        world.deliver(name)
    job = world.submit(flexible(8), run_time=1000)
    for name, site in world.sites.items():
        world.run_commands(name)
        site.report_claimed(site.startable()[0])
        world.deliver(name)
    return job


def running(world: World) -> int:
    job = world.submit(flexible(8), run_time=1000)
    world.advance(1)
    return job


def unknown(world: World) -> int:
    job = running(world)
    world.disconnect("south")
    world.advance(10)
    return job


STATES: dict[JobState, Callable[[World], int]] = {
    JobState.QUEUED: queued,
    JobState.HELD: held,
    JobState.CLAIMING: claiming,
    JobState.STARTING: starting,
    JobState.RUNNING: running,
    JobState.UNKNOWN: unknown,
}
IN_EVERY_STATE = pytest.mark.parametrize("state", STATES)


@IN_EVERY_STATE
def test_cancel(state: JobState) -> None:
    world = World({"north": 4, "south": 4})
    job = STATES[state](world)
    assert world.state(job) is state
    world.step([JobCancelled(job, "changed my mind")])
    world.start_automation()
    world.settle()
    done = world.job(job)
    assert (done.state, done.reason) == (JobState.CANCELLED, "changed my mind")
    assert done.ended_at == world.now
    assert world.timeline_events(job)[-1] == "cancelled"
    if state is JobState.UNKNOWN:
        world.connect("south")
    check_nothing_remains(world)
    with pytest.raises(NotFoundError):
        world.cancel(job)


@IN_EVERY_STATE
def test_only_queued_jobs_can_be_held_and_only_held_ones_released(state: JobState) -> None:
    world = World({"north": 4, "south": 4})
    job = STATES[state](world)
    before = world.job(job)
    if state is not JobState.QUEUED:
        with pytest.raises(ConflictError, match=f"job {job} is {state}: only queued jobs can be held"):
            world.step([JobHeld(job)])
    if state is not JobState.HELD:
        with pytest.raises(ConflictError, match=f"job {job} is {state}: only held jobs can be released"):
            world.step([JobReleased(job)])
    assert world.job(job) is before


def raised(job: int) -> JobPriorityChanged:
    return JobPriorityChanged(job, Priority.HIGH, "a deadline", "ada")


@IN_EVERY_STATE
def test_only_jobs_that_wait_are_given_another_priority(state: JobState) -> None:
    world = World({"north": 4, "south": 4})
    job = STATES[state](world)
    if state in (JobState.QUEUED, JobState.HELD):
        world.step([raised(job), raised(job)])
        assert world.job(job).spec.priority is Priority.HIGH
        assert world.timeline_events(job).count("priority") == 1
        return
    with pytest.raises(ConflictError, match=f"job {job} is {state}: only jobs that wait can be given another"):
        world.step([raised(job)])
    assert world.job(job).spec.priority is Priority.LOW


def test_a_job_of_another_priority_stands_where_it_would_had_it_been_submitted_so() -> None:
    world = World({"north": 4})
    world.submit(fixed(north=4), run_time=10, priority=Priority.HIGH)
    jobs = [world.submit(fixed(north=4), priority=Priority.HIGH if high else Priority.LOW) for high in (1, 0, 0, 1)]
    tries = world.queries.tries(jobs[1])
    world.step([raised(jobs[1])])
    assert [world.queries.position(job) for job in jobs] == [1, 2, 1, 3]
    assert world.queries.queues.positions(world.job(job) for job in jobs) == dict(zip(jobs, [1, 2, 1, 3], strict=True))
    assert world.queries.tries(jobs[1]) == tries
    world.step([JobPriorityChanged(jobs[0], Priority.LOW)])
    assert [world.queries.position(job) for job in jobs] == [1, 1, 2, 2]
    world.settle()
    check_nothing_remains(world)


def test_a_job_of_high_priority_takes_nodes_of_others_once_it_has_it() -> None:
    world = World({"north": 4})
    world.submit(fixed(north=4), run_time=1000)
    world.advance(5)
    job = world.submit(fixed(north=4), run_time=5)
    world.step([raised(job)])
    world.advance(5)
    assert world.state(job) in (JobState.CLAIMING, JobState.RUNNING, JobState.SUCCEEDED)


@pytest.mark.parametrize("action", [JobCancelled, JobHeld, JobReleased, raised])
def test_there_is_no_such_job(action: Callable[[int], JobCancelled]) -> None:
    world = World({"north": 4})
    with pytest.raises(NotFoundError, match="there is no unfinished job 17") as error:
        world.step([action(17)])
    assert isinstance(error.value, KoalaError)
    assert (error.value.field, error.value.value) == ("job", 17)


def test_a_held_job_waits_until_it_is_released_and_then_at_the_tail() -> None:
    world = World({"north": 4})
    world.submit(fixed(north=4), run_time=10)
    job = world.submit(fixed(north=4))
    world.step([JobHeld(job, "not today")])
    assert (world.state(job), world.job(job).reason) == (JobState.HELD, "not today")
    other = world.submit(fixed(north=4), run_time=30)
    world.advance(20)
    assert (world.state(job), world.state(other)) == (JobState.HELD, JobState.RUNNING)
    world.release(job)
    assert world.state(job) is JobState.QUEUED
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.timeline_events(job)[:4] == ["submitted", "held", "released", "placed"]


def test_a_released_job_is_tried_at_once() -> None:
    world = World({"north": 4})
    blocker = world.submit(fixed(north=4), run_time=10)
    job = world.submit(fixed(north=4))
    world.hold(job)
    world.advance(20)
    assert world.state(blocker) is JobState.SUCCEEDED
    world.release(job)
    assert world.state(job) is JobState.CLAIMING


@pytest.mark.parametrize("code", [0, 3])
def test_a_cancel_that_comes_after_the_result_changes_nothing(code: int) -> None:
    world = World({"north": 4, "south": 4}, manual=True)
    job = starting(world)
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


def test_a_cancel_while_the_job_is_on_its_way_back_to_the_queue() -> None:
    world = World({"north": 4, "south": 4}, Rules(max_restarts=5), manual=True)
    job = starting(world)
    world.sites["south"].fail_component(world.tokens(job)[1], "node lost")
    world.deliver("south")
    assert world.job(job).ending is JobState.QUEUED
    world.cancel(job)
    assert world.job(job).ending is JobState.CANCELLED
    world.cancel(job)  # and once more
    world.start_automation()
    world.settle()
    assert world.state(job) is JobState.CANCELLED
    check_nothing_remains(world)
