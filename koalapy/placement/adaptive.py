"""Adaptive (huang-2007 4 and 6): room for others or speed, whichever starts more of the waiting jobs."""

from collections.abc import Sequence
from dataclasses import replace

from koalapy.model.cluster import GridView
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import ClusterName, FixedRequest, FlexibleRequest, NonFixedRequest, Request
from koalapy.placement.flexible import FasterFirst, LargerFirst
from koalapy.placement.policy import Policy, does_not_serve
from koalapy.placement.single import SERVES, BestFit, FastestOne, check_single

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


Idle = dict[ClusterName, int]


def _left(grid: GridView, placement: Placement) -> Idle:
    return {cluster.name: cluster.idle - placement.nodes_on(cluster.name) for cluster in grid.by_idle}


def startable(waiting: Sequence[Request], idle: Idle) -> int:
    """How many of the requests could start at once, taken in their order, each beside those before it.

    Flexible ones count where one cluster holds them, the fullest that does; components of non-fixed ones, the larger
    first, go where most nodes are idle; those of fixed ones where they must.
    """
    started = 0
    for request in waiting:
        after = _started(request, idle)
        if after is not None:
            idle, started = after, started + 1
    return started


def _started(request: Request, idle: Idle) -> Idle | None:
    """What is idle once the request has started; None when it cannot."""
    if request.total_size > sum(idle.values()):
        return None
    after = dict(idle)
    if isinstance(request, FlexibleRequest):
        enough = [(count, name) for name, count in idle.items() if count >= request.total_size]
        if not enough:
            return None
        after[min(enough)[1]] -= request.total_size
        return after
    components = [(component.size, component.cluster or "") for component in request.components]
    if isinstance(request, NonFixedRequest):
        components.sort(reverse=True)
    for size, named in components:
        name = named or min(after, key=lambda name: (-after[name], name), default="")
        if after.get(name, -1) < size:
            return None
        after[name] -= size
    return after
