"""Incremental claiming before the job start time: JCT series, T, L, re-placement and barrier (semantics 5)."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import Link
from koalapy.model.job import DEFAULT_LEASE, ComponentState, JobState
from koalapy.model.job_spec import ClaimingMode, Priority
from koalapy.model.request import FixedRequest, InputFile, NonFixedRequest
from koalapy.scheduler.events import ClusterDrained, ClusterResumed
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, nonfixed
from tests.scheduler.world import START_DELAY, World

GRID = {"north": 4, "south": 4, "files": 0}
LINKS = {(a, b): Link(0.001, 100.0) for a in GRID for b in GRID if a < b}
"""100 bytes per second: a file of 1600 bytes takes 16 s."""


def with_input(request: Any, size: int = 1600, sites: tuple[str, ...] = ("files",)) -> Any:
    """Return the request with an input file per component, stored on a cluster without nodes."""
    components = tuple(replace(c, inputs=(InputFile(f"f{i}", size, sites),)) for i, c in enumerate(request.components))
    return FixedRequest(components) if isinstance(request, FixedRequest) else NonFixedRequest(components)


def incremental_rules(**rules: Any) -> Rules:
    return Rules(claiming=ClaimingMode.INCREMENTAL, **rules)


def create_world(rules: Rules, lease: float = DEFAULT_LEASE) -> World:
    return World(GRID, rules, links=LINKS, lease=lease)


def claim_times(world: World, job: int) -> list[float]:
    """Return the times of all claim tries of a job."""
    return [e.at for e in world.timeline if e.job == job and e.event in ("claim-try", "claiming")]


def test_claim_without_inputs_is_immediate() -> None:
    world = create_world(incremental_rules())
    job = world.submit(nonfixed(2, 2))
    attempt = world.job(job).attempt
    assert attempt is not None
    assert (attempt.start_estimate, attempt.claim_at, world.job(job).placed_at) == (0, 0, 0)
    assert world.state(job) is JobState.CLAIMING


def test_claim_starts_at_first_jct_and_barrier_opens_at_jst() -> None:
    """JCT0 = JPT + L * FTT with L = 0.75 and FTT = 16 s."""
    world = create_world(incremental_rules())
    job = world.submit(with_input(fixed(north=2, south=3)))
    attempt = world.job(job).attempt
    assert attempt is not None
    assert world.state(job) is JobState.PLACED
    assert (attempt.start_estimate, attempt.claim_at) == (16, 12)
    assert {c.state for c in attempt.components} == {ComponentState.PLACED}
    assert {(c.file_site, c.transfer_time) for c in attempt.components} == {("files", 16)}
    world.advance(11)
    assert world.commands(job) == [], "no nodes are held during the transfer"
    assert all(cluster.nodes.available == cluster.last_report.total for cluster in world.queries.grid.clusters())
    world.advance(2)
    assert world.state(job) is JobState.CLAIMING
    assert all(site.in_phase("claimed") for name, site in world.sites.items() if name != "files")
    world.advance(2.9)
    assert world.state(job) is JobState.CLAIMING, "the barrier waits for the files"
    world.advance(0.2)
    assert world.job(job).started_at == 16
    world.advance(20)
    assert world.state(job) is JobState.SUCCEEDED
    check_nothing_remains(world)


def test_claim_tries_follow_jct_series() -> None:
    """JCT(n+1) = JCT(n) + L * (JST - JCT(n)), until it is within epsilon of the JST; then L is lowered."""
    world = create_world(incremental_rules(event_driven=False, scan_interval=1000, claim_epsilon=0.05))
    job = world.submit(with_input(fixed(north=4, south=4)))
    world.sites["south"].add_local_user(1)
    world.advance(15.999)
    assert claim_times(world, job) == [12, 15, 15.75, 15.9375]
    assert world.job(job).claiming_tries == 4
    assert world.state(job) is JobState.QUEUED
    assert world.reasons(job, "requeued") == ["claim-failed: no room on south before its start time"]
    assert world.job(job).claim_factor == 0.625
    assert world.job(job).restarts == 0
    assert all(cluster.nodes.available == cluster.last_report.idle for cluster in world.queries.grid.clusters()), (
        "all nodes are returned"
    )
    check_nothing_remains(world)


def test_claim_keeps_started_components_between_tries() -> None:
    world = create_world(incremental_rules(claim_epsilon=0.05))
    job = world.submit(with_input(fixed(north=4, south=4)))
    user = world.sites["south"].add_local_user(1)
    world.advance(14)
    assert world.state(job) is JobState.CLAIMING
    assert [c.state for c in world.job(job).attempt.gang] == [ComponentState.CLAIMED, ComponentState.PLACED]  # type: ignore[union-attr]
    assert world.queries.grid["north"].nodes.available == 0
    world.sites["south"].remove_local_user(user)
    world.advance(30)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.job(job).claiming_tries == 2
    assert world.job(job).started_at == 16


def test_atomic_claiming_equals_threshold_one() -> None:
    """No component starts before all of them can."""
    for rules in (Rules(claim_epsilon=0.05), incremental_rules(claim_threshold=1.0, claim_epsilon=0.05)):
        world = create_world(rules)
        job = world.submit(with_input(fixed(north=4, south=4)))
        user = world.sites["south"].add_local_user(1)
        world.advance(14)
        assert world.state(job) is JobState.PLACED
        assert world.commands(job) == []
        assert world.queries.grid["north"].nodes.available == 4, "the nodes stay available"
        world.sites["south"].remove_local_user(user)
        world.advance(30)
        assert world.state(job) is JobState.SUCCEEDED


def test_claim_below_threshold_starts_nothing() -> None:
    world = World(
        {"a": 1, "b": 1, "c": 1, "files": 0},
        incremental_rules(claim_threshold=0.5, claim_epsilon=0.01),
        links={("files", name): Link(None, 100.0) for name in "abc"},
    )
    job = world.submit(with_input(fixed(a=1, b=1, c=1)))
    users = [world.sites[name].add_local_user(1) for name in "bc"]
    world.advance(14)
    assert world.commands(job) == [], "one of three is less than a half"
    world.sites["b"].remove_local_user(users[0])
    world.advance(1.5)
    assert len(world.commands(job)) == 2, "two of three are not"


def test_claim_threshold_of_job_overrides_rules() -> None:
    world = create_world(Rules(claim_epsilon=0.05))
    job = world.submit(with_input(fixed(north=4, south=4)), claim_threshold=0.5)
    atomic_job = world.submit(with_input(fixed(north=4)), claiming=ClaimingMode.ATOMIC)
    world.sites["south"].add_local_user(1)
    world.advance(14)
    assert world.state(job) is JobState.CLAIMING
    assert world.state(atomic_job) is JobState.PLACED


def test_component_without_capacity_is_re_placed() -> None:
    """Its cluster was taken by local users; another has capacity and receives the file in time."""
    grid = {"north": 4, "south": 4, "west": 4, "files": 0}
    links = {
        ("files", "north"): Link(None, 100.0),
        ("files", "south"): Link(None, 100.0),
        ("files", "west"): Link(None, 1e6),
    }
    world = World(grid, incremental_rules(), links=links)
    job = world.submit(with_input(nonfixed(4, 4)), policy="worst-fit")
    first_clusters = [c.cluster for c in world.job(job).attempt.gang]  # type: ignore[union-attr]
    assert first_clusters == ["north", "south"]
    world.sites["south"].add_local_user(1)
    world.advance(13)
    re_placed = world.job(job).attempt.gang[1]  # type: ignore[union-attr]
    assert (re_placed.cluster, re_placed.file_site, re_placed.transfer_time) == ("west", "files", 0.0016)
    assert world.reasons(job, "re-placed") == ["south had no room"]
    world.advance(30)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.job(job).started_at == 16
    check_nothing_remains(world)


def test_component_is_not_re_placed_if_late_or_fixed() -> None:
    grid = {"north": 4, "south": 4, "west": 4, "files": 0}
    links = {("files", name): Link(None, 100.0) for name in ("north", "south", "west")}
    for request in (nonfixed(4, 4), fixed(north=4, south=4)):
        world = World(grid, incremental_rules(claim_epsilon=0.05), links=links)
        job = world.submit(with_input(request))
        world.sites["south"].add_local_user(1)
        world.advance(15.5)
        assert world.reasons(job, "re-placed") == []
        assert [c.cluster for c in world.job(job).attempt.gang] == ["north", "south"]  # type: ignore[union-attr]


def test_component_queued_behind_local_users_is_re_placed() -> None:
    """The waiting component is stopped and superseded by another."""
    grid = {"north": 4, "south": 4, "west": 4, "files": 0}
    links = {("files", name): Link(None, 10.0) for name in ("north", "south")} | {("files", "west"): Link(None, 1e6)}
    world = World(grid, incremental_rules(claim_grace=5), links=links, manual=True)
    for name in grid:
        world.deliver(name)
    job = world.submit(with_input(nonfixed(4, 4)), policy="worst-fit")
    assert world.job(job).attempt.start_estimate == 160  # type: ignore[union-attr]
    world.sites["south"].add_local_user(1)  # not yet reported
    world.start_automation()
    world.now = 120.0
    world.step()
    world.run_commands("south")
    world.deliver("south")
    world.advance(4)
    queued_component = world.job(job).attempt.components[1]  # type: ignore[union-attr]
    assert (queued_component.cluster, queued_component.state) == ("south", ComponentState.WAITING)
    world.advance(200)
    attempt = world.job(job).attempt
    assert attempt is not None
    assert [c.superseded for c in attempt.components] == [False, True, False]
    assert [(c.cluster, c.rank) for c in attempt.gang] == [("north", 0), ("west", 1)]
    assert world.job(job).generation == 1
    assert world.job(job).state is JobState.SUCCEEDED
    assert world.queries.grid["south"].health.errors == 0
    check_nothing_remains(world)


def test_claim_factor_is_lowered_to_minimum() -> None:
    world = create_world(incremental_rules(scan_interval=20))
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
    job_at_end = world.job(job)
    assert job_at_end.attempt is not None
    assert job_at_end.first_start_estimate == 16
    assert job_at_end.attempt.start_estimate == 16 * 7


def test_claiming_tries_exhausted_job_fails() -> None:
    world = create_world(incremental_rules())
    job = world.submit(with_input(fixed(north=4, south=4)), max_claiming_tries=2)
    world.sites["south"].add_local_user(1)
    world.advance(15.5)
    assert world.state(job) is JobState.FAILED
    assert world.job(job).reason == "not claimed in 2 tries: no room on south"
    check_nothing_remains(world)


# A cluster that is not there to be claimed for


class UnavailableCluster:
    """A cluster that becomes unavailable for a given cause, and available again."""

    def __init__(self, cause: str) -> None:
        self.cause = cause

    def make_unavailable(self, world: World) -> None:
        match self.cause:
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

    def make_available(self, world: World) -> None:
        match self.cause:
            case "drained":
                world.step([ClusterResumed("south")])
            case "its resource manager hangs":
                world.sites["south"].set_problem("")
            case _:
                world.connect("south")
        world.settle()


CAUSES = ["disconnected", "the daemon restarts", "drained", "its resource manager hangs"]


@pytest.mark.parametrize("cause", CAUSES)
@given(
    mode=st.sampled_from(ClaimingMode),
    request=st.sampled_from([fixed(south=4), fixed(north=4, south=4), fixed(north=2, south=3)]),
    unavailable_at=st.integers(0, 11),
    unavailable_s=st.sampled_from([1, 5, 30, 100]),
)
def test_claim_for_unavailable_cluster_counts_no_try(
    cause: str, mode: ClaimingMode, request: FixedRequest, unavailable_at: int, unavailable_s: float
) -> None:
    """The job waits as one submitted while the cluster is unavailable. A later claim uses its only try."""
    rules = Rules(claiming=mode, max_claiming_tries=1, scan_interval=5, barrier_timeout=20)
    world, cluster = create_world(rules), UnavailableCluster(cause)
    job = world.submit(with_input(request))
    world.advance(unavailable_at)
    cluster.make_unavailable(world)
    world.advance(unavailable_s)
    assert not world.state(job).is_final
    assert world.job(job).claiming_tries <= 1
    assert world.job(job).generation <= 2, "it is not placed before the cluster is available"
    cluster.make_available(world)
    world.advance(120)
    assert world.state(job) is JobState.SUCCEEDED
    assert (world.job(job).claiming_tries, world.job(job).restarts) == (1, 0)
    check_nothing_remains(world)


@given(cause=st.sampled_from(CAUSES), mode=st.sampled_from(ClaimingMode), max_tries=st.integers(1, 3))
def test_claim_after_unavailability_has_all_tries(cause: str, mode: ClaimingMode, max_tries: int) -> None:
    rules = Rules(claiming=mode, max_claiming_tries=max_tries, scan_interval=5, barrier_timeout=20, claim_epsilon=5)
    world, cluster = create_world(rules), UnavailableCluster(cause)
    job = world.submit(with_input(fixed(south=4)))
    cluster.make_unavailable(world)
    world.advance(30)
    waiting_job = world.job(job)
    assert (waiting_job.state, waiting_job.claiming_tries, waiting_job.claim_factor) == (JobState.QUEUED, 0, None)
    assert world.reasons(job, "requeued") == ["claim-failed: south cannot be used"]
    cluster.make_available(world)
    for number in range(1, max_tries + 1):
        assert world.state(job) is JobState.PLACED
        user = world.sites["south"].add_local_user(1)
        world.advance(16)
        assert world.job(job).claiming_tries == number
        assert world.state(job) is (JobState.QUEUED if number < max_tries else JobState.FAILED)
        world.sites["south"].remove_local_user(user)
        world.settle()
    assert world.job(job).reason == f"not claimed in {max_tries} tries: no room on south"


@pytest.mark.parametrize("drained_at", [5.0, 13.0])
def test_claim_on_drained_cluster_continues_if_started(drained_at: float) -> None:
    """Before its JCT a component cannot start there; a started component continues."""
    world = create_world(incremental_rules())
    job = world.submit(with_input(fixed(north=4, south=4)))
    world.advance(drained_at)
    world.step([ClusterDrained("south", "ops", "disks")])
    world.advance(16 - drained_at)
    if drained_at < 12:
        assert world.state(job) is JobState.QUEUED
        world.step([ClusterResumed("south")])
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED


@pytest.mark.parametrize("lost_at", [5.0, 12.05, 13.0, 15.5])
def test_claim_on_lost_cluster_is_requeued(lost_at: float) -> None:
    world = create_world(incremental_rules(), lease=1.0)
    job = world.submit(with_input(fixed(north=4, south=4)))
    world.advance(lost_at)
    world.disconnect("south")
    world.advance(50)
    assert world.state(job) is JobState.QUEUED
    world.connect("south")
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    check_nothing_remains(world)


@pytest.mark.parametrize("cancelled_at", [5.0, 12.05, 13.0, 15.5])
def test_claim_cancelled_job_returns_all_nodes(cancelled_at: float) -> None:
    world = create_world(incremental_rules())
    job = world.submit(with_input(fixed(north=4, south=4)))
    world.advance(cancelled_at)
    world.cancel(job)
    world.settle()
    assert world.state(job) is JobState.CANCELLED
    assert all(cluster.nodes.available == cluster.last_report.total for cluster in world.queries.grid.clusters())
    check_nothing_remains(world)


@pytest.mark.parametrize("restarted_at", [5.0, 13.0, 15.5])
def test_claim_continues_after_daemon_restart(restarted_at: float) -> None:
    world = create_world(incremental_rules())
    job = world.submit(with_input(fixed(north=4, south=4)))
    world.advance(restarted_at)
    world.restart()
    for name in world.sites:
        world.connect(name)
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.job(job).generation == 1
    assert world.job(job).started_at == pytest.approx(16, abs=START_DELAY)
    check_nothing_remains(world)


@given(factor=st.floats(0.05, 0.95), transfer_s=st.integers(2, 10_000), epsilon=st.floats(0.01, 5))
def test_claim_tries_approach_start_time(factor: float, transfer_s: int, epsilon: float) -> None:
    rules = incremental_rules(
        claim_factor=factor,
        claim_factor_min=min(0.01, factor),
        claim_epsilon=epsilon,
        scan_interval=1e6,
        event_driven=False,
    )
    world = create_world(rules)
    job = world.submit(with_input(fixed(north=4, south=4), size=transfer_s * 100))
    world.sites["south"].add_local_user(4)
    world.advance(transfer_s + 1)
    times = claim_times(world, job)
    assert times[0] == pytest.approx(factor * transfer_s)
    assert all(a < b <= transfer_s for a, b in pairwise(times))
    for earlier, later in pairwise(times):
        assert later == pytest.approx(earlier + factor * (transfer_s - earlier))
    assert (1 - factor) * (transfer_s - times[-1]) < epsilon
    assert world.state(job) is JobState.QUEUED


@pytest.mark.parametrize("on_probation", [True, False])
def test_re_placement_on_probation_is_one_component_at_a_time(on_probation: bool) -> None:
    """Two components lack capacity, and one cluster on probation could take both."""
    names = ("north", "south", "west", "files")
    links = {("files", name): Link(None, 100.0) for name in names[:2]} | {("files", "west"): Link(None, 1e6)}
    world = World({"north": 4, "south": 4, "west": 8, "files": 0}, incremental_rules(), links=links)
    world.step([ClusterDrained("west")])
    job = world.submit(with_input(nonfixed(4, 4)), policy="worst-fit")
    for name in names[:2]:
        world.sites[name].add_local_user(4)
    world.step([ClusterResumed("west")])
    for name in names if not on_probation else ("west",):
        cluster = world.queries.grid[name]
        cluster.health.unusable = cluster.health.probation = True
    world.advance(12.05)
    re_placed = [c.cluster for c in world.job(job).attempt.gang if c.cluster == "west"]  # type: ignore[union-attr]
    assert len(re_placed) == (1 if on_probation else 2)


def test_re_placement_assumes_bandwidth_of_unknown_links() -> None:
    grid = {"north": 4, "south": 4, "west": 4, "files": 0}
    links = {("files", name): Link(None, 100.0) for name in ("north", "south")}
    for bandwidth, site in ((1000.0, "west"), (200.0, "south")):
        world = World(grid, incremental_rules(assumed_bandwidth=bandwidth), links=links)
        world.step([ClusterDrained("west")])
        job = world.submit(with_input(nonfixed(4, 4)), policy="worst-fit")
        world.step([ClusterResumed("west")])
        world.sites["south"].add_local_user(1)
        world.advance(12.05)
        re_placed = world.job(job).attempt.gang[1]  # type: ignore[union-attr]
        assert re_placed.cluster == site, "the transfer must end within four seconds"
        if site == "west":
            assert (re_placed.file_site, re_placed.transfer_time) == ("files", 1.6)


def test_claim_ends_when_next_try_is_not_later() -> None:
    """At this time float precision is an eighth of a second."""
    world = World(GRID, incremental_rules(claim_factor=0.01, claim_factor_min=0.01), links=LINKS, now=1e15)
    job = world.submit(with_input(fixed(north=4, south=4), size=10_000))
    world.sites["south"].add_local_user(1)
    world.advance(99)
    assert world.reasons(job, "requeued") == ["claim-failed: no room on south before its start time"]
    assert world.job(job).claiming_tries < 1000


# Others are not ended in vain


def reclaiming_world(threshold: float, size: int) -> tuple[World, int, int]:
    """Return a grid where a job waits for its files, and a guest has taken nodes of both its clusters."""
    rules = incremental_rules(sharing="feasible", claim_threshold=threshold)
    world = World({"north": 7, "south": 4, "files": 2}, rules, links=LINKS)
    owner = world.submit(with_input(fixed(north=6, south=4), size), home_site="north", run_time=600)
    guest = world.submit(fixed(north=3, south=4), home_site="files", run_time=600)
    world.advance(1)
    return world, owner, guest


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("size", [10, 100, 1000, 10_000])
def test_reclaiming_ends_no_guest_while_a_component_is_blocked(threshold: float, size: int) -> None:
    """The component on the foreign cluster has no room, so that the owner could not start on its home site either."""
    world, owner, guest = reclaiming_world(threshold, size)
    world.advance(300)
    assert "reclaimed" not in world.timeline_events(guest)
    assert (world.state(guest), world.job(guest).generation) == (JobState.RUNNING, 1)
    assert world.timeline_events(owner).count("placed") == 1
    world.advance(1500)
    assert (world.state(owner), world.state(guest)) == (JobState.SUCCEEDED, JobState.SUCCEEDED)


def test_preemption_ends_no_job_in_the_last_try_of_a_blocked_claim() -> None:
    world = create_world(incremental_rules())
    high = world.submit(with_input(fixed(north=4, south=4), 100), priority=Priority.HIGH)
    low = world.submit(fixed(north=4), run_time=300)
    world.sites["south"].add_local_user(1)
    world.advance(30)
    assert (world.state(low), world.job(low).generation) == (JobState.RUNNING, 1)
    assert world.reasons(high, "requeued") == ["claim-failed: no room on south before its start time"]


def test_last_try_of_a_blocked_claim_submits_nothing() -> None:
    world = create_world(incremental_rules())
    job = world.submit(with_input(fixed(north=4, south=4), 100))
    world.sites["south"].add_local_user(1)
    world.advance(30)
    assert world.commands(job) == []
