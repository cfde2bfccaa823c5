"""What an agent and the daemon say to each other: JSON frames over one WebSocket, each frame a list of messages.

The agent speaks in snapshots (``model/reports.py``), which are the scheduler's own and may come twice: what they do not
say of themselves is whose they are. The daemon speaks in commands, each with an id that the agent acknowledges and
an epoch below which it refuses them. ``PROTOCOL`` rises with every change that an older side would misread.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Interval
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic_core import PydanticSerializationError
from typing_extensions import TypedDict

from koalapy.model.bounds import (
    MAX_LISTED,
    MAX_NODES,
    Base64,
    Bytes,
    Count,
    Host,
    Name,
    Nodes,
    Number,
    Path,
    Seconds,
    TruncatedText,
)
from koalapy.model.errors import SiteFault
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory, StageStatus

PROTOCOL = 3
MAX_FRAME_SIZE = 64 * 1024 * 1024
"""Bytes of a frame that agent and daemon accept from each other; a larger one costs the connection."""
MAX_BATCH_SIZE = 16 * 1024 * 1024
"""Characters of a frame with several messages; more are sent in several frames."""
COMMANDS_FRAME_SIZE = 1024 * 1024
"""The same of the daemon's commands: to send a frame must not keep other tasks waiting."""

ProbeNumber = Annotated[int, Interval(ge=1, le=2**53)]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


# From the agent


class KnownDaemon(Message):
    """What an agent remembers of a daemon: the last epoch it served, whose it was, and the highest job it heard of.

    A daemon whose database was put back from a copy learns from it what it has forgotten.
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
    version: Name
    lrm: Name
    host: Name
    pid: Count
    identity: Name = "service"
    """Whose processes it makes jobs, by its own configuration."""
    known: Annotated[list[KnownDaemon], Field(max_length=1000)] = []


class Output(Message):
    """A piece of a component's output, base64; ``offset`` in bytes from the component's first byte.

    The agent has nothing any more of the ``gap`` bytes before it: they were acknowledged, left out or lost.
    """

    type: Literal["output"] = "output"
    token: Name
    offset: Annotated[int, Interval(ge=0, le=2**52)]
    """So that where it ends is a number of bytes, too."""
    data: Base64
    gap: Bytes = 0


class Ack(Message):
    """A command was carried out, or had been before; ``error`` when the agent refuses it for good."""

    type: Literal["ack"] = "ack"
    id: Number
    error: TruncatedText = ""


class Relay(Message):
    """Something one runner has for another, by way of agents and daemon; not kept, not repeated."""

    type: Literal["relay"] = "relay"
    token: Name
    node: Nodes
    payload: dict[str, object]
    sender: Name
    sender_node: Nodes


class Ask(Message):
    """A question to an agent, by another agent or by the daemon itself; not kept, not repeated: ask again.

    From an agent ``cluster`` is whom it asks; to an agent, who asks, and empty for the daemon.
    """

    type: Literal["ask"] = "ask"
    ident: Name
    what: Name
    payload: dict[str, object]
    cluster: Name = ""


class Answer(Message):
    """To whom asked under ``ident``; ``error`` and ``fault`` when there is no answer.

    From an agent ``cluster`` is who had asked; to an agent, who answers.
    """

    type: Literal["answer"] = "answer"
    ident: Name
    payload: dict[str, object] = {}
    error: TruncatedText = ""
    fault: SiteFault | None = None
    cluster: Name = ""


class Confirmed(Message):
    """The answer to a ``Probe``: whatever was known when it came has been told before this."""

    type: Literal["confirmed"] = "confirmed"
    sequence: ProbeNumber


class Vouch(Message):
    """An account of the head node asks for a login, and the kernel said to the agent which it is.

    Whose it is among the grid's users the daemon knows; it is an account of the agent's own cluster, whatever it says.
    """

    type: Literal["vouch"] = "vouch"
    ident: Name
    account: Name
    uid: Number
    runs_jobs: bool = False
    """Whether the cluster's jobs run as this account, so that a job may be what asks."""


class RenewLease(Message):
    """Ask the daemon for a word that it is there; its answer counts from the moment at which this was sent."""

    type: Literal["renew_lease"] = "renew_lease"
    number: Number


class Impostor(Message):
    """Somebody claimed to be the runner of a node, and was refused; so many times since that was told last.

    ``forged``: without its secret. ``second``: with it, though its runner is another process.
    """

    type: Literal["impostor"] = "impostor"
    token: Name
    node: Nodes
    how: Literal["forged", "second"]
    address: Name = ""
    lrm_job: Name = ""
    """The job of the resource manager in which it claimed to be."""
    times: Count = 1


class FoundPart(Message):
    """One entry of a folder."""

    name: Path
    size: Bytes
    checksum: Name


class Found(Message):
    """The payload of an answer to ``stat``: what there is at a path."""

    path: Path
    size: Bytes
    checksum: Name
    parts: Annotated[list[FoundPart], Field(max_length=MAX_LISTED)] | None = None


# From the daemon


class Welcome(Message):
    """Answer to ``Hello``; commands of an epoch below this one are refused from now on, by later agents too.

    ``life`` tells two daemons apart that have the same epoch, as when a database was put back from a copy.
    """

    type: Literal["welcome"] = "welcome"
    protocol: Count = PROTOCOL
    epoch: Count
    instance: Name
    life: Name = ""
    output_limit: Bytes = 64 * 1024 * 1024
    """Bytes of each component's output that the daemon keeps: half of them the head, half the tail."""
    users_url: Path = ""
    """Where users reach it, if not where the agent does."""


class LeaseRenewed(Message):
    """The answer to a ``RenewLease``: the daemon is there, and knows that it has said so."""

    type: Literal["lease_renewed"] = "lease_renewed"
    number: Number


class Vouched(Message):
    """The answer to a ``Vouch``: a login for so many seconds, or why there is none, and the way out."""

    type: Literal["vouched"] = "vouched"
    ident: Name
    token: Annotated[Name, Field(repr=False)] = ""
    user: Name = ""
    role: Name = ""
    lifetime: Seconds = 0.0
    error: TruncatedText = ""
    hint: TruncatedText = ""


class Command(Message):
    """What an agent is to do with a component or its stage: acknowledged by its id, refused when its epoch is over."""

    type: str
    id: Number
    epoch: Count
    token: Name


class Submit(Command):
    """Hand a component's runner to the resource manager: ``size`` nodes, exclusive."""

    type: Literal["submit"] = "submit"
    size: Nodes
    name: Path
    """For people looking at the LRM's own queue."""
    walltime: Seconds | None = None
    stage: Name | None = None
    """The stage whose folder is the component's own: its working directory unless the user gave another."""
    collect: list[str] = []
    """Patterns of files in that folder to be handed to the daemon before the component counts as ended."""
    local_user: Name = ""
    """The account on the cluster that the job is to run as, where its agent acts for many; empty where it does not."""
    node_class: Name = ""
    """Which of the cluster's nodes it is to get, by a name that its reports have; empty: any."""
    lease: Seconds | None = None
    """Seconds of the daemon's silence after which agent and runners end it; None: silence does not end it."""


class PlanNode(TypedDict):
    """One node of the whole gang; a plain dictionary, for there may be many thousands."""

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
    """Whether it may run elsewhere where that folder is not there."""
    output: str | None
    nodes: Annotated[list[Nodes], Field(max_length=MAX_NODES)]


class PlanWarning(TypedDict):
    """What the program is told so many seconds after its start, and the seconds that are left then."""

    signal: Name
    after: Seconds
    grace: Seconds


class LeaseWarning(TypedDict):
    """What the program is told when its lease is over, and the seconds that it has from then on."""

    signal: Name
    grace: Seconds


class Open(Command):
    """The barrier is open: start. The plan is the same for all; ``head`` names the component whose node 0 leads."""

    type: Literal["open"] = "open"
    job: Number
    generation: Count
    launcher: Literal["openmpi", "processes"]
    head: Name
    nodes: Annotated[list[PlanNode], Field(max_length=MAX_NODES)]
    contexts: list[PlanContext]
    warning: PlanWarning | None = None
    """Of the end of its walltime."""
    lease_warning: LeaseWarning | None = None
    walltime: Seconds | None = None
    """Seconds after the start of the program at which its runners end it by themselves."""

    def plan(self) -> dict[str, Any]:
        """What the runners are told; the lists are not copied."""
        return {name: value for name, value in self if name not in ("type", "id", "epoch")}


class Stop(Command):
    """End a component, whatever it is doing; for one never submitted, make sure that it never will be.

    With a ``signal`` its program is told that first, and has ``grace`` seconds to end by itself, unless another stop
    has none.
    """

    type: Literal["stop"] = "stop"
    reason: TruncatedText
    signal: Name = ""
    """Its name without ``SIG``."""
    grace: Seconds = 0.0


class Forget(Command):
    """The daemon has all it wants of an ended component; the agent may remove its files."""

    type: Literal["forget"] = "forget"


class StageFile(Message):
    """One input: a replica on a file site, and what it is to be called in the stage's folder.

    ``path`` is absolute on the file site, of the file or folder as a whole; ``part`` the entry of it that is wanted.
    ``size`` in bytes and ``checksum`` are those of what is wanted. Where ``source`` is the agent's own cluster, nothing
    is moved: the folder gets a symbolic link.
    """

    name: Path
    source: Name
    path: Path
    part: Path | None = None
    target: Path
    size: Bytes
    checksum: Name


class StageBundle(Message):
    """The submitter's own files: an archive that the daemon keeps under its SHA-256."""

    id: str
    size: Bytes


class Stage(Command):
    """Bring files into a folder of the component's own, and tell by ``StageStatus`` how that goes.

    There is a folder even when nothing is to be brought: results may be collected from it.
    """

    type: Literal["stage"] = "stage"
    files: list[StageFile]
    bundle: StageBundle | None = None
    local_user: Name = ""


class Unstage(Command):
    """A stage is not wanted any more: end what is on its way and remove the folder; no error when there is none."""

    type: Literal["unstage"] = "unstage"


class Probe(Message):
    """Are you there? With ``look``: ask the resource manager, hear the runners out, tell what is news, and say so.

    ``awaited``: jobs wait for nodes here, so that those which others give back are worth looking for more often.
    """

    type: Literal["probe"] = "probe"
    sequence: ProbeNumber
    look: bool
    awaited: bool = False


class OutputAck(Message):
    """Output up to ``offset`` is stored, as far as it is kept; never sent for a piece that could not be stored."""

    type: Literal["output_ack"] = "output_ack"
    token: Name
    offset: Bytes


class RelayFailed(Message):
    """A relay could not be delivered; told to the sender's runner."""

    type: Literal["relay_failed"] = "relay_failed"
    token: Name
    node: Nodes
    reason: TruncatedText


FromAgent = Annotated[
    Hello
    | ComponentStatus
    | ClusterReport
    | Inventory
    | StageStatus
    | Output
    | Ack
    | Relay
    | Ask
    | Answer
    | Confirmed
    | Vouch
    | RenewLease
    | Impostor,
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
    | Relay
    | RelayFailed
    | Ask
    | Answer
    | Probe
    | LeaseRenewed
    | Vouched,
    Field(discriminator="type"),
]

from_agent: TypeAdapter[list[FromAgent]] = TypeAdapter(list[FromAgent])
from_daemon: TypeAdapter[list[FromDaemon]] = TypeAdapter(list[FromDaemon])


def frames(
    messages: Sequence[Any], encode: Callable[[Sequence[Any]], str], max_size: int = MAX_BATCH_SIZE
) -> Iterator[str]:
    """Yield messages in frames of at most ``max_size`` characters; a larger message is a frame of its own."""
    whole = encode(messages)
    if len(whole) <= max_size or len(messages) == 1:
        yield whole
    else:
        half = len(messages) // 2
        yield from frames(messages[:half], encode, max_size)
        yield from frames(messages[half:], encode, max_size)


def frame(speaker: TypeAdapter[Any], messages: Sequence[Any]) -> str:
    """Messages as they are sent, ``speaker`` being ``from_agent`` or ``from_daemon``.

    What resource managers, file systems and configurations say may hold lone surrogates: that costs nobody the
    connection.
    """
    try:
        return speaker.dump_json(messages).decode()
    except PydanticSerializationError:
        plain = speaker.dump_python(messages)
        return json.dumps(plain, ensure_ascii=False, default=list).encode(errors="replace").decode()


@dataclass(frozen=True, slots=True)
class Plan:
    """The part of an ``Open`` that is the same for all components of an attempt, as JSON that is made once."""

    job: int
    generation: int
    text: str = field(repr=False)

    @classmethod
    def of(cls, content: dict[str, Any]) -> "Plan":
        return cls(content["job"], content["generation"], _dumps(content))

    @property
    def key(self) -> tuple[int, int]:
        return self.job, self.generation


PLAN = "plan"
"""The key of a command's ``Plan``, whose content stands in its place in the frame."""


def command_frames(messages: Iterable[dict[str, Any] | Message]) -> Iterator[str]:
    """Yield the daemon's messages in frames of at most ``COMMANDS_FRAME_SIZE``; a larger message is a frame of its own.

    Messages that the daemon stores are dictionaries, and are not checked again.
    """
    texts: list[str] = []
    size = 0
    for text in map(_command_text, messages):
        if texts and size + len(text) > COMMANDS_FRAME_SIZE:
            yield f"[{','.join(texts)}]"
            texts, size = [], 0
        texts.append(text)
        size += len(text) + 1
    if texts:
        yield f"[{','.join(texts)}]"


def _command_text(message: dict[str, Any] | Message) -> str:
    plan = message.get(PLAN) if isinstance(message, dict) else None
    if not isinstance(plan, Plan):
        return _dumps(message)
    own = {name: value for name, value in message.items() if name != PLAN}  # type: ignore[union-attr]
    return f"{_dumps(own)[:-1]},{plan.text[1:]}"


def _dumps(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=Message.model_dump)
    return text.encode(errors="replace").decode()
