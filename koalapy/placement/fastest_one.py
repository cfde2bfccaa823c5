"""Fastest-one (huang-2007 4): the fastest cluster that has room for the whole job."""

from koalapy.model.cluster import GridView
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import Request
from koalapy.placement.faster_first import by_speed
from koalapy.placement.single import SERVES, check_single, explain_single, on_one, refuse, size_of


class FastestOne:
    """The fastest of the clusters that have room for the whole job."""

    name = "fastest-one"
    serves = SERVES
    combines_clusters = False

    def check(self, request: Request) -> None:
        check_single(self.name, request)

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        size = size_of(self, request)
        if not grid.by_idle or grid.by_idle[0].idle < size:
            return refuse(size, grid)
        cluster = next(cluster for cluster in by_speed(grid) if cluster.idle >= size)
        why = f"{cluster.name} is the fastest with room (speed {cluster.speed:g}, {cluster.idle} idle)"
        return on_one(request, cluster, why)

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        return explain_single(size_of(self, request), grid)
