"""Whether components fit together: arithmetic that is needed to check requests, to place and to explain refusals."""

from collections.abc import Iterable, Mapping
from heapq import heapify, heapreplace

from koalapy.model.request import ClusterName


def fits_by_worst_fit(sizes: Iterable[int], idle: Iterable[int]) -> bool:
    """Whether all sizes fit when the largest go first, each where most nodes are left.

    More idle nodes anywhere never make it fail: if one grid's counts are no less than another's, in order, they
    still are after taking the same size from the largest of each. So what fails on the empty grid always fails.
    """
    left = [-count for count in idle]
    heapify(left)
    for size in sorted(sizes, reverse=True):
        if not left or -left[0] < size:
            return False
        heapreplace(left, left[0] + size)
    return True


def speed_sets(speeds: Mapping[ClusterName, float], ratio: float) -> list[frozenset[ClusterName]]:
    """The largest sets in which the slowest has at least ``ratio`` of the speed of the fastest; the fastest first."""
    sets: list[frozenset[ClusterName]] = []
    for fastest in sorted(set(speeds.values()), reverse=True):
        inside = frozenset(name for name, speed in speeds.items() if fastest * ratio <= speed <= fastest)
        if not (sets and inside <= sets[-1]):
            sets.append(inside)
    return sets
