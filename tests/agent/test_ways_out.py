"""What a daemon that was taken over, or a local user, says leads an agent nowhere but into its own folders."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from koalapy.agent.lrm.port import LrmSubmission
from tests.agent.conftest import FakeDaemon
from tests.agent.memory_agent import serving as serving_agent
from tests.agent.memory_lrm import MemoryLrm

T = "7.1.0.aa"


@asynccontextmanager
async def serving(lrm: MemoryLrm, daemon: FakeDaemon, directory: Path) -> AsyncIterator[None]:
    """Run an agent that the daemon knows."""
    async with serving_agent(lrm, daemon, directory):
        await daemon.wait_until(lambda: daemon.inventories != [])
        yield


def everything_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.evidence("D1")
@pytest.mark.parametrize("token", ["../../home", "{home}", "..", "daemon", "a/b", "7.1.0/../../../home", "7.1.0.A", ""])
async def test_invalid_token_creates_no_folder(daemon: FakeDaemon, tmp_path: Path, token: str) -> None:
    """Else the folder that it names would be written to, and removed as soon as it is to be forgotten."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis").write_text("years of work")
    token = token.format(home=home)
    async with serving(lrm := MemoryLrm(), daemon, tmp_path / "agent"):
        for order in ({"type": "submit", "size": 1, "name": "x"}, {"type": "stop", "reason": "x"}, {"type": "forget"}):
            ident = await daemon.command(token=token, **order)
            assert await daemon.acknowledged(ident) == f"{token[:60]!r} is not a valid token"
        assert not lrm.jobs
    assert os.listdir(home) == ["thesis"]
    assert sorted(os.listdir(tmp_path)) == ["agent", "home"]


@pytest.mark.evidence("D1")
async def test_invalid_stage_is_rejected(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(lrm := MemoryLrm(), daemon, tmp_path / "agent"):
        ident = await daemon.submit(T, stage="x/../../../home", collect=["**"])
        assert await daemon.acknowledged(ident) == "'x/../../../home' is not a valid token"
        assert not lrm.jobs


@pytest.mark.evidence("D1")
@pytest.mark.parametrize("instance", ["../home", "..", "", "a/b", ".hidden", "x" * 101, "a\nb"])
async def test_daemon_with_path_as_name_is_refused(daemon: FakeDaemon, tmp_path: Path, instance: str) -> None:
    async with serving(MemoryLrm(), daemon, tmp_path / "agent"):
        daemon.instance, greeted = instance, len(daemon.received("hello"))
        before = everything_in(tmp_path)
        await daemon.leave()
        await daemon.listen()
        await daemon.wait_until(lambda: len(daemon.received("hello")) > greeted + 1)
        assert len(daemon.inventories) == 1
        assert everything_in(tmp_path) == before


@pytest.mark.evidence("D2")
async def test_daemon_without_welcome_is_rejected(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(lrm := MemoryLrm(), daemon, tmp_path / "agent"):
        await daemon.leave()
        greeted = len(daemon.received("hello"))
        daemon.greeting = {"type": "submit", "id": 1, "epoch": 9, "token": T, "size": 1, "name": "x"}
        await daemon.listen()
        await daemon.wait_until(lambda: len(daemon.received("hello")) > greeted + 1)
        assert not lrm.jobs


async def test_foreign_job_with_similar_name_is_not_reported(daemon: FakeDaemon, tmp_path: Path) -> None:
    """Who asks the resource manager sees our jobs' names, and gives others what names they like."""
    lrm = MemoryLrm()
    for name in ("koala-test-../../home", "koala-test-", "koala-test-7.1.0.aa"):
        lrm.take(LrmSubmission(name, 0, (), {}, tmp_path, tmp_path / "output"))
    async with serving(lrm, daemon, tmp_path / "agent"):
        assert [each["token"] for each in daemon.inventories[0]] == ["7.1.0.aa"]
