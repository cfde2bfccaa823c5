"""Jobs, their attempts and components, and the state machine of semantics 13."""

import re
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, NamedTuple

from koalapy.model.field import Bounds, Field, Length, TextForm
from koalapy.model.notification import MAX_URL_LENGTH, MailType
from koalapy.model.request import (
    MAX_ENTRIES,
    MAX_OPTIONS,
    MAX_PATH_LENGTH,
    Bundle,
    ClusterName,
    Command,
    ComponentRequest,
    Environment,
    FileName,
    FlexibleRequest,
    InputFile,
    Inputs,
    Name,
    NotNegative,
    Positive,
    Request,
    StopWarning,
)

JobId = int
Token = str
"""Names one component of one attempt: ``job.generation.index.nonce``."""
Nonce = str
"""What sets an attempt apart from all others, also from those of a database that was put back from a copy.

Lower-case letters and digits, so that it may stand in names of files and of jobs of every resource manager. It cannot
be guessed; attempts of before there were nonces have an empty one, and it is left out of their tokens.
"""


class Priority(StrEnum):
    HIGH = "high"
    LOW = "low"


class Launcher(StrEnum):
    """How the program is started on the claimed nodes."""

    OPENMPI = "openmpi"
    PROCESSES = "processes"


class ClaimingMode(StrEnum):
    """Whether a claim starts all components at once or those it can get (semantics 5)."""

    ATOMIC = "atomic"
    INCREMENTAL = "incremental"


class JobState(StrEnum):
    QUEUED = "queued"
    HELD = "held"
    PLACED = "placed"
    CLAIMING = "claiming"
    STARTING = "starting"
    RUNNING = "running"
    UNKNOWN = "unknown"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in FINAL_STATES

    @property
    def is_active(self) -> bool:
        """Whether the job has, or is about to have, nodes."""
        return self in ACTIVE_STATES

    @property
    def is_waiting(self) -> bool:
        """Whether the job has no nodes yet, and is not over."""
        return self in WAITING_STATES


FINAL_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
WAITING_STATES = frozenset({JobState.QUEUED, JobState.HELD})
ACTIVE_STATES = frozenset({JobState.PLACED, JobState.CLAIMING, JobState.STARTING, JobState.RUNNING, JobState.UNKNOWN})

_ENDS = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
_BACK_OR_END = frozenset({JobState.UNKNOWN, JobState.QUEUED}) | _ENDS
TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.PLACED, JobState.HELD, JobState.FAILED, JobState.CANCELLED}),
    JobState.HELD: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.PLACED: frozenset({JobState.CLAIMING, JobState.QUEUED, JobState.FAILED, JobState.CANCELLED}),
    JobState.CLAIMING: frozenset({JobState.STARTING}) | _BACK_OR_END,
    JobState.STARTING: frozenset({JobState.RUNNING}) | _BACK_OR_END,
    JobState.RUNNING: _BACK_OR_END,
    JobState.UNKNOWN: frozenset({JobState.CLAIMING, JobState.STARTING, JobState.RUNNING, JobState.QUEUED}) | _ENDS,
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}
"""Which state may follow which; back to ``queued`` with a reason (claim-failed, preempted, infrastructure-failure)."""


class ComponentState(StrEnum):
    """A component on its way: each but ``placed``, ``delivering`` and ``ended`` may hold nodes of its cluster."""

    PLACED = "placed"
    """It has an execution site; nothing was handed to the local resource manager yet."""
    SUBMITTED = "submitted"
    """Its runner was, or is about to be, handed to the local resource manager."""
    WAITING = "waiting"
    """Its runner is queued in the local resource manager."""
    CLAIMED = "claimed"
    """Every node has reported and waits at the barrier."""
    RUNNING = "running"
    STOPPING = "stopping"
    """Told to end; its nodes count as held until the cluster says they are free."""
    DELIVERING = "delivering"
    """Its nodes are given back; its results, or the last of its output, are on their way."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Component:
    """One component of one attempt: a number of nodes on one cluster.

    ``index`` names it within its attempt; ``rank`` is its place among the components of the placement.
    """

    index: int
    cluster: ClusterName
    size: int
    state: ComponentState = ComponentState.PLACED
    request_index: int | None = None
    hosts: tuple[str, ...] = ()
    lrm_job: str | None = None
    exit_code: int | None = None
    error: str = ""
    infrastructure: bool = False
    """Whether ``error`` is the infrastructure's fault and not the program's (semantics 6)."""
    unknown_since: float | None = None
    """When the cluster was last heard of, while it is out of reach."""
    lease: float | None = None
    """Seconds of the daemon's silence after which its runners end it; None: never for that reason."""
    lost_at: float | None = None
    """When it is certainly over and counts as lost, unless its cluster is heard of before; None while that is in reach,
    and where only the agent or an operator can say so."""
    submitted_at: float | None = None
    claimed_at: float | None = None
    warned_at: float | None = None
    """When its program was told by its signal that it will be stopped."""
    ended_at: float | None = None
    sources: tuple[ClusterName, ...] = ()
    """The file site of each of its inputs, in their order."""
    transfer_time: float = 0.0
    """Estimated seconds from the placement on this site until its inputs are there."""
    staging_since: float | None = None
    """When its files were ordered to its cluster; None when none must be brought before it can start."""
    stage_size: int = 0
    """Bytes to be brought in all, as far as known."""
    staged: int = 0
    """Of these, bytes that are there."""
    staged_at: float | None = None
    """When all files were there and their checksums right."""
    replaces: int | None = None
    """The rank of the component that it stands in for, if it is not one of the first."""
    superseded: bool = False
    """Whether its claim failed and another component of the attempt stands in for it."""
    node_class: str = ""
    """Which of its cluster's nodes it gets, by the name of their class; empty: any."""

    @property
    def staging(self) -> bool:
        """Whether files must be brought to it before it can start."""
        return self.staging_since is not None

    @property
    def has_ended(self) -> bool:
        """Whether its cluster has its nodes back."""
        return self.state in (ComponentState.DELIVERING, ComponentState.ENDED)

    @property
    def rank(self) -> int:
        return self.index if self.replaces is None else self.replaces

    @property
    def file_site(self) -> ClusterName | None:
        """Where its first input comes from that is not there already; its own cluster when all are."""
        return next((source for source in self.sources if source != self.cluster), next(iter(self.sources), None))

    @property
    def awaits_files(self) -> bool:
        return self.staging and self.staged_at is None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to run a job: a placement and what became of it. ``generation`` fences off what came before.

    ``components`` only grows: one whose claim failed is superseded by another with an index of its own, so that what a
    cluster tells of the old one is never taken for the new one.
    """

    generation: int
    components: tuple[Component, ...]
    placed_at: float
    start_estimate: float | None = None
    """JST: when all transfers are estimated to be over."""
    claim_at: float | None = None
    """JCT: the time of the last or the coming claiming try."""
    barrier_at: float | None = None
    launched_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    """The program's exit code, once the head component has told it."""
    end_reason: str = ""
    nonce: Nonce = ""

    @property
    def gang(self) -> tuple[Component, ...]:
        """The components that the job consists of, in the order of the placement."""
        components = self.components
        for component in components:
            if component.superseded:
                break
        else:
            return components
        current = [component for component in components if not component.superseded]
        return tuple(sorted(current, key=lambda component: component.rank))

    @property
    def head(self) -> Component:
        """The component whose first node starts the program: the largest (ties: the first)."""
        gang = self.gang
        return gang[0] if len(gang) == 1 else max(gang, key=_size)


_size = attrgetter("size")

MAX_PROCESSES_PER_NODE = 8192
"""Linux knows no machine with more processors."""
MAX_DURATION = 100 * 365 * 86400
"""Seconds."""

MAX_MEMORY = 2**53
"""Bytes of a node."""
MAX_BANDWIDTH = 1e15
"""Bytes per second."""

PolicyOptions = Annotated[tuple[tuple[str, str], ...], Length(MAX_OPTIONS), TextForm("names and values")]
"""Names and values, sorted by name."""
Coallocation = Annotated[int, Bounds(minimum=1), TextForm("never, allowed, or a number")]
"""The most clusters that may be combined: 1 is never to co-allocate."""
Duration = Annotated[
    float, Bounds(above=0, maximum=MAX_DURATION, hint="give more than 0 seconds"), TextForm("seconds, 90m, 1:30:00")
]
Lease = Annotated[
    float,
    Bounds(minimum=0, maximum=MAX_DURATION, hint="give more than 0 seconds, or none"),
    TextForm("seconds, 40m, or none"),
]
"""Seconds; 0 (``NO_LEASE``) is none."""
Share = Annotated[float, Bounds(minimum=0, maximum=1, hint="give a fraction from 0 to 1")]
Ratio = Annotated[float, Bounds(above=0, maximum=1, hint="give a fraction above 0 and up to 1")]
RunTimeShare = Annotated[float, Bounds(minimum=0, maximum=1, hint="give a fraction of the run time from 0 to 1")]
NodeMemory = Annotated[
    int, Bounds(minimum=1, maximum=MAX_MEMORY, hint="give at least 1 byte"), TextForm("bytes, 16GB, 512MiB")
]
PerNodeBandwidth = Annotated[
    float, Bounds(minimum=0, maximum=MAX_BANDWIDTH), TextForm("bytes per second, 100MB, 1Gbit")
]
ProcessCount = Annotated[
    int, Bounds(minimum=1, maximum=MAX_PROCESSES_PER_NODE, excess_note="more than any node has processors")
]
ExitCode = Annotated[int, Bounds(minimum=1, maximum=255, hint="give exit codes from 1 to 255")]
Pattern = Annotated[str, Length(MAX_PATH_LENGTH), TextForm("as out/*.csv")]
"""Of files below a folder."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Everything the user said; nothing of it changes while the job lives, but the priority of one that waits.

    This is all there is to say of a field: the REST API, the store, job files and the options of ``koala submit``, in
    this order, follow from it. What kinds of values there are, each of them knows once.
    """

    request: Request
    command: Command = ()
    policy: Annotated[Name, Field("placement policy")] = ""
    policy_options: Annotated[
        PolicyOptions, Field("option of the policy, NAME=VALUE; repeatable", "--policy-option")
    ] = ()
    """What the policy is told beside the request, such as ``("metric", "bandwidth")``."""
    coallocation: Annotated[Coallocation | None, Field("never, allowed, or the maximum number of clusters")] = None
    """None: as many as it takes."""
    speed_ratio_min: Annotated[
        Ratio | None, Field("minimum speed of the slowest cluster relative to the fastest, 0 to 1")
    ] = None
    """Clusters are combined only if the slowest has at least this fraction of the fastest one's speed."""
    claiming: Annotated[
        ClaimingMode | None,
        Field("claim all components at once, or as nodes become available; default: the daemon's setting"),
    ] = None
    claim_threshold: Annotated[
        Share | None, Field("incremental: fraction of components that must be startable, 0 to 1")
    ] = None
    """T: the fraction of components that must be startable for an incremental claim to start any."""
    priority: Annotated[Priority, Field("default: low")] = Priority.LOW
    processes_per_node: Annotated[ProcessCount | None, Field("MPI processes on each node", "--ppn")] = None
    name: Annotated[Name, Field("name of the job")] = ""
    owner: Annotated[Name, Field("owner of the job, for operators; default: you")] = ""
    home_site: Annotated[Name, Field("cluster that the job is accounted to")] = ""
    """By default that of the login that it was submitted by, or its owner's; empty where nobody knows of any."""
    environment: Annotated[
        Environment, Field("environment variable NAME=VALUE, or NAME for its current value; repeatable", "--env")
    ] = ()
    launcher: Annotated[Launcher, Field("default: openmpi")] = Launcher.OPENMPI
    walltime: Annotated[Duration | None, Field("time limit of the program: seconds, 90m, 1h30m or 1:30:00")] = None
    """Seconds."""
    warning: Annotated[
        StopWarning | None, Field("signal before the program is stopped, e.g. TERM@30 for 30 s before", "--signal")
    ] = None
    """What its program is told before it is stopped at its walltime, or to make room for others."""
    lease: Annotated[
        Lease | None, Field("how long the job continues while a cluster is unreachable: seconds, 40m, or none")
    ] = None
    """For how long its components go on while the daemon is silent, before they end and it is tried again; None: as its
    clusters are configured."""
    output: Annotated[FileName | None, Field("file for the output on the execution site; {job} is the job's id")] = None
    workdir: Annotated[FileName | None, Field("working directory; default: the current one", "--chdir")] = None
    workdir_optional: bool = False
    """Whether the program runs elsewhere where that folder is not there: the submitter only happened to be in it."""
    max_restarts: Annotated[NotNegative | None, Field("maximum retries after infrastructure failures")] = None
    max_placement_tries: Annotated[Positive | None, Field("fail after so many placement tries")] = None
    max_claiming_tries: Annotated[Positive | None, Field("fail after so many claiming tries")] = None
    retry_on_exit: Annotated[
        tuple[ExitCode, ...], Length(255), Field("exit code of the program after which the job is retried; repeatable")
    ] = ()
    inputs: Annotated[Inputs, Field("logical input file, NAME[:partitioned][:as=FILE]; repeatable", "--input")] = ()
    """What every component of a flexible request needs; the components of the others have their own."""
    bundle: Annotated[Bundle | None, Field("local file or folder to upload; repeatable", "--stage")] = None
    """The submitter's own files for every component."""
    collect: Annotated[
        tuple[Pattern, ...],
        Length(MAX_ENTRIES),
        Field("pattern of result files to collect, e.g. 'out/*.csv'; repeatable"),
    ] = ()
    """Patterns of the result files that are brought together when the program has ended."""
    application: Annotated[Name, Field("application name, for learned run times; default: the program's name")] = ""
    """So that its runs can be compared."""
    communication: Annotated[RunTimeShare | None, Field("share of communication in the run time, 0 to 1")] = None
    """The declared share of communication in the program's run time on one cluster."""
    per_node_bandwidth: Annotated[
        PerNodeBandwidth | None, Field("bytes per second that each node exchanges with all others, e.g. 100MB")
    ] = None
    """Bytes per second between each of its nodes and all others; None: not known."""
    memory: Annotated[NodeMemory | None, Field("memory of each node, e.g. 16GB")] = None
    mail_type: Annotated[
        tuple[MailType, ...], Length(10), Field("event to notify about: begin, end, fail or waiting; repeatable")
    ] = ()
    """Of what is told by mail and webhook; of none named, of its end."""
    mail_user: Annotated[Name, Field("mail address to notify")] = ""
    webhook: Annotated[str, Length(MAX_URL_LENGTH, one_line=True), Field("URL to notify")] = ""
    internal: Annotated[bool, Field(is_settable=False)] = False
    """Whether it is the daemon's own, as measurements of the network are: it counts in no statistics of users' jobs."""

    def inputs_of(self, request_index: int | None) -> tuple[InputFile, ...]:
        """The inputs of a component."""
        own = self.component(request_index)
        return own.inputs if own else self.inputs

    @property
    def all_inputs(self) -> tuple[InputFile, ...]:
        """The inputs of all components."""
        own = () if isinstance(self.request, FlexibleRequest) else self.request.components
        return (*self.inputs, *(file for component in own for file in component.inputs))

    def has_stage(self, request_index: int | None) -> bool:
        """Whether a component needs a folder of its own, for files that are brought to it or collected from it."""
        return bool(self.bundle or self.collect or self.inputs_of(request_index))

    def component(self, request_index: int | None) -> ComponentRequest | None:
        """What the user spelled out for a component, if anything."""
        if request_index is None or isinstance(self.request, FlexibleRequest):
            return None
        return self.request.components[request_index]


@dataclass(frozen=True, slots=True)
class ClusterRefusal:
    """A cluster whose resource manager has refused a job, in its words."""

    cluster: ClusterName
    words: str
    until: float | None
    """When the job may be tried there again; None: never, since the words say that this cluster does not take it."""
    times: int = 1
    """How often it was refused there."""

    def bars(self, now: float) -> bool:
        """Whether the job is not to be placed there."""
        return self.until is None or now < self.until


@dataclass(frozen=True, slots=True)
class Job:
    """A job and where it stands. Times are seconds since the epoch of the world's clock."""

    id: JobId
    spec: JobSpec
    submitted_at: float
    state: JobState = JobState.QUEUED
    reason: str = ""
    generation: int = 0
    attempt: Attempt | None = None
    restarts: int = 0
    placement_tries: int = 0
    """Of a job that waits: as of the scan ``counted_scan``."""
    claiming_tries: int = 0
    counted_scan: int = 0
    """The number of the last scan of its placement queue that is counted in ``placement_tries``."""
    placed_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    ending: JobState | None = None
    """What the job becomes once its components have ended: set from the moment its attempt is over."""
    queue_seq: int = 0
    """Place in its placement queue: the smaller, the nearer to the head. It is kept through all attempts."""
    claim_factor: float | None = None
    """L, as lowered by failed claims; None while it has its first value."""
    first_start_estimate: float | None = None
    """The JST of the first attempt; the start delay is that of the last less this one."""
    retry_at: float | None = None
    """When a job whose attempts keep failing comes back to its placement queue; None while it is there."""
    refusals: tuple[ClusterRefusal, ...] = ()
    """The clusters that have refused it in words that do not concern it on every cluster, by name."""

    @property
    def is_in_queue(self) -> bool:
        """Whether the job is in its placement queue."""
        return self.state is JobState.QUEUED and self.retry_at is None

    def barred_clusters(self, now: float) -> frozenset[ClusterName]:
        """The clusters where it is not to be placed, since they have refused it."""
        return frozenset(each.cluster for each in self.refusals if each.bars(now))

    def token(self, index: int) -> Token:
        return format_token(self.id, self.generation, index, self.attempt.nonce if self.attempt else "")

    def stage_token(self, component: Component) -> Token:
        """Names the folder of a component's files on its cluster; a stand-in has that of the one it stands in for."""
        return self.token(component.rank)

    def staged_component_of(self, token: Token) -> Component | None:
        """The component of the attempt that is under way whose stage a token names."""
        if self.attempt is None or not self.state.is_active:
            return None
        rank = parse_token(token).component
        if token != self.token(rank):
            return None
        return next((c for c in self.attempt.gang if c.rank == rank and c.staging), None)


class TokenParts(NamedTuple):
    """What a token says."""

    job: JobId
    generation: int
    component: int
    """Its index, or its rank where the token is that of a stage."""
    nonce: Nonce


_TOKEN = re.compile(r"(\d{1,18})\.(\d{1,9})\.(\d{1,9})(?:\.([0-9a-z]{1,32}))?", re.ASCII)


def format_token(job: JobId, generation: int, index: int, nonce: Nonce) -> Token:
    own = f"{job}.{generation}.{index}"
    return f"{own}.{nonce}" if nonce else own


def parse_token(token: Token) -> TokenParts:
    """What a token says; ``ValueError`` when it is not one of ours. Whether it names what lives, its job knows."""
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise ValueError(f"{token[:60]!r} is no token")
    job, generation, index, nonce = match.groups()
    return TokenParts(int(job), int(generation), int(index), nonce or "")


def is_token(text: str) -> bool:
    """Whether a text is a token, or a stage's; whose it is nobody knows by that."""
    return _TOKEN.fullmatch(text) is not None


def is_same_attempt(one: Token, other: Token) -> bool:
    """Whether two tokens name components of the same attempt of the same job; False when one is no token."""
    try:
        first, second = parse_token(one), parse_token(other)
    except ValueError:
        return False
    return first._replace(component=0) == second._replace(component=0)


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One line of a job's history; ``state`` is the job's state after it."""

    job: JobId
    at: float
    event: str
    state: JobState
    reason: str = ""
    generation: int = 0
    component: int | None = None
    cluster: ClusterName | None = None
    actor: str = ""
    """Who has brought it about, where somebody has."""


DEFAULT_LEASE = 2400.0
"""Seconds; HTCondor's JobLeaseDuration."""
NO_LEASE = 0.0
"""The lease of a job that is not ended by silence."""
CLOCK_RATE_MARGIN = 0.01
"""By which fraction the clocks of a daemon and a node may differ in rate: slewed clocks differ by 0.1 % at most."""
END_MARGIN = 30.0
"""Seconds that runner, agent and resource manager have to end the processes, once lease and grace are over."""
WALLTIME_ALLOWANCE = 60.0
"""Seconds beyond the walltime after which runner and resource manager end a program that the daemon has not ended."""


def lease_of(job: float | None, cluster: float | None) -> float | None:
    """Return the lease of a job's component on a cluster in seconds, None where silence does not end it.

    The job's own lease comes before the cluster's, and that before the default.
    """
    lease = next((lease for lease in (job, cluster) if lease is not None), DEFAULT_LEASE)
    return None if lease == NO_LEASE else lease


def with_margin(seconds: float) -> float:
    """Return after how many seconds of the daemon's clock a node has counted so many, and its processes are ended."""
    return seconds * (1 + CLOCK_RATE_MARGIN) + END_MARGIN
