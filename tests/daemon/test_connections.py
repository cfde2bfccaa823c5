"""Limits of connections without a request, over real sockets on loopback."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from websockets import CloseCode
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from koalapy.daemon.listener.connections import OWN_FILES, RESERVED, Connections, HttpServer
from koalapy.protocol.frames import MAX_HELLO_SIZE

GOOD = b"GET /good HTTP/1.1\r\nHost: here\r\n\r\n"
DEADLINE = 60.0
HALVES = [b"", b"GET /go", b"POST /good HTTP/1.1\r\nHost: here\r\nX-More:", b"GET /good HTTP/1.1\r\nHost: here\r\n"]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer a request, after reading its body if the path is ``/body``; echo WebSocket messages."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})
        return
    if scope["path"] == "/body":
        while (await receive()).get("more_body"):
            pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def serve_http(connections: Connections) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    started = asyncio.Event()
    server = HttpServer(app, connections, started.set)
    running = asyncio.create_task(server.serve([listener]))
    await started.wait()
    yield listener.getsockname()[1]
    server.should_exit = True
    await running


async def answer_to(port: int, request: bytes = GOOD) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(DEADLINE):
        answer = await reader.readuntil(b"ok")
    writer.close()
    return answer


async def read_until_closed(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes received until the server closes the connection."""
    async with asyncio.timeout(DEADLINE):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
        return b""


@pytest.mark.evidence("G6")
async def test_large_frame_of_agent_closes_connection_before_its_hello_only() -> None:
    frame = "x" * (MAX_HELLO_SIZE + 1)
    async with serve_http(Connections(OWN_FILES)) as port:
        async with connect(f"ws://127.0.0.1:{port}/api/v1/agents/north/connect", max_size=None) as agent:
            await agent.send(frame)
            with pytest.raises(ConnectionClosed) as closed:
                await agent.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == CloseCode.MESSAGE_TOO_BIG
        async with connect(f"ws://127.0.0.1:{port}/api/v1/agents/north/connect", max_size=None) as agent:
            await agent.send("hello")
            await agent.recv()
            await agent.send(frame)
            assert await agent.recv() == frame


async def test_connections_at_limit_close_longest_waiting() -> None:
    connections = Connections(OWN_FILES)
    assert connections.max_open == 2 * RESERVED
    async with serve_http(connections) as port, connect(f"ws://127.0.0.1:{port}/agent") as agent:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4 * connections.max_open)]
        for number, (_, writer) in enumerate(held):
            with contextlib.suppress(ConnectionError):
                writer.write(HALVES[number % len(HALVES)])
                await writer.drain()
        assert b"200 OK" in await answer_to(port)
        await agent.send("still here")
        assert await agent.recv() == "still here"
        assert [await read_until_closed(reader) for reader, _ in held[: connections.max_open]] == [
            b""
        ] * connections.max_open
        for _, writer in held:
            writer.close()


@contextlib.asynccontextmanager
async def open_answered(connections: Connections) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a connection with one answered request. After it, shorten the deadline for the next request head."""
    async with serve_http(connections) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GOOD)
        assert b"200 OK" in await reader.readuntil(b"ok")
        connections.idle_timeout = 0.2
        yield reader, writer
        writer.close()


@pytest.mark.parametrize("half", [*HALVES, GOOD[:-2]], ids=range(5))
async def test_connections_without_request_are_closed_after_timeout(half: bytes) -> None:
    async with serve_http(Connections(20_000, headers_timeout=0.2)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(half)
        assert await read_until_closed(reader) == b""
        writer.close()


async def test_connections_with_bytes_after_request_are_closed() -> None:
    async with open_answered(Connections(20_000)) as (reader, writer):
        writer.write(GOOD * 2 + b"GET")
        assert (await read_until_closed(reader)).count(b"200 OK") == 2


async def test_connections_stay_open_for_as_long_as_clients_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that meets the close of its connection fails. Common proxies use a connection again for a minute."""
    loop, passed_s = asyncio.get_running_loop(), [0.0]
    loop_time = loop.time
    monkeypatch.setattr(loop, "time", lambda: loop_time() + passed_s[0])
    async with serve_http(Connections(20_000)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for passed_s[0] in (0.0, 60.0):
            assert b"200 OK" in await answer_to(port)  # after it, what is overdue is closed
            writer.write(GOOD)
            assert b"200 OK" in await reader.readuntil(b"ok")
        passed_s[0] = 140.0
        assert await read_until_closed(reader) == b""
        writer.close()


@pytest.mark.evidence("N3")
async def test_connections_with_slow_headers_are_closed() -> None:
    async with serve_http(Connections(20_000, headers_timeout=0.2)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /good HTTP/1.1\r\n")
        ended = asyncio.create_task(read_until_closed(reader))
        while not ended.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b"X-More: a\r\n")
                await writer.drain()
            await asyncio.wait({ended}, timeout=0.02)
        assert ended.result() == b""
        writer.close()


@pytest.mark.evidence("N3")
async def test_connections_with_slow_headers_of_a_later_request_are_closed() -> None:
    connections = Connections(20_000, headers_timeout=0.2)
    async with serve_http(connections) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GOOD)
        assert b"200 OK" in await reader.readuntil(b"ok")
        writer.write(GOOD[:-2])
        assert await read_until_closed(reader) == b""
        writer.close()


async def test_connections_sending_after_early_answer_are_closed() -> None:
    async with open_answered(Connections(20_000)) as (reader, writer):
        writer.write(b"POST /good HTTP/1.1\r\nHost: here\r\nContent-Length: 1000000\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"ok")
        ended = asyncio.create_task(read_until_closed(reader))
        while not ended.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b"x")
                await writer.drain()
            await asyncio.wait({ended}, timeout=0.02)


async def test_connections_with_served_request_stay_open() -> None:
    """No deadline applies to a request body, and other connections do not displace an open one."""
    connections = Connections(OWN_FILES, headers_timeout=DEADLINE)
    async with serve_http(connections) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /body HTTP/1.1\r\nHost: here\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\nab")
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")  # served: no deadline applies
        connections.headers_timeout = 0.2
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * connections.max_open)]
        for idle_reader, _ in idle:
            await read_until_closed(idle_reader)  # closed at its deadline
        connections.headers_timeout = DEADLINE
        writer.write(b"cd")
        assert b"200 OK" in await reader.readuntil(b"ok")
        writer.write(GOOD)
        assert b"200 OK" in await reader.readuntil(b"ok")
        for _, connection_writer in (*idle, (reader, writer)):
            connection_writer.close()
