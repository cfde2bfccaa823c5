"""Faster-first (huang-2007 6): the fastest clusters for a flexible request."""

from collections.abc import Sequence

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import FlexibleRequest, Request, RequestType
from koalapy.placement.filling import Filled
from koalapy.placement.flexible import explain_split, place_in_order, taken_in_turn
from koalapy.placement.policy import does_not_serve
from koalapy.placement.split_options import explain_options, place_options


class FasterFirst:
    """Clusters by decreasing speed, filled in turn; one alone where it suffices."""

    name = "faster-first"
    serves: frozenset[RequestType] = frozenset({"flexible"})

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        if not isinstance(request, FlexibleRequest):
            raise does_not_serve(self, request)
        if request.split_options:
            return place_options(request, grid)
        return place_in_order(request, grid, by_speed(grid), _why)

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        if not isinstance(request, FlexibleRequest):
            raise does_not_serve(self, request)
        return explain_options(request, grid) if request.split_options else explain_split(request, grid)


def by_speed(grid: GridView) -> Sequence[ClusterView]:
    """The usable clusters by decreasing speed, ties by name."""
    return grid.once("by speed", lambda grid: sorted(grid.by_idle, key=lambda c: (-c.speed, c.name)))


def _why(filled: Filled) -> str:
    first = f"the highest speed that serves, {filled[0][0].speed:g}"
    return taken_in_turn(filled, first)
