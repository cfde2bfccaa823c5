"""The grid as a policy sees it."""

import pytest
from hypothesis import given

from koalapy.model.cluster import ClusterState, ClusterView, GridView, Link
from tests.policies.grids import grid, grids


@pytest.mark.parametrize("state", ClusterState)
def test_only_a_usable_cluster_has_nodes_to_promise(state: ClusterState) -> None:
    assert ClusterView("north", 4, 3, state).usable_idle == (3 if state is ClusterState.USABLE else 0)


def test_clusters_are_found_by_name() -> None:
    view = grid(north=3, south=2)
    north = view.get("north")
    assert north is not None
    assert (north.name, north.idle) == ("north", 3)
    assert view.get("east") is None
    assert [cluster.name for cluster in view] == ["north", "south"]


@given(grids())
def test_by_idle_holds_the_usable_clusters_with_the_emptiest_first(view: GridView) -> None:
    ordered = [(-cluster.idle, cluster.name) for cluster in view.by_idle]
    assert ordered == sorted(ordered)
    assert view.usable_idle == sum(cluster.usable_idle for cluster in view)
    assert set(view.by_idle) == {cluster for cluster in view if cluster.state is ClusterState.USABLE}


def test_a_link_is_found_whichever_way_it_was_measured() -> None:
    between, within = Link(latency=0.001), Link(bandwidth=1e9)
    view = GridView((), {("south", "north"): between, ("north", "north"): within})
    assert view.link_between("south", "north") is between
    assert view.link_between("north", "south") is between
    assert view.link_between("north", "north") is within
    assert view.link_between("north", "east") == Link()
