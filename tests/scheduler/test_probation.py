"""Unusable clusters, their probation, and clusters drained by operators (semantics 6)."""

import pytest

from koalapy.model.cluster import ClusterState
from koalapy.model.job import JobState
from koalapy.model.request import ComponentRequest, FixedRequest, Request
from koalapy.scheduler.cluster_conditions import Doubt, Limit
from koalapy.scheduler.events import ClusterCleared, ClusterDrained, ClusterResumed
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.test_failures import break_component
from tests.scheduler.world import World

RULES = Rules(
    error_threshold=2, probation_pause=60, probation_pause_max=200, max_restarts=None, restart_pause=0, claim_grace=10
)


def create_world_with_unusable_north(rules: Rules = RULES, north: int = 4) -> World:
    """Create a world in which north has reached the error threshold."""
    world = World({"north": north, "south": 4}, rules)
    make_unusable(world, "north", world.submit(fixed(north=1), run_time=1000))
    return world


def make_unusable(world: World, name: str, job: int) -> None:
    """Let a job fail on a cluster on which other jobs have failed before."""
    world.queries.grid[name].health.errors = world.rules.error_threshold - 1
    world.advance(1)
    break_component(world, world.tokens(job)[0])
    assert world.queries.grid[name].state is ClusterState.UNUSABLE


def state_of_north(world: World) -> ClusterState:
    return world.queries.grid["north"].state


def test_probation_starts_after_pause_and_ends_with_success() -> None:
    world = create_world_with_unusable_north()
    assert world.state(1) is JobState.QUEUED
    world.advance(58)
    assert (state_of_north(world), world.state(1)) == (ClusterState.UNUSABLE, JobState.QUEUED)
    world.advance(5)
    assert world.state(1) is JobState.RUNNING
    assert state_of_north(world) is ClusterState.USABLE
    assert world.queries.grid["north"].health.errors == 0


def test_probation_counts_its_pause_from_the_last_time_the_cluster_became_unusable() -> None:
    """An operator has cleared the errors in between: the pause of the first time must not end the second."""
    world = create_world_with_unusable_north()
    began = world.now
    world.advance(30)
    world.step([ClusterCleared("north")])
    make_unusable(world, "north", 1)
    again = world.now
    assert again > began + 30
    world.advance(began + 60 + 5 - again)
    assert state_of_north(world) is ClusterState.UNUSABLE
    world.advance(again + 65 - world.now)
    assert state_of_north(world) is ClusterState.USABLE


def test_probation_admits_one_component_at_a_time() -> None:
    world = create_world_with_unusable_north()
    other_jobs = [world.submit(fixed(north=1), run_time=50) for _ in range(3)]
    world.now += 61
    world.step()
    claiming_jobs = [job for job in (1, *other_jobs) if world.state(job) is JobState.CLAIMING]
    assert claiming_jobs == [1]
    assert state_of_north(world) is ClusterState.PROBATION
    view = world.queries.grid.view().get("north")
    assert view is not None
    assert view.state is ClusterState.UNUSABLE
    assert "probation" in view.note
    world.advance(1)
    assert all(world.state(job) is JobState.RUNNING for job in (1, *other_jobs))


def test_probation_admits_one_component_of_each_job() -> None:
    world = create_world_with_unusable_north()
    world.cancel(1)
    world.sites["south"].add_local_user(2)
    world.settle()
    world.advance(61)
    assert state_of_north(world) is ClusterState.PROBATION
    rejected_job = world.submit(nonfixed(2, 2, 2))
    assert world.state(rejected_job) is JobState.QUEUED
    accepted_job = world.submit(nonfixed(2, 2))
    assert sorted(c.cluster for c in world.job(accepted_job).attempt.gang) == ["north", "south"]  # type: ignore[union-attr]
    world.advance(1)
    assert world.state(accepted_job) is JobState.RUNNING
    assert state_of_north(world) is ClusterState.USABLE


@pytest.mark.parametrize(
    "request_", [FixedRequest((ComponentRequest(2, "north"), ComponentRequest(2, "north"))), nonfixed(2, 2, 2, 2)]
)
def test_probation_admits_job_that_needs_two_components(request_: Request) -> None:
    """A working cluster would not suffice even when idle, so otherwise no job could end the probation."""
    world = create_world_with_unusable_north()
    world.cancel(1)
    world.settle()
    job = world.submit(request_, run_time=10)
    world.advance(100)
    assert world.state(job) is JobState.SUCCEEDED
    assert state_of_north(world) is ClusterState.USABLE


def test_probation_of_all_clusters_admits_wide_job() -> None:
    """Both clusters are on probation; one job at a time may start all its components."""
    world = World({"north": 4, "south": 4}, RULES)
    for name in ("north", "south"):
        broken = world.submit(fixed(**{name: 1}), run_time=1000)
        make_unusable(world, name, broken)
        world.cancel(broken)
    wide_jobs = [world.submit(nonfixed(2, 1, 1), run_time=50) for _ in range(2)]
    world.advance(200)
    assert all(world.state(job) is JobState.SUCCEEDED for job in wide_jobs)
    assert {cluster.state for cluster in world.queries.grid.clusters()} <= {ClusterState.USABLE, ClusterState.PROBATION}


def test_probation_pause_doubles_after_failed_trial() -> None:
    world = create_world_with_unusable_north()
    pauses = []
    for _ in range(4):
        began = world.now
        while world.state(1) is JobState.QUEUED:
            world.advance(1)
        pauses.append(round(world.now - began))
        break_component(world, world.tokens(1)[0])
        assert state_of_north(world) is ClusterState.UNUSABLE
    assert pauses == [pytest.approx(p, abs=2) for p in (60, 120, 200, 200)]


def test_probation_trial_cancelled_proves_nothing() -> None:
    world = create_world_with_unusable_north()
    world.now += 61
    world.step()
    assert world.state(1) is JobState.CLAIMING
    world.cancel(1)
    world.advance(1)
    assert state_of_north(world) is ClusterState.PROBATION
    next_job = world.submit(fixed(north=1))
    world.advance(1)
    assert world.state(next_job) is JobState.RUNNING
    assert state_of_north(world) is ClusterState.USABLE


def test_probation_disabled_cluster_needs_operator() -> None:
    world = create_world_with_unusable_north(Rules(error_threshold=2, probation=False, max_restarts=None))
    world.advance(10_000)
    assert state_of_north(world) is ClusterState.UNUSABLE
    world.step([ClusterCleared("north")])
    world.advance(1)
    assert world.state(1) is JobState.RUNNING


def test_probation_survives_daemon_restart() -> None:
    world = create_world_with_unusable_north()
    world.disconnect("north")
    world.restart()
    world.connect("north")
    world.connect("south")
    assert state_of_north(world) is ClusterState.UNUSABLE
    world.advance(65)
    assert world.state(1) is JobState.RUNNING


def test_drained_cluster_receives_no_jobs_and_keeps_running_ones() -> None:
    world = World({"north": 4, "south": 4})
    running = world.submit(fixed(north=2), run_time=50)
    world.advance(1)
    world.step([ClusterDrained("north", "ops", "new disks")])
    cluster = world.queries.grid["north"]
    assert (cluster.state, cluster.state_reason) == (ClusterState.DRAINED, "by ops: new disks")
    world.step([ClusterDrained("north", "other", "")])
    assert cluster.state_reason == "by ops: new disks", "a drain without a reason keeps the earlier reason"
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
    assert world.state(waiting) is JobState.QUEUED, "a restarted daemon keeps the drain"
    world.step([ClusterResumed("north")])
    world.advance(1)
    assert world.state(waiting) is JobState.RUNNING
    world.advance(60)
    check_nothing_remains(world)


def test_retry_exit_codes_restart_job() -> None:
    world = World({"north": 4}, Rules(restart_pause=0))
    job = world.submit(fixed(north=1), code=75, retry_on_exit=(75,), max_restarts=2, run_time=5)
    world.advance(60)
    finished = world.job(job)
    assert (finished.state, finished.restarts, finished.exit_code) == (JobState.FAILED, 2, 75)
    assert world.reasons(job, "requeued") == [
        "the program exited with 75 (restart 1 of 2)",
        "the program exited with 75 (restart 2 of 2)",
    ]
    assert world.queries.grid["north"].health.errors == 0
    other_job = world.submit(fixed(north=1), code=3, retry_on_exit=(75,), run_time=5)
    world.advance(60)
    assert (world.job(other_job).restarts, world.state(other_job)) == (0, JobState.FAILED)


def test_clock_set_back_keeps_timeline_order() -> None:
    world = World({"north": 4}, now=1000.0)
    job = world.submit(fixed(north=4), run_time=10)
    world.advance(5)
    world.now -= 900
    effects = world.scheduler.step([], world.now)
    assert not effects
    late_job = world.submit(fixed(north=1))
    entry = next(entry for entry in world.timeline if entry.job == late_job)
    assert entry.at >= world.job(job).started_at  # type: ignore[operator]


@pytest.mark.parametrize("cleared_by", ["start", "operator"])
def test_probation_ignores_running_trial_of_earlier_probation(cleared_by: str) -> None:
    """The earlier trial may run for days."""
    world = create_world_with_unusable_north()
    world.now += 61
    world.step()
    assert world.state(1) is JobState.CLAIMING
    if cleared_by == "operator":
        world.step([ClusterCleared("north")])
    world.advance(1)
    assert (world.state(1), state_of_north(world)) == (JobState.RUNNING, ClusterState.USABLE)
    other_job = world.submit(fixed(north=1), run_time=50)
    make_unusable(world, "north", other_job)
    world.advance(65)
    assert world.state(1) is JobState.RUNNING, "its program runs for 1000 s"
    assert (world.state(other_job), state_of_north(world)) == (JobState.RUNNING, ClusterState.USABLE)


def test_probation_failed_trial_blocks_next_only_for_pause() -> None:
    world = create_world_with_unusable_north()
    world.now += 61
    world.step()
    world.settle()
    token = world.tokens(1)[0]
    world.sites["north"].stuck_components.add(token)
    world.sites["north"].fail_component(token, "node lost")
    world.settle()
    assert state_of_north(world) is ClusterState.UNUSABLE
    next_job = world.submit(fixed(north=1), run_time=50)
    world.advance(125)
    assert world.state(next_job) is JobState.RUNNING
    assert state_of_north(world) is ClusterState.USABLE


def test_cluster_cleared_offers_all_its_nodes_without_limit_and_doubt() -> None:
    world = World({"north": 4})
    north = world.queries.grid["north"]
    north.health.limit, north.health.doubt = Limit(2, 900.0, "too many jobs"), Doubt(3, 4, 0.0, 900.0)
    world.step([ClusterCleared("north")])
    assert north.nodes.available == 4
    north.health.limit = Limit(3, 900.0, "too many jobs")
    assert north.nodes.available == 2, "a later limit counts"
