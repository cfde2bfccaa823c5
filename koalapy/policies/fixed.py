"""Fixed requests: the user chose the clusters, so the policy only decides when all components fit."""

from collections import Counter

from koalapy.model.cluster import ClusterState, GridView
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.request import ClusterName, FixedRequest, Request, RequestType
from koalapy.model.wording import format_idle, format_list, format_nodes
from koalapy.policies.policy import does_not_serve, not_usable, reason_for


class Fixed:
    """Every component on the cluster the user chose, once all of them fit."""

    name = "fixed"
    serves: frozenset[RequestType] = frozenset({"fixed"})

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        if not isinstance(request, FixedRequest):
            raise does_not_serve(self, request)
        required = _required_nodes(request)
        lacking = _lacking_clusters(required, grid)
        if lacking:
            return Refusal(
                format_list([_describe_problem(name, required[name], grid) for name in lacking], separator="; ")
            )
        placed = tuple(PlacedComponent(c.size, c.cluster or "", i) for i, c in enumerate(request.components))
        clusters = format_list([f"{name} ({size})" for name, size in required.items()])
        return Placement(placed, f"the request names its clusters: {clusters}")

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        """Return reasons only for the clusters of the request that have too few nodes."""
        if not isinstance(request, FixedRequest):
            raise does_not_serve(self, request)
        required = _required_nodes(request)
        lacking = _lacking_clusters(required, grid)
        reasons = []
        for name in lacking:
            cluster = grid.get(name)
            if cluster is None:
                reasons.append(ClusterReason(name, "there is no such cluster"))
            else:
                enough = required[name] if len(lacking) == 1 else None
                reasons.append(reason_for(cluster, f"the request needs {required[name]} here", enough))
        return tuple(reasons)


def _required_nodes(request: FixedRequest) -> Counter[ClusterName]:
    """Return the nodes that the request needs on each cluster, summed over its components."""
    required: Counter[ClusterName] = Counter()
    for component in request.components:
        required[component.cluster or ""] += component.size
    return required


def _lacking_clusters(required: Counter[ClusterName], grid: GridView) -> list[ClusterName]:
    """Return the clusters with fewer idle nodes than the request needs there, by name."""
    idle = {cluster.name: cluster.idle for cluster in grid.by_idle}
    return sorted(name for name, size in required.items() if idle.get(name, -1) < size)


def _describe_problem(name: ClusterName, size: int, grid: GridView) -> str:
    """Return why a cluster cannot serve its components: it is unknown, unusable, or has too few idle nodes."""
    cluster = grid.get(name)
    if cluster is None:
        return f"there is no cluster {name}"
    if cluster.state is not ClusterState.USABLE:
        return f"needs {format_nodes(size)} on {name}, which is {not_usable(cluster)}"
    return f"needs {format_nodes(size)} on {name}; {format_idle(cluster.idle)}"
