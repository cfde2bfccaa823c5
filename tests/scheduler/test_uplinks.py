"""Uplinks of clusters: bandwidth, and the consumption of running jobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import Link, Uplink
from koalapy.model.job import Attempt, Component, Job, JobId, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.reports import ClusterReport
from koalapy.scheduler.attempts.facts import link_demand
from koalapy.scheduler.cluster_conditions import ContactStatus
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.grid import GridStatus
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import flexible
from tests.scheduler.world import World

NAMES = ["east", "north", "west"]


def create_grid(**configured: float) -> GridStatus:
    clusters = [ClusterStatus(name, contact=ContactStatus(connected=True)) for name in NAMES]
    for cluster in clusters:
        cluster.nodes.last_report = ClusterReport(8, 8)
        cluster.uplink.bandwidth = configured.get(cluster.name)
    return GridStatus(clusters)


def test_uplinks_without_data_are_omitted() -> None:
    assert create_grid().view().uplinks == {}
    grid = create_grid()
    grid.set_link("east", "east", Link(bandwidth=9e9))
    grid.set_link("east", "west", Link(latency=0.1))
    assert grid.view().uplinks == {}, "a link within a cluster is not an uplink"


def test_uplink_bandwidth_is_measured_maximum_or_configured() -> None:
    grid = create_grid(north=1e8)
    grid.view()
    grid.set_link("east", "west", Link(bandwidth=5e7))
    grid.set_link("north", "east", Link(bandwidth=7e7))
    assert grid.view().uplinks == {"east": Uplink(7e7), "north": Uplink(1e8), "west": Uplink(5e7)}
    grid.set_link("east", "north", Link(unreachable=True))
    assert grid.view().uplinks == {"east": Uplink(5e7), "north": Uplink(1e8), "west": Uplink(5e7)}


def make_job(*components: tuple[str, int], per_node_bandwidth: float | None = 100.0) -> Job:
    spec = JobSpec(flexible(sum(size for _, size in components)), ("true",), per_node_bandwidth=per_node_bandwidth)
    placed = tuple(Component(index, name, size) for index, (name, size) in enumerate(components))
    return Job(1, spec, 0.0, attempt=Attempt(1, placed, 0.0))


def demands_of(job: Job) -> list[float]:
    assert job.attempt is not None
    return [link_demand(job, component) for component in job.attempt.components]


def test_uplink_demand_follows_formula_of_paper() -> None:
    assert demands_of(make_job(("east", 1), ("west", 2))) == [100.0, 100.0]
    assert demands_of(make_job(("east", 3), ("west", 1))) == [100.0, 100.0], "each pair of nodes exchanges equally"
    assert demands_of(make_job(("east", 4))) == [0.0], "no data leaves the cluster"
    assert demands_of(make_job(("east", 1))) == [0.0]
    assert demands_of(make_job(("east", 2), ("west", 2), per_node_bandwidth=None)) == [0.0, 0.0]


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 9)), min_size=1, max_size=6))
def test_uplink_demand_is_additive_for_components_of_one_cluster(components: list[tuple[str, int]]) -> None:
    total, demands = sum(size for _, size in components), demands_of(make_job(*components))
    for name in NAMES:
        local_size = sum(size for cluster, size in components if cluster == name)
        expected = local_size * 100.0 * (total - local_size) / max(1, total - 1)
        assert sum(d for (cluster, _), d in zip(components, demands, strict=True) if cluster == name) == pytest.approx(
            expected
        )


def test_uplink_consumption_of_job_survives_restart_and_ends_with_job() -> None:
    world = World({"north": 2, "south": 2})
    job = world.submit(flexible(4), per_node_bandwidth=90.0, run_time=20.0)
    world.advance(5)
    assert world.state(job) is JobState.RUNNING
    uplinks = world.queries.grid.view().uplinks
    assert uplinks == {name: Uplink(None, pytest.approx(120.0)) for name in ("north", "south")}
    world.restart()
    for name in ("north", "south"):
        world.connect(name)
    world.advance(1)
    assert world.queries.grid.view().uplinks == uplinks, "the next daemon restores it"
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.queries.grid.view().uplinks == {}


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3), st.booleans(), st.sampled_from([0.0, 1.0, 2.0]))))
def test_uplink_consumption_in_views_is_current(changes: list[tuple[str, int, bool, float]]) -> None:
    grid = create_grid(north=10.0)
    cached_view = grid.cached_view(lambda cluster: cluster.nodes.available)
    runs: dict[tuple[str, str], float] = {}
    for name, job, starts, demand in changes:
        token = f"{job}.1.0"
        if starts:
            grid[name].nodes.promise(token, 1, demand=demand)
            runs[name, token] = demand or runs.get((name, token), 0.0)
        else:
            grid[name].nodes.release(token)
            runs.pop((name, token), None)
        for view in (grid.view(), cached_view.view()):
            consumed = {site: uplink.consumed for site, uplink in view.uplinks.items()}
            for site in NAMES:
                assert consumed.get(site, 0.0) == pytest.approx(sum(d for (s, _), d in runs.items() if s == site))


def test_uplink_release_wakes_job_waiting_for_it() -> None:
    """Local users take the released nodes; the other nodes were idle all the time."""
    links = {("north", "south"): Link(0.001, 100.0)}
    world = World({"north": 2, "south": 2}, Rules(scan_interval=1000.0), links=links)
    options = (("mode", "non-saturated"),)

    def submit_communicating_job(run_time: float) -> JobId:
        return world.submit(
            flexible(2), run_time=run_time, policy="resource-matching", policy_options=options, per_node_bandwidth=60.0
        )

    submit_communicating_job(2)  # the first run makes the application known
    world.advance(5)
    users = {name: site.add_local_user(1) for name, site in world.sites.items()}
    world.settle()
    running_job = submit_communicating_job(20)
    world.advance(1)
    for name, user in users.items():
        world.sites[name].remove_local_user(user)
    world.settle()
    waiting_job = submit_communicating_job(20)
    assert "saturates an uplink" in world.queries.waiting_reason(world.job(waiting_job))
    for token in world.tokens(running_job):
        site = next(site for site in world.sites.values() if token in site.runners)
        site.exit_program(token, 0)
        site.end_component(token)
        site.add_local_user(1)
    world.settle()
    assert world.state(waiting_job) is JobState.CLAIMING
