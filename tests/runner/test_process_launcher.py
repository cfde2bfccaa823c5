"""The variables by which processes of a distributed framework find each other, and the port of the head node."""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from koalapy.runner.process_launcher import find_free_port
from tests.runner.conftest import FakeAgent, FakeNode, make_plan

pytestmark = pytest.mark.processes

SHOW = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]


async def run_nodes(agent: FakeAgent, command: list[str], tokens: list[str], **context: Any) -> list[FakeNode]:
    """Run a command on one node of each component, and return the nodes when all have ended."""
    nodes = [await agent.start(token, 0, f"127.0.1.{i + 1}") for i, token in enumerate(tokens)]
    for node in nodes:
        node.send(**make_plan(nodes, command, **context))
    for node in nodes:
        await node.expect("exit")
        assert await node.ended() == 0
    return nodes


async def test_processes_of_all_clusters_get_ranks_and_port_of_head(agent: FakeAgent) -> None:
    nodes = await run_nodes(agent, SHOW, ["7.1.0", "7.1.1"], environment={"MASTER_PORT": "of the user"})
    first, second = (json.loads(node.output) for node in nodes)
    expected = {
        "KOALA_SIZE": "2",
        "KOALA_CLUSTER_LIST": "north,south",
        "KOALA_HEAD_HOST": "127.0.1.1",
        "WORLD_SIZE": "2",
    }
    expected |= {"KOALA_LOCAL_RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.1.1", "MASTER_PORT": "of the user"}
    for rank, variables in enumerate((first, second)):
        own = {"KOALA_RANK": str(rank), "RANK": str(rank), "KOALA_CLUSTER_INDEX": str(rank)}
        assert {name: variables.get(name) for name in expected | own} == expected | own
    assert first["KOALA_HEAD_PORT"] == second["KOALA_HEAD_PORT"]
    assert 0 < int(first["KOALA_HEAD_PORT"]) < 65536


async def test_node_asks_for_lost_port(agent: FakeAgent) -> None:
    lost: list[dict[str, Any]] = []

    def lose_first_port(sender: FakeNode, payload: dict[str, Any]) -> dict[str, Any] | None:
        if payload["op"] == "port" and not lost:
            lost.append(payload)
            return None
        return payload

    agent.meddle = lose_first_port
    command = ["sh", "-c", "echo $KOALA_HEAD_PORT; [ $KOALA_RANK = 1 ] || sleep 1000"]
    nodes = [await agent.start(f"7.1.{i}", 0, f"127.0.1.{i + 1}") for i in range(2)]
    for node in nodes:
        node.send(**make_plan(nodes, command))
    await nodes[1].expect("exit")
    assert nodes[1].output == f"{lost[0]['port']}\n".encode()


@pytest.mark.parametrize(("has_ended", "output"), [(True, b"none\n"), (False, b"known\n")])
async def test_node_without_port_starts_if_first_node_has_ended(
    agent: FakeAgent, has_ended: bool, output: bytes
) -> None:
    """The first node may end before another has its port, for example while the daemon is restarted."""
    undelivered: list[dict[str, Any]] = []

    def lose_first_port(sender: FakeNode, payload: dict[str, Any]) -> dict[str, Any] | None:
        if payload["op"] == "port" and not undelivered:
            undelivered.append({"op": "undelivered", "reason": "it has no runner", "ended": has_ended})
            nodes[1].send(t="relay", sender="", sender_node=0, payload=undelivered[0])
            return None
        return payload

    agent.meddle = lose_first_port
    command = ["sh", "-c", "[ $KOALA_RANK = 1 ] || exec sleep 1000; [ $KOALA_HEAD_PORT ] && echo known || echo none"]
    nodes = [await agent.start(f"7.1.{i}", 0, f"127.0.1.{i + 1}") for i in range(2)]
    for node in reversed(nodes):
        node.send(**make_plan(nodes, command))
    await nodes[1].expect("exit")
    assert nodes[1].output == output


@pytest.mark.parametrize("port", ["80", 0, 70000, 1.5])
async def test_invalid_port_of_head_is_ignored(agent: FakeAgent, port: object) -> None:
    def change_first_port(sender: FakeNode, payload: dict[str, Any]) -> dict[str, Any] | None:
        if payload["op"] == "port" and agent.meddle is change_first_port:
            agent.meddle = lambda _, later: later
            return {**payload, "port": port}
        return payload

    agent.meddle = change_first_port
    nodes = [await agent.start(f"7.1.{i}", 0, f"127.0.1.{i + 1}") for i in range(2)]
    command = ["sh", "-c", "echo $KOALA_HEAD_PORT; [ $KOALA_RANK = 1 ] || sleep 1000"]
    for node in nodes:
        node.send(**make_plan(nodes, command))
    await nodes[1].expect("exit")
    assert 0 < int(nodes[1].output) < 65536


async def test_many_invalid_messages_of_other_nodes_print_ten_short_lines(
    agent: FakeAgent, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes = [await agent.start(f"7.1.{i}", 0, f"127.0.1.{i + 1}") for i in range(2)]
    nodes[1].send(**make_plan(nodes, ["true"]))
    for _ in range(50):
        nodes[1].send(t="relay", sender="7.1.0", sender_node=0, payload={"op": "port"})
        nodes[1].send(t="relay", sender="x" * 900, sender_node=0, payload={})
    nodes[1].send(t="relay", sender="7.1.0", sender_node=0, payload={"op": "port", "port": 7})
    assert (await nodes[1].expect("exit"))["code"] == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("koala runner: (")]
    assert len(lines) == 10
    assert max(map(len, lines)) <= 300


async def test_missing_program_on_other_node_ends_with_127(agent: FakeAgent) -> None:
    nodes = await run_nodes(agent, ["no-such-program"], ["7.1.0", "7.1.1"])
    assert [node.said("exit")[-1]["code"] for node in nodes] == [127, 127]


def test_free_port_is_in_range_and_used_nowhere() -> None:
    with socket.socket() as user:
        user.bind(("127.0.0.1", 0))
        user.listen()
        taken = user.getsockname()[1]
        assert find_free_port("127.0.1.1", (taken, taken)) is None
        port = find_free_port("127.0.1.1", (taken, min(taken + 20, 65535)))
    assert port is None or taken < port <= taken + 20


@pytest.mark.parametrize(("ending", "code"), [("exit 0", 0), ("exit 3", None), ("sleep 1000", None)])
async def test_program_that_lost_its_relay_succeeds_if_it_ends_with_0_soon(
    agent: FakeAgent, tmp_path: Path, ending: str, code: int | None
) -> None:
    go = tmp_path / "go"
    node = await agent.start("7.1.0", 0, "127.0.1.1")
    node.send(**make_plan([node], ["sh", "-c", f"while [ ! -e {go} ]; do sleep 0.02; done; {ending}"]))
    await node.expect("running")
    node.send(t="relay_lost", why="its head is gone")
    go.touch()
    end = await node.expect("exit")
    assert (end["code"], end["infrastructure"]) == (code, code is None)
    assert ("its head is gone" in end["error"]) == (code is None)
    assert await node.ended() == 0
