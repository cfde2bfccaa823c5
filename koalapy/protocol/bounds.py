"""How large numbers, texts and lists may be that agents, daemon and runners send each other.

Whoever sends more loses the connection, so that what can come from an honest sender must be well within; only words for
people, which may come from any program, are cut instead.
"""

import base64
import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

MOST_NODES = 1_000_000
MOST_LISTED = 1_000_000
LONGEST_WORDS = 20_000
DEEPEST = 100
HOST = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]{0,254}", re.ASCII)


def _at_most(characters: int) -> AfterValidator:
    """Unlike a bound of pydantic's own, it lets a sender have lone surrogates: they are taken out as they are sent."""

    def check(text: str) -> str:
        if len(text) > characters:
            raise ValueError(f"has more than {characters} characters")
        return text

    return AfterValidator(check)


def _host(text: str) -> str:
    if not HOST.fullmatch(text):
        raise ValueError(f"{text[:60]!r} is no address of a node")
    return text


def _shallow(payload: object) -> object:
    """What parsers of JSON refuse, no other side can be told."""
    level = [payload]
    for _ in range(DEEPEST):
        nested = [value for value in level if isinstance(value, list | dict)]
        level = [each for value in nested for each in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return payload
    raise ValueError(f"is nested more than {DEEPEST} deep")


def _base64(text: str) -> str:
    base64.b64decode(text, validate=True)
    return text


Nodes = Annotated[int, Field(ge=0, le=MOST_NODES)]
"""A number of nodes, or the index of one."""
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""As databases hold it in a column of a usual kind."""
Number = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""Of a job or a command, as databases hold it."""
Bytes = Annotated[int, Field(ge=0, le=2**53)]
Space = Annotated[int, Field(ge=0, le=2**64 - 1)]
"""Of a file system, in bytes or files, as the kernel counts."""
Seconds = Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)]
ExitCode = Annotated[int, Field(ge=-(2**31), le=2**32 - 1)]
"""32 bits, with a sign or without."""

Name = Annotated[str, _at_most(1000)]
"""Of a host, a cluster, a daemon; also a token."""
Path = Annotated[str, _at_most(65_536)]
Piece = Annotated[str, _at_most(4 * 1024 * 1024), AfterValidator(_base64)]
"""Of output, in base64."""
Words = Annotated[str, AfterValidator(lambda text: text[:LONGEST_WORDS])]
"""What people are told; the rest of it is left out."""

Host = Annotated[str, AfterValidator(_host)]
"""A node's address for its gang, which stands in names of files and on command lines there."""
Hosts = Annotated[list[Host], Field(max_length=MOST_NODES)]
Payload = Annotated[dict[str, object], BeforeValidator(_shallow)]
"""Looked at by whom it is for."""
Names = Annotated[list[Name], Field(max_length=MOST_LISTED)]
