"""What runners say to their agent, one JSON object a line, checked before anybody looks at it."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, TypeAdapter

from koalapy.model.bounds import Base64, Bytes, ExitCode, Host, Name, Nodes, Number, Payload, TruncatedText
from koalapy.model.wording import escape_surrogates
from koalapy.runner.session import NONCE_SIZE


class RunnerMessage(BaseModel):
    """More than is checked here may be said, by runners that are newer than their agent."""

    model_config = ConfigDict(extra="allow")


class Hello(RunnerMessage):
    """Who it claims to be, and the number for which it wants to be shown that we are its agent."""

    t: Literal["hello"]
    component: Name
    node: Nodes
    nonce: Annotated[str, StringConstraints(pattern=rf"^[0-9a-f]{{{2 * NONCE_SIZE}}}$")]


class Here(RunnerMessage):
    """What a runner says of itself, once both are known to each other."""

    t: Literal["here"]
    life: Name
    host: Host
    name: Name
    phase: Literal["waiting", "opened", "running", "ending", "ended"]
    lrm_job: Name = ""
    start: Bytes = 0
    """Where its output begins."""
    warned: bool = False


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
    """Ask how long the daemon has been silent."""

    t: Literal["renew"]
    number: Number


class Relay(RunnerMessage):
    t: Literal["relay"]
    token: Name
    node: Nodes
    payload: Payload


class Exit(RunnerMessage):
    t: Literal["exit"]
    code: ExitCode | None
    error: Annotated[
        TruncatedText, BeforeValidator(lambda text: escape_surrogates(text) if isinstance(text, str) else text)
    ]
    """May name files, whose names are any bytes."""
    infrastructure: bool
    stopped: bool
    warned: bool = False


class RunnerResult(RunnerMessage):
    """What a runner leaves in its spool when it ends, where programs may write, too."""

    code: ExitCode | None
    error: Annotated[
        TruncatedText, BeforeValidator(lambda text: escape_surrogates(text) if isinstance(text, str) else text)
    ]
    infrastructure: bool
    stopped: bool
    warned: bool = False
    host: Host | Literal[""]
    """Empty where it never was known."""
    name: Name
    output: Bytes | None = None


_message: TypeAdapter[RunnerMessage] = TypeAdapter(
    Annotated[Here | Out | Running | Warned | Ending | Renew | Relay | Exit, Field(discriminator="t")]
)


def parse_message(line: bytes) -> dict[str, Any]:
    """One message; ``ValueError`` when it is none, or out of bounds."""
    return _message.validate_python(json.loads(line)).model_dump()


def parse_hello(line: bytes) -> dict[str, Any]:
    """The first message on a connection, from anybody; ``ValueError`` when it is none."""
    return Hello.model_validate(json.loads(line)).model_dump()


def parse_result(content: bytes) -> dict[str, Any]:
    """A result that was left; ``ValueError`` when it is none."""
    return RunnerResult.model_validate(json.loads(content)).model_dump(exclude_unset=True)
