"""Splitting of a flexible request over clusters, within its bounds or by its split options (semantics 2 and 3)."""

from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import islice

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal, RefusalKind
from koalapy.model.request import FlexibleRequest
from koalapy.model.wording import format_list
from koalapy.policies.reasons import idle_nodes, nothing_usable, reason_for
from koalapy.policies.worst_fit import Unplaced, fit_in_turn, idle_wanted, summary_of

Filled = list[tuple[ClusterView, int]]


def fill_in_turn(request: FlexibleRequest, order: Iterable[ClusterView]) -> Filled | None:
    """Fill usable clusters in turn, the last one partly; return None only if no split over them keeps the bounds.

    Skip clusters with fewer idle nodes than ``min_component_size``, and clusters after which the remaining nodes would
    not fit on the number of clusters still allowed. If the last component would be smaller than the minimum, move nodes
    to it from the earlier ones, the latest first, none of which falls below the minimum. This always succeeds, since
    there are no more clusters than components of the minimum size that make up the whole.

    With clusters by decreasing idle nodes, none is skipped for the sake of later ones, and the fewest clusters are
    used.
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
    """Return the maximum number of components."""
    most = request.total_size // request.min_component_size
    return most if request.max_components is None else min(most, request.max_components)


def suffice(clusters: Sequence[ClusterView], most: int, wanted: int) -> bool:
    """Return whether at most ``most`` clusters have ``wanted`` idle nodes in all; check the first ones first."""
    if most < 1:
        return False
    left = wanted
    for cluster in islice(clusters, most):
        left -= cluster.idle
        if left <= 0:
            return True
    return most < len(clusters) and sum(nlargest(most, (cluster.idle for cluster in clusters))) >= wanted


def _raise_last(filled: Filled, least: int) -> Filled:
    """Return the split with the last component raised to ``least`` nodes, taken from the components before it."""
    sizes = [size for _, size in filled]
    lacking = least - sizes[-1]
    for index in reversed(range(len(sizes) - 1)):
        given = min(lacking, sizes[index] - least)
        sizes[index] -= given
        sizes[-1] += given
        lacking -= given
    return [(cluster, size) for (cluster, _), size in zip(filled, sizes, strict=True)]


# Split options: each is tried in turn as a non-fixed request


def place_options(request: FlexibleRequest, grid: GridView) -> Placement | Refusal:
    """Return the placement of the first split option that worst-fit can place, or a refusal."""
    if not grid.by_idle:
        return Refusal(nothing_usable(grid), RefusalKind.CLUSTERS)
    refused = []
    for sizes in request.split_options:
        fit = fit_in_turn(sizes, grid.by_idle)
        if not isinstance(fit, Unplaced):
            placed = tuple(PlacedComponent(size, site) for size, (site, _) in zip(sizes, fit, strict=True))
            index = request.split_options.index(sizes)
            which = "the first split option" if index == 0 else f"split_options[{index}], the first that fits"
            return Placement(placed, f"{_option_name(sizes)} is {which}")
        refused.append(f"{_option_name(sizes)}: {summary_of(sizes, fit)}")
    return Refusal(f"no split option fits: {format_list(refused, separator='; ')} ({idle_nodes(grid)})")


def explain_options(request: FlexibleRequest, grid: GridView) -> tuple[ClusterReason, ...]:
    """Return each cluster's reason why no split option fits; missing nodes are for the option nearest to fitting."""
    if isinstance(place_options(request, grid), Placement):
        return ()
    smallest = min(max(sizes) for sizes in request.split_options)
    reasons = []
    for cluster in sorted(grid, key=lambda c: c.name):
        each = (idle_wanted(sizes, grid, cluster) for sizes in request.split_options)
        wanted = min((count for count in each if count is not None), default=None)
        needs = f"each split option needs {smallest} or more for its largest component"
        reasons.append(reason_for(cluster, needs, wanted))
    return tuple(reasons)


def _option_name(sizes: Sequence[int]) -> str:
    return "+".join(map(str, sizes)) if len(sizes) <= 8 else f"{len(sizes)} components"
