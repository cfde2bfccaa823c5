"""Flexible Cluster Minimization (sonmez-2010 IV-B): as few clusters as possible for a flexible request."""

from koalapy.model.cluster import GridView
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import FlexibleRequest, Request, RequestType
from koalapy.placement.filling import Filled
from koalapy.placement.flexible import explain_split, place_in_order, taken_in_turn
from koalapy.placement.policy import does_not_serve
from koalapy.placement.split_options import explain_options, place_options


class ClusterMinimization:
    """Clusters by decreasing idle nodes, filled in turn: as few clusters as possible."""

    name = "cluster-minimization"
    serves: frozenset[RequestType] = frozenset({"flexible"})

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        if not isinstance(request, FlexibleRequest):
            raise does_not_serve(self, request)
        if request.split_options:
            return place_options(request, grid)
        return place_in_order(request, grid, grid.by_idle, _why)

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        if not isinstance(request, FlexibleRequest):
            raise does_not_serve(self, request)
        return explain_options(request, grid) if request.split_options else explain_split(request, grid)


def _why(filled: Filled) -> str:
    return taken_in_turn(filled, "the most idle nodes")
