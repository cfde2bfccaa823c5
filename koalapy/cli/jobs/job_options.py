"""The options of a job, generated from the fields of ``JobSpec`` and their help texts."""

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin

from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.whole_numbers import parse_int
from koalapy.client.answers import Json
from koalapy.client.errors import CliError, Exit
from koalapy.model.array import TaskIndices
from koalapy.model.command_line import JOB_FIELDS
from koalapy.model.dependency import Dependencies, ResultInputs
from koalapy.model.field import split_annotation
from koalapy.model.job_spec import Coallocation, Duration, Lease, Lines, PerNodeBandwidth, PointInTime, PolicyOptions
from koalapy.model.node_requirement import Excluded, Gpus, NodeMemory
from koalapy.model.request import Bundle, Environment, Inputs, StopWarning
from koalapy.model.times import parse_time

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
