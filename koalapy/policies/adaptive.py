"""Adaptive (huang-2007 4 and 6): room for others or speed, whichever starts more of the waiting jobs."""

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
"""So many of the waiting jobs are looked at, from the head of the queue: what is far behind starts much later."""


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
        roomy_policy, fast_policy = self._pair(request)
        fast = fast_policy.place(request, grid)
        if isinstance(fast, Refusal):
            return fast
        roomy = roomy_policy.place(request, grid)
        if isinstance(roomy, Refusal) or roomy.components == fast.components:
            return fast
        by_fast, by_roomy = (startable(grid.waiting[:MAX_LOOK_AHEAD], _left(grid, chosen)) for chosen in (fast, roomy))
        if by_roomy > by_fast:
            compared = f"{by_roomy} waiting jobs can start beside it, with {fast_policy.name} {by_fast}"
            return replace(roomy, reason=f"{roomy_policy.name}: {roomy.reason}; {compared}")
        compared = f"{by_fast} waiting jobs can start beside it, with {roomy_policy.name} {by_roomy}"
        return replace(fast, reason=f"{fast_policy.name}: {fast.reason}; {compared}")

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        return self._pair(request)[1].explain(request, grid)

    def _pair(self, request: Request) -> tuple[Policy, Policy]:
        """The policy that leaves more room as a rule, and the one that takes the faster clusters."""
        if isinstance(request, FixedRequest):
            raise does_not_serve(self, request)
        return self._split if isinstance(request, FlexibleRequest) else self._single


def _left(grid: GridView, placement: Placement) -> dict[ClusterName, int]:
    left = {cluster.name: cluster.idle for cluster in grid.by_idle}
    for component in placement.components:
        left[component.cluster] -= component.size
    return left


def startable(waiting: Sequence[Request], idle: Mapping[ClusterName, int]) -> int:
    """How many of the requests could start at once, taken in their order, each beside those before it.

    Flexible ones count where one cluster holds them, the fullest that does; components of non-fixed ones, the larger
    first, go where most nodes are idle; those of fixed ones where they must.
    """
    # One cluster that has nodes for all of them has room for each, whatever the others got.
    may_go_there = not any(isinstance(request, FixedRequest) for request in waiting)
    if may_go_there and sum(request.total_size for request in waiting) <= max(idle.values(), default=-1):
        return len(waiting)
    room = _Room(idle)
    return sum(room.start(request) for request in waiting)


class _Room:
    """Idle nodes, of which requests take some."""

    def __init__(self, idle: Mapping[ClusterName, int]) -> None:
        self._idle = dict(idle)
        self._order = sorted((count, name) for name, count in idle.items())
        """The clusters with the fewest idle nodes first."""
        self._total = sum(idle.values())

    def start(self, request: Request) -> bool:
        """Whether there is room, which is taken then."""
        size = request.total_size
        if size > self._total:
            return False
        if isinstance(request, FlexibleRequest):
            return self._take(size, bisect_left(self._order, (size, "")))
        components = [(component.size, component.cluster) for component in request.components]
        if isinstance(request, NonFixedRequest):
            components.sort(reverse=True, key=itemgetter(0))
        before = self._idle.copy(), self._order.copy(), self._total
        if all(self._take(size, self._place(cluster)) for size, cluster in components):
            return True
        self._idle, self._order, self._total = before
        return False

    def _place(self, cluster: ClusterName | None) -> int:
        """In the order: of a cluster, or of the first by name of those with most idle nodes."""
        if cluster is None:
            return bisect_left(self._order, (self._order[-1][0], "")) if self._order else 0
        return bisect_left(self._order, (self._idle[cluster], cluster)) if cluster in self._idle else len(self._order)

    def _take(self, size: int, place: int) -> bool:
        """Nodes of the cluster in a place of the order, if it has so many."""
        if place >= len(self._order) or self._order[place][0] < size:
            return False
        idle, name = self._order.pop(place)
        insort(self._order, (idle - size, name))
        self._idle[name] = idle - size
        self._total -= size
        return True
