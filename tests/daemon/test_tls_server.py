"""Connections before their TLS handshake: real sockets on loopback, under both event loops."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from websockets.asyncio.client import connect

from koalapy.daemon.listener.certificate import Certificate
from koalapy.daemon.listener.connections import OWN_FILES, RESERVED, Connections, HttpServer
from koalapy.system.tls import Trust
from tests.certificates import CertificateAuthority
from tests.daemon.test_connections import DEADLINE, GOOD, app, read_until_closed

Test = Callable[[int, ssl.SSLContext], Coroutine[Any, Any, None]]
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01"
"""First bytes of a ClientHello."""
SILENT = [b"", HELLO[:1], HELLO]


@contextlib.asynccontextmanager
async def serve_tls(folder: Path, connections: Connections) -> AsyncIterator[tuple[int, ssl.SSLContext]]:
    authority = CertificateAuthority(folder)
    pair = authority.issue()
    listener = socket.create_server(("127.0.0.1", 0))
    started = asyncio.Event()
    server = HttpServer(app, connections, started.set, Certificate(pair.certificate, pair.key, folder))
    running = asyncio.create_task(server.serve([listener]))
    await started.wait()
    yield listener.getsockname()[1], Trust(authority.file).create_context()
    server.should_exit = True
    await running


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run_on_loop(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Connections, Test], None]:
    """Return a function that runs a test against a TLS server on the event loop."""

    def run(connections: Connections, test: Test) -> None:
        async def run_whole() -> None:
            async with asyncio.timeout(DEADLINE), serve_tls(tmp_path, connections) as (port, trust):
                await test(port, trust)

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(run_whole())

    return run


async def answer_to(port: int, trust: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    writer.write(GOOD)
    answer = await reader.readuntil(b"ok")
    writer.close()
    return answer


Play = Callable[[Connections, Test], None]


def test_tls_server_serves_requests_and_websockets(run_on_loop: Play) -> None:
    async def test(port: int, trust: ssl.SSLContext) -> None:
        assert (await answer_to(port, trust)).startswith(b"HTTP/1.1 200")
        async with connect(f"wss://127.0.0.1:{port}/", ssl=trust) as talk:
            await talk.send("hello")
            assert await talk.recv() == "hello"

    run_on_loop(Connections(4096), test)


@pytest.mark.evidence("N3")
@pytest.mark.parametrize("first", SILENT)
def test_tls_server_unfinished_handshake_is_closed(run_on_loop: Play, first: bytes) -> None:
    connections = Connections(4096, headers_timeout=0.1)

    async def test(port: int, trust: ssl.SSLContext) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first)
        assert await read_until_closed(reader) == b""
        writer.close()
        connections.headers_timeout = DEADLINE
        assert await answer_to(port, trust)

    run_on_loop(connections, test)


@pytest.mark.evidence("N3")
def test_tls_server_with_many_silent_clients_closes_oldest(run_on_loop: Play) -> None:
    connections = Connections(OWN_FILES)
    assert connections.max_open == 2 * RESERVED

    async def test(port: int, trust: ssl.SSLContext) -> None:
        writers = []
        for number in range(connections.max_open + 20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(SILENT[number % 3])
            writers.append((reader, writer))
        assert await answer_to(port, trust)
        for reader, _ in writers[:20]:
            assert await read_until_closed(reader) == b""
        for _, writer in writers:
            writer.close()

    run_on_loop(connections, test)


@pytest.mark.parametrize("body", [b"", b"x" * 3_000_000])
def test_tls_server_plain_http_gets_explanation(run_on_loop: Play, body: bytes) -> None:
    async def test(port: int, trust: ssl.SSLContext) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /good HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(body))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        problem = json.loads(await read_until_closed(reader))
        assert (problem["status"], problem["detail"], problem["hint"]) == (
            400,
            "this port speaks TLS",
            "ask by https://",
        )
        with contextlib.suppress(ConnectionError):
            writer.write(body)
            await writer.drain()
        writer.close()
        assert await answer_to(port, trust)

    run_on_loop(Connections(4096), test)


def test_tls_server_close_ends_open_connections(run_on_loop: Play) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def test(port: int, trust: ssl.SSLContext) -> None:
        _, silent = await asyncio.open_connection("127.0.0.1", port)
        _, idle = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        writers.extend((silent, idle))

    run_on_loop(Connections(4096), test)
