"""Commands of the daemon to an agent over a resource manager in memory."""

from pathlib import Path

from tests.agent.conftest import FakeDaemon
from tests.agent.fake_runner import claim_component
from tests.agent.memory_agent import running_agent
from tests.agent.memory_lrm import MemoryLrm

T = "7.1.0"


async def test_report_names_components_that_hold_nodes(daemon: FakeDaemon, agent: Path, lrm: MemoryLrm) -> None:
    runner = await claim_component(daemon, agent)
    await daemon.wait_until(lambda: daemon.report()["holding"] == [T])
    report = daemon.report()
    assert (report["total"], report["idle"], report["background"], report["down"]) == (2, 1, 0, 0)
    await daemon.send_command("stop", T, reason="test")
    await runner.receive("stop")
    runner.writer.close()
    lrm.end_job("1")
    lrm.changed.set()
    await daemon.wait_for_state(T, "ended")
    await daemon.wait_until(lambda: (daemon.report()["idle"], daemon.report()["holding"]) == (2, []))


async def test_repeated_submit_creates_one_job(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with running_agent(lrm := MemoryLrm(), daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        first, second = await daemon.submit_component(T), await daemon.submit_component(T)
        assert [await daemon.wait_for_ack(command) for command in (first, second)] == ["", ""]
        await daemon.wait_for_state(T, "waiting")
        await daemon.wait_until(lambda: daemon.report()["holding"] == [T])
    assert len(lrm.jobs) == 1


async def test_command_of_older_epoch_is_rejected(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with running_agent(lrm := MemoryLrm(), daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        daemon.epoch = 0
        assert await daemon.wait_for_ack(await daemon.submit_component(T)) == "epoch 0 is older than 1"
        assert daemon.status(T) == {}
    assert lrm.jobs == {}


async def test_stop_before_submit_prevents_job(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with running_agent(lrm := MemoryLrm(), daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await daemon.send_command("stop", T, reason="test")
        await daemon.wait_for_state(T, "ended")
        await daemon.wait_for_ack(await daemon.submit_component(T))
        assert daemon.status(T)["state"] == "ended"
    assert lrm.jobs == {}


async def test_daemon_older_than_known_one_is_rejected(daemon: FakeDaemon, tmp_path: Path) -> None:
    """A restarted agent rejects the older daemon, too, and reports the epoch that it knows."""
    token, lrm = "7.1.0.aa", MemoryLrm()
    daemon.epoch = 5
    async with running_agent(lrm, daemon, tmp_path):
        await claim_component(daemon, tmp_path, token)
    for epoch, recording in ((4, ""), (5, "another")):
        daemon.epoch, daemon.life = epoch, recording
        hello_count = len(daemon.received("hello"))
        async with running_agent(lrm, daemon, tmp_path):
            await daemon.wait_until(lambda hello_count=hello_count: len(daemon.received("hello")) > hello_count + 1)  # type: ignore[misc]
        assert daemon.received("hello")[-1]["known"] == [{"instance": "test", "epoch": 5, "life": "", "job": 7}]
        assert len(daemon.inventories) == 1
    daemon.epoch, daemon.life = 6, "another"
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: len(daemon.inventories) == 2)
        assert [component["token"] for component in daemon.inventories[-1]] == [token]
        await daemon.send_command("stop", token, reason="enough")
        lrm.end_job("1")
        lrm.changed.set()
        await daemon.wait_for_state(token, "ended")


async def test_open_of_several_components_starts_each_and_is_acknowledged_for_each(
    daemon: FakeDaemon, agent: Path
) -> None:
    other, node = "7.1.1", {"host": "a", "cluster": "north", "node": 0, "slots": 1}
    nodes = [{**node, "token": token} for token in (T, other)]
    plan = {"job": 7, "generation": 1, "launcher": "processes", "head": other, "nodes": nodes, "contexts": []}
    runners = [await claim_component(daemon, agent, token) for token in (T, other)]
    assert daemon.received("hello")[0]["joins_opens"] is True
    others = [{"id": 77, "token": other, "script": "#!/bin/sh"}, {"id": 78, "token": "8.1.0"}]
    first = await daemon.send_command("open", T, is_script=True, others=others, **plan)
    orders = [await runner.receive("open") for runner in runners]
    assert [(order["token"], order.get("script", "")) for order in orders] == [(T, ""), (other, "#!/bin/sh")]
    assert not any("others" in order for order in orders)
    assert [await daemon.wait_for_ack(ident) for ident in (first, 77, 78)] == [
        "",
        "",
        "this agent has no component 8.1.0",
    ]
