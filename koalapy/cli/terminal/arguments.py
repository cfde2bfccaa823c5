"""Commands made of functions: what a signature declares, click reads, refuses, explains and completes.

A parameter is ``Annotated[type, Option(…)]`` or ``Argument(…)``. Types are ``str``, ``int``, ``float``, ``bool`` (a
flag), ``Path``, enums of texts, and lists of these; ``| None`` where the default is None. A parameter that is a
dataclass stands for its fields, and ``Annotated[dict[str, Any], Options(…)]`` for what it names: many options in one.
"""

from __future__ import annotations

import inspect
import math
import os
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

from koalapy.client.errors import CliError, Exit
from koalapy.model.wording import known_names

Function = Callable[..., int | None]
"""What runs; it gives the exit code, None for 0."""
COMPLETION_VARIABLE = "_KOALA_COMPLETE"
"""The variable by which a shell's script asks for completion."""
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
MAX_SHOWN_CHOICES = 4
"""As many choices stand in place of a value in help pages."""
MAX_REFUSAL_LENGTH = 500
"""Characters of what click says of a word, which it repeats whole."""


class Option:
    """``--name VALUE``, or a flag; by default with the parameter's name. ``"--on/--off"`` has an opposite.

    ``completes``: what a shell offers for its value, of what ``koalapy.cli.terminal.completion`` knows.
    ``beside``: an option that every command with this one has, too; what is given there is the value of its variable
    from then on.
    ``may_be_empty``: the empty text is a value; else it is refused, so that a variable that is not set is not taken for
    an option that is not given.
    """

    def __init__(
        self,
        *names: str,
        help: str = "",
        envvar: str = "",
        min: float | None = None,
        max: float | None = None,
        hidden: bool = False,
        beside: Option | None = None,
        completes: str = "",
        may_be_empty: bool = False,
    ) -> None:
        self.beside, self.completes, self.may_be_empty = beside, completes, may_be_empty
        self.names, self.help, self.envvar, self.hidden = names, help, envvar, hidden
        self.min, self.max = min, max


class Argument:
    """A word at its place. ``rest``: no option is looked for after the first word that is none."""

    def __init__(
        self,
        *,
        help: str = "",
        metavar: str = "",
        min: float | None = None,
        max: float | None = None,
        rest: bool = False,
        completes: str = "",
    ) -> None:
        self.help, self.metavar, self.rest = help, metavar, rest
        self.completes = "files" if rest else completes
        self.min, self.max = min, max


@dataclass(frozen=True, slots=True)
class Options:
    """Options by name, each ``Annotated[type | None, Option(…)]``, that come as one mapping."""

    of: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Lazy:
    """A command or group in a module that is imported when it is asked for: ``module:attribute``."""

    where: str

    def load(self) -> Function | Group:
        module, _, attribute = self.where.partition(":")
        found: Function | Group = getattr(import_module(module), attribute)
        return found


@dataclass(frozen=True, slots=True)
class Group:
    """Commands below a word. Without one of them ``default`` runs; its options may also stand before theirs."""

    help: str
    commands: Mapping[str, Function | Lazy | Group]
    default: Function | None = None
    epilog: str = ""


class _Number(click.ParamType[Any]):
    """A number within bounds, never infinite."""

    name = "number"

    def __init__(self, kind: type, least: float | None, most: float | None) -> None:
        self._range: click.ParamType[Any] = (
            click.IntRange(_whole(least), _whole(most)) if kind is int else click.FloatRange(least, most)
        )
        self._range.name = "whole number" if kind is int else "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = self._range.convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class _Text(click.types.StringParamType):
    """A text that is not empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        _refuse_empty(value, param, ctx)
        return super().convert(value, param, ctx)


class _File(click.Path):
    """A path that is not empty, which would stand for the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        _refuse_empty(value, param, ctx)
        return super().convert(value, param, ctx)


def _refuse_empty(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> None:
    """``UsageError`` for an option that is given with nothing; what is so by default is not given."""
    if value != "" or not isinstance(param, click.Option) or ctx is None or param.name is None:
        return
    if ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
        raise click.BadParameter("it is empty: give a value, or leave the option out.", ctx, param)


class _Choice(click.Choice[str]):
    """One of an enum's texts, in any case."""

    def __init__(self, kind: type[Enum]) -> None:
        super().__init__([str(one.value) for one in kind], case_sensitive=False)
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._kind(super().convert(value, param, ctx))

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"{value!r}; {known_names(str(value), self.choices)}"


class _Refusing(click.Command):
    """A command whose refusals all say whose help to read."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise


class Commands(_Refusing, click.Group):
    """A ``Group`` as click has it: what is below is imported when it is asked for."""

    def __init__(self, name: str, group: Group) -> None:
        own = click_command(name, group.default) if group.default else None
        super().__init__(
            name,
            invoke_without_command=True,
            help=group.help,
            short_help=group.help.split("\n\n")[0],
            epilog=group.epilog,
            context_settings=CONTEXT,
            params=[*own.params] if own else [],
        )
        self._below, self._own = group.commands, own
        self.callback = self._alone

    def _alone(self, **values: Any) -> Any:
        context = click.get_current_context()
        if context.invoked_subcommand is not None:
            return None
        if self._own is None or self._own.callback is None:
            click.echo(context.get_help())
            return None
        return self._own.callback(**values)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._below)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        found = self._below.get(name)
        if isinstance(found, Lazy):
            found = found.load()
        if found is None:
            return None
        return Commands(name, found) if isinstance(found, Group) else click_command(name, found)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The subcommand; what was given before it holds for it, too."""
        name, command, rest = args[0], self.get_command(ctx, args[0]), args[1:]
        if command is None:
            raise click.exceptions.NoSuchCommand(name, possibilities=self._below, ctx=ctx)
        given = {
            option: value
            for option, value in ctx.params.items()
            if ctx.get_parameter_source(option) is ParameterSource.COMMANDLINE
        }
        for option in given.keys() - {one.name for one in command.params}:
            shown = next(one.opts[0] for one in self.params if one.name == option)
            ctx.fail(f"{ctx.command_path} {name} has no option {shown}, which stands before it.")
        ctx.default_map = {name: given}
        return name, command, rest


def click_command(name: str, run: Function) -> click.Command:
    """A function as a command; its docstring is the help."""
    found = list(_parameters(run))
    takes_rest = any(isinstance(one.spec, Argument) and one.spec.rest for one in found)
    about = inspect.getdoc(run) or ""
    return _Refusing(
        name,
        callback=_called(run, found),
        params=[*(one.made() for one in found), *_beside(found)],
        help=about,
        short_help=about.split("\n\n")[0],
        context_settings={**CONTEXT, "allow_interspersed_args": not takes_rest},
    )


def _beside(found: Sequence[_Parameter]) -> Iterator[click.Option]:
    """The options that come along with others."""
    for option in (one.spec.beside for one in found if isinstance(one.spec, Option)):
        if option is not None:
            yield click.Option(
                list(option.names),
                help=option.help,
                envvar=option.envvar,
                show_envvar=True,
                expose_value=False,
                type=_Text(),
                callback=_sets(option.envvar),
            )


def _sets(variable: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def put(context: click.Context, _: click.Parameter, value: Any) -> None:
        if value is not None and not context.resilient_parsing:
            os.environ[variable] = value

    return put


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One option or argument; ``part_of`` names the function's parameter that holds it, if it is no one itself."""

    name: str
    type: type
    is_list: bool
    default: Any
    is_required: bool
    spec: Option | Argument
    part_of: str

    def made(self) -> click.Parameter:
        common: dict[str, Any] = {"type": self._type(), "required": self.is_required, "help": self.spec.help or None}
        if self.default is not None and not self.is_required:
            common["default"] = self.default.value if isinstance(self.default, Enum) else self.default
        if self.spec.completes:
            common["shell_complete"] = partial(_complete, self.spec.completes)
        if isinstance(self.spec, Argument):
            label = self.spec.metavar or _dashed(self.name).upper().removesuffix("S" if self.is_list else "")
            if self.is_list:
                return click.Argument([self.name], nargs=-1, metavar=f"{label}...", **common)
            return click.Argument([self.name], metavar=label, **common)
        names = self.spec.names or (f"--{_dashed(self.name)}",)
        if self.type is bool:
            common |= {"is_flag": True, "type": bool}
        if issubclass(self.type, Enum) and len(self.type) > MAX_SHOWN_CHOICES:
            choices = ", ".join(str(one.value) for one in self.type)
            common |= {"metavar": self.name.upper(), "help": f"{self.spec.help}: {choices}"}
        tells = self.default not in (None, "", False, True) and "default:" not in self.spec.help
        return click.Option(
            [self.name, *names],
            multiple=self.is_list,
            hidden=self.spec.hidden,
            envvar=self.spec.envvar or None,
            show_envvar=True,
            show_default=tells,
            **common,
        )

    def _type(self) -> click.ParamType[Any]:
        if self.type in (int, float):
            return _Number(self.type, self.spec.min, self.spec.max)
        if issubclass(self.type, Enum):
            return _Choice(self.type)
        if self.type is Path:
            return _File(path_type=Path)
        return click.STRING if isinstance(self.spec, Option) and self.spec.may_be_empty else _Text()


def _parameters(run: Function) -> Iterator[_Parameter]:
    for name, given in inspect.signature(run).parameters.items():
        if is_dataclass(given.annotation):
            for field in fields(given.annotation):
                default = inspect.Parameter.empty if field.default is MISSING else field.default
                yield _parameter(field.name, field.type, default, part_of=name)
        elif get_origin(given.annotation) is Annotated and isinstance(many := get_args(given.annotation)[1], Options):
            for option, annotation in many.of.items():
                yield _parameter(option, annotation, None, part_of=name)
        else:
            yield _parameter(name, given.annotation, given.default)


def _parameter(name: str, annotation: Any, default: Any, part_of: str = "") -> _Parameter:
    if get_origin(annotation) is not Annotated:
        raise TypeError(f"parameter {name} is not Annotated with an Option or Argument")
    kind, spec = get_args(annotation)
    if get_origin(kind) in (UnionType, Union):
        kind = next(one for one in get_args(kind) if one is not NoneType)
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


def _complete(what: str, context: click.Context, given: click.Parameter, incomplete: str) -> Any:
    from koalapy.cli.terminal import completion

    return completion.complete(what, context, given, incomplete)


def _whole(bound: float | None) -> int | None:
    return None if bound is None else int(bound)


def _dashed(name: str) -> str:
    return name.strip("_").replace("_", "-")


def _called(run: Function, parameters: Sequence[_Parameter]) -> Callable[..., int | None]:
    """``run``, with values by name as click gives them."""

    def call(**values: Any) -> int | None:
        lists = {one.name for one in parameters if one.is_list}
        # What was not given at all is the default, not an empty list.
        given = {name: (list(value) or None) if name in lists else value for name, value in values.items()}
        wanted = inspect.signature(run).parameters
        parts: dict[str, dict[str, Any]] = {}
        for one in parameters:
            if one.part_of:
                parts.setdefault(one.part_of, {})[one.name] = given.pop(one.name)
        return run(**given, **{name: wanted[name].annotation(**part) for name, part in parts.items()})

    return call


def run(name: str, root: Group, words: Sequence[str], version: str, of_context: object = None) -> int:
    """Run the command that the words name and return its exit code. Raise ``CliError`` for a wrong command line.

    ``of_context``: an object that the command finds in its click context.
    """
    commands = root_of(name, root, version)
    if asked := os.environ.get(COMPLETION_VARIABLE):
        from click.shell_completion import shell_complete

        from koalapy.cli.terminal import completion

        completion.install()
        return shell_complete(commands, {"obj": of_context}, name, COMPLETION_VARIABLE, asked)
    try:
        with commands.make_context(name, list(words), obj=of_context) as context:
            code = commands.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.UsageError as error:
        said, path = error.format_message(), error.ctx.command_path if error.ctx else name
        said = said.removesuffix(".") if len(said) <= MAX_REFUSAL_LENGTH else f"{said[:MAX_REFUSAL_LENGTH]}…"
        if said.endswith("?"):
            raise CliError(f"{said} See {path} --help", Exit.USAGE) from error
        raise CliError(said, Exit.USAGE, f"see {path} --help") from error
    return code if isinstance(code, int) else 0


def root_of(name: str, root: Group, version: str) -> Commands:
    """All commands, with the options of the whole command."""
    commands = Commands(name, root)
    commands.params += [
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            help="print koala's version",
            callback=_prints(lambda _: f"{name} {version}\n"),
        ),
        click.Option(
            ["--show-completion"],
            type=click.Choice(["bash", "zsh", "fish"]),
            is_eager=True,
            expose_value=False,
            help="print the script that has a shell complete commands",
            callback=_prints(lambda shell: _completion(commands, name, shell)),
        ),
    ]
    return commands


def _prints(text: Callable[[Any], str]) -> Callable[[click.Context, click.Parameter, Any], None]:
    """What an option does that prints something, and nothing else."""

    def show(context: click.Context, _: click.Parameter, value: Any) -> None:
        if value and not context.resilient_parsing:
            click.echo(text(value), nl=False)
            context.exit()

    return show


def _completion(commands: Commands, name: str, shell: str) -> str:
    from click.shell_completion import get_completion_class

    from koalapy.cli.terminal import completion

    completion.install()
    found = get_completion_class(shell)
    assert found is not None
    return found(commands, {}, name, COMPLETION_VARIABLE).source()
