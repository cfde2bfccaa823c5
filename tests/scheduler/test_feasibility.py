"""The capacity check before a policy is evaluated never excludes a placeable job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.errors import UsageError
from koalapy.model.placement import Placement
from koalapy.model.request import Request
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.queue.queue import IdleSummary, Needs, needs_of
from tests.policies.grids import NAMES, grids, linked
from tests.scheduler.requests import fixed, flexible, nonfixed

POLICIES = builtin_policies()

on_named_clusters = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 5), min_size=1).map(lambda s: fixed(**s))
drawn_requests: st.SearchStrategy[Request] = st.one_of(
    st.integers(1, 14).flatmap(
        # A minimum component size above the total is rejected at submission.
        lambda total: st.builds(
            flexible, st.just(total), st.integers(1, min(4, total)), st.sampled_from([None, None, 1, 2, 3])
        )
    ),
    st.sampled_from([((6,), (4, 2)), ((3, 3), (2, 2, 2)), ((5, 1),)]).map(lambda options: flexible(6, split=options)),
    st.lists(st.integers(1, 5), min_size=1, max_size=5).map(lambda sizes: nonfixed(*sizes)),
    on_named_clusters,
)


@given(request=drawn_requests, view=linked(grids()))
def test_feasibility_never_excludes_placeable_request(request: Request, view: GridView) -> None:
    for name in POLICIES.names():
        try:
            policy = POLICIES.resolve(name, request)
        except UsageError:
            continue
        if isinstance(policy.place(request, view), Placement):
            assert IdleSummary(view).may_fit(needs_of(request)), name


@given(request=on_named_clusters, view=grids())
def test_feasibility_of_fixed_request_is_exact(request: Request, view: GridView) -> None:
    fits = IdleSummary(view).may_fit(needs_of(request))
    assert fits == isinstance(POLICIES.resolve("", request).place(request, view), Placement)


@pytest.mark.parametrize(
    ("request_", "needs"),
    [
        (flexible(10, 2, 3), Needs(10, 4, 2)),
        (flexible(6, split=((4, 2), (3, 3))), Needs(6, 3)),
        (nonfixed(2, 4, 4), Needs(10, 4, slots=((4, 2), (2, 3)))),
        (fixed(north=4, south=2), Needs(6, 4, cluster_sizes=(("north", 4), ("south", 2)))),
    ],
)
def test_needs_of_request(request_: Request, needs: Needs) -> None:
    assert needs_of(request_) == needs


def test_feasibility_counts_slots_per_cluster() -> None:
    """Seven idle nodes offer one slot of four nodes, three idle ones none."""
    south = ClusterView("south", 8, 3)
    assert not IdleSummary(GridView((ClusterView("north", 8, 7), south))).may_fit(needs_of(nonfixed(4, 4)))
    assert IdleSummary(GridView((ClusterView("north", 8, 8), south))).may_fit(needs_of(nonfixed(4, 4)))
