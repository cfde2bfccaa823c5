"""Nodes for which jobs wait, and that others have: nobody tells the agent when those give them back."""

import asyncio
from pathlib import Path

import pytest

from koalapy.agent.core import lrm_polling
from tests.agent.conftest import FakeDaemon
from tests.agent.memory_agent import counts, serving
from tests.agent.memory_lrm import MemoryLrm
from tests.signals import pass_time

A_LOOK = 2.0
"""Seconds."""


@pytest.fixture
def lrm() -> MemoryLrm:
    return MemoryLrm()


async def probe(daemon: FakeDaemon, sequence: int, *, look: bool = False, awaited: bool = False) -> None:
    await daemon.say("north", {"type": "probe", "sequence": sequence, "look": look, "awaited": awaited})
    await daemon.until(lambda: any(m["sequence"] == sequence for m in daemon.said("confirmed")))


async def count_looks(lrm: MemoryLrm) -> int:
    """Return how often the agent polls by itself in a while shorter than its regular interval."""
    before = lrm.looks
    await pass_time(100.0)
    return lrm.looks - before


async def test_nodes_given_back_are_seen_while_jobs_wait(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    """The resource manager says nothing of it, and the next regular look would be in half an hour."""
    lrm.background = 2
    async with serving(lrm, daemon, tmp_path):
        await daemon.until(lambda: counts(daemon) == (2, 0, ""))
        lrm.background = 1
        await probe(daemon, 1, awaited=True)
        await daemon.until(lambda: counts(daemon) == (2, 1, ""))  # at once
        lrm.background = 0
        await daemon.until(lambda: counts(daemon) == (2, 2, ""))  # within a second


async def test_lrm_without_foreign_jobs_is_not_polled_more(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(lrm, daemon, tmp_path):
        await daemon.until(lambda: counts(daemon) == (2, 2, ""))
        await probe(daemon, 1, look=True, awaited=True)
        assert await count_looks(lrm) == 0
        lrm.down = 1
        await probe(daemon, 2, look=True, awaited=True)
        assert await count_looks(lrm) > 5


@pytest.mark.parametrize("end", ["nobody waits", "no daemon"])
async def test_lrm_without_waiting_jobs_is_idle(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path, end: str) -> None:
    lrm.background = 1
    async with serving(lrm, daemon, tmp_path):
        await daemon.until(lambda: counts(daemon) == (2, 1, ""))
        await probe(daemon, 1, awaited=True)
        assert await count_looks(lrm) > 5
        if end == "no daemon":
            await daemon.leave()
            await daemon.listen()
            await daemon.until(lambda: len(daemon.inventories) > 1)
        await probe(daemon, 2, look=True)
        assert await count_looks(lrm) == 0


async def test_looking_takes_a_bounded_share_of_the_time(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    """However often it is told that jobs wait."""
    lrm.background, lrm.takes = 1, A_LOOK
    async with serving(lrm, daemon, tmp_path):
        await daemon.until(lambda: counts(daemon) == (2, 1, ""))
        loop = asyncio.get_running_loop()
        looks, began = lrm.looks, loop.time()
        for sequence in range(1, 10_000):
            await probe(daemon, sequence, awaited=True)
            await pass_time(0.5)
            if lrm.looks >= looks + 4:
                break
        assert loop.time() - began >= 3 * lrm_polling.MIN_PAUSE_RATIO * A_LOOK
