"""Worst fit, compared with a naive implementation, and the example of sonmez-2010, figure 2."""

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterState, GridView
from koalapy.model.placement import Placement, Refusal
from koalapy.policies.worst_fit import WorstFit
from tests.policies.grids import explained, grid, grids, nonfixed, shuffled, sites, summary, with_state

policy = WorstFit()
sizes_drawn = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def by_the_rule(sizes: list[int], view: GridView) -> list[tuple[int, str]] | None:
    """Place the largest component first, each on the cluster with most idle nodes left, ties by name."""
    remaining = {c.name: c.idle for c in view if c.state is ClusterState.USABLE}
    chosen: dict[int, str] = {}
    while len(chosen) < len(sizes):
        index = min((i for i in range(len(sizes)) if i not in chosen), key=lambda i: (-sizes[i], i))
        fullest_last = sorted(remaining, key=lambda name: (-remaining[name], name))
        if not fullest_last or remaining[fullest_last[0]] < sizes[index]:
            return None
        chosen[index] = fullest_last[0]
        remaining[fullest_last[0]] -= sizes[index]
    return [(size, chosen[index]) for index, size in enumerate(sizes)]


@given(sizes_drawn, shuffled(grids(largest=8)))
def test_worst_fit_agrees_with_its_rule(sizes: list[int], views: tuple[GridView, GridView]) -> None:
    view, other_order = views
    answer, expected = policy.place(nonfixed(*sizes), view), by_the_rule(sizes, view)
    assert answer == policy.place(nonfixed(*sizes), other_order)
    if expected is None:
        assert isinstance(answer, Refusal)
        return
    assert sites(answer) == expected
    assert isinstance(answer, Placement)
    assert [component.request_index for component in answer.components] == list(range(len(sizes)))
    for cluster in view:
        assert answer.nodes_on(cluster.name) <= cluster.usable_idle


def test_worst_fit_spreads_components_of_figure_2() -> None:
    answer = policy.place(nonfixed(8, 8, 8), grid(c1=16, c2=16, c3=16))
    assert sites(answer) == [(8, "c1"), (8, "c2"), (8, "c3")]
    assert isinstance(answer, Placement)
    assert (
        answer.reason == "the largest first, each where most nodes were idle: "
        "c1 (8 of 16 taken), c2 (8 of 16 taken), c3 (8 of 16 taken)"
    )


def test_worst_fit_reason_of_one_component_names_its_cluster() -> None:
    answer = policy.place(nonfixed(3), grid(north=3, south=5))
    assert isinstance(answer, Placement)
    assert answer.reason == "south had the most idle nodes (5)"


def test_worst_fit_refusal_names_the_unplaced_component() -> None:
    view = grid(north=(3, 8), south=(2, 4))
    assert summary(policy.place(nonfixed(4), view)) == (
        "no cluster has 4 idle nodes for component 0 (most: north with 3)"
    )
    assert explained(policy, nonfixed(4), view) == [
        ("north", "3 of 8 nodes idle, component 0 needs 4", 1),
        ("south", "2 of 4 nodes idle, component 0 needs 4", 2),
    ]


def test_worst_fit_explanation_counts_larger_components() -> None:
    view = grid(north=(3, 3), south=(2, 4))
    assert summary(policy.place(nonfixed(1, 3, 2), view)) == (
        "no cluster has 1 idle node left for component 0 (most: north with 0)"
    )
    assert explained(policy, nonfixed(1, 3, 2), view) == [
        ("north", "3 of 3 nodes idle, 3 of them for larger components, component 0 needs 1", None),
        ("south", "2 of 4 nodes idle, 2 of them for larger components, component 0 needs 1", 1),
    ]


def test_worst_fit_refusal_names_unusable_clusters() -> None:
    view = with_state(grid(north=3, south=6), "south", ClusterState.UNREACHABLE, "its agent has not connected yet")
    assert summary(policy.place(nonfixed(4), view)) == (
        "no cluster has 4 idle nodes for component 0 (most: north with 3; south unreachable)"
    )
    assert explained(policy, nonfixed(4), view)[1] == ("south", "unreachable: its agent has not connected yet", None)
    view = with_state(view, "north", ClusterState.DRAINED)
    assert summary(policy.place(nonfixed(1), view)) == ("no cluster is usable (north drained, south unreachable)")
    assert explained(policy, nonfixed(1), view)[0] == ("north", "drained", None)


def test_worst_fit_without_clusters_refuses() -> None:
    assert summary(policy.place(nonfixed(1), GridView(()))) == "there are no clusters"
