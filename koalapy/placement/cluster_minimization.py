"""Flexible Cluster Minimization (sonmez-2010 IV-B): as few clusters as possible for a flexible request."""

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.request import FlexibleRequest, Request, RequestType
from koalapy.model.wording import SHOWN, are_idle, listed, nodes
from koalapy.placement.filling import Filled, fill_in_turn
from koalapy.placement.policy import does_not_serve
from koalapy.placement.reasons import idle_nodes, nothing_usable, reason_for
from koalapy.placement.split_options import explain_options, place_options


class ClusterMinimization:
    """Clusters by decreasing idle nodes, filled in turn: as few clusters as possible."""

    name = "cluster-minimization"
    serves: frozenset[RequestType] = frozenset({"flexible"})

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        if not isinstance(request, FlexibleRequest):
            raise does_not_serve(self, request)
        if request.split_options:
            return place_options(request, grid)
        enough = request.total_size <= grid.usable_idle
        filled = fill_in_turn(request, grid.by_idle) if enough else None
        if filled is None:
            return Refusal(_summary(request, grid))
        return Placement(tuple(PlacedComponent(size, cluster.name) for cluster, size in filled), _why(filled))

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        if not isinstance(request, FlexibleRequest):
            raise does_not_serve(self, request)
        if request.split_options:
            return explain_options(request, grid)
        if fill_in_turn(request, grid.by_idle) is not None:
            return ()
        return tuple(_reason(request, cluster, grid) for cluster in sorted(grid, key=lambda c: c.name))


def _why(filled: Filled) -> str:
    first, *rest = [f"{size} of {cluster.idle}" for cluster, size in filled[:SHOWN]]
    taken = [f"{filled[0][0].name} had the most idle nodes ({first})"]
    taken += [f"then {cluster.name} ({share})" for (cluster, _), share in zip(filled[1:], rest, strict=False)]
    return listed(taken, len(filled))


def _summary(request: FlexibleRequest, grid: GridView) -> str:
    """The first bound that cannot be met: all idle nodes, those on clusters large enough, those on few enough."""
    total, least, most = request.total_size, request.min_component_size, request.max_components
    if not grid.by_idle:
        return nothing_usable(grid)
    if grid.usable_idle < total:
        return f"needs {nodes(total)}; {are_idle(grid.usable_idle)} ({idle_nodes(grid)})"
    roomy = [cluster.idle for cluster in grid.by_idle if cluster.idle >= least]
    if sum(roomy) < total:
        problem = f"needs {nodes(total)}; {are_idle(sum(roomy))} on clusters with at least {least}"
    elif sum(roomy[:most]) < total:
        problem = f"needs {nodes(total)} on at most {most} clusters; {are_idle(sum(roomy[:most]))} on the largest"
    else:
        problem = f"{nodes(total)} cannot be split into components of at least {least}"
    return f"{problem} ({idle_nodes(grid)})"


def _reason(request: FlexibleRequest, cluster: ClusterView, grid: GridView) -> ClusterReason:
    needs = f"the request needs {request.total_size} in all"
    if cluster.idle < request.min_component_size:
        needs = f"a component needs at least {request.min_component_size}"
    return reason_for(cluster, needs, _idle_wanted(request, cluster, grid))


def _idle_wanted(request: FlexibleRequest, cluster: ClusterView, grid: GridView) -> int | None:
    """The fewest idle nodes of ``cluster`` with which the request could be placed beside what the others have."""
    least = request.min_component_size
    most = request.total_size // least if request.max_components is None else request.max_components
    beside = min(most, request.total_size // least) - 1
    if beside < 0:
        return None
    others = [c.idle for c in grid.by_idle if c.name != cluster.name and c.idle >= least]
    return max(least, request.total_size - sum(others[:beside]))
