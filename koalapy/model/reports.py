"""What agents report of their clusters, on the wire as in the scheduler: whatever it is, all of it each time.

A report may come twice or late. None names its cluster: that is whose agent sent it, whatever it says.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from annotated_types import Interval, MaxLen

from koalapy.model.bounds import (
    MAX_LISTED,
    MAX_NODES,
    NOTICES,
    BoundedTogether,
    Bytes,
    ExitCode,
    Host,
    Label,
    Name,
    Nodes,
    Number,
    Path,
    Seconds,
    ShortText,
    TruncatedText,
)
from koalapy.model.disk import Disk
from koalapy.model.job import ComponentState

MAX_LINES = 1000
MAX_DISKS = 100
MAX_CALLS = 50
ReportedState = Literal[
    ComponentState.SUBMITTED,
    ComponentState.WAITING,
    ComponentState.CLAIMED,
    ComponentState.RUNNING,
    ComponentState.DELIVERING,
    ComponentState.ENDED,
]
Refusal = Literal["", "job", "unsuitable", "limit", "unknown"]
"""What the refusal of a resource manager concerns, if not the cluster, whose fault is an infrastructure failure: the
job on any cluster (``job``); this job on this cluster, which never takes its walltime or size (``unsuitable``); a
limit that may be gone later (``limit``); or nothing that is known (``unknown``)."""
StageState = Literal["running", "done", "failed"]
StageFault = Literal["site", "source", "file"]


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """One component as its agent sees it now.

    ``program_exit`` is told as soon as it is certain: non-zero when the first node's program failed, 0 when the
    program of the component is done everywhere (Open MPI: the head node's ``mpirun``). ``delivering`` means that the
    resource manager has the nodes back, and ``ended`` that the daemon has the results and the output as well.
    ``refused``: its resource manager did not take it, for ``error``: see ``Refusal``.
    """

    token: Name
    state: ReportedState
    hosts: Annotated[tuple[Host, ...], MaxLen(MAX_NODES)] = ()
    lrm_job: Name | None = None
    program_exit: ExitCode | None = None
    error: TruncatedText = ""
    infrastructure: bool = False
    refused: Refusal = ""
    exceeded: Literal["", "memory"] = ""
    """The limit for which its resource manager ended it: an ending of the program, and no fault of the cluster."""
    missing: TruncatedText = ""
    """What of its output will never come, and why."""
    over: bool = False
    """Whether its program has ended, be its exit code on the way or told: that comes after the output."""
    pending: TruncatedText = ""
    """Of one whose nodes have not all reported: what its resource manager says that it waits for."""
    warned: bool = False
    """Whether its program was told by its signal that it will be stopped."""
    starting: Seconds = 0.0
    """Not 0 while its nodes are its own and are being started, as from power saving: how long that takes at most."""
    lease: Seconds | None = None
    """Seconds of the daemon's silence after which its agent and runners end it; None: silence does not end it, as with
    an agent of before there were leases."""
    type: Literal["status"] = field(default="status", kw_only=True)


class LrmOperation(StrEnum):
    """What an agent asks of its resource manager."""

    OPEN = "open"
    SNAPSHOT = "snapshot"
    SUBMIT = "submit"
    FIND = "find"
    SETTLE = "settle"
    CANCEL = "cancel"
    VERSION = "version"


@dataclass(frozen=True, slots=True)
class LrmCalls:
    """What an agent has asked of its resource manager in one way, since the agent began.

    A failure is a call that was not answered, or that the resource manager could not do by a fault of its own; a job
    that it does not take is none.
    """

    operation: Label
    """One of ``LrmOperation``, or of a later agent's."""
    count: Number = 0
    """Calls that are over."""
    failures: Number = 0
    """How many of these."""
    seconds: Seconds = 0.0
    """All that they took together."""
    largest: Seconds = 0.0
    """What the longest of the last minutes took."""
    last_error: ShortText = ""
    failed_ago: Seconds | None = None
    """Seconds between the last failure and the report."""


@dataclass(frozen=True, slots=True)
class Versions:
    """What runs on a cluster, for people; empty where that is not known."""

    agent: Label = ""
    lrm: Label = ""
    """The resource manager, with its name."""
    open_mpi: Label = ""
    """That of the agent's host, which is as a rule its nodes' as well."""


@dataclass(frozen=True, slots=True)
class NodeClassReport:
    """Nodes of a cluster that are alike; ``idle`` are those that a job could have now which asks for this class."""

    name: Name
    """By which components ask for them; empty where all nodes are alike."""
    total: Nodes
    idle: Nodes
    power: Annotated[float, Interval(gt=0, le=1e6)] | None = None
    """What they can do as against nodes of other clusters; None: as the cluster's speed has it."""
    memory: Bytes | None = None
    """Bytes of each; None: not known."""


MAX_LOST_RECORDS = 20


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """Node counts of the cluster; ``holding`` are the tokens of ours whose nodes are counted as not idle."""

    total: Nodes
    idle: Nodes
    background: Nodes = 0
    down: Nodes = 0
    holding: Annotated[frozenset[Name], MaxLen(MAX_LISTED)] = frozenset()
    problem: ShortText = ""
    """Why nothing can be started there: the resource manager takes no jobs, or the counts could not be read; they may
    then be the last ones, or 0 when there never were any."""
    notices: Annotated[tuple[TruncatedText, ...], MaxLen(MAX_LINES), NOTICES] = ()
    """What people should know beside that, such as jobs of ours that the resource manager does not let go."""
    lacks: Annotated[frozenset[Label], MaxLen(MAX_LINES), NOTICES] = frozenset()
    """Programs that are missing on the agent's host, and that some jobs need."""
    disks: Annotated[tuple[Disk, ...], MaxLen(MAX_DISKS), BoundedTogether] = ()
    """Where the agent writes."""
    versions: Versions | None = None
    """None of an agent of before there was this."""
    node_classes: Annotated[tuple[NodeClassReport, ...], MaxLen(MAX_LINES), BoundedTogether] = ()
    """In the order in which the resource manager gives nodes to who asks for no class; none where it has but nodes of
    which nothing is known."""
    lost_records: Annotated[tuple[Name, ...], MaxLen(MAX_LOST_RECORDS)] = ()
    """Components whose records the agent has lost in the last hour: it has ended what still ran of them."""
    calls: Annotated[tuple[LrmCalls, ...], MaxLen(MAX_CALLS)] = field(default=(), compare=False)
    """Told with the next report that there is for another reason: they change with every look."""
    type: Literal["report"] = field(default="report", kw_only=True)


@dataclass(frozen=True, slots=True)
class TransferMeasurement:
    """One transfer between two clusters that is over: bytes and seconds."""

    source: Name
    size: Bytes
    seconds: Seconds
    flowed: Bytes = 0
    flowing: Seconds = 0.0
    """What of both came after the first bytes had been seen: without what it takes to set a transfer up."""


@dataclass(frozen=True, slots=True)
class StageStatus:
    """The files that are brought to one component (its stage), as its agent sees them now; bytes.

    ``fault`` of a failed one: ``site`` when the execution site is to blame (its disk is full), ``source`` when a file
    site cannot be reached, ``file`` when a replica is not what the catalogue says. ``source`` and ``file`` say which.
    """

    token: Name
    state: StageState
    size: Bytes = 0
    staged: Bytes = 0
    error: TruncatedText = ""
    fault: StageFault = "site"
    source: Name = ""
    file: Path = ""
    moved: Annotated[tuple[TransferMeasurement, ...], MaxLen(MAX_LISTED)] = ()
    """Of a stage that is done: what came from where, and how fast."""
    type: Literal["stage_status"] = field(default="stage_status", kw_only=True)


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything an agent and its resource manager hold for a daemon that has let it in.

    Where the resource manager does not answer it is sent without what only that knows, and again when it does.
    """

    components: Annotated[tuple[ComponentStatus, ...], MaxLen(MAX_LISTED)]
    whole: bool = True
    """Whether what is not in it is not there: else the resource manager has not been asked yet."""
    stages: Annotated[tuple[StageStatus, ...], MaxLen(MAX_LISTED)] = ()
    type: Literal["inventory"] = field(default="inventory", kw_only=True)


Report = ComponentStatus | ClusterReport | StageStatus
