"""What runners say to their agent, one JSON object a line, checked before anybody looks at it."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from koalapy.model.bounds import Base64, Bytes, ExitCode, Host, Name, Nodes, Payload, TruncatedText
from koalapy.model.wording import encodable


class Said(BaseModel):
    """More than is checked here may be said, by runners that are newer than their agent."""

    model_config = ConfigDict(extra="allow")


class Hello(Said):
    t: Literal["hello"]
    component: Name
    secret: Name
    node: Nodes
    host: Host
    name: Name
    phase: Literal["waiting", "opened", "running", "ending", "ended"]
    lrm_job: Name = ""
    start: Bytes = 0
    """Where its output begins."""


class Out(Said):
    t: Literal["out"]
    offset: Bytes
    data: Base64


class Running(Said):
    t: Literal["running"]


class Ending(Said):
    t: Literal["ending"]


class Relay(Said):
    t: Literal["relay"]
    token: Name
    node: Nodes
    payload: Payload


class Exit(Said):
    t: Literal["exit"]
    code: ExitCode | None
    error: Annotated[TruncatedText, BeforeValidator(lambda said: encodable(said) if isinstance(said, str) else said)]
    """May name files, whose names are any bytes."""
    infrastructure: bool
    stopped: bool


class Left(Said):
    """What a runner leaves in its spool when it ends, where programs may write, too."""

    code: ExitCode | None
    error: Annotated[TruncatedText, BeforeValidator(lambda said: encodable(said) if isinstance(said, str) else said)]
    infrastructure: bool
    stopped: bool
    host: Host | Literal[""]
    """Empty where it never was known."""
    name: Name
    output: Bytes | None = None


_left: TypeAdapter[Left] = TypeAdapter(Left)
_said: TypeAdapter[Said] = TypeAdapter(
    Annotated[Hello | Out | Running | Ending | Relay | Exit, Field(discriminator="t")]
)


def understood(line: bytes) -> dict[str, Any]:
    """One message; ``ValueError`` when it is none, or out of bounds."""
    return _said.validate_python(json.loads(line)).model_dump()


def left(content: bytes) -> dict[str, Any]:
    """A result that was left; ``ValueError`` when it is none."""
    return _left.validate_python(json.loads(content)).model_dump(exclude_unset=True)
