"""Best-fit (huang-2007 4): the fullest cluster that still holds the job."""

from bisect import bisect_right

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import Request
from koalapy.placement.single import SERVES, check_single, explain_single, on_one, refuse, size_of


class BestFit:
    """The one cluster that is left with the fewest idle nodes."""

    name = "best-fit"
    serves = SERVES
    combines_clusters = False

    def check(self, request: Request) -> None:
        check_single(self.name, request)

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        size = size_of(self, request)
        cluster = fullest(size, grid)
        if cluster is None:
            return refuse(size, grid)
        left = cluster.idle - size
        return on_one(request, cluster, f"{cluster.name} is left with the fewest idle nodes ({left} of {cluster.idle})")

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        return explain_single(size_of(self, request), grid)


def fullest(size: int, grid: GridView) -> ClusterView | None:
    """Of the usable clusters with enough idle nodes the one with the fewest, ties by name."""
    order = grid.by_idle
    enough = bisect_right(order, -size, key=lambda cluster: -cluster.idle)
    if not enough:
        return None
    idle = order[enough - 1].idle
    return order[bisect_right(order, -idle - 1, key=lambda cluster: -cluster.idle)]
