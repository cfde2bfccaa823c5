"""Splitting a flexible request over clusters in a given order, within its bounds (semantics 3)."""

from collections.abc import Iterable, Sequence
from heapq import nlargest

from koalapy.model.cluster import ClusterView
from koalapy.model.request import FlexibleRequest

Filled = list[tuple[ClusterView, int]]


def fill_in_turn(request: FlexibleRequest, order: Iterable[ClusterView]) -> Filled | None:
    """Fill usable clusters in turn, the last one partly; None only when no split over them keeps the bounds.

    Clusters with fewer idle nodes than ``min_component_size`` are left out, and so is one with which the rest could
    not be had of as many clusters as are still allowed. When the last component would be smaller than the minimum, the
    earlier ones give up nodes, beginning with the one filled last, none going below it itself: they always can, for
    no more clusters are taken than components of the least size make up the whole.

    With clusters by decreasing idle nodes none is left out for the others' sake, and the fewest clusters are taken.
    """
    least, left = request.min_component_size, request.total_size
    most = most_components(request)
    roomy = [cluster for cluster in order if cluster.idle >= least]
    if not suffice(roomy, most, left):
        return None
    filled: Filled = []
    scarce = most < len(roomy)
    for place, cluster in enumerate(roomy, start=1):
        rest = left - cluster.idle
        if rest <= 0:
            filled.append((cluster, left))
            break
        if not scarce or suffice(roomy[place:], most - len(filled) - 1, rest):
            filled.append((cluster, cluster.idle))
            left = rest
    return filled if filled[-1][1] >= least else _raise_last(filled, least)


def most_components(request: FlexibleRequest) -> int:
    """How many components there can be at most."""
    most = request.total_size // request.min_component_size
    return most if request.max_components is None else min(most, request.max_components)


def suffice(clusters: Sequence[ClusterView], most: int, wanted: int) -> bool:
    """Whether some ``most`` of the clusters have so many idle nodes; the first ones are looked at first."""
    if most < 1:
        return False
    if sum(cluster.idle for cluster in clusters[:most]) >= wanted:
        return True
    return most < len(clusters) and sum(nlargest(most, (cluster.idle for cluster in clusters))) >= wanted


def _raise_last(filled: Filled, least: int) -> Filled:
    """The last component raised to ``least`` at the cost of those before it."""
    sizes = [size for _, size in filled]
    lacking = least - sizes[-1]
    for index in reversed(range(len(sizes) - 1)):
        given = min(lacking, sizes[index] - least)
        sizes[index] -= given
        sizes[-1] += given
        lacking -= given
    return [(cluster, size) for (cluster, _), size in zip(filled, sizes, strict=True)]
