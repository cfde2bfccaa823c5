"""What each policy promises, whatever its rule: its answers do not depend on the order of the clusters, and its reasons
name exactly the nodes that are missing."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import GridView
from koalapy.model.placement import Placement
from koalapy.model.request import FixedRequest, FlexibleRequest, Request
from koalapy.policies.adaptive import Adaptive
from koalapy.policies.close_to_files import CloseToFiles
from koalapy.policies.communication_aware import CommunicationAware
from koalapy.policies.fixed import Fixed
from koalapy.policies.flexible import ClusterMinimization, FasterFirst, LargerFirst
from koalapy.policies.policy import Policy
from koalapy.policies.single import BestFit, FastestOne
from koalapy.policies.worst_fit import WorstFit
from tests.policies.grids import (
    NAMES,
    fewest_missing,
    fixed,
    flexible_requests,
    grids,
    linked,
    nonfixed,
    requests_with_inputs,
    split_requests,
)

fixed_requests = st.lists(st.tuples(st.integers(1, 4), st.sampled_from(NAMES)), min_size=1, max_size=4).map(
    lambda components: fixed(*components)
)
nonfixed_requests = st.lists(st.integers(1, 6), min_size=1, max_size=5).map(lambda sizes: nonfixed(*sizes))
single_requests = st.builds(
    lambda kind, size: kind(size), st.sampled_from([nonfixed, FlexibleRequest]), st.integers(1, 7)
)
measured = linked(grids())


@dataclass(frozen=True)
class Case:
    policy: Policy
    requests: st.SearchStrategy[Request]
    views: st.SearchStrategy[GridView] = measured


CASES = {
    "fixed": Case(Fixed(), fixed_requests, grids(largest=10)),
    "worst-fit": Case(WorstFit(), nonfixed_requests, grids(largest=12)),
    "close-to-files": Case(CloseToFiles(), requests_with_inputs),
    "cluster-minimization": Case(ClusterMinimization(), flexible_requests(), grids(largest=12)),
    "split-options": Case(ClusterMinimization(), split_requests, grids(largest=9)),
    "larger-first": Case(LargerFirst(), flexible_requests()),
    "faster-first": Case(FasterFirst(), flexible_requests()),
    "best-fit": Case(BestFit(), single_requests),
    "fastest-one": Case(FastestOne(), single_requests),
    "adaptive": Case(Adaptive(), single_requests),
    "by latency": Case(CommunicationAware(), flexible_requests()),
    "by bandwidth": Case(CommunicationAware().configured({"metric": "bandwidth"}), flexible_requests()),
    "in groups": Case(CommunicationAware().configured({"group_latency": "2"}), flexible_requests()),
}


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_policy_explains_missing_nodes_exactly(name: str, data: st.DataObject) -> None:
    policy, request, view = CASES[name].policy, data.draw(CASES[name].requests), data.draw(CASES[name].views)
    answer, reasons = policy.place(request, view), policy.explain(request, view)
    shuffled = replace(view, clusters=tuple(data.draw(st.permutations(view.clusters))))
    assert policy.place(request, shuffled) == answer
    assert isinstance(answer, Placement) == (reasons == ()) or not view.clusters
    if reasons and not isinstance(request, FixedRequest):
        assert [reason.cluster for reason in reasons] == sorted(cluster.name for cluster in view)
    for reason in reasons:
        assert reason.missing == fewest_missing(policy, request, view, reason.cluster), reason
