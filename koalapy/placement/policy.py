"""What a placement policy is: a pure function of a request and the grid (semantics 3)."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from koalapy.model.cluster import GridView
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import Request, RequestType


@runtime_checkable
class Policy(Protocol):
    """Sees the request and the idle nodes, never a clock, a database or a socket.

    ``place`` is called for every shape in every scan and must be fast; ``explain`` is called only when someone asks.
    The first line of the class's docstring is what users read about the policy.

    A policy may also have

    - ``configured(options: Mapping[str, str]) -> Policy``, if users may set options of it for a job: the policy with
      these, or ``UsageError`` naming ``policy_options.<name>``; ``Configurable`` describes it;
    - ``check(request: Request) -> None``, if there are requests of the types it serves that it can never place:
      ``UsageError`` naming what of the request; ``Checking`` describes it;
    - ``looks_ahead = True``, if it wants the other jobs' requests in ``GridView.waiting``;
    - ``learns = True`` and ``informed(knowledge: Knowledge) -> Policy``, if it wants to know of a job's application and
      of the releases of nodes: the policy for that one job; its placements may bring an ``Advice`` for the record.
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


@runtime_checkable
class Configurable(Protocol):
    """A policy with options; called once for each choice of them."""

    def configured(self, options: Mapping[str, str]) -> Policy: ...


@runtime_checkable
class Checking(Protocol):
    """A policy that cannot place all requests of the types it serves; called before each ``place``."""

    def check(self, request: Request) -> None: ...


def does_not_serve(policy: Policy, request: Request) -> TypeError:
    """For a policy called with a request that the registry would not have given it."""
    return TypeError(f"{policy.name} does not serve {request.type} requests")
