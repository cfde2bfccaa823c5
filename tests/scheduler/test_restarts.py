"""The pauses between a job's restarts: trouble that is over in a while does not use up all tries."""

import pytest

from koalapy.model.job import Job, JobState
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed
from tests.scheduler.test_failures import break_component
from tests.scheduler.world import World

RULES = Rules(error_threshold=1000, restart_pause=4, restart_pause_max=20, max_restarts=None)


def failing(world: World, times: int = 2, **spec: object) -> Job:
    """A job of one node on north whose attempts have failed that often."""
    ident = world.submit(fixed(north=1), run_time=1000, **spec)  # type: ignore[arg-type]
    for _ in range(times):
        fail_again(world, ident)
    return world.job(ident)


def fail_again(world: World, ident: int) -> None:
    """Wait until a job is tried again, and let that fail, too."""
    while not world.job(ident).state.is_active:
        world.advance(1)
    break_component(world, world.tokens(ident)[-1])


def test_the_first_restart_comes_at_once_and_pauses_double_up_to_the_longest() -> None:
    world = World({"north": 4}, RULES)
    ident = world.submit(fixed(north=1), run_time=1000)
    pauses = []
    for _ in range(6):
        fail_again(world, ident)
        retry_at = world.job(ident).retry_at
        pauses.append(0 if retry_at is None else retry_at - world.now)
        assert world.state(ident) is (JobState.CLAIMING if retry_at is None else JobState.QUEUED)
    assert pauses == [0, 4, 8, 16, 20, 20]
    said = "infrastructure-failure: north: node lost"
    assert world.reasons(ident, "requeued")[:3] == [
        f"{said} (restart 1)",
        f"{said} (restart 2, next try after 4 s)",
        f"{said} (restart 3, next try after 8 s)",
    ]


def test_a_job_that_pauses_comes_back_by_itself_and_runs() -> None:
    world = World({"north": 4}, RULES)
    job = failing(world)
    world.advance(3)
    assert world.state(job.id) is JobState.QUEUED
    world.advance(2)
    assert (world.state(job.id), world.job(job.id).retry_at) == (JobState.RUNNING, None)
    world.advance(1000)
    assert world.state(job.id) is JobState.SUCCEEDED
    check_nothing_remains(world)


@pytest.mark.parametrize("queue", ["scan", "head", "fcfs"])
def test_others_pass_a_job_that_pauses(queue: str) -> None:
    world = World({"north": 1}, Rules(queue=queue, error_threshold=1000, restart_pause=50))  # type: ignore[arg-type]
    job = failing(world)
    other = world.submit(fixed(north=1), run_time=10)
    world.advance(1)
    assert world.state(other) is JobState.RUNNING
    assert world.queries.position(job.id) is None
    assert world.queries.queued == 1
    world.advance(50)
    assert world.state(job.id) is JobState.RUNNING


def test_why_it_waits_is_told() -> None:
    world = World({"north": 4}, RULES, now=1_763_750_000.0)
    job = failing(world, times=3)
    assert world.queries.waiting_reason(job) == "is tried again at 18:33:32, after 3 failed attempts"
    found = explain(world.queries, job, world.timeline, world.now)
    assert found.headline == "is tried again at 18:33:32, after 3 failed attempts"
    assert found.position is None
    other = world.submit(fixed(north=4), run_time=1)
    world.advance(0.5)
    assert world.state(other) is JobState.RUNNING


def test_a_hold_and_a_release_end_the_pause() -> None:
    world = World({"north": 4}, Rules(error_threshold=1000, restart_pause=50))
    job = failing(world)
    world.hold(job.id)
    assert (world.state(job.id), world.job(job.id).retry_at) == (JobState.HELD, None)
    world.advance(100)
    assert world.state(job.id) is JobState.HELD
    world.release(job.id)
    world.advance(1)
    assert world.state(job.id) is JobState.RUNNING


def test_a_job_is_cancelled_while_it_pauses_or_ends() -> None:
    world = World({"north": 4}, RULES)
    job = failing(world)
    world.cancel(job.id)
    assert (world.state(job.id), world.job(job.id).retry_at) == (JobState.CANCELLED, None)
    assert world.queries.queued == 0
    ending = failing(world, times=1)
    world.settle()
    world.site_of(world.tokens(ending.id)[-1]).fail_component(world.tokens(ending.id)[-1], "node lost")
    world.deliver("north")
    assert world.job(ending.id).ending is JobState.QUEUED
    assert world.job(ending.id).retry_at is not None
    world.cancel(ending.id)
    world.settle()
    world.advance(60)
    assert (world.state(ending.id), world.job(ending.id).retry_at) == (JobState.CANCELLED, None)
    check_nothing_remains(world)


@pytest.mark.parametrize(("away", "state"), [(1, JobState.QUEUED), (100, JobState.RUNNING)])
def test_a_pause_goes_on_over_a_restart_of_the_daemon(away: float, state: JobState) -> None:
    world = World({"north": 4}, RULES)
    job = failing(world)
    world.now += away
    world.restart()
    world.connect("north")
    world.advance(1)
    assert world.state(job.id) is state
    world.advance(RULES.restart_pause)
    assert world.state(job.id) is JobState.RUNNING


def test_an_end_that_takes_longer_than_the_pause_is_followed_at_once() -> None:
    world = World({"north": 4, "south": 4}, RULES)
    ident = world.submit(fixed(north=1, south=1), run_time=1000)
    fail_again(world, ident)
    world.advance(1)
    broken, other = world.tokens(ident)
    world.manual = True
    world.site_of(broken).fail_component(broken, "node lost")
    world.site_of(broken).end_component(broken)
    world.deliver("north")
    assert world.job(ident).retry_at == world.now + 4
    world.now += 10
    world.step()
    assert world.job(ident).ending is JobState.QUEUED, "the other component has not ended"
    world.start_automation()
    world.settle()
    assert world.job(ident).retry_at is None
    assert world.state(ident) is JobState.CLAIMING
    assert world.tokens(ident) != [broken, other]


def test_exit_codes_that_are_tried_again_pause_too() -> None:
    world = World({"north": 4}, RULES)
    ident = world.submit(fixed(north=1), code=75, retry_on_exit=(75,), max_restarts=3, run_time=5)
    world.advance(60)
    assert (world.state(ident), world.job(ident).restarts) == (JobState.FAILED, 3)
    assert world.job(ident).ended_at == pytest.approx(4 * 5 + 4 + 8, abs=4)
