"""Policies that fill clusters in a certain order for a flexible request, and the reasons why a request does not fit.

Whether a request can be split does not depend on the order in which clusters are filled; neither do the reasons.
"""

from collections.abc import Iterable, Sequence

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.job_sizes import describe_sizes, limit_sizes
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.request import FlexibleRequest, Request, RequestType
from koalapy.model.wording import MAX_LISTED, format_idle, format_list, format_nodes
from koalapy.policies.policy import (
    does_not_serve,
    idle_nodes,
    idle_that_suffices,
    nothing_usable,
    reason_for,
    with_idle,
)
from koalapy.policies.splitting import Filled, explain_options, fill_in_turn, most_components, place_options


class ClusterMinimization:
    """Clusters by decreasing idle nodes, filled in turn: as few clusters as possible."""

    # sonmez-2010 IV-B. The first cluster that holds the whole request gets it; split options replace this rule.
    name = "cluster-minimization"
    serves: frozenset[RequestType] = frozenset({"flexible"})

    def order_clusters(self, grid: GridView) -> Sequence[ClusterView]:
        """Return the usable clusters, the best first."""
        return grid.by_idle

    def explain_choice(self, filled: Filled) -> str:
        """Return the reason for the choice of clusters, for users."""
        return describe_fill(filled, "the most idle nodes")

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        if not isinstance(request, FlexibleRequest):
            raise does_not_serve(self, request)
        if request.split_options:
            return place_options(request, grid)
        order = self.order_clusters(grid)
        enough = request.total_size <= grid.usable_idle
        filled = (whole_on_first(request, order) or fill_in_turn(request, order)) if enough else None
        if filled is None:
            return Refusal(refusal_reason(request, grid))
        return placement_of(filled, self.explain_choice(filled))

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        if not isinstance(request, FlexibleRequest):
            raise does_not_serve(self, request)
        return explain_options(request, grid) if request.split_options else explain_split(request, grid)


class LargerFirst(ClusterMinimization):
    """Clusters by decreasing idle nodes, filled in turn, one alone where it suffices: as cluster-minimization."""

    # huang-2007 6. The first cluster has the most idle nodes, so if any cluster holds the whole request, it does.
    name = "larger-first"


class FasterFirst(ClusterMinimization):
    """Clusters by decreasing speed, filled in turn; one alone where it suffices."""

    # huang-2007 6
    name = "faster-first"

    def order_clusters(self, grid: GridView) -> Sequence[ClusterView]:
        return grid.by_speed

    def explain_choice(self, filled: Filled) -> str:
        return describe_fill(filled, f"the highest speed that serves, {filled[0][0].speed:g}")


def whole_on_first(request: FlexibleRequest, order: Iterable[ClusterView]) -> Filled | None:
    """Return the whole request on the first cluster in order that has enough idle nodes; None if there is none."""
    total = request.total_size
    if total < request.min_component_size:
        return None
    return next(([(cluster, total)] for cluster in order if cluster.idle >= total and cluster.accepts(total)), None)


def placement_of(filled: Filled, reason: str) -> Placement:
    return Placement(tuple(PlacedComponent(size, cluster.name) for cluster, size in filled), reason)


def describe_fill(filled: Filled, first: str) -> str:
    """Return a text such as ``north had the most idle nodes (16 of 16 taken), then south (8 of 16 taken)``.

    ``first`` is the property for which the first cluster was chosen.
    """
    first_share, *later_shares = [f"{size} of {cluster.idle} taken" for cluster, size in filled[:MAX_LISTED]]
    parts = [f"{filled[0][0].name} had {first} ({first_share})"]
    parts += [f"then {cluster.name} ({share})" for (cluster, _), share in zip(filled[1:], later_shares, strict=False)]
    return format_list(parts, len(filled))


def refusal_reason(request: FlexibleRequest, grid: GridView) -> str:
    """Return the first bound that cannot be met: idle nodes in all, on clusters large enough, or on few enough."""
    total, min_size, max_clusters = request.total_size, request.min_component_size, request.max_components
    if not grid.by_idle:
        return nothing_usable(grid)
    if grid.usable_idle < total:
        return f"needs {format_nodes(total)}; {format_idle(grid.usable_idle)} ({idle_nodes(grid)})"
    roomy = [cluster.idle for cluster in grid.by_idle if cluster.idle >= min_size]
    if sum(roomy) < total:
        problem = f"needs {format_nodes(total)}; {format_idle(sum(roomy))} on clusters with at least {min_size}"
    elif sum(roomy[:max_clusters]) < total:
        clusters = "one cluster" if max_clusters == 1 else f"at most {max_clusters} clusters"
        largest = sum(roomy[:max_clusters])
        problem = f"needs {format_nodes(total)} on {clusters}; {format_idle(largest)} on the largest"
    else:
        problem = f"{format_nodes(total)} cannot be split into components of at least {min_size}"
    limited = [describe_sizes(c.name, c.job_sizes) for c in grid.by_idle if c.job_sizes] if grid.limits_sizes else []
    problem = "; ".join([problem, *limited])
    return f"{problem} ({idle_nodes(grid)})"


def explain_split(request: FlexibleRequest, grid: GridView) -> tuple[ClusterReason, ...]:
    """Return the reason of each cluster why the request cannot be split over the grid; empty if it can."""
    if fill_in_turn(request, grid.by_idle) is not None:
        return ()

    def sufficient_idle(cluster: ClusterView) -> int | None:
        if not grid.limits_sizes:
            return _sufficient_idle(request, cluster, grid)
        return idle_that_suffices(
            cluster, lambda idle: fill_in_turn(request, with_idle(grid, cluster, idle).by_idle) is not None
        )

    return tuple(
        reason_for(cluster, unmet_need(request, cluster), sufficient_idle(cluster))
        for cluster in sorted(grid, key=lambda c: c.name)
    )


def unmet_need(request: FlexibleRequest, cluster: ClusterView) -> str:
    """Return the requirement that the idle nodes of the cluster do not meet."""
    if cluster.idle < request.min_component_size:
        return f"a component needs at least {request.min_component_size}"
    max_size = min(cluster.idle, request.total_size)
    if cluster.job_sizes and not limit_sizes(cluster.job_sizes, request.min_component_size, max_size):
        return describe_sizes(cluster.name, cluster.job_sizes)
    return f"the request needs {request.total_size} in all"


def _sufficient_idle(request: FlexibleRequest, cluster: ClusterView, grid: GridView) -> int | None:
    """Return the minimum idle nodes of a cluster with which the request fits, given those of the other clusters.

    Return None if the request allows no component.
    """
    min_size = request.min_component_size
    beside = most_components(request) - 1
    if beside < 0:
        return None
    idle_elsewhere = [c.idle for c in grid.by_idle if c.name != cluster.name and c.idle >= min_size]
    return max(min_size, request.total_size - sum(idle_elsewhere[:beside]))
