"""Names sent by a compromised daemon or a local user: the agent uses its own folders only."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from koalapy.agent.lrm.port import LrmSubmission
from tests.agent.conftest import FakeDaemon
from tests.agent.memory_agent import running_agent
from tests.agent.memory_lrm import MemoryLrm

T = "7.1.0.aa"


@asynccontextmanager
async def greeted_agent(lrm: MemoryLrm, daemon: FakeDaemon, directory: Path) -> AsyncIterator[None]:
    """Run an agent that is connected to the daemon."""
    async with running_agent(lrm, daemon, directory):
        await daemon.wait_until(lambda: daemon.inventories != [])
        yield


def list_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.evidence("D1")
@pytest.mark.parametrize("token", ["../../home", "{home}", "..", "daemon", "a/b", "7.1.0/../../../home", "7.1.0.A", ""])
async def test_invalid_token_creates_no_folder(daemon: FakeDaemon, tmp_path: Path, token: str) -> None:
    """The agent would write to the folder that the token names, and remove it on forget."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis").write_text("years of work")
    token = token.format(home=home)
    async with greeted_agent(lrm := MemoryLrm(), daemon, tmp_path / "agent"):
        for order in ({"type": "submit", "size": 1, "name": "x"}, {"type": "stop", "reason": "x"}, {"type": "forget"}):
            ident = await daemon.send_command(token=token, **order)
            assert await daemon.wait_for_ack(ident) == f"{token[:60]!r} is not a valid token"
        assert not lrm.jobs
    assert os.listdir(home) == ["thesis"]
    assert sorted(os.listdir(tmp_path)) == ["agent", "home"]


@pytest.mark.evidence("D1")
async def test_invalid_stage_is_rejected(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with greeted_agent(lrm := MemoryLrm(), daemon, tmp_path / "agent"):
        ident = await daemon.submit_component(T, stage="x/../../../home", collect=["**"])
        assert await daemon.wait_for_ack(ident) == "'x/../../../home' is not a valid token"
        assert not lrm.jobs


@pytest.mark.evidence("D1")
@pytest.mark.parametrize("instance", ["../home", "..", "", "a/b", ".hidden", "x" * 101, "a\nb"])
async def test_daemon_with_path_as_instance_is_rejected(daemon: FakeDaemon, tmp_path: Path, instance: str) -> None:
    async with greeted_agent(MemoryLrm(), daemon, tmp_path / "agent"):
        daemon.instance, hello_count = instance, len(daemon.received("hello"))
        files = list_files(tmp_path)
        await daemon.stop_listening()
        await daemon.listen()
        await daemon.wait_until(lambda: len(daemon.received("hello")) > hello_count + 1)
        assert len(daemon.inventories) == 1
        assert list_files(tmp_path) == files


@pytest.mark.evidence("D2")
async def test_daemon_without_welcome_is_rejected(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with greeted_agent(lrm := MemoryLrm(), daemon, tmp_path / "agent"):
        await daemon.stop_listening()
        hello_count = len(daemon.received("hello"))
        daemon.greeting = {"type": "submit", "id": 1, "epoch": 9, "token": T, "size": 1, "name": "x"}
        await daemon.listen()
        await daemon.wait_until(lambda: len(daemon.received("hello")) > hello_count + 1)
        assert not lrm.jobs


async def test_foreign_job_with_similar_name_is_not_reported(daemon: FakeDaemon, tmp_path: Path) -> None:
    """Local users see the names of our jobs and may choose similar ones."""
    lrm = MemoryLrm()
    for name in ("koala-test-../../home", "koala-test-", "koala-test-7.1.0.aa"):
        lrm.start_job(LrmSubmission(name, 0, (), {}, tmp_path, tmp_path / "output"))
    async with greeted_agent(lrm, daemon, tmp_path / "agent"):
        assert [component["token"] for component in daemon.inventories[0]] == ["7.1.0.aa"]
