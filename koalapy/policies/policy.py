"""The interface of placement policies: pure functions of a request and a view of the grid (semantics 3)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

from koalapy.model.cluster import GridView
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import Request, RequestType


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
