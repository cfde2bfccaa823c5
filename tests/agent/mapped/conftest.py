"""Two people with accounts that no name service knows, and a cluster on which jobs run as their owners."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from koalapy.agent.accounts import Account, Accounts, RunAs, SwitchMethod
from koalapy.agent.components.component import Component
from koalapy.agent.components.job_folders import PROGRAM, JobFolders
from koalapy.agent.core.agent import Agent
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, AgentSettings, AgentTimeouts
from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.agent.runners.runners import lrm_name
from koalapy.system.systemd import ServiceManager
from tests.agent.conftest import FakeDaemon, Site

ALICE = Account("alice", 64_101, 64_101, (64_101,), "/nonexistent/alice", "/bin/sh")
BOB = Account("bob", 64_102, 64_102, (64_102,), "/nonexistent/bob", "/bin/sh")


@cache
def python_for_all() -> str:
    """A Python that any account may run, with our code; empty when there is none, or nobody may be another here."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        command = [python, "-I", "-S", "-c", f"open({str(PROGRAM)!r})"]
        if os.geteuid() == 0 and shutil.which("setpriv"):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                subprocess.run(command, user=64_101, group=64_101, extra_groups=[], check=True)
                return python
    return ""


@pytest.fixture(autouse=True)
def _only_as_root() -> None:
    if not python_for_all():
        pytest.skip("only root can be others, with a Python and koalapy that all may read")


class People(dict[str, Account]):
    """The accounts of a host; tests may take some away."""

    def look_up(self, name: str) -> Account | None:
        return self.get(name)


@pytest.fixture
def people() -> People:
    return People(alice=ALICE, bob=BOB)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that all may pass through; pytest's own is root's alone."""
    path = Path(tempfile.mkdtemp(prefix="koala-mapped-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def settings_of(base: AgentSettings, folder: Path) -> AgentSettings:
    return replace(base, identity="mapped", stage_directory=folder / "jobs", python=python_for_all())


def folders_of(
    settings: AgentSettings,
    people: People,
    way: SwitchMethod = SwitchMethod.SETUID,
    timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
) -> JobFolders:
    accounts = Accounts(settings.cluster, settings, people.look_up)
    return JobFolders(RunAs(accounts, way), settings.accounts_directory, settings.python, timeouts)


class MappedSite(Site):
    """An embedded cluster that is root's."""

    def __init__(self, directory: Path, daemon: FakeDaemon, people: People, open_path: Path) -> None:
        super().__init__(directory, daemon)
        self.people = people
        environment = {**self.settings.environment, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        self.settings = replace(settings_of(self.settings, open_path), replica_directories=(), environment=environment)
        self.jobs = open_path / "jobs"

    async def run(self) -> None:
        self.folders = folders_of(self.settings, self.people, timeouts=self.timeouts)
        lrm = LocalLrm(self.cluster, "koala-", folders=self.folders)
        self.agent = Agent(self.settings, lrm, self.folders, self.timeouts)
        await self.agent.run(ServiceManager())

    def component(self, token: str) -> Component:
        return self.agent._reporter.components[lrm_name("test", token)]


@pytest.fixture
async def mapped(tmp_path: Path, daemon: FakeDaemon, people: People, open_path: Path) -> AsyncIterator[MappedSite]:
    site = MappedSite(tmp_path, daemon, people, open_path)
    await site.start()
    yield site
    await site.stop()
    await asyncio.to_thread(site.cluster.stop)
