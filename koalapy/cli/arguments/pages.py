"""Help pages: plain text, as wide as the terminal, at most 100 columns."""

import shutil
from collections.abc import Iterable, Sequence
from textwrap import fill, wrap

from koalapy.cli.arguments.declare import FEW, Argument, Command, Group, Option, Parameter

WIDEST = 100
"""Columns."""
LONGEST_NAME = 30
"""Columns of a name that has its explanation beside it."""
HELP = ("-h, --help", "show this page")


def of_command(command: Command) -> str:
    """What a command does and takes."""
    parameters = command.parameters()
    arguments = [p for p in parameters if isinstance(p.spec, Argument)]
    usage = " ".join(["Usage:", command.path, "[OPTIONS]", *map(_place, arguments)])
    return _page(usage, command.help, [("Arguments", map(_line, arguments)), ("Options", _options(parameters))])


def of_group(path: str, group: Group, extra: Sequence[tuple[str, str]] = ()) -> str:
    """The commands below a word, with its own options, and ``extra`` ones."""
    own = Command(path, group.default).parameters() if group.default else []
    found = ((name, group.find(path, name)) for name in group.commands)
    usage = f"Usage: {path} [OPTIONS] {'[COMMAND]' if group.default else 'COMMAND'} …"
    commands = [(name, one.help.split("\n")[0]) for name, one in found]
    return _page(usage, group.help, [("Options", [*extra, *_options(own)]), ("Commands", commands)], group.epilog)


def _page(
    usage: str, about: str, sections: Iterable[tuple[str, Iterable[tuple[str, str]]]], epilog: str = ""
) -> str:  # fmt: skip
    columns = min(WIDEST, max(40, shutil.get_terminal_size().columns))
    parts = [usage, *(fill(part, columns) for part in about.split("\n\n"))]
    for title, lines in sections:
        shown = list(lines)
        width = max((len(name) for name, _ in shown if len(name) <= LONGEST_NAME), default=0)
        if shown:
            parts.append("\n".join([f"{title}:", *(_beside(name, text, width, columns) for name, text in shown)]))
    parts += [fill(epilog, columns)] if epilog else []
    return "\n\n".join(parts)


def _beside(name: str, text: str, width: int, columns: int) -> str:
    """A name and, beside it or below, what it means."""
    lines = wrap(text, columns - width - 4) or [""]
    if len(name) > width:
        lines = ["", *lines]
    indented = "\n".join(f"{'':{width + 4}}{line}" for line in lines[1:])
    return f"  {name:{width}}  {lines[0]}".rstrip() + (f"\n{indented}" if indented else "")


def _place(parameter: Parameter) -> str:
    shown = parameter.label + ("…" if parameter.is_list else "")
    return shown if parameter.is_required else f"[{shown}]"


def _line(parameter: Parameter) -> tuple[str, str]:
    return parameter.label, parameter.spec.help


def _options(parameters: Iterable[Parameter]) -> list[tuple[str, str]]:
    shown = [p for p in parameters if isinstance(p.spec, Option) and not p.spec.hidden]
    return [*map(_option, shown), HELP]


def _option(parameter: Parameter) -> tuple[str, str]:
    names = ", ".join(sorted((*parameter.names, *parameter.opposites), key=lambda name: name.startswith("--")))
    assert isinstance(parameter.spec, Option)
    told = [parameter.spec.help]
    if len(parameter.choices) > FEW:
        told.append(f"one of {', '.join(parameter.choices)}")
    default = parameter.default
    if default not in (None, "", False, True) and "default:" not in parameter.spec.help:
        told.append(f"default: {getattr(default, 'value', default)}")
    if parameter.is_list:
        told.append("may be repeated")
    if parameter.spec.envvar:
        told.append(f"or {parameter.spec.envvar}")
    return (names if parameter.is_flag else f"{names} {parameter.metavar}"), "; ".join(filter(None, told))
