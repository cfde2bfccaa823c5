"""Larger-first and faster-first; filling in any order finds a split whenever one exists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterState, ClusterView, GridView
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import FlexibleRequest
from koalapy.policies.flexible import ClusterMinimization, FasterFirst, LargerFirst
from koalapy.policies.policy import Policy
from koalapy.policies.splitting import fill_in_turn
from tests.policies.grids import flexible_requests, grid, grids, linked, sites, splits, with_speeds

POLICIES: list[Policy] = [LargerFirst(), FasterFirst()]
SPEEDS = with_speeds(grid(east=2, north=8, south=4, west=16), east=4, north=1, south=3, west=1)


@st.composite
def orders(draw: st.DrawFn) -> list[ClusterView]:
    return list(draw(st.permutations([c for c in draw(grids()) if c.state is ClusterState.USABLE])))


def possible_splits(request: FlexibleRequest, clusters: list[ClusterView]) -> list[tuple[int, ...]]:
    max_count = len(clusters) if request.max_components is None else request.max_components
    return list(splits(request.total_size, [c.idle for c in clusters], request.min_component_size, max_count))


@given(flexible_requests(), orders())
def test_fill_in_turn_finds_a_split_if_one_exists(request: FlexibleRequest, order: list[ClusterView]) -> None:
    filled, possible = fill_in_turn(request, order), possible_splits(request, order)
    if filled is None:
        assert possible == []
        return
    sizes = {cluster.name: size for cluster, size in filled}
    assert tuple(sizes.get(cluster.name, 0) for cluster in order) in possible
    assert list(sizes) == [cluster.name for cluster in order if cluster.name in sizes]


@given(st.integers(1, 16), orders())
def test_fill_in_turn_without_bounds_fills_in_order(total: int, order: list[ClusterView]) -> None:
    filled = fill_in_turn(FlexibleRequest(total), order)
    if filled is not None:
        expected, remaining = [], total
        for cluster in order:
            if remaining and cluster.idle:
                expected.append((cluster, min(remaining, cluster.idle)))
                remaining -= min(remaining, cluster.idle)
        assert filled == expected


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.name))
@given(request=flexible_requests(), view=linked(grids()))
def test_orders_place_whatever_can_be_placed(policy: Policy, request: FlexibleRequest, view: GridView) -> None:
    answer, minimal = policy.place(request, view), ClusterMinimization().place(request, view)
    assert isinstance(answer, Refusal) == isinstance(minimal, Refusal)


@given(request=flexible_requests(), view=linked(grids()))
def test_larger_first_equals_cluster_minimization(request: FlexibleRequest, view: GridView) -> None:
    assert LargerFirst().place(request, view) == ClusterMinimization().place(request, view)


@given(total=st.integers(1, 16), view=linked(grids()))
def test_faster_first_prefers_one_cluster_then_the_fastest(total: int, view: GridView) -> None:
    answer = FasterFirst().place(FlexibleRequest(total), view)
    if isinstance(answer, Refusal):
        return
    usable = sorted((c for c in view if c.usable_idle), key=lambda c: (-c.speed, c.name))
    sufficient = [c.name for c in usable if c.idle >= total]
    names = [component.cluster for component in answer.components]
    assert names == (sufficient[:1] or [c.name for c in usable[: len(names)]])


def test_faster_first_examples_have_expected_placement() -> None:
    alone = FasterFirst().place(FlexibleRequest(4), SPEEDS)
    assert sites(alone) == [(4, "south")]
    assert isinstance(alone, Placement)
    assert alone.reason == "south had the highest speed that serves, 3 (4 of 4 taken)"
    together = FasterFirst().place(FlexibleRequest(24), SPEEDS)
    assert sites(together) == [(2, "east"), (4, "south"), (8, "north"), (10, "west")]
    assert sites(FasterFirst().place(FlexibleRequest(20, max_components=2), SPEEDS)) == [(4, "south"), (16, "west")]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.name))
def test_orders_follow_split_options(policy: Policy) -> None:
    request = FlexibleRequest(6, split_options=((6,), (3, 3)))
    assert sites(policy.place(request, grid(north=4, south=3))) == [(3, "north"), (3, "south")]
    assert policy.explain(request, grid(north=4, south=3)) == ()
    assert [r.missing for r in policy.explain(request, grid(north=(4, 6), south=2))] == [2, None]
