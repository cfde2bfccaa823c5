"""Every command and option is documented, and the command starts without what only the daemon needs."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from koalapy.cli.arguments import Command, Group, Option
from koalapy.cli.main import KOALA
from tests.cli.conftest import TOKEN, Server

DOCS = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def commands_of(path: str, group: Group) -> Iterator[Command]:
    """All below a group, with what the group does by itself."""
    if group.default:
        yield Command(path, group.default)
    for name in group.commands:
        found = group.find(path, name)
        yield from commands_of(f"{path} {name}", found) if isinstance(found, Group) else [found]


COMMANDS = {command.path: command for command in commands_of("koala", KOALA)}


@pytest.mark.parametrize("path", sorted(COMMANDS))
def test_every_command_and_option_is_documented(path: str) -> None:
    assert path in DOCS
    options = [p for p in COMMANDS[path].parameters() if isinstance(p.spec, Option) and not p.spec.hidden]
    names = {name for option in options for name in (*option.names, *option.opposites)}
    assert {name for name in names if not re.search(rf"`[^`]*{re.escape(name)}\b", DOCS)} == set()


HEAVY = (
    "sqlalchemy", "fastapi", "drmaa", "httpx2", "pydantic", "typer", "click", "rich", "numpy", "matplotlib", "yaml",
    "structlog", "asyncio", "urllib.request",
)  # fmt: skip


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
