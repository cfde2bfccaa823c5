"""Connections with TLS, from when they come to when they speak it: who does not is told so, or closed in time."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Callable

import structlog

from koalapy.daemon.listener.connections import Connections
from koalapy.model.errors import ProblemCode
from koalapy.system.accept import FIRST_OF_TLS, first_byte

log = structlog.get_logger()

BACKLOG = 1024
GOODBYE_TIMEOUT = 3.0
"""Seconds in which the other side must take its leave, or our refusal."""
MAX_UNREAD = 1024 * 1024
"""Bytes of a request in clear that are let come, so that its sender hears the refusal."""
ACCEPT_PAUSE = 0.2
"""Seconds for which nobody is let in when the system has no room for a connection."""
PROBLEM = {
    "type": "about:blank",
    "title": "Bad Request",
    "status": 400,
    "code": ProblemCode.TLS_EXPECTED,
    "detail": "this port speaks TLS",
    "hint": "ask by https://",
}


class Arrival:
    """A connection that does not speak TLS yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.loop = asyncio.get_running_loop()
        self._connection = connection

    def abort(self) -> None:
        """Whatever is waited for on it ends."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


class Handshakes:
    """Takes connections in, and hands those over that speak TLS; as uvicorn knows a server of asyncio's."""

    def __init__(
        self, context: ssl.SSLContext, connections: Connections, protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        self._context, self._connections, self._protocol = context, connections, protocol
        self._accepting: asyncio.Task[None] | None = None
        self._arriving: set[asyncio.Task[None]] = set()

    def start(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._accepting = asyncio.create_task(self._accept(listener), name="accept")

    def close(self) -> None:
        """Let nobody in any more, and leave who does not speak yet."""
        for task in (self._accepting, *self._arriving):
            if task is not None:
                task.cancel()

    async def wait_closed(self) -> None:
        tasks = [task for task in (self._accepting, *self._arriving) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("cannot take a connection in", action="connection-not-accepted", reason=str(error))
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            task = loop.create_task(self._arrive(connection))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    async def _arrive(self, connection: socket.socket) -> None:
        arrival = Arrival(connection)
        self._connections.opened(arrival)
        handed_over = False
        try:
            connection.setblocking(False)
            first = await first_byte(connection)
            if first == FIRST_OF_TLS:
                await self._shake_hands(connection)
                handed_over = True
            elif first:
                async with asyncio.timeout(GOODBYE_TIMEOUT):
                    await _refuse(connection)
        except (OSError, TimeoutError):
            pass  # What somebody else does wrong is no news here, and may come a thousand times a second.
        finally:
            self._connections.left(arrival)
            if not handed_over:
                connection.close()

    async def _shake_hands(self, connection: socket.socket) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(
            self._protocol,
            connection,
            ssl=self._context,
            ssl_handshake_timeout=self._connections.headers_timeout,
            ssl_shutdown_timeout=GOODBYE_TIMEOUT,
        )


async def _refuse(connection: socket.socket) -> None:
    """Tell who speaks plain HTTP how to ask."""
    loop = asyncio.get_running_loop()
    body = json.dumps(PROBLEM).encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/problem+json\r\nContent-Length: {len(body)}\r\n"
    await loop.sock_sendall(connection, f"{head}Connection: close\r\n\r\n".encode() + body)
    connection.shutdown(socket.SHUT_WR)
    unread = MAX_UNREAD
    while unread > 0 and (data := await loop.sock_recv(connection, 65536)):
        unread -= len(data)
