"""Running a resource manager's commands."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from koalapy.agents.lrm.commands import run
from koalapy.model.errors import SiteUnavailable


@pytest.mark.parametrize(("size", "code"), [(0, 0), (100_000, 3)])
async def test_a_short_answer_is_whole(size: int, code: int) -> None:
    script = f"head -c {size} /dev/zero; echo oh >&2; exit {code}"
    answer = await run("sh", "-c", script)
    assert (answer.code, len(answer.output), answer.errors) == (code, size, "oh\n")


async def test_a_child_that_holds_the_pipes_keeps_nobody_waiting(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"setsid sh -c 'echo $$ > {child}; exec sleep 60' & head -c 1000000 /dev/zero; sleep 60"
    async with asyncio.timeout(30):
        with pytest.raises(SiteUnavailable, match="did not answer within 1 s"):
            await run("sh", "-c", script, timeout=1.0)
    if child.exists() and (pid := child.read_text().strip()):
        os.kill(int(pid), signal.SIGKILL)
