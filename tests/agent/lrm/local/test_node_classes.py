"""Nodes of an embedded cluster that are told apart: who asks for a class gets nodes of it and no others."""

from collections.abc import AsyncIterator

import pytest

from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.agent.lrm.node_classes import NodeClassSettings
from koalapy.agent.lrm.port import LrmSnapshot, LrmSubmission
from koalapy.model.errors import SiteRejected
from tests.agent.lrm.conftest import Site

pytestmark = pytest.mark.processes

CLASSES = {"slow": NodeClassSettings(nodes=1, power=0.5), "fast": NodeClassSettings(nodes=2, power=2.0, memory=1 << 30)}
"""Of four nodes: one is left."""


@pytest.fixture
async def lrm(site: Site) -> AsyncIterator[LocalLrm]:
    lrm = LocalLrm(site.cluster, "koala-1-", node_classes=CLASSES)
    await lrm.open()
    yield lrm
    await lrm.close()


def sleeping(site: Site, name: str, nodes: int, node_class: str = "") -> LrmSubmission:
    folder = site.cluster.directory
    return LrmSubmission(name, nodes, ["/bin/sleep", "60"], {}, folder, folder / name, node_class=node_class)


def idle(snapshot: LrmSnapshot) -> dict[str, int]:
    assert sum(each.idle for each in snapshot.node_classes) == snapshot.idle
    return {each.name: each.idle for each in snapshot.node_classes}


async def test_who_asks_for_a_class_gets_its_nodes(site: Site, lrm: LocalLrm) -> None:
    seen = await lrm.take_snapshot()
    assert [(c.name, c.total, c.idle, c.power, c.memory) for c in seen.node_classes] == [
        ("slow", 1, 1, 0.5, None),
        ("fast", 2, 2, 2.0, 1 << 30),
        ("other", 1, 1, None, None),
    ]
    fast = await lrm.submit_job(sleeping(site, "koala-1-fast", 2, "fast"))
    network = site.cluster.network
    assert site.look(fast)["nodes"] == [f"{network}.2", f"{network}.3"]
    assert idle(await lrm.take_snapshot()) == {"slow": 1, "fast": 0, "other": 1}
    await lrm.submit_job(sleeping(site, "koala-1-any", 1))
    assert idle(await lrm.take_snapshot()) == {"slow": 0, "fast": 0, "other": 1}, "the first class is given first"
    waiting = await lrm.submit_job(sleeping(site, "koala-1-slow", 1, "slow"))
    assert site.look(waiting)["state"] == "queued", "another node is idle, and of another class"
    site.connection.request("cancel", job=fast, name="koala-1-fast")


async def test_nodes_out_of_use_are_idle_in_no_class(site: Site, lrm: LocalLrm) -> None:
    for node, state in (("north-1", "drain"), ("north-2", "down")):
        site.connection.request("node", node=node, state=state)
    assert idle(await lrm.take_snapshot()) == {"slow": 0, "fast": 1, "other": 1}


async def test_a_class_that_is_not_there_or_too_small_is_a_limit(site: Site, lrm: LocalLrm) -> None:
    for node_class, nodes in (("gone", 1), ("fast", 3)):
        with pytest.raises(SiteRejected, match=f"{nodes} nodes of the class {node_class}") as refused:
            await lrm.submit_job(sleeping(site, "koala-1-x", nodes, node_class))
        assert refused.value.fault == "limit"
    with pytest.raises(SiteRejected, match="of 1 that it may have"):
        site.connection.request("submit", name="x", argv=["/bin/true"], nodes=2, among=[f"{site.cluster.network}.1"])
    for among in ("all", [1], ["10.0.0.1"]):
        with pytest.raises(SiteRejected, match="among"):
            site.connection.request("submit", name="x", argv=["/bin/true"], nodes=1, among=among)


async def test_without_classes_nothing_is_told_of_any(site: Site) -> None:
    lrm = LocalLrm(site.cluster, "koala-1-")
    await lrm.open()
    assert (await lrm.take_snapshot()).node_classes == ()
    await lrm.close()
