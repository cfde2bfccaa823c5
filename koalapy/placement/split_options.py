"""Flexible requests that say how they may be split: each way in turn as a non-fixed request (semantics 2)."""

from collections.abc import Sequence

from koalapy.model.cluster import GridView
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.request import FlexibleRequest
from koalapy.model.wording import listed
from koalapy.placement.reasons import idle_nodes, nothing_usable, reason_for
from koalapy.placement.worst_fit import Stuck, fit_in_turn, idle_wanted, summary_of


def place_options(request: FlexibleRequest, grid: GridView) -> Placement | Refusal:
    """The first option that worst fit can place."""
    if not grid.by_idle:
        return Refusal(nothing_usable(grid))
    refused = []
    for sizes in request.split_options:
        fit = fit_in_turn(sizes, grid.by_idle)
        if not isinstance(fit, Stuck):
            placed = tuple(PlacedComponent(size, site) for size, (site, _) in zip(sizes, fit, strict=True))
            return Placement(placed, _why(request, sizes))
        refused.append(f"{_name(sizes)}: {summary_of(sizes, fit)}")
    return Refusal(f"no split option fits: {listed(refused, separator='; ')} ({idle_nodes(grid)})")


def explain_options(request: FlexibleRequest, grid: GridView) -> tuple[ClusterReason, ...]:
    """Cluster by cluster why no option fits; what is missing is for the option that is nearest to fitting."""
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


def _why(request: FlexibleRequest, sizes: Sequence[int]) -> str:
    index = request.split_options.index(tuple(sizes))
    which = "the first split option" if index == 0 else f"split_options[{index}], the first that fits"
    return f"{_name(sizes)} is {which}"


def _name(sizes: Sequence[int]) -> str:
    return "+".join(map(str, sizes)) if len(sizes) <= 8 else f"{len(sizes)} components"
