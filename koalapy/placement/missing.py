"""How many more idle nodes a cluster would need, for policies of which that is known only by trying."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from koalapy.model.cluster import ClusterState, ClusterView, GridView

TRIED_IN_TURN = 8
"""So many counts are tried one by one; the rest by halving, which finds one that suffices, if not always the least."""


def idle_that_suffices(cluster: ClusterView, fits: Callable[[int], bool], least: int = 0) -> int | None:
    """The idle nodes of ``cluster``, above those it has and at least ``least``, with which the request ``fits``.

    None when the cluster is not usable or has not that many nodes.
    """
    if cluster.state is not ClusterState.USABLE:
        return None
    candidates = range(max(cluster.idle + 1, least), cluster.total + 1)
    for idle in candidates[:TRIED_IN_TURN]:
        if fits(idle):
            return idle
    rest = candidates[TRIED_IN_TURN:]
    if not rest or not fits(rest[-1]):
        return None
    return rest[bisect_left(rest, True, hi=len(rest) - 1, key=fits)]


def with_idle(grid: GridView, cluster: ClusterView, idle: int) -> GridView:
    """The grid as it would be if a cluster had so many idle nodes."""
    clusters = tuple(replace(c, idle=idle) if c.name == cluster.name else c for c in grid)
    return replace(grid, clusters=clusters)
