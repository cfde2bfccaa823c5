"""How large numbers, texts and lists may be that agents, daemon and runners send each other.

Whoever sends more loses the connection, so that what can come from an honest sender must be well within; only texts for
people, which may come from any program, are cut instead.
"""

import base64
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Interval, Predicate

MAX_NODES = 1_000_000
MAX_LISTED = 1_000_000
MAX_TEXT_LENGTH = 20_000
MAX_DEPTH = 100
HOST = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]{0,254}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Truncate:
    """Characters of a text that are taken in; the rest of it is left out."""

    length: int

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[object], Any]) -> dict[str, Any]:
        """What pydantic asks of a constraint that is not its own; it is called there only."""
        function = {"type": "no-info", "function": lambda text: text[: self.length]}
        return {"type": "function-after", "function": function, "schema": handler(source)}


LEFT_OUT_LENGTH = 40
"""Characters that the remark about texts left out has at most."""


@dataclass(frozen=True, slots=True)
class TruncateList:
    """Texts of a list, and characters of all of them together, that are taken in."""

    texts: int
    characters: int

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[object], Any]) -> dict[str, Any]:
        """Apply ``cut``; pydantic calls this for a constraint that is not its own."""
        return {
            "type": "function-after",
            "function": {"type": "no-info", "function": self.cut},
            "schema": handler(source),
        }

    def cut(self, texts: Collection[str]) -> Collection[str]:
        """Return the texts if they fit; else the first that fit, each cut, and how many are left out. A second cut of
        the answer changes nothing."""
        if len(texts) <= self.texts and sum(map(len, texts)) <= self.characters:
            return texts
        kept: list[str] = []
        left = self.characters - LEFT_OUT_LENGTH
        for text in texts if isinstance(texts, tuple) else sorted(texts):
            piece = text[: min(left, self.characters // 4)]
            if len(kept) >= self.texts - 1 or not piece:
                break
            kept.append(piece)
            left -= len(piece)
        if len(kept) < len(texts):
            kept.append(f"{len(texts) - len(kept)} more are left out")
        return type(texts)(kept)  # type: ignore[call-arg]


def _together_at_most(characters: int) -> Predicate:
    """Bound all texts of a list of dataclasses together."""

    def check(values: Collection[Any]) -> bool:
        lengths = (
            len(text) for each in values for name in each.__slots__ if isinstance(text := getattr(each, name), str)
        )
        if sum(lengths) > characters:
            raise ValueError(f"has more than {characters} characters in all")
        return True

    return Predicate(check)


def _at_most(characters: int) -> Predicate:
    """Unlike ``MaxLen`` it lets a sender have lone surrogates: they are taken out as they are sent."""

    def check(text: str) -> bool:
        if len(text) > characters:
            raise ValueError(f"has more than {characters} characters")
        return True

    return Predicate(check)


def _is_host(text: str) -> bool:
    if not HOST.fullmatch(text):
        raise ValueError(f"{text[:60]!r} is no address of a node")
    return True


def _is_shallow(payload: object) -> bool:
    """What parsers of JSON refuse cannot be sent on."""
    level = [payload]
    for _ in range(MAX_DEPTH):
        nested = [value for value in level if isinstance(value, list | dict)]
        level = [each for value in nested for each in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return True
    raise ValueError(f"is nested more than {MAX_DEPTH} deep")


def _is_base64(text: str) -> bool:
    base64.b64decode(text, validate=True)
    return True


Nodes = Annotated[int, Interval(ge=0, le=MAX_NODES)]
"""A number of nodes, or the index of one."""
Count = Annotated[int, Interval(ge=0, le=2**31 - 1)]
"""As databases hold it in a column of a usual kind."""
Number = Annotated[int, Interval(ge=0, le=2**63 - 1)]
"""Of a job or a command, as databases hold it."""
Bytes = Annotated[int, Interval(ge=0, le=2**53)]
Space = Annotated[int, Interval(ge=0, le=2**64 - 1)]
"""Of a file system, in bytes or files, as the kernel counts."""
Seconds = Annotated[float, Interval(ge=0, le=1e10)]
ExitCode = Annotated[int, Interval(ge=-(2**31), le=2**32 - 1)]
"""32 bits, with a sign or without."""

Name = Annotated[str, _at_most(1000)]
"""Of a host, a cluster, a daemon; also a token."""
Path = Annotated[str, _at_most(65_536)]
Base64 = Annotated[str, _at_most(4 * 1024 * 1024), Predicate(_is_base64)]
"""A piece of output."""
Label = Annotated[str, Truncate(100)]
"""For people, too: a few words, such as a version."""
ShortText = Annotated[str, Truncate(2000)]
"""For people, on pages that show many of them."""
MAX_NOTICES, MAX_NOTICES_LENGTH = 20, 4000
NOTICES = TruncateList(MAX_NOTICES, MAX_NOTICES_LENGTH)
"""Texts for people that stand on every page."""
BoundedTogether = _together_at_most(256 * 1024)
"""Dataclasses that a report lists, all on one page."""
TruncatedText = Annotated[str, Truncate(MAX_TEXT_LENGTH)]
"""For people."""

Host = Annotated[str, Predicate(_is_host)]
"""A node's address for its gang, which stands in names of files and on command lines there."""
Payload = Annotated[dict[str, object], Predicate(_is_shallow)]
"""Checked by whom it is for."""
