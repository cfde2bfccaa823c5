"""Every command and option is documented, and the command starts without what only the daemon needs."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from koalapy import __version__
from koalapy.cli.main import KOALA
from koalapy.cli.terminal.arguments import Commands, root_of
from tests.cli.conftest import TOKEN, Server

DOCS = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def commands_of(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """A command and all below it."""
    yield path, command
    if isinstance(command, Commands):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands_of(f"{path} {name}", below)


COMMANDS = dict(commands_of("koala", root_of("koala", KOALA, __version__)))


@pytest.mark.parametrize("path", sorted(COMMANDS))
def test_every_command_and_option_is_documented(path: str) -> None:
    assert path in DOCS
    options = [p for p in COMMANDS[path].params if isinstance(p, click.Option) and not p.hidden]
    names = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    assert {name for name in names if not re.search(rf"`[^`]*{re.escape(name)}\b", DOCS)} == set()


HEAVY = (
    "sqlalchemy",
    "fastapi",
    "drmaa",
    "httpx2",
    "pydantic",
    "typer",
    "rich.console",
    "numpy",
    "matplotlib",
    "yaml",
    "structlog",
    "asyncio",
    "urllib.request",
)


@pytest.mark.processes
@pytest.mark.parametrize(
    "words", [["queue"], ["submit", "--flexible", "2", "--", "x"], ["--version"], ["clusters"], ["cancel", "1"]]
)
def test_the_commands_of_every_day_load_no_large_library(server: Server, words: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['koala', *{words!r}]\n"
        "from koalapy.cli.main import main\n"
        "try: main()\n"
        f"except SystemExit: print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    environment = {**os.environ, "KOALA_URL": server.url, "KOALA_TOKEN": TOKEN}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert done.stdout.splitlines()[-1] == "[]"
