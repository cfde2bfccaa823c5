"""Bodies and views made of the model's dataclasses: what the model says of a field is said nowhere else."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, is_dataclass
from functools import cache
from operator import methodcaller
from types import GenericAlias, UnionType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, create_model

from koalapy.api import fields
from koalapy.api.fields import Input, Output
from koalapy.model.field import Bounds, FieldDescription, Length, describe_fields, split_annotation
from koalapy.model.job import Coallocation, Duration, Lease, NodeMemory, Pattern, PerNodeBandwidth, PolicyOptions
from koalapy.model.request import Bundle, Command, Environment, OwnCommand, StopWarning

TIME = re.compile(r"(\w+_)?(at|since|heard|start_estimate)")
"""Names of fields in seconds since the epoch."""
NO_ELEMENTS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Form:
    """How a type that users write in a form of its own comes in and is shown, and what is read of it."""

    body: Any
    view: Any = None
    read: Callable[[Any], Any] = tuple
    says_none: bool = False
    """Whether None has a form of its own."""


class Body(Input):
    """What users say of a dataclass of the model's."""

    kind: ClassVar[Any]

    def to_model(self) -> Any:
        """The dataclass; its sense is not checked here."""
        given = ((name, read, getattr(self, name)) for name, read in _readers(type(self)))
        return self.kind(**{name: value if value is None else read(value) for name, read, value in given})


@cache
def _readers(body: type[Body]) -> list[tuple[str, Callable[[Any], Any]]]:
    return [(name, _reader(describe_fields(body.kind)[name].type)) for name in body.model_fields]


def _reader(kind: Any) -> Callable[[Any], Any]:
    if kind in FORMS:
        return FORMS[kind].read
    base, _ = split_annotation(kind)
    if get_origin(base) is tuple:
        entry = _reader(get_args(base)[0])
        return lambda given: tuple(entry(each) for each in given)
    return methodcaller("to_model") if is_dataclass(base) or get_origin(base) is UnionType else lambda given: given


def _pairs(values: dict[str, str]) -> Environment:
    return tuple(sorted(values.items()))


_shown_pairs = Annotated[dict[str, str], BeforeValidator(dict)]
FORMS = {
    Command: Form(fields.Command),
    OwnCommand: Form(fields.OwnCommand),
    Environment: Form(fields.Environment, _shown_pairs, _pairs),
    PolicyOptions: Form(fields.Options, _shown_pairs, _pairs),
    Coallocation: Form(
        fields.Coallocation,
        Annotated[
            Literal["allowed", "never"] | int,
            BeforeValidator(lambda most: {None: "allowed", 1: "never"}.get(most, most)),
        ],
        lambda most: most,
        says_none=True,
    ),
    Duration: Form(fields.Seconds, None, float),
    Lease: Form(fields.Lease, Annotated[Literal["none"] | float, BeforeValidator(fields.format_lease)], float),
    NodeMemory: Form(fields.Bytes, None, int),
    PerNodeBandwidth: Form(fields.Bandwidth, None, float),
    Pattern: Form(fields.Pattern, None, str),
    StopWarning: Form(fields.StopWarningText, Annotated[str, BeforeValidator(str)], fields.parse_warning),
    Bundle: Form(
        fields.Name,
        Annotated[str, BeforeValidator(lambda bundle: bundle.id if isinstance(bundle, Bundle) else bundle)],
        lambda ident: Bundle(ident, 0, 0),
    ),
}


def body_model(
    name: str,
    kind: Any,
    about: str,
    *,
    without: Collection[str] = (),
    needs: Collection[str] = (),
    elements: Mapping[str, Any] = NO_ELEMENTS,
) -> type[Body]:
    """What users say of a dataclass. ``needs``: what has no default here; ``elements``: in lists, or for a union."""
    parts: dict[str, Any] = {}
    for each in describe_fields(kind).values():
        if each.field.is_settable and each.name not in without:
            default = ... if each.name in needs or each.default is MISSING else _plain_default(each)
            alias = each.json if each.json != each.name else None
            of = _body_type(each.type, elements.get(each.name))
            parts[each.name] = (of if default is ... else _or_none(each, of), Field(default, alias=alias))
    made = create_model(name, __base__=Body, __doc__=about, **parts)
    made.kind = kind
    return made


def view_model(
    name: str,
    kind: Any,
    about: str | None = None,
    *,
    without: Collection[str] = (),
    only: Collection[str] = (),
    only_given: bool = False,
    elements: Mapping[str, Any] = NO_ELEMENTS,
    base: type[Output] = Output,
) -> type[Output]:
    """Return the answer that shows a dataclass, or ``only`` some fields. ``about`` is its docstring by default.

    ``only_given``: leave out what is empty.

    A time, by its name a field such as ``at``, ``added_at`` or ``since``, is shown as a moment.
    """
    parts: dict[str, Any] = {}
    for each in describe_fields(kind).values():
        if each.field.is_settable and each.name not in without and (not only or each.name in only):
            of = _view_type(each.type, elements.get(each.name))
            if each.type is float and TIME.fullmatch(each.name):
                of = fields.Timestamp
            alias = each.json if each.json != each.name else None
            if only_given and each.default is not MISSING:
                parts[each.name] = (of | None, Field(None, alias=alias, exclude_if=_is_default(each)))
            else:
                parts[each.name] = (_or_none(each, of), Field(..., alias=alias))
    return create_model(name, __base__=base, __doc__=kind.__doc__ if about is None else about, **parts)


def _plain_default(each: FieldDescription) -> Any:
    if each.default != ():
        return each.default
    return {} if each.type in (Environment, PolicyOptions) else []


def _is_default(each: FieldDescription) -> Callable[[Any], bool]:
    default = _plain_default(each)
    return lambda value: value is None or value == default


def _or_none(each: FieldDescription, kind: Any) -> Any:
    says_none = each.type in FORMS and FORMS[each.type].says_none
    return kind | None if each.is_optional and not says_none else kind


def _body_type(kind: Any, element: Any | None = None) -> Any:
    if kind in FORMS:
        return FORMS[kind].body
    base, marks = split_annotation(kind)
    bounds = next((mark for mark in marks if isinstance(mark, Bounds)), Bounds())
    length = next((mark for mark in marks if isinstance(mark, Length)), None)
    if length is None and (base is str or get_origin(base) is tuple):
        raise TypeError(f"{kind} comes in without a Length")
    if get_origin(base) is tuple and length:
        entries: Any = GenericAlias(list, (element or _body_type(get_args(base)[0]),))
        least: Any = {"minItems": length.minimum} if length.minimum else None
        return Annotated[entries, Field(max_length=length.maximum, json_schema_extra=least)]
    if element is not None:
        return element
    if base is int:
        return Annotated[fields.Number, fields.integer_schema(bounds)]
    if base is float:
        return Annotated[fields.Fraction, fields.number_schema(bounds)]
    if base is str and length:
        text = Annotated[fields.Text, fields.within(length)]
        return Annotated[text, AfterValidator(fields.check_one_line)] if length.one_line else text
    return base


def _view_type(kind: Any, element: Any | None = None) -> Any:
    if kind in FORMS and FORMS[kind].view:
        return FORMS[kind].view
    base, _ = split_annotation(kind)
    if get_origin(base) is tuple:
        return GenericAlias(list, (element or _view_type(get_args(base)[0]),))
    return element or base
