"""Placements and refusals: the results of a placement policy, with the reason for each cluster."""

from dataclasses import dataclass, field
from enum import StrEnum

from koalapy.model.advice import Advice
from koalapy.model.request import ClusterName


@dataclass(frozen=True, slots=True)
class PlacedComponent:
    """A component and its execution site; ``request_index`` is its index in the user's request, if it is there."""

    size: int
    cluster: ClusterName
    request_index: int | None = None
    sources: tuple[ClusterName, ...] = ()
    """The file site of each input, in order, if the policy chose them."""
    transfer_time: float = 0.0
    """Estimated seconds until the inputs have arrived, if the policy chose the file sites."""
    node_class: str = ""
    """The node class that the component gets; empty: any node."""


@dataclass(frozen=True, slots=True)
class Placement:
    """An execution site for each component of a job, and the reason."""

    components: tuple[PlacedComponent, ...]
    reason: str = ""
    advice: Advice | None = None
    """The options that a policy compared, if it learns run times."""

    @property
    def total_size(self) -> int:
        return sum(c.size for c in self.components)

    def nodes_on(self, cluster: ClusterName) -> int:
        return sum(c.size for c in self.components if c.cluster == cluster)


class RefusalKind(StrEnum):
    """The category of the reason why a job was not placed."""

    NODES = "nodes"
    """Too few suitable nodes are idle."""
    CLUSTERS = "clusters"
    """No cluster is usable."""
    FILES = "files"
    """An input file has no replica, or cannot be transferred."""
    ELIGIBILITY = "eligibility"
    """The job may not run on the clusters, or not on them together: accounts, folders, Open MPI, constraints."""
    LIMIT = "limit"
    """The owner has reached a limit."""
    ADVICE = "advice"
    """The policy expects the job to end sooner if it waits."""
    RELAYS = "relays"
    """The hub of the relays has too few free streams, or no links of the required kind connect the clusters."""
    POLICY = "policy"
    """The policy is unknown or failed."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The decisive reason why a job is not placed now. ``Policy.explain`` gives the reasons for each cluster."""

    summary: str
    kind: RefusalKind = field(default=RefusalKind.NODES, compare=False)

    def __str__(self) -> str:
        return self.summary


@dataclass(frozen=True, slots=True)
class ClusterReason:
    """The reason why a cluster does not suffice for a job.

    ``missing`` is the number of additional idle nodes on this cluster that would suffice; None if the cluster is not
    usable or has too few nodes.
    """

    cluster: ClusterName
    reason: str
    missing: int | None = None
