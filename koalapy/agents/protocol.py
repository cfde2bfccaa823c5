"""What an agent and the daemon say to each other: JSON frames over one WebSocket, each frame a list of messages.

The agent speaks in snapshots, so that anything may be said twice: ``Status`` is all an agent knows of one component,
``Report`` all it knows of its cluster. The daemon speaks in commands, each with an id that the agent acknowledges and
an epoch below which it refuses them. ``PROTOCOL`` rises with every change that an older side would misread.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic_core import PydanticSerializationError

PROTOCOL = 3

ReportedState = Literal["submitted", "waiting", "claimed", "running", "delivering", "ended"]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


# From the agent


class KnownDaemon(Message):
    """What an agent remembers of a daemon: the last epoch it served, whose it was, and the highest job it heard of.

    A daemon whose database was put back from a copy learns from it what it has forgotten.
    """

    instance: str
    epoch: int
    life: str = ""
    job: int = 0


class Hello(Message):
    """First message on a connection."""

    type: Literal["hello"] = "hello"
    cluster: str
    protocol: int = PROTOCOL
    version: str
    lrm: str
    host: str
    pid: int
    known: list[KnownDaemon] = []


class Status(Message):
    """One component as the agent sees it now.

    ``program_exit`` is told as soon as it is certain: non-zero when the first node's program failed, 0 when the
    program of the component is done everywhere (Open MPI: the head node's ``mpirun``). ``delivering`` means that the
    resource manager has the nodes back, and ``ended`` that the daemon has the results and the output as well.
    ``refused``: its resource manager did not take it, for ``error``, by the fault of the job itself, or for a limit
    that may be gone later; a fault of the cluster is an infrastructure failure.
    """

    type: Literal["status"] = "status"
    token: str
    state: ReportedState
    hosts: list[str] = []
    lrm_job: str | None = None
    program_exit: int | None = None
    error: str = ""
    infrastructure: bool = False
    refused: Literal["", "job", "limit"] = ""
    missing: str = ""
    """What of its output will never come, and why."""


class Report(Message):
    """Node counts of the cluster; ``holding`` are the tokens of ours whose nodes are counted as not idle."""

    type: Literal["report"] = "report"
    total: int
    idle: int
    background: int
    down: int
    holding: list[str]
    problem: str = ""
    """Why nothing can be started there: the counts could not be read, or the resource manager takes no jobs."""
    notices: list[str] = []
    """What people should know beside that, such as jobs of ours that the resource manager does not let go."""
    lacks: list[str] = []
    """Programs that are missing on the agent's host, and that some jobs need."""


class Moved(Message):
    """One transfer between two clusters that is over: bytes and seconds."""

    source: str
    size: int
    seconds: float


class StageStatus(Message):
    """The files that are brought to one component, as the agent sees them now: bytes; see ``events.StageUpdated``."""

    type: Literal["stage_status"] = "stage_status"
    token: str
    state: Literal["running", "done", "failed"]
    size: int
    staged: int
    error: str = ""
    fault: Literal["site", "source", "file"] = "site"
    source: str = ""
    file: str = ""
    moved: list[Moved] = []
    """Of a stage that is done: what came from where, and how fast."""


class Inventory(Message):
    """Everything the agent and its resource manager hold for this daemon; sent once after ``Welcome``."""

    type: Literal["inventory"] = "inventory"
    components: list[Status]
    stages: list[StageStatus] = []


class Output(Message):
    """A piece of a component's output, base64; ``offset`` in bytes from the component's first byte.

    The agent has nothing any more of the ``gap`` bytes before it: they were acknowledged, left out or lost.
    """

    type: Literal["output"] = "output"
    token: str
    offset: int
    data: str
    gap: int = 0


class Ack(Message):
    """A command was carried out, or had been before; ``error`` when the agent refuses it for good."""

    type: Literal["ack"] = "ack"
    id: int
    error: str = ""


class Relay(Message):
    """Something one runner has for another, by way of agents and daemon; not kept, not repeated."""

    type: Literal["relay"] = "relay"
    token: str
    node: int
    payload: dict[str, object]
    sender: str
    sender_node: int


class Ask(Message):
    """A question to an agent, by another agent or by the daemon itself; not kept, not repeated: ask again.

    From an agent ``cluster`` is whom it asks; to an agent, who asks, and empty for the daemon.
    """

    type: Literal["ask"] = "ask"
    ident: str
    what: str
    payload: dict[str, object]
    cluster: str = ""


class Answer(Message):
    """To whom asked under ``ident``; ``error`` when there is no answer, with ``fault`` a word for machines.

    From an agent ``cluster`` is who had asked; to an agent, who answers.
    """

    type: Literal["answer"] = "answer"
    ident: str
    payload: dict[str, object] = {}
    error: str = ""
    fault: str = ""
    cluster: str = ""


class Confirmed(Message):
    """The answer to a ``Probe``: whatever was known when it came has been told before this."""

    type: Literal["confirmed"] = "confirmed"
    sequence: int = Field(ge=1, le=2**53)


# From the daemon


class Welcome(Message):
    """Answer to ``Hello``; commands of an epoch below this one are refused from now on, by later agents too.

    ``life`` tells two daemons apart that have the same epoch, as when a database was put back from a copy.
    """

    type: Literal["welcome"] = "welcome"
    protocol: int = PROTOCOL
    epoch: int
    instance: str
    life: str = ""
    lease: float
    """Seconds without any word from its agent after which a runner ends itself."""
    output_limit: int = 64 * 1024 * 1024
    """Bytes of each component's output that the daemon keeps: half of them the head, half the tail."""


class Submit(Message):
    """Hand a component's runner to the resource manager: ``size`` nodes, exclusive."""

    type: Literal["submit"] = "submit"
    id: int
    epoch: int
    token: str
    size: int
    name: str
    """For people looking at the LRM's own queue."""
    walltime: float | None = None
    stage: str | None = None
    """The stage whose folder is the component's own: its working directory unless the user gave another."""
    collect: list[str] = []
    """Patterns of files in that folder to be handed to the daemon before the component counts as ended."""


class PlanNode(Message):
    """One node of the whole gang."""

    host: str
    cluster: str
    token: str
    node: int
    """Index of the node within its component."""
    slots: int


class PlanContext(Message):
    """One component's program. ``nodes`` are indices into the plan's nodes."""

    token: str
    command: list[str]
    environment: dict[str, str]
    workdir: str | None
    output: str | None
    nodes: list[int]


class Open(Message):
    """The barrier is open: start. The plan is the same for all; ``head`` names the component whose node 0 leads."""

    type: Literal["open"] = "open"
    id: int
    epoch: int
    token: str
    job: int
    generation: int
    launcher: Literal["openmpi", "processes"]
    head: str
    nodes: list[PlanNode]
    contexts: list[PlanContext]


class Stop(Message):
    """End a component, whatever it is doing; for one never submitted, make sure that it never will be."""

    type: Literal["stop"] = "stop"
    id: int
    epoch: int
    token: str
    reason: str


class Forget(Message):
    """The daemon has all it wants of an ended component; the agent may remove its files."""

    type: Literal["forget"] = "forget"
    id: int
    epoch: int
    token: str


class StageFile(Message):
    """One input: a replica on a file site, and what it is to be called in the stage's folder.

    ``path`` is absolute on the file site, of the file or folder as a whole; ``part`` the entry of it that is wanted.
    ``size`` in bytes and ``checksum`` are those of what is wanted. Where ``source`` is the agent's own cluster, nothing
    is moved: the folder gets a symbolic link.
    """

    name: str
    source: str
    path: str
    part: str | None = None
    target: str
    size: int
    checksum: str


class StageBundle(Message):
    """The submitter's own files: an archive that the daemon keeps under its SHA-256."""

    id: str
    size: int


class Stage(Message):
    """Bring files into a folder of the component's own, and tell by ``StageStatus`` how that goes.

    There is a folder even when nothing is to be brought: results may be collected from it.
    """

    type: Literal["stage"] = "stage"
    id: int
    epoch: int
    token: str
    files: list[StageFile]
    bundle: StageBundle | None = None


class Unstage(Message):
    """A stage is not wanted any more: end what is on its way and remove the folder; no error when there is none."""

    type: Literal["unstage"] = "unstage"
    id: int
    epoch: int
    token: str


class Probe(Message):
    """Are you there? With ``look``: ask the resource manager, hear the runners out, tell what is news, and say so."""

    type: Literal["probe"] = "probe"
    sequence: int
    look: bool


class OutputAck(Message):
    """Output up to ``offset`` is stored, as far as it is kept; never sent for a piece that could not be stored."""

    type: Literal["output_ack"] = "output_ack"
    token: str
    offset: int


class RelayFailed(Message):
    """A relay could not be delivered; told to the sender's runner."""

    type: Literal["relay_failed"] = "relay_failed"
    token: str
    node: int
    reason: str


FromAgent = Annotated[
    Hello | Status | Report | Inventory | StageStatus | Output | Ack | Relay | Ask | Answer | Confirmed,
    Field(discriminator="type"),
]
Command = Submit | Open | Stop | Forget | Stage | Unstage
FromDaemon = Annotated[
    Welcome | Submit | Open | Stop | Forget | Stage | Unstage | OutputAck | Relay | RelayFailed | Ask | Answer | Probe,
    Field(discriminator="type"),
]

from_agent: TypeAdapter[list[FromAgent]] = TypeAdapter(list[FromAgent])
from_daemon: TypeAdapter[list[FromDaemon]] = TypeAdapter(list[FromDaemon])


def frame(speaker: TypeAdapter[Any], messages: Sequence[Any]) -> str:
    """Messages as they are sent, ``speaker`` being ``from_agent`` or ``from_daemon``.

    What resource managers, file systems and configurations say may hold lone surrogates: that costs nobody the
    connection.
    """
    try:
        return speaker.dump_json(messages).decode()
    except PydanticSerializationError:
        plain = speaker.dump_python(messages)
        return json.dumps(plain, ensure_ascii=False).encode(errors="replace").decode()
