"""Compare the scheduler's incrementally updated state with a recomputation from its jobs and clusters."""

from collections import Counter
from typing import TYPE_CHECKING

from koalapy.model.cluster import ClusterState, ClusterView, GridView
from koalapy.model.job import ComponentState, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import FlexibleRequest
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.owner_use import HOURS, NODES, QUEUED, OwnerUse
from tests.scheduler import invariants

if TYPE_CHECKING:
    from tests.scheduler.world import World


def check_positions(world: "World") -> None:
    """Check the positions of waiting jobs in their priority's queue, or in that of their home site."""
    queries = world.queries
    jobs = queries.jobs()
    expected: dict[int, int] = {}
    for priority in Priority:
        for section in range(len(world.sites) + 1):
            queue = [job for job in jobs if job.is_in_queue and job.spec.priority is priority]
            queue = [job for job in queue if invariants.section_of(world, job) == section]
            queue.sort(key=lambda job: (*invariants.queue_position(world, job), job.id))
            expected |= {job.id: position for position, job in enumerate(queue, 1)}
    others = [job for job in jobs if job.array_job is None]  # a task has the number of its array
    assert len({job.queue_seq for job in others}) == len(others), "two jobs have the same sequence number"
    assert queries.queues.positions(jobs) == expected
    assert {job.id: queries.position(job.id) for job in jobs} == {job.id: expected.get(job.id) for job in jobs}
    assert queries.awaited_clusters() <= world.sites.keys()
    assert bool(queries.awaited_clusters()) == bool(expected)


def check_views(world: "World") -> None:
    """Check the grid views that the scheduler gives to policies."""
    queries, plan = world.queries, world.queries.queues.plan
    clusters = queries.grid.clusters()
    _check_view(queries.grid.view(), {c.name: c.nodes.available for c in clusters}, clusters)
    for priority in Priority:
        spec = JobSpec(FlexibleRequest(1), ("program",), priority=priority)
        offer = queries.offer(spec)
        spared = {c.name: c.nodes.available - plan.reserved_nodes(c.name, spec) for c in clusters}
        _check_view(offer.view, spared, clusters)
        if (view := offer.with_preemption(spec)) is not None:
            is_late = plan.is_delayed_by(plan.duration_of(spec))
            idle = _idle_with_preemption(world, clusters)
            _check_view(view, {c.name: plan.limit(priority, is_late, c, idle[c.name]) for c in clusters}, clusters)


def _check_view(view: GridView, idle: dict[str, int], clusters: list[ClusterStatus]) -> None:
    expected_views = tuple(cluster.view(max(0, idle[cluster.name])) for cluster in clusters)
    assert view.clusters == expected_views
    usable = [cluster for cluster in expected_views if cluster.state is ClusterState.USABLE]
    assert view.by_idle == tuple(sorted(usable, key=lambda cluster: (-cluster.idle, cluster.name)))
    assert [cluster.speed for cluster in view.by_speed] == sorted((cluster.speed for cluster in usable), reverse=True)
    assert set(view.by_speed) == set(usable)
    assert view.usable_idle == sum(cluster.idle for cluster in usable)
    assert {cluster.name: view.get(cluster.name) for cluster in clusters} == {
        cluster.name: cluster for cluster in expected_views
    }
    assert view.get("nowhere") is None
    assert view.cut_off == frozenset(cluster.name for cluster in clusters if not cluster.moves_files)
    assert isinstance(view.clusters[0], ClusterView)


def _idle_with_preemption(world: "World", clusters: list[ClusterStatus]) -> dict[str, int]:
    """Return nodes that are idle, expected to be idle, or held by low-priority jobs that are not ending, by cluster."""
    preemptible: Counter[str] = Counter()
    for job in world.queries.jobs():
        if job.state.is_active and job.attempt and invariants.is_preemptible(job):
            for c in job.attempt.components:
                holds_nodes = c.state not in (ComponentState.PLACED, ComponentState.STOPPING) and not c.has_ended
                is_leaving = (
                    job.token(c.index) in world.queries.grid[c.cluster].nodes.about_to_end
                )  # already counted as expected
                preemptible[c.cluster] += c.size if holds_nodes and not is_leaving else 0
    counts = {c.name: c.nodes.expected + preemptible[c.name] for c in clusters}
    limits = {c.name: c.health.limit.size - 1 for c in clusters if c.health.limit is not None}
    return {name: min(count, limits.get(name, count)) for name, count in counts.items()}


def check_owners(world: "World") -> None:
    """Check the use of all owners and groups, and that none exceeds its node limit."""
    use = world.queries.owner_use
    if not use.counts:
        return
    assert world.limits is not None
    recomputed = OwnerUse(world.limits)
    for job in world.queries.jobs():
        recomputed.update(job, None)
    for owner in {job.spec.owner for job in world.queries.jobs()}:
        for scope in world.limits.scopes(owner):
            current, expected = use.current_use(scope, world.now), recomputed.current_use(scope, world.now)
            assert (current[NODES], current[QUEUED]) == (expected[NODES], expected[QUEUED]), scope.display_name
            assert current[HOURS] >= expected[HOURS] - 1e-6, "node-hours of ended jobs are missing"
            if scope.limits.nodes is not None:
                assert current[NODES] <= scope.limits.nodes, f"{scope.display_name} exceeds its node limit"
    active = sum(job.state.is_active for job in world.queries.jobs())
    assert active + sum(job.state in (JobState.QUEUED, JobState.HELD) for job in world.queries.jobs()) == len(
        world.queries.jobs()
    )
