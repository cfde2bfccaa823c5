"""Options of flexible requests that restrict their splits."""

from hypothesis import given

from koalapy.model.cluster import ClusterState, GridView
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import FlexibleRequest
from koalapy.policies.flexible import ClusterMinimization
from koalapy.policies.worst_fit import WorstFit
from tests.policies.grids import (
    explained,
    grid,
    grids,
    make_split,
    nonfixed,
    shuffled,
    sites,
    split_requests,
    summary,
    with_state,
)

policy = ClusterMinimization()


@given(split_requests, shuffled(grids()))
def test_split_options_first_that_worst_fit_places_is_taken(
    request: FlexibleRequest, views: tuple[GridView, GridView]
) -> None:
    view, other_order = views
    answer = policy.place(request, view)
    assert answer == policy.place(request, other_order)
    answers = (WorstFit().place(nonfixed(*option), view) for option in request.split_options)
    first = next((placed for placed in answers if isinstance(placed, Placement)), None)
    if first is None:
        assert isinstance(answer, Refusal)
        return
    assert sites(answer) == sites(first)
    assert isinstance(answer, Placement)
    assert all(component.request_index is None for component in answer.components)


def test_split_options_reason_names_the_option() -> None:
    view = grid(north=4, south=3)
    answers = [policy.place(make_split(*options), view) for options in ([(4, 2), (6,)], [(6,), (3, 3)])]
    assert [sites(answer) for answer in answers] == [[(4, "north"), (2, "south")], [(3, "north"), (3, "south")]]
    assert [answer.reason for answer in answers if isinstance(answer, Placement)] == [
        "4+2 is the first split option",
        "3+3 is split_options[1], the first that fits",
    ]


def test_split_options_refusal_summarizes_all_options() -> None:
    view = grid(north=(3, 6), south=(2, 4))
    request = make_split((6,), (4, 2), (2, 2, 2), (1,) * 6)
    wanting = make_split((6,), (4, 2), (2, 2, 2))
    assert summary(policy.place(wanting, view)) == (
        "no split option fits: 6: no cluster has 6 idle nodes; 4+2: no cluster has 4 idle nodes; "
        "2+2+2: no cluster has 2 idle nodes left (north 3, south 2)"
    )
    assert explained(policy, wanting, view) == [
        ("north", "3 of 6 nodes idle, each split option needs 2 or more for its largest component", 1),
        ("south", "2 of 4 nodes idle, each split option needs 2 or more for its largest component", 2),
    ]
    assert "1+1+1+1+1+1: no cluster has 1 idle node left" in summary(policy.place(request, view))


def test_split_options_of_many_components_are_abbreviated() -> None:
    assert summary(policy.place(make_split((1,) * 9), grid(north=2))) == (
        "no split option fits: 9 components: no cluster has 1 idle node left (north 2)"
    )


def test_split_options_without_usable_cluster_are_refused() -> None:
    view = with_state(grid(north=3), "north", ClusterState.DRAINED)
    assert summary(policy.place(make_split((1, 1)), view)) == "no cluster is usable (north drained)"
