"""The kinds of fields that go over the wire: what each takes, and how OpenAPI tells it."""

import re
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

MOST_WORDS = 10_000
"""Words of a command, or variables of an environment."""
MOST_ENTRIES = 1000
"""Inputs of a component, or patterns of files."""
MOST_JOBS = 1000
"""Jobs that may be acted on at once."""
LARGEST_ID = 2**63 - 1
EXACT = 2**53
"""Whole numbers beyond it are not the same to everybody who reads JSON."""
MOST_OPTIONS = 100
"""Options of a policy, or ways to split a request."""


def seconds(value: object) -> object:
    """A duration in seconds, or as people write it: ``90m``, ``1h30m``, ``2-12:00:00``, ``1:30:00``."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if clock := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", text):
        days, first, second, third = clock.groups()
        hours, minutes, rest = (first, second, third) if third is not None or days else ("0", first, second)
        return int(days or 0) * 86400 + int(hours) * 3600 + int(minutes) * 60 + int(rest or 0)
    if text and (units := re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)):
        return sum(int(part or 0) * unit for part, unit in zip(units.groups(), (86400, 3600, 60, 1), strict=True))
    return value


def _duration(value: object) -> object:
    """``seconds``, and no truth value for a number."""
    if isinstance(value, bool):
        raise PydanticCustomError("duration", "is no duration")
    return seconds(value)


def _one_line(text: str) -> str:
    """Names are shown in tables and terminals, where control characters do harm."""
    if not text.isprintable():
        raise PydanticCustomError("one_line", "has characters that cannot be shown")
    return text


Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
"""Whatever text comes in anywhere: lone surrogates, which UTF-8 cannot encode, and NULs, which neither PostgreSQL nor a
command can hold, are refused by it. No field or parameter takes a bare ``str`` (a test proves it)."""
TEXT = {"type": "string", "pattern": r"^[^\x00]*$"}

LINE = {"format": "one-line"}
"""A text of characters that can be shown."""

LONGEST = 100 * 365 * 86400
"""Seconds."""

Seconds = Annotated[
    float,
    BeforeValidator(_duration),
    Field(le=LONGEST, allow_inf_nan=False),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST},
                {"type": "string", "format": "duration-of-job"},
            ],
            "description": "seconds, or 90m, 1h30m, 1:30:00, 2-12:00:00",
            "examples": [5400, "90m"],
        }
    ),
]
"""Seconds; also accepted as ``90m``, ``1h30m``, ``1:30:00`` or ``2-12:00:00``."""

LARGEST = 2**31 - 1
"""The largest whole number that databases hold in a column of a usual kind."""


def _number(least: int, most: int = LARGEST) -> Any:
    """How OpenAPI tells the bounds of a number that are checked with a better message later."""
    return WithJsonSchema({"type": "integer", "minimum": least, "maximum": most})


def _fraction(**bounds: float) -> Any:
    return WithJsonSchema({"type": "number", "maximum": 1, **bounds})


def _whole(value: object) -> object:
    """JSON knows no difference between 6 and 6.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Number = Annotated[int, BeforeValidator(_whole), Field(strict=True, ge=-(2**31), le=LARGEST)]
"""A whole number as databases hold it; what makes sense is checked with a better message later."""
Positive = Annotated[Number, _number(1)]
NotNegative = Annotated[Number, _number(0)]
ExitCode = Annotated[Number, _number(1, 255)]

JobId = Annotated[int, BeforeValidator(_whole), Field(strict=True, ge=-EXACT, le=EXACT), _number(-EXACT, EXACT)]

Fraction = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A number; its bounds are checked with a better message later."""
Share = Annotated[Fraction, _fraction(minimum=0)]
Ratio = Annotated[Fraction, _fraction(exclusiveMinimum=0)]


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
    "anyOf": [{"type": "string", "enum": ["allowed", "never"]}, {"type": "integer", "minimum": 1, "maximum": LARGEST}],
    "description": "allowed (as many clusters as it takes), never, or the most clusters to combine",
    "default": "allowed",
    "examples": ["never", 2],
}
Coallocation = Annotated[int | None, BeforeValidator(_combined), WithJsonSchema(CoallocationJson)]

Name = Annotated[Text, Field(max_length=200, json_schema_extra=LINE), AfterValidator(_one_line)]
Reason = Annotated[Text, Field(max_length=1000, json_schema_extra=LINE), AfterValidator(_one_line)]
FileName = Annotated[Text, Field(max_length=4096)]
Cluster = Annotated[Text, Field(min_length=1, max_length=100)]
LogicalName = Annotated[Text, Field(min_length=1, max_length=1000, json_schema_extra=LINE), AfterValidator(_one_line)]
Pattern = Annotated[Text, Field(max_length=4096, json_schema_extra={"format": "file-pattern"})]


def _words(least: int) -> Any:
    first = TEXT | {"minLength": 1}
    return WithJsonSchema(
        {"type": "array", "minItems": least, "maxItems": MOST_WORDS, "prefixItems": [first], "items": TEXT}
    )


Command = Annotated[list[Text], Field(max_length=MOST_WORDS), _words(0)]
"""A program and its arguments."""
OwnCommand = Annotated[list[Text], Field(max_length=MOST_WORDS), _words(1)]
"""That of one component."""


def _names(most: int, name: dict[str, str]) -> Any:
    """How OpenAPI tells of an object whose names are free."""
    return WithJsonSchema(
        {"type": "object", "maxProperties": most, "propertyNames": name, "additionalProperties": TEXT}
    )


Environment = Annotated[dict[Text, Text], Field(max_length=MOST_WORDS), _names(MOST_WORDS, {"pattern": r"^[^=\x00]+$"})]
"""Variables of programs; what may be a name is checked with a better message later."""
Options = Annotated[dict[Text, Text], Field(max_length=MOST_OPTIONS), _names(MOST_OPTIONS, TEXT)]


def moment(at: object) -> object:
    """Seconds since the epoch as ISO 8601 in UTC with milliseconds."""
    if not isinstance(at, float | int):
        return at
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Moment = Annotated[str, BeforeValidator(moment)]
"""In answers: made of seconds since the epoch."""


class Input(BaseModel):
    """A body as it comes in."""

    model_config = ConfigDict(extra="forbid")


class Output(BaseModel):
    """An answer, or a part of one; made of whatever has attributes of these names."""

    model_config = ConfigDict(extra="forbid", from_attributes=True, validate_by_name=True)


class Problem(BaseModel):
    """What went wrong (RFC 9457), with the field, its value, and the way out."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    field: str = ""
    value: Any = None
    hint: str = ""
