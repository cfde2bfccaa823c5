"""Commands generated from functions: click parses, validates, documents and completes the parameters of a signature.

A parameter is ``Annotated[type, Option(…)]`` or ``Argument(…)``. Types are ``str``, ``int``, ``float``, ``bool`` (a
flag), ``Path``, enums of texts, and lists of these; ``| None`` if the default is None. A dataclass parameter expands to
its fields, which the marks of the model may describe, and ``Annotated[dict[str, Any], Options(…)]`` to the listed
options.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import click
from click.core import ParameterSource

from koalapy.cli.startup import begin_command
from koalapy.client.errors import Exit, GridError
from koalapy.client.job_reference import JobReference
from koalapy.model.wording import parse_int, suggest_names

Function = Callable[..., int | None]
"""The function of a command. It returns the exit code, or None for 0."""
COMPLETION_VARIABLE = "_KOALA_COMPLETE"
"""Environment variable by which a shell's script requests completions."""
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
BEFORE_DASHES = "koalapy.before_dashes"
"""Key of a click context's ``meta``: the words of the list argument before ``--``; None without ``--``."""
MAX_SHOWN_CHOICES = 4
"""Maximum number of choices that help pages list in place of a metavariable."""
MAX_REFUSAL_LENGTH = 500
"""Maximum length in characters of an error message of click, which repeats the whole argument."""


class Option:
    """An option ``--name VALUE`` or a flag; by default with the parameter's name. ``"--on/--off"`` has an opposite.

    ``completes``: kind of the values for completion, a key of ``koalapy.cli.terminal.completion.OFFERS``.
    ``properties``: those of ``_Option``, such as ``envvar``, ``hidden`` and ``may_be_empty``.
    """

    def __init__(
        self,
        *names: str,
        help: str = "",
        min: float | None = None,
        max: float | None = None,
        completes: str = "",
        **properties: Any,
    ) -> None:
        self.names, self.help, self.min, self.max = names, help, min, max
        self.completes, self.properties = completes, properties


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A positional argument. ``takes_rest``: later arguments are not parsed as options.

    ``takes_options``: unknown options before it are part of it, too.
    """

    help: str = ""
    metavar: str = ""
    takes_rest: bool = False
    takes_options: bool = False
    completes: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """Options by name, each ``Annotated[type | None, Option(…)]``, passed to the function as one mapping."""

    by_name: Mapping[str, Any]


class _Float(click.FloatRange):
    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class _Int(click.IntRange):
    name = "whole number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and parse_int(value) is None:
            self.fail(f"{value!r} is not a valid whole number.", param, ctx)
        return super().convert(value, param, ctx)


class JobReferenceType(click.ParamType[JobReference]):
    """The click type of jobs and tasks."""

    name = "job"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> JobReference:
        if isinstance(value, JobReference):
            return value
        try:
            return JobReference.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Option(click.Option):
    """An option that rejects an empty value, which is usually an unset shell variable, unless it has a meaning."""

    def __init__(self, *names: Any, may_be_empty: bool = False, **options: Any) -> None:
        super().__init__(*names, **options)
        self._may_be_empty = may_be_empty

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        if isinstance(self.type, (_Int, _Float)) and self.type.min is None and self.type.max is None:
            extra.pop("range", None)  # click would describe it as "x<=None"
        return extra

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        value, source = super().consume_value(ctx, opts)
        if self.multiple and isinstance(self.type, _Choice) and source is ParameterSource.COMMANDLINE:
            value = tuple(part.strip() for text in value for part in text.split(","))
        is_empty = "" in (value if isinstance(value, (list, tuple)) else (value,))
        if is_empty and source is ParameterSource.COMMANDLINE and not self._may_be_empty:
            raise click.BadParameter("it is empty: give a value, or leave the option out.", ctx, self)
        return value, source


class _Choice(click.Choice[str]):
    """A parameter type for the texts of an enum, case-insensitive."""

    def __init__(self, kind: type[Enum]) -> None:
        super().__init__([str(member.value) for member in kind], case_sensitive=False)
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._kind(super().convert(value, param, ctx))

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"{value!r}; {suggest_names(str(value), self.choices)}"


class _Command(click.Command):
    """A command with usage errors that name the command for the help page."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        arguments = list(args)
        try:
            parsed = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from koalapy.cli.terminal.foreign_options import explain_option

            if answer := explain_option(ctx.command_path, error.option_name, arguments):
                raise GridError(answer, Exit.USAGE) from error
            error.ctx = error.ctx or ctx
            raise
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise
        values = next((ctx.params[p.name] for p in self.params if p.nargs == -1 and p.name in ctx.params), None) or ()
        ctx.meta[BEFORE_DASHES] = _list_words_before_dashes(arguments, values, is_parsed=ctx.allow_interspersed_args)
        return parsed

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GridError as error:
            _name_option(error, ctx)
            raise


def _list_words_before_dashes(arguments: list[str], values: Sequence[object], *, is_parsed: bool) -> list[str] | None:
    """Return the words of a list argument before the ``--`` of a command line; None without one.

    ``values``: all words of the argument. ``is_parsed``: options may follow its first word, and it lacks the ``--``.
    """
    texts = [str(value) for value in values]
    if is_parsed:
        return texts[: len(values) - len(arguments) + arguments.index("--") + 1] if "--" in arguments else None
    if arguments[: len(arguments) - len(values)][-1:] == ["--"]:
        return []
    return texts[: texts.index("--")] if "--" in texts else None


def refuse_words_before_dashes(max_words: int = 0) -> None:
    """Raise ``GridError`` if words before ``--`` would become the command, as after a blank in a list of sizes."""
    stray_words = (click.get_current_context().meta.get(BEFORE_DASHES) or [])[max_words:]
    if stray_words:
        text, values = " ".join(stray_words)[:MAX_REFUSAL_LENGTH], "--fixed north:2,south:2 or --nonfixed 2,2"
        hint = f"write the command after --, and values of an option without blanks, as in {values}"
        raise GridError(f"{text!r} before -- is no option", Exit.USAGE, hint)


OPTIONS_OF_FIELDS = {"owner": "user", "array": "tasks"}
"""Parameters of commands that have another name than the field of a request."""


def _name_option(error: GridError, ctx: click.Context) -> None:
    """Name an option as the user typed it, in an error that begins with the field of the request."""
    if not error.field or not re.match(rf"{re.escape(error.field)} (is|has|ends|selects|names)\b", error.message):
        return
    name = OPTIONS_OF_FIELDS.get(error.field, error.field)
    for parameter in ctx.command.params:
        is_given = ctx.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if parameter.name == name and is_given and isinstance(parameter, click.Option):
            error.message = max(parameter.opts, key=len) + error.message[len(error.field) :]


class Group(_Command, click.Group):
    """A group of subcommands: functions, groups, or targets ``module:attribute`` that are imported on first use.

    Without a subcommand ``default`` runs; its options may also precede a subcommand.
    """

    def __init__(
        self,
        help: str,
        subcommands: Mapping[str, Function | Group | str],
        default: Function | None = None,
        epilog: str = "",
        options: Sequence[click.Option] = (),
    ) -> None:
        run_default = click_command("", default) if default else None
        super().__init__(
            invoke_without_command=True,
            help=help,
            short_help=help.split("\n\n")[0],
            epilog=epilog,
            context_settings=CONTEXT,
            params=[*(run_default.params if run_default else ()), *options],
        )
        self.subcommands = subcommands
        self.callback = partial(self._run_default, run_default and run_default.callback)

    def _run_default(self, default: Callable[..., Any] | None, **values: Any) -> Any:
        """Run the default command if no subcommand was given; print the help page if there is no default."""
        context = click.get_current_context()
        if context.invoked_subcommand is not None:
            return None
        return default(**values) if default else click.echo(context.get_help())

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.subcommands)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return the click command of a subcommand, imported on first use; None for an unknown name."""
        command = self.subcommands.get(name)
        if isinstance(command, str):
            module, _, attribute = command.partition(":")
            command = getattr(import_module(module), attribute)
        if not isinstance(command, Group):
            return command and click_command(name, command)
        command.name = name
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand. Pass it the options that precede it; reject options that it does not have."""
        name, command, remaining_args = args[0], self.get_command(ctx, args[0]), args[1:]
        if command is None:
            raise click.exceptions.NoSuchCommand(name, possibilities=self.subcommands, ctx=ctx)
        options = {
            option: value
            for option, value in ctx.params.items()
            if ctx.get_parameter_source(option) is ParameterSource.COMMANDLINE
        }
        for option in options.keys() - {parameter.name for parameter in command.params}:
            flag = next(parameter.opts[0] for parameter in self.params if parameter.name == option)
            ctx.fail(f"{ctx.command_path} {name} has no option {flag}, which stands before it.")
        ctx.default_map = {name: options}
        return name, command, remaining_args


def click_command(name: str, run: Function) -> click.Command:
    """Create a click command from a function; its docstring is the help."""
    signature = inspect.signature(run).parameters
    specs: dict[str, Option | Argument] = {}
    parameters: list[click.Parameter] = []
    parts: dict[str, list[str]] = {}
    for parameter in signature.values():
        members = _list_members(parameter.annotation)
        if members is not None:
            parts[parameter.name] = list(members)
        for member, (annotation, default) in (
            members or {parameter.name: (parameter.annotation, parameter.default)}
        ).items():
            kind, specs[member] = _split_annotation(member, annotation)
            parameters.append(_create_parameter(member, kind, default, specs[member]))

    def call_function(**values: Any) -> int | None:
        """Call ``run`` with the values of click, regrouped into its dataclasses and mappings."""
        arguments: dict[str, Any] = {}
        for parameter in parameters:
            value = values[str(parameter.name)]
            # Click passes an empty list for an omitted one: use the default instead.
            is_list = parameter.multiple or parameter.nargs == -1
            arguments[str(parameter.name)] = (list(value) or None) if is_list else value
        for part, names in parts.items():
            arguments[part] = signature[part].annotation(**{name: arguments.pop(name) for name in names})
        begin_command()
        return run(**arguments)

    description = inspect.getdoc(run) or ""
    rests = [spec for spec in specs.values() if isinstance(spec, Argument)]
    return _Command(
        name,
        callback=call_function,
        params=parameters,
        help=description,
        short_help=description.split("\n\n")[0],
        context_settings={
            **CONTEXT,
            "allow_interspersed_args": not any(spec.takes_rest for spec in rests),
            "ignore_unknown_options": any(spec.takes_options for spec in rests),
        },
    )


def _list_members(annotation: Any) -> Mapping[str, tuple[Any, Any]] | None:
    """Return annotation and default of the options in a dataclass or ``Options``; None for another parameter."""
    if is_dataclass(annotation):
        return {
            field.name: (field.type, inspect.Parameter.empty if field.default is MISSING else field.default)
            for field in fields(annotation)
        }
    if get_origin(annotation) is Annotated and isinstance(options := get_args(annotation)[1], Options):
        return {name: (option, None) for name, option in options.by_name.items()}
    return None


def _split_annotation(name: str, annotation: Any) -> tuple[Any, Option | Argument]:
    """Return the type without None, and the option or argument. Raise ``TypeError`` if the annotation has none.

    The marks of a field in the model, ``Field`` and ``Bounds``, describe an option, too.
    """
    from koalapy.model.field import Bounds, Field, split_annotation, without_none  # for commands with options only

    kind, marks = split_annotation(annotation)
    spec = next((mark for mark in marks if isinstance(mark, (Option, Argument))), None)
    if spec is None:
        field = next((mark for mark in marks if isinstance(mark, Field)), None)
        if field is None:
            raise TypeError(f"parameter {name} is not Annotated with an Option, Argument or Field")
        bounds = next((mark for mark in marks if isinstance(mark, Bounds)), Bounds())
        spec = Option(
            *filter(None, (field.short, field.option)), help=field.help, min=bounds.minimum, max=bounds.maximum
        )
    return without_none(kind), spec


def _create_parameter(name: str, kind: Any, default: Any, spec: Option | Argument) -> click.Parameter:
    """Create a click option or argument, with its type, default, help and completion.

    ``default``: ``inspect.Parameter.empty`` for a required parameter.
    """
    is_list = get_origin(kind) is list
    type_ = get_args(kind)[0] if is_list else kind
    is_required = default is inspect.Parameter.empty
    common: dict[str, Any] = {"type": _click_type(type_, spec), "required": is_required, "help": spec.help or None}
    if default is not None and not is_required:
        common["default"] = default.value if isinstance(default, Enum) else default
    if completes := "files" if isinstance(spec, Argument) and spec.takes_rest else spec.completes:
        common["shell_complete"] = partial(_complete_word, completes)
    dashed = name.strip("_").replace("_", "-")
    if isinstance(spec, Argument):
        label = spec.metavar or dashed.upper().removesuffix("S" if is_list else "")
        if is_list:
            return click.Argument([name], nargs=-1, metavar=f"{label}...", **common)
        return click.Argument([name], metavar=label, **common)
    if type_ is bool:
        common |= {"is_flag": True, "type": bool}
    elif type_ is int:
        common["metavar"] = "N"
    elif issubclass(type_, Enum) and len(type_) > MAX_SHOWN_CHOICES:
        choices = ", ".join(str(member.value) for member in type_)
        common |= {"metavar": name.upper(), "help": f"{spec.help}: {choices}"}
    return _Option(
        [name, *(spec.names or (f"--{dashed}",))],
        multiple=is_list,
        show_envvar=True,
        show_default=default not in (None, "", False, True) and "default:" not in spec.help and not is_required,
        **common,
        **spec.properties,
    )


def _click_type(kind: type, spec: Option | Argument) -> click.ParamType[Any]:
    """Return the click type that parses and validates a value."""
    minimum, maximum = (spec.min, spec.max) if isinstance(spec, Option) else (None, None)
    if kind is float:
        return _Float(minimum, maximum)
    if kind is int:
        return _Int(None if minimum is None else int(minimum), None if maximum is None else int(maximum))
    if issubclass(kind, Enum):
        return _Choice(kind)
    if kind is JobReference:
        return JobReferenceType()
    return click.Path(path_type=Path) if kind is Path else click.STRING


def _complete_word(kind: str, context: click.Context, parameter: click.Parameter, incomplete: str) -> Any:
    from koalapy.cli.terminal import completion

    return completion.complete_word(kind, context, parameter, incomplete)


def run_command(name: str, root: Group, command_line: Sequence[str], of_context: object = None) -> int:
    """Run the command of a command line and return its exit code. Raise ``GridError`` for an invalid command line.

    ``of_context``: an object stored in the click context for the command.
    """
    if instruction := os.environ.get(COMPLETION_VARIABLE):
        from koalapy.cli.terminal import completion

        completion.install_shells()
        return completion.shell_complete(root, {"obj": of_context}, name, COMPLETION_VARIABLE, instruction)
    try:
        with root.make_context(name, list(command_line), obj=of_context) as context:
            code = root.invoke(context)
    except click.exceptions.Exit as exit_request:
        return exit_request.exit_code
    except click.UsageError as error:
        message, path = error.format_message(), error.ctx.command_path if error.ctx else name
        message = (
            message.removesuffix(".") if len(message) <= MAX_REFUSAL_LENGTH else f"{message[:MAX_REFUSAL_LENGTH]}…"
        )
        if message.endswith("?"):
            raise GridError(f"{message} See {path} --help", Exit.USAGE) from error
        raise GridError(message, Exit.USAGE, f"see {path} --help") from error
    return code if isinstance(code, int) else 0


def root_options(version: str) -> list[click.Option]:
    """Create the options of the top-level command, each of which prints a text and ends the command."""

    def show_manual_page(context: click.Context, _: object) -> str:
        from koalapy.cli.terminal.manual import show_manual

        show_manual(str(context.info_name), context.command, version)
        return ""

    def completion_script(context: click.Context, shell: str) -> str:
        from koalapy.cli.terminal import completion

        completion.install_shells()
        completion_class = completion.get_completion_class(shell)
        assert completion_class is not None
        return completion_class(context.command, {}, str(context.info_name), COMPLETION_VARIABLE).source()

    def create_option(
        name: str, help: str, text: Callable[[click.Context, Any], str], **properties: Any
    ) -> click.Option:
        def print_text(context: click.Context, _: click.Parameter, value: Any) -> None:
            if value and not context.resilient_parsing:
                click.echo(text(context, value), nl=False)
                context.exit()

        return click.Option([name], help=help, callback=print_text, is_eager=True, expose_value=False, **properties)

    manual = "show the manual page; print its source if the output is no terminal"
    shells = click.Choice(["bash", "zsh", "fish"])
    return [
        create_option("--version", "print the version", lambda c, _: f"{c.info_name} {version}\n", is_flag=True),
        create_option("--man", manual, show_manual_page, is_flag=True),
        create_option("--show-completion", "print the script for shell completion", completion_script, type=shells),
    ]
