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
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.core.spool import Spool
from koalapy.agent.runners.runners import RunnerConnection, RunnerConnections, RunnerSecrets
from koalapy.agent.runners.uplink import Uplink
from koalapy.protocol.messages import Hello
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


async def test_plan_is_encoded_once_for_all_runners(tmp_path: Path) -> None:
    """A thousand runners of a job of a thousand nodes receive 82 MB."""
    uplink = Uplink("ws://127.0.0.1:1", "", lambda: cast(Hello, None))
    reporter = Reporter(uplink)
    secrets = RunnerSecrets(MemoryLrm(), "north", "")
    settings = AgentSettings(cluster="north", url="http://127.0.0.1:1", token="", directory=tmp_path)
    barrier = Barrier(
        reporter,
        cast(LrmJobs, None),
        secrets,
        RejectedRunners(reporter),
        cast(Leases, None),
        Streams(reporter, "north", "owner"),
        RelayedLinks(settings, reporter, secrets, lambda *_: None),
    )
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
