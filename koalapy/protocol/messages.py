"""Define the messages between agents and daemon: JSON frames over one WebSocket, each frame a list of messages.

An agent sends snapshots (``model/reports.py``), which the scheduler uses as they are and which may arrive twice. The
cluster of a snapshot is that of the connection. The daemon sends commands, each with an id that the agent acknowledges,
and an epoch, the number of the daemon run: agents reject commands of an earlier one. ``PROTOCOL`` increases with every
incompatible change.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Interval
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from koalapy.model.bounds import (
    MAX_NODES,
    Base64,
    Bytes,
    Count,
    ExitCode,
    Host,
    Label,
    MaxEntries,
    Name,
    Nodes,
    Number,
    Path,
    Port,
    Seconds,
    ShortText,
    TerminalSize,
    TruncatedText,
)
from koalapy.model.errors import SiteFault
from koalapy.model.node_requirement import MAX_CORES, NodeRequirement
from koalapy.model.replica import StageFile
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory, StageStatus

PROTOCOL = 3
MAX_CERTIFICATE_LENGTH = 16_384
MAX_RANGES = 100
"""Ranges of ports of one node."""
ProbeNumber = Annotated[int, Interval(ge=1, le=2**53)]
MAX_START = 2**51
"""Most bytes before the first known one of a stream: half of the maximum offset, so that offsets stay valid."""
Start = Annotated[int, Interval(ge=0, le=MAX_START)]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


# Streams: bytes between a client and a node, which nothing stores


class StreamData(Message):
    """A piece of a stream, at ``offset`` bytes from its beginning in this direction; ``is_last``: none follows.

    A sender is never more than ``STREAM_WINDOW`` bytes ahead of the last ``StreamCredit``.
    """

    type: Literal["stream_data"] = "stream_data"
    stream: Name
    offset: Annotated[int, Interval(ge=0, le=2**52)]
    data: Base64
    is_last: bool = False


class StreamCredit(Message):
    """A report that the receiver has used the bytes before ``offset`` and has no copy of them left."""

    type: Literal["stream_credit"] = "stream_credit"
    stream: Name
    offset: Bytes


class StreamEnd(Message):
    """The end of a stream: with the exit code of its program, or with the reason."""

    type: Literal["stream_end"] = "stream_end"
    stream: Name
    code: ExitCode | None = None
    error: TruncatedText = ""


class StreamOpened(Message):
    """The answer to a ``StreamOpen``: the name of the node, and the bytes of input that its program used before."""

    type: Literal["stream_opened"] = "stream_opened"
    stream: Name
    node: Name
    used: Start = 0


class StreamOpen(Message):
    """A request of a job's user for a stream to a node of a component.

    ``terminal``: a pseudo-terminal with ``command``, by default the login shell of the job's account. ``input``: the
    standard input of the job's program.
    """

    type: Literal["stream_open"] = "stream_open"
    stream: Name
    token: Name
    node: Name = ""
    """Its index within the component, its name or its address; empty: the first."""
    kind: Literal["terminal", "input"]
    command: list[Path] = []
    rows: TerminalSize = 0
    columns: TerminalSize = 0
    """0: unknown."""
    term: Name = ""
    """Type of the client's terminal."""
    user: Name
    is_owner: bool
    """Whether the user is the job's owner, and not an administrator."""


class StreamResize(Message):
    """The new size of a client's terminal."""

    type: Literal["stream_resize"] = "stream_resize"
    stream: Name
    rows: TerminalSize
    columns: TerminalSize


StreamFromNode = StreamOpened | StreamData | StreamCredit | StreamEnd
StreamToNode = StreamOpen | StreamData | StreamCredit | StreamResize | StreamEnd


# From the agent


class KnownDaemon(Message):
    """An agent's record of a daemon: number and id of its last run, and its highest job number.

    After its database was restored from a backup, a daemon learns from it which epochs and job numbers are in use.
    """

    instance: Name
    epoch: Count
    life: Name = ""
    job: Number = 0


class Hello(Message):
    """First message on a connection."""

    type: Literal["hello"] = "hello"
    cluster: Name
    protocol: Count = PROTOCOL
    version: Label
    lrm: Label
    host: ShortText
    pid: Count
    identity: Name = "service"
    """The configured identity of its jobs: ``own``, ``service`` or ``mapped``."""
    interactive: Name = ""
    """The site's setting ``interactive``; empty for an agent of a version without streams."""
    accepts_scripts: bool | None = None
    """Whether a script at another site may choose the programs of its job here; None: the agent does not say."""
    container_runtime: Name | None = None
    """The program that runs container images there, empty without one; None: an agent of a version that does not say,
    and may run the programs of a job without its image."""
    joins_opens: bool = False
    """Whether the agent accepts ``Open.others``."""
    reserves: bool = False
    """Whether the agent knows reservations; an older one ignores ``Submit.reservation``."""
    known: Annotated[list[KnownDaemon], MaxEntries(1000)] = []


class Output(Message):
    """A piece of a component's output in base64, at ``offset`` bytes from its beginning.

    The agent no longer has the ``gap`` bytes before it: they were acknowledged, left out or lost.
    """

    type: Literal["output"] = "output"
    token: Name
    offset: Annotated[int, Interval(ge=0, le=2**52)]
    """Below the maximum of ``Bytes``, so that the end of the piece is a valid offset."""
    data: Base64
    gap: Bytes = 0


class Ack(Message):
    """The acknowledgement of a command that was executed, now or earlier; ``error``: it was rejected finally."""

    type: Literal["ack"] = "ack"
    id: Number
    error: TruncatedText = ""


class Relay(Message):
    """A message from one runner to another through agents and daemon, which neither store nor repeat it."""

    type: Literal["relay"] = "relay"
    token: Name
    node: Nodes
    payload: dict[str, object]
    sender: Name
    sender_node: Nodes


class Ask(Message):
    """A query to an agent, from another agent or the daemon, which is neither stored nor repeated.

    ``cluster``: sent by an agent, the cluster to query; sent to an agent, the querying cluster, empty for the daemon.
    """

    type: Literal["ask"] = "ask"
    ident: Name
    what: Name
    payload: dict[str, object]
    cluster: Name = ""


class Answer(Message):
    """The answer to the query ``ident``, or ``error`` and ``fault`` if the query failed.

    ``cluster``: sent by an agent, the cluster that queried; sent to an agent, the cluster that answers.
    """

    type: Literal["answer"] = "answer"
    ident: Name
    payload: dict[str, object] = {}
    error: TruncatedText = ""
    fault: SiteFault | None = None
    cluster: Name = ""


class Confirmed(Message):
    """The answer to a ``Probe``: the agent has reported everything that it knew when the probe arrived."""

    type: Literal["confirmed"] = "confirmed"
    sequence: ProbeNumber
    clock: Annotated[float, Interval(ge=-1e10, le=1e11)] | None = None
    """The agent's wall clock in seconds since 1970, in a year that dates can show.

    None: an agent of a version that does not send it.
    """


class Vouch(Message):
    """A request for a login of an account of the head node, which the kernel named to the agent.

    The daemon maps the account to a user of the grid, as an account of the agent's own cluster.
    """

    type: Literal["vouch"] = "vouch"
    ident: Name
    account: Name
    uid: Number
    runs_jobs: bool = False
    """Whether the cluster's jobs run as this account, so that the request may come from a job."""


class RenewLease(Message):
    """A request to renew the agent's lease; the answer counts from the time at which this was sent."""

    type: Literal["renew_lease"] = "renew_lease"
    number: Number


class RejectedRunner(Message):
    """A report that a process claimed to be the runner of a node and was rejected.

    ``forged``: it lacked the node's secret. ``second``: it had the secret, but another process is the runner.
    ``times``: rejections since the last report.
    """

    type: Literal["impostor"] = "impostor"
    token: Name
    node: Nodes
    how: Literal["forged", "second"]
    address: Name = ""
    lrm_job: Name = ""
    """The job of the resource manager that it claimed to run in."""
    times: Count = 1


class RelayState(Message):
    """Whether jobs may use relayed links of this site: sent after each ``Welcome`` and at each change.

    An agent without the setting ``relay``, or of an older version, sends none.
    """

    type: Literal["relay_state"] = "relay_state"
    ready: bool
    """Whether the head, the agent's relay, is connected to the hub."""
    error: TruncatedText = ""
    """The reason if it is not."""
    certificate: Annotated[str, Field(max_length=MAX_CERTIFICATE_LENGTH)] | None = None
    """The certificate of the head (PEM), which heads of other sites accept; None: they do without TLS."""
    host: Host | Literal[""] = ""
    port: Port = 0
    """Address at which heads of other sites reach this one directly; empty and 0: by the hub."""
    relayed_only: bool = False
    """Whether the site demands that MPI messages to and from other sites are relayed, and so encrypted."""


# From the daemon


class Welcome(Message):
    """The answer to ``Hello``. From now on this agent and its successors reject commands of older epochs (daemon runs).

    ``life`` identifies the daemon run. It differs between daemons of the same epoch, as after a restore from a backup.
    """

    type: Literal["welcome"] = "welcome"
    protocol: Count = PROTOCOL
    epoch: Count
    instance: Name
    life: Name = ""
    output_limit: Bytes = 64 * 1024 * 1024
    """Bytes of each component's output that the daemon keeps, half at the beginning and half at the end."""
    users_url: Path = ""
    """The daemon's URL for users, if it differs from the agent's."""
    relays: bool = False
    """Whether the daemon accepts ``RelayState``, which an older one would take for an invalid message."""


class LeaseRenewed(Message):
    """The answer to a ``RenewLease``, which the daemon has recorded."""

    type: Literal["lease_renewed"] = "lease_renewed"
    number: Number


class Vouched(Message):
    """The answer to a ``Vouch``: a login and its lifetime, or an error and a hint."""

    type: Literal["vouched"] = "vouched"
    ident: Name
    token: Annotated[Name, Field(repr=False)] = ""
    user: Name = ""
    role: Name = ""
    lifetime: Seconds = 0.0
    error: TruncatedText = ""
    hint: TruncatedText = ""


class Command(Message):
    """An order for a component or its stage, acknowledged by its id."""

    type: str
    id: Number
    epoch: Count
    token: Name


class Submit(Command):
    """Hand a component's runner to the resource manager: ``size`` nodes, exclusive."""

    type: Literal["submit"] = "submit"
    size: Nodes
    name: Path
    """The name to show in the resource manager's own queue."""
    walltime: Seconds | None = None
    stage: Name | None = None
    """The stage that contains the component's working directory, unless the user gave another."""
    collect: list[str] = []
    """Patterns of files in that folder to send to the daemon before the component counts as ended."""
    local_user: Name = ""
    """The account to run the job as, if the agent acts for several accounts; else empty."""
    node_class: Name = ""
    """The node class to use, as named in the cluster's reports; empty: any."""
    requirement: NodeRequirement | None = None
    """What each node must have, and the account to charge."""
    reservation: Name = ""
    """The reservation that has the nodes; empty: none."""
    lease: Seconds | None = None
    """Seconds of the daemon's silence after which agent and runners end it; None: silence does not end it."""


# The plan of a job, as an ``Open`` tells it to the nodes


class PlanNode(TypedDict):
    """One node of the job; a plain dictionary, since there may be many thousands."""

    host: Host
    cluster: Name
    token: Name
    node: Nodes
    """Index of the node within its component."""
    slots: Count


class PlanContext(TypedDict):
    """One component's program. ``nodes`` are indices into the plan's nodes."""

    token: Name
    command: list[str]
    environment: dict[str, str]
    workdir: str | None
    workdir_optional: NotRequired[bool]
    """Whether the program may run in another folder if that one cannot be entered."""
    output: str | None
    """File for the output, in which ``%N`` is the node, ``%r`` the rank and ``%%`` a percent sign."""
    error: NotRequired[str | None]
    """File for the error stream, which is kept apart then."""
    label: NotRequired[bool]
    """Whether lines begin with their rank. The error stream is kept apart then."""
    container: NotRequired[str | None]
    """Path of the container image that the program runs in."""
    nodes: Annotated[list[Nodes], Field(max_length=MAX_NODES)]


class LeaseWarning(TypedDict):
    """The signal to send when the lease is over, and the seconds of grace from then on."""

    signal: Name
    grace: Seconds


class PlanWarning(LeaseWarning):
    """The signal to send ``after`` seconds from the start, and the seconds of grace that remain then."""

    after: Seconds


class PlanRelay(TypedDict):
    """The relayed links that a job may use (docs/adr/0034-relayed-links.md)."""

    attempt: Name
    """Name of the attempt at the relays."""
    pairs: list[tuple[Name, Name, Literal["any", "relayed"]]]
    """Pairs of clusters, each sorted by name, that may be relayed. ``any``: only if their nodes do not reach each
    other directly. Other pairs are direct."""
    bases: list[int]
    """First ports of alternative layouts (``runner/relay_links.py``), to be tried in this order. Empty: relayed links
    cannot be used, so that a job that needs them fails."""


class RelayEntryNode(TypedDict):
    """A node of an attempt, and the ports that streams of other nodes may reach."""

    index: Nodes
    cluster: Name
    ports: Annotated[list[tuple[Port, Port]], Field(max_length=MAX_RANGES)]


class RelayEntry(TypedDict):
    """An attempt for the head of one cluster (``AttemptPlan.head_entry``)."""

    attempt: Name
    nodes: Annotated[list[RelayEntryNode], Field(max_length=MAX_NODES)]
    keys: dict[Name, Name]
    """In hex, by the other cluster."""
    peers: dict[Name, dict[str, Any]]
    streams: NotRequired[Count]


class OtherOpen(TypedDict):
    """The fields of an ``Open`` that differ between the components of an attempt on one cluster."""

    id: Number
    token: Name
    script: NotRequired[str]


class Open(Command):
    """An order to start, with a plan that is the same for all components. Node 0 of component ``head`` leads."""

    type: Literal["open"] = "open"
    job: Number
    generation: Count
    launcher: Literal["openmpi", "processes"]
    head: Name
    nodes: Annotated[list[PlanNode], Field(max_length=MAX_NODES)]
    contexts: list[PlanContext]
    warning: PlanWarning | None = None
    """The warning before the end of the walltime."""
    lease_warning: LeaseWarning | None = None
    interactive: bool = False
    """Whether the program reads a client's standard input. The error stream is kept apart then."""
    walltime: Seconds | None = None
    """Seconds after the start at which runners end the program without the daemon."""
    is_script: bool = False
    """Whether node 0 of the head component runs a script, and starts programs on all nodes as the script asks."""
    script: str = ""
    """The text of the script; only the head component gets it."""
    cpus_per_rank: Annotated[int, Field(ge=1, le=MAX_CORES)] | None = None
    """Processors to which each rank is bound; None: ranks are not bound."""
    share: bool = False
    """Whether other jobs may use the remaining processors of the nodes."""
    relay: PlanRelay | None = None
    relay_entry: RelayEntry | None = None
    """The attempt for the head of this cluster, without the keys of its nodes; runners do not get it."""
    others: Annotated[list[OtherOpen], Field(max_length=MAX_NODES)] = []
    """Orders for other components of the attempt on this cluster, with the same plan."""

    def split(self) -> "Iterator[Open]":
        """Yield the order for each component as a separate message. They share the plan."""
        yield self.model_copy(update={"others": []})
        for node_fields in self.others:
            yield self.model_copy(update={"script": "", "others": [], **node_fields})

    def runner_message(self) -> dict[str, Any]:
        """Return the message for the runners. Share the lists with this one."""
        return {name: value for name, value in self if name not in ("type", "id", "epoch", "others")}


class Stop(Command):
    """An order to end a component in any state, or never to submit it.

    With a ``signal`` the program receives it first, and has ``grace`` seconds to end by itself, unless a later order
    has no grace.
    """

    type: Literal["stop"] = "stop"
    reason: TruncatedText
    signal: Name = ""
    """Its name without ``SIG``."""
    grace: Seconds = 0.0


class Forget(Command):
    """Permission to remove the files of an ended component, since the daemon has received everything."""

    type: Literal["forget"] = "forget"


class StageBundle(Message):
    """The submitter's own files: an archive that the daemon stores under its SHA-256."""

    id: str
    size: Bytes


class Stage(Command):
    """An order to copy files into a folder for the component, and to report progress by ``StageStatus``.

    The folder is created even without files, since results may be collected from it.
    """

    type: Literal["stage"] = "stage"
    files: list[StageFile]
    bundle: StageBundle | None = None
    result_names: list[Path] = []
    """Names of the results of other jobs, which the agent fetches from the daemon as one archive."""
    local_user: Name = ""


class Unstage(Command):
    """An order to end the transfers of a stage and remove its folder; no error if there is none."""

    type: Literal["unstage"] = "unstage"


class Probe(Message):
    """A check of the connection, which the agent answers by ``Confirmed``.

    ``look``: first poll the resource manager, handle all messages of runners, and report changes. ``awaited``: jobs
    wait for nodes of this cluster, so it is worth polling more often.
    """

    type: Literal["probe"] = "probe"
    sequence: ProbeNumber
    look: bool
    awaited: bool = False


class OutputAck(Message):
    """The acknowledgement that output up to ``offset`` is stored, as far as the limit keeps it."""

    type: Literal["output_ack"] = "output_ack"
    token: Name
    offset: Bytes


class RelayFailed(Message):
    """A report to the sending runner that a relay could not be delivered."""

    type: Literal["relay_failed"] = "relay_failed"
    token: Name
    node: Nodes
    reason: TruncatedText


class RelayLost(Message):
    """A report that the hub has lost streams of an attempt, for agents that have sent a ``RelayState``."""

    type: Literal["relay_lost"] = "relay_lost"
    attempt: Name
    reason: TruncatedText


Forwarded = Relay | Ask | Answer
FromAgent = Annotated[
    Hello
    | ComponentStatus
    | ClusterReport
    | Inventory
    | StageStatus
    | Output
    | Ack
    | Confirmed
    | Vouch
    | RenewLease
    | RejectedRunner
    | RelayState
    | Forwarded
    | StreamFromNode,
    Field(discriminator="type"),
]
FromDaemon = Annotated[
    Welcome
    | Submit
    | Open
    | Stop
    | Forget
    | Stage
    | Unstage
    | OutputAck
    | RelayFailed
    | RelayLost
    | Probe
    | LeaseRenewed
    | Vouched
    | Forwarded
    | StreamToNode,
    Field(discriminator="type"),
]

MAX_FRAME_MESSAGES = 50_000
"""Messages in a frame of an agent: more than a frame with several has within ``MAX_BATCH_SIZE``."""
from_agent: TypeAdapter[list[FromAgent]] = TypeAdapter(Annotated[list[FromAgent], MaxEntries(MAX_FRAME_MESSAGES)])
from_daemon: TypeAdapter[list[FromDaemon]] = TypeAdapter(list[FromDaemon])
