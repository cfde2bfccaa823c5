"""The pages for newcomers, pasted as one block into a shell of a new account, act on the jobs that they mean."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import SHOWN
from tests.docs.session import find_missing_lines
from tests.grid.namespaces import LABORATORY
from tests.needs import MPI, RSYNC, needs

pytestmark = [needs(MPI), needs(RSYNC), needs(LABORATORY), pytest.mark.grid, pytest.mark.processes]

PASTE_TIMEOUT_S = 300
MAKE_NETWORK = """
ip link set lo up
ip link add site0 type veth peer name site1
ip address add 10.9.9.1/24 dev site0
ip link set site0 up
ip link set site1 up
exec bash --noprofile --norc -s 2>&1
"""
"""A separate network, in which the default port is free, with the interface that Open MPI needs."""
STABLE_LINE = re.compile(r"Submitted job \d+|job \d+ |check: |koala: --")
"""Lines of the pages that do not depend on the time between two commands."""


@pytest.mark.parametrize(
    ("page", "before"),
    [("README.md", ""), ("docs/tutorial.md", ""), ("docs/a-week.md", "koala serve &\n"), ("docs/own-grid.md", "")],
)
def test_page_pasted_as_one_block_succeeds(page: str, before: str, tmp_path: Path) -> None:
    commands = [command for block in SHOWN if block.page == page and not block.mark for command in block.commands()]
    text = before + "".join(f'{command.text}\necho "== $? {n}"\n' for n, command in enumerate(commands))
    result = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", MAKE_NETWORK],
        input=text,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PASTE_TIMEOUT_S,
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "USER": "root", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    codes = {int(number): int(code) for code, number in re.findall(r"^== (\d+) (\d+)$", result.stdout, re.MULTILINE)}
    for number, command in enumerate(commands):
        fails = any(line.startswith("koala: ") for line in command.output_lines)
        assert codes.get(number) == 0 or fails, f"{page}:{command.line}: {command.text!r}:\n{result.stdout}"
        stable_lines = [line for line in command.output_lines if STABLE_LINE.match(line)]
        # Numbers are compared: those of jobs are as on the page.
        assert find_missing_lines(stable_lines, result.stdout, re.compile("(?!)")) == [], result.stdout
    assert "no daemon answers" not in result.stdout
    assert "Traceback" not in result.stdout
