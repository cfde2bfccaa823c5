"""Clusters that are given up, tried again, and taken out by operators (semantics 6)."""

import pytest

from koalapy.model.cluster import ClusterState
from koalapy.model.job import JobState
from koalapy.model.request import ComponentRequest, FixedRequest, Request
from koalapy.scheduler.events import ClusterCleared, ClusterDrained, ClusterResumed
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.test_failures import break_component
from tests.scheduler.world import World

RULES = Rules(
    error_threshold=2, probation_pause=60, probation_pause_max=200, max_restarts=None, restart_pause=0, claim_grace=10
)


def given_up(rules: Rules = RULES, north: int = 4) -> World:
    """North failed as often as it may."""
    world = World({"north": north, "south": 4}, rules)
    job = world.submit(fixed(north=1), run_time=1000)
    while world.queries.grid["north"].state is ClusterState.USABLE:
        world.advance(1)
        break_component(world, world.tokens(job)[0])
    return world


def state(world: World) -> ClusterState:
    return world.queries.grid["north"].state


def test_it_is_tried_again_after_a_pause_and_used_again_after_a_start_that_went_well() -> None:
    world = given_up()
    assert world.state(1) is JobState.QUEUED
    world.advance(58)
    assert (state(world), world.state(1)) == (ClusterState.UNUSABLE, JobState.QUEUED)
    world.advance(5)
    assert world.state(1) is JobState.RUNNING
    assert state(world) is ClusterState.USABLE
    assert world.queries.grid["north"].health.errors == 0


def test_one_component_at_a_time() -> None:
    world = given_up()
    others = [world.submit(fixed(north=1), run_time=50) for _ in range(3)]
    world.now += 61
    world.step()
    trying = [job for job in (1, *others) if world.state(job) is JobState.CLAIMING]
    assert trying == [1]
    assert state(world) is ClusterState.PROBATION
    view = world.queries.grid.view().get("north")
    assert view is not None
    assert view.state is ClusterState.UNUSABLE
    assert "probation" in view.note
    world.advance(1)
    assert all(world.state(job) is JobState.RUNNING for job in (1, *others))


def test_no_job_brings_two_components_at_once() -> None:
    world = given_up()
    world.cancel(1)
    world.sites["south"].add_local_user(2)
    world.settle()
    world.advance(61)
    assert state(world) is ClusterState.PROBATION
    two = world.submit(nonfixed(2, 2, 2))
    assert world.state(two) is JobState.QUEUED
    one = world.submit(nonfixed(2, 2))
    assert sorted(c.cluster for c in world.job(one).attempt.gang) == ["north", "south"]  # type: ignore[union-attr]
    world.advance(1)
    assert world.state(one) is JobState.RUNNING
    assert state(world) is ClusterState.USABLE


@pytest.mark.parametrize(
    "request_", [FixedRequest((ComponentRequest(2, "north"), ComponentRequest(2, "north"))), nonfixed(2, 2, 2, 2)]
)
def test_who_can_come_with_two_components_only_brings_them_as_one_trial(request_: Request) -> None:
    """Another cluster is trusted, and would not do even if it was idle: nobody else may ever try this one."""
    world = given_up()
    world.cancel(1)
    world.settle()
    job = world.submit(request_, run_time=10)
    world.advance(100)
    assert world.state(job) is JobState.SUCCEEDED
    assert state(world) is ClusterState.USABLE


def test_wide_jobs_do_not_wait_for_ever_when_no_cluster_is_trusted() -> None:
    """Two clusters on probation, and jobs of three components: one job at a time brings all of its own."""
    world = World({"north": 4, "south": 4}, RULES)
    for name in ("north", "south"):
        broken = world.submit(fixed(**{name: 1}), run_time=1000)
        while world.queries.grid[name].state is ClusterState.USABLE:
            world.advance(1)
            break_component(world, world.tokens(broken)[0])
        world.cancel(broken)
    wide = [world.submit(nonfixed(2, 1, 1), run_time=50) for _ in range(2)]
    world.advance(200)
    assert all(world.state(job) is JobState.SUCCEEDED for job in wide)
    assert {cluster.state for cluster in world.queries.grid.clusters()} <= {ClusterState.USABLE, ClusterState.PROBATION}


def test_each_trial_that_fails_doubles_the_pause_up_to_a_bound() -> None:
    world = given_up()
    pauses = []
    for _ in range(4):
        began = world.now
        while world.state(1) is JobState.QUEUED:
            world.advance(1)
        pauses.append(round(world.now - began))
        break_component(world, world.tokens(1)[0])
        assert state(world) is ClusterState.UNUSABLE
    assert pauses == [pytest.approx(p, abs=2) for p in (60, 120, 200, 200)]


def test_a_trial_that_is_cancelled_or_overtaken_says_nothing() -> None:
    world = given_up()
    world.now += 61
    world.step()
    assert world.state(1) is JobState.CLAIMING
    world.cancel(1)
    world.advance(1)
    assert state(world) is ClusterState.PROBATION
    again = world.submit(fixed(north=1))
    world.advance(1)
    assert world.state(again) is JobState.RUNNING
    assert state(world) is ClusterState.USABLE


def test_without_probation_only_an_operator_brings_it_back() -> None:
    world = given_up(Rules(error_threshold=2, probation=False, max_restarts=None))
    world.advance(10_000)
    assert state(world) is ClusterState.UNUSABLE
    world.step([ClusterCleared("north")])
    world.advance(1)
    assert world.state(1) is JobState.RUNNING


def test_a_daemon_that_dies_does_not_forget() -> None:
    world = given_up()
    world.disconnect("north")
    world.restart()
    world.connect("north")
    world.connect("south")
    assert state(world) is ClusterState.UNUSABLE
    world.advance(65)
    assert world.state(1) is JobState.RUNNING


def test_a_drained_cluster_gets_nothing_and_its_jobs_go_on() -> None:
    world = World({"north": 4, "south": 4})
    running = world.submit(fixed(north=2), run_time=50)
    world.advance(1)
    world.step([ClusterDrained("north", "ops", "new disks")])
    cluster = world.queries.grid["north"]
    assert (cluster.state, cluster.state_reason) == (ClusterState.DRAINED, "by ops: new disks")
    world.step([ClusterDrained("north", "somebody", "")])
    assert cluster.state_reason == "by ops: new disks", "an order that gives no reason takes none away"
    waiting = world.submit(fixed(north=1))
    elsewhere = world.submit(flexible(2))
    world.advance(60)
    assert world.state(running) is JobState.SUCCEEDED
    assert world.state(waiting) is JobState.QUEUED
    assert world.queries.waiting_reason(world.job(waiting)) == (
        "needs 1 node on north, which is drained by ops: new disks"
    )
    assert world.job(elsewhere).attempt.gang[0].cluster == "south"  # type: ignore[union-attr]
    world.restart()
    world.connect("north")
    world.connect("south")
    assert world.state(waiting) is JobState.QUEUED, "a restarted daemon knows it, too"
    world.step([ClusterResumed("north")])
    world.advance(1)
    assert world.state(waiting) is JobState.RUNNING
    world.advance(60)
    check_nothing_remains(world)


def test_exit_codes_after_which_a_job_is_tried_again() -> None:
    world = World({"north": 4}, Rules(restart_pause=0))
    job = world.submit(fixed(north=1), code=75, retry_on_exit=(75,), max_restarts=2, run_time=5)
    world.advance(60)
    done = world.job(job)
    assert (done.state, done.restarts, done.exit_code) == (JobState.FAILED, 2, 75)
    assert world.reasons(job, "requeued") == [
        "the program exited with 75 (restart 1 of 2)",
        "the program exited with 75 (restart 2 of 2)",
    ]
    assert world.queries.grid["north"].health.errors == 0
    other = world.submit(fixed(north=1), code=3, retry_on_exit=(75,), run_time=5)
    world.advance(60)
    assert (world.job(other).restarts, world.state(other)) == (0, JobState.FAILED)


def test_a_clock_that_goes_back_changes_nothing() -> None:
    world = World({"north": 4}, now=1000.0)
    job = world.submit(fixed(north=4), run_time=10)
    world.advance(5)
    world.now -= 900
    effects = world.scheduler.step([], world.now)
    assert not effects
    low = world.submit(fixed(north=1))
    entry = next(entry for entry in world.timeline if entry.job == low)
    assert entry.at >= world.job(job).started_at  # type: ignore[operator]


@pytest.mark.parametrize("cleared", ["by its start", "by an operator"])
def test_a_trial_of_before_keeps_no_later_one_out(cleared: str) -> None:
    """What was tried then may run for days."""
    world = given_up()
    world.now += 61
    world.step()
    assert world.state(1) is JobState.CLAIMING
    if cleared == "by an operator":
        world.step([ClusterCleared("north")])
    world.advance(1)
    assert (world.state(1), state(world)) == (JobState.RUNNING, ClusterState.USABLE)
    other = world.submit(fixed(north=1), run_time=50)
    while state(world) is ClusterState.USABLE:
        world.advance(1)
        break_component(world, world.tokens(other)[0])
    world.advance(65)
    assert world.state(1) is JobState.RUNNING, "its program takes a thousand seconds"
    assert (world.state(other), state(world)) == (JobState.RUNNING, ClusterState.USABLE)


def test_a_failed_trial_that_does_not_end_keeps_the_next_one_out_for_its_pause_only() -> None:
    world = given_up()
    world.now += 61
    world.step()
    world.settle()
    token = world.tokens(1)[0]
    world.sites["north"].stuck_components.add(token)
    world.sites["north"].fail_component(token, "node lost")
    world.settle()
    assert state(world) is ClusterState.UNUSABLE
    other = world.submit(fixed(north=1), run_time=50)
    world.advance(125)
    assert world.state(other) is JobState.RUNNING
    assert state(world) is ClusterState.USABLE
