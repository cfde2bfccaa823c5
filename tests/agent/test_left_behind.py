"""What is killed leaves nothing behind for good."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from koalapy.agent.core.timeouts import AgentTimeouts
from koalapy.runner.folders import MARK
from tests.agent.conftest import FakeDaemon, Site
from tests.agent.test_agent import AGENT, T

pytestmark = pytest.mark.processes

STUCK = """
import pathlib, shutil, time
def stuck(path, ignore_errors):
    for name in ("journal", "stream.0"):
        (pathlib.Path(path) / name).unlink()
    time.sleep(1000)
shutil.rmtree = stuck
"""


async def test_an_agent_that_was_killed_while_it_forgets_leaves_nothing(tmp_path: Path, daemon: FakeDaemon) -> None:
    site = Site(tmp_path, daemon)
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", STUCK + AGENT, str(tmp_path), str(daemon.port))
    await daemon.until(lambda: len(daemon.inventories) == 1)
    await site.finish(T, ["echo", "one"])
    folder = site.settings.directory / "test" / T
    forgotten = folder.with_name(f"{T}.forgotten")
    await daemon.command("forget", T)
    await daemon.until(lambda: forgotten.exists() and not (forgotten / "stream.0").exists())
    killed.kill()
    await killed.wait()
    assert list(forgotten.iterdir())
    halfway = folder.with_name("6.1.0")
    halfway.mkdir()
    (halfway / "runner.log").write_text("of an agent that did not rename what it removed")
    try:
        await site.start()
        assert daemon.inventories[-1] == []
        assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == []
    finally:
        await site.stop()
        site.cluster.stop()


async def test_the_folder_of_a_killed_runner_is_removed(tmp_path: Path, daemon: FakeDaemon) -> None:
    with TemporaryDirectory(prefix="t") as base:
        site = Site(tmp_path, daemon)
        site.timeouts = AgentTimeouts(sweep_interval_s=0.05)
        environment = {**site.settings.environment, "TMPDIR": base}
        site.settings = replace(site.settings, environment=environment)
        await site.start()
        try:
            await daemon.submit(T)
            await daemon.reaches(T, "claimed")
            await daemon.open(["sh", "-c", "echo up; exec sleep 1000"], T, launcher="openmpi")
            await daemon.until(lambda: daemon.output.get(T) == b"up\n")
            (folder,) = os.listdir(base)
            os.kill(holder_of(Path(base, folder, MARK)), signal.SIGKILL)
            assert (await daemon.reaches(T, "ended"))["infrastructure"]
            await daemon.until(lambda: not os.listdir(base))
        finally:
            await site.stop()
            await asyncio.to_thread(site.cluster.stop)


def holder_of(path: Path) -> int:
    """The process that has a file locked: what a runner has open is shown to nobody but root."""
    inode = path.stat().st_ino
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    (holder,) = {int(pid) for *_, pid, file, _, _ in locks if int(file.rpartition(":")[2]) == inode}
    return holder
