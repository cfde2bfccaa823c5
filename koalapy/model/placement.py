"""The answers of a policy: a placement, or a refusal; and, cluster by cluster, why."""

from dataclasses import dataclass, field
from enum import StrEnum

from koalapy.model.advice import Advice
from koalapy.model.request import ClusterName


@dataclass(frozen=True, slots=True)
class PlacedComponent:
    """A component and its execution site; ``request_index`` is its place in the user's request, if it has one."""

    size: int
    cluster: ClusterName
    request_index: int | None = None
    sources: tuple[ClusterName, ...] = ()
    """Where each of its inputs comes from, in their order, if the policy chose that (file sites)."""
    transfer_time: float = 0.0
    """Estimated seconds until its input is on the execution site, if the policy chose the file site."""
    node_class: str = ""
    """Which of the cluster's nodes it gets, by the name of their class; empty: any."""


@dataclass(frozen=True, slots=True)
class Placement:
    """An execution site for every component of a job, and why there."""

    components: tuple[PlacedComponent, ...]
    reason: str = ""
    advice: Advice | None = None
    """What a policy that learns chose from."""

    @property
    def total_size(self) -> int:
        return sum(c.size for c in self.components)

    def nodes_on(self, cluster: ClusterName) -> int:
        return sum(c.size for c in self.components if c.cluster == cluster)


class RefusalKind(StrEnum):
    """What kept a job from being placed, in the large."""

    NODES = "nodes"
    """Too few are idle, where and as the job wants them."""
    CLUSTERS = "clusters"
    """None is usable."""
    FILES = "files"
    """An input can be had from nowhere, or not be moved."""
    ELIGIBILITY = "eligibility"
    """The job may not run there, or not on those clusters together: accounts, folders, Open MPI, constraints."""
    LIMIT = "limit"
    """Its owner has as much as he may."""
    ADVICE = "advice"
    """It could be placed, and its policy expects that it ends sooner when it waits."""
    POLICY = "policy"
    """Its policy is unknown or broken."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """No placement now: the binding reason in one line. ``Policy.explain`` gives the reasons cluster by cluster."""

    summary: str
    kind: RefusalKind = field(default=RefusalKind.NODES, compare=False)

    def __str__(self) -> str:
        return self.summary


@dataclass(frozen=True, slots=True)
class ClusterReason:
    """Why one cluster could not serve.

    ``missing`` is how many more idle nodes, on this cluster alone, would have sufficed; None when the cluster is not
    usable or has not that many nodes.
    """

    cluster: ClusterName
    reason: str
    missing: int | None = None
