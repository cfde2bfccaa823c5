"""Larger-first and faster-first, and that filling in any order finds a split whenever one exists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterState, ClusterView, GridView
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import FlexibleRequest
from koalapy.policies.flexible import ClusterMinimization, FasterFirst, LargerFirst
from koalapy.policies.policy import Policy
from koalapy.policies.splitting import fill_in_turn
from tests.policies.grids import fewest_missing, grid, grids, linked, sites, splits, with_speeds
from tests.policies.test_cluster_minimization import requests

POLICIES: list[Policy] = [LargerFirst(), FasterFirst()]
SPEEDS = with_speeds(grid(east=2, north=8, south=4, west=16), east=4, north=1, south=3, west=1)


@st.composite
def orders(draw: st.DrawFn) -> list[ClusterView]:
    return list(draw(st.permutations([c for c in draw(grids()) if c.state is ClusterState.USABLE])))


def ways(request: FlexibleRequest, clusters: list[ClusterView]) -> list[tuple[int, ...]]:
    most = len(clusters) if request.max_components is None else request.max_components
    return list(splits(request.total_size, [c.idle for c in clusters], request.min_component_size, most))


@given(requests(), orders())
def test_filling_finds_a_split_whenever_one_exists(request: FlexibleRequest, order: list[ClusterView]) -> None:
    filled, possible = fill_in_turn(request, order), ways(request, order)
    if filled is None:
        assert possible == []
        return
    sizes = {cluster.name: size for cluster, size in filled}
    assert tuple(sizes.get(cluster.name, 0) for cluster in order) in possible
    assert list(sizes) == [cluster.name for cluster in order if cluster.name in sizes]


@given(st.integers(1, 16), orders())
def test_without_bounds_clusters_are_filled_one_by_one(total: int, order: list[ClusterView]) -> None:
    filled = fill_in_turn(FlexibleRequest(total), order)
    if filled is not None:
        expected, left = [], total
        for cluster in order:
            if left and cluster.idle:
                expected.append((cluster, min(left, cluster.idle)))
                left -= min(left, cluster.idle)
        assert filled == expected


def test_a_cluster_too_small_for_the_others_to_make_up_for_is_left_out() -> None:
    view = grid(east=1, north=2, south=10, west=9)
    filled = fill_in_turn(FlexibleRequest(11, max_components=2), view)
    assert filled is not None
    assert [(cluster.name, size) for cluster, size in filled] == [("east", 1), ("south", 10)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.name))
@given(request=requests(), view=linked(grids()))
def test_both_place_what_can_be_placed(policy: Policy, request: FlexibleRequest, view: GridView) -> None:
    answer, reasons = policy.place(request, view), policy.explain(request, view)
    minimal = ClusterMinimization().place(request, view)
    assert isinstance(answer, Refusal) == isinstance(minimal, Refusal)
    assert isinstance(answer, Placement) == (reasons == ()) or not view.clusters
    for reason in reasons:
        assert reason.missing == fewest_missing(policy, request, view, reason.cluster)


@given(request=requests(), view=linked(grids()))
def test_larger_first_takes_what_cluster_minimization_takes(request: FlexibleRequest, view: GridView) -> None:
    assert LargerFirst().place(request, view) == ClusterMinimization().place(request, view)


@given(total=st.integers(1, 16), view=linked(grids()))
def test_faster_first_takes_one_cluster_where_it_can_and_the_fastest_otherwise(total: int, view: GridView) -> None:
    answer = FasterFirst().place(FlexibleRequest(total), view)
    if isinstance(answer, Refusal):
        return
    usable = sorted((c for c in view if c.usable_idle), key=lambda c: (-c.speed, c.name))
    whole = [c.name for c in usable if c.idle >= total]
    taken = [component.cluster for component in answer.components]
    assert taken == (whole[:1] or [c.name for c in usable[: len(taken)]])


def test_faster_first_by_hand() -> None:
    alone = FasterFirst().place(FlexibleRequest(4), SPEEDS)
    assert sites(alone) == [(4, "south")]
    assert isinstance(alone, Placement)
    assert alone.reason == "south had the highest speed that serves, 3 (4 of 4)"
    together = FasterFirst().place(FlexibleRequest(24), SPEEDS)
    assert sites(together) == [(2, "east"), (4, "south"), (8, "north"), (10, "west")]
    assert sites(FasterFirst().place(FlexibleRequest(20, max_components=2), SPEEDS)) == [(4, "south"), (16, "west")]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.name))
def test_the_job_of_figure_2(policy: Policy) -> None:
    assert sites(policy.place(FlexibleRequest(24), grid(c1=16, c2=16, c3=16))) == [(16, "c1"), (8, "c2")]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.name))
def test_split_options_are_followed(policy: Policy) -> None:
    request = FlexibleRequest(6, split_options=((6,), (3, 3)))
    assert sites(policy.place(request, grid(north=4, south=3))) == [(3, "north"), (3, "south")]
    assert policy.explain(request, grid(north=4, south=3)) == ()
    assert [r.missing for r in policy.explain(request, grid(north=(4, 6), south=2))] == [2, None]
