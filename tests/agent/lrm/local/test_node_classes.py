"""Node classes of an embedded cluster."""

from collections.abc import AsyncIterator

import pytest

from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.agent.lrm.node_classes import NodeClassSettings
from koalapy.agent.lrm.port import LrmSnapshot, LrmSubmission
from tests.agent.lrm.conftest import Site

pytestmark = pytest.mark.processes

CLASSES = {"slow": NodeClassSettings(nodes=1, power=0.5), "fast": NodeClassSettings(nodes=2, power=2.0, memory=1 << 30)}
"""Three of four nodes."""


@pytest.fixture
async def lrm(site: Site) -> AsyncIterator[LocalLrm]:
    lrm = LocalLrm(site.cluster, "koala-1-", node_classes=CLASSES)
    await lrm.open()
    yield lrm
    await lrm.close()


def sleep_submission(site: Site, name: str, nodes: int, node_class: str = "") -> LrmSubmission:
    folder = site.cluster.directory
    return LrmSubmission(name, nodes, ["/bin/sleep", "60"], {}, folder, folder / name, node_class=node_class)


def idle_nodes(snapshot: LrmSnapshot) -> dict[str, int]:
    assert sum(node_class.idle for node_class in snapshot.node_classes) == snapshot.idle
    return {node_class.name: node_class.idle for node_class in snapshot.node_classes}


async def test_job_of_a_class_gets_its_nodes_only(site: Site, lrm: LocalLrm) -> None:
    snapshot = await lrm.take_snapshot()
    assert [(c.name, c.total, c.idle, c.power, c.memory) for c in snapshot.node_classes] == [
        ("slow", 1, 1, 0.5, None),
        ("fast", 2, 2, 2.0, 1 << 30),
        ("other", 1, 1, None, None),
    ]
    fast = await lrm.submit_job(sleep_submission(site, "koala-1-fast", 2, "fast"))
    network = site.cluster.network
    assert site.find(fast)["nodes"] == [f"{network}.2", f"{network}.3"]
    assert idle_nodes(await lrm.take_snapshot()) == {"slow": 1, "fast": 0, "other": 1}
    await lrm.submit_job(sleep_submission(site, "koala-1-any", 1))
    assert idle_nodes(await lrm.take_snapshot()) == {"slow": 0, "fast": 0, "other": 1}
    waiting = await lrm.submit_job(sleep_submission(site, "koala-1-slow", 1, "slow"))
    assert site.find(waiting)["state"] == "queued", "the idle node is of another class"
    site.connection.request("cancel", job=fast, name="koala-1-fast")
