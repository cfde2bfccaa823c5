"""Fixed requests, placed on the requested clusters or rejected."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterState, GridView
from koalapy.model.placement import Placement
from koalapy.policies.fixed import Fixed
from tests.policies.grids import NAMES, explained, fixed, grid, grids, shuffled, sites, summary, with_state

policy = Fixed()
components_drawn = st.lists(st.tuples(st.integers(1, 4), st.sampled_from(NAMES)), min_size=1, max_size=4)


@given(components_drawn, shuffled(grids()))
def test_fixed_places_if_every_cluster_has_enough_nodes(
    components: list[tuple[int, str]], views: tuple[GridView, GridView]
) -> None:
    view, other_order = views
    answer = policy.place(fixed(*components), view)
    assert answer == policy.place(fixed(*components), other_order)
    required = Counter[str]()
    for size, name in components:
        required[name] += size
    idle = {c.name: c.usable_idle for c in view}
    fits = all(idle.get(name, 0) >= size for name, size in required.items())
    assert isinstance(answer, Placement) == fits
    if isinstance(answer, Placement):
        assert sites(answer) == components
        assert [c.request_index for c in answer.components] == list(range(len(components)))


def test_fixed_components_may_share_a_cluster() -> None:
    answer = policy.place(fixed((2, "south"), (1, "north"), (1, "south")), grid(north=1, south=3))
    assert sites(answer) == [(2, "south"), (1, "north"), (1, "south")]
    assert isinstance(answer, Placement)
    assert answer.reason == "the request names its clusters: south (3), north (1)"


def test_fixed_refusal_names_every_lacking_cluster() -> None:
    view = with_state(grid(east=4, north=(1, 4), south=3), "east", ClusterState.UNREACHABLE, "no route to it")
    request = fixed((2, "east"), (2, "north"), (1, "nort"), (3, "south"))
    assert summary(policy.place(request, view)) == (
        "needs 2 nodes on east, which is unreachable: no route to it; there is no cluster nort; "
        "needs 2 nodes on north; 1 is idle"
    )
    assert explained(policy, request, view) == [
        ("east", "unreachable: no route to it", None),
        ("nort", "there is no such cluster", None),
        ("north", "1 of 4 nodes idle, the request needs 2 here", None),
    ]


def test_fixed_refusal_of_one_lacking_cluster_counts_missing() -> None:
    assert explained(policy, fixed((4, "north"), (1, "south")), grid(north=(1, 4), south=3)) == [
        ("north", "1 of 4 nodes idle, the request needs 4 here", 3)
    ]
