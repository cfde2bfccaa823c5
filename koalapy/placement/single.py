"""What the policies that place a job as a whole on one cluster have in common (huang-2007 4)."""

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.errors import UsageError
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.request import FixedRequest, FlexibleRequest, Request, RequestType
from koalapy.model.wording import nodes
from koalapy.placement.policy import Policy, does_not_serve
from koalapy.placement.reasons import idle_nodes, nothing_usable, reason_for

SERVES: frozenset[RequestType] = frozenset({"nonfixed", "flexible"})


def check_single(policy: str, request: Request) -> None:
    """``UsageError`` for a request that says itself that it is of several components."""
    if isinstance(request, FlexibleRequest):
        if request.split_options:
            hint = "leave them out, or use cluster-minimization"
            problem = f"policy {policy} takes one cluster for the whole job, and cannot follow split_options"
            raise UsageError(problem, field="request.split_options", value=_options(request), hint=hint)
    elif len(request.components) != 1:
        count = len(request.components)
        hint = "use worst-fit or close-to-files, or make the request flexible"
        problem = f"policy {policy} takes one cluster for one component, and the request has {count}"
        raise UsageError(problem, field="request.components", value=count, hint=hint)


def _options(request: FlexibleRequest) -> list[list[int]]:
    return [list(option) for option in request.split_options]


def size_of(policy: Policy, request: Request) -> int:
    """The nodes that one cluster must have."""
    if isinstance(request, FixedRequest):
        raise does_not_serve(policy, request)
    return request.total_size


def on_one(request: Request, cluster: ClusterView, reason: str) -> Placement:
    index = None if isinstance(request, FlexibleRequest) else 0
    return Placement((PlacedComponent(request.total_size, cluster.name, index),), reason)


def refuse(size: int, grid: GridView) -> Refusal:
    if not grid.by_idle:
        return Refusal(nothing_usable(grid))
    return Refusal(f"no cluster has {nodes(size, 'idle')} ({idle_nodes(grid)})")


def explain_single(size: int, grid: GridView) -> tuple[ClusterReason, ...]:
    if grid.by_idle and grid.by_idle[0].idle >= size:
        return ()
    return tuple(reason_for(c, f"the request needs {size} here", size) for c in sorted(grid, key=lambda c: c.name))
