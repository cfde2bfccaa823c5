"""Opening the barrier of a large gang."""

import asyncio
import json
from pathlib import Path
from typing import Any, cast

from koalapy.agent.components.barrier import OPEN_BATCH_SIZE, Barrier, RejectedRunners
from koalapy.agent.components.component import Component
from koalapy.agent.components.relays import RelayedLinks
from koalapy.agent.components.streams import Streams
from koalapy.agent.core.leases import Leases
from koalapy.agent.core.lrm_jobs import LrmJobs
from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.core.spool import DiskSync, Spool
from koalapy.agent.runners.runners import RunnerConnection, RunnerConnections, RunnerSecrets
from koalapy.agent.runners.uplink import Uplink
from koalapy.protocol.messages import Hello
from tests.agent.memory_agent import make_reporter
from tests.agent.memory_lrm import MemoryLrm
from tests.signals import until

NODES = 3 * OPEN_BATCH_SIZE


class Wire:
    """A transport that records written data."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def add_waiting_runners(component: Component, barrier: Barrier) -> list[Wire]:
    wires = []
    for node in component.nodes:
        wires.append(wire := Wire())
        node.runner = RunnerConnection(barrier, RunnerConnections())
        node.runner._transport = cast(asyncio.Transport, wire)
        node.phase = "waiting"
    return wires


def make_barrier(directory: Path) -> Barrier:
    uplink = Uplink("ws://127.0.0.1:1", "", lambda: cast(Hello, None))
    reporter, monitor = make_reporter(uplink)
    secrets = RunnerSecrets(MemoryLrm(), "north", "")
    settings = AgentSettings(cluster="north", url="http://127.0.0.1:1", token="", directory=directory)
    return Barrier(
        reporter,
        cast(LrmJobs, None),
        monitor,
        secrets,
        RejectedRunners(reporter),
        cast(Leases, None),
        Streams(reporter, "north", "owner"),
        RelayedLinks(settings, reporter, secrets),
    )


async def test_plan_is_encoded_once_for_all_runners(tmp_path: Path) -> None:
    """A thousand runners of a job of a thousand nodes receive 82 MB."""
    barrier = make_barrier(tmp_path)
    component = Component("i", "7.1.0", Spool(tmp_path).make_folder("i", "7.1.0"), NODES)
    wires = add_waiting_runners(component, barrier)
    plan: dict[str, Any] = {"launcher": "processes", "head": "7.1.0", "nodes": [{"host": "n"}] * NODES, "contexts": []}
    barrier.open_component(component, plan)
    await until(lambda: wires[0].written)
    assert not wires[-1].written, "the loop runs between batches"
    await until(lambda: wires[-1].written)
    assert all(len(wire.written) == 1 for wire in wires)
    assert len({id(wire.written[0]) for wire in wires}) == 1
    assert json.loads(wires[0].written[0]) == {"t": "open", **plan}


class HeldSync(DiskSync):
    """A disk that stores nothing until the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()

    async def wait_synced(self) -> None:
        await self.released.wait()


async def test_no_program_starts_before_its_plan_is_on_the_disk(tmp_path: Path) -> None:
    barrier, disk = make_barrier(tmp_path), HeldSync()
    component = Component("i", "7.1.0", Spool(tmp_path).make_folder("i", "7.1.0"), 2)
    component.folder.disk_sync = disk
    wires = add_waiting_runners(component, barrier)
    barrier.open_component(component, {"launcher": "processes", "head": "7.1.0", "nodes": [], "contexts": []})
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(wire.written for wire in wires)
    disk.released.set()
    await until(lambda: all(wire.written for wire in wires))
