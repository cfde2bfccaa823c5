"""Adaptive policy (huang-2007 4 and 6): choose the placement that lets more of the waiting jobs start."""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from koalapy.model.cluster import GridView
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import ClusterName, FixedRequest, FlexibleRequest, NonFixedRequest, Request
from koalapy.policies.flexible import FasterFirst, LargerFirst
from koalapy.policies.policy import Policy, does_not_serve
from koalapy.policies.single import SERVES, BestFit, FastestOne, check_single

MAX_LOOK_AHEAD = 100
"""Number of waiting jobs that are considered, from the head of the queue. Jobs further back start much later."""


class Adaptive:
    """Between best-fit and fastest-one, or larger-first and faster-first: what leaves room for more waiting jobs."""

    name = "adaptive"
    serves = SERVES
    looks_ahead = True

    def __init__(self) -> None:
        self._single: tuple[Policy, Policy] = (BestFit(), FastestOne())
        self._split: tuple[Policy, Policy] = (LargerFirst(), FasterFirst())

    def check(self, request: Request) -> None:
        if not isinstance(request, FlexibleRequest):
            check_single(self.name, request)

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        roomy_policy, fast_policy = self._candidate_policies(request)
        fast = fast_policy.place(request, grid)
        if isinstance(fast, Refusal):
            return fast
        roomy = roomy_policy.place(request, grid)
        if isinstance(roomy, Refusal) or roomy.components == fast.components:
            return fast
        by_fast, by_roomy = (
            count_startable(grid.waiting[:MAX_LOOK_AHEAD], _remaining_idle(grid, chosen)) for chosen in (fast, roomy)
        )
        if by_roomy > by_fast:
            compared = f"{by_roomy} waiting jobs can start beside it, with {fast_policy.name} {by_fast}"
            return replace(roomy, reason=f"{roomy_policy.name}: {roomy.reason}; {compared}")
        compared = f"{by_fast} waiting jobs can start beside it, with {roomy_policy.name} {by_roomy}"
        return replace(fast, reason=f"{fast_policy.name}: {fast.reason}; {compared}")

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        return self._candidate_policies(request)[1].explain(request, grid)

    def _candidate_policies(self, request: Request) -> tuple[Policy, Policy]:
        """Return the policy that lets more waiting jobs start, and the one that uses faster clusters.

        The pair depends on the type of the request. Raise ``TypeError`` for a fixed one.
        """
        if isinstance(request, FixedRequest):
            raise does_not_serve(self, request)
        return self._split if isinstance(request, FlexibleRequest) else self._single


def _remaining_idle(grid: GridView, placement: Placement) -> dict[ClusterName, int]:
    """Return the idle nodes of each usable cluster that a placement leaves."""
    remaining = {cluster.name: cluster.idle for cluster in grid.by_idle}
    for component in placement.components:
        remaining[component.cluster] -= component.size
    return remaining


def count_startable(waiting: Sequence[Request], idle: Mapping[ClusterName, int]) -> int:
    """Return how many of the requests could start at once, in their order, each in addition to those before it.

    A flexible request is placed on the fullest cluster that holds it whole. Components of a non-fixed request are
    placed by decreasing size, each on the cluster with the most idle nodes. Components of a fixed request are placed on
    the clusters that it names.
    """
    # One cluster with enough nodes for all requests has enough for each of them, in any order.
    may_go_there = not any(isinstance(request, FixedRequest) for request in waiting)
    if may_go_there and sum(request.total_size for request in waiting) <= max(idle.values(), default=-1):
        return len(waiting)
    idle_nodes = _IdleNodes(idle)
    return sum(idle_nodes.start(request) for request in waiting)


class _IdleNodes:
    """Idle nodes by cluster, from which requests take nodes."""

    def __init__(self, idle: Mapping[ClusterName, int]) -> None:
        self._idle = dict(idle)
        self._order = sorted((count, name) for name, count in idle.items())
        """(idle nodes, cluster) pairs in ascending order."""
        self._total = sum(idle.values())

    def start(self, request: Request) -> bool:
        """Take the nodes of a request and return True; return False and take none if they do not suffice."""
        size = request.total_size
        if size > self._total:
            return False
        if isinstance(request, FlexibleRequest):
            return self._take(size, bisect_left(self._order, (size, "")))
        components = [(component.size, component.cluster) for component in request.components]
        if isinstance(request, NonFixedRequest):
            components.sort(reverse=True, key=itemgetter(0))
        saved_state = self._idle.copy(), self._order.copy(), self._total
        if all(self._take(size, self._place(cluster)) for size, cluster in components):
            return True
        self._idle, self._order, self._total = saved_state
        return False

    def _place(self, cluster: ClusterName | None) -> int:
        """Return the index in ``_order`` of a cluster; for None, of the one with the most idle nodes, ties by name."""
        if cluster is None:
            return bisect_left(self._order, (self._order[-1][0], "")) if self._order else 0
        return bisect_left(self._order, (self._idle[cluster], cluster)) if cluster in self._idle else len(self._order)

    def _take(self, size: int, place: int) -> bool:
        """Take nodes of the cluster at index ``place`` of ``_order``; return False if it has too few."""
        if place >= len(self._order) or self._order[place][0] < size:
            return False
        idle, name = self._order.pop(place)
        insort(self._order, (idle - size, name))
        self._idle[name] = idle - size
        self._total -= size
        return True
