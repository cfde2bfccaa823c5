"""Drains that begin and end at planned times."""

import pytest

from koalapy.model.cluster import ClusterState, Link
from koalapy.model.job import JobState
from koalapy.model.request import ComponentRequest, FixedRequest, InputFile
from koalapy.scheduler.events import ClusterDrained, ClusterResumed
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.leftovers import container_sizes, grown_containers
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.test_shared_nodes import SharingWorld
from tests.scheduler.world import World

HOUR = 3600.0


def create_world(
    begins: float = 2 * HOUR, ends: float | None = 4 * HOUR, *, requeue: bool = False, rules: Rules | None = None
) -> World:
    """Create a world in which a drain of north is planned, begin and end in seconds of its time."""
    world = World({"north": 4, "south": 2}, rules)
    world.step([ClusterDrained("north", "ops", "new disks", requeue, begins, ends)])
    return world


def state_of_north(world: World) -> ClusterState:
    return world.queries.grid["north"].state


def advance_to(world: World, time: float) -> None:
    world.advance(time - world.now)


def restart(world: World) -> None:
    world.restart()
    world.connect("north")
    world.connect("south")


@pytest.mark.parametrize("restarts", [False, True])
def test_planned_drain_begins_and_ends_by_itself(restarts: bool) -> None:
    world = create_world()
    for time, state in [(1.9, "usable"), (2.01, "drained"), (3.9, "drained"), (4.01, "usable")]:
        if restarts:
            restart(world)
        advance_to(world, time * HOUR)
        assert state_of_north(world) == state
    check_nothing_remains(world)


def test_job_is_placed_before_drain_only_if_it_ends_in_time() -> None:
    world = create_world()
    long_job = world.submit(fixed(north=2), walltime=3 * HOUR, run_time=HOUR)
    short_job = world.submit(fixed(north=2), walltime=HOUR, run_time=HOUR)
    unlimited_job = world.submit(fixed(north=1), run_time=HOUR)
    world.advance(10)
    states = [world.state(job) for job in (long_job, short_job, unlimited_job)]
    assert states == [JobState.QUEUED, JobState.RUNNING, JobState.QUEUED]
    assert "north has a planned drain from 02:00 to 04:00 UTC" in world.queries.waiting_reason(world.job(long_job))
    findings = {
        each.cluster: each.reason for each in explain(world.queries, world.job(long_job), (), world.now).clusters
    }
    assert "a planned drain from 02:00 to 04:00 UTC by ops: new disks" in findings["north"]
    advance_to(world, 4 * HOUR + 60)
    assert [world.state(job) for job in (long_job, unlimited_job)] == [JobState.RUNNING, JobState.RUNNING]


@pytest.mark.parametrize(("rules", "starts"), [(Rules(), True), (Rules(default_walltime=50 * HOUR), False)])
def test_job_without_walltime_counts_as_in_plans(rules: Rules, starts: bool) -> None:
    world = create_world(48 * HOUR, None, rules=rules)
    job = world.submit(fixed(north=2), run_time=HOUR)
    world.advance(10)
    assert (world.state(job) is JobState.RUNNING) == starts


@pytest.mark.parametrize("requeue", [False, True])
def test_begin_of_drain_requeues_running_jobs_only_if_asked(requeue: bool) -> None:
    world = create_world(48 * HOUR, 50 * HOUR, requeue=requeue)
    job = world.submit(flexible(3), run_time=100 * HOUR)
    advance_to(world, 48 * HOUR + 60)
    assert world.state(job) is (JobState.QUEUED if requeue else JobState.RUNNING)
    assert any(entry.reason.startswith("drained: north: new disks") for entry in world.timeline) == requeue


def test_order_at_once_leaves_planned_drain() -> None:
    world = create_world()
    world.step([ClusterDrained("north", "eve", "a fan", ends_at=HOUR)])
    assert world.queries.grid["north"].state_reason == "by eve: a fan, until 01:00 UTC"
    advance_to(world, HOUR + 1)
    assert state_of_north(world) is ClusterState.USABLE
    advance_to(world, 2 * HOUR + 1)
    assert world.queries.grid["north"].state_reason.startswith("by ops: new disks")


def test_overlapping_drains_end_with_the_last() -> None:
    world = create_world()
    world.step([ClusterDrained("north", "eve", "power", begins_at=3 * HOUR, ends_at=5 * HOUR)])
    world.step([ClusterDrained("north", "eve", "air", begins_at=3.5 * HOUR, ends_at=3.8 * HOUR)])
    for time, state in [(3.9, "drained"), (4.5, "drained"), (5.01, "usable")]:
        advance_to(world, time * HOUR)
        assert state_of_north(world) == state
    check_nothing_remains(world)


@pytest.mark.parametrize("planned", [False, True])
def test_planned_drains_and_the_one_in_force_are_withdrawn_apart(planned: bool) -> None:
    world = create_world()
    world.step([ClusterDrained("north", "eve", "a fan")])
    world.step([ClusterResumed("north", planned=planned)])
    assert state_of_north(world) == ("drained" if planned else "usable")
    assert len(world.queries.grid["north"].planned_drains) == (not planned)
    job = world.submit(fixed(north=2), walltime=3 * HOUR)
    world.advance(10)
    assert world.state(job) is JobState.QUEUED
    advance_to(world, 2 * HOUR + 1)
    assert world.queries.grid["north"].state_reason.startswith("by eve" if planned else "by ops")


def test_planned_drain_covered_by_one_without_end_begins_when_that_is_resumed() -> None:
    world = create_world()
    world.step([ClusterDrained("north", "eve", "a switch")])
    advance_to(world, 3 * HOUR)
    restart(world)
    assert world.queries.grid["north"].state_reason == "by eve: a switch"
    world.step([ClusterResumed("north")])
    assert world.queries.grid["north"].state_reason.startswith("by ops: new disks, until")
    advance_to(world, 4 * HOUR + 1)
    assert state_of_north(world) is ClusterState.USABLE
    assert world.queries.grid["north"].planned_drains == ()


def test_job_that_shares_nodes_is_placed_before_drain_only_if_it_ends_in_time() -> None:
    world = SharingWorld({"north": 1})
    first = world.share(walltime=HOUR, run_time=HOUR)
    world.advance(5)
    world.step([ClusterDrained("north", "ops", "new disks", False, 2 * HOUR, 4 * HOUR)])
    long_job, short_job = world.share(walltime=3 * HOUR), world.share(walltime=HOUR, run_time=HOUR)
    world.advance(20)
    states = [world.state(job) for job in (first, short_job, long_job)]
    assert states == [JobState.RUNNING, JobState.RUNNING, JobState.QUEUED]


def test_drain_that_passed_while_the_daemon_was_down_is_forgotten() -> None:
    world = create_world(requeue=True)
    job = world.submit(flexible(3), walltime=HOUR, run_time=HOUR)
    world.advance(10)
    world.now = 5 * HOUR
    restart(world)
    world.advance(1)
    assert state_of_north(world) is ClusterState.USABLE
    assert world.queries.grid["north"].planned_drains == ()
    assert not any(entry.reason.startswith("drained") for entry in world.timeline if entry.job == job)


def test_orders_that_follow_each_other_leave_one_deadline() -> None:
    """Planned and withdrawn drains do not fill the heap of deadlines, whatever their order."""
    world = create_world()
    sizes = container_sizes(world.scheduler)
    for hours in range(100, 40, -1):
        world.step([ClusterDrained("north", "ops", "new disks", False, hours * HOUR, None)])
        world.step([ClusterResumed("north", planned=True)])
    world.step([ClusterDrained("north", "ops", "new disks", False, 3 * HOUR, 4 * HOUR)])
    grown = grown_containers(sizes, container_sizes(world.scheduler))
    assert not any("timers" in path for path in grown)
    advance_to(world, 3.01 * HOUR)
    assert state_of_north(world) == "drained"


@pytest.mark.parametrize(
    "order", [ClusterDrained("north", "eve", "air", False, 9 * HOUR), ClusterResumed("north", True)]
)
def test_order_in_the_step_in_which_a_drain_is_due_does_not_skip_its_begin(
    order: ClusterDrained | ClusterResumed,
) -> None:
    world = create_world(48 * HOUR, requeue=True, ends=50 * HOUR)
    job = world.submit(fixed(north=2), run_time=100 * HOUR)
    world.advance(10)
    assert world.state(job) is JobState.RUNNING
    world.now = 48 * HOUR + 1  # the daemon wakes up late
    world.step([order])
    world.advance(60)
    assert (state_of_north(world), world.state(job)) == (ClusterState.DRAINED, JobState.QUEUED)


def plan_of(world: World, job: int) -> float | None:
    return world.queries.planned_start(job)


PLANS = Rules(plan_after=0, scan_interval=10.0)


@pytest.mark.parametrize("begins", [0.0, HOUR])
def test_job_that_fits_only_after_a_drain_is_planned_for_its_end(begins: float) -> None:
    world = create_world(begins, 4 * HOUR, rules=PLANS)
    job = world.submit(fixed(north=3), walltime=2 * HOUR, run_time=HOUR)
    world.advance(20)
    assert plan_of(world, job) == 4 * HOUR
    advance_to(world, 4 * HOUR + 30)
    assert world.state(job) is JobState.RUNNING


def test_no_start_is_planned_on_a_cluster_that_is_drained_without_end() -> None:
    world = create_world(0.0, None, rules=PLANS)
    job = world.submit(fixed(north=3), walltime=HOUR)
    world.advance(20)
    assert plan_of(world, job) is None


def test_start_is_planned_before_the_second_of_two_drains_if_the_job_ends_in_time() -> None:
    """A time between two drains that suffices is found although later times are within the second one."""
    world = create_world(HOUR, 2 * HOUR, rules=PLANS)
    world.step([ClusterDrained("north", "ops", "air", False, 5 * HOUR, 9 * HOUR)])
    running = world.submit(fixed(south=1), walltime=4 * HOUR, run_time=4 * HOUR)
    world.advance(20)
    short_job = world.submit(fixed(north=3), walltime=2 * HOUR)
    world.advance(20)
    assert plan_of(world, short_job) == 2 * HOUR
    world.cancel(short_job)
    long_job = world.submit(fixed(north=3), walltime=3.5 * HOUR)
    world.advance(20)
    assert plan_of(world, long_job) == 9 * HOUR
    assert world.state(running) is JobState.RUNNING


def test_transfer_of_files_counts_before_a_drain() -> None:
    """A job whose files arrive so late that it would run into the drain waits for its end, whatever its policy."""
    link = Link(0.001, 1.0)
    world = World({"north": 4, "files": 0}, PLANS, links={("files", "north"): link, ("north", "files"): link})
    world.step([ClusterDrained("north", "ops", "new disks", False, 3 * HOUR, 4 * HOUR)])
    late, early = InputFile("late", 7200, ("files",)), InputFile("early", 1800, ("files",))
    first, second = (
        world.submit(FixedRequest((ComponentRequest(2, "north", inputs=(file,)),)), walltime=2 * HOUR, run_time=HOUR)
        for file in (late, early)
    )
    world.advance(20)
    assert (world.state(first), world.state(second)) == (JobState.QUEUED, JobState.PLACED)
    assert "its files arrive in 2:00:00" in world.queries.waiting_reason(world.job(first))
    advance_to(world, 6 * HOUR + 60)
    assert world.state(first) is JobState.RUNNING
