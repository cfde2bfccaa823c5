"""Reports of agents on their clusters, used on the wire and in the scheduler. Each report is complete, not a
difference.

A report may arrive twice or late. It names no cluster: the connection determines which agent, and so which cluster, it
is from.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from annotated_types import Interval, Predicate

from koalapy.model.bounds import (
    MAX_LISTED,
    MAX_NODES,
    NOTICES,
    BoundedTogether,
    Bytes,
    ExitCode,
    Host,
    Label,
    MaxEntries,
    Name,
    Nodes,
    Number,
    Path,
    ProcessorSeconds,
    Seconds,
    ShortText,
    Truncate,
    TruncatedText,
)
from koalapy.model.construction import fast_constructor
from koalapy.model.disk import Disk
from koalapy.model.job import ComponentState
from koalapy.model.job_sizes import NodeReservation, SizeRanges
from koalapy.model.node_requirement import MAX_CORES, MAX_FEATURES, CheckedGpus

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
"""Scope of a rejection by a resource manager. Empty: the cluster, which counts as an infrastructure failure.

``job``: the job on any cluster. ``unsuitable``: this job on this cluster, which never accepts its walltime or size.
``limit``: a limit that may be lifted later. ``unknown``: the scope is not known.
"""
RefusedSizes = Literal["", "few", "many"]
"""The sizes that a rejection concerns besides the rejected one: none in particular, smaller ones, or larger ones.

Empty from agents of versions without this field.
"""
StageState = Literal["running", "done", "failed"]
StageFault = Literal["site", "source", "file", "job"]
"""The responsible side: the execution site, the source of a file, the replica, or the job, which then fails."""


MAX_LISTED_NODES = 1000
MAX_NODE_TEXT = 200


ListedState = Literal["held", "idle", "local", "down"]
"""``held``: a grid job has it. ``local``: local users have it, or it is kept for them. ``down``: no job gets it."""


@dataclass(frozen=True, slots=True)
class ListedNode:
    """A node of a cluster, as its resource manager describes it."""

    name: Annotated[str, Truncate(MAX_NODE_TEXT)]
    state: ListedState
    node_class: Annotated[str, Truncate(MAX_NODE_TEXT)] = ""
    """Its class; empty if the cluster has at most one."""
    reason: Annotated[str, Truncate(MAX_NODE_TEXT)] = ""
    """The resource manager's words on its state."""
    token: Name = ""
    """The component that has it; empty if none of this daemon has."""


@dataclass(frozen=True, slots=True)
class NodeList:
    """The nodes of a cluster one by one, those that are down first if they are too many: the answer to ``nodes``."""

    nodes: Annotated[tuple[ListedNode, ...], MaxEntries(MAX_LISTED_NODES)] = ()
    age: Seconds = 0.0
    """Seconds since the resource manager reported them."""


MAX_RELAYED_PAIRS = 10_000
NamedPair = Annotated[tuple[Name, Name], MaxEntries(2)]
"""Two clusters, sorted by name."""


@dataclass(frozen=True, slots=True)
class ProgramUse:
    """The use of the nodes of an ended component by its program, over the ``nodes`` of which it is known."""

    nodes: Nodes
    cpu_time: ProcessorSeconds
    """Processor seconds of the program."""
    cpu_available: ProcessorSeconds
    """Processor seconds that these nodes had while the program ran."""
    peak_memory: Bytes | None
    """Largest memory of the program on one node; None: unknown."""


@fast_constructor
@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """The current state of one component on its cluster.

    ``program_exit`` is reported as soon as it is certain: non-zero if the program failed on the first node, 0 if the
    program of the component has finished on all nodes (Open MPI: ``mpirun`` of the head node). ``delivering`` means
    that the resource manager has the nodes back; ``ended`` that the daemon also has the results and the output.
    ``refused`` is the scope of a rejection by the resource manager, with the reason in ``error``; see ``Refusal``.
    """

    token: Name
    state: ReportedState
    hosts: Annotated[tuple[Host, ...], MaxEntries(MAX_NODES)] = ()
    lrm_job: Name | None = None
    program_exit: ExitCode | None = None
    error: TruncatedText = ""
    infrastructure: bool = False
    refused: Refusal = ""
    refused_sizes: RefusedSizes = ""
    exceeded: Literal["", "memory"] = ""
    """Limit for which the resource manager ended it. This is a failure of the program, not of the cluster."""
    missing: TruncatedText = ""
    """Description of lost output, with the reason."""
    over: bool = False
    """Whether its program has ended; its exit code may be reported only later, after the output."""
    pending: TruncatedText = ""
    """Reason why the resource manager keeps it waiting, or suspends it."""
    limited: bool = False
    """Whether that reason is a limit of its account or quality of service, and not a lack of nodes."""
    warned: bool = False
    """Whether its program received the warning signal."""
    starting: Seconds = 0.0
    """Maximum seconds that its allocated nodes need to start, as from power saving; 0 if they are running."""
    lease: Seconds | None = None
    """Seconds of the daemon's silence after which its agent and runners end it; None: never, as with agents of
    versions without leases."""
    use: ProgramUse | None = None
    """None before the end, if no node reported it, and from agents of versions without this field."""
    relayed: Annotated[tuple[NamedPair, ...], MaxEntries(MAX_RELAYED_PAIRS)] = ()
    """Pairs of clusters, each sorted by name, between which the program's messages go through relays."""
    unreached: Annotated[tuple[NamedPair, ...], MaxEntries(MAX_RELAYED_PAIRS)] | None = None
    """Those of ``relayed`` whose nodes did not reach each other directly; the others are relayed with them.

    None: all, as with agents of versions without this field.
    """
    relay_lost: bool = False
    """Whether its infrastructure failure is no error of the cluster: the loss of relayed links outside the site, or a
    preemption by a local job."""
    results_lost: bool = False
    """Whether its infrastructure failure is the loss of files that its program, which had succeeded, left to send."""
    type: Literal["status"] = field(default="status", kw_only=True)


class LrmOperation(StrEnum):
    """An operation of an agent on its resource manager."""

    OPEN = "open"
    """Connect, until it succeeds once."""
    SNAPSHOT = "snapshot"
    """List nodes and jobs."""
    SUBMIT = "submit"
    """Submit a component."""
    FIND = "find"
    """Find the job of an earlier submission."""
    SETTLE = "settle"
    """Read the time after which an accepted submission is listed."""
    CANCEL = "cancel"
    """Cancel a job."""
    VERSION = "version"
    """Read the version."""
    RESERVE = "reserve"
    """Reserve nodes, release them, or list reservations."""


@dataclass(frozen=True, slots=True)
class LrmCalls:
    """Statistics of one kind of call to the resource manager, since the agent started.

    A failure is a call without a response, or one that failed by a fault of the resource manager. A rejected job is no
    failure.
    """

    operation: Label
    """A value of ``LrmOperation``, or one of a later version."""
    count: Number = 0
    """Finished calls."""
    failures: Number = 0
    """Failed calls among these."""
    seconds: Seconds = 0.0
    """Total duration in seconds."""
    largest: Seconds = 0.0
    """Longest duration within the last minutes, in seconds."""
    last_error: ShortText = ""
    failed_ago: Seconds | None = None
    """Seconds between the last failure and the report."""

    @property
    def mean(self) -> float | None:
        """Return the mean duration in seconds; None without calls."""
        return self.seconds / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of software on a cluster, for display; empty where unknown."""

    agent: Label = ""
    lrm: Label = ""
    """Resource manager, with its name."""
    open_mpi: Label = ""
    """Open MPI on the agent's host, usually the same as on its nodes."""


@dataclass(frozen=True, slots=True)
class NodePartReport:
    """Nodes of which other jobs use a part, and leave the same. A job that shares nodes could get one part of each."""

    nodes: Nodes
    cores: Annotated[int, Interval(ge=1, le=MAX_CORES)]
    """Idle cores of each node."""
    memory: Bytes | None = None
    """Idle bytes of memory of each node; None: not limited."""
    gpus: Annotated[tuple[CheckedGpus, ...], MaxEntries(MAX_FEATURES)] = ()
    """Idle GPUs of each node by type."""


@dataclass(frozen=True, slots=True)
class NodeClassReport:
    """A class of equal nodes of a cluster. ``idle`` counts the nodes that a job of this class could get now."""

    name: Annotated[Name, Predicate(str.isprintable)]
    """Name by which components request them; empty if all nodes are equal."""
    total: Nodes
    idle: Nodes
    power: Annotated[float, Interval(gt=0, le=1e6)] | None = None
    """Speed relative to nodes of other clusters; None: the speed of the cluster."""
    memory: Bytes | None = None
    """Bytes of memory of each node; None: unknown."""
    cores: Annotated[int, Interval(ge=1, le=MAX_CORES)] | None = None
    """Cores of each node; None: unknown."""
    gpus: Annotated[tuple[CheckedGpus, ...], MaxEntries(MAX_FEATURES)] = ()
    """GPUs of each node by type."""
    features: Annotated[tuple[Label, ...], MaxEntries(MAX_FEATURES)] = ()
    partitions: Annotated[tuple[Label, ...], MaxEntries(MAX_FEATURES)] = ()
    """Partitions or queues that have all of these nodes."""
    parts: Annotated[tuple[NodePartReport, ...], MaxEntries(MAX_LINES)] = ()
    """Partly used nodes, if the site lets jobs share nodes. They are not among the idle nodes."""


MAX_LOST_RECORDS, MAX_SIZE_RANGES, MAX_RESERVATIONS = 20, 100, 10


@fast_constructor
@dataclass(frozen=True, slots=True)
class ClusterReport:
    """Node counts of a cluster. ``holding`` are the tokens of components with nodes that are not counted as idle."""

    total: Nodes
    idle: Nodes
    background: Nodes = 0
    down: Nodes = 0
    holding: Annotated[frozenset[Name], MaxEntries(MAX_LISTED)] = frozenset()
    problem: ShortText = ""
    """Reason why nothing can start there: the resource manager accepts no jobs, or the counts are unavailable.

    The counts may then be the last known ones, or 0 if there were none.
    """
    notices: Annotated[tuple[TruncatedText, ...], MaxEntries(MAX_LINES), NOTICES] = ()
    """Other notices for operators, such as jobs that the resource manager fails to release."""
    lacks: Annotated[frozenset[Label], MaxEntries(MAX_LINES), NOTICES] = frozenset()
    """Programs that some jobs need and that are missing on the agent's host."""
    disks: Annotated[tuple[Disk, ...], MaxEntries(MAX_DISKS), BoundedTogether] = ()
    """Disks to which the agent writes."""
    versions: Versions | None = None
    """None from agents of versions without this field."""
    node_classes: Annotated[tuple[NodeClassReport, ...], MaxEntries(MAX_LINES), BoundedTogether] = ()
    """Node classes, in the order in which the resource manager allocates nodes to jobs without a class.

    Empty if no properties of the nodes are known.
    """
    lost_records: Annotated[tuple[Label, ...], MaxEntries(MAX_LOST_RECORDS)] = ()
    """Components of which the agent lost the records in the last hour, and ended the remaining processes."""
    shares: bool = False
    """Whether jobs may share nodes there."""
    withheld: Nodes = 0
    """Nodes that are idle beyond the limits of one job, so that no job gets them now; not counted as idle."""
    job_sizes: Annotated[SizeRanges, MaxEntries(MAX_SIZE_RANGES)] = ()
    """Sizes that the resource manager accepts; empty: any size, and from agents of versions without this field."""
    reservations: Annotated[tuple[NodeReservation, ...], MaxEntries(MAX_RESERVATIONS)] = ()
    """Present and coming reservations of its nodes, the earliest first."""
    calls: Annotated[tuple[LrmCalls, ...], MaxEntries(MAX_CALLS)] = field(default=(), compare=False)
    """Sent with the next report that another change causes, since the statistics change at every poll."""
    silent_for: Seconds = field(default=0.0, compare=False)
    """Seconds since the last answer of the resource manager, if ``problem`` is that it does not answer."""
    type: Literal["report"] = field(default="report", kw_only=True)


@dataclass(frozen=True, slots=True)
class TransferMeasurement:
    """One finished transfer between two clusters: bytes and seconds."""

    source: Name
    size: Bytes
    seconds: Seconds
    flowed: Bytes = 0
    flowing: Seconds = 0.0
    """Bytes (``flowed``) and seconds after the first bytes arrived, which exclude the setup of the transfer."""


@dataclass(frozen=True, slots=True)
class StageStatus:
    """The transfer of the files of one component (its stage); sizes in bytes.

    ``fault`` of a failed stage is ``site`` for a fault of the execution site, such as a full disk. It is ``source`` if
    a file site is unreachable, and ``file`` if a replica differs from the catalogue. The fields ``source`` and ``file``
    name these.
    """

    token: Name
    state: StageState
    size: Bytes = 0
    staged: Bytes = 0
    error: TruncatedText = ""
    fault: StageFault = "site"
    source: Name = ""
    file: Path = ""
    moved: Annotated[tuple[TransferMeasurement, ...], MaxEntries(MAX_LISTED)] = ()
    """Transfers of a finished stage, with source, size and duration."""
    type: Literal["stage_status"] = field(default="stage_status", kw_only=True)


@dataclass(frozen=True, slots=True)
class Inventory:
    """All components and stages that an agent and its resource manager hold, sent when the agent connects.

    If the resource manager does not respond, the inventory omits its part, and is sent again when it responds.
    """

    components: Annotated[tuple[ComponentStatus, ...], MaxEntries(MAX_LISTED)]
    whole: bool = True
    """Whether the inventory is complete: components that it omits do not exist. False until the resource manager
    responds."""
    stages: Annotated[tuple[StageStatus, ...], MaxEntries(MAX_LISTED)] = ()
    type: Literal["inventory"] = field(default="inventory", kw_only=True)


Report = ComponentStatus | ClusterReport | StageStatus
