"""What pydantic has against a request, in the words of this API: the field, its value, and the way out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from koalapy.api import submission
from koalapy.model import wanted
from koalapy.model.warning import WarningSignal
from koalapy.model.wording import known_names

REQUESTS: dict[str, type[BaseModel]] = {
    "fixed": submission.Fixed,
    "nonfixed": submission.NonFixed,
    "flexible": submission.Flexible,
}
COMPONENTS: dict[str, type[BaseModel]] = {"fixed": submission.FixedComponent, "nonfixed": submission.NonFixedComponent}
KINDS = "fixed, nonfixed or flexible"
WANTED = wanted.WANTED | {
    "one_line": ("with characters that cannot be shown", "leave them out"),
    "string_pattern_mismatch": ("with signs that may not be in it", "leave them out"),
    "nul": ("with a NUL in it", "leave it out"),
    "coallocation": ("no co-allocation", "use allowed, never, or the most clusters to combine"),
    "duration": ("no duration", "give seconds, or units with each number: 90m, 1h30m, 1:30:00"),
    "lease": ("no lease", "give more than 0 seconds, 40m, 1h30m, or none"),
    "bytes": ("no number of bytes", "give bytes, or a number with a unit: 16GB, 512MiB"),
    "bandwidth": ("no bandwidth", "give bytes per second, or a number with a unit: 1Gbit, 100MB"),
    "warning_scope": ("with a colon", "leave out what is before it: all processes of the program get the signal"),
    "warning_signal": ("with no signal that a program can catch", f"use {', '.join(WarningSignal)}, as TERM@30"),
    "warning_grace": ("with no duration after its @", "give seconds, as TERM@30, or USR1@2m"),
}
DURATIONS = ("walltime", "lease", "horizon", "expires")
"""Fields whose number may also be written with units."""


@dataclass(frozen=True, slots=True)
class Invalid:
    """The first thing that is wrong with a request."""

    detail: str
    field: str
    value: object = None
    hint: str = ""


def explain(errors: Sequence[Mapping[str, Any]], model: type[BaseModel]) -> Invalid:
    """The most telling of pydantic's errors; ``model`` is what the body should have been."""
    # A misspelt field that is needed is both unknown and missing: the first says more.
    first = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    if first["loc"][-1] == "[key]":
        return _bad_name(first)
    field, kind, value = field_of(first["loc"]), _kind(first), first.get("input")
    context = first.get("ctx") or {}
    if kind == "extra_forbidden":
        return Invalid(f"unknown field {field}", field, value, _known_beside(first["loc"], model))
    if kind == "missing":
        return Invalid(f"{field} is required", field, hint="add it")
    if kind == "union_tag_not_found":
        return Invalid(f"{field}.type is required", f"{field}.type", hint=f"use {KINDS}")
    if kind == "union_tag_invalid":
        return Invalid(f"{field}.type is {context['tag']!r}", f"{field}.type", context["tag"], f"use {KINDS}")
    if kind == "model_attributes_type":
        hint = "send JSON with Content-Type: application/json" if field == "body" else "give fields and values"
        return Invalid(f"{field} is no object", field, value, hint)
    if kind in ("enum", "literal_error"):
        return Invalid(f"{field} is {shown(value)}", field, value, f"use {context['expected']}")
    if field in DURATIONS and kind == "float_parsing":
        kind = "duration"
    if kind in WANTED:
        problem, hint = WANTED[kind]
        return Invalid(f"{field} is {shown(value)}, {problem}", field, value, hint)
    if kind in wanted.BOUNDS:
        bound, words = wanted.BOUNDS[kind]
        return Invalid(f"{field} is {shown(value)}", field, value, f"give {words} {context[bound]}")
    if kind in wanted.LENGTHS:
        bound, words = wanted.LENGTHS[kind]
        hint = f"give {words.format(context[bound])}"
        if isinstance(value, list | dict):
            return Invalid(f"{field} has {len(value)} entries", field, len(value), hint)
        return Invalid(f"{field} is {shown(value)}", field, value, hint)
    said = str(first["msg"])
    return Invalid(f"{field} is {shown(value)}: {said[:1].lower()}{said[1:]}", field, value)


def _bad_name(error: Mapping[str, Any]) -> Invalid:
    """What is wrong with a name in an object whose names are free."""
    field, name = field_of(error["loc"][:-2]), error.get("input")
    problem, hint = WANTED.get(_kind(error), ("which is no name", "use another"))
    return Invalid(f"{field} has the name {shown(name)}, {problem}", field, name, hint)


def _kind(error: Mapping[str, Any]) -> str:
    """What is wrong, in pydantic's words; most patterns keep nothing out but NULs."""
    kind = str(error["type"])
    return "nul" if kind == "string_pattern_mismatch" and "\0" in str(error.get("input")) else kind


def shown(value: object) -> str:
    """A value in a sentence."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def field_of(location: Sequence[int | str]) -> str:
    """``("body", "request", "fixed", "components", 1, "size")`` as ``request.components[1].size``."""
    field = ""
    for place, part in enumerate(location):
        is_tag = place == 2 and part in REQUESTS and location[1] == "request"
        if place == 0 or is_tag:
            continue
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    return field or str(location[0])


def _known_beside(location: Sequence[int | str], model: type[BaseModel]) -> str:
    """Which fields there are where an unknown one was found."""
    tag = str(location[2]) if len(location) > 3 else ""
    if "inputs" in location[:-1]:
        model = submission.ComponentInput if tag in COMPONENTS else submission.JobInput
    elif tag in COMPONENTS and len(location) > 4:
        model = COMPONENTS[tag]
    elif tag in REQUESTS:
        model = REQUESTS[tag]
    if model is submission.NonFixedComponent and location[-1] == "cluster":
        return "leave it out, or make the request fixed"
    return known_names(str(location[-1]), (field.alias or name for name, field in model.model_fields.items()))
