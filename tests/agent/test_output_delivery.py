"""Output on its way to the daemon, while one of the two has no room for it."""

import asyncio
from pathlib import Path

import pytest

from koalapy.agent.core import segments
from koalapy.agent.core.reporter import DELIVERY_TIMEOUT
from tests.agent.conftest import FakeDaemon
from tests.agent.memory_agent import serving
from tests.agent.memory_lrm import MemoryLrm
from tests.agent.played_runner import claim, run_program

T = "7.1.0"


async def test_agent_whose_output_is_not_acknowledged_sends_it_again(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.takes_output = False
    async with serving(lrm := MemoryLrm(), daemon, tmp_path):
        await run_program(daemon, lrm, await claim(daemon, tmp_path), b"one\n")
        await daemon.until(lambda: len(daemon.said("output", T)) > 2)
        assert daemon.status(T)["state"] == "delivering"
        daemon.takes_output = True
        await daemon.reaches(T, "ended")
    assert daemon.output[T] == b"one\n"


async def test_agent_whose_output_is_never_acknowledged_gives_it_up(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.takes_output = False
    async with serving(lrm := MemoryLrm(), daemon, tmp_path):
        await run_program(daemon, lrm, await claim(daemon, tmp_path), b"one\n")
        end = await daemon.reaches(T, "ended")
    lost = f"the last 4 bytes: the daemon took nothing for {DELIVERY_TIMEOUT:g} s"
    assert (end["program_exit"], end["missing"]) == (0, lost)


async def test_agent_without_room_for_output_acknowledges_it_when_there_is_room(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the runner keeps what it has sent, and its program waits."""
    tries = 0

    def refuse(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal tries
        tries += 1
        raise OSError(28, "No space left on device")

    async with serving(lrm := MemoryLrm(), daemon, tmp_path):
        runner = await claim(daemon, tmp_path)
        with monkeypatch.context() as disk:
            disk.setattr(segments.os, "pwrite", refuse)
            playing = asyncio.create_task(run_program(daemon, lrm, runner, b"one\n"))
            await daemon.until(lambda: tries > 1)
            assert not playing.done()
            assert daemon.status(T)["program_exit"] is None
        end = await daemon.reaches(T, "ended")
        await playing
    assert (end["program_exit"], end["error"], end["missing"]) == (0, "", "")
    assert daemon.output[T] == b"one\n"
