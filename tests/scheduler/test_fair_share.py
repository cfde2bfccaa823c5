"""Fair share: use by weight, what is charged, and the order of waiting jobs."""

from collections import Counter
from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobId, JobState
from koalapy.model.job_spec import ClaimingMode, JobSpec, Priority
from koalapy.model.limits import DAY, Charge, FairShareSettings, ShareLine
from koalapy.model.request import FlexibleRequest
from koalapy.model.reservation import Reservation, ReservationState, ReservedPart
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.events import ReservationChanged, WeightChanged
from koalapy.scheduler.fair_share import FairShares
from koalapy.scheduler.owner_use import OwnerUse
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.moment import moment_of
from koalapy.simulation.record.format import People
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import SimulatedCluster, SimulatedGrid
from tests.scheduler.test_shared_nodes import SharingWorld
from tests.scheduler.world import World

HOUR = 3600.0
FAIR = Rules(queue_order="fair-share")
GROUPS = {"ann": ["physics"], "ben": ["chess", "physics"], "cyd": ["biology"]}


def groups_of(user: str) -> list[str]:
    return GROUPS.get(user, [])


def fair_world(**weights: float) -> World:
    """Return a grid of eight nodes with fair shares."""
    return World({"north": 8}, FAIR, shares=(FairShareSettings(users=weights),))


def submit(world: World, owner: str, nodes: int = 8, **fields: Any) -> JobId:
    return world.submit(FlexibleRequest(nodes), owner=owner, **fields)


def order_of(world: World) -> list[JobId]:
    """Return the waiting jobs in queue order."""
    positions = world.queries.queues.positions(job for job in world.jobs.values() if job.state is JobState.QUEUED)
    return sorted(positions, key=positions.__getitem__)


def line_of(shares: FairShares, now: float, *, user: str = "", group: str = "") -> ShareLine:
    return next(line for line in shares.lines(now) if line.user == user and line.group in (group, line.group))


# Order


def test_set_weight_orders_waiting_jobs_anew() -> None:
    world = fair_world()
    submit(world, "ann", 4, run_time=HOUR)
    submit(world, "ben", 4, run_time=HOUR)
    of_ann, of_ben = submit(world, "ann"), submit(world, "ben")
    assert order_of(world) == [of_ann, of_ben]
    world.step([WeightChanged("ben", 3.0)])
    assert order_of(world) == [of_ben, of_ann]
    known = moment_of(world.queries, People(), world.now).beginning.people.fair_share
    assert known is not None
    assert known.users["ben"] == 3.0
    world.step([WeightChanged("ben", 0.5)])
    assert order_of(world) == [of_ann, of_ben]


def test_job_of_user_with_less_use_starts_before_older_job() -> None:
    world = fair_world()
    submit(world, "ann", run_time=HOUR)
    older, newer = submit(world, "ann"), submit(world, "ben")
    assert order_of(world) == [newer, older]
    world.advance(HOUR + 5)
    assert (world.state(newer), world.state(older)) == (JobState.RUNNING, JobState.QUEUED)


def test_job_of_user_with_more_weight_starts_first_after_equal_use() -> None:
    world = fair_world(ben=3.0)
    submit(world, "ann", 4, run_time=HOUR)
    submit(world, "ben", 4, run_time=HOUR)
    of_ann, of_ben = submit(world, "ann"), submit(world, "ben")
    assert order_of(world) == [of_ben, of_ann]


def test_jobs_of_one_user_keep_their_age_order() -> None:
    world = fair_world()
    submit(world, "ann", run_time=HOUR)
    jobs = [submit(world, "ann", nodes) for nodes in (8, 7, 8, 6)]
    assert order_of(world) == jobs


def test_jobs_of_weight_zero_come_after_all_others() -> None:
    world = fair_world(zed=0.0)
    submit(world, "ann", run_time=HOUR)
    of_zed, of_ann = submit(world, "zed"), submit(world, "ann")
    assert order_of(world) == [of_ann, of_zed]


def test_position_with_fair_share_counts_jobs_before() -> None:
    world = fair_world()
    submit(world, "ann", run_time=HOUR)
    for owner in ("ann", "ben", "ann", "cyd", "ben"):
        submit(world, owner)
    listed = list(world.queries.queues[Priority.LOW])
    assert [world.queries.queues.position(world.jobs[job]) for job in listed] == [1, 2, 3, 4, 5]
    assert [world.jobs[job].spec.owner for job in listed] == ["ben", "cyd", "ben", "ann", "ann"]


# Charges


def test_use_of_ended_job_decays_with_half_life() -> None:
    shares = FairShares(FairShareSettings(half_life=DAY), past=[Charge("ann", 8 * HOUR, 0.0)])
    assert line_of(shares, 0.0, user="ann").node_hours == pytest.approx(8.0)
    assert line_of(shares, 2 * DAY, user="ann").node_hours == pytest.approx(2.0)


def test_clock_set_back_changes_no_charge() -> None:
    shares = FairShares(FairShareSettings(half_life=DAY), past=[Charge("ann", HOUR, 10 * DAY)])
    assert shares.standing("ann", 0.0) == shares.standing("ann", 10 * DAY)


def test_ended_job_is_charged_with_its_node_seconds() -> None:
    world = fair_world()
    submit(world, "ann", 4, run_time=HOUR)
    world.advance(HOUR + 5)
    assert node_hours(world, "ann") == pytest.approx(4.0, rel=0.01)


def shares_of(world: World) -> FairShares:
    shares = world.queries.owner_use.shares
    assert shares is not None
    return shares


def node_hours(world: World, user: str) -> float:
    return line_of(shares_of(world), world.now, user=user).node_hours


def test_preempted_attempt_is_not_charged() -> None:
    world = fair_world()
    low = submit(world, "ann", run_time=HOUR)
    world.advance(HOUR / 2)
    submit(world, "ben", priority=Priority.HIGH, run_time=HOUR)
    world.advance(60.0)
    assert world.state(low) is JobState.QUEUED
    assert node_hours(world, "ann") == 0.0


def test_restored_daemon_orders_jobs_as_before() -> None:
    world = fair_world()
    submit(world, "ann", run_time=HOUR)
    older, newer = submit(world, "ann"), submit(world, "ben")
    world.restart()
    assert order_of(world) == [newer, older]


def test_shared_job_is_charged_for_its_processors() -> None:
    """Jobs with 1 and 3 of the 4 cores of each node have 1 and 3 quarters of the use."""
    world = SharingWorld({"north": 8}, FAIR, shares=(FairShareSettings(),))
    world.share(8, cores=1, owner="ann", run_time=HOUR)
    world.share(8, cores=3, owner="ben", run_time=HOUR)
    world.advance(60)
    assert line_of(shares_of(world), world.now, user="ben").nodes == 6
    world.advance(HOUR + 5)
    assert [node_hours(world, user) for user in ("ann", "ben")] == pytest.approx([2.0, 6.0], rel=0.02)


def test_kept_reservation_is_charged_to_its_owner_and_not_to_its_jobs() -> None:
    world = fair_world()
    reservation = Reservation(
        1,
        "lecture",
        "koala-1",
        "ann",
        HOUR,
        3 * HOUR,
        (ReservedPart("north", 4),),
        0.0,
        ("ben",),
        ReservationState.MADE,
    )
    world.step([ReservationChanged(reservation)])
    submit(world, "ben", 4, reservation="lecture", run_time=HOUR / 2)
    shares = shares_of(world)
    assert shares.standing("ann", HOUR - 1)[0] == 0.0
    assert shares.standing("ann", 2 * HOUR)[0] == 4 * 2 * HOUR
    assert line_of(shares, 2 * HOUR, user="ann").nodes == 4
    over = replace(reservation, state=ReservationState.CANCELLED, changed_at=2 * HOUR)
    for _ in range(2):
        world.step([ReservationChanged(over)])
    assert line_of(shares, 2 * HOUR, user="ann").node_hours == pytest.approx(4.0)
    assert shares.standing("ben", 2 * HOUR)[0] == 0.0


def test_restored_reservation_is_charged_as_before() -> None:
    settings, now = FairShareSettings(), 5 * HOUR
    parts = (ReservedPart("north", 4),)
    ended = Reservation(1, "early", "koala-1", "ann", 0.0, HOUR, parts, 2 * HOUR, (), ReservationState.OVER)
    kept = Reservation(2, "late", "koala-2", "ann", 4 * HOUR, 9 * HOUR, parts, 0.0, (), ReservationState.MADE)
    failed = replace(ended, id=3, state=ReservationState.FAILED)
    shares = FairShares(settings)
    for reservation in (ended, kept, failed):
        shares.store_reservation(reservation)
    assert shares.standing("ann", now)[0] == pytest.approx(4 * HOUR + 4 * 2 * HOUR, rel=0.03)


@pytest.mark.parametrize("ahead", [0.0, DAY])
def test_use_counts_from_the_restart_of_a_clock_that_was_ahead(ahead: float) -> None:
    world = World({"north": 8}, FAIR, shares=(FairShareSettings(),), now=10 * DAY)
    job = submit(world, "ann", 4, run_time=HOUR)
    world.advance(60)
    world.now -= ahead
    world.restart()
    world.connect("north")
    seconds_ahead = HOUR + (0.0 if ahead else 60.0)
    assert shares_of(world).standing("ann", world.now)[0] == pytest.approx(4 * seconds_ahead)
    world.cancel(job)
    world.settle()
    assert shares_of(world).standing("ann", world.now)[0] == pytest.approx(node_hours(world, "ann") * HOUR)


def test_restored_reservation_that_ended_by_a_clock_ahead_is_charged_until_now() -> None:
    shares = FairShares()
    state = SchedulerState(FAIR, builtin_policies(), [], owner_use=OwnerUse(None, shares=shares))
    parts, ended = (ReservedPart("north", 4),), ReservationState.OVER
    reservation = Reservation(1, "lecture", "koala-1", "ann", 0.0, 400 * DAY, parts, 365 * DAY, (), ended)
    Scheduler(state, str).restore([], DAY, reservations=[reservation])
    assert line_of(shares, DAY, user="ann").node_hours == pytest.approx(4 * 24)


# Groups


def test_groups_share_before_their_members() -> None:
    settings = FairShareSettings(groups={"physics": 3.0, "biology": 1.0})
    past = [Charge("ann", 2 * HOUR, 0.0), Charge("ben", HOUR, 0.0), Charge("cyd", 2 * HOUR, 0.0)]
    shares = FairShares(settings, groups_of, past)
    assert sorted(("ann", "ben", "cyd"), key=lambda user: shares.standing(user, 0.0)) == ["ben", "ann", "cyd"]
    lines = list(shares.lines(0.0))
    assert [(line.group, line.user) for line in lines] == [
        ("physics", ""),
        ("physics", "ben"),
        ("physics", "ann"),
        ("biology", ""),
        ("biology", "cyd"),
    ]
    assert [line.target for line in lines] == [0.75, 0.375, 0.375, 0.25, 0.25]
    assert [round(line.share, 3) for line in lines] == [0.6, 0.2, 0.4, 0.4, 0.4]


def test_user_without_weighted_group_stands_beside_the_groups() -> None:
    shares = FairShares(FairShareSettings(groups={"physics": 1.0}), groups_of, [Charge("cyd", HOUR, 0.0)])
    assert [(line.group, line.user, line.target) for line in shares.lines(0.0)] == [("", "cyd", 1.0)]


@given(
    charges=st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0, 1e7), st.floats(0, 30 * DAY)).map(lambda row: Charge(*row)),
        max_size=20,
    ),
    data=st.data(),
)
def test_order_of_past_charges_does_not_matter(charges: list[Charge], data: st.DataObject) -> None:
    now = 30 * DAY
    shuffled = data.draw(st.permutations(charges))
    first, second = FairShares(past=charges), FairShares(past=shuffled)
    for user in "abc":
        assert first.standing(user, now) == pytest.approx(second.standing(user, now), rel=1e-6, abs=1e-6)
        assert 0 <= first.standing(user, now)[0] < inf


# Saturation

WEIGHTS = {"ann": 1.0, "ben": 2.0, "cyd": 5.0}


def used_shares(widths: dict[str, tuple[int, int]], days: float, high: float = 0.0, **rules: Any) -> dict[str, float]:
    """Return the percentage of node time of each user, with more work than the grid of 256 nodes can do."""
    draws, jobs = Random(1), []
    for user, weight in WEIGHTS.items():
        missing = 1.8 * weight / 8 * 256 * DAY * days
        while missing > 0:
            nodes, run_time = draws.randint(*widths[user]), draws.uniform(600, 7200)
            priority = Priority.HIGH if draws.random() < high else Priority.LOW
            spec = JobSpec(
                FlexibleRequest(nodes),
                ("program",),
                owner=user,
                policy="cluster-minimization",
                walltime=run_time + 60,
                priority=priority,
            )
            jobs.append(PlannedJob(0.0, spec, run_time))
            missing -= nodes * run_time
    draws.shuffle(jobs)
    shares = FairShares(FairShareSettings(half_life=DAY * days / 2, users=WEIGHTS))
    grid = SimulatedGrid({f"site{number}": SimulatedCluster(64) for number in range(4)})
    rules = {"queue_order": "fair-share", "plan_after": 0.0} | rules
    outcome = Simulation(grid, Rules(**rules), until=DAY * days, shares=shares).run(jobs)
    used = Counter[str]()
    for job in outcome.jobs:
        if job.started is not None:
            used[job.planned.spec.owner] += job.nodes * (job.ended - job.started)
    return {user: 100 * used[user] / used.total() for user in WEIGHTS}


TARGETS = {"ann": 12.5, "ben": 25.0, "cyd": 62.5}
SATURATED = {
    "equal_widths": ({"ann": (8, 16), "ben": (8, 16), "cyd": (8, 16)}, 1.0, {}),
    "narrow_with_least_weight": ({"ann": (1, 2), "ben": (16, 32), "cyd": (64, 128)}, 2.0, {}),
    "wide_with_least_weight": ({"ann": (64, 128), "ben": (16, 32), "cyd": (4, 8)}, 2.0, {}),
    "priorities_and_preemption": ({"ann": (4, 8), "ben": (4, 16), "cyd": (8, 16)}, 1.0, {"high": 0.3}),
    "incremental_claiming": (
        {"ann": (4, 8), "ben": (4, 16), "cyd": (8, 16)},
        1.0,
        {"high": 0.3, "claiming": ClaimingMode.INCREMENTAL, "preemption": "claiming"},
    ),
}


@pytest.mark.parametrize(
    "case", [case if "narrow" in case else pytest.param(case, marks=pytest.mark.nightly) for case in SATURATED]
)
def test_saturated_grid_gives_shares_by_weight(case: str) -> None:
    widths, days, options = SATURATED[case]
    assert used_shares(widths, days, **options) == pytest.approx(TARGETS, abs=2.0)


@pytest.mark.nightly
def test_saturated_grid_with_shared_nodes_gives_processors_by_weight() -> None:
    """Jobs of ann hold whole nodes, those of ben a core, and those of cyd one to three of the four cores of a node."""
    draws, span = Random(1), 40 * HOUR
    settings = FairShareSettings(half_life=span, users=WEIGHTS)
    world = SharingWorld({"north": 16}, replace(FAIR, plan_after=0.0), shares=(settings,))
    used = Counter[str]()
    waiting: dict[JobId, tuple[str, float]] = {}
    while world.now < span:
        for user in WEIGHTS:
            while sum(owner == user and world.state(job) is JobState.QUEUED for job, (owner, _) in waiting.items()) < 4:
                run_time = draws.uniform(600, 3600)
                cores = 1 if user == "ben" else draws.randint(1, 3)
                fields = {} if user == "ann" else {"share": True, "cores": cores}
                job = submit(world, user, draws.randint(1, 4), run_time=run_time, walltime=run_time + 60, **fields)
                waiting[job] = user, run_time * (1.0 if user == "ann" else cores / 4)
        world.advance(300)
        for job in [job for job in waiting if world.state(job).is_final]:
            user, part = waiting.pop(job)
            used[user] += part * world.job(job).spec.request.total_size
    shares = {user: 100 * used[user] / used.total() for user in WEIGHTS}
    assert shares == pytest.approx(TARGETS, abs=2.0)
