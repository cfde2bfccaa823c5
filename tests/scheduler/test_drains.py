"""Drains that begin and end at planned times."""

from dataclasses import replace
from itertools import count, permutations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterState, Link
from koalapy.model.job import JobState
from koalapy.model.placement import PlacedComponent, Placement
from koalapy.model.request import ComponentRequest, Environment, FixedRequest, InputFile, NonFixedRequest, Request
from koalapy.policies.policy import Policy
from koalapy.policies.registry import Registry, builtin_policies
from koalapy.scheduler.events import ClusterCleared, ClusterDrained, ClusterResumed
from koalapy.scheduler.explain.explain import explain, find_awaited_clusters
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.leftovers import container_sizes, grown_containers
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.test_placement import FixedAnswerPolicy
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


def drain(world: World, name: str, begins: float, ends: float | None) -> None:
    world.step([ClusterDrained(name, "ops", "disks", False, begins * HOUR, None if ends is None else ends * HOUR)])


def links_between(*names: str) -> dict[tuple[str, str], Link]:
    """Return links of one byte a second, so that a file of 3,600 bytes arrives in an hour."""
    return dict.fromkeys(permutations(names, 2), Link(0.001, 1.0))


HOUR_FILE = InputFile("data", 3600, ("south",))


def clusters_of(world: World, job: int) -> list[str]:
    attempt = world.job(job).attempt
    return [] if attempt is None else [component.cluster for component in attempt.components]


def test_transfer_to_one_cluster_does_not_keep_a_job_from_another() -> None:
    """North, which would be chosen first, awaits the file beyond the last start; south has it."""
    world = World({"north": 4, "south": 2}, PLANS, links=links_between("north", "south"))
    drain(world, "north", 2, None)
    drain(world, "south", 2, None)
    request = NonFixedRequest((ComponentRequest(2, inputs=(HOUR_FILE,)),))
    job = world.submit(request, walltime=1.5 * HOUR, run_time=HOUR)
    world.advance(60)
    assert clusters_of(world, job) == ["south"]


def test_component_without_files_awaits_those_of_the_others_before_a_drain() -> None:
    world = World({"north": 4, "east": 2, "south": 0}, PLANS, links=links_between("north", "east", "south"))
    drain(world, "north", 2, 4)
    request = FixedRequest((ComponentRequest(1, "north"), ComponentRequest(1, "east", inputs=(HOUR_FILE,))))
    job = world.submit(request, walltime=1.5 * HOUR, run_time=HOUR)
    world.advance(60)
    assert world.state(job) is JobState.QUEUED
    assert plan_of(world, job) == 4 * HOUR


def test_ever_longer_transfers_end_the_questions_to_a_policy() -> None:
    seconds = count(100.0)

    def answer() -> Placement:
        return Placement((PlacedComponent(2, "north", 0, ("south",), next(seconds)),))

    policies = builtin_policies()
    policies.register(FixedAnswerPolicy(answer))
    world = World({"north": 4, "south": 2}, PLANS, links=links_between("north", "south"), policies=policies)
    drain(world, "north", 100, None)
    request = FixedRequest((ComponentRequest(2, "north", inputs=(HOUR_FILE,)),))
    world.submit(request, walltime=HOUR, policy="answering")
    assert next(seconds) < 500


class CountingPolicies(Registry):
    """The policies, with the number of questions to them."""

    questions = 0

    def __init__(self) -> None:
        super().__init__()
        for name in builtin_policies().names():
            self.register(builtin_policies().get(name))

    def resolve(self, name: str, request: Request, options: Environment = ()) -> Policy:
        self.questions += 1
        return super().resolve(name, request, options)


@pytest.mark.parametrize(("request_", "drained", "most"), [(flexible(160), 40, 5), (fixed(c0=4, c1=4), 2, 30)])
def test_many_drains_cost_few_questions_to_the_policy(request_: Request, drained: int, most: int) -> None:
    """One cluster after the other is drained, so that a job of all of them starts after the last drain."""
    policies = CountingPolicies()
    world = World({f"c{index}": 4 for index in range(40)}, PLANS, policies=policies, strict=False)
    for index in range(40):
        drain(world, f"c{index % drained}", index, index + 1)
    policies.questions = 0
    job = world.submit(request_, walltime=HOUR)
    assert policies.questions <= most
    assert plan_of(world, job) == 40 * HOUR


@given(
    orders=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(1, 3)), min_size=20, max_size=60),
    nodes=st.integers(3, 8),
    hours=st.integers(1, 3),
)
@example(orders=[(index % 2, 1 + 2 * index, 2) for index in range(30)] + [(2, 70, 2)], nodes=8, hours=1)
def test_planned_start_is_the_first_with_enough_nodes_among_many_drains(
    orders: list[tuple[int, int, int]], nodes: int, hours: int
) -> None:
    world = World({f"c{index}": 2 for index in range(4)}, PLANS, strict=False)
    world.step(
        [
            ClusterDrained(f"c{c}", "ops", "disks", False, begin * HOUR, (begin + lasts) * HOUR)
            for c, begin, lasts in orders
        ]
    )

    def count_free(at: float) -> int:
        latest = at + hours * HOUR + 60
        barred = {c for c, begin, lasts in orders if begin * HOUR < latest and at < (begin + lasts) * HOUR}
        return 2 * (4 - len(barred))

    times = sorted({0.0, *((begin + lasts) * HOUR for _, begin, lasts in orders)})
    first = next(at for at in times if count_free(at) >= nodes)
    job = world.submit(flexible(nodes), walltime=hours * HOUR)
    assert plan_of(world, job) == (first or None)
    assert (world.state(job) is JobState.QUEUED) == (first > 0)


def test_start_of_job_with_files_is_found_before_a_drain() -> None:
    """From 4 hours on, its files would arrive too late before the drain at 10 hours; enough nodes are free at 1.5."""
    rules = replace(PLANS, high_scans_per_low=1)
    world = World({"north": 8, "south": 3, "files": 0}, rules, links=links_between("north", "files"), strict=False)
    for hours in (0.5, 1.0, 1.5, 4.4, 4.6, 4.7, 4.8, 4.9):
        world.submit(fixed(north=1), walltime=hours * HOUR, run_time=hours * HOUR)
    world.advance(30)
    drain(world, "north", 10, None)
    request = FixedRequest((ComponentRequest(3, "north", inputs=(InputFile("data", 3600, ("files",)),)),))
    job = world.submit(request, walltime=4.9 * HOUR, run_time=HOUR)
    world.advance(20)
    planned = plan_of(world, job)
    assert planned is not None
    assert 1.5 * HOUR <= planned < 1.6 * HOUR


def test_start_is_planned_once_a_drained_cluster_is_cleared() -> None:
    world = World({"north": 4, "south": 2}, PLANS, strict=False)
    world.advance(10)
    world.queries.grid["north"].health.unusable = True
    drain(world, "north", 0, 2)
    job = world.submit(flexible(6), run_time=20)
    world.advance(20)
    assert plan_of(world, job) is None
    world.step([ClusterCleared("north")])
    world.advance(20)
    assert plan_of(world, job) == 2 * HOUR


def test_few_of_many_drains_that_a_job_waits_for_are_tried_alone() -> None:
    world = World({f"c{index}": 1 for index in range(9)})
    for index in range(8):
        drain(world, f"c{index}", 0, None)
    names = [f"c{index}" for index in range(8)]
    for nodes, needed in ((9, names[:5]), (8, names), (1, [])):
        job = world.submit(flexible(nodes))
        assert find_awaited_clusters(world.queries, world.job(job))[1] == needed
