"""Build the body of a submission from options of commands or arguments of the Python client."""

import inspect
import json
import operator
import os
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, SupportsIndex

from koalapy.client.errors import Exit, GridError
from koalapy.client.http import Json
from koalapy.model.command_line import JOB_FIELDS, brings_files, parse_request
from koalapy.model.field import describe_fields
from koalapy.model.job_spec import JobSpec, PointInTime
from koalapy.model.times import parse_time
from koalapy.model.wording import parse_int, suggest_names

MAX_REQUEST_SIZE = 1024 * 1024
"""Bytes of a request that the daemon takes, and so of a job file and of the lines of an array."""
HINT_MANY_LINES = "give --array 1-N, and let each task read its line of the file"
INPUT_OPTION = re.compile("whole|partitioned|as=(.*)", re.DOTALL)


def inputs_of(texts: Iterable[str]) -> list[Json]:
    """Parse input files: ``NAME``, ``NAME:partitioned``, ``NAME:as=FILE`` or both suffixes."""
    inputs = []
    for text in texts:
        name, properties = text, Json()
        while name.rpartition(":")[1] and (option := INPUT_OPTION.fullmatch(name.rpartition(":")[2])):
            field = "as" if option[1] is not None else "distribution"
            if field in properties:
                raise GridError(f"--input {text} sets {field} twice", Exit.USAGE, "drop one")
            properties[field] = option[0] if option[1] is None else option[1]
            name = name.rpartition(":")[0]
        if not name:
            raise GridError(f"--input is {text!r}", Exit.USAGE, "give a logical name: --input climate/2026.nc")
        inputs.append({"file": name, **properties})
    return inputs


def with_time_zone(text: str) -> str:
    """Convert a point in time in this machine's time zone to ISO 8601 with the offset.

    Return a time relative to now unchanged: the daemon adds it to its own clock. Return any other text unchanged, too,
    since the daemon rejects it.
    """
    if text.strip().lower().startswith("now"):
        return text
    try:
        moment = parse_time(text, time.time(), None)
        return datetime.fromtimestamp(moment).astimezone().isoformat()
    except (ValueError, OverflowError):
        return text


OPTIONS = {field.option.removeprefix("--").replace("-", "_"): name for name, field in JOB_FIELDS.items()}
"""Fields of a job by the names of their options in Python."""
SINGLE_OR_LIST = {"after", "bundle", "collect", "inputs"}
"""Fields of which a single value may stand for a list."""


def build_submission(command: str | Sequence[object], options: Mapping[str, Any]) -> tuple[Json, list[str]]:
    """Return the body of a submission for arguments of the Python client, and the paths of files to upload.

    Raise ``GridError`` for an unknown option.
    """
    arguments = {name: _to_json(value) for name, value in options.items() if value is not None}
    fields = {OPTIONS.get(name, name): value for name, value in arguments.items()}
    sizes = {name: fields.pop(name) for name in REQUEST_ARGUMENTS if name in fields}
    if unknown := fields.keys() - describe_fields(JobSpec).keys():
        name = min(unknown)
        hint = suggest_names(name, {*OPTIONS, *JOB_FIELDS, *REQUEST_ARGUMENTS})
        raise GridError(f"submit has no option {name}", Exit.USAGE, hint, name)
    if sizes or "request" not in fields:
        fields["request"] = build_request(**sizes or {"flexible": 1})
    fields["command"] = shlex.split(command) if isinstance(command, str) else list(map(str, command))
    for name in SINGLE_OR_LIST & fields.keys():
        fields[name] = list_of(fields[name])
    inputs = fields.get("inputs", ())
    fields["inputs"] = [inputs_of([entry])[0] if isinstance(entry, str) else entry for entry in inputs]
    fields["after"] = list(map(str, fields.get("after", ())))
    paths = fields.pop("bundle", [])
    workdir = fields.pop("workdir", None)
    body = build_body({"stage": paths, **fields}, {"workdir": workdir}, {})
    del body["stage"]
    return body, paths


def list_of(value: Any) -> list[Any]:
    """Return the values of an option of which a single one may stand for a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _to_json(value: Any) -> Any:
    """Return a value of Python as the API takes it. A job becomes its number."""
    match value:
        case str() | bool() | int() | float():
            return value
        case timedelta():
            return value.total_seconds()
        case datetime():
            return value.astimezone().isoformat()
        case os.PathLike():
            return os.fspath(value)
        case SupportsIndex():
            return operator.index(value)
        case Mapping():
            return {name: _to_json(inner) for name, inner in value.items()}
    return list(map(_to_json, value))


def build_request(
    flexible: int | None = None,
    nonfixed: str | Iterable[int] | None = None,
    fixed: str | Mapping[str, int] | None = None,
    min_component: int | None = None,
    max_components: int | None = None,
    split: Iterable[str | Iterable[int]] | None = None,
) -> Json | None:
    """Return the request for nodes that options or arguments describe; None if none is given.

    Raise ``GridError`` for more than one kind of request, and for bounds without a flexible one.
    """
    kinds = {"--flexible": flexible, "--nonfixed": nonfixed, "--fixed": fixed}
    chosen = [option for option, value in kinds.items() if value is not None]
    if len(chosen) > 1:
        raise GridError(f"{' and '.join(chosen)} cannot be given together", Exit.USAGE, "choose one kind of request")
    bounds = {"min_component_size": min_component, "max_components": max_components}
    bounds_given: Json = {name: value for name, value in bounds.items() if value is not None}
    if split:
        bounds_given["split_options"] = [_parse_numbers("--split", sizes) for sizes in split]
    if flexible is not None:
        return {"type": "flexible", "total_size": flexible, **bounds_given}
    if bounds_given:
        message = "--min-component, --max-components and --split are for flexible requests"
        raise GridError(message, Exit.USAGE, "add --flexible N")
    if nonfixed is not None:
        return {"type": "nonfixed", "components": [{"size": n} for n in _parse_numbers("--nonfixed", nonfixed)]}
    return {"type": "fixed", "components": _parse_fixed(fixed)} if fixed is not None else None


REQUEST_ARGUMENTS = tuple(inspect.signature(build_request).parameters)


def _parse_numbers(option: str, text: str | Iterable[int]) -> list[int]:
    if not isinstance(text, str):
        return list(text)
    numbers = [value for part in text.split(",") if (value := parse_int(part)) is not None]
    if len(numbers) != text.count(",") + 1:
        raise GridError(f"{option} is {text!r}", Exit.USAGE, f"give numbers: {option} 2,4")
    return numbers


def _parse_fixed(text: str | Mapping[str, int]) -> list[Json]:
    """Convert text such as ``north:2,south:4`` to components of a request. Raise ``GridError`` if it is invalid."""
    if not isinstance(text, str):
        return [{"cluster": cluster, "size": size} for cluster, size in text.items()]
    request = parse_request("fixed", text)
    if request is None:
        raise GridError(f"--fixed is {text!r}", Exit.USAGE, "give clusters and sizes: --fixed north:2,south:4")
    components: list[Json] = request["components"]
    return components


def build_body(fields: Json, options: Json, environment: dict[str, str]) -> Json:
    """Return the request body for a job: the fields of a job file, overridden by the options."""
    body = dict(fields)
    for name, description in JOB_FIELDS.items():
        if description.type == PointInTime and isinstance(body.get(name), str):
            body[name] = with_time_zone(body[name])
    if (workdir := options.get("workdir")) and not workdir.startswith(("/", "{")):
        options = options | {"workdir": os.path.abspath(workdir)}
    by_name = {"environment": environment, "policy_options": options.get("policy_options") or {}}
    body |= {name: value for name, value in options.items() if value not in (None, []) and name not in by_name}
    for field, option_values in by_name.items():
        file_values = body.get(field) or {}
        if option_values and not isinstance(file_values, dict):
            raise GridError(f"{field} in the job file is not an object", Exit.USAGE, "give names and values")
        if option_values:
            body[field] = file_values | option_values
    if options.get("workdir"):
        body.pop("workdir_optional", None)  # it refers to the folder in the file
    if "workdir" not in body and not brings_files(body) and (here := _current_folder()):
        body |= {"workdir": here, "workdir_optional": True}
    if "request" not in body:
        raise GridError(
            "the request has no nodes", Exit.USAGE, "give --flexible N, --nonfixed N,N or --fixed CLUSTER:N"
        )
    _check_size(body, options)
    return body


SOURCES = {"command": "the command", "environment": "the environment (--env, --export)"}
"""Names of fields in messages that are no single option."""


def _check_size(body: Json, options: Json) -> None:
    """Raise ``GridError``, which names the largest option or field, if a request is larger than the daemon takes."""
    sizes = {name: len(json.dumps(value, ensure_ascii=False).encode(errors="replace")) for name, value in body.items()}
    if sum(sizes.values()) > MAX_REQUEST_SIZE:
        name = max(sizes, key=lambda name: sizes[name])
        is_option = options.get(name) not in (None, []) and name in JOB_FIELDS
        in_file = f"{name} in the job file"
        source = SOURCES.get(name) or (JOB_FIELDS[name].option if is_option else in_file)
        problem = f"{source} is {sizes[name]} bytes, and a request has at most {MAX_REQUEST_SIZE}"
        hint = HINT_MANY_LINES if name == "each_line" else "put large data into files that the job reads"
        raise GridError(problem, Exit.USAGE, hint, name)


def _current_folder() -> str | None:
    """Return the current folder; None if it was deleted."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None
