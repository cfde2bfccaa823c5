"""Types of fields in requests and responses, with their validation and OpenAPI schemas."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import Annotated, Any
from urllib.parse import urlencode

from annotated_types import GroupedMetadata
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema
from pydantic_core import PydanticCustomError

from koalapy.model import node_requirement, request
from koalapy.model.array import MAX_ARRAY_TEXT_LENGTH, TaskIndices
from koalapy.model.dependency import FORM, Dependency, ResultInput, format_clause, parse_clause, parse_result_input
from koalapy.model.errors import ProblemCode, reject
from koalapy.model.field import Bounds, Length
from koalapy.model.job import NO_LEASE
from koalapy.model.job_spec import MAX_BANDWIDTH, MAX_DURATION
from koalapy.model.node_requirement import MAX_GPUS, MAX_MEMORY, parse_gpus
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
from koalapy.model.times import MAX_PAST_TIME_LENGTH, MAX_TIME, format_exact_time, parse_moment, parse_time
from koalapy.model.wording import MIN_MEMORY, is_bare_memory, parse_bandwidth, parse_memory

MAX_ID = 2**63 - 1
MAX_PAGE_SIZE = 1000
MAX_EXACT_INTEGER = 2**53
"""JSON parsers that use floating-point numbers cannot represent larger integers exactly."""


def correction(problem: str, hint: str) -> PydanticCustomError:
    """Return the error of a value that has no meaning, with the problem and a hint for the caller."""
    return PydanticCustomError("correction", "{problem}", {"problem": problem, "hint": hint})


@dataclass(frozen=True, eq=False)
class _TextForm(GroupedMetadata):
    """The marks by which pydantic reads, shows and describes a type of ``text_form``."""

    parse: Callable[[Any], Any]
    problem: str
    hint: str
    show: Callable[[Any], object] | None
    schema: dict[str, Any]

    def __iter__(self) -> Iterator[Any]:
        yield BeforeValidator(self._read)
        yield WithJsonSchema(self.schema)
        if self.show is not None:
            yield PlainSerializer(self.show, when_used="json-unless-none")

    def _read(self, value: Any) -> Any:
        try:
            return self.parse(value)
        except PydanticCustomError:
            raise
        except (ValueError, OverflowError):
            raise correction(self.problem, self.hint) from None


def text_form(
    parse: Callable[[Any], Any], problem: str, hint: str, show: Callable[[Any], object] | None = None, **schema: Any
) -> GroupedMetadata:
    """Return the format of a type, with its OpenAPI ``schema``; ``parse`` reads values from texts or numbers.

    A ``ValueError`` of ``parse`` is reported with ``problem`` and ``hint``. ``show`` returns the text of a value.
    """
    return _TextForm(parse, problem, hint, show, schema)


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as ``90m``, ``1h30m``, ``2-12:00:00`` or ``1:30:00``, or of a bare number.

    Raise ``ValueError`` for another text, also for ``1h30``, which is ambiguous.
    """
    text = text.strip()
    if is_bare_number(text):
        return float(text)
    if clock := re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9}):(\d\d)(?::(\d\d))?", text):
        days, first, second, third = clock.groups()
        hours, minutes, seconds = (first, second, third) if third is not None or days else ("0", first, second)
        return float(int(days or 0) * 86400 + int(hours) * 3600 + int(minutes) * 60 + int(seconds or 0))
    units = re.fullmatch("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in "dhms"), text)
    if not text or units is None:
        raise ValueError(text)
    return sum(float(part or 0) * unit for part, unit in zip(units.groups(), (86400, 3600, 60, 1), strict=True))


def is_bare_number(text: str) -> bool:
    """Return whether a text is a number without a unit, which may mean seconds or, as in Slurm, minutes."""
    return re.fullmatch(r"\s*\+?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", text, re.I) is not None


def _parse_seconds(value: object) -> object:
    """Return the seconds of a duration such as ``90m``; reject true and false, which pydantic converts to numbers."""
    if not isinstance(value, str):
        if isinstance(value, bool):
            raise ValueError(value)
        return value
    if is_bare_number(value):
        if float(value) == 0:
            raise correction("", "give more than 0 seconds, with a unit: 90s, 90m")
        number = f"{float(value):.15g}"
        raise correction("which may mean seconds or minutes", f"give {number}s or {number}m")
    return parse_duration(value)


def check_one_line(text: str) -> str:
    """Reject control characters, which could change a terminal or break a table."""
    if not text.isprintable():
        raise correction("with control characters", "leave them out")
    return text


Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
"""The type of all text in requests. It rejects lone surrogates, which UTF-8 cannot encode, and NUL characters, which
PostgreSQL and commands cannot contain. A test checks that no field or parameter is a plain ``str``."""
TEXT = {"type": "string", "pattern": r"^[^\x00]*$"}
_DURATION = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DURATION}

Seconds = Annotated[
    float,
    text_form(
        _parse_seconds,
        "not a duration",
        "give each number a unit: 90s, 90m, 1h30m, or as 1:30:00",
        anyOf=[_DURATION, {"type": "string", "format": "duration-of-job"}],
        description=("seconds, or a duration such as 90m, 1h30m, 1:30:00 or 2-12:00:00"),
        examples=[5400, "90m"],
    ),
    Field(le=MAX_DURATION, allow_inf_nan=False),
]
"""Seconds; also accepted as ``90m``, ``1h30m``, ``1:30:00`` or ``2-12:00:00``."""


def _parse_lease(value: object) -> object:
    """Return the seconds of a number or a duration such as ``40m``, and ``NO_LEASE`` for ``none``."""
    if value == "none":
        return NO_LEASE
    length = _parse_seconds(value)
    if not isinstance(length, int | float) or length == NO_LEASE:
        raise ValueError(value)
    return length


def format_lease(value: object) -> object:
    """Return ``none`` for ``NO_LEASE``, and any other value unchanged."""
    return "none" if value == NO_LEASE else value


Lease = Annotated[
    float,
    text_form(
        _parse_lease,
        "not a lease",
        "give more than 0 seconds, 40m, 1h30m, or none",
        format_lease,
        anyOf=[_DURATION, {"type": "string", "enum": ["none", "40m"]}],
        description=(
            "seconds, or a duration such as 40m or 1h30m; none: the program runs until its walltime, "
            "its cluster or an operator ends it"
        ),
        examples=[2400, "40m", "none"],
    ),
    Field(le=MAX_DURATION, allow_inf_nan=False),
]
"""Seconds without contact to the daemon after which a program is stopped, or ``none``."""


def _parse_moment(value: object) -> float:
    """Return the seconds since the epoch of a point in time.

    A time of day without a time zone is in UTC; the command line sends its local times with their zones.
    """
    if isinstance(value, int | float) or (isinstance(value, str) and value.strip().isdecimal()):
        hint = 'give now+90m or now+90s for a time from now, or a text as "16:00" or "2026-12-01T16:00"'
        raise correction("a number alone, which is no point in time", hint)
    moment = parse_time(str(value), time.time())
    if not 0 < moment <= MAX_TIME:
        raise correction("not between 1970 and 2242", "give a time in the next years")
    return moment


def format_timestamp(value: object) -> object:
    """Return seconds since the epoch as ISO 8601 in UTC with milliseconds, and any other value unchanged."""
    if not isinstance(value, float | int):
        return value
    return datetime.fromtimestamp(value, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Timestamp = Annotated[str, BeforeValidator(format_timestamp)]
"""A time in a response, built from seconds since the epoch."""
PointInTime = Annotated[
    float,
    text_form(
        _parse_moment,
        "not a point in time",
        "give 2026-12-01T16:00 (UTC, or with an offset), 16:00, tomorrow, noon, or now+90m",
        format_timestamp,
        type=("string"),
        format=("point-in-time"),
        description=("a time in ISO 8601, UTC unless it has an offset; or 16:00, tomorrow, noon, now+90m"),
        examples=["2026-12-01T16:00:00Z", "now+90m"],
    ),
]
"""A point in time, in seconds since the epoch."""


def _to_integer(value: object) -> object:
    # JSON has one number type: 6 and 6.0 are the same.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_text(value: object) -> str:
    """Return a number or a text as text. Raise ``ValueError`` for true, false and any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    return str(_to_integer(value))


_DEPENDENCY = "([1-9][0-9]{0,8}|#[0-9]{1,3})(:(ok|failed|any))?"
Clause = Annotated[
    tuple[Dependency, ...],
    text_form(
        lambda value: parse_clause(_as_text(value)),
        "not a dependency",
        "give JOB, JOB:ok, JOB:failed or JOB:any; alternatives as 7?8:any",
        format_clause,
        type=("string"),
        pattern=(rf"^{_DEPENDENCY}(\?{_DEPENDENCY})*$"),
        description=(
            "JOB, JOB:ok, JOB:failed or JOB:any, the end that another job must have; ? separates "
            "alternatives; in a batch, #0 is its first job"
        ),
        examples=["7", "7:any", "7:ok?8:failed", "#0:ok"],
    ),
]
"""Alternatives, of which one must hold before a job may start."""
ResultInputText = Annotated[
    ResultInput,
    text_form(
        lambda value: parse_result_input(value if isinstance(value, str) else ""),
        "not a result of a job",
        "give JOB:FILE, JOB[INDEX]:FILE for a task of an array, or JOB.RANK:FILE for one component",
        str,
        type=("string"),
        pattern=(r"^[1-9][0-9]{0,8}(\[[0-9]{1,4}\])?(\.[0-9])?:[a-z]{1,9}(:as=[a-z]{1,9})?$"),
        description=(f"{FORM}; with :as=NAME under another name"),
        examples=["7:out.csv", "7[3]:out.csv", "7.1:out.csv:as=in.csv"],
    ),
]
"""A collected file of another job."""


def _parse_memory(value: Any) -> int:
    """Return the bytes of a size such as ``10GB``; a value without a unit has its own hint."""
    try:
        return parse_memory(value)
    except ValueError as error:
        problem = "which has no unit" if is_bare_memory(value) else "not an amount of memory"
        raise correction(problem, str(error)) from None


_UNITS = "(k|M|G|T|Ki|Mi|Gi|Ti)?B"
Memory = Annotated[
    int,
    text_form(
        _parse_memory,
        "",
        "",
        anyOf=[
            {"type": "integer", "minimum": MIN_MEMORY, "maximum": MAX_MEMORY},
            {"type": "string", "pattern": "^[1-9][0-9]{0,2}(M|G|T|Mi|Gi|Ti)B$"},
        ],
        description=("a size such as 16GB or 512MiB, or bytes"),
        examples=[16_000_000_000, "16GB"],
    ),
]
Bandwidth = Annotated[
    float,
    text_form(
        parse_bandwidth,
        "not a bandwidth",
        "give bytes per second, or a number with a unit: 1Gbit, 100MB",
        anyOf=[
            {"type": "number", "minimum": 0, "maximum": MAX_BANDWIDTH},
            {"type": "string", "pattern": f"^[1-9][0-9]{{0,2}}({_UNITS}|(k|M|G|T)?bit)$"},
        ],
        description=("bytes per second, or a rate such as 100MB or 1Gbit"),
        examples=[25_000_000, "1Gbit"],
    ),
    Field(allow_inf_nan=False),
]
Gpus = Annotated[
    node_requirement.Gpus,
    text_form(
        lambda value: parse_gpus(_as_text(value)),
        "not a number of GPUs",
        "give a number, or TYPE:NUMBER: 2, a100:2",
        str,
        anyOf=[
            {"type": "integer", "minimum": 1, "maximum": MAX_GPUS},
            {"type": "string", "pattern": "^([A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}:)?[1-9][0-9]{0,2}$"},
        ],
        description=("a number of GPUs, or TYPE:NUMBER such as a100:2"),
        examples=[1, "a100:2"],
    ),
]


def _parse_indices(text: str) -> TaskIndices:
    """Parse the indices of an array, such as ``1-200%16``."""
    try:
        return TaskIndices.parse(text)
    except ValueError as error:
        raise PydanticCustomError("array", "{problem}", {"problem": str(error)}) from None


Indices = Annotated[
    Text,
    Field(max_length=MAX_ARRAY_TEXT_LENGTH),
    AfterValidator(_parse_indices),
    PlainSerializer(str, when_used="json-unless-none"),
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


def _parse_warning(text: str) -> StopWarning:
    """Parse a warning such as ``TERM@30``: a signal by name or number, and the grace as any duration."""
    name, separator, grace = text.strip().partition("@")
    if ":" in name:
        raise correction("with a colon", "leave out the prefix: all processes of the program get the signal")
    try:
        signal_name = signal.Signals(int(name)).name if name.isascii() and name.isdigit() else name.upper()
        warning_signal = WarningSignal(signal_name.removeprefix("SIG"))
    except ValueError:
        hint = f"use {', '.join(WarningSignal)}, for example TERM@30"
        raise correction("with no signal that a program can catch", hint) from None
    try:
        is_number = re.fullmatch(r"-?[0-9.]+", grace, re.ASCII)
        grace_s = DEFAULT_GRACE_S if not separator else float(grace) if is_number else parse_duration(grace)
        if not isfinite(grace_s):
            raise ValueError(grace)
    except ValueError:
        hint = "give seconds or a duration, for example TERM@30 or USR1@2m"
        raise correction("with no duration after its @", hint) from None
    return StopWarning(warning_signal, grace_s)


Warning = Annotated[
    Text,
    AfterValidator(_parse_warning),
    PlainSerializer(str, when_used="json-unless-none"),
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
        raise ValueError(value)
    return value


def format_coallocation(maximum: object) -> object:
    """Return ``allowed`` for no maximum and ``never`` for one cluster, and any other value unchanged."""
    return {None: "allowed", 1: "never"}.get(maximum, maximum)  # type: ignore[call-overload]


Coallocation = Annotated[
    int | None,
    text_form(
        _parse_coallocation,
        "not a valid number of clusters",
        "use allowed, never, or the maximum number of clusters",
        format_coallocation,
        anyOf=[
            {"type": "string", "enum": ["allowed", "never"]},
            {"type": "integer", "minimum": 1, "maximum": MAX_INTEGER},
        ],
        description=("allowed (any number of clusters), never, or the maximum number of clusters"),
        default=("allowed"),
        examples=["never", 2],
    ),
]

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


def _mapping(max_entries: int, name: dict[str, str]) -> Any:
    """Return the type of an object of texts, which become sorted pairs; ``name`` is the schema of its keys."""
    schema = {"type": "object", "maxProperties": max_entries, "propertyNames": name, "additionalProperties": TEXT}
    return Annotated[
        dict[Text, Text],
        Field(max_length=max_entries),
        AfterValidator(lambda values: tuple(sorted(values.items()))),
        PlainSerializer(dict, when_used="json-unless-none"),
        WithJsonSchema(schema),
    ]


Environment = _mapping(MAX_WORDS, {"pattern": r"^[^=\x00]+$"})
"""Environment variables; ``validation`` checks their names with a better message."""
Options = _mapping(MAX_OPTIONS, TEXT)
Bundle = Annotated[
    Name,
    AfterValidator(lambda ident: request.Bundle(ident, 0, 0)),
    PlainSerializer(lambda bundle: bundle.id, when_used="json-unless-none"),
]
"""The id of an uploaded bundle."""


PastTime = Annotated[Text, Field(max_length=MAX_PAST_TIME_LENGTH)]
"""A time of the past, such as ``7d``; empty: no bound."""


class JobSelection(BaseModel):
    """The part of a query that lists of unfinished and of ended jobs have in common."""

    mine: bool = Field(False, description="only the caller's own jobs")
    owner: Name = Field("", description="only jobs of this owner")
    name: Name = Field("", description="only jobs of this name")
    cluster: Text = Field("", max_length=100, description="only jobs last placed on this cluster")
    limit: int = Field(100, ge=1, le=MAX_PAGE_SIZE)

    def choose_owner(self, user: str) -> str:
        """Return the owner of the jobs to list, empty for all. ``user``: the caller. Raise ``UsageError``."""
        if self.mine and self.owner not in ("", user):
            reject("owner", self.owner, f"is {self.owner}, but mine means your own jobs", "leave out mine or owner")
        return user if self.mine else self.owner


def parse_span(query: Any, now: float) -> tuple[float | None, float | None]:
    """Return the bounds ``since`` and ``until`` of a query. Raise ``UsageError`` for an invalid time."""
    since, until = (
        parse_moment(text, now, name) if (text := getattr(query, name)) else None for name in ("since", "until")
    )
    return since, until


def next_path(path: str, query: BaseModel, **changes: Any) -> str:
    """Return the path of the next page: that of a query with changed values, in which times are exact."""
    for name in ("since", "until"):
        changes[name] = "" if changes.get(name) is None else format_exact_time(changes[name])
    values = query.model_copy(update=changes).model_dump(mode="json", exclude_defaults=True)
    return f"{path}?{urlencode(values, doseq=True)}"


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
