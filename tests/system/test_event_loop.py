"""Servers that accept connections: missing file descriptors and the backlog."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from koalapy.agent.login import LoginServer
from koalapy.agent.runners.runners import RunnerServer
from koalapy.daemon.listener.connections import OWN_FILES, Connections, HttpServer
from koalapy.system.event_loop import ACCEPTS_PER_TURN, accept_waiting, raise_backlog
from tests.agent.test_login import make_settings
from tests.system.test_process import limit_open_files

DEADLINE = 30.0
MANY = 50


async def empty_application(scope: object, receive: object, send: object) -> None:
    """An application."""


@asynccontextmanager
async def serve_runners(folder: Path) -> AsyncIterator[tuple[str, int]]:
    server = RunnerServer("127.0.0.1", folder / "agent.json")
    await server.listen(None)  # type: ignore[arg-type]
    host, _, port = server.address.rpartition(":")
    yield host, int(port)
    server.close()


@asynccontextmanager
async def serve_logins(folder: Path) -> AsyncIterator[str]:
    server = LoginServer(make_settings(folder), None)  # type: ignore[arg-type]
    await server.listen()
    yield str(folder / "login.sock")
    server.close()


@asynccontextmanager
async def serve_web(folder: Path) -> AsyncIterator[tuple[str, int]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        started = asyncio.Event()
        server = HttpServer(empty_application, Connections(OWN_FILES), started.set)
        running = asyncio.create_task(server.serve([listener]))
        await started.wait()
        yield listener.getsockname()
        server.should_exit = True
        await running


def open_connections(stack: ExitStack, address: Any) -> list[socket.socket]:
    """Open connections that wait until the event loop accepts them."""
    sockets = []
    for _ in range(MANY):
        client = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        stack.enter_context(client)
        client.settimeout(DEADLINE)
        client.connect(address)
        sockets.append(client)
    return sockets


@pytest.mark.parametrize("serving", [serve_runners, serve_logins, serve_web])
async def test_server_without_free_files_logs_once(
    serving: Callable[[Path], AbstractAsyncContextManager[Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The default renderer imports modules when it prints an error, which takes files.
    structlog.configure(processors=[structlog.processors.KeyValueRenderer()])
    async with serving(tmp_path) as address:
        with ExitStack() as stack:
            open_connections(stack, address)
            with limit_open_files(), caplog.at_level(logging.ERROR, "asyncio"):
                async with asyncio.timeout(DEADLINE):
                    while not caplog.records:  # noqa: ASYNC110
                        await asyncio.sleep(0)
            assert [record.getMessage().partition("\n")[0] for record in caplog.records] == [
                "socket.accept() out of system resource"
            ]


async def test_accept_waiting_accepts_all_connections(tmp_path: Path) -> None:
    transports: list[asyncio.BaseTransport] = []

    class Taken(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(transport)

    server = await asyncio.get_running_loop().create_server(Taken, "127.0.0.1", 0, backlog=ACCEPTS_PER_TURN)
    raise_backlog(server)
    with ExitStack() as stack:
        open_connections(stack, server.sockets[0].getsockname())
        await accept_waiting(server)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(transports) == MANY
        for transport in transports:
            transport.close()
    server.close()


async def test_accept_waiting_without_files_returns() -> None:
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0, backlog=ACCEPTS_PER_TURN)
    raise_backlog(server)
    with ExitStack() as stack:
        open_connections(stack, server.sockets[0].getsockname())
        with limit_open_files():
            await accept_waiting(server)
    server.close()
