"""The interface of placement policies: pure functions of a request and a view of the grid (semantics 3).

All policies word the reasons why a cluster cannot serve a request in the same way.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

from koalapy.model.cluster import ClusterState, ClusterView, GridView
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import Request, RequestType
from koalapy.model.wording import MAX_LISTED, format_list


@runtime_checkable
class Policy(Protocol):
    """A placement policy, which sees the request and the idle nodes, but no clock, database or socket.

    ``place`` is called for every distinct request in every scan and must be fast. ``explain`` is called only on demand.
    Users read the first line of the class's docstring as the summary of the policy.

    A policy may declare ``Capabilities`` as class attributes, and may have these methods:

    - ``configured(options: Mapping[str, str]) -> Policy``, if users may set options for a job. It returns the policy
      with these options or raises ``UsageError`` with field ``policy_options.<name>``. It is called once for each set
      of options.
    - ``check(request: Request) -> None``, if some requests of the types it serves can never be placed. It raises
      ``UsageError`` with the field of the request. It is called before each ``place``.
    - ``informed(knowledge: Knowledge) -> Policy``, if it ``learns``. It returns the policy for one job.
      Placements by it may carry an ``Advice`` for the record.
    """

    @property
    def name(self) -> str:
        """Return the name by which users choose the policy: lower-case words joined by hyphens."""
        ...

    @property
    def serves(self) -> frozenset[RequestType]:
        """Return the types of requests that it can place; ``place`` is called with no other."""
        ...

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        """Return a placement of the whole request on nodes that are idle now, or a refusal with the binding reason."""
        ...

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        """Return each cluster's reason why it cannot serve the request, by name; empty if the request can be placed."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties of a policy that its callers need. A policy declares those that differ as class attributes."""

    combines_clusters: bool = True
    """Whether the policy may place a job on several clusters. If not, jobs too large for each cluster are rejected."""
    keeps_together: bool = False
    """Whether it chooses clusters together, so that no component is placed again separately during claiming."""
    looks_ahead: bool = False
    """Whether it needs the requests of other waiting jobs in ``GridView.waiting``."""
    learns: bool = False
    """Whether it must be ``informed`` of the statistics of a job's application and of expected releases of nodes."""
    expects_releases: bool = True
    """For a policy that learns: whether it needs the expected releases of nodes, which are computed per component."""
    fits_empty_grid: Callable[[Sequence[int], Sequence[int]], bool] | None = None
    """Returns whether components of these sizes fit on empty clusters with these numbers of nodes.

    If not, a non-fixed request is rejected at submission. None: the numbers alone do not decide it.
    """

    @classmethod
    def from_policy(cls, policy: Policy) -> "Capabilities":
        """Return the capabilities that a policy declares, with defaults for the others."""
        declared: dict[str, Any] = {f.name: getattr(policy, f.name) for f in fields(cls) if hasattr(policy, f.name)}
        return cls(**declared)


def does_not_serve(policy: Policy, request: Request) -> TypeError:
    """Return the error for a request of a type that the policy does not serve; the registry prevents such calls."""
    return TypeError(f"{policy.name} does not serve {request.type} requests")


MAX_TRIED_IN_TURN = 8
"""Number of candidates that are tried one by one. The others are searched by bisection, which may miss the minimum."""


def not_usable(cluster: ClusterView) -> str:
    """Return the reason why no job may be placed on a cluster; empty if it is usable."""
    if cluster.state is ClusterState.USABLE:
        return ""
    if cluster.state is ClusterState.DRAINED and cluster.note:
        return f"{cluster.state} {cluster.note}"
    return f"{cluster.state}: {cluster.note}" if cluster.note else str(cluster.state)


def idle_nodes(grid: GridView) -> str:
    """Return the clusters with the most idle nodes, then the unusable ones: ``north 3, south 2; east unreachable``."""
    listed = [f"{c.name} {c.idle}" for c in grid.by_idle[:MAX_LISTED]]
    return "; ".join(filter(None, (format_list(listed, len(grid.by_idle)), unusable_clusters(grid))))


def unusable_clusters(grid: GridView) -> str:
    """Return the unusable clusters with their states: ``east unreachable, west drained``; empty if all are usable."""
    if len(grid.by_idle) == len(grid.clusters):
        return ""
    return format_list(sorted(f"{c.name} {c.state}" for c in grid.clusters if c.state is not ClusterState.USABLE))


def nothing_usable(grid: GridView) -> str:
    """Return the reason of a refusal when no cluster is usable."""
    return f"no cluster is usable ({unusable_clusters(grid)})" if grid.clusters else "there are no clusters"


def reason_for(cluster: ClusterView, needs: str, sufficient: int | None) -> ClusterReason:
    """Return the reason why a cluster cannot serve a request.

    ``sufficient``: idle nodes with which it could; None: unknown.
    """
    unusable = not_usable(cluster)
    if unusable:
        return ClusterReason(cluster.name, unusable)
    within_reach = sufficient is not None and cluster.idle < sufficient <= cluster.total
    missing = sufficient - cluster.idle if sufficient is not None and within_reach else None
    return ClusterReason(cluster.name, f"{cluster.idle} of {cluster.total} nodes idle, {needs}", missing)


def idle_that_suffices(cluster: ClusterView, fits: Callable[[int], bool], minimum: int = 0) -> int | None:
    """Return the idle nodes, more than the cluster has and at least ``minimum``, with which the request ``fits``.

    Return None if the cluster is not usable or is too small.
    """
    if cluster.state is not ClusterState.USABLE:
        return None
    candidates = range(max(cluster.idle + 1, minimum), cluster.total + 1)
    for idle in candidates[:MAX_TRIED_IN_TURN]:
        if fits(idle):
            return idle
    later_candidates = candidates[MAX_TRIED_IN_TURN:]
    if not later_candidates or not fits(later_candidates[-1]):
        return None
    return later_candidates[bisect_left(later_candidates, True, hi=len(later_candidates) - 1, key=fits)]


def with_idle(grid: GridView, cluster: ClusterView, idle: int) -> GridView:
    """Return the grid with another number of idle nodes of one cluster."""
    return grid.with_clusters([cluster.with_idle(idle)])
