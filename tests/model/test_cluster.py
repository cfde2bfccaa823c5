"""The grid as a policy sees it."""

from dataclasses import replace

import pytest
from hypothesis import given

from koalapy.model.cluster import ClusterState, ClusterView, GridView, Link, NodeClass, NodeClassPart, take_nodes
from koalapy.model.node_requirement import ANY_NODE
from tests.policies.grids import grid, grids


@pytest.mark.parametrize("state", ClusterState)
def test_usable_idle_of_unusable_cluster_is_zero(state: ClusterState) -> None:
    assert ClusterView("north", 4, 3, state).usable_idle == (3 if state is ClusterState.USABLE else 0)


def test_grid_view_get_finds_cluster_by_name() -> None:
    view = grid(north=3, south=2)
    north = view.get("north")
    assert north is not None
    assert (north.name, north.idle) == ("north", 3)
    assert view.get("east") is None
    assert [cluster.name for cluster in view] == ["north", "south"]


@given(grids())
def test_by_idle_orders_usable_clusters_by_idle_nodes(view: GridView) -> None:
    ordered = [(-cluster.idle, cluster.name) for cluster in view.by_idle]
    assert ordered == sorted(ordered)
    assert view.usable_idle == sum(cluster.usable_idle for cluster in view)
    assert set(view.by_idle) == {cluster for cluster in view if cluster.state is ClusterState.USABLE}


def test_link_between_finds_link_in_both_directions() -> None:
    between, within = Link(latency=0.001), Link(bandwidth=1e9)
    view = GridView((), {("south", "north"): between, ("north", "north"): within})
    assert view.link_between("south", "north") is between
    assert view.link_between("north", "south") is between
    assert view.link_between("north", "north") is within
    assert view.link_between("north", "east") == Link()


def test_other_number_of_idle_nodes_keeps_all_else() -> None:
    classes, parts = (NodeClass("fast", 3, 1.0),), (NodeClassPart("fast", 2, 1.0, cores=4),)
    cluster = ClusterView("north", 8, 3, ClusterState.DRAINED, 2.0, "maintenance", classes, parts)
    assert cluster.with_idle(2) == replace(cluster, idle=2, node_classes=(replace(classes[0], idle=2),))


@pytest.mark.parametrize(("size", "idle"), [(0, [3, 4]), (2, [1, 4]), (5, [0, 2]), (9, [0, 0])])
def test_take_nodes_takes_them_from_the_first_classes(size: int, idle: list[int]) -> None:
    classes = (NodeClass("slow", 3, 0.5), NodeClass("fast", 4, 1.0))
    assert [each.idle for each in take_nodes(classes, ANY_NODE, size)] == idle
