"""Flexible Cluster Minimization (sonmez-2010 IV-B): as few clusters as possible for a flexible request."""

from collections.abc import Sequence

from koalapy.model.cluster import ClusterView, GridView
from koalapy.placement.filling import Filled
from koalapy.placement.flexible import FilledInTurn, taken_in_turn


class ClusterMinimization(FilledInTurn):
    """Clusters by decreasing idle nodes, filled in turn: as few clusters as possible."""

    name = "cluster-minimization"

    def order(self, grid: GridView) -> Sequence[ClusterView]:
        return grid.by_idle

    def why(self, filled: Filled) -> str:
        return taken_in_turn(filled, "the most idle nodes")
