"""The agent's side of its runners' connections: JSON, one message a line, over TCP."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import structlog

log = structlog.get_logger()


class Desk(Protocol):
    """Who deals with what runners say."""

    def greeted(self, runner: "RunnerConnection", hello: dict[str, Any]) -> bool:
        """A runner reported; False when it is none of ours."""
        ...

    def told(self, runner: "RunnerConnection", message: dict[str, Any]) -> None: ...

    def gone(self, runner: "RunnerConnection") -> None: ...


class RunnerConnection(asyncio.Protocol):
    """One runner, from its hello to the end of the connection; ``component`` and ``node`` are set by the desk."""

    component: str
    node: int

    def __init__(self, desk: Desk, everyone: set["RunnerConnection"]) -> None:
        self._desk, self._everyone = desk, everyone
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self.known = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._everyone.add(self)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            for line in lines:
                self._take(json.loads(line))
        except (ValueError, KeyError) as error:
            log.warning("a runner's message could not be understood", action="disconnect", error=repr(error))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._everyone.discard(self)
        self._transport = None
        if self.known:
            self._desk.gone(self)

    def send(self, message: dict[str, Any]) -> None:
        if self._transport is not None:
            self._transport.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _take(self, message: dict[str, Any]) -> None:
        if self.known:
            self._desk.told(self, message)
        elif message["t"] == "hello" and self._desk.greeted(self, message):
            self.known = True
        else:
            self.close()


class RunnerServer:
    """Listens for runners; keeps its port over restarts if it can, so that they find it again at once."""

    def __init__(self, host: str, address_file: Path) -> None:
        self._host = host
        self._file = address_file
        self._everyone: set[RunnerConnection] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, desk: Desk) -> None:
        def connection() -> RunnerConnection:
            return RunnerConnection(desk, self._everyone)

        try:
            port = int(json.loads(self._file.read_bytes())["port"])
            self._server = await _listen(connection, self._host, port)
        except (OSError, ValueError, KeyError):
            self._server = await _listen(connection, self._host, 0)
        port = self._server.sockets[0].getsockname()[1]
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps({"host": self._host, "port": port}))
        os.replace(fresh, self._file)

    def send_all(self, message: dict[str, Any]) -> None:
        for runner in self._everyone:
            runner.send(message)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for runner in list(self._everyone):
            runner.close()


async def _listen(connection: Callable[[], RunnerConnection], host: str, port: int) -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(connection, host, port, backlog=1024)
