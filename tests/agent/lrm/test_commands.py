"""Execution of a resource manager's commands."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from koalapy.agent.lrm.commands import CommandResult, parse_job_number, run_command
from koalapy.model.errors import SiteUnavailable
from tests.signals import until

from .conftest import is_alive


@pytest.mark.processes
@pytest.mark.parametrize(("size", "code"), [(0, 0), (100_000, 3)])
async def test_run_command_returns_output_and_errors(size: int, code: int) -> None:
    script = f"head -c {size} /dev/zero; echo oh >&2; exit {code}"
    answer = await run_command("sh", "-c", script)
    assert (answer.code, len(answer.output), answer.errors) == (code, size, "oh\n")


@pytest.mark.processes
async def test_run_command_with_open_pipes_ends_with_its_process(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"setsid sh -c 'echo $$ > {child}; exec sleep 60' & head -c 1000000 /dev/zero; sleep 60"
    async with asyncio.timeout(30):
        with pytest.raises(SiteUnavailable, match="did not answer within 1 s"):
            await run_command("sh", "-c", script, timeout=1.0)
    if child.exists() and (pid := child.read_text().strip()):
        os.kill(int(pid), signal.SIGKILL)


@pytest.mark.processes
async def test_run_command_after_timeout_kills_the_group(tmp_path: Path) -> None:
    started = tmp_path / "started"
    script = f"sleep 1000 & echo $! $$ > {started}; wait"
    with pytest.raises(SiteUnavailable, match=r"sh did not answer within 2 s"):
        await run_command("sh", "-c", script, timeout=2.0)
    pids = [int(pid) for pid in started.read_text().split()]
    assert len(pids) == 2
    await until(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.parametrize(
    "output",
    [
        "171\n",
        "171;north\n",
        "171",
        "171\nWelcome!\n",
        "sbatch: INFO: 99 node hours left\n171\n",
        "Welcome, 3 users\n171;north\r\n-----\n",
        "171.1-3:1\n",
    ],
)
def test_parse_job_number_with_site_texts_returns_it(output: str) -> None:
    assert parse_job_number("sbatch", CommandResult(0, output.encode(), "")) == "171"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("", "sbatch printed no job number: nothing"),
        ("Welcome 171\n", "sbatch printed no job number: Welcome 171"),
        ("171\n172\n", "sbatch printed several job numbers: 171 172"),
    ],
)
def test_parse_job_number_that_is_ambiguous_is_unavailable(output: str, message: str) -> None:
    with pytest.raises(SiteUnavailable) as caught:
        parse_job_number("sbatch", CommandResult(0, output.encode(), ""))
    assert caught.value.message == message
