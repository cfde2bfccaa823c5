"""Jobs over relayed links: which pairs of clusters they may use, and the streams of the hub."""

from dataclasses import replace
from typing import Any

import pytest

from koalapy.model.cluster import Link, LinkPath, LinkUse, RelayedSince, Relays
from koalapy.model.job import ComponentState, JobState, parse_token
from koalapy.model.job_spec import Launcher, Priority
from koalapy.model.reports import ComponentStatus
from koalapy.scheduler.attempts.link_paths import DIRECT_RETRY
from koalapy.scheduler.events import LinkMeasured, RelayChanged, Reported
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.ledger import live
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

SIZES = {"north": 4, "south": 4}
UNREACHABLE = {("north", "south"): Link(unreachable=True)}
MEASURED = {("north", "south"): Link(0.001, 1e8, direct=True)}
NODES = 8
"""Control streams of a job on all nodes of both clusters: one for each node."""
BOTH = ("north", "south")


def world_of(streams: int, *ready: str, links: Any = None, uses: Any = None, only: tuple[str, ...] = ()) -> World:
    world = World(SIZES, links=links, relays=Relays(streams, uses or {}))
    world.step([RelayChanged(name, name in ready, name in only) for name in SIZES])
    return world


def waiting_reason(world: World, job: int) -> str:
    assert world.state(job) is JobState.QUEUED
    return explain(world.queries, world.job(job), [], world.now).headline


@pytest.mark.parametrize(
    ("use", "links", "ready", "only", "path"),
    [
        (LinkUse.ANY, MEASURED, BOTH, (), LinkPath.DIRECT),
        (LinkUse.ANY, {}, BOTH, (), LinkPath.UNKNOWN),
        (LinkUse.ANY, {}, ("north",), (), LinkPath.DIRECT),
        (LinkUse.ANY, UNREACHABLE, BOTH, (), LinkPath.RELAYED),
        (LinkUse.ANY, UNREACHABLE, ("south",), (), LinkPath.NONE),
        (LinkUse.ANY, {BOTH: Link(0.001)}, BOTH, (), LinkPath.UNKNOWN),
        (LinkUse.ANY, MEASURED, BOTH, ("south",), LinkPath.RELAYED),
        (LinkUse.ANY, MEASURED, ("north",), ("south",), LinkPath.NONE),
        (LinkUse.DIRECT, MEASURED, BOTH, (), LinkPath.DIRECT),
        (LinkUse.DIRECT, MEASURED, BOTH, ("north",), LinkPath.NONE),
        (LinkUse.DIRECT, UNREACHABLE, BOTH, (), LinkPath.NONE),
        (LinkUse.DIRECT, UNREACHABLE, (), (), LinkPath.NONE),
        (LinkUse.RELAYED, MEASURED, BOTH, (), LinkPath.RELAYED),
        (LinkUse.RELAYED, MEASURED, ("south",), (), LinkPath.NONE),
    ],
)
def test_path_decides_whether_clusters_are_combined(
    use: LinkUse, links: Any, ready: tuple[str, ...], only: tuple[str, ...], path: LinkPath
) -> None:
    for request in (nonfixed(4, 4), flexible(8), fixed(north=4, south=4)):
        world = world_of(1000, *ready, links=links, only=only)
        job = world.submit(request, links=use)
        assert world.state(job).is_active is (path is not LinkPath.NONE)
        if path is LinkPath.NONE:
            assert "link" in waiting_reason(world, job)
        else:
            may_fall_back = path is LinkPath.DIRECT and use is LinkUse.ANY and ready == BOTH
            assert world.queries.link_paths(world.job(job)) == {BOTH: LinkPath.UNKNOWN if may_fall_back else path}
            needed = 16 + NODES if may_fall_back or path in (LinkPath.RELAYED, LinkPath.UNKNOWN) else 0
            assert world.queries.grid.reserved_streams == needed


def test_job_within_a_cluster_needs_no_link() -> None:
    world = world_of(0, links=UNREACHABLE, only=BOTH)
    for use in LinkUse:
        assert world.state(world.submit(nonfixed(1, 1), links=use)).is_active


def test_streams_of_hub_are_never_exceeded_and_wait_for_the_end_of_an_attempt() -> None:
    world = world_of(12, *BOTH, links=UNREACHABLE)
    first = world.submit(fixed(north=2, south=2), run_time=10.0, processes_per_node=1)
    second = world.submit(fixed(north=2, south=2), run_time=10.0, processes_per_node=1)
    assert world.queries.grid.reserved_streams == 8
    assert world.state(first).is_active
    reason = waiting_reason(world, second)
    assert "needs up to 8 streams over relays between north, south, and 4 of the hub's 12 are free" in reason
    world.restart()
    for name in SIZES:
        world.connect(name)
    assert world.state(second) is JobState.QUEUED, "the relays are not ready"
    world.step([RelayChanged(name, is_ready=True) for name in SIZES])
    assert world.queries.grid.reserved_streams == 8
    assert world.state(second) is JobState.QUEUED
    world.advance(60)
    assert world.state(first) is world.state(second) is JobState.SUCCEEDED
    assert world.queries.grid.reserved_streams == 0


def test_other_job_of_the_same_shape_with_fewer_ranks_does_not_wait() -> None:
    world = world_of(10, *BOTH, links=UNREACHABLE)
    first = world.submit(nonfixed(4, 4), processes_per_node=4)
    second = world.submit(nonfixed(4, 4), processes_per_node=1)
    assert "the hub has 10 streams" in waiting_reason(world, first)
    assert world.state(second) is JobState.QUEUED  # 16 + 8 streams
    third = world.submit(nonfixed(3, 1), processes_per_node=1)
    assert world.state(third).is_active


def test_explain_names_the_change_of_links_and_of_ranks() -> None:
    world = world_of(40, *BOTH, links=UNREACHABLE)
    too_many = world.submit(fixed(north=4, south=4), processes_per_node=3)
    direct = world.submit(fixed(north=4, south=4), links=LinkUse.DIRECT)
    change = explain(world.queries, world.job(too_many), [], world.now).smallest_change
    assert change is not None
    assert change.text == "run 1 process on each node, with fewer streams over relays"
    change = explain(world.queries, world.job(direct), [], world.now).smallest_change
    assert change is not None
    assert change.text == "allow relayed links too"


def test_job_goes_where_it_needs_no_streams() -> None:
    world = World({"north": 4, "south": 4, "west": 8}, relays=Relays(10), links=UNREACHABLE)
    world.step([RelayChanged(name, is_ready=True) for name in world.sites])
    job = world.submit(nonfixed(4, 4), policy="worst-fit", processes_per_node=4)
    assert {component.cluster for component in live(world.job(job)).gang} == {"west"}


def test_started_job_teaches_that_a_pair_needs_relays() -> None:
    world = world_of(1000, *BOTH)
    job = world.submit(nonfixed(4, 4), run_time=20.0)
    token = world.job(job).token(0)
    early = ComponentStatus(token, ComponentState.WAITING, relayed=(("south", "north"),))
    world.step([Reported(live(world.job(job)).gang[0].cluster, early)])
    assert live(world.job(job)).relayed == (), "its program has not started"
    world.advance(1)
    for _ in range(2):
        status = ComponentStatus(token, "running", relayed=(("south", "north"), ("south", "elsewhere")))
        world.step([Reported(live(world.job(job)).gang[0].cluster, status)])
    assert live(world.job(job)).relayed == (BOTH,)
    texts = [entry.reason for entry in world.timeline if entry.event == "relayed"]
    assert texts == ["MPI messages between north and south go over relays"]
    view = world.queries.grid.view()
    assert view.link_between(*BOTH) == Link(relayed=True)
    world.step([RelayChanged("north", is_ready=False)])
    assert world.queries.grid.view().link_between(*BOTH) == Link(unreachable=True)
    world.step([LinkMeasured(*BOTH, Link(0.001, 1e8))])
    assert world.queries.grid.view().link_between(*BOTH) == Link(unreachable=True), "a transfer runs between heads"
    world.step([LinkMeasured(*BOTH, Link(0.001, 1e8, direct=True))])
    assert world.queries.grid.view().link_between(*BOTH) == Link(0.001, 1e8)
    assert world.queries.relayed_since(BOTH) is None


@pytest.mark.parametrize("links", [{}, MEASURED], ids=["never measured", "measured"])
def test_report_of_third_site_does_not_change_the_link_of_two_others(links: Any) -> None:
    world = World({"north": 4, "south": 4, "west": 4}, links=links, relays=Relays(1000))
    world.step([RelayChanged(name, is_ready=True) for name in world.sites])
    job = world.submit(fixed(west=4, north=1, south=1), run_time=20.0)
    world.advance(1)
    assert live(world.job(job)).head.cluster == "west"
    report_relayed(world, job, "west", (BOTH, ("north", "west")))
    assert world.queries.relayed_since(BOTH) is None
    assert not world.queries.grid.view().link_between(*BOTH).relayed
    since = world.queries.relayed_since(("north", "west"))
    assert since is not None
    assert (since.since, since.retry_at) == (world.now, world.now + DIRECT_RETRY)
    assert since.reason == f"nodes of job {job} did not reach each other directly, by the report of west"
    (text,) = world.reasons(job, "relayed")
    assert text.endswith("as west reports; other jobs try links of other sites directly")


def test_report_of_pair_relayed_with_others_does_not_change_its_link() -> None:
    """All pairs of a job may have to be relayed since one is."""
    world = World({"north": 4, "south": 4, "west": 4}, relays=Relays(1000))
    world.step([RelayChanged(name, is_ready=True) for name in world.sites])
    job = world.submit(fixed(west=4, north=1, south=1), run_time=20.0)
    world.advance(1)
    every = (BOTH, ("north", "west"), ("south", "west"))
    report_relayed(world, job, "west", every, unreached=(("north", "west"),))
    assert live(world.job(job)).relayed == every
    assert [pair for pair in every if world.queries.relayed_since(pair)] == [("north", "west")]
    assert world.reasons(job, "relayed")[0].endswith("go over relays")


def report_relayed(world: World, job: int, cluster: str, pairs: Any, unreached: Any = None) -> None:
    """Let the component of a job on a cluster report that pairs of clusters are relayed."""
    (index,) = (component.index for component in live(world.job(job)).gang if component.cluster == cluster)
    status = ComponentStatus(world.job(job).token(index), ComponentState.CLAIMED, relayed=pairs, unreached=unreached)
    world.step([Reported(cluster, status)])


def close_firewall(world: World, *, is_closed: bool = True) -> None:
    """Let programs over both clusters start with relays where they must, or cannot connect directly."""

    def find_relayed(token: str) -> tuple[tuple[str, str], ...]:
        path = world.queries.link_paths(world.job(parse_token(token)[0]))[BOTH]
        return (BOTH,) if path is LinkPath.RELAYED or (is_closed and path is LinkPath.UNKNOWN) else ()

    for site in world.sites.values():
        site.find_relayed = find_relayed


def path_of_next_job(world: World, **options: Any) -> LinkPath:
    """Return the path of the messages of a new job over both clusters, which then ends."""
    job = world.submit(fixed(north=1, south=1), launcher=Launcher.OPENMPI, run_time=1.0, **options)
    path = world.queries.link_paths(world.job(job))[BOTH]
    world.advance(5)
    assert world.state(job) is JobState.SUCCEEDED
    return path


def test_measured_pair_falls_back_on_relays_and_returns_to_direct_links_after_minutes() -> None:
    world = world_of(1000, *BOTH, links=MEASURED)
    close_firewall(world)
    assert path_of_next_job(world) is LinkPath.UNKNOWN, "it was direct, and may not be now"
    since = world.queries.relayed_since(BOTH)
    assert since is not None
    assert since.retry_at is not None
    close_firewall(world, is_closed=False)
    assert path_of_next_job(world) is LinkPath.RELAYED
    blocked = world.submit(fixed(north=1, south=1), launcher=Launcher.OPENMPI, links=LinkUse.DIRECT, run_time=1.0)
    assert not world.queries.questions.refusal_on_empty_grid(world.job(blocked).spec), "it is accepted, and waits"
    world.advance(since.retry_at - 1 - world.now)
    assert world.state(blocked) is JobState.QUEUED
    assert "koala network says when that is tried again" in world.queries.waiting_reason(world.job(blocked))
    world.advance(5)
    assert world.state(blocked) is JobState.SUCCEEDED, "its direct start shows that the nodes reach each other"
    view = world.queries.grid.view()
    assert (view.link_between(*BOTH), view.link_between(*BOTH).direct) == (MEASURED[BOTH], True)
    assert world.queries.relayed_since(BOTH) is None


@pytest.mark.parametrize("shown_by", ["job", "measurement"])
def test_relayed_link_that_stays_relayed_is_tried_directly_once_an_interval(shown_by: str) -> None:
    world = world_of(1000, *BOTH)
    close_firewall(world)
    if shown_by == "measurement":
        world.step([LinkMeasured(*BOTH, Link(unreachable=True))])
    else:
        path_of_next_job(world)
    first = world.queries.relayed_since(BOTH)
    assert first is not None
    for _ in range(3):
        assert path_of_next_job(world) is path_of_next_job(world) is LinkPath.RELAYED
        world.advance(DIRECT_RETRY)
        assert path_of_next_job(world) is LinkPath.UNKNOWN
    last = world.queries.relayed_since(BOTH)
    assert last is not None
    assert last.since == first.since
    assert last.retry_at is not None
    assert last.retry_at > world.now


def test_unreachable_link_without_hub_is_not_tried_again() -> None:
    world = world_of(0, links=UNREACHABLE)
    world.step([LinkMeasured(*BOTH, Link(unreachable=True))])
    world.advance(2 * DIRECT_RETRY)
    assert world.queries.grid.view().link_between(*BOTH) == Link(unreachable=True)


def test_failed_direct_start_makes_next_start_reserve_streams_for_relays() -> None:
    world = world_of(10, *BOTH, links=MEASURED)
    close_firewall(world)

    def fail_start(token: str) -> tuple[tuple[str, str], ...]:
        close_firewall(world)
        world.site_of(token).runners[token].error = "node n1 cannot reach node n2"
        return ()

    world.sites["north"].find_relayed = fail_start
    job = world.submit(fixed(north=2, south=2), launcher=Launcher.OPENMPI, processes_per_node=1, run_time=10)
    assert world.queries.link_paths(world.job(job)) == {BOTH: LinkPath.DIRECT}, "half of the streams stay free"
    while not world.job(job).restarts:
        world.advance(0.05)
    assert world.queries.link_paths(world.job(job)) == {BOTH: LinkPath.UNKNOWN}
    assert world.queries.grid.reserved_streams == 8
    world.advance(5)
    assert (world.state(job), live(world.job(job)).relayed) == (JobState.RUNNING, (BOTH,))


def test_restarted_daemon_tries_measured_link_directly_after_interval() -> None:
    world = world_of(1000, *BOTH, links=UNREACHABLE)
    world.restart()
    for name in SIZES:
        world.connect(name)
    world.step([RelayChanged(name, is_ready=True) for name in SIZES])
    assert path_of_next_job(world) is LinkPath.RELAYED
    world.advance(DIRECT_RETRY)
    assert path_of_next_job(world) is LinkPath.UNKNOWN


@pytest.mark.parametrize(
    ("uses", "only", "reason"),
    [({BOTH: LinkUse.RELAYED}, (), "demanded by the configuration of the link"), ({}, BOTH[1:], "demanded by south")],
)
def test_demanded_relays_have_no_direct_retry(uses: Any, only: Any, reason: str) -> None:
    world = world_of(1000, *BOTH, uses=uses, only=only)
    assert world.queries.relayed_since(BOTH) == RelayedSince(None, reason)
    world.advance(2 * DIRECT_RETRY)
    assert path_of_next_job(world) is LinkPath.RELAYED


def test_measuring_job_tries_a_relayed_link_directly_again() -> None:
    world = world_of(1000, *BOTH, links=UNREACHABLE)
    job = world.submit(fixed(north=1, south=1), internal=True)
    assert world.queries.link_paths(world.job(job)) == {BOTH: LinkPath.UNKNOWN}
    forced = world_of(1000, *BOTH, links=UNREACHABLE, uses={BOTH: LinkUse.RELAYED})
    job = forced.submit(fixed(north=1, south=1), internal=True)
    assert forced.queries.link_paths(forced.job(job)) == {BOTH: LinkPath.RELAYED}


def test_policy_sees_values_of_a_relayed_link() -> None:
    world = World({"north": 2, "south": 2, "west": 2}, relays=Relays(1000))
    world.step([RelayChanged(name, is_ready=True) for name in world.sites])
    values = {("north", "south"): 0.001, ("north", "west"): 0.0001, ("south", "west"): 0.05}
    world.step([LinkMeasured(*pair, Link(latency, 1e8, relayed=True)) for pair, latency in values.items()])
    job = world.submit(flexible(4), policy="communication-aware")
    assert {component.cluster for component in live(world.job(job)).gang} == {"north", "west"}


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_loss_of_relays_outside_a_site_is_no_error_of_its_cluster(is_elsewhere: bool) -> None:
    world = world_of(1000, *BOTH, links=UNREACHABLE)
    job = world.submit(nonfixed(4, 4), run_time=1000.0)
    world.advance(5)
    cluster = live(world.job(job)).gang[0].cluster
    status = ComponentStatus(
        world.job(job).token(0), "ended", error="the hub is gone", infrastructure=True, relay_lost=is_elsewhere
    )
    world.step([Reported(cluster, status)])
    assert world.job(job).ending is JobState.QUEUED
    assert world.queries.grid[cluster].health.errors == (0 if is_elsewhere else 1)


@pytest.mark.parametrize(
    ("rules", "narrow", "starts"),
    [
        (Rules(plan_after=None), Priority.LOW, False),
        (Rules(plan_after=0), Priority.LOW, True),
        (Rules(plan_after=0), Priority.HIGH, False),
    ],
    ids=["without a plan", "with a plan", "the plan does not bind high priority"],
)
def test_streams_are_reserved_for_a_job_that_has_waited_long(rules: Rules, narrow: Priority, starts: bool) -> None:
    rules = replace(rules, scan_interval=10, high_scans_per_low=1, preemption="never")
    world = World({"north": 40, "south": 40}, rules, relays=Relays(24), links=UNREACHABLE)
    world.step([RelayChanged(name, is_ready=True) for name in SIZES])

    def submit_narrow_jobs(count: int) -> None:
        for _ in range(count):
            world.submit(fixed(north=2, south=2), run_time=30.0, processes_per_node=1, priority=narrow)
            world.advance(10)

    submit_narrow_jobs(3)
    wide = world.submit(fixed(north=4, south=4), run_time=1000.0, processes_per_node=1)
    submit_narrow_jobs(20)
    assert world.queries.grid.reserved_streams == 24
    assert world.state(wide) is (JobState.RUNNING if starts else JobState.QUEUED)


def test_barrier_waits_for_the_relay_of_a_restarted_agent() -> None:
    world = world_of(1000, *BOTH, links=UNREACHABLE)
    job = world.submit(fixed(north=2, south=2), launcher=Launcher.OPENMPI)
    world.step([RelayChanged("south", is_ready=False)])
    world.advance(5)
    assert world.state(job) is JobState.CLAIMING
    world.step([RelayChanged("south", is_ready=True)])
    assert world.state(job) is not JobState.CLAIMING
    world.advance(60)
    assert (world.state(job), world.job(job).generation) == (JobState.SUCCEEDED, 1)


def test_barrier_without_relay_fails_with_its_reason() -> None:
    world = World(SIZES, Rules(barrier_timeout=30.0), links=UNREACHABLE, relays=Relays(1000))
    world.step([RelayChanged(name, is_ready=True) for name in SIZES])
    job = world.submit(fixed(north=2, south=2), launcher=Launcher.OPENMPI)
    world.step([RelayChanged("south", is_ready=False)])
    world.advance(40)
    assert "the relays of its clusters were not ready after 30 s" in world.reasons(job, "requeued")[0]


@pytest.mark.parametrize(("code", "max_restarts"), [(0, None), (None, None), (3, None), (0, 0)])
def test_program_that_ended_before_the_loss_of_its_relay_succeeds(code: int | None, max_restarts: int | None) -> None:
    world = world_of(1000, *BOTH, links=UNREACHABLE)
    job = world.submit(fixed(north=2, south=2), launcher=Launcher.OPENMPI, run_time=100.0, max_restarts=max_restarts)
    world.advance(5)
    first, second = (component.cluster for component in live(world.job(job)).gang)
    lost = ComponentStatus(
        world.job(job).token(1), ComponentState.RUNNING, error="a relay is lost", infrastructure=True, relay_lost=True
    )
    ended = ComponentStatus(world.job(job).token(0), ComponentState.ENDED, program_exit=code)
    world.step([Reported(second, lost), Reported(first, ended)])
    world.advance(60)
    assert world.job(job).generation == (1 if code == 0 else 2)
    if code == 0:
        assert (world.state(job), world.job(job).exit_code) == (JobState.SUCCEEDED, 0)
