"""Planned starts as users see them: kept without local users, learned delays with them, reasons where they move."""

from dataclasses import replace
from math import ceil
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.array import TaskIndices
from koalapy.model.job import ON_TIME_S, Job, JobId, JobState, PlannedStart
from koalapy.model.job_spec import ClaimingMode, Priority
from koalapy.scheduler.claims.claim import CLAIM_FAILED
from koalapy.scheduler.events import ClusterDrained
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import corrected
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

PLANNED = Rules(plan_after=0, scan_interval=10, high_scans_per_low=1)


def planned_start_of(world: World, job: JobId) -> PlannedStart:
    planned = world.job(job).planned_start
    assert planned is not None
    return planned


def restart(world: World) -> None:
    world.restart()
    for name in world.sites:
        world.connect(name)


requests = st.one_of(
    st.builds(flexible, st.integers(1, 9)),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda sizes: nonfixed(*sizes)),
    st.builds(lambda north: fixed(north=north), st.integers(1, 4)),
    st.builds(lambda north, south: fixed(north=north, south=south), st.integers(1, 4), st.integers(1, 3)),
)


@given(
    jobs=st.lists(
        st.tuples(requests, st.integers(5, 400), st.sampled_from([1.0, 1.0, 3.0]), st.integers(0, 60)),
        min_size=3,
        max_size=14,
    ),
    restarts=st.lists(st.integers(0, 80), max_size=2),
    plan_after=st.sampled_from([0.0, 30.0]),
)
def test_first_planned_start_is_kept_if_walltimes_are_known(
    jobs: list[tuple[Any, int, float, int]], restarts: list[int], plan_after: float
) -> None:
    """Without local users, failures and priorities, also if the daemon restarts."""
    world = World({"north": 4, "south": 3, "west": 2}, replace(PLANNED, plan_after=plan_after))
    arrivals = {}
    for request, run_time, factor, pause in jobs:
        arrivals[max(arrivals, default=0) + pause // 10 + 1] = request, run_time, factor
    for tick in range(400):
        if tick in arrivals:
            request, run_time, factor = arrivals[tick]
            world.submit(request, run_time=run_time, walltime=float(ceil(run_time * factor)) + 1)
        if tick in restarts:
            restart(world)
        world.advance(10)
        if tick > max(arrivals) and not world.queries.jobs():
            break
    for job in world.jobs.values():
        if (planned := job.planned_start) is not None:
            assert planned.is_certain
            assert planned.late is not None, f"job {job.id} has not started"
            assert planned.late <= ON_TIME_S, f"job {job.id} was planned for {planned.first}: {job.started_at}"
            assert planned.is_kept


def run_with_local_users(seed: int, jobs: int) -> list[Job]:
    """Run wide jobs, one after another, on a cluster with local users, and return them."""
    random = Random(seed)
    world = World({"north": 4}, PLANNED, strict=False)
    users: list[tuple[float, str]] = []
    ids = []
    for _ in range(jobs):
        world.submit(fixed(north=2), run_time=300, walltime=300)
        ids.append(world.submit(fixed(north=4), run_time=100, walltime=100))
        for _ in range(400):
            if random.random() < 0.03 and world.sites["north"].idle:
                user = world.sites["north"].add_local_user(random.randint(1, 2))
                users.append((world.now + random.expovariate(1 / 300), user))
            for _, user in [entry for entry in users if entry[0] <= world.now]:
                world.sites["north"].remove_local_user(user)
            users = [entry for entry in users if entry[0] > world.now]
            world.settle()
            world.advance(10)
            if not world.queries.jobs():
                break
    return [world.job(ident) for ident in ids]


def test_planned_starts_with_local_users_are_kept_nine_times_of_ten() -> None:
    planned = [job.planned_start for seed in range(3) for job in run_with_local_users(seed, 60)]
    learned = [
        entry for entry in planned if entry is not None and entry.late is not None and entry.earlier_starts >= 10
    ]
    assert len(learned) > 60
    assert sum(entry.is_kept for entry in learned) >= 0.9 * len(learned)
    unlearned_kept = sum(entry.late is not None and entry.late <= ON_TIME_S for entry in learned)
    assert unlearned_kept < 0.9 * len(learned), "without the learned delay fewer are kept"


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("local users", "local users took nodes on north"),
        ("no walltime", "job 1 runs longer than expected"),
        ("priority", "job 3 of higher priority came first"),
        ("drain", "north is drained"),
    ],
)
def test_moved_planned_start_names_reason(cause: str, reason: str, is_restarted: bool) -> None:
    rules = replace(PLANNED, preemption="never", default_walltime=1000.0)
    world = World({"north": 4}, rules, now=1_000_000.0)
    world.submit(fixed(north=3), run_time=3000, walltime=None if cause == "no walltime" else 1000.0)
    wide_job = world.submit(fixed(north=4), walltime=100.0)
    world.advance(20)
    first = planned_start_of(world, wide_job)
    assert first.is_certain is (cause != "no walltime")
    assert first.first == first.at == pytest.approx(world.now + 980, abs=80)
    verb = "starts" if first.is_certain else "is expected to start"
    assert f"; {verb} by 14:0" in world.queries.waiting_reason(world.job(wide_job))
    assert ", if no local user comes first" in world.queries.waiting_reason(world.job(wide_job))
    if is_restarted:
        restart(world)
        world.advance(20)
    match cause:
        case "local users":
            world.sites["north"].add_local_user(1)
            world.settle()
        case "priority":
            world.submit(fixed(north=1), run_time=4000, walltime=4000.0, priority=Priority.HIGH)
        case "drain":
            world.step([ClusterDrained("north")])
    world.advance(1100)
    moved = planned_start_of(world, wide_job)
    assert moved.moved_because == reason
    assert moved.first == first.first
    assert moved.at is None or moved.at > first.first + 60
    assert reason in world.queries.waiting_reason(world.job(wide_job))
    first_entry, last_entry = world.reasons(wide_job, "planned")
    assert first_entry.startswith("by ")
    assert first_entry.endswith(" on north")
    assert last_entry.endswith(reason)


@pytest.mark.parametrize("policy", ["", "close-to-files"])
def test_planned_start_includes_transfer_of_files(policy: str) -> None:
    from tests.scheduler.test_incremental import GRID, LINKS, with_input

    world = World(GRID, PLANNED, links=LINKS)
    world.submit(fixed(north=4, south=4), run_time=100, walltime=100)
    job = world.submit(with_input(nonfixed(4), size=60_000), policy=policy, walltime=100)
    assert planned_start_of(world, job).first == 720
    world.advance(900)
    planned, started_at = planned_start_of(world, job), world.job(job).started_at
    assert planned.is_kept
    assert started_at is not None
    assert 700 <= started_at < 701


def test_planned_start_is_kept_by_restarted_daemon_while_clusters_return() -> None:
    """A long job does not take the first nodes that return."""
    world = World({"north": 4, "south": 3}, PLANNED)
    world.submit(fixed(north=3), run_time=1000, walltime=1000.0)
    wide_job = world.submit(fixed(north=4, south=3), walltime=100.0)
    world.advance(20)
    long_job = world.submit(fixed(south=3), run_time=5000, walltime=5000.0)
    world.advance(20)
    assert world.state(long_job) is JobState.QUEUED
    promised = planned_start_of(world, wide_job)
    world.restart()
    assert planned_start_of(world, wide_job) == promised
    world.connect("south")
    world.advance(5)
    assert world.state(long_job) is JobState.QUEUED
    assert "starts by" in world.queries.waiting_reason(world.job(wide_job))
    world.connect("north")
    world.advance(1100)
    assert planned_start_of(world, wide_job) == replace(promised, late=planned_start_of(world, wide_job).late)
    assert planned_start_of(world, wide_job).is_kept


def test_planned_start_is_kept_while_cluster_is_out_of_contact_for_a_moment() -> None:
    world = World({"north": 4}, replace(PLANNED, unreachable_after=30.0))
    world.submit(fixed(north=3), run_time=1000, walltime=1000.0)
    wide_job = world.submit(fixed(north=4), walltime=100.0)
    world.advance(20)
    promised = planned_start_of(world, wide_job)
    world.disconnect("north")
    world.advance(20)
    assert planned_start_of(world, wide_job) == promised
    world.restart()
    world.connect("north")
    world.advance(20)
    assert planned_start_of(world, wide_job) == promised
    world.disconnect("north")
    world.advance(100)
    assert planned_start_of(world, wide_job).moved_because == "north is unreachable"


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("local_users", [0, 1])
def test_paused_job_has_its_turn_after_failed_claim_if_it_fits(local_users: int, is_restarted: bool) -> None:
    """Another job has the planned start during the pause. With a local user the first one does not fit any more."""
    rules = replace(PLANNED, restart_pause=200.0, restart_pause_max=200.0, error_threshold=100)
    world = World({"north": 4, "south": 4}, rules)
    world.submit(fixed(south=4), run_time=3000, walltime=3000.0)
    world.submit(fixed(north=3), run_time=100, walltime=100.0)
    paused_job, other_job = (world.submit(request, walltime=100.0) for request in (fixed(north=4), fixed(south=4)))
    world.sites["north"].rejection_fault = lambda size: "site" if size == 4 else ""
    world.advance(120)
    assert (world.job(paused_job).retry_at is not None, world.queries.planned_job) == (True, other_job)
    world.sites["north"].rejection_fault = lambda size: ""
    world.submit(fixed(north=2), run_time=1000, walltime=1000.0)
    for _ in range(local_users):
        world.sites["north"].add_local_user(1)
    if is_restarted:
        restart(world)
    world.advance(200)
    has_plan, has_none = (other_job, paused_job) if local_users else (paused_job, other_job)
    assert world.queries.planned_job == has_plan
    assert planned_start_of(world, has_none).at is None
    world.restart()
    assert world.queries.planned_job == has_plan


@pytest.mark.parametrize("is_restarted", [False, True])
def test_planned_start_is_kept_while_earlier_planned_job_claims_again(is_restarted: bool) -> None:
    from tests.scheduler.test_incremental import GRID, LINKS, with_input

    world = World(GRID, replace(PLANNED, claiming=ClaimingMode.INCREMENTAL, claim_grace=10.0), links=LINKS)
    world.submit(fixed(south=3), run_time=3000, walltime=3000.0)
    world.submit(fixed(north=3), run_time=100, walltime=100.0)
    claiming_job = world.submit(with_input(fixed(north=4), size=60_000), walltime=100.0)
    planned_job = world.submit(fixed(south=4), walltime=100.0)
    world.advance(500)
    attempt = world.job(claiming_job).attempt
    assert attempt is not None
    assert attempt.claim_at is not None
    world.now = attempt.claim_at
    world.sites["north"].add_local_user(1)  # not yet reported
    world.step()
    world.advance(15)
    assert world.timeline_events(claiming_job)[-1] == CLAIM_FAILED
    if is_restarted:
        restart(world)
    long_job = world.submit(fixed(south=1), run_time=5000, walltime=5000.0)
    assert (world.queries.planned_job, world.state(long_job)) == (planned_job, JobState.QUEUED)
    assert planned_start_of(world, planned_job).at is not None


def test_planned_start_on_lost_cluster_ends_after_restart() -> None:
    world = World({"north": 4, "south": 3}, PLANNED)
    world.submit(fixed(north=3), run_time=1000, walltime=1000.0)
    wide_job = world.submit(fixed(north=4), walltime=100.0)
    other_job = world.submit(fixed(south=3), run_time=50, walltime=5000.0)
    world.advance(20)
    world.restart()
    world.connect("south")
    world.advance(200)
    assert planned_start_of(world, wide_job).at is None
    assert "north is unreachable" in planned_start_of(world, wide_job).moved_because
    assert world.state(other_job) is JobState.SUCCEEDED


@pytest.mark.parametrize("step", [-7200.0, -100.0, 7200.0])
def test_planned_start_survives_step_of_the_clock(step: float) -> None:
    world = World({"north": 4}, PLANNED, now=1_000_000.0)
    world.submit(fixed(north=3), run_time=1000, walltime=1000.0)
    wide_job = world.submit(fixed(north=4), walltime=100.0)
    world.advance(20)
    planned = planned_start_of(world, wide_job)
    remaining = planned.first - planned.made_at
    job = corrected(world.job(wide_job), world.now + step, 3600.0)
    assert job.planned_start is not None
    assert job.planned_start.made_at <= world.now + step
    assert job.planned_start.first - job.planned_start.made_at == pytest.approx(remaining)
    assert "by" in job.planned_start.describe(world.now + step)


@pytest.mark.parametrize("end", ["held", "changed", "cancelled"])
@pytest.mark.parametrize("is_overdue", [False, True])
def test_planned_start_of_job_that_leaves_counts_only_if_broken(end: str, is_overdue: bool) -> None:
    world = World({"north": 4}, PLANNED)
    world.submit(fixed(north=3), run_time=3000, walltime=3000.0 if not is_overdue else 100.0)
    wide_job = world.submit(fixed(north=4), walltime=100.0)
    world.advance(20)
    world.sites["north"].add_local_user(1)
    world.settle()
    world.advance(400)
    match end:
        case "held":
            world.hold(wide_job)
        case "changed":
            world.change(wide_job, walltime=200.0)
        case "cancelled":
            world.cancel(wide_job)
    planned = world.job(wide_job).planned_start
    if is_overdue:
        assert planned is not None
        assert planned.late is not None
        assert not planned.is_kept
    else:
        assert planned is None or planned.made_at == world.now


def test_planned_start_of_array_passes_to_its_task() -> None:
    world = World({"north": 4}, PLANNED)
    world.submit(fixed(north=3), run_time=1000, walltime=1000.0)
    array = world.submit(fixed(north=4), walltime=100.0, array=TaskIndices.parse("0-1"))
    world.advance(20)
    promised = planned_start_of(world, array)
    world.advance(1010)
    assert world.job(array).planned_start is None
    assert planned_start_of(world, array + 1).first == promised.first
    assert planned_start_of(world, array + 1).is_kept
