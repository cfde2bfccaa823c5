"""What can happen to the scheduler: every change of its world is one of these."""

from dataclasses import dataclass
from typing import Literal

from koalapy.model.cluster import Link
from koalapy.model.disk import Disk
from koalapy.model.job import Job, JobId, Token
from koalapy.model.request import ClusterName

StageState = Literal["running", "done", "failed"]
StageFault = Literal["site", "source", "file"]


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A checked, stored job; ``job.queue_seq`` is assigned by the scheduler."""

    job: Job


@dataclass(frozen=True, slots=True)
class JobCancelled:
    job: JobId
    reason: str = "cancelled"


@dataclass(frozen=True, slots=True)
class JobHeld:
    job: JobId
    reason: str = "held"


@dataclass(frozen=True, slots=True)
class JobReleased:
    job: JobId


@dataclass(frozen=True, slots=True)
class ClusterReported:
    """Node counts; ``holding``: tokens of ours whose nodes are already counted as not idle."""

    cluster: ClusterName
    total: int
    idle: int
    background: int = 0
    down: int = 0
    holding: frozenset[Token] = frozenset()
    problem: str = ""
    """Why nothing can be started there; the counts may then be the last ones, or 0 when there never were any."""
    notices: tuple[str, ...] = ()
    lacks: frozenset[str] = frozenset()
    disks: tuple[Disk, ...] = ()
    """Programs that are missing there, and that some jobs need."""


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
    """An operator wants nothing more placed there; running jobs go on."""

    cluster: ClusterName
    by: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ClusterResumed:
    """A drained cluster may be used again."""

    cluster: ClusterName


@dataclass(frozen=True, slots=True)
class ComponentUpdated:
    """All that a cluster knows of one component; see ``protocol.messages.Status``."""

    token: Token
    cluster: ClusterName
    state: str
    hosts: tuple[str, ...] = ()
    lrm_job: str | None = None
    program_exit: int | None = None
    error: str = ""
    infrastructure: bool = False
    refused: str = ""
    missing: str = ""
    """What of its output will never come, and why."""
    over: bool = False
    pending: str = ""
    starting: float = 0.0


@dataclass(frozen=True, slots=True)
class StageUpdated:
    """All that a cluster knows of the files that are brought to one component (its stage); bytes.

    ``fault`` of a failed one: ``site`` when the execution site is to blame (its disk is full), ``source`` when a file
    site cannot be reached, ``file`` when a replica is not what the catalogue says. ``source`` and ``file`` say which.
    """

    token: Token
    cluster: ClusterName
    state: StageState
    size: int = 0
    staged: int = 0
    error: str = ""
    fault: StageFault = "site"
    source: ClusterName = ""
    file: str = ""


@dataclass(frozen=True, slots=True)
class InventoryReceived:
    """A cluster is connected and told everything it holds, or all that it knows so far if that is not the ``whole``;
    ``undelivered``: submits it has not yet been sent."""

    cluster: ClusterName
    components: tuple[ComponentUpdated, ...]
    undelivered: frozenset[Token] = frozenset()
    stages: tuple[StageUpdated, ...] = ()
    whole: bool = True


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
    | ClusterReported
    | ClusterConfirmed
    | ClusterDisconnected
    | AgentFailed
    | ClusterCleared
    | ClusterDrained
    | ClusterResumed
    | ComponentUpdated
    | InventoryReceived
    | StageUpdated
    | ReplicasChanged
    | LinkMeasured
    | PeriodicScan
)
