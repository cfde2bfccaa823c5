"""What the scheduler keeps up to date step by step is what would be worked out anew from its jobs and clusters."""

from collections import Counter
from typing import TYPE_CHECKING

from koalapy.model.cluster import ClusterState, ClusterView, GridView
from koalapy.model.job import ComponentState, JobState, Priority
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.owner_use import HOURS, NODES, QUEUED, OwnerUse
from tests.scheduler import invariants

if TYPE_CHECKING:
    from tests.scheduler.world import World


def check_positions(world: "World") -> None:
    """Jobs stand in their queues, those of their home sites where there are such, by when they came, or by their width
    before that."""
    queries = world.queries
    jobs = queries.jobs()
    expected: dict[int, int] = {}
    for priority in Priority:
        for section in range(len(world.sites) + 1):
            queue = [job for job in jobs if job.is_in_queue and job.spec.priority is priority]
            queue = [job for job in queue if invariants.section_of(world, job) == section]
            queue.sort(key=lambda job: invariants.place_of(world, job))
            expected |= {job.id: place for place, job in enumerate(queue, 1)}
    assert len({job.queue_seq for job in jobs}) == len(jobs), "two jobs came at once"
    assert queries.queues.positions(jobs) == expected
    assert {job.id: queries.position(job.id) for job in jobs} == {job.id: expected.get(job.id) for job in jobs}
    assert queries.awaited_clusters() <= world.sites.keys()
    assert bool(queries.awaited_clusters()) == bool(expected)


def check_views(world: "World") -> None:
    """The grid as jobs are offered it."""
    queries = world.queries
    clusters = queries.grid.clusters()
    _is_view(queries.grid.view(), {c.name: c.available for c in clusters}, clusters)
    for priority in Priority:
        spared = {c.name: c.available - queries.kept(c.name, priority) for c in clusters}
        _is_view(queries.view(priority), spared, clusters)
    _is_view(
        queries.own_view(),
        {c.name: c.available - c.reserved_for_others(queries.reservation) for c in clusters},
        clusters,
    )
    if world.rules.preemption == "placement":
        _is_view(queries.view_with_preemption(), _with_preemption(world, clusters), clusters)


def _is_view(view: GridView, idle: dict[str, int], clusters: list[ClusterStatus]) -> None:
    expected = tuple(each.view(max(0, idle[each.name])) for each in clusters)
    assert view.clusters == expected
    usable = [each for each in expected if each.state is ClusterState.USABLE]
    assert view.by_idle == tuple(sorted(usable, key=lambda each: (-each.idle, each.name)))
    assert [each.speed for each in view.by_speed] == sorted((each.speed for each in usable), reverse=True)
    assert set(view.by_speed) == set(usable)
    assert view.usable_idle == sum(each.idle for each in usable)
    assert {each.name: view.get(each.name) for each in clusters} == {each.name: each for each in expected}
    assert view.get("nowhere") is None
    assert view.cut_off == frozenset(each.name for each in clusters if not each.moves_files)
    assert isinstance(view.clusters[0], ClusterView)


def _with_preemption(world: "World", clusters: list[ClusterStatus]) -> dict[str, int]:
    """Idle, or about to be, or held by jobs of low priority that are not ending anyway."""
    preemptible: Counter[str] = Counter()
    for job in world.queries.jobs():
        if job.state.is_active and job.attempt and invariants.makes_room(world, job):
            for c in job.attempt.components:
                holds = c.state not in (ComponentState.PLACED, ComponentState.STOPPING) and not c.has_ended
                leaves = job.token(c.index) in world.queries.grid[c.cluster].about_to_end  # and so is expected anyway
                preemptible[c.cluster] += c.size if holds and not leaves else 0
    could = {c.name: c.expected + preemptible[c.name] - c.reserved_for_others() for c in clusters}
    limits = {c.name: c.limit.size - 1 for c in clusters if c.limit is not None}
    return {name: min(count, limits.get(name, count)) for name, count in could.items()}


def check_owners(world: "World") -> None:
    """What owners have, and that nobody has more nodes than are allowed."""
    use = world.queries.owner_use
    if not use.counts:
        return
    assert world.limits is not None
    fresh = OwnerUse(world.limits)
    for job in world.queries.jobs():
        fresh.update(job, None)
    for owner in {job.spec.owner for job in world.queries.jobs()}:
        for scope in world.limits.scopes(owner):
            now, counted = use.current_use(scope, world.now), fresh.current_use(scope, world.now)
            assert (now[NODES], now[QUEUED]) == (counted[NODES], counted[QUEUED]), scope.display_name
            assert now[HOURS] >= counted[HOURS] - 1e-6, "what has run counts as well"
            if scope.limits.nodes is not None:
                assert now[NODES] <= scope.limits.nodes, f"{scope.display_name} has more than is allowed"
    active = sum(job.state.is_active for job in world.queries.jobs())
    assert active + sum(job.state in (JobState.QUEUED, JobState.HELD) for job in world.queries.jobs()) == len(
        world.queries.jobs()
    )
