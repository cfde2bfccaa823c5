"""Worst-Fit (sonmez-2010 IV-A): balance the load of the clusters."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from koalapy.model.cluster import ClusterState, ClusterView, GridView
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal, RefusalKind
from koalapy.model.request import ClusterName, NonFixedRequest, Request, RequestType
from koalapy.model.wording import format_list, format_nodes
from koalapy.policies.policy import does_not_serve, nothing_usable, reason_for, unusable_clusters

Heap = list[tuple[int, ClusterName]]
"""Heap of (negative number of idle nodes left, cluster), so that the first entry has the most idle nodes."""


def fits_by_worst_fit(sizes: Iterable[int], idle: Iterable[int]) -> bool:
    """Return whether all sizes fit when the largest go first, each to the cluster with the most nodes left.

    More idle nodes on any cluster never make it fail: if the sorted counts of one grid are no less than those of
    another, they remain so after the same size is taken from the largest of each. So sizes that do not fit on the empty
    grid never fit.
    """
    remaining = [-count for count in idle]
    heapify(remaining)
    for size in sorted(sizes, reverse=True):
        if not remaining or -remaining[0] < size:
            return False
        heapreplace(remaining, remaining[0] + size)
    return True


class WorstFit:
    """Components by decreasing size, each on the cluster with the most idle nodes left."""

    name = "worst-fit"
    serves: frozenset[RequestType] = frozenset({"nonfixed"})
    fits_empty_grid = staticmethod(fits_by_worst_fit)

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        sizes = self._component_sizes(request)
        fit = fit_in_turn(sizes, grid.by_idle)
        if isinstance(fit, Unplaced):
            if not grid.by_idle:
                return Refusal(nothing_usable(grid), RefusalKind.CLUSTERS)
            idle, name = fit.remaining[0]
            largest = "; ".join(filter(None, (f"most: {name} with {-idle}", unusable_clusters(grid))))
            return Refusal(f"{summary_of(sizes, fit)} for component {fit.index} ({largest})")
        placed = tuple(
            PlacedComponent(size, site, index) for index, (size, (site, _)) in enumerate(zip(sizes, fit, strict=True))
        )
        return Placement(placed, _explain_choice(sizes, fit))

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        sizes = self._component_sizes(request)
        fit = fit_in_turn(sizes, grid.by_idle)
        if not isinstance(fit, Unplaced):
            return ()
        remaining = {c.name: c.idle for c in grid.by_idle} | {name: -idle for idle, name in fit.remaining}
        reasons = []
        for cluster in sorted(grid, key=lambda c: c.name):
            used = cluster.usable_idle - remaining.get(cluster.name, 0)
            beside = f"{used} of them for larger components, " if used else ""
            needs = f"{beside}component {fit.index} needs {sizes[fit.index]}"
            reasons.append(reason_for(cluster, needs, sufficient_idle(sizes, grid, cluster)))
        return tuple(reasons)

    def _component_sizes(self, request: Request) -> list[int]:
        if not isinstance(request, NonFixedRequest):
            raise does_not_serve(self, request)
        return [component.size for component in request.components]


@dataclass(frozen=True, slots=True)
class Unplaced:
    """The first component that fits on no cluster, and the nodes left by the components placed before it."""

    index: int
    placed: int
    remaining: Heap
    """Nodes left on the considered clusters: as many clusters as there are sizes, those with the most idle nodes."""


def fit_in_turn(sizes: Sequence[int], by_idle: Sequence[ClusterView]) -> list[tuple[ClusterName, int]] | Unplaced:
    """Return each size's cluster and the idle nodes left there before it, or ``Unplaced``; larger sizes go first."""
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    # Until all sizes are placed, one of these clusters is untouched. Clusters after it have no more idle nodes.
    heap = [(-cluster.idle, cluster.name) for cluster in by_idle[: len(sizes)]]
    sites: list[tuple[ClusterName, int]] = [("", 0)] * len(sizes)
    for placed, index in enumerate(order):
        if not heap or -heap[0][0] < sizes[index]:
            return Unplaced(index, placed, heap)
        idle, name = heap[0]
        heapreplace(heap, (idle + sizes[index], name))
        sites[index] = (name, -idle)
    return sites


def sufficient_idle(sizes: Sequence[int], grid: GridView, cluster: ClusterView) -> int | None:
    """Return the minimum idle nodes of ``cluster``, more than it has, with which worst-fit would place the sizes.

    Return None if the cluster is too small or not usable.
    """
    if cluster.state is not ClusterState.USABLE:
        return None
    idle_elsewhere = [c.idle for c in grid.by_idle if c.name != cluster.name]
    candidates = range(max(cluster.idle + 1, sum(sizes) - sum(idle_elsewhere)), cluster.total + 1)
    place = bisect_left(candidates, True, key=lambda idle: fits_by_worst_fit(sizes, [*idle_elsewhere, idle]))
    return candidates[place] if place < len(candidates) else None


def summary_of(sizes: Sequence[int], unplaced: Unplaced) -> str:
    """Return a text that says how many idle nodes the unplaced component needs."""
    suffix = " left" if unplaced.placed else ""
    return f"no cluster has {format_nodes(sizes[unplaced.index], 'idle')}{suffix}"


def _explain_choice(sizes: Sequence[int], sites: Sequence[tuple[ClusterName, int]]) -> str:
    """Return the reason for users: which clusters had the most idle nodes when a component was placed."""
    if len(sites) == 1:
        return f"{sites[0][0]} had the most idle nodes ({sites[0][1]})"
    choices = [f"{name} ({size} of {idle} taken)" for size, (name, idle) in zip(sizes, sites, strict=True)]
    return f"the largest first, each where most nodes were idle: {format_list(choices)}"
