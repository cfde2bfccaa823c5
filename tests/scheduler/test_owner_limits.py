"""Limits of owners and groups: rejected at submission, or waited for without blocking others."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.errors import LimitReached, NeverAllowed
from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.limits import DAY, Limits, LimitSettings, NodeUse, UserLimits
from koalapy.scheduler.events import PeriodicScan
from koalapy.scheduler.explain.explain import explain, explain_submission
from koalapy.scheduler.owner_use import OwnerUse
from koalapy.scheduler.rules import QueueMode, Rules
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.world import World

SIZES = {"north": 8, "south": 8}
CONTACT = "write to grid@example.org"
PHYSICS = ("carl", "dora")


def make_limits(default: UserLimits | None = None, **scopes: dict[str, UserLimits]) -> Limits:
    settings = LimitSettings(default or UserLimits(), scopes.get("users", {}), scopes.get("groups", {}))
    return Limits(settings, lambda user: ("physics",) if user in PHYSICS else (), CONTACT)


def create_world(
    default: UserLimits | None = None, rules: Rules | None = None, **scopes: dict[str, UserLimits]
) -> World:
    return World(SIZES, rules, limits=make_limits(default, **scopes))


def active_nodes_of(world: World, *owners: str) -> int:
    return sum(
        job.spec.request.total_size for job in world.queries.jobs() if job.state.is_active and job.spec.owner in owners
    )


# At the submission


def test_limit_exceeding_submission_is_rejected() -> None:
    grid = create_world(UserLimits(nodes=4))
    with pytest.raises(NeverAllowed) as raised:
        grid.submit(flexible(5), owner="alice")
    error = raised.value
    assert error.message == "the limit nodes of alice is 4: 0 are in use and 5 more asked for"
    assert (error.field, error.value) == ("limits.nodes", {"limit": 4, "used": 0, "asked": 5})
    assert error.hint == CONTACT
    assert grid.queries.jobs() == []


def test_limit_rejection_without_contact_names_command() -> None:
    grid = World(SIZES, limits=Limits(LimitSettings(UserLimits(nodes=1))))
    with pytest.raises(NeverAllowed) as raised:
        grid.submit(flexible(2), owner="alice")
    assert "koala limits" in raised.value.hint


def test_limit_of_queued_jobs_ignores_running_jobs() -> None:
    grid = create_world(UserLimits(queued_jobs=2), users={"bob": UserLimits(queued_jobs=0)})
    grid.submit(flexible(16), owner="alice")
    waiting = [grid.submit(flexible(16), owner="alice") for _ in range(2)]
    with pytest.raises(LimitReached, match="queued_jobs of alice is 2: 2 are in use and 1 more asked for"):
        grid.submit(flexible(1), owner="alice")
    with pytest.raises(NeverAllowed):
        grid.submit(flexible(1), owner="bob")
    grid.submit(flexible(1), owner="carl")
    grid.hold(waiting[0])
    with pytest.raises(LimitReached):
        grid.submit(flexible(1), owner="alice")
    grid.cancel(waiting[0])
    grid.submit(flexible(1), owner="alice")


def test_limit_of_node_hours_counts_walltime_or_whole_day() -> None:
    grid = create_world(UserLimits(node_hours_per_day=48))
    grid.submit(flexible(2), owner="alice")
    grid.submit(flexible(4), owner="bob", walltime=12 * 3600)
    for size, walltime in ((3, None), (4, 12 * 3600 + 60), (3, 100 * DAY)):
        with pytest.raises(NeverAllowed, match="node_hours_per_day"):
            grid.submit(flexible(size), owner="carl", walltime=walltime)


def test_limit_does_not_apply_to_internal_jobs() -> None:
    grid = create_world(UserLimits(queued_jobs=0, nodes=0, node_hours_per_day=0))
    job = grid.submit(flexible(2), owner="koala", internal=True)
    assert grid.state(job) is not JobState.QUEUED


# At the placement


def test_limit_reached_job_waits_while_others_are_placed() -> None:
    grid = create_world(UserLimits(nodes=4))
    first = grid.submit(flexible(3), owner="alice", run_time=10)
    second = grid.submit(flexible(2), owner="alice", run_time=10)
    third = grid.submit(flexible(1), owner="alice", run_time=10)
    other_owners_job = grid.submit(flexible(2), owner="bob", run_time=10)
    assert [grid.state(job) is JobState.QUEUED for job in (first, second, third, other_owners_job)] == [
        False,
        True,
        False,
        False,
    ]
    reason = f"the limit nodes of alice is 4: 4 are in use and 2 more asked for; {CONTACT}"
    assert grid.queries.waiting_reason(grid.job(second)) == reason
    explanation = explain(grid.queries, grid.job(second), (), grid.now)
    assert explanation.headline == reason
    assert any("there is room for it" in note for note in explanation.notes)
    assert (explanation.suffices, explanation.smallest_change) == ((), None)
    grid.advance(11)
    assert grid.state(second) is not JobState.QUEUED, "placed at once, without a scan"


def test_dry_run_names_reached_limit() -> None:
    grid = create_world(UserLimits(nodes=4))
    grid.submit(flexible(3), owner="alice")
    dry_run = explain_submission(grid.queries, JobSpec(flexible(2), ("x",), owner="alice"), grid.now)
    assert "the limit nodes of alice is 4" in dry_run.headline
    dry_run = explain_submission(grid.queries, JobSpec(flexible(2), ("x",), owner="bob"), grid.now)
    assert "would be placed at once" in dry_run.headline


@pytest.mark.evidence("M2")
@pytest.mark.parametrize("mode", ["scan", "head", "fcfs"])
def test_limit_reached_job_blocks_no_other(mode: QueueMode) -> None:
    grid = create_world(UserLimits(nodes=4), Rules(queue=mode))
    grid.submit(flexible(4), owner="alice")
    waiting_jobs = [grid.submit(flexible(size), owner="alice") for size in (4, 1)]
    other_jobs = [grid.submit(flexible(4), owner=owner) for owner in ("bob", "carl")]
    assert all(grid.state(job) is JobState.QUEUED for job in waiting_jobs)
    assert all(grid.state(job) is not JobState.QUEUED for job in other_jobs)


@pytest.mark.evidence("M2")
def test_job_over_limit_has_no_planned_start() -> None:
    grid = World({"north": 8}, Rules(plan_after=0), limits=make_limits(users={"alice": UserLimits(nodes=8)}))
    grid.submit(fixed(north=2), owner="alice", run_time=1000)
    grid.submit(fixed(north=8), owner="alice", run_time=10)
    for _ in range(4):
        grid.step([PeriodicScan()])
    assert grid.queries.planned_job is None
    later_job = grid.submit(fixed(north=6), owner="bob", run_time=10)
    assert grid.state(later_job) is not JobState.QUEUED


def test_limit_of_group_is_shared_beside_user_limits() -> None:
    grid = create_world(users={"carl": UserLimits(nodes=3)}, groups={"physics": UserLimits(nodes=5)})
    first = grid.submit(flexible(3), owner="carl", run_time=10)
    second = grid.submit(flexible(3), owner="dora", run_time=10)
    assert grid.state(first) is not JobState.QUEUED
    assert "nodes of the group physics is 5: 3 are in use" in grid.queries.waiting_reason(grid.job(second))
    with pytest.raises(NeverAllowed, match="of carl"):
        grid.submit(flexible(4), owner="carl")
    grid.submit(flexible(8), owner="alice")
    grid.advance(11)
    assert grid.state(second) is not JobState.QUEUED


def test_limit_of_node_hours_counts_used_and_possible_hours() -> None:
    grid = create_world(UserLimits(node_hours_per_day=8))
    first = grid.submit(flexible(4), owner="alice", walltime=3600, run_time=1800)
    second = grid.submit(flexible(4), owner="alice", walltime=3600, run_time=3600)
    third = grid.submit(flexible(4), owner="alice", walltime=3600, run_time=10)
    assert [grid.state(job) is JobState.QUEUED for job in (first, second, third)] == [False, False, True]
    grid.advance(1900)
    assert grid.state(first) is JobState.SUCCEEDED
    reason = grid.queries.waiting_reason(grid.job(third))
    assert "the limit node_hours_per_day of alice is 8: 6" in reason, "unused node-hours of the first job are returned"
    grid.advance(6 * 3600)
    assert grid.state(third) is JobState.QUEUED
    grid.advance(DAY)
    assert grid.state(third) is JobState.SUCCEEDED


def test_limit_of_node_hours_is_released_without_scan() -> None:
    grid = create_world(UserLimits(node_hours_per_day=4))
    grid.submit(flexible(4), owner="alice", walltime=3600, run_time=3600)
    waiting = grid.submit(flexible(4), owner="alice", walltime=3600, run_time=10)
    grid.advance(3700)
    assert grid.state(waiting) is JobState.QUEUED
    grid.now += DAY + 3600
    grid.step()
    assert grid.state(waiting) is JobState.CLAIMING


def test_limit_use_is_restored_by_next_daemon() -> None:
    use = OwnerUse(make_limits(UserLimits(node_hours_per_day=10)), [NodeUse("alice", 2, 0.0, 7200.0)])
    demand = use.demand_of(JobSpec(flexible(7), ("x",), owner="alice", walltime=3600))
    excess = use.excess_of(demand, 7200.0)
    assert excess is not None
    assert (excess.used, excess.requested) == (4.0, 7.0)
    assert use.excess_of(demand, 7200.0 + DAY) is None
    # Only the last day of a longer use counts.
    use = OwnerUse(make_limits(UserLimits(node_hours_per_day=10)), [NodeUse("alice", 1, -10 * DAY, 3600.0)])
    (scope,) = use.limits.scopes("alice")
    assert 23 <= use.current_use(scope, 3600.0)["node_hours_per_day"] <= 24


def test_limit_applies_to_high_priority() -> None:
    grid = create_world(UserLimits(nodes=4))
    grid.submit(flexible(4), owner="alice", priority=Priority.LOW)
    high_job = grid.submit(flexible(2), owner="alice", priority=Priority.HIGH)
    assert grid.state(high_job) is JobState.QUEUED


def test_limits_without_nodes_add_no_demand() -> None:
    grid, limited = World(SIZES), create_world(UserLimits(queued_jobs=5, bundle_bytes=5, requests_per_second=1.0))
    spec = JobSpec(flexible(2), ("x",), owner="alice")
    for world in (grid, limited):
        assert world.queries.owner_use.demand_of(spec) is None
        assert world.scheduler._queues.shape(spec) == World(SIZES).scheduler._queues.shape(spec)
    assert not grid.queries.owner_use.counts


# Whatever happens

OWNERS = ("alice", "bob", *PHYSICS)
drawn_actions = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from(OWNERS), st.integers(1, 6), st.sampled_from(list(Priority))),
    st.tuples(st.sampled_from(["cancel", "hold", "release"]), st.integers(0, 20)),
    st.tuples(st.just("advance"), st.sampled_from([1.0, 5.0, 20.0, 100.0])),
    st.tuples(st.sampled_from(["restart", "scan"])),
    st.tuples(st.sampled_from(["disconnect", "connect"]), st.sampled_from(list(SIZES))),
)


def perform_action(grid: World, action: tuple[object, ...]) -> None:
    jobs: list[Job] = sorted(grid.queries.jobs(), key=lambda job: job.id)
    match action:
        case ("submit", str(owner), int(size), Priority() as priority):
            try:
                grid.submit(flexible(size), owner=owner, priority=priority, walltime=50, run_time=30)
            except (LimitReached, NeverAllowed):
                return
        case ("cancel", int(number)) if jobs:
            grid.cancel(jobs[number % len(jobs)].id)
        case ("hold", int(number)) if queued := [job for job in jobs if job.state is JobState.QUEUED]:
            grid.hold(queued[number % len(queued)].id)
        case ("release", int(number)) if held_jobs := [job for job in jobs if job.state is JobState.HELD]:
            grid.release(held_jobs[number % len(held_jobs)].id)
        case ("advance", float(seconds)):
            grid.advance(seconds)
        case ("restart",):
            grid.restart()
            for name in SIZES:
                grid.connect(name)
        case ("scan",):
            grid.step([PeriodicScan()])
        case ("disconnect", str(name)):
            grid.disconnect(name)
        case ("connect", str(name)):
            grid.connect(name)


@pytest.mark.evidence("U10", "C13", "M1")
@given(actions=st.lists(drawn_actions, min_size=5, max_size=40), mode=st.sampled_from(["scan", "head", "fcfs"]))
def test_limits_are_never_exceeded_and_all_jobs_finish(actions: list[tuple[object, ...]], mode: QueueMode) -> None:
    grid = create_world(
        UserLimits(nodes=4, queued_jobs=6, node_hours_per_day=10),
        Rules(queue=mode),
        users={"bob": UserLimits(nodes=6)},
        groups={"physics": UserLimits(nodes=5)},
    )
    for action in actions:
        perform_action(grid, action)
        jobs = grid.queries.jobs()
        for owners, max_nodes in ((("alice",), 4), (("bob",), 6), (("carl",), 4), (("dora",), 4), (PHYSICS, 5)):
            assert active_nodes_of(grid, *owners) <= max_nodes, owners
        waiting = Counter(job.spec.owner for job in jobs if job.state in (JobState.QUEUED, JobState.HELD))
        for owner in OWNERS:
            user_scope = next(scope for scope in grid.queries.owner_use.limits.scopes(owner) if not scope.is_group)
            used = grid.queries.owner_use.current_use(user_scope, grid.now)
            assert (used["nodes"], used["queued_jobs"]) == (active_nodes_of(grid, owner), waiting[owner])
            assert used["node_hours_per_day"] >= 0
    for name in SIZES:
        grid.connect(name)
    for job in grid.queries.jobs():
        if job.state is JobState.HELD:
            grid.release(job.id)
    grid.advance(20_000)
    assert grid.queries.jobs() == [], "limits only delay jobs"


@pytest.mark.parametrize("mode", ["head", "fcfs"])
def test_limit_reached_head_unblocks_next_job_at_once(mode: QueueMode) -> None:
    """Its owner reaches the limit by another job of high priority."""
    world = World({"north": 4, "south": 3}, Rules(queue=mode), limits=make_limits(UserLimits(nodes=4)))
    world.submit(fixed(north=2), owner="zoe", run_time=1000)
    world.submit(fixed(south=2), owner="carl", run_time=5)
    world.submit(fixed(north=4), owner="anna")
    next_job = world.submit(fixed(south=2), owner="bert")
    world.advance(10)
    assert (world.state(next_job), world.queries.grid["south"].nodes.available) == (JobState.QUEUED, 3)
    world.submit(fixed(south=1), owner="anna", priority=Priority.HIGH, run_time=1000)
    assert world.state(next_job) is JobState.CLAIMING
