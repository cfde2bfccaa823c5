"""Limits on unauthenticated connections and invalid messages at the runner port."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.components.component import Component
from koalapy.agent.core.spool import JournalFolder
from koalapy.agent.runners import runner_messages, runners
from koalapy.model.bounds import MAX_TEXT_LENGTH
from koalapy.protocol.frames import MAX_AGENT_FRAME_SIZE, MAX_BATCH_SIZE, encode_frame, join_frames
from koalapy.protocol.messages import MAX_START, Relay, from_agent
from koalapy.runner.session import TAG_LENGTH
from tests.agent.conftest import DEADLINE, FakeDaemon
from tests.agent.fake_runner import HERE, FakeRunner, runner_secret
from tests.agent.memory_agent import make_reporter, running_agent
from tests.agent.memory_lrm import MemoryLrm
from tests.agent.test_runner_timeouts import Handler
from tests.signals import pass_time


class Port:
    """An agent over a cluster in memory, and connections to its runner port."""

    def __init__(self, daemon: FakeDaemon, directory: Path) -> None:
        self.daemon, self._directory = daemon, directory
        self._open: list[FakeRunner] = []

    async def connect(self) -> FakeRunner:
        runner = await FakeRunner.connect(self._directory)
        self._open.append(runner)
        return runner

    async def connect_runner(self, token: str) -> FakeRunner:
        """Submit a component of one node and return its runner, which waits at the barrier."""
        await self.daemon.submit_component(token)
        await self.daemon.wait_for_state(token, "waiting")
        runner = await self.connect()
        name = f"koala-test-{token}"
        await runner.introduce(name, runner_secret(name))
        assert "lease" in await runner.receive("welcome")
        return runner

    async def last_rejection(self) -> dict[str, Any]:
        """Return the last rejected runner that was reported to the daemon."""
        await self.daemon.wait_until(lambda: bool(self.daemon.received("impostor")))
        return self.daemon.received("impostor")[-1]

    def close(self) -> None:
        for runner in self._open:
            runner.writer.transport.abort()


@asynccontextmanager
async def open_port(daemon: FakeDaemon, directory: Path, lrm: MemoryLrm | None = None) -> AsyncIterator[Port]:
    async with running_agent(lrm or MemoryLrm(), daemon, directory):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        port = Port(daemon, directory)
        try:
            yield port
        finally:
            port.close()


@given(st.binary(), st.lists(st.integers(0, 50)))
def test_line_buffer_is_independent_of_chunk_sizes(data: bytes, sizes: list[int]) -> None:
    line, lines, remaining = runners.LineBuffer(), [], data
    for size in sizes:
        lines += line.split_lines(remaining[:size])
        remaining = remaining[size:]
    lines += line.split_lines(remaining)
    *expected, partial = data.split(b"\n")
    assert lines == expected
    assert line.size == len(partial)


@pytest.fixture
async def port(daemon: FakeDaemon, tmp_path: Path) -> AsyncIterator[Port]:
    async with open_port(daemon, tmp_path / "agent") as port:
        yield port


@pytest.mark.evidence("R7")
@pytest.mark.parametrize("foreign_token", ["2.1.0.aa", "1.2.0.aa", "1.1.1.bb", "1.1.1", "nonsense"])
async def test_relay_reaches_own_gang_only(port: Port, foreign_token: str) -> None:
    first, second = await port.connect_runner("1.1.0.aa"), await port.connect_runner("1.1.1.aa")
    stranger = await port.connect_runner(foreign_token) if foreign_token != "nonsense" else None
    first.send(t="relay", token=foreign_token, node=0, payload={"op": "launch", "command": "id"})
    message = await first.receive("relay")
    assert (message["sender"], message["payload"]["op"]) == ("", "undelivered")
    first.send(t="relay", token="1.1.1.aa", node=0, payload={"op": "launch", "command": "true"})
    message = await second.receive("relay")
    assert (message["sender"], message["payload"]["command"]) == ("1.1.0.aa", "true")
    if stranger is not None:
        await port.daemon.send_messages(
            "north",
            {
                "type": "relay",
                "token": foreign_token,
                "node": 0,
                "payload": {"op": "launch"},
                "sender": "1.1.0.aa",
                "sender_node": 0,
            },
        )
        await port.daemon.send_command("stop", foreign_token, reason="enough")
        assert (await stranger.receive("relay", "stop"))["t"] == "stop", "relays of the daemon are restricted too"


@pytest.mark.evidence("N4")
async def test_too_long_line_before_hello_is_disconnected(port: Port) -> None:
    stranger = await port.connect()
    stranger.writer.write(b"x" * (TAG_LENGTH + runners.MAX_HELLO_LENGTH + 1))
    await stranger.wait_for_disconnect()


async def test_silent_connection_is_disconnected(port: Port) -> None:
    stranger = await port.connect()
    stranger.writer.write(b'{"t":')
    await stranger.wait_for_disconnect()


async def test_authenticated_runner_may_be_silent(port: Port) -> None:
    runner = await port.connect_runner("1.1.0.aa")
    await pass_time(2 * runners.HELLO_TIMEOUT)
    runner.send(t="out", offset=0, data="aGk=")
    assert (await runner.receive("output"))["offset"] == 2


@pytest.mark.evidence("N4")
async def test_runner_port_connections_do_not_block_runners(port: Port) -> None:
    """The oldest connections without a hello are closed; a runner sends its hello at once."""
    strangers = [await port.connect() for _ in range(runners.MAX_UNAUTHENTICATED)]
    runner = await port.connect_runner("1.1.0.aa")
    await strangers[0].wait_for_disconnect()
    runner.send(t="out", offset=0, data="aGk=")
    assert (await runner.receive("output"))["offset"] == 2


async def test_runner_port_connections_are_limited(tmp_path: Path) -> None:
    server = runners.RunnerServer("127.0.0.1", tmp_path / "agent.json", max_unauthenticated=3)
    await server.listen(Handler())
    address = json.loads((tmp_path / "agent.json").read_bytes())
    with ExitStack() as stack:
        # The event loop does not run here: all connections wait to be accepted.
        strangers = [
            stack.enter_context(socket.create_connection((address["host"], address["port"]), DEADLINE))
            for _ in range(20)
        ]
        for stranger in strangers:
            stranger.setblocking(False)
        for stranger in strangers[:-3]:
            await wait_for_hang_up(stranger)
        for stranger in strangers[-3:]:
            with pytest.raises(BlockingIOError):
                stranger.recv(1)
    server.close()


async def wait_for_hang_up(stranger: socket.socket) -> None:
    async with asyncio.timeout(DEADLINE):
        with suppress(ConnectionResetError):
            assert await asyncio.get_running_loop().sock_recv(stranger, 1) == b""


@pytest.mark.parametrize("is_known", [True, False])
async def test_undelivered_relay_says_whether_receiver_has_ended(port: Port, is_known: bool) -> None:
    runner = await port.connect_runner("1.1.0.aa")
    if is_known:  # its runner has not connected yet
        await port.daemon.submit_component("1.1.1.aa")
        await port.daemon.wait_for_state("1.1.1.aa", "waiting")
    else:
        port.daemon._clusters["1.1.1.aa"] = "north"
    runner.send(t="relay", token="1.1.1.aa", node=0, payload={"op": "ask"})
    payload = (await runner.receive("relay"))["payload"]
    assert (payload["op"], payload["ended"]) == ("undelivered", not is_known)
    runner.send(t="relay", token="1.1.0.aa", node=1, payload={"op": "ask"})  # it has one node
    assert (await runner.receive("relay"))["payload"]["ended"]


async def test_runner_that_reads_nothing_is_disconnected(port: Port) -> None:
    runner = await port.connect_runner("1.1.0.aa")
    runner.reader._transport.pause_reading()  # type: ignore[attr-defined]

    async def send_relays() -> None:
        for _ in range(100):
            runner.send(t="relay", token="1.1.0.aa", node=0, payload={"x": "y" * 2**20})
            await runner.writer.drain()

    with pytest.raises(ConnectionError):
        await send_relays()


async def test_relays_that_the_daemon_does_not_read_are_undelivered(port: Port) -> None:
    first, second = await port.connect_runner("1.1.0.aa"), await port.connect_runner("2.1.0.aa")
    daemon_socket = port.daemon._sockets["north"].transport
    daemon_socket.pause_reading()
    port.daemon._clusters |= {"1.1.7.aa": "north", "2.1.7.aa": "north"}
    for _ in range(100):
        first.send(t="relay", token="1.1.7.aa", node=0, payload={"x": "y" * 2**20})
        await first.writer.drain()
    payload = (await first.receive("relay"))["payload"]
    assert (payload["op"], payload["reason"]) == ("undelivered", "the daemon does not read what it is sent")
    second.send(t="relay", token="2.1.7.aa", node=0, payload={})
    second.send(t="relay", token="2.1.0.aa", node=0, payload={"is": "handled"})
    assert (await second.receive("relay"))["payload"] == {"is": "handled"}, "others do not wait for the first"
    daemon_socket.resume_reading()
    await port.daemon.wait_until(lambda: [m for m in port.daemon.received("relay") if m["token"] == "2.1.7.aa"])


async def test_endless_line_disconnects_runner(port: Port) -> None:
    runner = await port.connect_runner("1.1.0.aa")
    runner.writer.write(b"x" * (TAG_LENGTH + runners.MAX_LINE_LENGTH + 1))
    await runner.wait_for_disconnect()


@pytest.mark.parametrize(
    "message",
    [
        {"t": "out", "offset": -1, "data": ""},
        {"t": "out", "offset": 2**63, "data": ""},
        {"t": "out", "offset": 0, "data": "no base64!"},
        {"t": "out", "offset": "x", "data": ""},
        {"t": "relay", "token": "1.1.1.aa", "node": -1, "payload": {}},
        {"t": "relay", "token": "1.1.1.aa", "node": 0, "payload": []},
        {"t": "exit", "code": 2**63, "error": "", "infrastructure": False, "stopped": False},
        {"t": "exit", "code": 0, "infrastructure": False, "stopped": False},
        HERE | {"t": "here", "life": "x", "phase": "?"},
        HERE | {"t": "here", "life": "x", "host": "x" * 2000},
        HERE | {"t": "here", "life": "x", "start": -1},
        HERE | {"t": "here", "life": "x", "start": MAX_START + 1},
        {"t": "stream", "message": {"type": "stream_opened", "stream": "s", "node": "a", "used": MAX_START + 1}},
        HERE | {"t": "here", "life": None},
        {"t": "nothing"},
        {},
        [],
        None,
        7,
    ],
    ids=repr,
)
def test_message_out_of_bounds_is_rejected(message: Any) -> None:
    with pytest.raises(ValueError):
        runner_messages.parse_message(json.dumps(message).encode())


HELLO = {"t": "hello", "component": "koala-test-1.1.0.aa", "node": 0, "nonce": "0" * 64}


@pytest.mark.parametrize(
    "hello",
    [{"node": -1}, {"node": 2**63}, {"node": None}, {"nonce": ""}, {"nonce": "x" * 64}, {"nonce": None}],
    ids=repr,
)
def test_hello_out_of_bounds_is_rejected(hello: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        runner_messages.parse_hello(json.dumps(HELLO | hello).encode())


@pytest.mark.parametrize("hello", [{"node": -1}, {"node": 1}], ids=repr)
async def test_hello_of_unknown_node_is_disconnected(port: Port, hello: dict[str, Any]) -> None:
    await port.connect_runner("1.1.0.aa")
    stranger = await port.connect()
    stranger.send(**HELLO | hello)
    assert await stranger.read() == {}


async def test_runner_with_invalid_description_is_disconnected(port: Port) -> None:
    await port.connect_runner("1.1.0.aa")
    stranger = await port.connect()
    await stranger.introduce("koala-test-1.1.0.aa", runner_secret("koala-test-1.1.0.aa"), phase="?")
    assert await stranger.read() == {}


@pytest.mark.parametrize(("depth", "is_rejected"), [(99, False), (100, True), (900, True), (100_000, True)])
async def test_relay_payload_nested_too_deep_disconnects(port: Port, depth: int, is_rejected: bool) -> None:
    """The daemon would reject such a message and disconnect the whole cluster."""
    runner = await port.connect_runner("1.1.0.aa")
    payload = '{"a":' + "[" * depth + "]" * depth + "}"
    runner.send_line(b'{"t":"relay","token":"1.1.7.aa","node":0,"payload":' + payload.encode() + b"}")
    if is_rejected:
        await runner.wait_for_disconnect()
    else:
        port.daemon._clusters["1.1.7.aa"] = "north"
        await port.daemon.wait_until(lambda: bool(port.daemon.received("relay")))
    assert len(port.daemon.received("hello")) == 1


@pytest.mark.parametrize(("length", "frames"), [(1000, 1), (MAX_BATCH_SIZE // 10, 3), (MAX_BATCH_SIZE, 20)])
def test_messages_are_joined_to_bounded_frames(length: int, frames: int) -> None:
    relays = [
        Relay(token="1.1.0", node=n, payload={"x": "y" * length}, sender="1.1.1", sender_node=0) for n in range(20)
    ]
    joined = list(join_frames(encode_frame(from_agent, [relay])[1:-1] for relay in relays))
    assert len(joined) == frames
    assert all(len(frame) <= max(MAX_BATCH_SIZE, length + 200) for frame in joined)
    assert [message for frame in joined for message in from_agent.validate_json(frame)] == relays


async def test_inventory_of_components_with_long_errors_fits_into_a_frame(tmp_path: Path) -> None:
    messages: list[Any] = []
    reporter, _ = make_reporter(SimpleNamespace(send_soon=messages.append))
    for job in range(400):
        component = Component("", f"{job}.1.0", JournalFolder(tmp_path))
        component.fail("\N{CHEERING MEGAPHONE}" * MAX_TEXT_LENGTH)
        reporter.add_component(component)
    reporter.send_inventory(None, list)
    (inventory,) = messages
    assert len(encode_frame(from_agent, [inventory]).encode()) < MAX_AGENT_FRAME_SIZE
    assert [status.error[:1] for status in inventory.components] == ["\N{CHEERING MEGAPHONE}"] * 400
