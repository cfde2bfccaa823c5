"""Types of fields in requests and responses, with their validation and OpenAPI schemas."""

import re
import signal
import time
from datetime import UTC, datetime
from math import isfinite
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from koalapy.model.array import MAX_ARRAY_TEXT_LENGTH, TaskIndices
from koalapy.model.dependency import FORM, Dependency, ResultInput, parse_clause, parse_result_input
from koalapy.model.errors import ProblemCode
from koalapy.model.field import Bounds, Length
from koalapy.model.job import NO_LEASE
from koalapy.model.job_spec import MAX_BANDWIDTH, MAX_DURATION
from koalapy.model.node_requirement import MAX_GPUS, MAX_MEMORY, Gpus, parse_gpus
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
from koalapy.model.times import MAX_TIME, parse_time
from koalapy.model.wording import MIN_MEMORY, is_bare_memory, parse_bandwidth, parse_memory

MAX_ID = 2**63 - 1
MAX_EXACT_INTEGER = 2**53
"""JSON parsers that use floating-point numbers cannot represent larger integers exactly."""


def parse_duration(value: object) -> object:
    """Return the seconds of a duration such as ``90m``, ``1h30m``, ``2-12:00:00`` or ``1:30:00``.

    Return any other value unchanged. A number without a unit is in seconds, but only by itself: ``1h30`` is ambiguous.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if clock := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", text):
        days, first, second, third = clock.groups()
        hours, minutes, seconds = (first, second, third) if third is not None or days else ("0", first, second)
        return int(days or 0) * 86400 + int(hours) * 3600 + int(minutes) * 60 + int(seconds or 0)
    if re.fullmatch(r"\d+", text):
        return int(text)
    if text and (units := re.fullmatch("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in "dhms"), text)):
        return sum(float(part or 0) * unit for part, unit in zip(units.groups(), (86400, 3600, 60, 1), strict=True))
    return value


def _parse_seconds(value: object) -> object:
    """Return the seconds of a number or a duration such as ``90m``; reject true and false."""
    if isinstance(value, bool):  # pydantic would convert it to a number
        raise PydanticCustomError("duration", "is not a duration")
    if is_bare_number(value):
        raise PydanticCustomError("bare_duration", "has no unit")
    return parse_duration(value)


def is_bare_number(value: object) -> bool:
    """Return whether a text is a number without a unit, which may mean seconds or, as in Slurm, minutes."""
    return isinstance(value, str) and re.fullmatch(r"\s*\+?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", value, re.I) is not None


def check_one_line(text: str) -> str:
    """Reject control characters, which could change a terminal or break a table."""
    if not text.isprintable():
        raise PydanticCustomError("one_line", "has control characters")
    return text


Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
"""The type of all text in requests. It rejects lone surrogates, which UTF-8 cannot encode, and NUL characters, which
PostgreSQL and commands cannot contain. A test checks that no field or parameter is a plain ``str``."""
TEXT = {"type": "string", "pattern": r"^[^\x00]*$"}

Seconds = Annotated[
    float,
    BeforeValidator(_parse_seconds),
    Field(le=MAX_DURATION, allow_inf_nan=False),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DURATION},
                {"type": "string", "format": "duration-of-job"},
            ],
            "description": "seconds, or a duration such as 90m, 1h30m, 1:30:00 or 2-12:00:00",
            "examples": [5400, "90m"],
        }
    ),
]
"""Seconds; also accepted as ``90m``, ``1h30m``, ``1:30:00`` or ``2-12:00:00``."""


def _parse_lease(value: object) -> object:
    """Return the seconds of a number or a duration such as ``40m``, and ``NO_LEASE`` for ``none``.

    Raise the error that pydantic reports for other values.
    """
    length = NO_LEASE if value == "none" else _parse_seconds(value)
    if not isinstance(length, int | float) or (length == NO_LEASE and value != "none"):
        raise PydanticCustomError("lease", "is not a lease")
    return length


def _parse_moment(value: object) -> float:
    """Return the seconds since the epoch of a point in time; raise the error that pydantic reports for other values.

    A time of day without a time zone is in UTC; the command line sends its local times with their zones.
    """
    if isinstance(value, int | float) or (isinstance(value, str) and value.strip().isdecimal()):
        raise PydanticCustomError("bare_time", "is a number alone")
    try:
        moment = parse_time(str(value), time.time())
    except (ValueError, OverflowError):
        raise PydanticCustomError("time", "is not a point in time") from None
    if not 0 < moment <= MAX_TIME:
        raise PydanticCustomError("far_time", "is too early or too late")
    return moment


PointInTime = Annotated[
    float,
    BeforeValidator(_parse_moment),
    WithJsonSchema(
        {
            "type": "string",
            "format": "point-in-time",
            "description": "a time in ISO 8601, UTC unless it has an offset; or 16:00, tomorrow, noon, now+90m",
            "examples": ["2026-12-01T16:00:00Z", "now+90m"],
        }
    ),
]
"""A point in time, in seconds since the epoch."""


def _parse_clause(value: object) -> object:
    """Return the clause of a text such as ``7:any?8``, or of a job's number."""
    if isinstance(value, bool):
        raise PydanticCustomError("dependency", "is not a dependency")
    try:
        return parse_clause(str(_to_integer(value)))
    except ValueError:
        raise PydanticCustomError("dependency", "is not a dependency") from None


_DEPENDENCY = "([1-9][0-9]{0,8}|#[0-9]{1,3})(:(ok|failed|any))?"
Clause = Annotated[
    tuple[Dependency, ...],
    BeforeValidator(_parse_clause),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": rf"^{_DEPENDENCY}(\?{_DEPENDENCY})*$",
            "description": "JOB, JOB:ok, JOB:failed or JOB:any, the end that another job must have; ? separates "
            "alternatives; in a batch, #0 is its first job",
            "examples": ["7", "7:any", "7:ok?8:failed", "#0:ok"],
        }
    ),
]
"""Alternatives, of which one must hold before a job may start."""


def _parse_result_input(value: object) -> ResultInput:
    """Return the result of another job that a text names; raise the error that pydantic reports for other values."""
    try:
        return parse_result_input(value if isinstance(value, str) else "")
    except ValueError:
        raise PydanticCustomError("result_input", "is not a result of a job") from None


ResultInputText = Annotated[
    ResultInput,
    BeforeValidator(_parse_result_input),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^[1-9][0-9]{0,8}(\[[0-9]{1,4}\])?(\.[0-9])?:[a-z]{1,9}(:as=[a-z]{1,9})?$",
            "description": f"{FORM}; with :as=NAME under another name",
            "examples": ["7:out.csv", "7[3]:out.csv", "7.1:out.csv:as=in.csv"],
        }
    ),
]
"""A collected file of another job."""

Lease = Annotated[
    float,
    BeforeValidator(_parse_lease),
    Field(le=MAX_DURATION, allow_inf_nan=False),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DURATION},
                {"type": "string", "enum": ["none", "40m"]},
            ],
            "description": "seconds, or a duration such as 40m or 1h30m; none: the program runs until its walltime, "
            "its cluster or an operator ends it",
            "examples": [2400, "40m", "none"],
        }
    ),
]
"""Seconds without contact to the daemon after which a program is stopped, or ``none``."""


def format_lease(value: object) -> object:
    """Return ``none`` for ``NO_LEASE``, and any other value unchanged."""
    return "none" if value == NO_LEASE else value


def _parse_memory(value: Any) -> int:
    """Return the bytes of a size such as ``10GB``; raise the error that pydantic reports for other values."""
    try:
        return parse_memory(value)
    except ValueError as error:
        problem = "which has no unit" if is_bare_memory(value) else "not an amount of memory"
        raise PydanticCustomError("memory", "{problem}", {"problem": problem, "hint": str(error)}) from None


def _parse_bandwidth(value: Any) -> float:
    """Return bytes per second, as of ``1Gbit``; raise the error that pydantic reports for other values."""
    try:
        return parse_bandwidth(value)
    except ValueError:
        raise PydanticCustomError("bandwidth", "is not a bandwidth") from None


_UNITS = "(k|M|G|T|Ki|Mi|Gi|Ti)?B"
Memory = Annotated[
    int,
    BeforeValidator(_parse_memory),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": MIN_MEMORY, "maximum": MAX_MEMORY},
                {"type": "string", "pattern": "^[1-9][0-9]{0,2}(M|G|T|Mi|Gi|Ti)B$"},
            ],
            "description": "a size such as 16GB or 512MiB, or bytes",
            "examples": [16_000_000_000, "16GB"],
        }
    ),
]
Bandwidth = Annotated[
    float,
    BeforeValidator(_parse_bandwidth),
    Field(allow_inf_nan=False),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": MAX_BANDWIDTH},
                {"type": "string", "pattern": f"^[1-9][0-9]{{0,2}}({_UNITS}|(k|M|G|T)?bit)$"},
            ],
            "description": "bytes per second, or a rate such as 100MB or 1Gbit",
            "examples": [25_000_000, "1Gbit"],
        }
    ),
]


def parse_indices(value: str) -> TaskIndices:
    """Parse the indices of an array, such as ``1-200%16``; raise the error that pydantic reports for other texts."""
    try:
        return TaskIndices.parse(value)
    except ValueError as error:
        raise PydanticCustomError("array", "{problem}", {"problem": str(error)}) from None


ArrayText = Annotated[
    Text,
    Field(max_length=MAX_ARRAY_TEXT_LENGTH),
    AfterValidator(lambda text: str(parse_indices(text))),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": "^[1-9][0-9]{0,2}(-9[0-9]{3}(:[1-9])?)?(%[1-9])?$",
            "maxLength": MAX_ARRAY_TEXT_LENGTH,
            "description": "indices and ranges, with or without a step, separated by commas; after a % the maximum "
            "number of tasks at once",
            "examples": ["1-200%16", "0-100:5", "3,7,9"],
        }
    ),
]
"""The indices of the tasks of an array."""

DEFAULT_GRACE_S = 60
"""Grace of a warning without a duration, as in Slurm."""


def parse_warning(value: str) -> StopWarning:
    """Parse a warning such as ``TERM@30``: a signal by name or number, and the grace as any duration."""
    name, at, grace = value.strip().partition("@")
    if ":" in name:
        raise PydanticCustomError("warning_scope", "says which processes to signal")
    try:
        signal_name = signal.Signals(int(name)).name if name.isascii() and name.isdigit() else name.upper()
        warning_signal = WarningSignal(signal_name.removeprefix("SIG"))
    except ValueError:
        raise PydanticCustomError("warning_signal", "names no signal that a program can catch") from None
    try:
        grace_s = float(str(parse_duration(grace))) if at else DEFAULT_GRACE_S
        if not isfinite(grace_s):
            raise ValueError(grace)
    except ValueError:
        raise PydanticCustomError("warning_grace", "has no duration after its @") from None
    return StopWarning(warning_signal, grace_s)


StopWarningText = Annotated[
    Text,
    AfterValidator(lambda text: str(parse_warning(text))),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": f"^({'|'.join(WarningSignal)})@[1-9][0-9]{{0,1}}$",
            "description": "SIGNAL@SECONDS: the signal that a program receives, and how long before it is stopped; "
            "longer times up to the daemon's limit and durations such as USR1@2m are accepted too",
            "examples": ["TERM@30", "USR1@60"],
        }
    ),
]


def _parse_gpus(value: object) -> Gpus:
    """Return the GPUs of a number or a text such as ``a100:2``; raise the error that pydantic reports for others."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(value)
        return parse_gpus(str(_to_integer(value)))
    except ValueError:
        raise PydanticCustomError("gpus", "is not a number of GPUs") from None


GpusText = Annotated[
    Gpus,
    BeforeValidator(_parse_gpus),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": MAX_GPUS},
                {"type": "string", "pattern": "^([A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}:)?[1-9][0-9]{0,2}$"},
            ],
            "description": "a number of GPUs, or TYPE:NUMBER such as a100:2",
            "examples": [1, "a100:2"],
        }
    ),
]

MAX_INTEGER = 2**31 - 1
"""The largest value of a database's integer column."""


def integer_schema(bounds: Bounds) -> Any:
    """Return the OpenAPI schema of an integer; ``validation`` checks its bounds with a better message."""
    maximum = MAX_INTEGER if bounds.maximum is None else bounds.maximum
    minimum = {} if bounds.minimum is None else {"minimum": bounds.minimum}
    return WithJsonSchema({"type": "integer", **minimum, "maximum": maximum})


def number_schema(bounds: Bounds) -> Any:
    """Return the OpenAPI schema of a number; ``validation`` checks its bounds with a better message."""
    limits = {"minimum": bounds.minimum, "exclusiveMinimum": bounds.above, "maximum": bounds.maximum}
    return WithJsonSchema({"type": "number", **{name: bound for name, bound in limits.items() if bound is not None}})


def length_field(length: Length) -> Any:
    """Return the length limits of a text or list."""
    extra: Any = {"format": "one-line"} if length.one_line else None
    return Field(min_length=length.minimum or None, max_length=length.maximum, json_schema_extra=extra)


def _to_integer(value: object) -> object:
    # JSON has one number type: 6 and 6.0 are the same.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Number = Annotated[int, BeforeValidator(_to_integer), Field(strict=True, ge=-(2**31), le=MAX_INTEGER)]
"""An integer that fits a database column; ``validation`` checks narrower bounds with a better message."""
Count = Annotated[int, BeforeValidator(_to_integer), Field(strict=True, ge=0, le=MAX_INTEGER)]
Positive = Annotated[Number, integer_schema(Bounds(minimum=1))]

JobId = Annotated[
    int,
    BeforeValidator(_to_integer),
    Field(strict=True, ge=-MAX_EXACT_INTEGER, le=MAX_EXACT_INTEGER),
    integer_schema(Bounds(-MAX_EXACT_INTEGER, MAX_EXACT_INTEGER)),
]

Fraction = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A number; ``validation`` checks its bounds with a better message."""


def _parse_coallocation(value: object) -> object:
    """Return the maximum number of clusters that a job may combine, None for ``allowed``."""
    if value is None or value == "allowed":
        return None
    if value == "never":
        return 1
    value = _to_integer(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise PydanticCustomError("coallocation", "is not a valid number of clusters")
    return value


CoallocationJson: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "enum": ["allowed", "never"]},
        {"type": "integer", "minimum": 1, "maximum": MAX_INTEGER},
    ],
    "description": "allowed (any number of clusters), never, or the maximum number of clusters",
    "default": "allowed",
    "examples": ["never", 2],
}
Coallocation = Annotated[int | None, BeforeValidator(_parse_coallocation), WithJsonSchema(CoallocationJson)]

Name = Annotated[Text, length_field(Length(MAX_NAME_LENGTH, one_line=True)), AfterValidator(check_one_line)]
Reason = Annotated[Text, length_field(Length(1000, one_line=True)), AfterValidator(check_one_line)]
GivenReason = Annotated[Reason, Field(pattern=r"^[^\x00]*[^\x00 ][^\x00]*$")]
"""A reason that is not empty."""
FileName = Annotated[Text, length_field(Length(MAX_PATH_LENGTH))]
Cluster = Annotated[Text, length_field(Length(MAX_CLUSTER_NAME_LENGTH, minimum=1))]
LogicalName = Annotated[
    Text, length_field(Length(MAX_LOGICAL_NAME_LENGTH, minimum=1, one_line=True)), AfterValidator(check_one_line)
]
Pattern = Annotated[Text, Field(max_length=MAX_PATH_LENGTH, json_schema_extra={"format": "file-pattern"})]


def _command_schema(minimum_length: int) -> Any:
    """Return the OpenAPI schema of a program, which must not be empty, and its arguments, which may be."""
    program = TEXT | {"minLength": 1}
    return WithJsonSchema(
        {"type": "array", "minItems": minimum_length, "maxItems": MAX_WORDS, "prefixItems": [program], "items": TEXT}
    )


Command = Annotated[list[Text], Field(max_length=MAX_WORDS), _command_schema(0)]
"""A program and its arguments."""
OwnCommand = Annotated[list[Text], Field(max_length=MAX_WORDS), _command_schema(1)]
"""The program of one component, and its arguments."""


def _mapping_schema(max_entries: int, name: dict[str, str]) -> Any:
    """Return the OpenAPI schema of an object of texts; ``name`` is the schema of its keys."""
    return WithJsonSchema(
        {"type": "object", "maxProperties": max_entries, "propertyNames": name, "additionalProperties": TEXT}
    )


Environment = Annotated[
    dict[Text, Text], Field(max_length=MAX_WORDS), _mapping_schema(MAX_WORDS, {"pattern": r"^[^=\x00]+$"})
]
"""Environment variables; ``validation`` checks their names with a better message."""
Options = Annotated[dict[Text, Text], Field(max_length=MAX_OPTIONS), _mapping_schema(MAX_OPTIONS, TEXT)]


def format_timestamp(value: object) -> object:
    """Return seconds since the epoch as ISO 8601 in UTC with milliseconds, and any other value unchanged."""
    if not isinstance(value, float | int):
        return value
    return datetime.fromtimestamp(value, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Timestamp = Annotated[str, BeforeValidator(format_timestamp)]
"""A time in a response, built from seconds since the epoch."""


class Input(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid")


class Output(BaseModel):
    """The body of a response, or a part of one, built from any object with attributes of these names."""

    model_config = ConfigDict(extra="forbid", from_attributes=True, validate_by_name=True)


def as_json(view: Output) -> Any:
    return view.model_dump(mode="json", by_alias=True)


class Problem(BaseModel):
    """An error (RFC 9457), with the wrong field and its value, and a hint how to correct it."""

    type: str = "about:blank"
    title: str
    status: int
    code: ProblemCode
    detail: str
    field: str = ""
    value: Any = None
    hint: str = ""
