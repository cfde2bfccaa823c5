"""Whether components fit together: the arithmetic of worst fit, needed to check requests and to explain refusals."""

from collections.abc import Iterable
from heapq import heapify, heapreplace


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
