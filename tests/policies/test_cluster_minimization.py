"""Cluster minimization, compared with a search over all splits, and the example of sonmez-2010, figure 2."""

import pytest
from hypothesis import given

from koalapy.model.cluster import ClusterState, GridView
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import FlexibleRequest
from koalapy.policies.flexible import ClusterMinimization
from tests.policies.grids import explained, flexible_requests, grid, grids, shuffled, sites, splits, summary, with_state

policy = ClusterMinimization()


def possible_splits(request: FlexibleRequest, view: GridView) -> list[tuple[int, ...]]:
    """Return every split within the request's bounds, with sizes in the order of the view's clusters."""
    max_count = len(view.clusters) if request.max_components is None else request.max_components
    return list(splits(request.total_size, [c.usable_idle for c in view], request.min_component_size, max_count))


@given(flexible_requests(), shuffled(grids()))
def test_cluster_minimization_finds_split_over_fewest_clusters(
    request: FlexibleRequest, views: tuple[GridView, GridView]
) -> None:
    view, other_order = views
    answer = policy.place(request, view)
    assert answer == policy.place(request, other_order)
    possible = possible_splits(request, view)
    if not possible:
        assert isinstance(answer, Refusal)
        return
    assert isinstance(answer, Placement)
    assert tuple(answer.nodes_on(c.name) for c in view) in possible
    assert len(answer.components) == min(sum(size > 0 for size in way) for way in possible)


@given(flexible_requests(), grids())
def test_cluster_minimization_fills_clusters_by_idle_nodes(request: FlexibleRequest, view: GridView) -> None:
    answer = policy.place(request, view)
    if isinstance(answer, Refusal):
        return
    usable = sorted((c for c in view if c.state is ClusterState.USABLE), key=lambda c: (-c.idle, c.name))
    first = usable[: len(answer.components)]
    assert [c.cluster for c in answer.components] == [c.name for c in first]
    assert all(component.request_index is None for component in answer.components)
    *filled, last = answer.components
    given_up = sum(cluster.idle - component.size for cluster, component in zip(first, filled, strict=False))
    assert given_up == 0 or last.size == request.min_component_size


def test_cluster_minimization_combines_two_clusters_of_figure_2() -> None:
    answer = policy.place(FlexibleRequest(24), grid(c1=16, c2=16, c3=16))
    assert sites(answer) == [(16, "c1"), (8, "c2")]
    assert isinstance(answer, Placement)
    assert answer.reason == "c1 had the most idle nodes (16 of 16 taken), then c2 (8 of 16 taken)"


@pytest.mark.parametrize(("minimum", "sizes"), [(3, (6, 3, 3)), (4, (4, 4, 4))])
def test_last_component_is_raised_to_its_minimum_by_nodes_of_the_latest_clusters(
    minimum: int, sizes: tuple[int, ...]
) -> None:
    answer = policy.place(FlexibleRequest(12, min_component_size=minimum), grid(a=6, b=5, c=4))
    assert sites(answer) == [*zip(sizes, "abc", strict=True)]


def test_cluster_minimization_shortens_a_long_reason() -> None:
    answer = policy.place(FlexibleRequest(6), grid(a=1, b=1, c=1, d=1, e=1, f=1))
    assert isinstance(answer, Placement)
    listed = ", then ".join(f"{name} (1 of 1 taken)" for name in "bcd")
    assert answer.reason == f"a had the most idle nodes (1 of 1 taken), then {listed} and 2 more"


def test_cluster_minimization_refusal_names_the_unmet_bound() -> None:
    view = grid(east=(1, 4), north=(3, 8), south=(2, 2))
    refusals = {
        FlexibleRequest(7): "needs 7 nodes; 6 are idle",
        FlexibleRequest(6, min_component_size=2): "needs 6 nodes; 5 are idle on clusters with at least 2",
        FlexibleRequest(6, max_components=2): "needs 6 nodes on at most 2 clusters; 5 are idle on the largest",
    }
    for request, problem in refusals.items():
        assert summary(policy.place(request, view)) == f"{problem} (north 3, south 2, east 1)"
    assert summary(policy.place(FlexibleRequest(5, min_component_size=3), grid(north=4, south=4))) == (
        "5 nodes cannot be split into components of at least 3 (north 4, south 4)"
    )
    assert summary(policy.place(FlexibleRequest(2), grid(north=1, south=0))) == (
        "needs 2 nodes; 1 is idle (north 1, south 0)"
    )


def test_cluster_minimization_refusal_names_unusable_clusters() -> None:
    view = with_state(grid(north=3, south=6), "south", ClusterState.UNUSABLE, "3 errors in a row")
    assert summary(policy.place(FlexibleRequest(6), view)) == ("needs 6 nodes; 3 are idle (north 3; south unusable)")
    assert explained(policy, FlexibleRequest(6), view) == [
        ("north", "3 of 3 nodes idle, the request needs 6 in all", None),
        ("south", "unusable: 3 errors in a row", None),
    ]
    nothing = with_state(view, "north", ClusterState.DRAINED)
    assert summary(policy.place(FlexibleRequest(6), nothing)) == (
        "no cluster is usable (north drained, south unusable)"
    )


def test_cluster_minimization_explains_each_cluster() -> None:
    view = grid(east=(1, 4), north=(3, 8), south=(2, 2))
    assert explained(policy, FlexibleRequest(6, min_component_size=2), view) == [
        ("east", "1 of 4 nodes idle, a component needs at least 2", 1),
        ("north", "3 of 8 nodes idle, the request needs 6 in all", 1),
        ("south", "2 of 2 nodes idle, the request needs 6 in all", None),
    ]


def test_cluster_minimization_minimum_above_total_is_refused() -> None:
    request = FlexibleRequest(2, min_component_size=3)
    assert isinstance(policy.place(request, grid(north=8)), Refusal)
    assert [reason.missing for reason in policy.explain(request, grid(north=(4, 8)))] == [None]
