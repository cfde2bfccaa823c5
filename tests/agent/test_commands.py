"""What an agent makes of its daemon's commands, over a resource manager in memory."""

from pathlib import Path

from tests.agent.conftest import FakeDaemon
from tests.agent.memory_agent import serving
from tests.agent.memory_lrm import MemoryLrm
from tests.agent.played_runner import claim

T = "7.1.0"


async def test_report_of_cluster_names_the_components_that_hold_nodes(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(lrm := MemoryLrm(), daemon, tmp_path):
        runner = await claim(daemon, tmp_path)
        await daemon.wait_until(lambda: daemon.report()["holding"] == [T])
        held = daemon.report()
        assert (held["total"], held["idle"], held["background"], held["down"]) == (2, 1, 0, 0)
        await daemon.command("stop", T, reason="test")
        await runner.receive("stop")
        runner.writer.close()
        lrm.end("1")
        lrm.changed.set()
        await daemon.reaches(T, "ended")
        await daemon.wait_until(lambda: (daemon.report()["idle"], daemon.report()["holding"]) == (2, []))


async def test_submit_that_comes_twice_is_carried_out_once(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(lrm := MemoryLrm(), daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        first, second = await daemon.submit(T), await daemon.submit(T)
        assert [await daemon.acknowledged(command) for command in (first, second)] == ["", ""]
        await daemon.reaches(T, "waiting")
        await daemon.wait_until(lambda: daemon.report()["holding"] == [T])
    assert len(lrm.jobs) == 1


async def test_command_of_an_older_epoch_is_refused(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(lrm := MemoryLrm(), daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        daemon.epoch = 0
        assert await daemon.acknowledged(await daemon.submit(T)) == "epoch 0 is older than 1"
        assert daemon.status(T) == {}
    assert lrm.jobs == {}


async def test_stop_ahead_of_its_submit_prevents_it(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(lrm := MemoryLrm(), daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await daemon.command("stop", T, reason="test")
        await daemon.reaches(T, "ended")
        await daemon.acknowledged(await daemon.submit(T))
        assert daemon.status(T)["state"] == "ended"
    assert lrm.jobs == {}


async def test_daemon_older_than_one_that_was_served_is_not_obeyed(daemon: FakeDaemon, tmp_path: Path) -> None:
    """Also by an agent that was restarted; it says what it knows."""
    token, lrm = "7.1.0.aa", MemoryLrm()
    daemon.epoch = 5
    async with serving(lrm, daemon, tmp_path):
        await claim(daemon, tmp_path, token)
    for epoch, life in ((4, ""), (5, "another")):
        daemon.epoch, daemon.life = epoch, life
        before = len(daemon.received("hello"))
        async with serving(lrm, daemon, tmp_path):
            await daemon.wait_until(lambda before=before: len(daemon.received("hello")) > before + 1)  # type: ignore[misc]
        assert daemon.received("hello")[-1]["known"] == [{"instance": "test", "epoch": 5, "life": "", "job": 7}]
        assert len(daemon.inventories) == 1
    daemon.epoch, daemon.life = 6, "another"
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: len(daemon.inventories) == 2)
        assert [component["token"] for component in daemon.inventories[-1]] == [token]
        await daemon.command("stop", token, reason="enough")
        lrm.end("1")
        lrm.changed.set()
        await daemon.reaches(token, "ended")
