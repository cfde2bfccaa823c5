"""Convert options and job files to the body of a submission.

The options are generated from the fields of ``JobSpec`` and their help texts.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin

from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.job_reference import parse_int
from koalapy.client.errors import CliError, Exit
from koalapy.client.http import Json
from koalapy.model.array import TaskIndices
from koalapy.model.command_line import JOB_FIELDS, REQUEST_OPTIONS, brings_files
from koalapy.model.dependency import Dependencies, ResultInputs
from koalapy.model.field import split_annotation
from koalapy.model.job_spec import (
    CHANGEABLE_FIELDS,
    Coallocation,
    Duration,
    Lease,
    Lines,
    PerNodeBandwidth,
    PointInTime,
    PolicyOptions,
)
from koalapy.model.node_requirement import Excluded, Gpus, NodeMemory
from koalapy.model.request import Bundle, Environment, Inputs, StopWarning
from koalapy.model.times import parse_time
from koalapy.model.wording import is_utf8

MAX_REQUEST_SIZE = 1024 * 1024
"""Bytes of a request that the daemon takes, and so of a job file and of the lines of an array."""
HINT_MANY_LINES = "give --array 1-N, and let each task read its line of the file"
INPUT_OPTION = re.compile("whole|partitioned|as=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Form:
    """The conversion of an option's type to that of the API: the type for click, and the function."""

    type: Any
    read: Callable[[Any], Any]

    @property
    def is_repeated(self) -> bool:
        return get_origin(self.type) is list


def environment_of(pairs: list[str]) -> dict[str, str]:
    """Parse environment variables: ``NAME=VALUE``, or ``NAME`` for the value in this environment."""
    environment = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals and name not in os.environ:
            raise CliError(f"--env {name}: this variable is not set", Exit.USAGE, "give --env NAME=VALUE")
        environment[name] = value if equals else os.environ[name]
    return environment


NOT_EXPORTED = re.compile(
    r"KOALA_.*|SLURM.*|SBATCH_.*|PMIX?_.*|OMPI_.*|PRTE_.*|XDG_.*|SSH_.*|DBUS_.*|BASH_FUNC_.*|"
    r"HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|_|TMPDIR|HOSTNAME|DISPLAY|XAUTHORITY|WAYLAND_DISPLAY|TERM|TTY|MAIL"
)
"""Names of variables that ``--export ALL`` omits, since they describe this machine, session or allocation."""


Export = Annotated[
    str | None, Option(help="variables to pass on: NONE (default), ALL, or NAME,NAME=VALUE; --env overrides them")
]


def exported_variables(text: str | None) -> dict[str, str]:
    """Parse ``--export``: ``NONE``, ``ALL``, or names and values such as ``ALL,NAME,NAME=VALUE``."""
    if text is None or text == "NONE":
        return {}
    entries, exported = text.split(","), {}
    if "NONE" in entries:
        raise CliError(f"--export is {text!r}", Exit.USAGE, "give NONE alone, or the variables to export")
    if entries[0] == "ALL":
        del entries[0]
        exported = {name: value for name, value in os.environ.items() if not NOT_EXPORTED.fullmatch(name)}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not name or (not equals and name not in os.environ):
            problem = f"{name!r} is not set" if name else "a name is empty"
            hint = "give NAME=VALUE, and --env NAME=VALUE for a value with commas"
            raise CliError(f"--export is {text!r}: {problem}", Exit.USAGE, hint)
        exported[name] = value if equals else os.environ[name]
    return exported


def policy_options_of(pairs: list[str]) -> dict[str, str]:
    """Parse options of a policy: ``NAME=VALUE``."""
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise CliError(
                f"--policy-option is {pair!r}", Exit.USAGE, "give NAME=VALUE: --policy-option metric=bandwidth"
            )
        options[name] = value
    return options


def coallocation_of(text: str) -> str | int:
    """Parse ``never``, ``allowed`` or a number of clusters."""
    if text in ("never", "allowed"):
        return text
    max_clusters = parse_int(text)
    if max_clusters is None:
        hint = "use never, allowed, or the maximum number of clusters"
        raise CliError(f"--coallocation is {text!r}", Exit.USAGE, hint)
    return max_clusters


def inputs_of(texts: list[str]) -> list[Json]:
    """Parse input files: ``NAME``, ``NAME:partitioned``, ``NAME:as=FILE`` or both suffixes."""
    inputs = []
    for text in texts:
        name, properties = text, Json()
        while name.rpartition(":")[1] and (option := INPUT_OPTION.fullmatch(name.rpartition(":")[2])):
            field = "as" if option[1] is not None else "distribution"
            if field in properties:
                raise CliError(f"--input {text} sets {field} twice", Exit.USAGE, "drop one")
            properties[field] = option[0] if option[1] is None else option[1]
            name = name.rpartition(":")[0]
        if not name:
            raise CliError(f"--input is {text!r}", Exit.USAGE, "give a logical name: --input climate/2026.nc")
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


def clauses_of(texts: list[str]) -> list[str]:
    """Parse dependencies: ``A,B`` for both, ``A?B`` for one of them."""
    return [clause.strip() for text in texts for clause in text.split(",")]


def split_names(texts: list[str]) -> list[str]:
    """Split lists of names at their commas, except inside brackets: ``north,n[1,3]``."""
    return [name for text in texts for name in re.split(r",(?![^\[\]]*\])", text)]


def read_lines(name: str) -> list[str]:
    """Read the lines of a file, or of standard input if the name is ``-``.

    Raise ``CliError`` if it has none, or is larger than a request may be.
    """
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            content = file.read(MAX_REQUEST_SIZE + 1)
        if len(content) > MAX_REQUEST_SIZE:
            raise CliError(f"--each-line: {name} is larger than {MAX_REQUEST_SIZE} bytes", Exit.USAGE, HINT_MANY_LINES)
        text = content.decode()
    except OSError as error:
        raise CliError(f"--each-line: cannot read {name}: {error.strerror}", Exit.USAGE, "give a file") from error
    except UnicodeDecodeError as error:
        raise CliError(f"--each-line: {name} is not text in UTF-8", Exit.USAGE, "convert it") from error
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []
    if not lines:
        raise CliError(f"--each-line: {name} is empty", Exit.USAGE, "give a file with a line for each task")
    return lines


FORMS = {
    Environment: Form(list[str], environment_of),
    PolicyOptions: Form(list[str], policy_options_of),
    Coallocation: Form(str, coallocation_of),
    Duration: Form(str, str),
    Lease: Form(str, str),
    PointInTime: Form(str, with_time_zone),
    Dependencies: Form(list[str], clauses_of),
    NodeMemory: Form(str, str),
    Gpus: Form(str, str),
    Excluded: Form(list[str], split_names),
    PerNodeBandwidth: Form(str, str),
    StopWarning: Form(str, str),
    TaskIndices: Form(str, str),
    Lines: Form(str, read_lines),
    Inputs: Form(list[str], inputs_of),
    ResultInputs: Form(list[str], list),
    Bundle: Form(list[str], list),
    bool: Form(bool, lambda is_given: is_given or None),
}
"""Conversions of the types that options and the API represent differently."""


def form_of(kind: Any) -> Form:
    """Return how values of a field's type are converted between options and the API."""
    if kind in FORMS:
        return FORMS[kind]
    base, _ = split_annotation(kind)
    if get_origin(base) is tuple:
        return Form(GenericAlias(list, (form_of(get_args(base)[0]).type,)), lambda value: value)
    return Form(base, lambda value: value)


COMPLETED = {
    "each_line": "files",
    "policy": "policies",
    "owner": "users",
    "home_site": "clusters",
    "inputs": "replicas",
    "bundle": "files",
}
"""Kinds of completion for the options of these fields."""
JOB_OPTIONS = {
    each.name: Annotated[
        form_of(each.type).type | None,
        Option(*each.option_names, help=each.field.help, completes=COMPLETED.get(each.name, "")),
    ]
    for each in JOB_FIELDS.values()
}


def read_options(options: Json) -> Json:
    """Convert options to fields of the API; None for an option that is not given."""
    return {
        name: None if value is None else form_of(JOB_FIELDS[name].type).read(value) for name, value in options.items()
    }


HINT_JOB_FILE = "give fields and values: {request: {type: flexible, total_size: 2}, command: [hostname]}"
STANDARD_INPUT = "-"
"""File name that selects standard input."""


def name_of(file: Path) -> str:
    """Return the name of a job file for messages."""
    return "standard input" if str(file) == STANDARD_INPUT else str(file)


def read_job_file(file: Path) -> list[Json]:
    """Read the fields of each job from a file with one or more documents. Raise ``CliError`` if a document has none."""
    name = name_of(file)
    documents = [fields for fields in _parse_content(name, _read_content(name, file)) if fields is not None]
    bodies: list[Json] = []
    for number, body in enumerate(documents or [None], 1):
        source = f"document {number} of {name}" if len(documents) > 1 else name
        if not isinstance(body, dict):
            problem = "contains no job" if body is None else "is not a job: it has no names of fields"
            raise CliError(f"{source} {problem}", Exit.USAGE, HINT_JOB_FILE)
        try:
            json.dumps(body, allow_nan=False)
        except (TypeError, ValueError) as error:
            hint = "write it as text, in quotes"
            raise CliError(f"{source} has a value that JSON does not allow: {error}", Exit.USAGE, hint) from error
        bodies.append(body)
    return bodies


def _read_content(name: str, file: Path) -> bytes:
    """Read a job file or standard input. Raise ``CliError`` if it is unreadable or too large.

    ``name``: name of the source in error messages.
    """
    try:
        if str(file) == STANDARD_INPUT:
            content = sys.stdin.buffer.read(MAX_REQUEST_SIZE + 1)
        else:
            with file.open("rb") as opened:
                content = opened.read(MAX_REQUEST_SIZE + 1)
    except OSError as error:
        raise CliError(f"cannot read {name}: {error.strerror}", Exit.USAGE, "give a file with -f") from error
    if len(content) > MAX_REQUEST_SIZE:
        hint = "put large data into files that the job reads"
        raise CliError(f"{name} is larger than {MAX_REQUEST_SIZE} bytes", Exit.USAGE, hint)
    return content


def _parse_content(name: str, content: bytes) -> list[object]:
    """Parse the documents of a job file in YAML or JSON. Raise ``CliError`` if it is invalid.

    ``name``: its name in the message.
    """
    import yaml

    from koalapy.config.strict_yaml import AliasFound, DuplicateKey, load_documents

    try:
        # Reject aliases: a small file with nested aliases may expand to a huge document.
        return load_documents(content.decode("utf-8"), aliases=False)
    except AliasFound as error:
        hint = "write its value instead, or put it in quotes"
        raise CliError(f"{name} has an alias (*NAME)", Exit.USAGE, hint) from error
    except DuplicateKey as error:
        raise CliError(f"cannot read {name}: {error}", Exit.USAGE) from error
    except RecursionError as error:
        raise CliError(f"cannot read {name}: nested too deeply", Exit.USAGE, "use fewer levels") from error
    except (
        ValueError,
        LookupError,
        AttributeError,
        yaml.YAMLError,
    ) as error:  # errors of the YAML reader for invalid numbers and tags
        raise CliError(f"cannot read {name}: {error}", Exit.USAGE, "write it in YAML or JSON") from error


def _parse_numbers(option: str, text: str) -> list[int]:
    numbers = [value for part in text.split(",") if (value := parse_int(part)) is not None]
    if len(numbers) != text.count(",") + 1:
        raise CliError(f"{option} is {text!r}", Exit.USAGE, f"give numbers: {option} 2,4")
    return numbers


def _parse_fixed(text: str) -> list[Json]:
    """Convert text such as ``north:2,south:4`` to components of a request. Raise ``CliError`` if it is invalid."""
    components = []
    for part in text.split(","):
        cluster, colon, size_text = part.rpartition(":")
        size = parse_int(size_text)
        if not colon or not cluster or size is None:
            raise CliError(f"--fixed is {text!r}", Exit.USAGE, "give clusters and sizes: --fixed north:2,south:4")
        components.append({"cluster": cluster, "size": size})
    return components


RESETS = {name: option for name, option in REQUEST_OPTIONS.items() if name != "total_size"} | {
    name: JOB_FIELDS[name].option for name in CHANGEABLE_FIELDS if name in JOB_FIELDS
}
"""The options that ``koala change`` can reset, by field."""


@dataclass(frozen=True)
class RequestOptions:
    """The options for number and location of nodes."""

    flexible: Annotated[int | None, Option(help="total nodes; the scheduler chooses components and clusters")] = None
    nonfixed: Annotated[str | None, Option(help="sizes of components, e.g. 2,4; the scheduler chooses clusters")] = None
    fixed: Annotated[str | None, Option(help="clusters and sizes, e.g. north:2,south:4")] = None
    min_component: Annotated[int | None, Option(help="flexible: minimum nodes of a component")] = None
    max_components: Annotated[int | None, Option(help="flexible: maximum number of components")] = None
    split: Annotated[
        list[str] | None, Option(help="flexible: component sizes to try, e.g. 4,2; repeatable, best first")
    ] = None


def request_of(options: RequestOptions) -> Json | None:
    """Convert the options to a request; None if no option is given."""
    kinds = {"--flexible": options.flexible, "--nonfixed": options.nonfixed, "--fixed": options.fixed}
    chosen = [option for option, value in kinds.items() if value is not None]
    if len(chosen) > 1:
        raise CliError(f"{' and '.join(chosen)} cannot be given together", Exit.USAGE, "choose one kind of request")
    bounds = {"min_component_size": options.min_component, "max_components": options.max_components}
    bounds_given: Json = {name: value for name, value in bounds.items() if value is not None}
    if options.split:
        bounds_given["split_options"] = [_parse_numbers("--split", sizes) for sizes in options.split]
    if options.flexible is not None:
        return {"type": "flexible", "total_size": options.flexible, **bounds_given}
    if bounds_given:
        message = "--min-component, --max-components and --split are for flexible requests"
        raise CliError(message, Exit.USAGE, "add --flexible N")
    if options.nonfixed is not None:
        return {"type": "nonfixed", "components": [{"size": n} for n in _parse_numbers("--nonfixed", options.nonfixed)]}
    return {"type": "fixed", "components": _parse_fixed(options.fixed)} if options.fixed is not None else None


def change_of(request: RequestOptions, options: Json, resets: list[str]) -> Json:
    """Return the body of a change: the given options, and null for those that are reset."""
    change = {name: value for name, value in options.items() if value is not None}
    changed_request: Json = {}
    if request.nonfixed is not None or request.fixed is not None:
        changed_request = request_of(request) or {}
    else:
        total_size = 1 if request.flexible is None else request.flexible
        changed_request = request_of(replace(request, flexible=total_size)) or {}
        if request.flexible is None:  # bounds of a request that keeps its size
            del changed_request["type"], changed_request["total_size"]
    for option in resets:
        name = next((name for name, text in RESETS.items() if text == f"--{option.removeprefix('--')}"), None)
        if name is None:
            names = [text.removeprefix("--") for text in RESETS.values()]
            raise CliError(f"--reset is {option!r}", Exit.USAGE, f"give one of {', '.join(names)}")
        if (name in REQUEST_OPTIONS and name in changed_request) or name in change:
            raise CliError(f"{RESETS[name]} and --reset {option} cannot be given together", Exit.USAGE, "drop one")
        (changed_request if name in REQUEST_OPTIONS else change)[name] = None
    return change | ({"request": changed_request} if changed_request else {})


def paths_to_stage(body: Json, file: Path | None, option_paths: list[str]) -> list[str]:
    """Return the paths of files to upload, from the options or the job file. The latter are relative to its folder."""
    file_paths = body.pop("stage", None)
    if option_paths or file_paths is None:
        return option_paths
    if not isinstance(file_paths, list) or not all(isinstance(path, str) for path in file_paths):
        raise CliError("stage in the job file is not a list of paths", Exit.USAGE, "give files and folders")
    return [str((file or Path()).parent / path) for path in file_paths]


def body_of(fields: Json, options: Json, environment: dict[str, str]) -> Json:
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
            raise CliError(f"{field} in the job file is not an object", Exit.USAGE, "give names and values")
        if option_values:
            body[field] = file_values | option_values
    if options.get("workdir"):
        body.pop("workdir_optional", None)  # it refers to the folder in the file
    if "workdir" not in body and not brings_files(body) and (here := _current_folder()):
        body |= {"workdir": here, "workdir_optional": True}
    if "request" not in body:
        raise CliError("the request has no nodes", Exit.USAGE, "give --flexible N, --nonfixed N,N or --fixed CLUSTER:N")
    _check_size(body, options)
    return body


SOURCES = {"command": "the command", "environment": "the environment (--env, --export)"}
"""Names of fields in messages that are no single option."""


def _check_size(body: Json, options: Json) -> None:
    """Raise ``CliError``, which names the largest option or field, if a request is larger than the daemon takes."""
    sizes = {name: len(json.dumps(value, ensure_ascii=False).encode(errors="replace")) for name, value in body.items()}
    if sum(sizes.values()) > MAX_REQUEST_SIZE:
        name = max(sizes, key=lambda name: sizes[name])
        is_option = options.get(name) not in (None, []) and name in JOB_FIELDS
        in_file = f"{name} in the job file"
        source = SOURCES.get(name) or (JOB_FIELDS[name].option if is_option else in_file)
        problem = f"{source} is {sizes[name]} bytes, and a request has at most {MAX_REQUEST_SIZE}"
        hint = HINT_MANY_LINES if name == "each_line" else "put large data into files that the job reads"
        raise CliError(problem, Exit.USAGE, hint, name)


def checked_key(key: str) -> str:
    """Validate an idempotency key. Raise ``CliError`` if a header cannot contain it."""
    if not key.strip() or not key.isprintable() or not is_utf8(key):
        hint = "use letters, digits and signs, the same for each retry"
        raise CliError("--idempotency-key is blank, or has characters that a header does not allow", Exit.USAGE, hint)
    return key


def _current_folder() -> str | None:
    """Return the current folder; None if it was deleted."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None


ScriptLines = Mapping[str, str]
"""Fields that lines of a script set, each with file and line."""
NO_LINES: ScriptLines = {}


def in_terms_of_options(error: CliError, body: Json, options: Json, lines: ScriptLines = NO_LINES) -> CliError:
    """Rewrite a rejection by the daemon to name options instead of fields, except for fields from a job file.

    Begin it with file and line if a line of a script set the field.
    """
    field, request = error.field, body["request"]
    first = re.split(r"[.\[]", field)[0]
    if not field or options.get(first) is None or not error.message.startswith(field):
        return error
    if component := re.match(r"request\.components\[(\d+)\]\.(\w+)", field):
        index, property_name = component.groups()
        option_text = f"--{request['type']}: {property_name} of component {index}"
    elif "split_options" in request and (split := re.match(r"request\.split_options\[(\d+)\]", field)):
        option_text = f"--split {','.join(str(size) for size in request['split_options'][int(split[1])])}"
    elif field == "request.components":
        option_text = f"--{request['type']}: the components"
    elif (name := field.removeprefix("request.")) in REQUEST_OPTIONS:
        option_text = REQUEST_OPTIONS[name]
    elif first in JOB_FIELDS:
        option = JOB_FIELDS[first].option
        option_text = f"{option} {field.removeprefix(f'{first}.')}" if field.startswith(f"{first}.") else option
    else:
        return error
    position = f"{lines[first]}: " if first in lines else ""
    return CliError(f"{position}{option_text}{error.message[len(field) :]}", error.code, error.hint, field)


def in_terms_of_documents(error: CliError, bodies: list[Json], options: Json, file: str) -> CliError:
    """Rewrite a rejection of a batch to name the document of the job file instead of the list's entry."""
    entry = re.match(r"jobs\[(\d+)\][.:]? ?", error.message)
    if entry is None or int(entry[1]) >= len(bodies):
        return error
    index, message = int(entry[1]), error.message[entry.end() :]
    field = error.field.removeprefix(f"jobs[{index}]").removeprefix(".")
    job_error = in_terms_of_options(CliError(message, error.code, error.hint, field), bodies[index], options)
    return CliError(f"document {index + 1} of {file}: {job_error.message}", error.code, job_error.hint, field)
