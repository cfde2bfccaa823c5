"""What a placement policy is: a pure function of a request and the grid (semantics 3)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

from koalapy.model.cluster import GridView
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import Request, RequestType


@runtime_checkable
class Policy(Protocol):
    """Sees the request and the idle nodes, never a clock, a database or a socket.

    ``place`` is called for every shape in every scan and must be fast; ``explain`` is called only when someone asks.
    The first line of the class's docstring is what users read about the policy.

    A policy may also declare ``Capabilities`` in its class, and have

    - ``configured(options: Mapping[str, str]) -> Policy``, if users may set options of it for a job: the policy with
      these, or ``UsageError`` naming ``policy_options.<name>``; called once for each choice of them;
    - ``check(request: Request) -> None``, if there are requests of the types it serves that it can never place:
      ``UsageError`` naming what of the request; called before each ``place``;
    - ``informed(knowledge: Knowledge) -> Policy``, if it ``learns``: the policy for one job; its placements may bring
      an ``Advice`` for the record.
    """

    @property
    def name(self) -> str:
        """What users write to choose it: lower-case words joined by hyphens."""
        ...

    @property
    def serves(self) -> frozenset[RequestType]:
        """The types of requests it can place; ``place`` is called with no other."""
        ...

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        """A placement of the whole request on nodes that are idle now, or the binding reason why there is none."""
        ...

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        """Why each cluster cannot serve the request, in order of name; empty when the request can be placed."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What others go by, so that none knows a policy by its name; its class declares as attributes what differs."""

    combines_clusters: bool = True
    """Whether it may place one job on several clusters; else what no cluster can hold alone is refused."""
    keeps_together: bool = False
    """Whether it chooses clusters for each other: no component is placed anew by itself while it is claimed."""
    looks_ahead: bool = False
    """Whether it wants the requests of other waiting jobs in ``GridView.waiting``."""
    learns: bool = False
    """Whether it wants to be ``informed`` of a job's application and of the releases of nodes."""
    expects_releases: bool = True
    """Of one that learns: whether it asks when nodes will be free, which is worked out component by component."""
    heeds_memory: bool = False
    """Whether it places a job only on nodes that have the memory that it asks for; else such a request is refused."""
    fits_empty_grid: Callable[[Sequence[int], Sequence[int]], bool] | None = None
    """Whether it would place components of given sizes on clusters with so many nodes, all idle: else a non-fixed
    request is refused at submission. None where that cannot be told of the counts alone."""

    @classmethod
    def of(cls, policy: Policy) -> "Capabilities":
        declared: dict[str, Any] = {f.name: getattr(policy, f.name) for f in fields(cls) if hasattr(policy, f.name)}
        return cls(**declared)


def does_not_serve(policy: Policy, request: Request) -> TypeError:
    """For a policy called with a request that the registry would not have given it."""
    return TypeError(f"{policy.name} does not serve {request.type} requests")
