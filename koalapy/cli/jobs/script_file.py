"""Read a job's script and the options in its ``#KOALA`` lines."""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import click
from click.core import ParameterSource

from koalapy.cli.jobs.submission import JOB_OPTIONS, Export, RequestOptions, exported_variables, form_of
from koalapy.cli.terminal.arguments import Options, click_command
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.http import Json
from koalapy.model.command_line import JOB_FIELDS
from koalapy.model.job_spec import MAX_SCRIPT_BYTES, find_script_error

DIRECTIVE = "#KOALA"
LINE = re.compile(rf"{DIRECTIVE}(?:\s+(.*))?", re.DOTALL)
KINDS = ("flexible", "nonfixed", "fixed")
"""The options that name the kind of a request; one of the command line replaces all nodes of the script."""


@dataclass(frozen=True)
class ScriptOptions:
    """The options of a script's lines, and the line of each for error messages."""

    request: RequestOptions = field(default_factory=RequestOptions)
    job: Json = field(default_factory=dict)
    """Values as ``koala submit`` reads them, by field."""
    export: str | None = None
    lines: Mapping[str, str] = field(default_factory=dict)
    """File and line of each field, and of ``request``."""


@dataclass(frozen=True)
class Script:
    """A script, and the lines before its first command."""

    name: str
    text: str

    @property
    def head(self) -> Iterator[tuple[int, str]]:
        """Yield the number and text of each comment before the first command."""
        for number, line in enumerate(self.text.splitlines(), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                return
            yield number, line.strip()

    def lines_with(self, prefix: str) -> list[int]:
        """Return the numbers of all lines that begin with a prefix and a blank."""
        lines = enumerate(self.text.splitlines(), 1)
        return [number for number, line in lines if f"{line.rstrip()} ".startswith(f"{prefix} ")]


def read_script(path: str) -> Script:
    """Read a script. Raise ``GridError`` for a file that is none."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_SCRIPT_BYTES + 1)
    except FileNotFoundError as error:
        hint = "give a file that begins with #!, or put -- before a command"
        raise GridError(f"there is no script {path}", Exit.USAGE, hint) from error
    except IsADirectoryError as error:
        hint = "name a file in it, or put -- before a command"
        raise GridError(f"{path} is a folder, not a script", Exit.USAGE, hint) from error
    except OSError as error:
        raise GridError(f"cannot read the script {path}: {error.strerror}", Exit.USAGE, "make it readable") from error
    name = Path(path).name
    if len(content) > MAX_SCRIPT_BYTES:
        hint = "put data into files, and send them by --stage; put -- before a command"
        raise GridError(f"the script {path} is larger than {MAX_SCRIPT_BYTES} bytes", Exit.USAGE, hint)
    if b"\0" in content:
        hint = f"put -- before the command: koala submit … -- {path}"
        raise GridError(f"{path} is a program, not a script", Exit.USAGE, hint)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        hint = f"convert it, for example by iconv -f latin1 -t utf-8 {path}"
        raise GridError(f"{path}:{line}: the script is not in UTF-8", Exit.USAGE, hint) from error
    if error_and_hint := find_script_error(text):
        raise GridError(f"the script {path} {error_and_hint[0]}", Exit.USAGE, error_and_hint[1])
    return Script(name, text)


def read_directives(script: Script, refused: frozenset[str]) -> ScriptOptions:
    """Return the options of a script's ``#KOALA`` lines. Raise ``GridError`` with file and line for a wrong one.

    ``refused``: the options of ``koala submit`` that are not the job's.
    """
    options = ScriptOptions()
    numbers = []
    for number, line in script.head:
        if line.startswith(DIRECTIVE):
            numbers.append(number)
            position = f"{script.name}:{number}"
            match = LINE.fullmatch(line)
            if match is None:
                raise GridError(
                    f"{position}: {line[:60]!r} has no blank after {DIRECTIVE}", Exit.USAGE, "put one there"
                )
            arguments = split_words(match[1] or "", position)
            options = add_words(options, arguments, position, refused)
    for number in script.lines_with(DIRECTIVE):
        if number not in numbers:
            print_note(f"{script.name}:{number}: this {DIRECTIVE} line has no effect, since it follows a command")
    return options


def split_words(text: str, position: str) -> list[str]:
    """Split a line into words as a shell does, without a comment at its end."""
    for comment in re.finditer(r"(?:^|\s)#", text):
        try:
            return shlex.split(text[: comment.start()])
        except ValueError:
            continue  # the sign is in quotes
    try:
        return shlex.split(text)
    except ValueError as error:
        raise GridError(f"{position}: {str(error).lower()}", Exit.USAGE, "close the quotes") from error


def add_words(options: ScriptOptions, arguments: list[str], position: str, refused: frozenset[str]) -> ScriptOptions:
    """Return the options with those of one line. Raise ``GridError`` for an unknown, wrong or repeated one."""
    for argument in arguments:
        if (name := argument.partition("=")[0]) in refused:
            hint = "give it on the command line"
            raise GridError(f"{position}: {name} is an option of the command, not of the job", Exit.USAGE, hint)
    values = _parse_words(arguments, position)
    request, job, lines = asdict(options.request), dict(options.job), dict(options.lines)
    export = values.get("export", options.export)
    for name, value in values.items():
        is_list = isinstance(value, list)
        if name in lines and not is_list:
            raise GridError(f"{position}: it repeats {lines[name]}", Exit.USAGE, "leave one out")
        lines.setdefault(name, position)
        if name == "export":
            continue
        target = job if name in JOB_FIELDS else request
        target[name] = [*(target.get(name) or []), *value] if is_list else value
    return ScriptOptions(RequestOptions(**request), job, export, lines)


def _parse_words(arguments: list[str], position: str) -> Json:
    """Return the values of the options in a line, by name."""
    command = click_command(DIRECTIVE, _take_options)
    try:
        context = command.make_context("koala submit", list(arguments))
    except click.exceptions.Exit as error:
        raise GridError(f"{position}: --help is no option of a job", Exit.USAGE, "leave it out") from error
    except GridError as error:
        raise GridError(f"{position}: {error.message}", error.code, error.hint) from error
    except click.UsageError as error:
        message = error.format_message().removesuffix(".")
        raise GridError(f"{position}: {message}", Exit.USAGE, "see koala submit --help") from error
    values: Json = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    for name, value in values.items():
        try:
            if name in JOB_FIELDS:
                form_of(JOB_FIELDS[name].type).read(value)
            elif name == "export":
                exported_variables(value)
        except GridError as error:
            raise GridError(f"{position}: {error.message}", error.code, error.hint) from error
    return values


def job_options() -> set[str]:
    """Return the options that a script may have."""
    return {name for parameter in click_command(DIRECTIVE, _take_options).params for name in parameter.opts}


def _take_options(request: RequestOptions, job: Annotated[Json, Options(JOB_OPTIONS)], export: Export = None) -> None:
    """Take the options that a script may have."""


def merge_request(script: RequestOptions, command_line: RequestOptions) -> RequestOptions:
    """Return the request of a script as the command line changes it."""
    overrides = {name: value for name, value in asdict(command_line).items() if value is not None}
    if any(kind in overrides for kind in KINDS):
        dropped = KINDS if "flexible" in overrides else [option.name for option in fields(RequestOptions)]
        script = replace(script, **dict.fromkeys(dropped))
    return replace(script, **overrides)


def merge_job(script: Json, command_line: Json) -> Json:
    """Return the options of a script as those of the command line override them; variables are added by name."""
    merged: dict[str, Any] = dict(command_line)
    for name, value in script.items():
        if merged.get(name) is None:
            merged[name] = value
        elif name in ("environment", "policy_options"):
            merged[name] = [*value, *merged[name]]
    return merged


def print_note(text: str) -> None:
    print(printable(f"koala: {text}"), file=sys.stderr, flush=True)
