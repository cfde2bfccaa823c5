"""What is wrong with a configuration: all of it in one line, with the places to correct it."""

import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from koalapy.model.errors import UsageError

OUT_OF_RANGE = "out_of_range"
"""The type of an error that goes on after the field's name: ``is 0, but must be at least 1``."""
Location = tuple[int | str, ...]
PREFIX, DELIMITER = "KOALA_", "__"
"""Of environment variables that say what a file may say, too."""


def refusal(root: type[BaseModel], errors: Iterable[Mapping[str, Any]], path: Path | None) -> UsageError:
    """pydantic's errors as one of ours, which names the first field and tells of all."""
    told = [(error["loc"], error) for error in errors]
    first, error = told[0]
    places = dict.fromkeys(_place(location, path) for location, _ in told)
    return UsageError(
        "; ".join(field_of(location) + _says(root, location, one) for location, one in told),
        field=field_of(first),
        value=error.get("input"),
        hint=f"correct {' and '.join(places)}",
    )


def field_of(location: Location) -> str:
    """``("links", 0, "latency")`` as ``links[0].latency``."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


def _says(root: type[BaseModel], location: Location, error: Mapping[str, Any]) -> str:
    if error["type"] == OUT_OF_RANGE:
        return f" {error['msg']}"
    if error["type"] != "extra_forbidden":
        return f": {str(error['msg']).removeprefix('Value error, ')}"
    known = keys_beside(root, location)
    near = get_close_matches(str(location[-1]), known, 1)
    return ": there is no such key" + (f", did you mean {near[0]}?" if near else f" (known: {', '.join(known)})")


def keys_beside(root: type[BaseModel], location: Location) -> Sequence[str]:
    """The keys that there may be where a field is."""
    kind: Any = root
    for part in location[:-1]:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[str(part)].annotation
        else:
            kind = get_args(kind)[-1]
    return sorted(kind.model_fields)


def _place(location: Location, path: Path | None) -> str:
    """Where a field was given: in a variable, which counts before the file, or there."""
    given = {name.upper(): name for name in os.environ}
    for length in range(1, len(location) + 1):
        name = PREFIX + DELIMITER.join(str(part) for part in location[:length]).upper()
        if name in given:
            return f"{given[name]} in the environment"
    return str(path) if path is not None else "the environment"
