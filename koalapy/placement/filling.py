"""Splitting a flexible request over clusters in a given order, within its bounds (semantics 3)."""

from collections.abc import Iterable

from koalapy.model.cluster import ClusterView
from koalapy.model.request import FlexibleRequest

Filled = list[tuple[ClusterView, int]]


def fill_in_turn(request: FlexibleRequest, order: Iterable[ClusterView]) -> Filled | None:
    """Fill usable clusters in turn, the last one partly; None when they run out or the split breaks a bound.

    Clusters with fewer idle nodes than ``min_component_size`` are left out. When the last component would be smaller
    than that, the earlier ones give up nodes, beginning with the one filled last, none going below it itself.

    With clusters by decreasing idle nodes this finds a split whenever one exists, and with the fewest clusters: no k
    clusters hold more than the first k, and the giving up succeeds when k components of the least size are not too
    many, which no split over more clusters could mend.
    """
    least, left = request.min_component_size, request.total_size
    most = request.max_components
    filled: Filled = []
    for cluster in order:
        if left == 0 or len(filled) == most:
            break
        idle = cluster.idle
        if idle >= least:
            size = min(left, idle)
            filled.append((cluster, size))
            left -= size
    if left or not filled:
        return None
    return filled if filled[-1][1] >= least else _raise_last(filled, least)


def _raise_last(filled: Filled, least: int) -> Filled | None:
    """The last component raised to ``least`` at the cost of those before it; None when that is too much for them."""
    sizes = [size for _, size in filled]
    lacking = least - sizes[-1]
    for index in reversed(range(len(sizes) - 1)):
        given = min(lacking, sizes[index] - least)
        sizes[index] -= given
        sizes[-1] += given
        lacking -= given
    if lacking:
        return None
    return [(cluster, size) for (cluster, _), size in zip(filled, sizes, strict=True)]
