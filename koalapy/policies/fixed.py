"""Fixed requests: the user has chosen the clusters, there is only the moment to find."""

from collections import Counter

from koalapy.model.cluster import ClusterState, GridView
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.request import ClusterName, FixedRequest, Request, RequestType
from koalapy.model.wording import format_idle, format_list, format_nodes
from koalapy.policies.policy import does_not_serve
from koalapy.policies.reasons import not_usable, reason_for


class Fixed:
    """Every component on the cluster the user chose, once all of them fit."""

    name = "fixed"
    serves: frozenset[RequestType] = frozenset({"fixed"})

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        if not isinstance(request, FixedRequest):
            raise does_not_serve(self, request)
        wanted = _wanted(request)
        short = _short(wanted, grid)
        if short:
            return Refusal(format_list([_problem(name, wanted[name], grid) for name in short], separator="; "))
        placed = tuple(PlacedComponent(c.size, c.cluster or "", i) for i, c in enumerate(request.components))
        where = format_list([f"{name} ({size})" for name, size in wanted.items()])
        return Placement(placed, f"the request names its clusters: {where}")

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        """Only of the clusters that are short: the others are not the request's business."""
        if not isinstance(request, FixedRequest):
            raise does_not_serve(self, request)
        wanted = _wanted(request)
        short = _short(wanted, grid)
        reasons = []
        for name in short:
            cluster = grid.get(name)
            if cluster is None:
                reasons.append(ClusterReason(name, "there is no such cluster"))
            else:
                enough = wanted[name] if len(short) == 1 else None
                reasons.append(reason_for(cluster, f"the request needs {wanted[name]} here", enough))
        return tuple(reasons)


def _wanted(request: FixedRequest) -> Counter[ClusterName]:
    """Nodes wanted of each cluster, over all components that go there."""
    wanted: Counter[ClusterName] = Counter()
    for component in request.components:
        wanted[component.cluster or ""] += component.size
    return wanted


def _short(wanted: Counter[ClusterName], grid: GridView) -> list[ClusterName]:
    """The clusters that cannot give what is wanted of them, in order of name."""
    idle = {cluster.name: cluster.idle for cluster in grid.by_idle}
    return sorted(name for name, size in wanted.items() if idle.get(name, -1) < size)


def _problem(name: ClusterName, size: int, grid: GridView) -> str:
    cluster = grid.get(name)
    if cluster is None:
        return f"there is no cluster {name}"
    if cluster.state is not ClusterState.USABLE:
        return f"needs {format_nodes(size)} on {name}, which is {not_usable(cluster)}"
    return f"needs {format_nodes(size)} on {name}; {format_idle(cluster.idle)}"
