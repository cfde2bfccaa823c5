"""What owners may have at most: refused at the submission, or waited for, and in nobody else's way."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.errors import LimitReached, NeverAllowed
from koalapy.model.job import Job, JobSpec, JobState, Priority
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


def limits(default: UserLimits | None = None, **given: dict[str, UserLimits]) -> Limits:
    settings = LimitSettings(default or UserLimits(), given.get("users", {}), given.get("groups", {}))
    return Limits(settings, lambda user: ("physics",) if user in PHYSICS else (), CONTACT)


def world(default: UserLimits | None = None, rules: Rules | None = None, **given: dict[str, UserLimits]) -> World:
    return World(SIZES, rules, limits=limits(default, **given))


def nodes_of(world: World, *owners: str) -> int:
    return sum(
        job.spec.request.total_size for job in world.queries.jobs() if job.state.is_active and job.spec.owner in owners
    )


# At the submission


def test_a_job_that_asks_for_more_than_a_limit_is_refused_with_all_there_is_to_say() -> None:
    grid = world(UserLimits(nodes=4))
    with pytest.raises(NeverAllowed) as refusal:
        grid.submit(flexible(5), owner="alice")
    error = refusal.value
    assert error.message == "the limit nodes of alice is 4: 0 are in use and 5 more asked for"
    assert (error.field, error.value) == ("limits.nodes", {"limit": 4, "used": 0, "asked": 5})
    assert error.hint == CONTACT
    assert grid.queries.jobs() == []


def test_without_a_contact_the_way_out_is_told_all_the_same() -> None:
    grid = World(SIZES, limits=Limits(LimitSettings(UserLimits(nodes=1))))
    with pytest.raises(NeverAllowed) as refusal:
        grid.submit(flexible(2), owner="alice")
    assert "koala limits" in refusal.value.hint


def test_so_many_jobs_may_wait_and_those_that_run_do_not_count() -> None:
    grid = world(UserLimits(queued_jobs=2), users={"bob": UserLimits(queued_jobs=0)})
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


def test_a_job_whose_walltime_is_more_than_a_day_allows_is_refused_and_one_without_as_a_whole_day() -> None:
    grid = world(UserLimits(node_hours_per_day=48))
    grid.submit(flexible(2), owner="alice")
    grid.submit(flexible(4), owner="bob", walltime=12 * 3600)
    for size, walltime in ((3, None), (4, 12 * 3600 + 60), (3, 100 * DAY)):
        with pytest.raises(NeverAllowed, match="node_hours_per_day"):
            grid.submit(flexible(size), owner="carl", walltime=walltime)


def test_the_daemon_s_own_jobs_have_no_limits() -> None:
    grid = world(UserLimits(queued_jobs=0, nodes=0, node_hours_per_day=0))
    job = grid.submit(flexible(2), owner="koala", internal=True)
    assert grid.state(job) is not JobState.QUEUED


# At the placement


def test_who_has_as_much_as_may_be_waits_while_others_are_placed_and_is_told_why() -> None:
    grid = world(UserLimits(nodes=4))
    first = grid.submit(flexible(3), owner="alice", run_time=10)
    second = grid.submit(flexible(2), owner="alice", run_time=10)
    third = grid.submit(flexible(1), owner="alice", run_time=10)
    other = grid.submit(flexible(2), owner="bob", run_time=10)
    assert [grid.state(job) is JobState.QUEUED for job in (first, second, third, other)] == [False, True, False, False]
    said = f"the limit nodes of alice is 4: 4 are in use and 2 more asked for; {CONTACT}"
    assert grid.queries.waiting_reason(grid.job(second)) == said
    explanation = explain(grid.queries, grid.job(second), (), grid.now)
    assert explanation.headline == said
    assert any("there is room for it" in note for note in explanation.notes)
    assert (explanation.suffices, explanation.smallest_change) == ((), None)
    grid.advance(11)
    assert grid.state(second) is not JobState.QUEUED, "at once, and not at the next scan only"


def test_a_submission_that_would_wait_for_its_limit_is_told() -> None:
    grid = world(UserLimits(nodes=4))
    grid.submit(flexible(3), owner="alice")
    told = explain_submission(grid.queries, JobSpec(flexible(2), ("x",), owner="alice"), grid.now)
    assert "the limit nodes of alice is 4" in told.headline
    told = explain_submission(grid.queries, JobSpec(flexible(2), ("x",), owner="bob"), grid.now)
    assert "would be placed at once" in told.headline


@pytest.mark.evidence("M2")
@pytest.mark.parametrize("mode", ["scan", "head", "fcfs"])
def test_whom_a_limit_keeps_waiting_is_in_nobody_s_way(mode: QueueMode) -> None:
    grid = world(UserLimits(nodes=4), Rules(queue=mode))
    grid.submit(flexible(4), owner="alice")
    waits = [grid.submit(flexible(size), owner="alice") for size in (4, 1)]
    others = [grid.submit(flexible(4), owner=owner) for owner in ("bob", "carl")]
    assert all(grid.state(job) is JobState.QUEUED for job in waits)
    assert all(grid.state(job) is not JobState.QUEUED for job in others)


@pytest.mark.evidence("M2")
def test_no_nodes_are_kept_for_a_job_that_may_not_have_them() -> None:
    rules = Rules(aging_tries=2)
    grid = World({"north": 8}, rules, limits=limits(users={"alice": UserLimits(nodes=8)}))
    grid.submit(fixed(north=2), owner="alice", run_time=1000)
    grid.submit(fixed(north=8), owner="alice", run_time=10)
    for _ in range(4):
        grid.step([PeriodicScan()])
    assert grid.queries.reservation is None
    later = grid.submit(fixed(north=6), owner="bob", run_time=10)
    assert grid.state(later) is not JobState.QUEUED


def test_members_of_a_group_share_its_limit_and_have_their_own_beside() -> None:
    grid = world(users={"carl": UserLimits(nodes=3)}, groups={"physics": UserLimits(nodes=5)})
    first = grid.submit(flexible(3), owner="carl", run_time=10)
    second = grid.submit(flexible(3), owner="dora", run_time=10)
    assert grid.state(first) is not JobState.QUEUED
    assert "nodes of the group physics is 5: 3 are in use" in grid.queries.waiting_reason(grid.job(second))
    with pytest.raises(NeverAllowed, match="of carl"):
        grid.submit(flexible(4), owner="carl")
    grid.submit(flexible(8), owner="alice")
    grid.advance(11)
    assert grid.state(second) is not JobState.QUEUED


def test_node_hours_count_for_a_day_those_that_were_used_and_those_that_may_still_be() -> None:
    grid = world(UserLimits(node_hours_per_day=8))
    first = grid.submit(flexible(4), owner="alice", walltime=3600, run_time=1800)
    second = grid.submit(flexible(4), owner="alice", walltime=3600, run_time=3600)
    third = grid.submit(flexible(4), owner="alice", walltime=3600, run_time=10)
    assert [grid.state(job) is JobState.QUEUED for job in (first, second, third)] == [False, False, True]
    grid.advance(1900)
    assert grid.state(first) is JobState.SUCCEEDED
    said = grid.queries.waiting_reason(grid.job(third))
    assert "the limit node_hours_per_day of alice is 8: 6" in said, "what was not used of the first is given back"
    grid.advance(6 * 3600)
    assert grid.state(third) is JobState.QUEUED
    grid.advance(DAY)
    assert grid.state(third) is JobState.SUCCEEDED


def test_what_was_used_a_day_ago_is_given_back_with_the_first_step_and_without_a_scan() -> None:
    grid = world(UserLimits(node_hours_per_day=4))
    grid.submit(flexible(4), owner="alice", walltime=3600, run_time=3600)
    waiting = grid.submit(flexible(4), owner="alice", walltime=3600, run_time=10)
    grid.advance(3700)
    assert grid.state(waiting) is JobState.QUEUED
    grid.now += DAY + 3600
    grid.step()
    assert grid.state(waiting) is JobState.CLAIMING


def test_the_use_of_before_counts_for_the_next_daemon() -> None:
    use = OwnerUse(limits(UserLimits(node_hours_per_day=10)), [NodeUse("alice", 2, 0.0, 7200.0)])
    ask = use.demand_of(JobSpec(flexible(7), ("x",), owner="alice", walltime=3600))
    excess = use.excess_of(ask, 7200.0)
    assert excess is not None
    assert (excess.used, excess.requested) == (4.0, 7.0)
    assert use.excess_of(ask, 7200.0 + DAY) is None
    # Of what began before the day only the day counts.
    use = OwnerUse(limits(UserLimits(node_hours_per_day=10)), [NodeUse("alice", 1, -10 * DAY, 3600.0)])
    (scope,) = use.limits.scopes("alice")
    assert 23 <= use.current_use(scope, 3600.0)["node_hours_per_day"] <= 24


def test_high_priority_is_above_no_limit() -> None:
    grid = world(UserLimits(nodes=4))
    grid.submit(flexible(4), owner="alice", priority=Priority.LOW)
    urgent = grid.submit(flexible(2), owner="alice", priority=Priority.HIGH)
    assert grid.state(urgent) is JobState.QUEUED


def test_where_nothing_is_limited_nothing_is_counted_and_shapes_are_as_they_were() -> None:
    grid, limited = World(SIZES), world(UserLimits(queued_jobs=5, bundle_bytes=5, requests_per_second=1.0))
    spec = JobSpec(flexible(2), ("x",), owner="alice")
    for each in (grid, limited):
        assert each.queries.owner_use.demand_of(spec) is None
        assert each.scheduler._queues.shape(spec) == World(SIZES).scheduler._queues.shape(spec)
    assert not grid.queries.owner_use.counts


# Whatever happens

OWNERS = ("alice", "bob", *PHYSICS)
actions = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from(OWNERS), st.integers(1, 6), st.sampled_from(list(Priority))),
    st.tuples(st.sampled_from(["cancel", "hold", "release"]), st.integers(0, 20)),
    st.tuples(st.just("advance"), st.sampled_from([1.0, 5.0, 20.0, 100.0])),
    st.tuples(st.sampled_from(["restart", "scan"])),
    st.tuples(st.sampled_from(["disconnect", "connect"]), st.sampled_from(list(SIZES))),
)


def act(grid: World, action: tuple[object, ...]) -> None:
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
        case ("release", int(number)) if held := [job for job in jobs if job.state is JobState.HELD]:
            grid.release(held[number % len(held)].id)
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
@given(actions=st.lists(actions, min_size=5, max_size=40), mode=st.sampled_from(["scan", "head", "fcfs"]))
def test_nobody_ever_has_more_and_everybody_gets_what_he_may(
    actions: list[tuple[object, ...]], mode: QueueMode
) -> None:
    grid = world(
        UserLimits(nodes=4, queued_jobs=6, node_hours_per_day=10),
        Rules(queue=mode),
        users={"bob": UserLimits(nodes=6)},
        groups={"physics": UserLimits(nodes=5)},
    )
    for action in actions:
        act(grid, action)
        jobs = grid.queries.jobs()
        for owners, most in ((("alice",), 4), (("bob",), 6), (("carl",), 4), (("dora",), 4), (PHYSICS, 5)):
            assert nodes_of(grid, *owners) <= most, owners
        waiting = Counter(job.spec.owner for job in jobs if job.state in (JobState.QUEUED, JobState.HELD))
        for owner in OWNERS:
            own = next(scope for scope in grid.queries.owner_use.limits.scopes(owner) if not scope.is_group)
            used = grid.queries.owner_use.current_use(own, grid.now)
            assert (used["nodes"], used["queued_jobs"]) == (nodes_of(grid, owner), waiting[owner])
            assert used["node_hours_per_day"] >= 0
    for name in SIZES:
        grid.connect(name)
    for job in grid.queries.jobs():
        if job.state is JobState.HELD:
            grid.release(job.id)
    grid.advance(20_000)
    assert grid.queries.jobs() == [], "limits only ever delay"


@pytest.mark.parametrize("mode", ["head", "fcfs"])
def test_who_stood_behind_one_that_its_owner_may_not_have_any_more_is_tried_at_once(mode: QueueMode) -> None:
    """Its owner has too much for it by another job, of high priority."""
    here = World({"north": 4, "south": 3}, Rules(queue=mode), limits=limits(UserLimits(nodes=4)))
    here.submit(fixed(north=2), owner="zoe", run_time=1000)
    here.submit(fixed(south=2), owner="carl", run_time=5)
    here.submit(fixed(north=4), owner="anna")
    behind = here.submit(fixed(south=2), owner="bert")
    here.advance(10)
    assert (here.state(behind), here.queries.grid["south"].available) == (JobState.QUEUED, 3)
    here.submit(fixed(south=1), owner="anna", priority=Priority.HIGH, run_time=1000)
    assert here.state(behind) is JobState.CLAIMING
