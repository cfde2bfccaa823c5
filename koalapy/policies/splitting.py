"""Splitting of a flexible request over clusters, within its bounds or by its split options (semantics 2 and 3)."""

from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import islice

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.job_sizes import JobSizes, SizeRanges, limit_sizes
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal, RefusalKind
from koalapy.model.request import ClusterName, FlexibleRequest
from koalapy.model.wording import format_list
from koalapy.policies.policy import idle_nodes, nothing_usable, reason_for
from koalapy.policies.worst_fit import Unplaced, fit_in_turn, sufficient_idle, summary_of

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
    min_size, remaining = request.min_component_size, request.total_size
    max_count = most_components(request)
    roomy = [cluster for cluster in order if cluster.idle >= min_size]
    if any(cluster.job_sizes for cluster in roomy):
        return _fill_within_sizes(request, roomy, max_count)
    if not can_hold(roomy, max_count, remaining):
        return None
    filled: Filled = []
    scarce = max_count < len(roomy)
    for place, cluster in enumerate(roomy, start=1):
        excess = remaining - cluster.idle
        if excess <= 0:
            filled.append((cluster, remaining))
            break
        if not scarce or can_hold(roomy[place:], max_count - len(filled) - 1, excess):
            filled.append((cluster, cluster.idle))
            remaining = excess
    return filled if filled[-1][1] >= min_size else _raise_last(filled, min_size)


def most_components(request: FlexibleRequest) -> int:
    """Return the maximum number of components."""
    maximum = request.total_size // request.min_component_size
    return maximum if request.max_components is None else min(maximum, request.max_components)


def can_hold(clusters: Sequence[ClusterView], max_count: int, required: int) -> bool:
    """Return whether at most ``max_count`` clusters have ``required`` idle nodes in all; check the first ones first."""
    if max_count < 1:
        return False
    missing = required
    for cluster in islice(clusters, max_count):
        missing -= cluster.idle
        if missing <= 0:
            return True
    return max_count < len(clusters) and sum(nlargest(max_count, (cluster.idle for cluster in clusters))) >= required


def _raise_last(filled: Filled, min_size: int) -> Filled:
    """Return the split with the last component raised to ``min_size`` nodes, taken from the components before it."""
    sizes = [size for _, size in filled]
    lacking = min_size - sizes[-1]
    for index in reversed(range(len(sizes) - 1)):
        moved = min(lacking, sizes[index] - min_size)
        sizes[index] -= moved
        sizes[-1] += moved
        lacking -= moved
    return [(cluster, size) for (cluster, _), size in zip(filled, sizes, strict=True)]


# Clusters that do not accept each size

MAX_STATES = 2000
"""Combinations of clusters that are kept in one search."""
Combination = tuple[tuple[int, JobSizes], ...]
"""The positions of clusters, each with the range of its size."""


def _fill_within_sizes(request: FlexibleRequest, clusters: Sequence[ClusterView], max_count: int) -> Filled | None:
    """Fill clusters in turn, each within a range of sizes that it accepts; return None if no split does."""
    total, min_size = request.total_size, request.min_component_size
    ranges = [limit_sizes(cluster.job_sizes, min_size, cluster.idle) for cluster in clusters]
    if sum(nlargest(max_count, (max((r.most for r in parts), default=0) for parts in ranges))) < total:
        return None
    combination = _combine_in_turn(ranges, max_count, total) or _find_combination(ranges, max_count, total)
    if combination is None:
        return None
    filled, remaining, reserved = Filled(), total, sum(part.least for _, part in combination)
    for position, part in combination:
        reserved -= part.least
        size = min(part.most, remaining - reserved)
        remaining -= size
        filled.append((clusters[position], size))
    return filled


def _combine_in_turn(ranges: Sequence[SizeRanges], max_count: int, total: int) -> Combination | None:
    """Return the first clusters that hold the whole together, each with its largest sizes; None if they do not."""
    chosen: Combination = ()
    low = high = 0
    for position, parts in enumerate(ranges):
        part = max(parts, key=lambda part: part.most, default=None)
        if part is not None and low + part.least <= total and len(chosen) < max_count:
            chosen = (*chosen, (position, part))
            low, high = low + part.least, high + part.most
            if high >= total:
                return chosen
    return None


def _find_combination(ranges: Sequence[SizeRanges], max_count: int, total: int) -> Combination | None:
    """Return some clusters that hold the whole together; None if no clusters do, or after ``MAX_STATES``."""
    states: dict[tuple[int, int], tuple[int, Combination]] = {(0, 0): (0, ())}
    for position, parts in enumerate(ranges):
        for (count, low), (high, chosen) in list(states.items()) if parts else ():
            for part in parts:
                key, reached = (count + 1, low + part.least), high + part.most
                if count >= max_count or key[1] > total:
                    continue
                if reached >= total:
                    return (*chosen, (position, part))
                if reached > states.get(key, (0, ()))[0] and (key in states or len(states) < MAX_STATES):
                    states[key] = reached, (*chosen, (position, part))
    return None


def _fit_within_sizes(
    sizes: Sequence[int], clusters: Sequence[ClusterView]
) -> list[tuple[ClusterName, int]] | Unplaced:
    """Return each size's cluster as ``fit_in_turn`` does, on clusters that do not accept each size."""
    remaining = {cluster.name: cluster.idle for cluster in clusters}
    sites: list[tuple[ClusterName, int]] = [("", 0)] * len(sizes)
    for placed, index in enumerate(sorted(range(len(sizes)), key=lambda index: -sizes[index])):
        able = [c.name for c in clusters if remaining[c.name] >= sizes[index] and c.accepts(sizes[index])]
        if not able:
            return Unplaced(index, placed, [(-idle, name) for name, idle in remaining.items()])
        name = min(able, key=lambda name: (-remaining[name], name))
        sites[index] = name, remaining[name]
        remaining[name] -= sizes[index]
    return sites


# Split options: each is tried in turn as a non-fixed request


def place_options(request: FlexibleRequest, grid: GridView) -> Placement | Refusal:
    """Return the placement of the first split option that worst-fit can place, or a refusal."""
    if not grid.by_idle:
        return Refusal(nothing_usable(grid), RefusalKind.CLUSTERS)
    refused = []
    for sizes in request.split_options:
        fit = _fit_within_sizes(sizes, grid.by_idle) if grid.limits_sizes else fit_in_turn(sizes, grid.by_idle)
        if not isinstance(fit, Unplaced):
            placed = tuple(PlacedComponent(size, site) for size, (site, _) in zip(sizes, fit, strict=True))
            index = request.split_options.index(sizes)
            rank = "the first split option" if index == 0 else f"split_options[{index}], the first that fits"
            return Placement(placed, f"{_option_name(sizes)} is {rank}")
        refused.append(f"{_option_name(sizes)}: {summary_of(sizes, fit)}")
    return Refusal(f"no split option fits: {format_list(refused, separator='; ')} ({idle_nodes(grid)})")


def explain_options(request: FlexibleRequest, grid: GridView) -> tuple[ClusterReason, ...]:
    """Return each cluster's reason why no split option fits; missing nodes are for the option nearest to fitting."""
    if isinstance(place_options(request, grid), Placement):
        return ()
    smallest = min(max(sizes) for sizes in request.split_options)
    reasons = []
    for cluster in sorted(grid, key=lambda c: c.name):
        counts = (sufficient_idle(sizes, grid, cluster) for sizes in request.split_options)
        sufficient = min((count for count in counts if count is not None), default=None)
        needs = f"each split option needs {smallest} or more for its largest component"
        reasons.append(reason_for(cluster, needs, sufficient))
    return tuple(reasons)


def _option_name(sizes: Sequence[int]) -> str:
    return "+".join(map(str, sizes)) if len(sizes) <= 8 else f"{len(sizes)} components"
