"""Types with size limits for the messages of agents, daemon and runners.

A larger value closes the connection, so the limits are well above what a correct sender sends. Texts for users, which
may come from any program, are cut and made printable instead.
"""

import base64
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Interval, Predicate

from koalapy.model.wording import to_line

MAX_NODES = 1_000_000
MAX_LISTED = 100_000
MAX_TEXT_LENGTH = 20_000
MAX_DEPTH = 100
MAX_TERMINAL_SIZE = 10_000
"""Rows or columns of a terminal."""
HOST = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]{0,254}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Truncate:
    """A constraint that cuts a text to ``length`` characters, in one line without control characters."""

    length: int

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[object], Any]) -> dict[str, Any]:
        """Return the schema of this constraint. Called by pydantic."""
        function = {"type": "no-info", "function": lambda text: to_line(text[: self.length])}
        return {"type": "function-after", "function": function, "schema": handler(source)}


@dataclass(frozen=True, slots=True)
class MaxEntries:
    """A constraint of a list: at most ``maximum`` entries, which are checked up to the first invalid one.

    The errors of a frame of invalid entries would take a minute and gigabytes.
    """

    maximum: int

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[object], Any]) -> dict[str, Any]:
        """Return the schema of this constraint. Called by pydantic."""
        return {**handler(source), "max_length": self.maximum, "fail_fast": True}


LEFT_OUT_LENGTH = 40
"""Maximum characters of the note on omitted texts."""


@dataclass(frozen=True, slots=True)
class TruncateList:
    """A constraint that cuts a list of texts to a number of texts and of characters in all."""

    texts: int
    characters: int

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[object], Any]) -> dict[str, Any]:
        """Return the schema of this constraint. Called by pydantic."""
        return {
            "type": "function-after",
            "function": {"type": "no-info", "function": self.cut},
            "schema": handler(source),
        }

    def cut(self, texts: Collection[str]) -> Collection[str]:
        """Return the texts if they fit; else the first ones, each cut, and a note how many are left out.

        Cutting the result again does not change it.
        """
        if len(texts) <= self.texts and sum(map(len, texts)) <= self.characters:
            return texts
        cut_texts: list[str] = []
        available = self.characters - LEFT_OUT_LENGTH
        for text in texts if isinstance(texts, tuple) else sorted(texts):
            piece = text[: min(available, self.characters // 4)]
            if len(cut_texts) >= self.texts - 1 or not piece:
                break
            cut_texts.append(piece)
            available -= len(piece)
        if len(cut_texts) < len(texts):
            cut_texts.append(f"{len(texts) - len(cut_texts)} more are left out")
        return type(texts)(cut_texts)  # type: ignore[call-arg]


def _total_length_limit(characters: int) -> Predicate:
    """Limit the length of all texts in a list of dataclasses together."""

    def check(values: Collection[Any]) -> bool:
        """Return True; raise ``ValueError`` if the texts are too long in total."""
        if sum(map(_text_length, values)) > characters:
            raise ValueError(f"its texts have more than {characters} characters in total")
        return True

    return Predicate(check)


def _text_length(value: Any) -> int:
    """Return the number of characters in a text, or in all texts of a list or a dataclass with slots."""
    if isinstance(value, str):
        return len(value)
    parts = value if isinstance(value, tuple) else [getattr(value, name) for name in getattr(value, "__slots__", ())]
    return sum(map(_text_length, parts))


def _length_limit(characters: int) -> Predicate:
    """Limit the length of a text. Unlike ``MaxLen``, allow lone surrogates, which are removed when they are sent."""

    def check(text: str) -> bool:
        if len(text) > characters:
            raise ValueError(f"has more than {characters} characters")
        return True

    return Predicate(check)


def _is_host(text: str) -> bool:
    """Return True for a node address. Raise ``ValueError`` for any other text."""
    if not HOST.fullmatch(text):
        raise ValueError(f"{text[:60]!r} is not a node address")
    return True


def _is_shallow(payload: object) -> bool:
    """Return True; raise ``ValueError`` if lists and objects are nested more than ``MAX_DEPTH`` deep."""
    level = [payload]
    for _ in range(MAX_DEPTH):
        nested = [value for value in level if isinstance(value, list | dict)]
        level = [item for value in nested for item in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return True
    raise ValueError(f"is nested more than {MAX_DEPTH} deep")


def _is_base64(text: str) -> bool:
    base64.b64decode(text, validate=True)
    return True


Nodes = Annotated[int, Interval(ge=0, le=MAX_NODES)]
"""A number of nodes, or the index of a node."""
Count = Annotated[int, Interval(ge=0, le=2**31 - 1)]
"""A number that fits an integer column of a database."""
Number = Annotated[int, Interval(ge=0, le=2**63 - 1)]
"""The number of a job or a command; it fits a big integer column of a database."""
Bytes = Annotated[int, Interval(ge=0, le=2**53)]
Space = Annotated[int, Interval(ge=0, le=2**64 - 1)]
"""The size of a file system in bytes or files."""
Port = Annotated[int, Interval(ge=0, le=65535)]
TerminalSize = Annotated[int, Interval(ge=0, le=MAX_TERMINAL_SIZE)]
Seconds = Annotated[float, Interval(ge=0, le=1e10)]
ProcessorSeconds = Annotated[float, Interval(ge=0, le=1e30)]
"""A sum over many processors."""
ExitCode = Annotated[int, Interval(ge=-(2**31), le=2**32 - 1)]
"""An exit code of 32 bits, signed or unsigned."""

Name = Annotated[str, _length_limit(1000)]
"""The name of a host, cluster or daemon, or a component token."""
Path = Annotated[str, _length_limit(65_536)]
Base64 = Annotated[str, _length_limit(4 * 1024 * 1024), Predicate(_is_base64)]
"""A chunk of output."""
Label = Annotated[str, Truncate(100)]
"""A short text for users, such as a version."""
ShortText = Annotated[str, Truncate(2000)]
"""A text for users on pages that show many of them."""
MAX_NOTICES, MAX_NOTICES_LENGTH = 20, 4000
NOTICES = TruncateList(MAX_NOTICES, MAX_NOTICES_LENGTH)
"""Notices for users that every page shows."""
BoundedTogether = _total_length_limit(256 * 1024)
"""The dataclasses that a report lists; one page shows them all."""
TruncatedText = Annotated[str, Truncate(MAX_TEXT_LENGTH)]
"""A text for users."""

Host = Annotated[str, Predicate(_is_host)]
"""The address of a node, which the other nodes of its gang use in file names and on command lines."""
Payload = Annotated[dict[str, object], Predicate(_is_shallow)]
"""A nested message, validated by its receiver. JSON parsers reject deeper nesting."""
