"""Reasons why a cluster cannot serve a request, in the same wording for all policies, and the missing idle nodes."""

from bisect import bisect_left
from collections.abc import Callable

from koalapy.model.cluster import ClusterState, ClusterView, GridView
from koalapy.model.placement import ClusterReason
from koalapy.model.wording import MAX_LISTED, format_list

MAX_TRIED_IN_TURN = 8
"""Number of candidates that are tried one by one. The others are searched by bisection, which may miss the minimum."""


def not_usable(cluster: ClusterView) -> str:
    """Return the reason why no job may be placed on a cluster; empty if it is usable."""
    if cluster.state is ClusterState.USABLE:
        return ""
    if cluster.state is ClusterState.DRAINED and cluster.note:
        return f"{cluster.state} {cluster.note}"
    return f"{cluster.state}: {cluster.note}" if cluster.note else str(cluster.state)


def idle_nodes(grid: GridView) -> str:
    """Return the clusters with the most idle nodes, then the unusable ones: ``north 3, south 2; east unreachable``."""
    listed = [f"{c.name} {c.idle}" for c in grid.by_idle[:MAX_LISTED]]
    return "; ".join(filter(None, (format_list(listed, len(grid.by_idle)), unusable_clusters(grid))))


def unusable_clusters(grid: GridView) -> str:
    """Return the unusable clusters with their states: ``east unreachable, west drained``; empty if all are usable."""
    if len(grid.by_idle) == len(grid.clusters):
        return ""
    return format_list(sorted(f"{c.name} {c.state}" for c in grid.clusters if c.state is not ClusterState.USABLE))


def nothing_usable(grid: GridView) -> str:
    """Return the reason of a refusal when no cluster is usable."""
    return f"no cluster is usable ({unusable_clusters(grid)})" if grid.clusters else "there are no clusters"


def reason_for(cluster: ClusterView, needs: str, sufficient: int | None) -> ClusterReason:
    """Return the reason why a cluster cannot serve a request.

    ``sufficient``: idle nodes with which it could; None: unknown.
    """
    unusable = not_usable(cluster)
    if unusable:
        return ClusterReason(cluster.name, unusable)
    within_reach = sufficient is not None and cluster.idle < sufficient <= cluster.total
    missing = sufficient - cluster.idle if sufficient is not None and within_reach else None
    return ClusterReason(cluster.name, f"{cluster.idle} of {cluster.total} nodes idle, {needs}", missing)


def idle_that_suffices(cluster: ClusterView, fits: Callable[[int], bool], minimum: int = 0) -> int | None:
    """Return the idle nodes, more than the cluster has and at least ``minimum``, with which the request ``fits``.

    Return None if the cluster is not usable or is too small.
    """
    if cluster.state is not ClusterState.USABLE:
        return None
    candidates = range(max(cluster.idle + 1, minimum), cluster.total + 1)
    for idle in candidates[:MAX_TRIED_IN_TURN]:
        if fits(idle):
            return idle
    later_candidates = candidates[MAX_TRIED_IN_TURN:]
    if not later_candidates or not fits(later_candidates[-1]):
        return None
    return later_candidates[bisect_left(later_candidates, True, hi=len(later_candidates) - 1, key=fits)]


def with_idle(grid: GridView, cluster: ClusterView, idle: int) -> GridView:
    """Return the grid with another number of idle nodes of one cluster."""
    return grid.with_clusters([cluster.with_idle(idle)])
