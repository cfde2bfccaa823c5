"""Two accounts that no name service knows, and a cluster on which jobs run as their owners."""

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
from koalapy.system.process import ServiceManager
from tests.agent.conftest import FakeDaemon, Site
from tests.agent.lrm.conftest import stop_locald

ALICE = Account("alice", 64_101, 64_101, (64_101,), "/nonexistent/alice", "/bin/sh")
BOB = Account("bob", 64_102, 64_102, (64_102,), "/nonexistent/bob", "/bin/sh")


@cache
def find_shared_python() -> str:
    """Return a Python that any account may run with koalapy, or "" without one or without root."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        command = [python, "-I", "-S", "-c", f"open({str(PROGRAM)!r})"]
        if os.geteuid() == 0 and shutil.which("setpriv"):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                subprocess.run(command, user=64_101, group=64_101, extra_groups=[], check=True)
                return python
    return ""


@pytest.fixture(autouse=True)
def skip_without_root() -> None:
    if not find_shared_python():
        pytest.skip("needs root, and a Python and koalapy that all accounts may read")


class HostAccounts(dict[str, Account]):
    """The accounts of a host; tests may remove some."""

    def look_up(self, name: str) -> Account | None:
        return self.get(name)


@pytest.fixture
def host_accounts() -> HostAccounts:
    return HostAccounts(alice=ALICE, bob=BOB)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """Yield a folder that all accounts may enter, unlike pytest's folders."""
    path = Path(tempfile.mkdtemp(prefix="koala-mapped-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def make_mapped_settings(base: AgentSettings, folder: Path) -> AgentSettings:
    return replace(base, identity="mapped", stage_directory=folder / "jobs", python=find_shared_python())


def make_folders(
    settings: AgentSettings,
    accounts_of_host: HostAccounts,
    method: SwitchMethod = SwitchMethod.SETUID,
    timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
) -> JobFolders:
    accounts = Accounts(settings.cluster, settings, accounts_of_host.look_up)
    return JobFolders(RunAs(accounts, method), settings.accounts_directory, settings.python, timeouts)


class MappedSite(Site):
    """An embedded cluster of root that runs jobs as their owners."""

    def __init__(self, directory: Path, daemon: FakeDaemon, people: HostAccounts, open_path: Path) -> None:
        super().__init__(directory, daemon)
        self.people = people
        environment = {**self.settings.environment, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        self.settings = replace(
            make_mapped_settings(self.settings, open_path), replica_directories=(), environment=environment
        )
        self.jobs = open_path / "jobs"

    async def run(self) -> None:
        self.folders = make_folders(self.settings, self.people, timeouts=self.timeouts)
        lrm = LocalLrm(self.cluster, "koala-", folders=self.folders)
        self.agent = Agent(self.settings, lrm, self.folders, self.timeouts)
        await self.agent.run(ServiceManager())

    def component(self, token: str) -> Component:
        return self.agent._reporter.components[lrm_name("test", token)]


@pytest.fixture
async def mapped(
    tmp_path: Path, daemon: FakeDaemon, host_accounts: HostAccounts, open_path: Path
) -> AsyncIterator[MappedSite]:
    site = MappedSite(tmp_path, daemon, host_accounts, open_path)
    await site.start()
    yield site
    await site.stop()
    await asyncio.to_thread(stop_locald, site.cluster)
