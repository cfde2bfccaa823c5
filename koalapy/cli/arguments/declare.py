"""What a command takes: its function's signature says it, with ``Annotated[type, Option(…)]`` or ``Argument(…)``.

Types are ``str``, ``int``, ``float``, ``bool`` (a flag), ``Path``, enums of texts, and lists of these; ``| None`` where
the default is None. An annotation that is a dataclass stands for its fields: many options in one parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

FEW = 4
"""As many choices stand in place of a value in help pages."""
Function = Callable[..., int | None]
"""What runs; it gives the exit code, None for 0."""


class Option:
    """``--name VALUE``, or a flag; by default with the parameter's name. ``"--on/--off"`` has an opposite."""

    def __init__(
        self, *names: str, help: str = "", envvar: str = "", min: float | None = None, max: float | None = None,
        hidden: bool = False,
    ) -> None:  # fmt: skip
        self.names, self.help, self.envvar, self.hidden = names, help, envvar, hidden
        self.min, self.max = min, max


class Argument:
    """A word at its place. ``rest``: it takes all words from its first on, whatever they look like."""

    def __init__(
        self, *, help: str = "", metavar: str = "", min: float | None = None, max: float | None = None,
        rest: bool = False,
    ) -> None:  # fmt: skip
        self.help, self.metavar, self.rest = help, metavar, rest
        self.min, self.max = min, max


@dataclass(frozen=True, slots=True)
class Parameter:
    """One option or argument; ``part_of`` names the function's parameter that holds it, if it is no one itself."""

    name: str
    type: type
    is_list: bool
    default: Any
    is_required: bool
    spec: Option | Argument
    part_of: str = ""

    @property
    def is_flag(self) -> bool:
        return self.type is bool and isinstance(self.spec, Option)

    @property
    def names(self) -> tuple[str, ...]:
        """Of an option, those that set it."""
        assert isinstance(self.spec, Option)
        return tuple(name.partition("/")[0] for name in self.spec.names) or (f"--{_dashed(self.name)}",)

    @property
    def opposites(self) -> tuple[str, ...]:
        """Of a flag, those that unset it."""
        assert isinstance(self.spec, Option)
        return tuple(other for name in self.spec.names if (other := name.partition("/")[2]))

    @property
    def label(self) -> str:
        """As messages name it."""
        if isinstance(self.spec, Option):
            return next((name for name in self.names if name.startswith("--")), self.names[0])
        return self.spec.metavar or _dashed(self.name).upper().removesuffix("S" if self.is_list else "")

    @property
    def metavar(self) -> str:
        """What stands for its value in help pages."""
        if self.choices:
            return "|".join(self.choices) if len(self.choices) <= FEW else _dashed(self.name).upper()
        return {int: "NUMBER", float: "NUMBER"}.get(self.type, "PATH" if self.type.__name__ == "Path" else "TEXT")

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(str(one.value) for one in getattr(self.type, "__members__", {}).values())


def _dashed(name: str) -> str:
    return name.strip("_").replace("_", "-")


@dataclass(frozen=True, slots=True)
class Command:
    """A function as a command; its docstring is the help."""

    path: str
    """As it is called, with all words before it: ``koala clusters drain``."""
    run: Function

    @property
    def help(self) -> str:
        return inspect.getdoc(self.run) or ""

    def parameters(self) -> list[Parameter]:
        found: list[Parameter] = []
        for name, given in inspect.signature(self.run).parameters.items():
            if is_dataclass(given.annotation):
                # A field without a default of its own is one that is asked for.
                found += [
                    _parameter(field.name, field.type, inspect.Parameter.empty if field.default is MISSING
                               else field.default, part_of=name)
                    for field in fields(given.annotation)
                ]  # fmt: skip
            else:
                found.append(_parameter(name, given.annotation, given.default))
        return found

    def call(self, values: Mapping[str, Any]) -> int | None:
        """Run it with its parameters' values by name."""
        given: dict[str, Any] = {}
        for name, wanted in inspect.signature(self.run).parameters.items():
            own = wanted.annotation
            given[name] = own(**{f.name: values[f.name] for f in fields(own)}) if is_dataclass(own) else values[name]  # type: ignore[operator]
        return self.run(**given)


def _parameter(name: str, annotation: Any, default: Any, part_of: str = "") -> Parameter:
    if get_origin(annotation) is not Annotated:
        raise TypeError(f"parameter {name} is not Annotated with an Option or Argument")
    kind, spec = get_args(annotation)
    if get_origin(kind) in (UnionType, Union):
        kind = next(one for one in get_args(kind) if one is not NoneType)
    is_list = get_origin(kind) is list
    required = default is inspect.Parameter.empty
    return Parameter(
        name, get_args(kind)[0] if is_list else kind, is_list, None if required else default, required, spec, part_of
    )


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

    def find(self, path: str, name: str) -> Command | Group:
        """What one of its words stands for, in a group that is called ``path``."""
        found = self.commands[name]
        if isinstance(found, Lazy):
            found = found.load()
        return found if isinstance(found, Group) else Command(f"{path} {name}", found)
