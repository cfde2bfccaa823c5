"""What the model says of a field beside its type, to all who take, check or show it.

pydantic does not know these marks: what is stored is never held against the bounds of today.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a number may be; ``way_out`` tells those who gave another."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """It is larger than this."""
    hint: str = ""
    excess_note: str = ""
    """What one that is larger than ``most`` is, too."""

    def hint_for(self, number: float) -> str:
        """The way out for a number that is beyond the bounds; empty for one within."""
        too_small = (self.minimum is not None and number < self.minimum) or (
            self.above is not None and number <= self.above
        )
        if not too_small and (self.maximum is None or number <= self.maximum):
            return ""
        return self.hint or (f"give at least {self.minimum}" if too_small else f"give at most {self.maximum}")


@dataclass(frozen=True, slots=True)
class Length:
    """Characters of a text, or entries of what has entries."""

    maximum: int
    minimum: int = 0
    one_line: bool = False
    """Only characters that can be shown: names stand in tables and terminals, where others do harm."""


@dataclass(frozen=True, slots=True)
class TextForm:
    """A type that users write in a form of its own: the edges have a conversion for each, and know it by this."""

    form: str


@dataclass(frozen=True, slots=True)
class Field:
    """How users say a field: the option of ``koala submit`` with its help, and the name in JSON if it is another."""

    help: str = ""
    """Without it there is no such option."""
    option: str = ""
    """By default the field's name."""
    json: str = ""
    is_settable: bool = True
    """Whether users may say it at all."""


@dataclass(frozen=True, slots=True)
class FieldDescription:
    """A field of one of the model's dataclasses: ``type`` is without ``None``."""

    name: str
    type: Any
    is_optional: bool
    default: Any
    field: Field

    @property
    def json(self) -> str:
        return self.field.json or self.name

    @property
    def option(self) -> str:
        """``--name-of-the-option``; empty when there is none."""
        return (self.field.option or f"--{self.name.replace('_', '-')}") if self.field.help else ""


@cache
def describe_fields(kind: type[Any]) -> Mapping[str, FieldDescription]:
    """The fields of a dataclass, in order."""
    return {each.name: _described(each.name, each.type, each.default) for each in fields(kind)}


def _described(name: str, annotation: Any, default: object) -> FieldDescription:
    base, marks = split_annotation(annotation)
    own = next((mark for mark in marks if isinstance(mark, Field)), Field())
    if rest := tuple(mark for mark in marks if mark is not own):
        base = Annotated[(base, *rest)]
    inner = without_none(base)
    return FieldDescription(name, inner, inner is not base, default, own)


def split_annotation(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its marks, and these."""
    if get_origin(annotation) is Annotated:
        return annotation.__origin__, annotation.__metadata__
    return annotation, ()


def without_none(annotation: Any) -> Any:
    """``X`` of ``X | None``; any other type as it is."""
    if get_origin(annotation) not in (Union, UnionType) or NoneType not in get_args(annotation):
        return annotation
    return reduce(or_, (one for one in get_args(annotation) if one is not NoneType))


def find_out_of_bounds(value: Any, place: str = "") -> Iterator[tuple[str, Any, str, str]]:
    """Each number in a dataclass that is beyond its bounds: its place, the number, the problem, and the way out."""
    for each in _bounded(value.__class__):
        yield from _out_of_bounds(each.type, getattr(value, each.name), each.is_optional, f"{place}{each.json}")


@cache
def _bounded(kind: Any) -> tuple[FieldDescription, ...]:
    """The fields in which any number has bounds: there may be very many values of the others."""
    return tuple(each for each in describe_fields(kind).values() if _has_bounds(each.type))


def _has_bounds(annotation: Any) -> bool:
    base, marks = split_annotation(annotation)
    if marks:
        return any(isinstance(mark, Bounds) for mark in marks) or _has_bounds(base)
    inside = [each.type for each in _bounded(base)] if is_dataclass(annotation) else get_args(base)
    return any(_has_bounds(inner) for inner in inside)


def _out_of_bounds(kind: Any, value: Any, is_optional: bool, place: str) -> Iterator[tuple[str, Any, str, str]]:
    if value is None:
        return
    base, marks = split_annotation(kind)
    if isinstance(value, tuple):
        for index, one in enumerate(value):
            yield from _out_of_bounds(get_args(base)[0], one, False, f"{place}[{index}]")
    elif is_dataclass(value):
        yield from find_out_of_bounds(value, f"{place}.")
    for bounds in marks:
        if isinstance(bounds, Bounds) and (hint := bounds.hint_for(value)):
            beyond = (
                f", {bounds.excess_note}"
                if bounds.excess_note and bounds.maximum is not None and value > bounds.maximum
                else ""
            )
            shown = f"{value:g}" if isinstance(value, float) else value
            yield place, value, f"is {shown}{beyond}", f"{hint}, or leave it out" if is_optional else hint
