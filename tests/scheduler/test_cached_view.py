"""Cached grid views are updated incrementally and equal a recomputed view."""

import gc
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import Drain, GridView, Link
from koalapy.model.job import JobState
from koalapy.model.job_spec import Priority
from koalapy.model.reports import ClusterReport
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.cluster_conditions import ContactStatus
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.grid import MAX_TOUCHES, GridStatus
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

NAMES = ["east", "north", "west"]


def make_status(name: str) -> ClusterStatus:
    cluster = ClusterStatus(name, contact=ContactStatus(connected=True))
    cluster.nodes.last_report = ClusterReport(8, 8)
    return cluster


def create_grid() -> GridStatus:
    return GridStatus(map(make_status, NAMES))


def recompute_view(grid: GridStatus) -> GridView:
    return grid.view(lambda cluster: cluster.nodes.available)


def idle_by_cluster(view: GridView) -> dict[str, int]:
    return {cluster.name: cluster.idle for cluster in view}


def test_view_is_same_object_until_change() -> None:
    grid = create_grid()
    first_view = grid.view()
    assert grid.view() is first_view
    grid.touch("north")
    assert grid.view() is first_view, "a touch without a change keeps the view"
    grid["north"].nodes.promise("1.1.0", 3)
    assert idle_by_cluster(grid.view()) == {"east": 8, "north": 5, "west": 8}
    assert idle_by_cluster(first_view) == {"east": 8, "north": 8, "west": 8}


@given(st.lists(st.sampled_from([0, 1, 3, MAX_TOUCHES - 1, MAX_TOUCHES, MAX_TOUCHES + 1, 2 * MAX_TOUCHES]), max_size=4))
def test_view_rarely_read_is_complete(pauses: list[int]) -> None:
    """The number of touches between two reads does not matter."""
    grid = create_grid()
    frequent_view, rare_view = (
        grid.cached_view(lambda c: c.nodes.available),
        grid.cached_view(lambda c: c.nodes.available),
    )
    tokens = 0
    for pause in pauses:
        rare_view.view()
        for number in range(pause):
            if number in (0, pause // 2):
                tokens += 1
                grid[NAMES[tokens % 3]].nodes.promise(f"{tokens}.1.0", 1)
            else:
                grid.touch("east")
            if number % 100 == 0:
                frequent_view.view()
    assert rare_view.view() == frequent_view.view() == recompute_view(grid)
    assert rare_view.view().by_idle == recompute_view(grid).by_idle


def test_view_includes_changed_links_replicas_and_programs() -> None:
    grid = create_grid()
    grid.view()
    grid.set_link("east", "west", Link(0.1, 5.0))
    assert grid.view().link_between("west", "east") == Link(0.1, 5.0)
    grid.set_replicas({"data": ("north",)})
    assert grid.view().replicas["data"] == ("north",)
    grid.set_replicas({"data": ()})
    grid.forget_files(())
    assert "data" not in grid.view().replicas
    for missing_programs in (frozenset({"rsync"}), frozenset[str]()):
        grid["west"].report(ClusterReport(8, 8, 0, lacks=missing_programs), 1.0)
        assert grid.view().cut_off == ({"west"} if missing_programs else set())
        assert grid.view() == recompute_view(grid)


def test_view_includes_drained_and_resumed_clusters() -> None:
    grid = create_grid()
    grid.view()
    for drained in (Drain(1.0), None):
        grid["north"].drained = drained
        grid.touch("north")
        assert len(grid.view().by_idle) == (2 if drained else 3)
        assert grid.view().by_speed == recompute_view(grid).by_speed


def test_view_of_empty_grid_is_empty() -> None:
    grid = GridStatus([])
    assert grid.view().clusters == ()
    grid.set_link("east", "west", Link(0.1))
    assert grid.view().links == {("east", "west"): Link(0.1)}


def test_capacity_changes_are_returned_once() -> None:
    grid = create_grid()
    grid["east"].nodes.promise("1.1.0", 8)
    grid.take_capacity_changes()
    grid["east"].nodes.expect_release("1.1.0")
    assert grid.take_capacity_changes() == ([], ["east"])
    grid["east"].nodes.release("1.1.0")
    assert grid.take_capacity_changes() == (["east"], [])
    assert grid.take_capacity_changes() == ([], [])
    assert [cluster.name for cluster in grid.changed_since(grid.version - 1)] == ["east"]
    assert list(grid.changed_since(grid.version)) == []


@pytest.mark.parametrize("policy", builtin_policies().names())
def test_view_is_freed_when_outdated(policy: str) -> None:
    """A cache that holds old views would leave thousands to the garbage collector."""
    world = World({"east": 40, "north": 40}, links={("east", "north"): Link(0.1, 1e6)})
    request = next(
        r for r in (nonfixed(1), flexible(1), fixed(east=1)) if r.type in builtin_policies().get(policy).serves
    )
    views: list[ref[GridView]] = []
    gc.disable()
    try:
        for number in range(30):
            views.append(ref(world.queries.grid.view()))
            job = world.submit(request, policy=policy, priority=Priority.HIGH if number % 3 else Priority.LOW)
            assert world.state(job) is not JobState.QUEUED
        assert sum(view() is not None for view in views) < 5, "only the latest views are referenced"
    finally:
        gc.enable()
