"""Every node reaches every other one before the program starts, or the error names the pair."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.runner.conftest import FakeAgent, FakeNode
from tests.runner.test_openmpi import RANK, run_program, start_gang

pytestmark = [pytest.mark.mpi, pytest.mark.processes]

Payload = dict[str, Any]


def change_ready_message(agent: FakeAgent, address: str, **changes: Any) -> None:
    """Change fields of one node's ready message on its way to the other nodes."""

    def meddle(sender: FakeNode, payload: Payload) -> Payload:
        return {**payload, **changes} if payload["op"] == "ready" and sender.host == address else payload

    agent.meddle = meddle


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.2.1", 0))
        yield listener.getsockname()[1]


async def run_to_failure(agent: FakeAgent, nodes: list[FakeNode], culprit: int) -> str:
    """Return the error of the faulty node. Assert that no other reports one, and that the program is not started."""
    await run_program(agent, nodes, RANK)
    end = await nodes[culprit].expect("exit")
    assert (end["code"], end["infrastructure"]) == (None, True)
    for node in nodes:
        assert not node.said("running")
        if node is not nodes[culprit]:
            assert not node.said("exit")
            node.send(t="stop")
        assert await node.ended() == 0
    return str(end["error"])


async def test_preflight_with_closed_port_names_nodes_and_hint(agent: FakeAgent, closed_port: int) -> None:
    nodes = await start_gang(agent, north=2, south=1)
    change_ready_message(agent, "127.0.2.1", port=closed_port)
    error = await run_to_failure(agent, nodes, 2)
    assert error == (
        f"node node-127.0.1.1 cannot reach node node-127.0.2.1 at 127.0.2.1:{closed_port} (connection refused): name a "
        "network that both have in clusters.south.mpi.interface, and ports that are open between them in "
        "clusters.south.mpi.ports"
    )


async def test_preflight_blames_cluster_with_most_failures(agent: FakeAgent, closed_port: int) -> None:
    nodes = await start_gang(agent, north=1, south=1, east=1)
    change_ready_message(agent, "127.0.2.1", port=closed_port)
    assert "cannot reach node node-127.0.2.1" in await run_to_failure(agent, nodes, 1)


async def test_preflight_error_within_head_cluster_is_its_own(agent: FakeAgent, closed_port: int) -> None:
    nodes = await start_gang(agent, north=2)
    change_ready_message(agent, "127.0.1.2", port=closed_port)
    assert "node node-127.0.1.1 cannot reach node node-127.0.1.2" in await run_to_failure(agent, nodes, 0)


def lose_first_of_each() -> Callable[[FakeNode, Payload], Payload | None]:
    lost: set[tuple[str, int, str]] = set()

    def meddle(sender: FakeNode, payload: Payload) -> Payload | None:
        key = (sender.token, sender.node, payload["op"])
        if key in lost:
            return payload
        lost.add(key)
        return None

    return meddle


async def test_preflight_resends_lost_relays(agent: FakeAgent) -> None:
    nodes = await start_gang(agent, north=2, south=1)
    agent.meddle = lose_first_of_each()
    await run_program(agent, nodes, RANK)
    assert (await nodes[0].expect("exit"))["code"] == 0
    assert len(nodes[0].output.splitlines()) == 3


async def test_preflight_resends_lost_error_report(agent: FakeAgent, closed_port: int) -> None:
    nodes = await start_gang(agent, north=1, south=1)
    change_ready_message(agent, "127.0.2.1", port=closed_port)
    change, lose = agent.meddle, lose_first_of_each()
    agent.meddle = lambda sender, p: lose(sender, p) if p["op"] == "unreached" else change(sender, p)
    assert "connection refused" in await run_to_failure(agent, nodes, 1)


async def test_preflight_listens_on_configured_ports(agent: FakeAgent) -> None:
    ports: dict[str, int] = {}

    def note(sender: FakeNode, payload: Payload) -> Payload:
        if payload["op"] == "ready":
            ports[sender.host] = payload["port"]
        elif payload["op"] == "probe":
            ports["head"] = payload["doors"][0][0]
        return payload

    agent.meddle = note
    first = find_free_range(8)
    nodes = await start_gang(agent, {"KOALA_MPI_PORTS": f"{first}-{first + 7}"}, north=2, south=1)
    await run_program(agent, nodes, RANK)
    assert (await nodes[0].expect("exit"))["code"] == 0
    assert ports == dict.fromkeys(["127.0.1.2", "127.0.2.1", "head"], first + 2)


async def test_preflight_without_free_port_is_infrastructure_error(agent: FakeAgent) -> None:
    first = find_free_range(2)
    with socket.socket() as listener:
        listener.bind(("127.0.2.1", first + 1))
        listener.listen()
        nodes = await start_gang(agent, {"KOALA_MPI_PORTS": f"{first}-{first + 1}"}, north=1, south=1)
        error = await run_to_failure(agent, nodes, 1)
    assert error.startswith(f"node node-127.0.2.1 cannot listen on a port of {first + 1}-{first + 1} of 127.0.2.1: ")


async def test_preflight_with_stopped_node_ends_cleanly(agent: FakeAgent) -> None:
    nodes = await start_gang(agent, north=2, south=1)
    agent.meddle = lambda sender, payload: None if payload["op"] == "reached" else payload
    await run_program(agent, nodes, RANK)
    await agent.until(lambda: any(m["payload"]["op"] == "reached" for m in nodes[2].said("relay")), "the knocking")
    for node in nodes[::-1]:
        node.send(t="stop")
        assert (await node.expect("exit"))["stopped"]
        assert await node.ended() == 0


def find_free_range(size: int) -> int:
    """Return the first of ``size`` consecutive free ports."""
    for first in range(21000, 32000, size):
        try:
            for port in range(first, first + size):
                with socket.socket() as trial:
                    trial.bind(("0.0.0.0", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")
