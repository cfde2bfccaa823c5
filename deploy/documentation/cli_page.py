"""Build the reference of the `koala` command from its click commands."""

import click

from koalapy.cli.main import KOALA
from koalapy.cli.terminal.manual import list_commands

COMMON_OPTIONS = {"--url", "--token", "--ca-file", "--help"}
"""Options of most commands, which the page describes once."""


def commands() -> dict[str, click.Command]:
    """Return every command by its words, such as `koala clusters drain`."""
    return dict(list_commands("koala", KOALA))


def page() -> str:
    """Return a section for each command as Markdown: help, usage, arguments and options."""
    return "\n".join(_section(path, command) for path, command in commands().items() if path != "koala")


def _section(path: str, command: click.Command) -> str:
    context = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    parts = [f"\n### {path}\n", f"{command.help or ''}\n", f"```text\n{usage}\n```\n"]
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None or COMMON_OPTIONS.intersection(parameter.opts):
            continue
        names, text = (" ".join(cell.split()).replace("|", "\\|") for cell in record)
        rows.append(f"| `{names}` | {text} |")
    if rows:
        parts.append("\n".join(["| option | meaning |", "| --- | --- |", *rows, ""]))
    return "\n".join(parts)
