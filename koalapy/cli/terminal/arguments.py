"""Commands generated from functions: click parses, validates, documents and completes the parameters of a signature.

A parameter is ``Annotated[type, Option(…)]`` or ``Argument(…)``. Types are ``str``, ``int``, ``float``, ``bool`` (a
flag), ``Path``, enums of texts, and lists of these; ``| None`` if the default is None. A dataclass parameter expands to
its fields, and ``Annotated[dict[str, Any], Options(…)]`` to the listed options.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import click
from click.core import ParameterSource

from koalapy.cli.startup import begin_command
from koalapy.cli.terminal.job_reference import JobReference, JobReferenceType, parse_int
from koalapy.client.errors import CliError, Exit
from koalapy.model.wording import suggest_names

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
    ``companion``: an option added to every command with this one. Its value is stored in its environment variable.
    ``may_be_empty``: accept the empty text. By default it is rejected, as it usually means an unset shell variable.
    """

    def __init__(
        self,
        *names: str,
        help: str = "",
        envvar: str = "",
        min: float | None = None,
        max: float | None = None,
        hidden: bool = False,
        companion: Option | None = None,
        completes: str = "",
        may_be_empty: bool = False,
    ) -> None:
        self.names, self.help, self.envvar, self.hidden, self.min, self.max = names, help, envvar, hidden, min, max
        self.companion, self.completes, self.may_be_empty = companion, completes, may_be_empty


class Argument:
    """A positional argument. ``takes_rest``: later arguments are not parsed as options.

    ``takes_options``: unknown options before it are part of it, too.
    """

    def __init__(
        self,
        *,
        help: str = "",
        metavar: str = "",
        takes_rest: bool = False,
        completes: str = "",
        takes_options: bool = False,
    ) -> None:
        self.help, self.metavar, self.takes_rest, self.takes_options = help, metavar, takes_rest, takes_options
        self.completes = "files" if takes_rest else completes


@dataclass(frozen=True, slots=True)
class Options:
    """Options by name, each ``Annotated[type | None, Option(…)]``, passed to the function as one mapping."""

    by_name: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Lazy:
    """A command or group in a module that is imported on first use: ``module:attribute``."""

    target: str

    def load_command(self) -> Function | Group:
        module, _, attribute = self.target.partition(":")
        command: Function | Group = getattr(import_module(module), attribute)
        return command


@dataclass(frozen=True, slots=True)
class Group:
    """A group of subcommands. Without a subcommand ``default`` runs; its options may also precede a subcommand."""

    help: str
    commands: Mapping[str, Function | Lazy | Group]
    default: Function | None = None
    epilog: str = ""


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


class _Option(click.Option):
    """An option that rejects an empty value unless it has a meaning."""

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


class _Refusing(click.Command):
    """A command with usage errors that name the command for the help page."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            parsed = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from koalapy.cli.terminal.foreign_options import explain_option

            if answer := explain_option(ctx.command_path, error.option_name, words):
                raise CliError(answer, Exit.USAGE) from error
            error.ctx = error.ctx or ctx
            raise
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise
        rest = next((ctx.params[p.name] for p in self.params if p.nargs == -1 and p.name in ctx.params), None) or ()
        ctx.meta[BEFORE_DASHES] = _list_words_before_dashes(words, rest, is_parsed=ctx.allow_interspersed_args)
        return parsed

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CliError as error:
            _name_option(error, ctx)
            raise


def _list_words_before_dashes(words: list[str], rest: Sequence[object], *, is_parsed: bool) -> list[str] | None:
    """Return the words of a list argument before the ``--`` of a command line; None without one.

    ``rest``: all words of the argument. ``is_parsed``: options may follow its first word, and it lacks the ``--``.
    """
    texts = [str(word) for word in rest]
    if is_parsed:
        return texts[: len(rest) - len(words) + words.index("--") + 1] if "--" in words else None
    if words[: len(words) - len(rest)][-1:] == ["--"]:
        return []
    return texts[: texts.index("--")] if "--" in texts else None


def refuse_words_before_dashes(max_words: int = 0) -> None:
    """Raise ``CliError`` if words before ``--`` would become the command, as after a blank in a list of sizes."""
    stray_words = (click.get_current_context().meta.get(BEFORE_DASHES) or [])[max_words:]
    if stray_words:
        text, values = " ".join(stray_words)[:MAX_REFUSAL_LENGTH], "--fixed north:2,south:2 or --nonfixed 2,2"
        hint = f"write the command after --, and values of an option without blanks, as in {values}"
        raise CliError(f"{text!r} before -- is no option", Exit.USAGE, hint)


OPTIONS_OF_FIELDS = {"owner": "user", "array": "tasks"}
"""Parameters of commands that have another name than the field of a request."""


def _name_option(error: CliError, ctx: click.Context) -> None:
    """Name an option as the user typed it, in an error that begins with the field of the request."""
    if not error.field or not re.match(rf"{re.escape(error.field)} (is|has|ends|selects|names)\b", error.message):
        return
    name = OPTIONS_OF_FIELDS.get(error.field, error.field)
    for parameter in ctx.command.params:
        is_given = ctx.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if parameter.name == name and is_given and isinstance(parameter, click.Option):
            error.message = max(parameter.opts, key=len) + error.message[len(error.field) :]


class Commands(_Refusing, click.Group):
    """A click group made from a ``Group``. It imports a subcommand on first use."""

    def __init__(self, name: str, group: Group) -> None:
        default = click_command(name, group.default) if group.default else None
        super().__init__(
            name,
            invoke_without_command=True,
            help=group.help,
            short_help=group.help.split("\n\n")[0],
            epilog=group.epilog,
            context_settings=CONTEXT,
            params=[*default.params] if default else [],
        )
        self._subcommands, self._default = group.commands, default
        self.callback = self._run_default

    def _run_default(self, **values: Any) -> Any:
        """Run the default command if no subcommand was given; print the help page if there is no default."""
        context = click.get_current_context()
        if context.invoked_subcommand is not None:
            return None
        if self._default is None or self._default.callback is None:
            click.echo(context.get_help())
            return None
        return self._default.callback(**values)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._subcommands)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return the click command of a subcommand, imported on first use; None for an unknown name."""
        command = self._subcommands.get(name)
        if isinstance(command, Lazy):
            command = command.load_command()
        if command is None:
            return None
        return Commands(name, command) if isinstance(command, Group) else click_command(name, command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand. Pass it the options that precede it, or reject those that it does not have."""
        name, command, remaining_args = args[0], self.get_command(ctx, args[0]), args[1:]
        if command is None:
            raise click.exceptions.NoSuchCommand(name, possibilities=self._subcommands, ctx=ctx)
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
    parameters = list(_list_parameters(run))
    takes_rest = any(isinstance(parameter.spec, Argument) and parameter.spec.takes_rest for parameter in parameters)
    description = inspect.getdoc(run) or ""
    companions = [
        parameter.spec.companion
        for parameter in parameters
        if isinstance(parameter.spec, Option) and parameter.spec.companion is not None
    ]
    return _Refusing(
        name,
        callback=_make_callback(run, parameters),
        params=[*(parameter.to_click() for parameter in parameters), *map(_companion_option, companions)],
        help=description,
        short_help=description.split("\n\n")[0],
        context_settings={
            **CONTEXT,
            "allow_interspersed_args": not takes_rest,
            "ignore_unknown_options": any(
                isinstance(parameter.spec, Argument) and parameter.spec.takes_options for parameter in parameters
            ),
        },
    )


def _companion_option(option: Option) -> click.Option:
    """Create an option that accompanies another one and sets its environment variable."""

    def set_variable(context: click.Context, _: click.Parameter, value: Any) -> None:
        if value is not None and not context.resilient_parsing:
            os.environ[option.envvar] = value

    properties: dict[str, Any] = {"help": option.help, "envvar": option.envvar, "show_envvar": True}
    return _Option(list(option.names), expose_value=False, callback=set_variable, **properties)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """An option or argument. ``part_of``: the parameter of the function that has it as a field, if any."""

    name: str
    type: type
    is_list: bool
    default: Any
    is_required: bool
    spec: Option | Argument
    part_of: str

    def to_click(self) -> click.Parameter:
        """Create the click option or argument, with its type, default, help and completion."""
        common: dict[str, Any] = {
            "type": self._click_type(),
            "required": self.is_required,
            "help": self.spec.help or None,
        }
        if self.default is not None and not self.is_required:
            common["default"] = self.default.value if isinstance(self.default, Enum) else self.default
        if self.spec.completes:
            common["shell_complete"] = partial(_complete_word, self.spec.completes)
        if isinstance(self.spec, Argument):
            label = self.spec.metavar or _to_dashes(self.name).upper().removesuffix("S" if self.is_list else "")
            if self.is_list:
                return click.Argument([self.name], nargs=-1, metavar=f"{label}...", **common)
            return click.Argument([self.name], metavar=label, **common)
        names = self.spec.names or (f"--{_to_dashes(self.name)}",)
        if self.type is bool:
            common |= {"is_flag": True, "type": bool}
        elif self.type is int:
            common["metavar"] = "N"
        if issubclass(self.type, Enum) and len(self.type) > MAX_SHOWN_CHOICES:
            choices = ", ".join(str(member.value) for member in self.type)
            common |= {"metavar": self.name.upper(), "help": f"{self.spec.help}: {choices}"}
        shows_default = self.default not in (None, "", False, True) and "default:" not in self.spec.help
        return _Option(
            [self.name, *names],
            may_be_empty=self.spec.may_be_empty,
            multiple=self.is_list,
            hidden=self.spec.hidden,
            envvar=self.spec.envvar or None,
            show_envvar=True,
            show_default=shows_default,
            **common,
        )

    def _click_type(self) -> click.ParamType[Any]:
        """Return the click type that parses and validates a value."""
        minimum, maximum = (self.spec.min, self.spec.max) if isinstance(self.spec, Option) else (None, None)
        if self.type is float:
            return _Float(minimum, maximum)
        if self.type is int:
            return _Int(None if minimum is None else int(minimum), None if maximum is None else int(maximum))
        if issubclass(self.type, Enum):
            return _Choice(self.type)
        if self.type is JobReference:
            return JobReferenceType()
        return click.Path(path_type=Path) if self.type is Path else click.STRING


def _list_parameters(run: Function) -> Iterator[_Parameter]:
    """Yield the options and arguments of a command from the signature of its function.

    Replace a parameter that is a dataclass or has ``Options`` by the options in it.
    """
    for name, parameter in inspect.signature(run).parameters.items():
        if is_dataclass(parameter.annotation):
            for field in fields(parameter.annotation):
                default = inspect.Parameter.empty if field.default is MISSING else field.default
                yield _make_parameter(field.name, field.type, default, part_of=name)
        elif get_origin(parameter.annotation) is Annotated and isinstance(
            options := get_args(parameter.annotation)[1], Options
        ):
            for option, annotation in options.by_name.items():
                yield _make_parameter(option, annotation, None, part_of=name)
        else:
            yield _make_parameter(name, parameter.annotation, parameter.default)


def _make_parameter(name: str, annotation: Any, default: Any, part_of: str = "") -> _Parameter:
    """Create an option or argument from an annotation. Raise ``TypeError`` if the annotation describes none.

    ``default``: ``inspect.Parameter.empty`` for a required parameter.
    """
    if get_origin(annotation) is not Annotated:
        raise TypeError(f"parameter {name} is not Annotated with an Option or Argument")
    kind, spec = get_args(annotation)
    if get_origin(kind) in (UnionType, Union):
        kind = next(argument for argument in get_args(kind) if argument is not NoneType)
    is_list = get_origin(kind) is list
    is_required = default is inspect.Parameter.empty
    return _Parameter(
        name,
        get_args(kind)[0] if is_list else kind,
        is_list,
        None if is_required else default,
        is_required,
        spec,
        part_of,
    )


def _complete_word(kind: str, context: click.Context, parameter: click.Parameter, incomplete: str) -> Any:
    from koalapy.cli.terminal import completion

    return completion.complete_word(kind, context, parameter, incomplete)


def _to_dashes(name: str) -> str:
    return name.strip("_").replace("_", "-")


def _make_callback(run: Function, parameters: Sequence[_Parameter]) -> Callable[..., int | None]:
    """Wrap ``run`` as a callback that gets the values of click by name."""

    def call_function(**values: Any) -> int | None:
        """Call ``run`` with the values, regrouped into its dataclasses and mappings."""
        lists = {parameter.name for parameter in parameters if parameter.is_list}
        # Click passes an empty list for an omitted one: use the default instead.
        arguments = {name: (list(value) or None) if name in lists else value for name, value in values.items()}
        signature_parameters = inspect.signature(run).parameters
        parts: dict[str, dict[str, Any]] = {}
        for parameter in parameters:
            if parameter.part_of:
                parts.setdefault(parameter.part_of, {})[parameter.name] = arguments.pop(parameter.name)
        begin_command()
        return run(**arguments, **{name: signature_parameters[name].annotation(**part) for name, part in parts.items()})

    return call_function


def run_command(name: str, root: Group, command_line: Sequence[str], version: str, of_context: object = None) -> int:
    """Run the command of a command line and return its exit code. Raise ``CliError`` for an invalid command line.

    ``of_context``: an object stored in the click context for the command.
    """
    commands = root_of(name, root, version)
    if instruction := os.environ.get(COMPLETION_VARIABLE):
        from koalapy.cli.terminal import completion

        completion.install_shells()
        return completion.shell_complete(commands, {"obj": of_context}, name, COMPLETION_VARIABLE, instruction)
    try:
        with commands.make_context(name, list(command_line), obj=of_context) as context:
            code = commands.invoke(context)
    except click.exceptions.Exit as exit_request:
        return exit_request.exit_code
    except click.UsageError as error:
        message, path = error.format_message(), error.ctx.command_path if error.ctx else name
        message = (
            message.removesuffix(".") if len(message) <= MAX_REFUSAL_LENGTH else f"{message[:MAX_REFUSAL_LENGTH]}…"
        )
        if message.endswith("?"):
            raise CliError(f"{message} See {path} --help", Exit.USAGE) from error
        raise CliError(message, Exit.USAGE, f"see {path} --help") from error
    return code if isinstance(code, int) else 0


def root_of(name: str, root: Group, version: str) -> Commands:
    """Create the top-level command with all commands and its own options."""
    commands = Commands(name, root)
    properties: dict[str, Any] = {"is_eager": True, "expose_value": False}
    version_text = _make_printing_callback(lambda _: f"{name} {version}\n")
    script = _make_printing_callback(lambda shell: _completion_script(commands, name, shell))

    def show_manual_page(context: click.Context, _: click.Parameter, value: Any) -> None:
        if value and not context.resilient_parsing:
            from koalapy.cli.terminal.manual import show_manual

            show_manual(name, commands, version)
            context.exit()

    manual = "show the manual page; print its source if the output is no terminal"
    shells, description = click.Choice(["bash", "zsh", "fish"]), "print the script for shell completion"
    commands.params += [
        click.Option(["--version"], is_flag=True, help="print the version", callback=version_text, **properties),
        click.Option(["--man"], is_flag=True, help=manual, callback=show_manual_page, **properties),
        click.Option(["--show-completion"], type=shells, help=description, callback=script, **properties),
    ]
    return commands


def _make_printing_callback(text: Callable[[Any], str]) -> Callable[[click.Context, click.Parameter, Any], None]:
    """Create the callback of an option that prints a text and ends the command."""

    def print_text(context: click.Context, _: click.Parameter, value: Any) -> None:
        if value and not context.resilient_parsing:
            click.echo(text(value), nl=False)
            context.exit()

    return print_text


def _completion_script(commands: Commands, name: str, shell: str) -> str:
    """Return the script that enables completion of the command in a shell."""
    from koalapy.cli.terminal import completion

    completion.install_shells()
    completion_class = completion.get_completion_class(shell)
    assert completion_class is not None
    return completion_class(commands, {}, name, COMPLETION_VARIABLE).source()
