"""The manual page of a command and all its subcommands, from the same help texts as ``--help``."""

import subprocess
import sys
from collections.abc import Iterator

import click


def list_commands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and all commands below it, by their words, such as ``koala clusters drain``."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            yield from list_commands(f"{path} {name}", subcommand)


def show_manual(name: str, root: click.Command, version: str) -> None:
    """Show the manual page on a terminal by ``man``; elsewhere print its source for ``man -l -``."""
    page = format_manual(name, root, version)
    if sys.stdout.isatty():
        try:
            subprocess.run(["man", "-l", "-"], input=page.encode(), check=True)
        except (OSError, subprocess.CalledProcessError):
            print(page, end="")
        return
    print(page, end="")


def format_manual(name: str, root: click.Command, version: str) -> str:
    """Return the manual page as source for ``man``."""
    parts = [
        f'.TH {name.upper()} 1 "" "{name} {version}" "User Commands"',
        ".SH NAME",
        f"{name} \\- {_escape(root.short_help or root.help or '')}",
        ".SH SYNOPSIS",
        f".B {name}\n[OPTIONS] COMMAND [ARGS]...",
        ".SH OPTIONS",
        *_format_parameters(root, click.Context(root, info_name=name)),
        ".SH COMMANDS",
    ]
    for path, command in list_commands(name, root):
        if command is not root:
            parts += _format_command(path, command)
    if isinstance(root, click.Group) and root.epilog:
        parts += [".SH EXIT STATUS", _escape(root.epilog)]
    return "\n".join(parts) + "\n"


def format_pages(name: str, root: click.Command, version: str) -> dict[str, str]:
    """Return the manual pages by the names of their files: the whole one, and one for each command."""
    pages = {f"{name}.1": format_manual(name, root, version)}
    if isinstance(root, click.Group):
        context = click.Context(root, info_name=name)
        for subcommand in root.list_commands(context):
            command = root.get_command(context, subcommand)
            assert command is not None
            pages[f"{name}-{subcommand}.1"] = _format_command_page(f"{name} {subcommand}", command, version)
    return pages


def _format_command_page(path: str, command: click.Command, version: str) -> str:
    """Return the page of one command with its subcommands, as source for ``man``."""
    title, name = path.replace(" ", "-"), path.partition(" ")[0]
    summary = command.get_short_help_str(limit=200).rstrip(".")
    parts = [
        f'.TH {title.upper()} 1 "" "{name} {version}" "User Commands"',
        ".SH NAME",
        f"{_escape(title)} \\- {_escape(summary)}",
        ".SH DESCRIPTION",
    ]
    for command_path, subcommand in list_commands(path, command):
        parts += _format_command(command_path, subcommand)
    return "\n".join([*parts, ".SH SEE ALSO", f".BR {name} (1)"]) + "\n"


def _format_command(path: str, command: click.Command) -> Iterator[str]:
    """Yield the section of a command: usage, help text, arguments and options."""
    context = click.Context(command, info_name=path)
    yield f".SS {_escape(path)}"
    yield f".B {_escape(path)}\n{_escape(' '.join(command.collect_usage_pieces(context)))}"
    for paragraph in (command.help or "").split("\n\n"):
        yield f".PP\n{_escape(' '.join(paragraph.split()))}"
    yield from _format_parameters(command, context)


def _format_parameters(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield an entry for each argument and option with its help text."""
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:
            names, text = (" ".join(cell.split()) for cell in record)
            yield f".TP\n.B {_escape(names)}\n{_escape(text)}"


def _escape(text: str) -> str:
    """Return a text that ``man`` shows unchanged, with its hyphens, backslashes, line starts and other characters."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    escaped = "".join(char if char.isascii() else f"\\[u{ord(char):04X}]" for char in escaped)
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
