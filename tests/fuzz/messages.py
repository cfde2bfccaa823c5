"""Draw messages of a protocol from its types: valid, altered or broken, with values of the run."""

import base64
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Annotated, Any, NotRequired, Required, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval, MaxLen
from hypothesis import strategies as st
from pydantic import BaseModel
from typing_extensions import is_typeddict

from koalapy.model import bounds

ODD_NUMBERS = (-(2**63) - 1, -1, 0, 1, 2**31 - 1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 10**400)
ODD_TEXTS = (
    "",
    ".",
    "..",
    "../..",
    "{home}",
    "{home}/thesis",
    "\x00",
    "\ud800",
    "x" * 300,
    "x" * 30_000,
    "a\nb",
    "*",
    "**",
)
NUMBERS = st.sampled_from(ODD_NUMBERS) | st.integers()
FLOATS = st.floats() | st.sampled_from([0.0, -1.0, 5e-324, 1e-7, 1e308, 1e400])
TEXTS = st.sampled_from(ODD_TEXTS) | st.text(max_size=20).filter(lambda text: not text.startswith("/"))
"""Texts that are no absolute path, so that even a failing test touches only its own files."""
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
MAX_ENTRIES = 3
"""Most entries of a list."""
MAX_REPR_LENGTH = 400
"""Characters of a frame that are printed."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Send:
    """Send a frame or a line on the current connection, which is authenticated."""

    frame: str

    def __repr__(self) -> str:
        return f"Send({self.frame[:MAX_REPR_LENGTH]!r}, {len(self.frame)})"


class Vocabulary:
    """Draws values of types, with the known values of a run for some field names."""

    def __init__(self, values: Mapping[str, Sequence[Any]], texts: st.SearchStrategy[str] = TEXTS) -> None:
        """``values`` are known values by field name, ``texts`` the texts of odd fields."""
        self._known, self._texts = values, texts

    def draw_valid(self, kind: Any, name: str = "") -> st.SearchStrategy[Any]:
        """Draw JSON of a type within its bounds."""
        if name in self._known and not _is_many(kind):
            return st.sampled_from(self._known[name])
        origin, inside = get_origin(kind), get_args(kind)
        if origin in (NotRequired, Required):
            return self.draw_valid(inside[0], name)
        if origin is Annotated:
            return self._annotated(kind, name)
        if origin in (Union, types.UnionType):
            return st.one_of([self.draw_valid(alternative, name) for alternative in inside])
        if origin is tuple and Ellipsis not in inside:
            return st.tuples(*[self.draw_valid(each, name) for each in inside]).map(list)
        if origin in (list, tuple, frozenset):
            return st.lists(self.draw_valid(inside[0], name), max_size=MAX_ENTRIES)
        if origin is dict:
            return st.dictionaries(
                st.sampled_from(["op", "a", "b"]), self.draw_valid(inside[1], name), max_size=MAX_ENTRIES
            )
        if origin is not None:  # Literal
            return st.sampled_from(inside)
        if is_record(kind):
            return st.fixed_dictionaries(
                {field: self.draw_valid(hint, field) for field, hint in read_fields(kind).items()}
            )
        return _draw_plain(kind)

    def _annotated(self, kind: Any, name: str) -> st.SearchStrategy[Any]:
        inside, *notes = get_args(kind)
        if kind == bounds.Base64:
            return st.binary(max_size=50).map(lambda data: base64.b64encode(data).decode())
        if kind == bounds.Host:
            return st.sampled_from(["n1", "127.0.1.1", "fe80::1%eth0", "node-1.b_c"])
        for note in notes:
            if isinstance(note, Interval):
                return _draw_within(inside, note)
            if isinstance(note, MaxLen) and name in self._known:
                return st.lists(st.sampled_from(self._known[name]), max_size=MAX_ENTRIES)
        return self.draw_valid(inside, name)

    def draw_odd(self, kind: Any, name: str = "") -> st.SearchStrategy[Any]:
        """Draw JSON of a type's shape, within or beyond its bounds."""
        origin, inside = get_origin(kind), get_args(kind)
        if origin in (Annotated, NotRequired, Required):
            return self.draw_odd(inside[0], name)
        if origin in (Union, types.UnionType):
            return st.one_of([self.draw_odd(alternative, name) for alternative in inside])
        if origin in (list, tuple, frozenset):
            return st.lists(self.draw_odd(inside[0], name), max_size=MAX_ENTRIES)
        if origin is dict:
            return st.dictionaries(self._texts, ANYTHING, max_size=MAX_ENTRIES)
        if origin is not None:  # Literal
            return st.sampled_from(inside) | self._texts
        if _is_enum(kind):
            return _draw_members(kind) | self._texts
        if is_record(kind):
            return st.fixed_dictionaries(
                {field: self.draw_odd(hint, field) for field, hint in read_fields(kind).items()}
            )
        return {int: NUMBERS, float: FLOATS, str: self._texts, bool: st.booleans()}.get(kind, st.none() | ANYTHING)

    def draw_message(self, kinds: Sequence[Any]) -> st.SearchStrategy[Record]:
        """Draw a message of one of these types, half of them valid."""
        sensible = st.one_of([self.draw_valid(kind) for kind in kinds])
        altered = st.one_of([_altered(self, kind) for kind in kinds])
        return sensible | altered


@st.composite
def _altered(draw: st.DrawFn, vocabulary: Vocabulary, kind: Any) -> Record:
    """Draw a message with odd, wrong, missing or additional fields."""
    message: Record = draw(vocabulary.draw_valid(kind))
    fields = read_fields(kind)
    for name in draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=2, unique=True)):
        change = draw(st.sampled_from(["odd", "anything", "gone", "more"]))
        if change == "gone":
            message.pop(name, None)
        elif change == "more":
            message[name + "_"] = draw(ANYTHING)
        else:
            message[name] = draw(vocabulary.draw_odd(fields[name], name) if change == "odd" else ANYTHING)
    return message


def read_fields(kind: Any) -> dict[str, Any]:
    """Return the annotations of the fields of a message or record."""
    hints = get_type_hints(kind, include_extras=True)
    if is_typeddict(kind):
        return hints
    names = kind.model_fields if issubclass(kind, BaseModel) else kind.__dataclass_fields__
    return {name: hints[name] for name in names}


def is_record(kind: Any) -> bool:
    return is_typeddict(kind) or (isinstance(kind, type) and (issubclass(kind, BaseModel) or is_dataclass(kind)))


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _draw_members(kind: type[Enum]) -> st.SearchStrategy[Any]:
    """Draw the values of an enum."""
    return st.sampled_from([member.value for member in kind])


def _is_many(kind: Any) -> bool:
    inner = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return get_origin(inner) in (list, tuple, frozenset)


def _draw_plain(kind: Any) -> st.SearchStrategy[Any]:
    if kind is type(None):
        return st.none()
    if _is_enum(kind):
        return _draw_members(kind)
    if kind in (object, Any):
        return st.booleans() | st.integers(0, 9) | st.text(max_size=5)
    return {
        int: st.integers(0, 9),
        float: st.floats(0, 100),
        str: st.sampled_from(["", "a", "genuine", "forged"]),
        bool: st.booleans(),
    }[kind]


def _draw_within(kind: Any, interval: Interval) -> st.SearchStrategy[Any]:
    """Draw a number in an interval: one of its ends or a small number."""
    low, high = interval.ge, interval.le
    if kind is float:
        return st.sampled_from([low, high]) | st.floats(low, min(high, 100.0))  # type: ignore[arg-type, type-var]
    return st.sampled_from([low, high]) | st.integers(max(low, -2), min(high, 9))  # type: ignore[arg-type, type-var]


# Frames


def encode_json(messages: Any) -> str:
    """Encode JSON, including surrogates that no valid text contains."""
    return json.dumps(messages)


@st.composite
def _cut(draw: st.DrawFn, frames: st.SearchStrategy[str]) -> str:
    frame = draw(frames)
    return frame[: draw(st.integers(0, len(frame)))] + draw(st.sampled_from(["", "]", "\x00", "}", '"']))


NO_JSON = st.sampled_from(["", "[", "]", "{}", "null", "[[]]", "[null]", "[" * 10_000, '[{"type":' * 500, "[NaN]", "0"])


def weighted(*choices: tuple[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Draw from one of several strategies, each as often as its weight says.

    ``one_of`` cannot do that: it takes a strategy that is listed several times once, and one that is itself a choice
    for all of its branches.
    """
    indices = [index for index, (weight, _) in enumerate(choices) for _ in range(weight)]
    return st.sampled_from(indices).flatmap(lambda index: choices[index][1])


def frames(message: st.SearchStrategy[Record]) -> st.SearchStrategy[str]:
    """Draw a frame: some messages, many equal ones, or invalid JSON."""
    several = st.lists(message, min_size=1, max_size=3)
    complete = several.map(encode_json)
    repeated = message.map(lambda record: encode_json([record] * 30))
    broken = _cut(complete) | NO_JSON | ANYTHING.map(encode_json) | st.lists(ANYTHING, max_size=3).map(encode_json)
    return weighted((6, complete), (1, repeated), (1, broken))
