"""Derivation of request and response bodies from the dataclasses of ``model``, so that fields are described once."""

import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass
from types import GenericAlias
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, create_model

from koalapy.api import fields
from koalapy.api.fields import Input, Output
from koalapy.model.array import TaskIndices
from koalapy.model.dependency import MAX_DEPENDENCIES, Dependencies, ResultInputs, format_clause
from koalapy.model.field import Bounds, FieldDescription, Length, describe_fields, split_annotation
from koalapy.model.job_spec import Coallocation, Duration, Lease, Pattern, PerNodeBandwidth, PointInTime, PolicyOptions
from koalapy.model.node_requirement import Gpus, NodeMemory
from koalapy.model.request import MAX_ENTRIES, Bundle, Command, Environment, OwnCommand, StopWarning

TIME = re.compile(r"(\w+_)?(at|since|heard|start_estimate)")
"""Names of fields in seconds since the epoch."""
NO_ELEMENTS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class WireFormat:
    """The JSON format of a Python type, if it differs from the default."""

    body: Any
    """Type in requests, with the values of the model."""
    view: Any = None
    """Type in responses; None: as derived from the Python type."""


class Body(Input):
    """A request body derived from a dataclass."""

    kind: ClassVar[Any]

    def to_model(self) -> Any:
        """Return the dataclass; ``validation`` checks its values later."""
        return self.kind(**self.field_values())

    def field_values(self, *without: str) -> dict[str, Any]:
        """Return the values of the fields that the request has, as the dataclass has them, ``without`` some fields."""
        names = (self.model_fields_set & describe_fields(self.kind).keys()).difference(without)
        return {name: _to_model(getattr(self, name)) for name in names}  # the others have the defaults of the dataclass


def _to_model(value: Any) -> Any:
    """Return a value of a body as the dataclass has it: lists as tuples, and nested bodies as dataclasses."""
    if isinstance(value, list):
        return tuple(map(_to_model, value)) if value and isinstance(value[0], Body | list) else tuple(value)
    return value.to_model() if isinstance(value, Body) else value


_PairsView = Annotated[dict[str, str], BeforeValidator(dict)]
_TextView = Annotated[str, BeforeValidator(str)]
WIRE_FORMATS = {
    Command: WireFormat(fields.Command),
    OwnCommand: WireFormat(fields.OwnCommand),
    Environment: WireFormat(fields.Environment, _PairsView),
    PolicyOptions: WireFormat(fields.Options, _PairsView),
    Coallocation: WireFormat(
        fields.Coallocation, Annotated[Literal["allowed", "never"] | int, BeforeValidator(fields.format_coallocation)]
    ),
    Duration: WireFormat(fields.Seconds),
    Lease: WireFormat(fields.Lease, Annotated[Literal["none"] | float, BeforeValidator(fields.format_lease)]),
    PointInTime: WireFormat(fields.PointInTime, fields.Timestamp),
    Dependencies: WireFormat(
        Annotated[list[fields.Clause], Field(max_length=MAX_DEPENDENCIES)],
        list[Annotated[str, BeforeValidator(format_clause)]],
    ),
    ResultInputs: WireFormat(Annotated[list[fields.ResultInputText], Field(max_length=MAX_ENTRIES)], list[_TextView]),
    NodeMemory: WireFormat(fields.Memory),
    Gpus: WireFormat(fields.Gpus, _TextView),
    PerNodeBandwidth: WireFormat(fields.Bandwidth),
    Pattern: WireFormat(fields.Pattern),
    TaskIndices: WireFormat(fields.Indices, _TextView),
    StopWarning: WireFormat(fields.Warning, _TextView),
    Bundle: WireFormat(fields.Bundle, Annotated[str, BeforeValidator(lambda bundle: getattr(bundle, "id", bundle))]),
}


def body_model(
    name: str,
    kind: Any,
    about: str,
    *,
    without: Collection[str] = (),
    only: Collection[str] = (),
    needs: Collection[str] = (),
    elements: Mapping[str, Any] = NO_ELEMENTS,
    is_change: bool = False,
) -> type[Body]:
    """Return the request body that is derived from a dataclass, or from ``only`` some of its fields.

    ``needs``: fields without a default here. ``elements``: types of list entries and unions, by field. ``is_change``:
    each field may be left out, and null means its default.
    """
    types: dict[str, Any] = {}
    for field in describe_fields(kind).values():
        if not field.field.is_settable or field.name in without or (only and field.name not in only):
            continue
        if is_change:
            types[field.name] = (_body_type(field.type, elements.get(field.name)) | None, None)
        else:
            default = ... if field.name in needs or field.default is MISSING else _json_default(field)
            alias = field.json if field.json != field.name else None
            field_type = _body_type(field.type, elements.get(field.name))
            types[field.name] = (
                field_type if default is ... else _allow_none(field, field_type),
                _field_with_default(default, alias),
            )
    model = create_model(name, __base__=Body, __doc__=about, **types)
    model.kind = kind
    return model


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
    """Return the response body that shows a dataclass, or ``only`` some of its fields.

    ``about``: docstring, by default that of the dataclass. ``only_given``: omit fields with default values.
    A time, such as ``at``, ``added_at`` or ``since``, is shown as a timestamp.
    """
    types: dict[str, Any] = {}
    for field in describe_fields(kind).values():
        if field.field.is_settable and field.name not in without and (not only or field.name in only):
            field_type = _view_type(field.type, elements.get(field.name))
            if field.type is float and TIME.fullmatch(field.name):
                field_type = fields.Timestamp
            alias = field.json if field.json != field.name else None
            if only_given and field.default is not MISSING:
                defaults = (None, _json_default(field))
                exclude_if = defaults.__contains__
                types[field.name] = (field_type | None, Field(None, alias=alias, exclude_if=exclude_if))
            else:
                types[field.name] = (_allow_none(field, field_type), Field(..., alias=alias))
    return create_model(name, __base__=base, __doc__=kind.__doc__ if about is None else about, **types)


def _field_with_default(default: Any, alias: str | None) -> Any:
    """Return the field of a body. Pydantic would copy an empty list or object deeply for each request."""
    if default == {}:  # its value is a tuple of pairs
        return Field((), alias=alias, json_schema_extra={"default": default})
    if default == []:
        return Field(default_factory=list, alias=alias, json_schema_extra={"default": default})
    return Field(default, alias=alias)


def _json_default(field: FieldDescription) -> Any:
    """Return a field's default as JSON shows it: an empty tuple becomes an empty list, or an empty object."""
    if field.default != ():
        return field.default
    return {} if field.type in (Environment, PolicyOptions) else []


def _allow_none(field: FieldDescription, kind: Any) -> Any:
    return kind | None if field.is_optional and field.type != Coallocation else kind  # which has a text for None


def _body_type(kind: Any, element: Any | None = None) -> Any:
    """Return the type of a field in request bodies, with its bounds; ``element`` replaces the type of list entries."""
    if kind in WIRE_FORMATS:
        return WIRE_FORMATS[kind].body
    base, marks = split_annotation(kind)
    bounds = next((mark for mark in marks if isinstance(mark, Bounds)), Bounds())
    length = next((mark for mark in marks if isinstance(mark, Length)), None)
    if length is None and (base is str or get_origin(base) is tuple):
        raise TypeError(f"{kind} has no Length, so its size in requests would be unlimited")
    if get_origin(base) is tuple and length:
        entries: Any = GenericAlias(list, (element or _body_type(get_args(base)[0]),))
        extra: Any = {"minItems": length.minimum} if length.minimum else None
        return Annotated[entries, Field(max_length=length.maximum, json_schema_extra=extra)]
    if element is not None:
        return element
    if base is int:
        return Annotated[fields.Number, fields.integer_schema(bounds)]
    if base is float:
        return Annotated[fields.Fraction, fields.number_schema(bounds)]
    if base is str and length:
        text = Annotated[fields.Text, fields.length_field(length)]
        return Annotated[text, AfterValidator(fields.check_one_line)] if length.one_line else text
    return base


def _view_type(kind: Any, element: Any | None = None) -> Any:
    """Return the type of a field in responses.

    ``element`` replaces the type of its list entries, or the type itself.
    """
    if kind in WIRE_FORMATS and WIRE_FORMATS[kind].view:
        return WIRE_FORMATS[kind].view
    base, _ = split_annotation(kind)
    if get_origin(base) is tuple:
        return GenericAlias(list, (element or _view_type(get_args(base)[0]),))
    return element or base
