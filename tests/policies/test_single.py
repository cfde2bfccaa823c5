"""Best-fit, fastest-one, and adaptive, which chooses between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import GridView
from koalapy.model.errors import UsageError
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import FlexibleRequest, NonFixedRequest, Request
from koalapy.policies.adaptive import MAX_LOOK_AHEAD, Adaptive, count_startable
from koalapy.policies.fixed import Fixed
from koalapy.policies.flexible import FasterFirst, LargerFirst
from koalapy.policies.policy import Policy
from koalapy.policies.registry import builtin_policies
from koalapy.policies.single import BestFit, FastestOne
from koalapy.policies.worst_fit import WorstFit
from tests.policies.grids import (
    NAMES,
    explained,
    fixed,
    grid,
    grids,
    linked,
    nonfixed,
    sites,
    summary,
    with_idle,
    with_speeds,
)

SINGLE: list[Policy] = [BestFit(), FastestOne()]
views = linked(grids())
one_size = st.integers(1, 7)
kinds = st.sampled_from([nonfixed, FlexibleRequest])
GRID = with_speeds(grid(east=8, north=5, south=6), east=3, north=1, south=2)


def by_name(policy: Policy) -> str:
    return policy.name


@given(one_size, kinds, views)
def test_best_fit_leaves_the_fewest_idle_nodes_of_all(size: int, kind: type, view: GridView) -> None:
    answer = BestFit().place(kind(size), view)
    able = sorted((c.idle, c.name) for c in view if c.usable_idle >= size)
    assert isinstance(answer, Refusal) if not able else sites(answer) == [(size, able[0][1])]


@given(one_size, kinds, views)
def test_fastest_one_takes_fastest_sufficient_cluster(size: int, kind: type, view: GridView) -> None:
    answer = FastestOne().place(kind(size), view)
    able = sorted((-c.speed, c.name) for c in view if c.usable_idle >= size)
    assert isinstance(answer, Refusal) if not able else sites(answer) == [(size, able[0][1])]


def test_single_policies_examples_have_expected_placement() -> None:
    best, fastest = (policy.place(nonfixed(5), GRID) for policy in SINGLE)
    assert (sites(best), sites(fastest)) == ([(5, "north")], [(5, "east")])
    assert isinstance(best, Placement)
    assert isinstance(fastest, Placement)
    assert best.reason == "north is left with the fewest idle nodes (0 of 5)"
    assert fastest.reason == "east is the fastest with room (speed 3, 8 idle)"
    assert best.components[0].request_index == 0
    assert summary(BestFit().place(nonfixed(9), GRID)) == "no cluster has 9 idle nodes (east 8, south 6, north 5)"
    assert explained(BestFit(), nonfixed(9), grid(north=(5, 12), south=6)) == [
        ("north", "5 of 12 nodes idle, the request needs 9 here", 4),
        ("south", "6 of 6 nodes idle, the request needs 9 here", None),
    ]


@pytest.mark.parametrize("name", ["best-fit", "fastest-one", "adaptive"])
def test_single_policies_reject_several_components(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        builtin_policies().resolve(name, nonfixed(2, 1))
    error = refused.value
    assert (error.field, error.value) == ("request.components", 2)
    assert error.message == f"policy {name} takes one cluster for one component, and the request has 2"
    assert builtin_policies().resolve(name, nonfixed(2)).name == name


@pytest.mark.parametrize("name", ["best-fit", "fastest-one"])
def test_single_policies_reject_split_options(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        builtin_policies().resolve(name, FlexibleRequest(4, split_options=((4,),)))
    assert (refused.value.field, refused.value.value) == ("request.split_options", [[4]])


# Adaptive


def remaining_grid(view: GridView, placement: Placement) -> GridView:
    for component in placement.components:
        cluster = view.get(component.cluster)
        assert cluster is not None
        view = with_idle(view, cluster.name, cluster.idle - component.size)
    return view


def count_started(waiting: tuple[Request, ...], view: GridView) -> int:
    """Count the requests that can start, with the real policies."""
    started = 0
    for request in waiting:
        chosen: dict[str, Policy] = {"nonfixed": WorstFit(), "flexible": BestFit(), "fixed": Fixed()}
        answer = chosen[request.type].place(request, view)
        if isinstance(answer, Placement):
            view, started = remaining_grid(view, answer), started + 1
    return started


waiting_drawn = st.lists(
    st.one_of(
        st.integers(1, 5).map(FlexibleRequest),
        st.lists(st.integers(1, 3), min_size=1, max_size=3).map(lambda sizes: nonfixed(*sizes)),
        st.tuples(st.integers(1, 3), st.sampled_from(NAMES)).map(fixed),
    ),
    max_size=4,
).map(tuple)


@given(waiting_drawn, views)
def test_count_startable_counts_waiting_jobs_in_turn(waiting: tuple[Request, ...], view: GridView) -> None:
    assert count_startable(waiting, {c.name: c.idle for c in view.by_idle}) == count_started(waiting, view)


@given(one_size, kinds, views, waiting_drawn)
def test_adaptive_takes_choice_that_starts_more_jobs(
    size: int, kind: type, view: GridView, waiting: tuple[Request, ...]
) -> None:
    view = GridView(view.clusters, view.links, waiting)
    pair: tuple[Policy, Policy] = (
        (BestFit(), FastestOne()) if kind is not FlexibleRequest else (LargerFirst(), FasterFirst())
    )
    roomy, fast = pair[0].place(kind(size), view), pair[1].place(kind(size), view)
    answer = Adaptive().place(kind(size), view)
    if isinstance(roomy, Refusal) or isinstance(fast, Refusal):
        assert answer == fast
        return
    starts_more = count_started(waiting, remaining_grid(view, roomy)) > count_started(
        waiting, remaining_grid(view, fast)
    )
    assert sites(answer) == sites(roomy if starts_more else fast)


def test_adaptive_examples_have_expected_placement() -> None:
    """A job of 5 on the fast cluster with 8 nodes delays a waiting job of 8; on the cluster with 5 it does not."""
    nobody = Adaptive().place(nonfixed(5), GRID)
    assert sites(nobody) == [(5, "east")]
    wide = GridView(GRID.clusters, {}, (nonfixed(8), FlexibleRequest(6)))
    answer = Adaptive().place(nonfixed(5), wide)
    assert sites(answer) == [(5, "north")]
    assert isinstance(answer, Placement)
    assert answer.reason == (
        "best-fit: north is left with the fewest idle nodes (0 of 5); "
        "2 waiting jobs can start beside it, with fastest-one 1"
    )
    far_behind = GridView(GRID.clusters, {}, (*[nonfixed(99)] * MAX_LOOK_AHEAD, nonfixed(8)))
    assert sites(Adaptive().place(nonfixed(5), far_behind)) == [(5, "east")]


def test_adaptive_without_sufficient_cluster_splits() -> None:
    request = FlexibleRequest(9)
    assert sites(Adaptive().place(request, GRID)) == [(8, "east"), (1, "south")]
    assert isinstance(Adaptive().place(FlexibleRequest(20), GRID), Refusal)
    options = FlexibleRequest(9, split_options=((5, 4),))
    assert sites(Adaptive().place(options, GRID)) == [(5, "east"), (4, "south")]
    assert isinstance(Adaptive().place(NonFixedRequest(nonfixed(99).components), GRID), Refusal)
