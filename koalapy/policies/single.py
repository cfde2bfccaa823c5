"""Policies that place a whole job on one cluster (huang-2007 4)."""

from abc import ABC, abstractmethod
from bisect import bisect_right

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.errors import UsageError
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal, RefusalKind
from koalapy.model.request import FixedRequest, FlexibleRequest, Request, RequestType
from koalapy.model.wording import format_nodes
from koalapy.policies.policy import does_not_serve, idle_nodes, nothing_usable, reason_for

SERVES: frozenset[RequestType] = frozenset({"nonfixed", "flexible"})


class OnOneCluster(ABC):
    """A policy that chooses one of the clusters that have enough idle nodes for the whole job."""

    serves = SERVES
    combines_clusters = False

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def choose_cluster(self, size: int, grid: GridView) -> tuple[ClusterView, str]:
        """Return a usable cluster with enough idle nodes, and the reason for users. The caller ensures there is one."""

    def check(self, request: Request) -> None:
        check_single(self.name, request)

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        size = self._job_size(request)
        if not grid.by_idle:
            return Refusal(nothing_usable(grid), RefusalKind.CLUSTERS)
        if grid.by_idle[0].idle < size:
            return Refusal(f"no cluster has {format_nodes(size, 'idle')} ({idle_nodes(grid)})")
        cluster, reason = self.choose_cluster(size, grid)
        index = None if isinstance(request, FlexibleRequest) else 0
        return Placement((PlacedComponent(size, cluster.name, index),), reason)

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        size = self._job_size(request)
        if grid.by_idle and grid.by_idle[0].idle >= size:
            return ()
        return tuple(reason_for(c, f"the request needs {size} here", size) for c in sorted(grid, key=lambda c: c.name))

    def _job_size(self, request: Request) -> int:
        if isinstance(request, FixedRequest):
            raise does_not_serve(self, request)
        return request.total_size


class BestFit(OnOneCluster):
    """The one cluster that is left with the fewest idle nodes."""

    name = "best-fit"

    def choose_cluster(self, size: int, grid: GridView) -> tuple[ClusterView, str]:
        order = grid.by_idle
        enough = bisect_right(order, -size, key=lambda cluster: -cluster.idle)
        fewest = order[enough - 1].idle
        cluster = order[bisect_right(order, -fewest - 1, key=lambda cluster: -cluster.idle)]
        remaining = f"({cluster.idle - size} of {cluster.idle})"
        return cluster, f"{cluster.name} is left with the fewest idle nodes {remaining}"


class FastestOne(OnOneCluster):
    """The fastest of the clusters that have room for the whole job."""

    name = "fastest-one"

    def choose_cluster(self, size: int, grid: GridView) -> tuple[ClusterView, str]:
        cluster = next(cluster for cluster in grid.by_speed if cluster.idle >= size)
        return cluster, f"{cluster.name} is the fastest with room (speed {cluster.speed:g}, {cluster.idle} idle)"


def check_single(policy: str, request: Request) -> None:
    """Raise ``UsageError`` for a request with several components or split options."""
    if isinstance(request, FlexibleRequest):
        if request.split_options:
            hint = "leave them out, or use cluster-minimization"
            problem = f"policy {policy} takes one cluster for the whole job, and cannot follow split_options"
            options = [list(option) for option in request.split_options]
            raise UsageError(problem, field="request.split_options", value=options, hint=hint)
    elif len(request.components) != 1:
        count = len(request.components)
        hint = "use worst-fit or close-to-files, or make the request flexible"
        problem = f"policy {policy} takes one cluster for one component, and the request has {count}"
        raise UsageError(problem, field="request.components", value=count, hint=hint)
