"""Faster-first (huang-2007 6): the fastest clusters for a flexible request."""

from collections.abc import Sequence

from koalapy.model.cluster import ClusterView, GridView
from koalapy.placement.filling import Filled
from koalapy.placement.flexible import FilledInTurn, taken_in_turn


class FasterFirst(FilledInTurn):
    """Clusters by decreasing speed, filled in turn; one alone where it suffices."""

    name = "faster-first"

    def order(self, grid: GridView) -> Sequence[ClusterView]:
        return by_speed(grid)

    def why(self, filled: Filled) -> str:
        return taken_in_turn(filled, f"the highest speed that serves, {filled[0][0].speed:g}")


def by_speed(grid: GridView) -> Sequence[ClusterView]:
    """The usable clusters by decreasing speed, ties by name."""
    return grid.once("by speed", lambda grid: sorted(grid.by_idle, key=lambda c: (-c.speed, c.name)))
