"""The grid as somebody sees it: each view is made of the last one, and is what a new one would be."""

import gc
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import Drain, GridView, Link
from koalapy.model.job import JobState, Priority
from koalapy.model.reports import ClusterReport
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.cluster_conditions import ContactStatus
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.grid import MAX_TOUCHES, CachedView, GridStatus
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

NAMES = ["east", "north", "west"]


def status(name: str) -> ClusterStatus:
    return ClusterStatus(name, contact=ContactStatus(connected=True), total=8, _idle=8)


def the_grid() -> GridStatus:
    return GridStatus(map(status, NAMES))


def anew(grid: GridStatus) -> GridView:
    return grid.view(lambda cluster: cluster.available)


def idle(view: GridView) -> dict[str, int]:
    return {cluster.name: cluster.idle for cluster in view}


def test_while_nothing_changes_there_is_one_view() -> None:
    grid = the_grid()
    before = grid.view()
    assert grid.view() is before
    grid.touch("north")
    assert grid.view() is before, "it was touched, and is as it was"
    grid["north"].promise("1.1.0", 3)
    assert idle(grid.view()) == {"east": 8, "north": 5, "west": 8}
    assert idle(before) == {"east": 8, "north": 8, "west": 8}


@given(st.lists(st.sampled_from([0, 1, 3, MAX_TOUCHES - 1, MAX_TOUCHES, MAX_TOUCHES + 1, 2 * MAX_TOUCHES]), max_size=4))
def test_who_looks_seldom_misses_nothing(pauses: list[int]) -> None:
    """Whatever has been touched in between, and how often."""
    grid = the_grid()
    often, seldom = CachedView(grid, lambda c: c.available), CachedView(grid, lambda c: c.available)
    tokens = 0
    for pause in pauses:
        seldom.view()
        for number in range(pause):
            if number in (0, pause // 2):
                tokens += 1
                grid[NAMES[tokens % 3]].promise(f"{tokens}.1.0", 1)
            else:
                grid.touch("east")
            if number % 100 == 0:
                often.view()
    assert seldom.view() == often.view() == anew(grid)
    assert seldom.view().by_idle == anew(grid).by_idle


def test_links_files_and_who_moves_none_are_seen_at_once() -> None:
    grid = the_grid()
    grid.view()
    grid.set_link("east", "west", Link(0.1, 5.0))
    assert grid.view().link_between("west", "east") == Link(0.1, 5.0)
    grid.set_replicas({"data": ("north",)})
    assert grid.view().replicas["data"] == ("north",)
    grid.set_replicas({"data": ()})
    grid.forget_files(())
    assert "data" not in grid.view().replicas
    for lacks in (frozenset({"rsync"}), frozenset[str]()):
        grid["west"].report(ClusterReport(8, 8, 0, lacks=lacks), 1.0)
        assert grid.view().cut_off == ({"west"} if lacks else set())
        assert grid.view() == anew(grid)


def test_a_cluster_that_comes_and_goes_is_seen_so() -> None:
    grid = the_grid()
    grid.view()
    for drained in (Drain(1.0), None):
        grid["north"].drained = drained
        grid.touch("north")
        assert len(grid.view().by_idle) == (2 if drained else 3)
        assert grid.view().by_speed == anew(grid).by_speed


def test_a_grid_of_no_clusters() -> None:
    grid = GridStatus([])
    assert grid.view().clusters == ()
    grid.set_link("east", "west", Link(0.1))
    assert grid.view().links == {("east", "west"): Link(0.1)}


def test_what_has_changed_is_told_once_to_each_who_asks() -> None:
    grid = the_grid()
    grid["east"].promise("1.1.0", 8)
    grid.take_capacity_changes()
    grid["east"].expect_release("1.1.0")
    assert grid.take_capacity_changes() == ([], ["east"])
    grid["east"].release("1.1.0")
    assert grid.take_capacity_changes() == (["east"], [])
    assert grid.take_capacity_changes() == ([], [])
    assert [cluster.name for cluster in grid.changed_since(grid.version - 1)] == ["east"]
    assert list(grid.changed_since(grid.version)) == []


@pytest.mark.parametrize("policy", builtin_policies().names())
def test_views_of_before_are_gone_at_once(policy: str) -> None:
    """Nothing that was worked out of one holds it: thousands of them would wait for the garbage collector."""
    world = World({"east": 40, "north": 40}, links={("east", "north"): Link(0.1, 1e6)})
    request = next(
        r for r in (nonfixed(1), flexible(1), fixed(east=1)) if r.type in builtin_policies().get(policy).serves
    )
    seen: list[ref[GridView]] = []
    gc.disable()
    try:
        for number in range(30):
            seen.append(ref(world.queries.grid.view()))
            job = world.submit(request, policy=policy, priority=Priority.HIGH if number % 3 else Priority.LOW)
            assert world.state(job) is not JobState.QUEUED
        assert sum(view() is not None for view in seen) < 5, "the last ones are known to those who look"
    finally:
        gc.enable()
