"""What can happen to the scheduler: every change of its world is one of these."""

from dataclasses import dataclass

from koalapy.model.cluster import Link
from koalapy.model.job import Job, JobId, Priority, Token
from koalapy.model.reports import Inventory, Report
from koalapy.model.request import ClusterName


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A checked, stored job; the scheduler assigns its ``queue_seq``. ``by``: the user who acted, for the timeline."""

    job: Job
    by: str = ""


@dataclass(frozen=True, slots=True)
class JobCancelled:
    job: JobId
    reason: str = "cancelled"
    by: str = ""
    warn: bool = False
    """Whether its program has the grace that it asked for."""


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
class JobPriorityChanged:
    """A job that waits is to have another priority; it keeps its place by when it came, in the other queue."""

    job: JobId
    priority: Priority
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class Reported:
    """A cluster's agent has reported; ``cluster`` is the agent's own, so that none can speak for another."""

    cluster: ClusterName
    report: Report


@dataclass(frozen=True, slots=True)
class ClusterConfirmed:
    """All that was known at a cluster at the time ``as_of`` has been told before this."""

    cluster: ClusterName
    as_of: float


@dataclass(frozen=True, slots=True)
class ClusterDisconnected:
    cluster: ClusterName
    reason: str = "its agent is not connected"
    heard: float | None = None
    """When it was last heard of, where that was noticed later."""


@dataclass(frozen=True, slots=True)
class AgentConnected:
    """The agent of a cluster was let in; it has told nothing yet."""

    cluster: ClusterName


@dataclass(frozen=True, slots=True)
class AgentFailed:
    """The agent that the daemon runs for a cluster has ended, or cannot be started; ``reason`` says why."""

    cluster: ClusterName
    reason: str


@dataclass(frozen=True, slots=True)
class ClusterCleared:
    """An operator mended an unusable cluster."""

    cluster: ClusterName


@dataclass(frozen=True, slots=True)
class ClusterDrained:
    """An operator wants nothing more placed there; running jobs go on, or are stopped and queue again."""

    cluster: ClusterName
    by: str = ""
    reason: str = ""
    requeue: bool = False


@dataclass(frozen=True, slots=True)
class ClusterResumed:
    """A drained cluster may be used again."""

    cluster: ClusterName


@dataclass(frozen=True, slots=True)
class ClusterLost:
    """An operator declares that nothing of ours runs any more on a cluster that is out of reach."""

    cluster: ClusterName
    by: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class InventoryReceived:
    """A cluster has told everything it holds, or what it knows so far if that is not the ``whole``; ``undelivered``:
    submits that were not sent to it yet."""

    cluster: ClusterName
    inventory: Inventory
    undelivered: frozenset[Token] = frozenset()


@dataclass(frozen=True, slots=True)
class ReplicasChanged:
    """The clusters that have a good replica of a logical file from now on."""

    file: str
    sites: tuple[ClusterName, ...]


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """What is known now of the network between two clusters, or within one; None leaves what was known before."""

    one: ClusterName
    other: ClusterName
    link: Link


@dataclass(frozen=True, slots=True)
class PeriodicScan:
    """The safety net, and with ``event_driven=False`` the only reason to scan."""


Event = (
    JobSubmitted
    | JobCancelled
    | JobHeld
    | JobReleased
    | JobPriorityChanged
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
    | PeriodicScan
)
