"""Pauses between the restarts of a job."""

from collections.abc import Callable
from typing import Any

import pytest

from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.state import Deadline
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed
from tests.scheduler.test_failures import break_component
from tests.scheduler.world import World

RULES = Rules(error_threshold=1000, restart_pause=4, restart_pause_max=20, max_restarts=None)


def create_failing_job(world: World, times: int = 2, **spec: object) -> Job:
    """Submit a job of one node on north and let its first attempts fail."""
    job_id = world.submit(fixed(north=1), run_time=1000, **spec)  # type: ignore[arg-type]
    for _ in range(times):
        fail_again(world, job_id)
    return world.job(job_id)


def fail_again(world: World, job_id: int) -> None:
    """Wait for the next attempt and let it fail."""
    while not world.job(job_id).state.is_active:
        world.advance(1)
    break_component(world, world.tokens(job_id)[-1])


def test_restart_pauses_double_up_to_maximum() -> None:
    world = World({"north": 4}, RULES)
    job_id = world.submit(fixed(north=1), run_time=1000)
    pauses = []
    for _ in range(6):
        fail_again(world, job_id)
        retry_at = world.job(job_id).retry_at
        pauses.append(0 if retry_at is None else retry_at - world.now)
        assert world.state(job_id) is (JobState.CLAIMING if retry_at is None else JobState.QUEUED)
    assert pauses == [0, 4, 8, 16, 20, 20]
    reason = "infrastructure-failure: north: node lost"
    assert world.reasons(job_id, "requeued")[:3] == [
        f"{reason} (restart 1)",
        f"{reason} (restart 2, next try after 4 s)",
        f"{reason} (restart 3, next try after 8 s)",
    ]


def test_restart_pause_ends_and_job_runs() -> None:
    world = World({"north": 4}, RULES)
    job = create_failing_job(world)
    world.advance(3)
    assert world.state(job.id) is JobState.QUEUED
    world.advance(2)
    assert (world.state(job.id), world.job(job.id).retry_at) == (JobState.RUNNING, None)
    world.advance(1000)
    assert world.state(job.id) is JobState.SUCCEEDED
    check_nothing_remains(world)


@pytest.mark.parametrize("queue", ["scan", "head", "fcfs"])
def test_restart_paused_job_is_passed_by_others(queue: str) -> None:
    world = World({"north": 1}, Rules(queue=queue, error_threshold=1000, restart_pause=50))  # type: ignore[arg-type]
    job = create_failing_job(world)
    other_job = world.submit(fixed(north=1), run_time=10)
    world.advance(1)
    assert world.state(other_job) is JobState.RUNNING
    assert world.queries.position(job.id) is None
    assert world.queries.queued == 1
    world.advance(50)
    assert world.state(job.id) is JobState.RUNNING


def test_waiting_reason_of_paused_job_names_time() -> None:
    world = World({"north": 4}, RULES, now=1_763_750_000.0)
    job = create_failing_job(world, times=3)
    assert world.queries.waiting_reason(job) == "is tried again at 18:33:32, after 3 failed attempts"
    explanation = explain(world.queries, job, world.timeline, world.now)
    assert explanation.headline == "is tried again at 18:33:32, after 3 failed attempts"
    assert explanation.position is None
    other_job = world.submit(fixed(north=4), run_time=1)
    world.advance(0.5)
    assert world.state(other_job) is JobState.RUNNING


def test_restart_pause_ends_by_hold_and_release() -> None:
    world = World({"north": 4}, Rules(error_threshold=1000, restart_pause=50))
    job = create_failing_job(world)
    world.hold(job.id)
    assert (world.state(job.id), world.job(job.id).retry_at) == (JobState.HELD, None)
    world.advance(100)
    assert world.state(job.id) is JobState.HELD
    world.release(job.id)
    world.advance(1)
    assert world.state(job.id) is JobState.RUNNING


def test_restart_paused_job_can_be_cancelled() -> None:
    world = World({"north": 4}, RULES)
    job = create_failing_job(world)
    world.cancel(job.id)
    assert (world.state(job.id), world.job(job.id).retry_at) == (JobState.CANCELLED, None)
    assert world.queries.queued == 0
    ending = create_failing_job(world, times=1)
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


@pytest.mark.parametrize(("stopped_s", "state"), [(1, JobState.QUEUED), (100, JobState.RUNNING)])
def test_restart_pause_continues_after_daemon_restart(stopped_s: float, state: JobState) -> None:
    world = World({"north": 4}, RULES)
    job = create_failing_job(world)
    world.now += stopped_s
    world.restart()
    world.connect("north")
    world.advance(1)
    assert world.state(job.id) is state
    world.advance(RULES.restart_pause)
    assert world.state(job.id) is JobState.RUNNING


def test_restart_pause_shorter_than_ending_is_skipped() -> None:
    world = World({"north": 4, "south": 4}, RULES)
    job_id = world.submit(fixed(north=1, south=1), run_time=1000)
    fail_again(world, job_id)
    world.advance(1)
    failed_token, other_token = world.tokens(job_id)
    world.manual = True
    world.site_of(failed_token).fail_component(failed_token, "node lost")
    world.site_of(failed_token).end_component(failed_token)
    world.deliver("north")
    assert world.job(job_id).retry_at == world.now + 4
    world.now += 10
    world.step()
    assert world.job(job_id).ending is JobState.QUEUED, "the other component has not ended"
    world.start_automation()
    world.settle()
    assert world.job(job_id).retry_at is None
    assert world.state(job_id) is JobState.CLAIMING
    assert world.tokens(job_id) != [failed_token, other_token]


def test_restart_pause_applies_to_retried_exit_codes() -> None:
    world = World({"north": 4}, RULES)
    job_id = world.submit(fixed(north=1), code=75, retry_on_exit=(75,), max_restarts=3, run_time=5)
    world.advance(60)
    assert (world.state(job_id), world.job(job_id).restarts) == (JobState.FAILED, 3)
    assert world.job(job_id).ended_at == pytest.approx(4 * 5 + 4 + 8, abs=4)


RESTARTS = [None, *(step / 4 for step in range(1, 40))]


@pytest.mark.parametrize(
    ("options", "until"),
    [
        (
            {"run_time": 5.0, "lingers": True, "launcher": Launcher.OPENMPI},
            lambda job: job.attempt.components[1].ended_at,
        ),
        ({"run_time": 100.0, "walltime": 7.0}, lambda job: job.attempt.ended_at),
        ({"run_time": 100.0, "deadline": 8.0}, lambda job: job.attempt.ended_at),
    ],
)
def test_restart_of_daemon_at_any_time_changes_no_time_of_the_end(
    options: dict[str, Any], until: Callable[[Any], float]
) -> None:
    """The clusters are connected again at once, so the restart takes no time."""
    ends = set()
    for restart_at in RESTARTS:
        world = World({"north": 4, "south": 4}, Rules(barrier_timeout=1800.0))
        job = world.submit(fixed(north=2, south=2), **options)
        if restart_at is not None:
            world.advance(restart_at)
            world.restart()
            for name in world.sites:
                world.connect(name)
        world.advance(120 - world.now)
        assert world.job(job).state.is_final
        ends.add(until(world.job(job)))
    assert len(ends) == 1


def test_restarts_in_a_row_leave_agents_time_to_report_that_the_program_is_launched() -> None:
    rules = Rules(barrier_timeout=130.0)
    component = Component(0, "north", 2, ComponentState.CLAIMED, hosts=("a", "b"), submitted_at=0.0, claimed_at=1.0)
    attempt = Attempt(1, (component,), 0.0, claim_at=0.0, barrier_at=1.0)
    job = Job(1, JobSpec(fixed(north=2), ("program",)), 0.0, JobState.STARTING, generation=1, attempt=attempt)
    for restart_at, launch_ends in ((50.0, 131.0), (3_600.0, 3_615.0), (3_602.0, 3_617.0)):
        scheduler = World({"north": 4}, rules).scheduler
        scheduler.restore([job], restart_at)
        assert [timer.at for timer in scheduler._state.timers._heap if timer.kind is Deadline.LAUNCH] == [launch_ends]


def test_restart_of_daemon_awaits_output_of_agent_that_connects_late() -> None:
    world = World({"north": 4, "south": 4})
    job = world.submit(fixed(north=2, south=2), run_time=5.0, launcher=Launcher.OPENMPI)
    world.advance(3)
    world.restart()
    head, late = (component.cluster for component in world.job(job).attempt.gang)  # type: ignore[union-attr]
    world.connect(head)
    world.advance(10)
    assert world.job(job).ending is JobState.SUCCEEDED
    assert not world.state(job).is_final
    world.connect(late)
    world.advance(5)
    assert world.state(job) is JobState.SUCCEEDED
    assert "output-missing" not in world.timeline_events(job)
