"""Connections of runners: silence, lost hosts, and reconnection."""

import asyncio
import json
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from koalapy.runner.connections import Loop
from koalapy.runner.link import KEEPALIVE, Link
from koalapy.runner.settings import Settings
from tests.runner.conftest import FakeAgent, FakeNode, make_plan


class BlackHoleProxy:
    """A proxy of an agent; after ``die``, it accepts all data and forwards none."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._dead = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    async def listen(self) -> tuple[str, int]:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self.server.sockets[0].getsockname()
        return host, port

    def die(self) -> None:
        self._dead.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(*self._target)
        self._writers += [writer, forth]
        await asyncio.gather(self._pass_on(reader, forth), self._pass_on(back, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not self._dead.is_set():
                writer.write(data)

    def close(self) -> None:
        self.server.close()
        for writer in self._writers:
            writer.transport.abort()


def wait_for_gate(gate: Path) -> list[str]:
    return ["sh", "-c", f"echo up; while [ ! -e {gate} ]; do sleep 0.05; done; echo done"]


async def finish_program(agent: FakeAgent, node: FakeNode, gate: Path) -> None:
    gate.touch()  # noqa: ASYNC240
    end = await node.expect("exit")
    assert (end["code"], end["stopped"], end["error"]) == (0, False, "")
    assert node.output == b"up\ndone\n"


@pytest.mark.processes
async def test_runner_with_silent_agent_reconnects(tmp_path: Path) -> None:
    """The agent's host fails without closing the connection, and another agent starts elsewhere."""
    agent, file = FakeAgent(tmp_path, lease=4.0), tmp_path / "agent.json"
    await agent.listen()
    address = json.loads(file.read_text())
    line = BlackHoleProxy((address["host"], address["port"]))
    host, port = await line.listen()
    file.write_text(json.dumps({"host": host, "port": port}))
    node = await agent.start("7.1.0", 0, "127.0.1.1")
    node.send(**make_plan([node], wait_for_gate(tmp_path / "gate")))
    await agent.until(lambda: bool(node.output), "the program")
    line.die()
    file.write_text(json.dumps(address))
    await agent.until(lambda: len(node.hellos) > 1, "the runner to come back")
    assert node.hellos[-1]["phase"] == "running"
    await finish_program(agent, node, tmp_path / "gate")
    assert await node.ended() == 0
    line.close()
    await agent.leave()


@pytest.mark.processes
async def test_runner_after_stop_does_not_assume_silence(tmp_path: Path) -> None:
    agent = FakeAgent(tmp_path, lease=3.0)
    await agent.listen()
    node = await agent.start("7.1.0", 0, "127.0.1.1")
    node.send(**make_plan([node], wait_for_gate(tmp_path / "gate")))
    await agent.until(lambda: bool(node.output), "the program")
    assert node.process is not None
    node.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(4.5)  # longer than the lease
    node.process.send_signal(signal.SIGCONT)
    await finish_program(agent, node, tmp_path / "gate")
    assert await node.ended() == 0
    await agent.leave()


def test_keepalive_detects_lost_host_in_30_seconds() -> None:
    """The kernel detects it, with or without unsent data."""
    options = {option: value for _, option, value in KEEPALIVE}
    probes = options[socket.TCP_KEEPINTVL] * options[socket.TCP_KEEPCNT]
    assert options[socket.TCP_KEEPIDLE] + probes <= 30
    assert options[socket.TCP_USER_TIMEOUT] == 30_000


def test_link_reconnected_while_a_retry_is_due_connects_once(tmp_path: Path) -> None:
    """A second connection would reuse the session of the first, and the agent would close it."""
    loop, file = Loop(), tmp_path / "agent.json"
    settings = SimpleNamespace(agent_file=str(file), component_name="koala-test-7.1.0", node=0, secret=b"secret")
    link = Link(loop, cast(Settings, settings), dict[str, Any], lambda message: None)
    link.connect()  # the file does not exist: a retry is due soon
    with socket.create_server(("127.0.0.1", 0)) as agent:
        host, port = agent.getsockname()
        file.write_text(json.dumps({"host": host, "port": port}))
        link.reconnect()
        has_passed: list[bool] = []
        loop.set_alarm("later", 0.2, lambda: has_passed.append(True))  # the retry is due before this alarm
        while not has_passed:
            loop.turn()
        agent.setblocking(False)
        connections = []
        try:
            while True:
                connections.append(agent.accept()[0])
        except BlockingIOError:
            pass
        for connection in connections:
            connection.close()
    link.close()
    assert len(connections) == 1
