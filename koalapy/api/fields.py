"""The kinds of fields that go over the wire: what each takes, and how OpenAPI tells it."""

import re
import signal
from datetime import UTC, datetime
from math import isfinite
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from koalapy.model.errors import ProblemCode
from koalapy.model.field import Bounds, Length
from koalapy.model.job import MAX_BANDWIDTH, MAX_DURATION, MAX_MEMORY, NO_LEASE
from koalapy.model.request import (
    MAX_CLUSTER_NAME_LENGTH,
    MAX_LOGICAL_NAME_LENGTH,
    MAX_NAME_LENGTH,
    MAX_OPTIONS,
    MAX_PATH_LENGTH,
    MAX_WORDS,
    StopWarning,
    WarningSignal,
)
from koalapy.model.wording import parse_bandwidth, parse_bytes

MAX_ID = 2**63 - 1
MAX_EXACT_INTEGER = 2**53
"""Whole numbers beyond it are not the same to everybody who reads JSON."""


def seconds(value: object) -> object:
    """Return the seconds of a duration as people write it: ``90m``, ``1h30m``, ``2-12:00:00``, ``1:30:00``.

    A number without a unit is seconds, alone only: ``1h30`` would be read as minutes by some and as seconds by others.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if clock := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", text):
        days, first, second, third = clock.groups()
        hours, minutes, rest = (first, second, third) if third is not None or days else ("0", first, second)
        return int(days or 0) * 86400 + int(hours) * 3600 + int(minutes) * 60 + int(rest or 0)
    if re.fullmatch(r"\d+", text):
        return int(text)
    if text and (units := re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)):
        return sum(int(part or 0) * unit for part, unit in zip(units.groups(), (86400, 3600, 60, 1), strict=True))
    return value


def _duration(value: object) -> object:
    """``seconds``, and no truth value for a number."""
    if isinstance(value, bool):
        raise PydanticCustomError("duration", "is no duration")
    return seconds(value)


def check_one_line(text: str) -> str:
    """Names are shown in tables and terminals, where control characters do harm."""
    if not text.isprintable():
        raise PydanticCustomError("one_line", "has characters that cannot be shown")
    return text


Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
"""Whatever text comes in anywhere: lone surrogates, which UTF-8 cannot encode, and NULs, which neither PostgreSQL nor a
command can hold, are refused by it. No field or parameter takes a bare ``str`` (a test proves it)."""
TEXT = {"type": "string", "pattern": r"^[^\x00]*$"}

Seconds = Annotated[
    float,
    BeforeValidator(_duration),
    Field(le=MAX_DURATION, allow_inf_nan=False),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DURATION},
                {"type": "string", "format": "duration-of-job"},
            ],
            "description": "seconds, or 90m, 1h30m, 1:30:00, 2-12:00:00",
            "examples": [5400, "90m"],
        }
    ),
]
"""Seconds; also accepted as ``90m``, ``1h30m``, ``1:30:00`` or ``2-12:00:00``."""


def _lease(value: object) -> object:
    """Return the seconds of a lease, ``NO_LEASE`` for ``none``."""
    length = NO_LEASE if value == "none" else seconds(value)
    if isinstance(length, bool) or not isinstance(length, int | float) or (length == NO_LEASE and value != "none"):
        raise PydanticCustomError("lease", "is no lease")
    return length


Lease = Annotated[
    float,
    BeforeValidator(_lease),
    Field(le=MAX_DURATION, allow_inf_nan=False),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DURATION},
                {"type": "string", "enum": ["none", "40m"]},
            ],
            "description": "seconds, or 40m, 1h30m, 1:30:00; none: it goes on until its walltime, its cluster or an "
            "operator ends it",
            "examples": [2400, "40m", "none"],
        }
    ),
]
"""Seconds of the daemon's silence, or ``none``."""


def format_lease(value: object) -> object:
    """Return ``none`` for ``NO_LEASE``, and any other value as it is."""
    return "none" if value == NO_LEASE else value


def _bytes(value: Any) -> int:
    try:
        return parse_bytes(value)
    except ValueError:
        raise PydanticCustomError("bytes", "is no number of bytes") from None


def _bandwidth(value: Any) -> float:
    try:
        return parse_bandwidth(value)
    except ValueError:
        raise PydanticCustomError("bandwidth", "is no bandwidth") from None


_UNITS = "(k|M|G|T|Ki|Mi|Gi|Ti)?B"
Bytes = Annotated[
    int,
    BeforeValidator(_bytes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": MAX_MEMORY},
                {"type": "string", "pattern": f"^[1-9][0-9]{{0,2}}{_UNITS}$"},
            ],
            "description": "bytes, or 16GB, 512MiB",
            "examples": [16_000_000_000, "16GB"],
        }
    ),
]
Bandwidth = Annotated[
    float,
    BeforeValidator(_bandwidth),
    Field(allow_inf_nan=False),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": MAX_BANDWIDTH},
                {"type": "string", "pattern": f"^[1-9][0-9]{{0,2}}({_UNITS}|(k|M|G|T)?bit)$"},
            ],
            "description": "bytes per second, or 100MB, 1Gbit",
            "examples": [25_000_000, "1Gbit"],
        }
    ),
]

USUAL_GRACE = 60
"""Seconds, where only the signal is said, as Slurm has it."""


def parse_warning(value: str) -> StopWarning:
    """``TERM@30``: a signal by its name, with or without ``SIG``, or its number, and the grace as any duration."""
    name, at, grace = value.strip().partition("@")
    if ":" in name:
        raise PydanticCustomError("warning_scope", "says which processes to signal")
    try:
        known = signal.Signals(int(name)).name if name.isascii() and name.isdigit() else name.upper()
        told = WarningSignal(known.removeprefix("SIG"))
    except ValueError:
        raise PydanticCustomError("warning_signal", "names no signal that a program can catch") from None
    try:
        length = float(str(seconds(grace))) if at else USUAL_GRACE
        if not isfinite(length):
            raise ValueError(grace)
    except ValueError:
        raise PydanticCustomError("warning_grace", "has no duration after its @") from None
    return StopWarning(told, length)


StopWarningText = Annotated[
    Text,
    AfterValidator(lambda text: str(parse_warning(text))),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": f"^({'|'.join(WarningSignal)})@[1-9][0-9]{{0,1}}$",
            "description": "SIGNAL@SECONDS: what a program is told, and how long before it is stopped; more seconds, "
            "as far as the daemon allows, and durations such as USR1@2m are taken, too",
            "examples": ["TERM@30", "USR1@60"],
        }
    ),
]

MAX_INTEGER = 2**31 - 1
"""The largest whole number that databases hold in a column of a usual kind."""


def integer_schema(bounds: Bounds) -> Any:
    """How OpenAPI tells the bounds of a number that are checked with a better message later."""
    most = MAX_INTEGER if bounds.maximum is None else bounds.maximum
    least = {} if bounds.minimum is None else {"minimum": bounds.minimum}
    return WithJsonSchema({"type": "integer", **least, "maximum": most})


def number_schema(bounds: Bounds) -> Any:
    told = {"minimum": bounds.minimum, "exclusiveMinimum": bounds.above, "maximum": bounds.maximum}
    return WithJsonSchema({"type": "number", **{name: bound for name, bound in told.items() if bound is not None}})


def within(length: Length) -> Any:
    """The bounds of a text, or of what has entries; that there must be some is checked with a better message later."""
    if length.one_line:
        return Field(
            min_length=length.minimum or None, max_length=length.maximum, json_schema_extra={"format": "one-line"}
        )
    return Field(min_length=length.minimum or None, max_length=length.maximum)


def _whole(value: object) -> object:
    # JSON does not tell 6 from 6.0.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Number = Annotated[int, BeforeValidator(_whole), Field(strict=True, ge=-(2**31), le=MAX_INTEGER)]
"""A whole number as databases hold it; what makes sense is checked with a better message later."""
Count = Annotated[int, BeforeValidator(_whole), Field(strict=True, ge=0, le=MAX_INTEGER)]
Positive = Annotated[Number, integer_schema(Bounds(minimum=1))]

JobId = Annotated[
    int,
    BeforeValidator(_whole),
    Field(strict=True, ge=-MAX_EXACT_INTEGER, le=MAX_EXACT_INTEGER),
    integer_schema(Bounds(-MAX_EXACT_INTEGER, MAX_EXACT_INTEGER)),
]

Fraction = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A number; its bounds are checked with a better message later."""


def _combined(value: object) -> object:
    """How many clusters ``allowed``, ``never`` or a number lets a job combine at most; None is as many as it takes."""
    if value is None or value == "allowed":
        return None
    if value == "never":
        return 1
    value = _whole(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise PydanticCustomError("coallocation", "is no co-allocation")
    return value


CoallocationJson: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "enum": ["allowed", "never"]},
        {"type": "integer", "minimum": 1, "maximum": MAX_INTEGER},
    ],
    "description": "allowed (as many clusters as it takes), never, or the most clusters to combine",
    "default": "allowed",
    "examples": ["never", 2],
}
Coallocation = Annotated[int | None, BeforeValidator(_combined), WithJsonSchema(CoallocationJson)]

Name = Annotated[Text, within(Length(MAX_NAME_LENGTH, one_line=True)), AfterValidator(check_one_line)]
Reason = Annotated[Text, within(Length(1000, one_line=True)), AfterValidator(check_one_line)]
FileName = Annotated[Text, within(Length(MAX_PATH_LENGTH))]
Cluster = Annotated[Text, within(Length(MAX_CLUSTER_NAME_LENGTH, minimum=1))]
LogicalName = Annotated[
    Text, within(Length(MAX_LOGICAL_NAME_LENGTH, minimum=1, one_line=True)), AfterValidator(check_one_line)
]
Pattern = Annotated[Text, Field(max_length=MAX_PATH_LENGTH, json_schema_extra={"format": "file-pattern"})]


def _words(least: int) -> Any:
    first = TEXT | {"minLength": 1}
    return WithJsonSchema(
        {"type": "array", "minItems": least, "maxItems": MAX_WORDS, "prefixItems": [first], "items": TEXT}
    )


Command = Annotated[list[Text], Field(max_length=MAX_WORDS), _words(0)]
"""A program and its arguments."""
OwnCommand = Annotated[list[Text], Field(max_length=MAX_WORDS), _words(1)]
"""That of one component."""


def _names(most: int, name: dict[str, str]) -> Any:
    return WithJsonSchema(
        {"type": "object", "maxProperties": most, "propertyNames": name, "additionalProperties": TEXT}
    )


Environment = Annotated[dict[Text, Text], Field(max_length=MAX_WORDS), _names(MAX_WORDS, {"pattern": r"^[^=\x00]+$"})]
"""Variables of programs; what may be a name is checked with a better message later."""
Options = Annotated[dict[Text, Text], Field(max_length=MAX_OPTIONS), _names(MAX_OPTIONS, TEXT)]


def moment(at: object) -> object:
    """Seconds since the epoch as ISO 8601 in UTC with milliseconds."""
    if not isinstance(at, float | int):
        return at
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Timestamp = Annotated[str, BeforeValidator(moment)]
"""In answers: made of seconds since the epoch."""


class Input(BaseModel):
    """A body as it comes in."""

    model_config = ConfigDict(extra="forbid")


class Output(BaseModel):
    """An answer, or a part of one; made of whatever has attributes of these names."""

    model_config = ConfigDict(extra="forbid", from_attributes=True, validate_by_name=True)


def as_json(view: Output) -> Any:
    return view.model_dump(mode="json", by_alias=True)


class Problem(BaseModel):
    """What went wrong (RFC 9457), with the field, its value, and the way out."""

    type: str = "about:blank"
    title: str
    status: int
    code: ProblemCode
    detail: str
    field: str = ""
    value: Any = None
    hint: str = ""
