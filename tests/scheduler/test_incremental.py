"""Claiming before the job start time: the JCT series, T, L, re-placement, and the barrier (semantics 5)."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import Link
from koalapy.model.job import DEFAULT_LEASE, ClaimingMode, ComponentState, JobState
from koalapy.model.request import FixedRequest, InputFile, NonFixedRequest
from koalapy.scheduler.events import ClusterDrained, ClusterResumed
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, nonfixed
from tests.scheduler.world import START_DELAY, World

GRID = {"north": 4, "south": 4, "files": 0}
LINKS = {(a, b): Link(0.001, 100.0) for a in GRID for b in GRID if a < b}
"""100 bytes a second: a file of 1600 bytes takes 16 s."""


def with_input(request: Any, size: int = 1600, sites: tuple[str, ...] = ("files",)) -> Any:
    """The request with an input file for each component, which lies on a cluster without nodes."""
    components = tuple(replace(c, inputs=(InputFile(f"f{i}", size, sites),)) for i, c in enumerate(request.components))
    return FixedRequest(components) if isinstance(request, FixedRequest) else NonFixedRequest(components)


def incremental(**rules: Any) -> Rules:
    return Rules(claiming=ClaimingMode.INCREMENTAL, **rules)


def world_of(rules: Rules, lease: float = DEFAULT_LEASE) -> World:
    return World(GRID, rules, links=LINKS, lease=lease)


def tries(world: World, job: int) -> list[float]:
    """When a job was claimed for without starting, or started, anything."""
    return [e.at for e in world.timeline if e.job == job and e.event in ("claim-try", "claiming")]


def test_a_job_without_inputs_is_claimed_for_at_once() -> None:
    world = world_of(incremental())
    job = world.submit(nonfixed(2, 2))
    attempt = world.job(job).attempt
    assert attempt is not None
    assert (attempt.start_estimate, attempt.claim_at, world.job(job).placed_at) == (0, 0, 0)
    assert world.state(job) is JobState.CLAIMING


def test_claiming_begins_at_the_first_jct_and_the_barrier_opens_at_the_jst() -> None:
    """JCT0 = JPT + L * FTT with L = 0.75 and FTT = 16 s."""
    world = world_of(incremental())
    job = world.submit(with_input(fixed(north=2, south=3)))
    attempt = world.job(job).attempt
    assert attempt is not None
    assert world.state(job) is JobState.PLACED
    assert (attempt.start_estimate, attempt.claim_at) == (16, 12)
    assert {c.state for c in attempt.components} == {ComponentState.PLACED}
    assert {(c.file_site, c.transfer_time) for c in attempt.components} == {("files", 16)}
    world.advance(11)
    assert world.commands(job) == [], "nothing holds nodes while files are on their way"
    assert all(cluster.available == cluster.total for cluster in world.queries.grid.clusters())
    world.advance(2)
    assert world.state(job) is JobState.CLAIMING
    assert all(site.in_phase("claimed") for name, site in world.sites.items() if name != "files")
    world.advance(2.9)
    assert world.state(job) is JobState.CLAIMING, "it waits at the barrier for its files"
    world.advance(0.2)
    assert world.job(job).started_at == 16
    world.advance(20)
    assert world.state(job) is JobState.SUCCEEDED
    check_nothing_remains(world)


def test_the_jct_series_of_the_paper() -> None:
    """JCT(n+1) = JCT(n) + L * (JST - JCT(n)), until it is within epsilon of the JST; then L is lowered."""
    world = world_of(incremental(event_driven=False, scan_interval=1000, claim_epsilon=0.05))
    job = world.submit(with_input(fixed(north=4, south=4)))
    world.sites["south"].add_local_user(1)
    world.advance(15.999)
    assert tries(world, job) == [12, 15, 15.75, 15.9375]
    assert world.job(job).claiming_tries == 4
    assert world.state(job) is JobState.QUEUED
    assert world.reasons(job, "requeued") == ["claim-failed: no room on south before its start time"]
    assert world.job(job).claim_factor == 0.625
    assert world.job(job).restarts == 0
    assert all(cluster.available == cluster.reported_idle for cluster in world.queries.grid.clusters()), (
        "all is given back"
    )
    check_nothing_remains(world)


def test_components_that_can_start_hold_their_nodes_from_the_first_try_on() -> None:
    world = world_of(incremental(claim_epsilon=0.05))
    job = world.submit(with_input(fixed(north=4, south=4)))
    user = world.sites["south"].add_local_user(1)
    world.advance(14)
    assert world.state(job) is JobState.CLAIMING
    assert [c.state for c in world.job(job).attempt.gang] == [ComponentState.CLAIMED, ComponentState.PLACED]  # type: ignore[union-attr]
    assert world.queries.grid["north"].available == 0
    world.sites["south"].remove_local_user(user)
    world.advance(30)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.job(job).claiming_tries == 2
    assert world.job(job).started_at == 16


def test_atomic_is_t_of_one() -> None:
    """Nothing is started before everything can be."""
    for rules in (Rules(claim_epsilon=0.05), incremental(claim_threshold=1.0, claim_epsilon=0.05)):
        world = world_of(rules)
        job = world.submit(with_input(fixed(north=4, south=4)))
        user = world.sites["south"].add_local_user(1)
        world.advance(14)
        assert world.state(job) is JobState.PLACED
        assert world.commands(job) == []
        assert world.queries.grid["north"].available == 4, "others may have them"
        world.sites["south"].remove_local_user(user)
        world.advance(30)
        assert world.state(job) is JobState.SUCCEEDED


def test_a_fraction_below_t_starts_nothing() -> None:
    world = World(
        {"a": 1, "b": 1, "c": 1, "files": 0},
        incremental(claim_threshold=0.5, claim_epsilon=0.01),
        links={("files", name): Link(None, 100.0) for name in "abc"},
    )
    job = world.submit(with_input(fixed(a=1, b=1, c=1)))
    users = [world.sites[name].add_local_user(1) for name in "bc"]
    world.advance(14)
    assert world.commands(job) == [], "one of three is less than a half"
    world.sites["b"].remove_local_user(users[0])
    world.advance(1.5)
    assert len(world.commands(job)) == 2, "two of three are not"


def test_a_jobs_own_threshold_goes_before_the_rules() -> None:
    world = world_of(Rules(claim_epsilon=0.05))
    job = world.submit(with_input(fixed(north=4, south=4)), claim_threshold=0.5)
    other = world.submit(with_input(fixed(north=4)), claiming=ClaimingMode.ATOMIC)
    world.sites["south"].add_local_user(1)
    world.advance(14)
    assert world.state(job) is JobState.CLAIMING
    assert world.state(other) is JobState.PLACED


def test_a_component_without_room_is_re_placed() -> None:
    """Its own cluster was taken by local users; another has room, and the file is there in time."""
    grid = {"north": 4, "south": 4, "west": 4, "files": 0}
    links = {
        ("files", "north"): Link(None, 100.0),
        ("files", "south"): Link(None, 100.0),
        ("files", "west"): Link(None, 1e6),
    }
    world = World(grid, incremental(), links=links)
    job = world.submit(with_input(nonfixed(4, 4)), policy="worst-fit")
    before = [c.cluster for c in world.job(job).attempt.gang]  # type: ignore[union-attr]
    assert before == ["north", "south"]
    world.sites["south"].add_local_user(1)
    world.advance(13)
    moved = world.job(job).attempt.gang[1]  # type: ignore[union-attr]
    assert (moved.cluster, moved.file_site, moved.transfer_time) == ("west", "files", 0.0016)
    assert world.reasons(job, "re-placed") == ["south had no room"]
    world.advance(30)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.job(job).started_at == 16
    check_nothing_remains(world)


def test_no_re_placement_whose_file_would_come_too_late_and_none_of_a_fixed_component() -> None:
    grid = {"north": 4, "south": 4, "west": 4, "files": 0}
    links = {("files", name): Link(None, 100.0) for name in ("north", "south", "west")}
    for request in (nonfixed(4, 4), fixed(north=4, south=4)):
        world = World(grid, incremental(claim_epsilon=0.05), links=links)
        job = world.submit(with_input(request))
        world.sites["south"].add_local_user(1)
        world.advance(15.5)
        assert world.reasons(job, "re-placed") == []
        assert [c.cluster for c in world.job(job).attempt.gang] == ["north", "south"]  # type: ignore[union-attr]


def test_a_component_is_re_placed_while_its_runner_waits_in_the_lrm() -> None:
    """Overtaken by local users after it was started: the old runner is ended, and another component stands in."""
    grid = {"north": 4, "south": 4, "west": 4, "files": 0}
    links = {("files", name): Link(None, 10.0) for name in ("north", "south")} | {("files", "west"): Link(None, 1e6)}
    world = World(grid, incremental(claim_grace=5), links=links, manual=True)
    for name in grid:
        world.deliver(name)
    job = world.submit(with_input(nonfixed(4, 4)), policy="worst-fit")
    assert world.job(job).attempt.start_estimate == 160  # type: ignore[union-attr]
    world.sites["south"].add_local_user(1)  # nobody has told yet
    world.start_automation()
    world.now = 120.0
    world.step()
    world.run_commands("south")
    world.deliver("south")
    world.advance(4)
    old = world.job(job).attempt.components[1]  # type: ignore[union-attr]
    assert (old.cluster, old.state) == ("south", ComponentState.WAITING)
    world.advance(200)
    attempt = world.job(job).attempt
    assert attempt is not None
    assert [c.superseded for c in attempt.components] == [False, True, False]
    assert [(c.cluster, c.rank) for c in attempt.gang] == [("north", 0), ("west", 1)]
    assert world.job(job).generation == 1
    assert world.job(job).state is JobState.SUCCEEDED
    assert world.queries.grid["south"].health.errors == 0
    check_nothing_remains(world)


def test_l_is_lowered_to_its_bound_and_no_further() -> None:
    world = world_of(incremental(scan_interval=20))
    user = world.sites["south"].add_local_user(0)
    job = world.submit(with_input(fixed(north=4, south=4)))
    factors = []
    for _ in range(6):
        blocker = world.sites["south"].add_local_user(4)
        world.advance(16)
        factors.append(world.job(job).claim_factor)
        assert world.state(job) is JobState.QUEUED
        world.sites["south"].remove_local_user(blocker)
        world.settle()
        assert world.state(job) is JobState.PLACED
    world.sites["south"].remove_local_user(user)
    assert factors == [0.625, 0.5, 0.375, 0.25, 0.25, 0.25]
    done = world.job(job)
    assert done.attempt is not None
    assert done.first_start_estimate == 16
    assert done.attempt.start_estimate == 16 * 7


def test_a_job_that_may_be_claimed_for_only_so_often_fails() -> None:
    world = world_of(incremental())
    job = world.submit(with_input(fixed(north=4, south=4)), max_claiming_tries=2)
    world.sites["south"].add_local_user(1)
    world.advance(15.5)
    assert world.state(job) is JobState.FAILED
    assert world.job(job).reason == "not claimed in 2 tries: no room on south"
    check_nothing_remains(world)


# A cluster that is not there to be claimed for


class Gone:
    """A cluster takes nothing, for one reason or another, and comes back."""

    def __init__(self, why: str) -> None:
        self.why = why

    def goes(self, world: World) -> None:
        match self.why:
            case "disconnected":
                world.disconnect("south")
            case "the daemon restarts":
                world.restart()
                for name in ("north", "files"):
                    world.connect(name)
            case "drained":
                world.step([ClusterDrained("south", "ops", "disks")])
            case "its resource manager hangs":
                world.sites["south"].set_problem("slurmctld does not answer")
        world.settle()

    def returns(self, world: World) -> None:
        match self.why:
            case "drained":
                world.step([ClusterResumed("south")])
            case "its resource manager hangs":
                world.sites["south"].set_problem("")
            case _:
                world.connect("south")
        world.settle()


GONE = ["disconnected", "the daemon restarts", "drained", "its resource manager hangs"]


@pytest.mark.parametrize("why", GONE)
@given(
    mode=st.sampled_from(ClaimingMode),
    request=st.sampled_from([fixed(south=4), fixed(north=4, south=4), fixed(north=2, south=3)]),
    at=st.integers(0, 11),
    away=st.sampled_from([1, 5, 30, 100]),
)
def test_a_claim_for_which_a_cluster_is_not_there_is_no_try(
    why: str, mode: ClaimingMode, request: FixedRequest, at: int, away: float
) -> None:
    """The job waits as one does that comes while the cluster is away; whoever is overtaken then has used up its try."""
    rules = Rules(claiming=mode, max_claiming_tries=1, scan_interval=5, barrier_timeout=20)
    world, gone = world_of(rules), Gone(why)
    job = world.submit(with_input(request))
    world.advance(at)
    gone.goes(world)
    world.advance(away)
    assert not world.state(job).is_final
    assert world.job(job).claiming_tries <= 1
    assert world.job(job).generation <= 2, "it is not placed before the cluster is back"
    gone.returns(world)
    world.advance(120)
    assert world.state(job) is JobState.SUCCEEDED
    assert (world.job(job).claiming_tries, world.job(job).restarts) == (1, 0)
    check_nothing_remains(world)


@given(why=st.sampled_from(GONE), mode=st.sampled_from(ClaimingMode), overtaken=st.integers(1, 3))
def test_whom_a_cluster_was_away_for_has_all_its_tries_left(why: str, mode: ClaimingMode, overtaken: int) -> None:
    rules = Rules(claiming=mode, max_claiming_tries=overtaken, scan_interval=5, barrier_timeout=20, claim_epsilon=5)
    world, gone = world_of(rules), Gone(why)
    job = world.submit(with_input(fixed(south=4)))
    gone.goes(world)
    world.advance(30)
    waits = world.job(job)
    assert (waits.state, waits.claiming_tries, waits.claim_factor) == (JobState.QUEUED, 0, None)
    assert world.reasons(job, "requeued") == ["claim-failed: south cannot be used"]
    gone.returns(world)
    for number in range(1, overtaken + 1):
        assert world.state(job) is JobState.PLACED
        user = world.sites["south"].add_local_user(1)
        world.advance(16)
        assert world.job(job).claiming_tries == number
        assert world.state(job) is (JobState.QUEUED if number < overtaken else JobState.FAILED)
        world.sites["south"].remove_local_user(user)
        world.settle()
    assert world.job(job).reason == f"not claimed in {overtaken} tries: no room on south"


@pytest.mark.parametrize("when", [5.0, 13.0])
def test_a_cluster_drained_while_it_is_claimed_for(when: float) -> None:
    """Before its JCT a component there cannot start; after it has started, it goes on."""
    world = world_of(incremental())
    job = world.submit(with_input(fixed(north=4, south=4)))
    world.advance(when)
    world.step([ClusterDrained("south", "ops", "disks")])
    world.advance(16 - when)
    if when < 12:
        assert world.state(job) is JobState.QUEUED
        world.step([ClusterResumed("south")])
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED


@pytest.mark.parametrize("when", [5.0, 12.05, 13.0, 15.5])
def test_a_cluster_lost_while_it_is_claimed_for(when: float) -> None:
    world = world_of(incremental(), lease=1.0)
    job = world.submit(with_input(fixed(north=4, south=4)))
    world.advance(when)
    world.disconnect("south")
    world.advance(50)
    assert world.state(job) is JobState.QUEUED
    world.connect("south")
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    check_nothing_remains(world)


@pytest.mark.parametrize("when", [5.0, 12.05, 13.0, 15.5])
def test_a_job_cancelled_while_it_is_claimed_for(when: float) -> None:
    world = world_of(incremental())
    job = world.submit(with_input(fixed(north=4, south=4)))
    world.advance(when)
    world.cancel(job)
    world.settle()
    assert world.state(job) is JobState.CANCELLED
    assert all(cluster.available == cluster.total for cluster in world.queries.grid.clusters())
    check_nothing_remains(world)


@pytest.mark.parametrize("when", [5.0, 13.0, 15.5])
def test_a_daemon_that_dies_while_a_job_is_claimed_for_goes_on_with_it(when: float) -> None:
    world = world_of(incremental())
    job = world.submit(with_input(fixed(north=4, south=4)))
    world.advance(when)
    world.restart()
    for name in world.sites:
        world.connect(name)
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.job(job).generation == 1
    assert world.job(job).started_at == pytest.approx(16, abs=START_DELAY)
    check_nothing_remains(world)


@given(factor=st.floats(0.05, 0.95), transfer=st.integers(2, 10_000), epsilon=st.floats(0.01, 5))
def test_jcts_rise_to_the_jst_and_never_pass_it(factor: float, transfer: int, epsilon: float) -> None:
    rules = incremental(
        claim_factor=factor,
        claim_factor_min=min(0.01, factor),
        claim_epsilon=epsilon,
        scan_interval=1e6,
        event_driven=False,
    )
    world = world_of(rules)
    job = world.submit(with_input(fixed(north=4, south=4), size=transfer * 100))
    world.sites["south"].add_local_user(4)
    world.advance(transfer + 1)
    times = tries(world, job)
    assert times[0] == pytest.approx(factor * transfer)
    assert all(a < b <= transfer for a, b in pairwise(times))
    for before, after in pairwise(times):
        assert after == pytest.approx(before + factor * (transfer - before))
    assert (1 - factor) * (transfer - times[-1]) < epsilon
    assert world.state(job) is JobState.QUEUED


@pytest.mark.parametrize("trusted", [True, False])
def test_one_component_at_a_time_is_re_placed_on_a_cluster_on_probation(trusted: bool) -> None:
    """Two have no room where they are, and one cluster has room for both, which is being tried again."""
    names = ("north", "south", "west", "files")
    links = {("files", name): Link(None, 100.0) for name in names[:2]} | {("files", "west"): Link(None, 1e6)}
    world = World({"north": 4, "south": 4, "west": 8, "files": 0}, incremental(), links=links)
    world.step([ClusterDrained("west")])
    job = world.submit(with_input(nonfixed(4, 4)), policy="worst-fit")
    for name in names[:2]:
        world.sites[name].add_local_user(4)
    world.step([ClusterResumed("west")])
    for name in names if not trusted else ("west",):
        cluster = world.queries.grid[name]
        cluster.health.unusable = cluster.health.probation = True
    world.advance(12.05)
    moved = [c.cluster for c in world.job(job).attempt.gang if c.cluster == "west"]  # type: ignore[union-attr]
    assert len(moved) == (1 if trusted else 2)


def test_re_placement_assumes_a_bandwidth_where_none_is_known() -> None:
    grid = {"north": 4, "south": 4, "west": 4, "files": 0}
    links = {("files", name): Link(None, 100.0) for name in ("north", "south")}
    for assumed, site in ((1000.0, "west"), (200.0, "south")):
        world = World(grid, incremental(assumed_bandwidth=assumed), links=links)
        world.step([ClusterDrained("west")])
        job = world.submit(with_input(nonfixed(4, 4)), policy="worst-fit")
        world.step([ClusterResumed("west")])
        world.sites["south"].add_local_user(1)
        world.advance(12.05)
        moved = world.job(job).attempt.gang[1]  # type: ignore[union-attr]
        assert moved.cluster == site, "within the four seconds that are left"
        if site == "west":
            assert (moved.file_site, moved.transfer_time) == ("files", 1.6)


def test_claims_are_given_up_when_the_next_try_would_not_be_later_than_this_one() -> None:
    """So late that a clock's number tells no two moments apart that are less than an eighth of a second apart."""
    world = World(GRID, incremental(claim_factor=0.01, claim_factor_min=0.01), links=LINKS, now=1e15)
    job = world.submit(with_input(fixed(north=4, south=4), size=10_000))
    world.sites["south"].add_local_user(1)
    world.advance(99)
    assert world.reasons(job, "requeued") == ["claim-failed: no room on south before its start time"]
    assert world.job(job).claiming_tries < 1000
