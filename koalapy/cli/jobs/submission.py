"""Convert options and job files to the body of a submission.

The options are generated from the fields of ``JobSpec`` and their help texts.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin

from koalapy.cli.terminal.arguments import Option
from koalapy.client.errors import Exit, GridError
from koalapy.client.http import Json
from koalapy.client.submission import HINT_MANY_LINES, MAX_REQUEST_SIZE, build_request, inputs_of, with_time_zone
from koalapy.model.array import TaskIndices
from koalapy.model.command_line import JOB_FIELDS, REQUEST_OPTIONS
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
from koalapy.model.wording import is_utf8, parse_int


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
            raise GridError(f"--env {name}: this variable is not set", Exit.USAGE, "give --env NAME=VALUE")
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
        raise GridError(f"--export is {text!r}", Exit.USAGE, "give NONE alone, or the variables to export")
    if entries[0] == "ALL":
        del entries[0]
        exported = {name: value for name, value in os.environ.items() if not NOT_EXPORTED.fullmatch(name)}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not name or (not equals and name not in os.environ):
            problem = f"{name!r} is not set" if name else "a name is empty"
            hint = "give NAME=VALUE, and --env NAME=VALUE for a value with commas"
            raise GridError(f"--export is {text!r}: {problem}", Exit.USAGE, hint)
        exported[name] = value if equals else os.environ[name]
    return exported


def policy_options_of(pairs: list[str]) -> dict[str, str]:
    """Parse options of a policy: ``NAME=VALUE``."""
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise GridError(
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
        raise GridError(f"--coallocation is {text!r}", Exit.USAGE, hint)
    return max_clusters


def clauses_of(texts: list[str]) -> list[str]:
    """Parse dependencies: ``A,B`` for both, ``A?B`` for one of them."""
    return [clause.strip() for text in texts for clause in text.split(",")]


def split_names(texts: list[str]) -> list[str]:
    """Split lists of names at their commas, except inside brackets: ``north,n[1,3]``."""
    return [name for text in texts for name in re.split(r",(?![^\[\]]*\])", text)]


def read_lines(name: str) -> list[str]:
    """Read the lines of a file, or of standard input if the name is ``-``.

    Raise ``GridError`` if it has none, or is larger than a request may be.
    """
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            content = file.read(MAX_REQUEST_SIZE + 1)
        if len(content) > MAX_REQUEST_SIZE:
            raise GridError(f"--each-line: {name} is larger than {MAX_REQUEST_SIZE} bytes", Exit.USAGE, HINT_MANY_LINES)
        text = content.decode()
    except OSError as error:
        raise GridError(f"--each-line: cannot read {name}: {error.strerror}", Exit.USAGE, "give a file") from error
    except UnicodeDecodeError as error:
        raise GridError(f"--each-line: {name} is not text in UTF-8", Exit.USAGE, "convert it") from error
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []
    if not lines:
        raise GridError(f"--each-line: {name} is empty", Exit.USAGE, "give a file with a line for each task")
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
    job_field.name: Annotated[
        form_of(job_field.type).type | None,
        Option(*job_field.option_names, help=job_field.field.help, completes=COMPLETED.get(job_field.name, "")),
    ]
    for job_field in JOB_FIELDS.values()
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
    """Read the fields of each document of a job file. Raise ``GridError`` if a document has none."""
    name = name_of(file)
    documents = [fields for fields in _parse_content(name, _read_content(name, file)) if fields is not None]
    bodies: list[Json] = []
    for number, body in enumerate(documents or [None], 1):
        source = f"document {number} of {name}" if len(documents) > 1 else name
        if not isinstance(body, dict):
            problem = "contains no job" if body is None else "is not a job: it has no names of fields"
            raise GridError(f"{source} {problem}", Exit.USAGE, HINT_JOB_FILE)
        try:
            json.dumps(body, allow_nan=False)
        except (TypeError, ValueError) as error:
            hint = "write it as text, in quotes"
            raise GridError(f"{source} has a value that JSON does not allow: {error}", Exit.USAGE, hint) from error
        bodies.append(body)
    return bodies


def _read_content(name: str, file: Path) -> bytes:
    """Read a job file or standard input. Raise ``GridError`` if it is unreadable or too large.

    ``name``: name of the source in error messages.
    """
    try:
        if str(file) == STANDARD_INPUT:
            content = sys.stdin.buffer.read(MAX_REQUEST_SIZE + 1)
        else:
            with file.open("rb") as opened:
                content = opened.read(MAX_REQUEST_SIZE + 1)
    except OSError as error:
        raise GridError(f"cannot read {name}: {error.strerror}", Exit.USAGE, "give a file with -f") from error
    if len(content) > MAX_REQUEST_SIZE:
        hint = "put large data into files that the job reads"
        raise GridError(f"{name} is larger than {MAX_REQUEST_SIZE} bytes", Exit.USAGE, hint)
    return content


def _parse_content(name: str, content: bytes) -> list[object]:
    """Parse the documents of a job file in YAML or JSON. Raise ``GridError`` if it is invalid.

    ``name``: its name in the message.
    """
    from koalapy.config.strict_yaml import AliasFound, DuplicateKey, load_documents

    try:
        # Reject aliases: a small file with nested aliases may expand to a huge document.
        return load_documents(content.decode("utf-8"), aliases=False)
    except AliasFound as error:
        hint = "write its value instead, or put it in quotes"
        raise GridError(f"{name} has an alias (*NAME)", Exit.USAGE, hint) from error
    except DuplicateKey as error:
        raise GridError(f"cannot read {name}: {error}", Exit.USAGE) from error
    except ValueError as error:
        raise GridError(f"cannot read {name}: {error}", Exit.USAGE, "write it in YAML or JSON") from error


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
    return build_request(**vars(options))


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
            raise GridError(f"--reset is {option!r}", Exit.USAGE, f"give one of {', '.join(names)}")
        if (name in REQUEST_OPTIONS and name in changed_request) or name in change:
            raise GridError(f"{RESETS[name]} and --reset {option} cannot be given together", Exit.USAGE, "drop one")
        (changed_request if name in REQUEST_OPTIONS else change)[name] = None
    return change | ({"request": changed_request} if changed_request else {})


def paths_to_stage(body: Json, file: Path | None, option_paths: list[str]) -> list[str]:
    """Return the paths of files to upload, from the options or the job file. The latter are relative to its folder."""
    file_paths = body.pop("stage", None)
    if option_paths or file_paths is None:
        return option_paths
    if not isinstance(file_paths, list) or not all(isinstance(path, str) for path in file_paths):
        raise GridError("stage in the job file is not a list of paths", Exit.USAGE, "give files and folders")
    return [str((file or Path()).parent / path) for path in file_paths]


def checked_key(key: str) -> str:
    """Validate an idempotency key. Raise ``GridError`` if a header cannot contain it."""
    if not key.strip() or not key.isprintable() or not is_utf8(key):
        hint = "use letters, digits and signs, the same for each retry"
        raise GridError("--idempotency-key is blank, or has characters that a header does not allow", Exit.USAGE, hint)
    return key


ScriptLines = Mapping[str, str]
"""Fields that lines of a script set, each with file and line."""
NO_LINES: ScriptLines = {}


def in_terms_of_options(error: GridError, body: Json, options: Json, lines: ScriptLines = NO_LINES) -> GridError:
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
    return GridError(f"{position}{option_text}{error.message[len(field) :]}", error.code, error.hint, field)


def in_terms_of_documents(error: GridError, bodies: list[Json], options: Json, file: str) -> GridError:
    """Rewrite a rejection of a batch to name the document of the job file instead of the list's entry."""
    entry = re.match(r"jobs\[(\d+)\][.:]? ?", error.message)
    if entry is None or int(entry[1]) >= len(bodies):
        return error
    index, message = int(entry[1]), error.message[entry.end() :]
    field = error.field.removeprefix(f"jobs[{index}]").removeprefix(".")
    job_error = in_terms_of_options(GridError(message, error.code, error.hint, field), bodies[index], options)
    return GridError(f"document {index + 1} of {file}: {job_error.message}", error.code, job_error.hint, field)
