"""The events that change the state of the scheduler."""

from dataclasses import dataclass

from koalapy.model.array import TaskIndices
from koalapy.model.cluster import Link
from koalapy.model.job import Job, JobId, Token
from koalapy.model.job_spec import JobSpec
from koalapy.model.reports import Inventory, Report
from koalapy.model.request import ClusterName
from koalapy.model.reservation import Reservation


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A validated, stored job; the scheduler assigns its ``queue_seq``. ``by``: the acting user, for the timeline."""

    job: Job
    by: str = ""


@dataclass(frozen=True, slots=True)
class JobCancelled:
    job: JobId
    reason: str = "cancelled"
    by: str = ""
    warn: bool = False
    """Whether the program gets the grace that its job requested."""
    tasks: TaskIndices | None = None
    """The tasks of an array to cancel; None: the whole job."""


@dataclass(frozen=True, slots=True)
class JobHeld:
    job: JobId
    reason: str = "held"
    by: str = ""


@dataclass(frozen=True, slots=True)
class JobReleased:
    job: JobId
    by: str = ""


@dataclass(frozen=True, slots=True)
class JobChanged:
    """A waiting job gets another specification. It is then tried at once, also if nothing differs.

    It keeps its submission time, which decides its position, also in the queue of another priority.
    """

    job: JobId
    spec: JobSpec
    """The validated specification. It differs from the present one in ``CHANGEABLE_FIELDS`` only."""
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class Reported:
    """A report of a cluster's agent. ``cluster`` comes from the agent's login, so no agent can report for another
    cluster."""

    cluster: ClusterName
    report: Report


@dataclass(frozen=True, slots=True)
class ClusterConfirmed:
    """Everything that a cluster knew at the time ``as_of`` has been reported before this event."""

    cluster: ClusterName
    as_of: float


@dataclass(frozen=True, slots=True)
class ClusterDisconnected:
    cluster: ClusterName
    reason: str = "its agent is not connected"
    heard: float | None = None
    """The time of its last message, if the disconnect was noticed later."""


@dataclass(frozen=True, slots=True)
class AgentConnected:
    """The agent of a cluster has connected; it has not reported anything yet."""

    cluster: ClusterName


@dataclass(frozen=True, slots=True)
class AgentFailed:
    """The agent that the daemon runs for a cluster has ended or cannot be started, for the given ``reason``."""

    cluster: ClusterName
    reason: str


@dataclass(frozen=True, slots=True)
class ClusterCleared:
    """An operator declares an unusable cluster repaired."""

    cluster: ClusterName


@dataclass(frozen=True, slots=True)
class ClusterDrained:
    """An operator drains a cluster: nothing more is placed there. Running jobs continue, or are requeued.

    Times in seconds since the epoch, as in ``Drain``.
    """

    cluster: ClusterName
    by: str = ""
    reason: str = ""
    requeue: bool = False
    begins_at: float | None = None
    ends_at: float | None = None


@dataclass(frozen=True, slots=True)
class ClusterResumed:
    """A drained cluster may be used again; ``planned``: its planned drains are withdrawn instead.

    ``begins_at`` and ``ordered_at``: only the planned drain of these times is withdrawn, in seconds since the epoch.
    """

    cluster: ClusterName
    planned: bool = False
    begins_at: float | None = None
    ordered_at: float | None = None


@dataclass(frozen=True, slots=True)
class ClusterLost:
    """An operator declares that no job of the scheduler runs any more on an unreachable cluster."""

    cluster: ClusterName
    by: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class InventoryReceived:
    """The inventory of a cluster: all components it holds, or those known so far if not ``whole``.

    ``undelivered``: tokens of submits that have not been sent to the cluster yet.
    """

    cluster: ClusterName
    inventory: Inventory
    undelivered: frozenset[Token] = frozenset()


@dataclass(frozen=True, slots=True)
class ReplicasChanged:
    """The clusters that hold a good replica of a logical file from now on."""

    file: str
    sites: tuple[ClusterName, ...]


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """A measurement of the link between two clusters, or within one; None leaves the previous value."""

    one: ClusterName
    other: ClusterName
    link: Link


@dataclass(frozen=True, slots=True)
class RelayChanged:
    """Whether the relay of a cluster can be used, and whether MPI messages of other sites must go over it."""

    cluster: ClusterName
    is_ready: bool
    relayed_only: bool = False


@dataclass(frozen=True, slots=True)
class ReservationChanged:
    """A reservation was made, or is no longer in force."""

    reservation: Reservation


@dataclass(frozen=True, slots=True)
class WeightChanged:
    """The weight of a user in fair share from now on."""

    user: str
    weight: float


@dataclass(frozen=True, slots=True)
class PeriodicScan:
    """The time of a periodic scan. With ``event_driven=False`` there are no other scans."""


Event = (
    JobSubmitted
    | JobCancelled
    | JobHeld
    | JobReleased
    | JobChanged
    | Reported
    | ClusterConfirmed
    | ClusterDisconnected
    | AgentConnected
    | AgentFailed
    | ClusterCleared
    | ClusterDrained
    | ClusterResumed
    | ClusterLost
    | InventoryReceived
    | ReplicasChanged
    | LinkMeasured
    | RelayChanged
    | ReservationChanged
    | WeightChanged
    | PeriodicScan
)
