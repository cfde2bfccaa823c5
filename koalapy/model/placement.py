"""Placements and refusals: the results of a placement policy, with the reason for each cluster.

Also explanations of why a job waits or was placed where it is.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from koalapy.model.advice import Advice
from koalapy.model.cluster import ClusterState
from koalapy.model.construction import fast_constructor
from koalapy.model.job import Job, JobId, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ClusterName


@fast_constructor
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


@fast_constructor
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

    @property
    def nodes(self) -> Counter[ClusterName]:
        """Return the number of nodes by cluster."""
        nodes = Counter[ClusterName]()
        for component in self.components:
            nodes[component.cluster] += component.size
        return nodes

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


ChangeValue = str | int | float | None | dict[str, object] | list[object]


@dataclass(frozen=True, slots=True)
class ClusterFinding:
    """One cluster in the explanation of a job; counts in nodes."""

    cluster: ClusterName
    state: ClusterState
    total: int
    idle: int
    """Nodes available to this job, without those reserved for another job."""
    used: int
    background: int
    down: int
    gives: int = 0
    """Nodes that the job has or would get on the cluster."""
    reason: str = ""
    """Why the cluster is not used, or does not suffice."""
    missing: int | None = None
    """Number of additional idle nodes on this cluster that would suffice; None if this cluster alone cannot."""


@dataclass(frozen=True, slots=True)
class PastReason:
    """An entry of a job's timeline with a reason; ``at`` in seconds since the epoch."""

    at: float
    event: str
    reason: str


@dataclass(frozen=True, slots=True)
class Change:
    """The smallest change of a request with which the job would be placed at once."""

    field: str
    """The field of the submission; empty if trying the job again unchanged suffices."""
    value: ChangeValue
    text: str
    """The change as an instruction: ``allow 3 components``."""
    spec: JobSpec
    """The changed job."""
    placement: Placement
    """The placement of the changed job."""
    job: Job | None = None
    """The waiting job to change, as it is now: also the array of a task that was not started. None for a submission."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """An explanation of the state of a job, or of what would happen to a submission."""

    job: JobId | None
    state: JobState
    """For a submission: ``placed`` if it would be placed at once, else ``queued``."""
    headline: str
    """The decisive reason in one line."""
    clusters: tuple[ClusterFinding, ...] = ()
    notes: tuple[str, ...] = ()
    """Further facts that affect the job."""
    suffices: tuple[str, ...] = ()
    """Events of which any one would let the job be placed unchanged: ``2 more idle nodes in south``."""
    position: int | None = None
    """Position in the placement queue, from 1; None for a job that is not in it."""
    ahead: int = 0
    """Number of jobs ahead in the queue."""
    tries: int = 0
    """Number of placement tries, including the scans that skipped the job."""
    reasons: tuple[PastReason, ...] = ()
    """Earlier reasons, oldest first."""
    smallest_change: Change | None = None
    placement: Placement | None = None
    """The current placement, or the one that the job would get."""
