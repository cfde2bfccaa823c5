"""The messages of runners, one JSON object per line, validated before use."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, TypeAdapter

from koalapy.model.bounds import (
    Base64,
    Bytes,
    Count,
    ExitCode,
    Host,
    MaxEntries,
    Name,
    Nodes,
    Number,
    Payload,
    Seconds,
    TruncatedText,
)
from koalapy.model.reports import MAX_RELAYED_PAIRS, NamedPair
from koalapy.model.wording import escape_surrogates
from koalapy.protocol.messages import Start, StreamFromNode
from koalapy.runner.session import NONCE_SIZE


class RunnerMessage(BaseModel):
    """A message of a runner; newer runners may send further fields."""

    model_config = ConfigDict(extra="allow")


class Hello(RunnerMessage):
    """The claimed identity of a runner, and the nonce that the agent must prove itself with."""

    t: Literal["hello"]
    component: Name
    node: Nodes
    nonce: Annotated[str, StringConstraints(pattern=rf"^[0-9a-f]{{{2 * NONCE_SIZE}}}$")]


class Here(RunnerMessage):
    """The runner's state, sent after both sides are authenticated."""

    t: Literal["here"]
    life: Name
    host: Host
    name: Name
    phase: Literal["waiting", "opened", "running", "ending", "ended"]
    lrm_job: Name = ""
    start: Start = 0
    """Offset at which its output begins."""
    warned: bool = False
    streams: bool = False
    """Whether it serves streams; runners of earlier versions do not."""
    renew: Number = 0
    """Number of its question for the daemon's silence, which the welcome answers; 0 from earlier versions."""


class Out(RunnerMessage):
    t: Literal["out"]
    offset: Bytes
    data: Base64


class Running(RunnerMessage):
    t: Literal["running"]


class Warned(RunnerMessage):
    t: Literal["warned"]


class Ending(RunnerMessage):
    t: Literal["ending"]


class Renew(RunnerMessage):
    """A question for the daemon's silence."""

    t: Literal["renew"]
    number: Number


class Relay(RunnerMessage):
    t: Literal["relay"]
    token: Name
    node: Nodes
    payload: Payload


class RelayUsed(RunnerMessage):
    """The pairs of clusters between which the program's messages go through relays."""

    t: Literal["relay_used"]
    pairs: Annotated[list[NamedPair], MaxEntries(MAX_RELAYED_PAIRS)]
    unreached: Annotated[list[NamedPair], MaxEntries(MAX_RELAYED_PAIRS)] | None = None
    """Those that need relays; None, from runners of earlier versions, for all."""


class NodeUsage(RunnerMessage):
    """The use of a node by the program while it ran."""

    cpu: Seconds
    """Processor seconds of its processes."""
    seconds: Seconds
    processors: Count
    memory: Bytes
    """Largest memory of its processes together."""


class Stream(RunnerMessage):
    """What a node sends on a client's stream."""

    t: Literal["stream"]
    message: Annotated[StreamFromNode, Field(discriminator="type")]


class NodeEnd(RunnerMessage):
    """How the program of a node has ended."""

    code: ExitCode | None
    error: Annotated[
        TruncatedText, BeforeValidator(lambda text: escape_surrogates(text) if isinstance(text, str) else text)
    ]
    """May contain file names, which are arbitrary bytes."""
    infrastructure: bool
    stopped: bool
    warned: bool = False
    usage: NodeUsage | None = None
    """None from runners of versions without this field, and if the program never started."""


class Exit(NodeEnd):
    t: Literal["exit"]


class RunnerResult(NodeEnd):
    """The result that a runner saves in its spool, where programs may write as well."""

    host: Host | Literal[""]
    """Empty if it was never known."""
    name: Name
    output: Bytes | None = None


_message: TypeAdapter[RunnerMessage] = TypeAdapter(
    Annotated[
        Here | Out | Running | Warned | Ending | Renew | Relay | RelayUsed | Stream | Exit, Field(discriminator="t")
    ]
)


def parse_message(line: bytes) -> dict[str, Any]:
    """Return a message as a dictionary. Raise ``ValueError`` if it is invalid."""
    return _message.validate_python(json.loads(line)).model_dump()


def parse_hello(line: bytes) -> dict[str, Any]:
    """Return the first message on a connection. Raise ``ValueError`` if it is invalid."""
    return Hello.model_validate(json.loads(line)).model_dump()


def parse_result(content: bytes) -> dict[str, Any]:
    """Return a saved result. Raise ``ValueError`` if it is invalid."""
    return RunnerResult.model_validate(json.loads(content)).model_dump(exclude_unset=True)
