"""Annotations of model fields: bounds, length, text form, option and JSON name.

pydantic ignores these annotations, so stored values are never checked against the current bounds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a number, and the hint for a number outside of them."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """Exclusive lower bound."""
    hint: str = ""
    excess_note: str = ""
    """A note added to the message for a number above ``maximum``."""

    def hint_for(self, number: float) -> str:
        """Return the hint for a number out of bounds; empty for one within."""
        too_small = (self.minimum is not None and number < self.minimum) or (
            self.above is not None and number <= self.above
        )
        if not too_small and (self.maximum is None or number <= self.maximum):
            return ""
        return self.hint or (f"give at least {self.minimum}" if too_small else f"give at most {self.maximum}")


@dataclass(frozen=True, slots=True)
class Length:
    """The bounds of the characters of a text, or of the entries of a collection."""

    maximum: int
    minimum: int = 0
    one_line: bool = False
    """Whether only printable characters are allowed, since tables and terminals show the text."""


@dataclass(frozen=True, slots=True)
class TextForm:
    """A mark for a type with a special text form, which the API and the command line convert."""

    form: str


@dataclass(frozen=True, slots=True)
class Field:
    """The option of ``koala submit`` that sets a field, its help text, and the JSON name if it differs."""

    help: str = ""
    """Empty: the field has no option."""
    option: str = ""
    """Empty: the option has the name of the field."""
    short: str = ""
    """Short form of the option, such as ``-o``."""
    json: str = ""
    is_settable: bool = True
    """Whether users may set the field."""


@dataclass(frozen=True, slots=True)
class FieldDescription:
    """The description of a dataclass field; ``type`` excludes ``None``."""

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
        """Return the option, such as ``--name-of-the-option``; empty if the field has none."""
        return (self.field.option or f"--{self.name.replace('_', '-')}") if self.field.help else ""

    @property
    def option_names(self) -> tuple[str, ...]:
        """Return the forms of the option: the short one, if it has one, and ``option``."""
        return (self.field.short, self.option) if self.field.short else (self.option,)


@cache
def describe_fields(kind: type[Any]) -> Mapping[str, FieldDescription]:
    """Return the descriptions of a dataclass's fields by name, in order."""
    return {field.name: _describe_field(field.name, field.type, field.default) for field in fields(kind)}


def _describe_field(name: str, annotation: Any, default: object) -> FieldDescription:
    """Return the description of a field: its type without None and marks, its default and its ``Field`` mark."""
    base, marks = split_annotation(annotation)
    mark = next((mark for mark in marks if isinstance(mark, Field)), Field())
    if constraints := tuple(constraint for constraint in marks if constraint is not mark):
        base = Annotated[(base, *constraints)]
    inner = without_none(base)
    return FieldDescription(name, inner, inner is not base, default, mark)


def split_annotation(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without its annotations, and the annotations."""
    if get_origin(annotation) is Annotated:
        return annotation.__origin__, annotation.__metadata__
    return annotation, ()


def without_none(annotation: Any) -> Any:
    """Return ``X`` for ``X | None``, and any other type unchanged."""
    if get_origin(annotation) not in (Union, UnionType) or NoneType not in get_args(annotation):
        return annotation
    return reduce(or_, (member for member in get_args(annotation) if member is not NoneType))


def find_out_of_bounds(value: Any, path: str = "") -> Iterator[tuple[str, Any, str, str]]:
    """Yield the path, value, problem and hint of each number in a dataclass that is out of bounds."""
    for field in _bounded_fields(value.__class__):
        yield from _check_bounds(field.type, getattr(value, field.name), field.is_optional, f"{path}{field.json}")


@cache
def _bounded_fields(kind: Any) -> tuple[FieldDescription, ...]:
    """Return the fields with a bounded number; the others, which may hold many values, need no check."""
    return tuple(field for field in describe_fields(kind).values() if _has_bounds(field.type))


def _has_bounds(annotation: Any) -> bool:
    """Return whether a type is a bounded number or contains one."""
    base, marks = split_annotation(annotation)
    if marks:
        return any(isinstance(mark, Bounds) for mark in marks) or _has_bounds(base)
    inside = [field.type for field in _bounded_fields(base)] if is_dataclass(annotation) else get_args(base)
    return any(_has_bounds(inner) for inner in inside)


def _check_bounds(kind: Any, value: Any, is_optional: bool, path: str) -> Iterator[tuple[str, Any, str, str]]:
    """Yield the path, value, problem and hint of each number in a value that is out of bounds."""
    if value is None:
        return
    base, marks = split_annotation(kind)
    if isinstance(value, tuple):
        for index, entry in enumerate(value):
            yield from _check_bounds(get_args(base)[0], entry, False, f"{path}[{index}]")
    elif is_dataclass(value):
        yield from find_out_of_bounds(value, f"{path}.")
    for bounds in marks:
        if isinstance(bounds, Bounds) and (hint := bounds.hint_for(value)):
            is_large = bounds.excess_note and bounds.maximum is not None and value > bounds.maximum
            note = f", {bounds.excess_note}" if is_large else ""
            number = f"{value:g}" if isinstance(value, float) else value
            yield path, value, f"is {number}{note}", f"{hint}, or leave it out" if is_optional else hint
