"""Format the errors of a configuration as one line that names the places to correct."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from koalapy.model.errors import UsageError, explain_error
from koalapy.model.field import split_annotation, without_none
from koalapy.model.job_spec import SET_BY_RUNNERS
from koalapy.scheduler.rules import OutOfRange

OF_COMMANDS = (
    "AGENT_DIRECTORY",
    "AGENT_TOKEN",
    "CA_FILE",
    "CONFIG",
    "DATA_DIR",
    "LOGIN_SOCKET",
    "RESULTS",
    "SERVE_HOST",
    "TOKEN",
    "TRACES",
    "URL",
)
"""Variables, without ``KOALA_``, that commands and units read and that are no settings."""
OF_JOBS = (*SET_BY_RUNNERS, "SCRATCH", "TRANSLATED")
"""Variables, without ``KOALA_``, that programs of jobs and their child processes inherit."""


Location = tuple[int | str, ...]
PREFIX, DELIMITER = "KOALA_", "__"
"""Prefix and delimiter of environment variables that set a setting."""
UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
REPLACED = dict.fromkeys(("rules.aging", "rules.aging_tries", "rules.low_patience"), "rules.plan_after")
"""Settings of earlier versions, and those to use in their place."""
MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")


def configuration_error(root: type[BaseModel], errors: Iterable[Mapping[str, Any]], path: Path | None) -> UsageError:
    """Convert pydantic's errors to one error that lists all of them and names the first field."""
    faults = [fault for error in errors for fault in _list_faults(root, error)]
    location, value, _ = faults[0]
    places = dict.fromkeys(_source_of(location, path) for location, _, _ in faults)
    messages = "; ".join(field_of(location) + message for location, _, message in faults)
    return UsageError(
        f"{' and '.join(places)}: {messages}", field=field_of(location), value=value, hint="correct it there"
    )


def field_of(location: Location) -> str:
    """Format a location: ``("links", 0, "latency")`` becomes ``links[0].latency``."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


def _list_faults(root: type[BaseModel], error: Mapping[str, Any]) -> Iterator[tuple[Location, object, str]]:
    """Yield the location, the value and the message after the field's name for each fault of an error.

    An error of a whole section may have several faults.
    """
    location, cause = error["loc"], error.get("ctx", {}).get("error")
    if location[-1:] == ("[key]",):  # the error concerns a key of a mapping; the message contains it
        location = location[:-2]
    if isinstance(cause, OutOfRange):
        yield (*location, cause.field), cause.value, cause.message.removeprefix(cause.field)
    elif (successor := REPLACED.get(field_of(location))) is not None:
        yield location, error.get("input"), f": this setting is no more, set {successor} in its place"
    elif error["type"] in UNKNOWN_KEY:
        keys = keys_beside(root, location)
        near = get_close_matches(str(location[-1]), keys, 1)
        meant = f", did you mean {near[0]}?" if near else f" (known: {', '.join(keys)})"
        yield location, error.get("input"), f": there is no such key{meant}"
    else:
        yield location, error.get("input"), f": {_error_message(error)}"


def _error_message(error: Mapping[str, Any]) -> str:
    """Return the message for an error. It omits the value, which may be a secret."""
    kind = error["type"]
    if explanation := ", ".join(filter(None, explain_error(kind, error.get("ctx")))):
        return explanation
    if kind in MISSING:
        return "it is missing, add it"
    if kind == "string_pattern_mismatch":
        return f"it is not as {error['ctx']['pattern']} says"
    return str(error["msg"]).removeprefix("Value error, ")


def keys_beside(root: type[BaseModel], location: Location) -> Sequence[str]:
    """Return the keys that are valid next to a field."""
    kind: Any = root
    for part in location[:-1]:
        if is_dataclass(kind):
            kind = next(field.type for field in fields(kind) if field.name == part)
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[str(part)].annotation
        else:
            kind = get_args(kind)[-1]
        kind = without_none(split_annotation(kind)[0])
    return sorted(field.name for field in fields(kind)) if is_dataclass(kind) else sorted(kind.model_fields)


def _source_of(location: Location, path: Path | None) -> str:
    """Return the place that sets a field: an environment variable, which takes precedence, or the file."""
    variables = {name.upper(): name for name in os.environ}
    for length in range(1, len(location) + 1):
        name = PREFIX + DELIMITER.join(str(part) for part in location[:length]).upper()
        if name in variables:
            return f"{variables[name]} in the environment"
    return str(path) if path is not None else "the environment"
