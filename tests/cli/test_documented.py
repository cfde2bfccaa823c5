"""Every command and option is documented, and the command starts without what only the daemon needs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from koalapy.cli.commands import app

DOCS = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
COMMANDS = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
for group in [name for name, command in COMMANDS.items() if hasattr(command, "commands")]:
    COMMANDS |= {f"{group} {name}": command for name, command in COMMANDS[group].commands.items()}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_option_is_documented(name: str) -> None:
    assert f"koala {name}" in DOCS
    options = {o for p in COMMANDS[name].params if not p.hidden for o in p.opts if o.startswith("-")} - {"--help", "-h"}  # type: ignore[union-attr]
    undocumented = {o for o in options if not re.search(rf"`[^`]*{re.escape(o)}\b", DOCS)}
    assert undocumented == set()


def test_the_command_starts_without_the_daemons_libraries() -> None:
    code = (
        "import sys; sys.argv = ['koala', 'queue', '--help']\n"
        "from koalapy.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('sqlalchemy', 'fastapi', 'drmaa', 'httpx2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
