"""An agent with a resource manager in memory, a fake daemon, and the folders of a head node."""

import asyncio
import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from koalapy.agent.core.agent import run_agent
from koalapy.agent.core.settings import RUNNER, AgentSettings
from koalapy.agent.lrm.port import LrmSubmission
from koalapy.agent.runners import uplink
from tests.agent.conftest import FakeDaemon
from tests.agent.memory_lrm import MemoryLrm
from tests.fuzz.daemon import MAX_WAIT_S


class RecordingLrm(MemoryLrm):
    """A resource manager that records submissions."""

    def __init__(self) -> None:
        super().__init__()
        self.submissions: list[LrmSubmission] = []

    async def submit_job(self, submission: LrmSubmission) -> str:
        self.submissions.append(submission)
        return await super().submit_job(submission)


class SingleClusterDaemon(FakeDaemon):
    """A fake daemon of one cluster, which forwards no message."""

    async def _take(self, cluster: str, message: dict[str, Any]) -> None:
        if message["type"] in ("relay", "ask", "answer"):
            self.messages.append(message)
        else:
            await super()._take(cluster, message)


class Site:
    """The folders of a head node: the agent's, its replicas, and a home folder that it must not touch."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.home, self.replicas, self.own = directory / "home", directory / "replicas", directory / "agent"
        for folder in (self.home, self.replicas / "folder"):
            folder.mkdir(parents=True)
        (self.home / "thesis").write_text("years of work")
        (self.replicas / "mesh").write_text("mesh")
        (self.replicas / "folder" / "part").write_text("part")
        (self.replicas / "out").symlink_to(self.home)
        self.lrm = RecordingLrm()

    def make_settings(self, url: str) -> AgentSettings:
        return AgentSettings(
            "north", url, "s3cret", self.own, replica_directories=[self.replicas], poll_interval=1000.0
        )

    @asynccontextmanager
    async def running_agent(self, daemon: FakeDaemon) -> AsyncIterator["asyncio.Task[None]"]:
        """Run the agent, and check that it has not ended at the end of the block."""
        settings = self.make_settings(f"http://127.0.0.1:{daemon.port}")
        with patch.multiple(uplink, MIN_RECONNECT_PAUSE=0.001, MAX_RECONNECT_PAUSE=0.01):
            agent = asyncio.create_task(run_agent(settings, self.lrm))
            try:
                yield agent
                if agent.done():
                    agent.result()
                assert not agent.done()
            finally:
                agent.cancel()
                await asyncio.gather(agent, return_exceptions=True)

    def read_outside_files(self) -> dict[str, tuple[int, int, bytes]]:
        """Return mode, time of change and content of all files outside the agent's folders, by path."""
        agent_folders = (self.own, self.own.with_name(f"{self.own.name}-stages"))
        contents = {}
        for folder, folders, files in os.walk(self.directory):
            folders[:] = [name for name in folders if Path(folder, name) not in agent_folders]
            for name in (*folders, *files):
                path = Path(folder, name)
                status = path.lstat()
                content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
                contents[str(path)] = status.st_mode, status.st_mtime_ns, content
        return contents

    def check_submissions(self) -> None:
        """Check that only the runner was submitted, with paths in the agent's folders."""
        for submission in self.lrm.submissions:
            background = submission.argv[0] == "/bin/sleep"
            assert background or submission.argv[-2:] == (str(RUNNER), "node"), submission.argv
            for path in (submission.workdir, submission.output):
                assert Path(os.path.realpath(path)).is_relative_to(self.own), path

    def remove(self) -> None:
        shutil.rmtree(self.directory)


async def wait_until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(MAX_WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
