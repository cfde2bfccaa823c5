"""Accept connections with TLS, and limit their number and their time without a request."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from copy import copy
from typing import Any, Protocol

import structlog
import uvicorn
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from koalapy.daemon.listener.certificate import Certificate
from koalapy.model.errors import ProblemCode
from koalapy.protocol.frames import MAX_AGENT_FRAME_SIZE, MAX_HELLO_SIZE
from koalapy.system.event_loop import ACCEPTS_PER_TURN, BACKLOG, TLS_FIRST_BYTE, peek_first_byte, raise_backlog

log = structlog.get_logger()

MAX_CONNECTIONS = 4096
"""Maximum number of HTTP connections, if the system's limit of open files allows it."""
RESERVED = 64
"""Connections that users' requests may not occupy; they remain for new connections and agents."""
OWN_FILES = 256
"""Open files for the daemon itself: its database, its embedded agents and the agents' WebSockets."""
FILES_WANTED = 2 * MAX_CONNECTIONS + OWN_FILES
"""Requested limit of open files; programs of embedded clusters inherit it."""
HEADERS_TIMEOUT = 20.0
"""Seconds from the start of a connection, or of a later request, until the request's headers are complete."""
IDLE_TIMEOUT = 75
"""Seconds without a request after a response: longer than clients keep one, since a request at the close fails."""
GOODBYE_TIMEOUT = 3.0
"""Seconds within which the client must end a TLS session, or read a rejection."""
MAX_UNREAD = 1024 * 1024
"""Bytes of an unencrypted request that are read, so that its sender receives the rejection."""
AGENTS_PATH = b"/api/v1/agents/"
MAX_USER_FRAME_SIZE = 256 * 1024
"""Bytes of a frame that a user's WebSocket may send; agents send larger ones after their hello."""
ACCEPT_PAUSE = 0.2
"""Seconds until the next connection is accepted after the system had no capacity for one."""
MAX_UNREAD_PONGS = 64 * 1024 * 1024
"""Bytes that wait for a peer, at which its pings are no longer answered."""
SHUTDOWN_GRACE = 3
"""Seconds that open requests have to end when the daemon stops."""
PROBLEM = {
    "type": "about:blank",
    "title": "Bad Request",
    "status": 400,
    "code": ProblemCode.TLS_EXPECTED,
    "detail": "this port speaks TLS",
    "hint": "ask by https://",
}


class OpenConnection(Protocol):
    """A connection that counts towards the limit, with any protocol."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def abort(self) -> None: ...


class Connections:
    """The HTTP connections; if there are too many, the one that has waited longest for a request is closed."""

    def __init__(self, files: int, headers_timeout: float = HEADERS_TIMEOUT) -> None:
        # A request may open a file in addition to its connection.
        self.max_open = min(MAX_CONNECTIONS, max(2 * RESERVED, (files - OWN_FILES) // 2))
        self.headers_timeout, self.idle_timeout = headers_timeout, float(IDLE_TIMEOUT)
        self._open: set[OpenConnection] = set()
        self._waiting: dict[OpenConnection, asyncio.TimerHandle] = {}
        """Connections without a request and the timers that close them, in the order in which they began to wait."""

    @property
    def max_requests(self) -> int:
        """Return the maximum number of simultaneous requests of users."""
        return self.max_open - RESERVED

    def protocol_class(self) -> type["HttpConnection"]:
        """Return the protocol class that uvicorn instantiates for each connection."""
        return type("CountedConnection", (HttpConnection,), {"all": self})

    def add(self, connection: OpenConnection) -> None:
        """Count a new connection. If there are too many, close the one that has waited longest for a request."""
        self._open.add(connection)
        self.expect_request(connection, self.headers_timeout)
        if len(self._open) > self.max_open:
            self._close_connection(next(iter(self._waiting)))

    def expect_request(self, connection: OpenConnection, timeout: float) -> None:
        """Close a connection that has no complete request headers after ``timeout`` seconds."""
        if connection in self._open and connection not in self._waiting:
            self._waiting[connection] = connection.loop.call_later(timeout, self._close_connection, connection)

    def begin_headers(self, connection: OpenConnection) -> None:
        """Shorten the deadline of an idle connection, since the first byte of a request has arrived."""
        timer = self._waiting.get(connection)
        if timer is not None and timer.when() > connection.loop.time() + self.headers_timeout:
            self.begin_request(connection)
            self.expect_request(connection, self.headers_timeout)

    def begin_request(self, connection: OpenConnection) -> None:
        """Cancel the deadline of a connection, since the headers of a request are complete."""
        if timer := self._waiting.pop(connection, None):
            timer.cancel()

    def remove(self, connection: OpenConnection) -> None:
        """Stop counting a connection that is closed or no longer HTTP."""
        self.begin_request(connection)
        self._open.discard(connection)

    def _close_connection(self, connection: OpenConnection) -> None:
        self.remove(connection)
        connection.abort()


class HttpConnection(HttpToolsProtocol):
    """Uvicorn's protocol with the deadlines of ``Connections``; without them, it waits for requests indefinitely."""

    all: Connections

    def abort(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.all.remove(self)
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self.all.remove(self)
        self.config = copy(self.config)
        is_agent = AGENTS_PATH in self.url.partition(b"?")[0]
        self.config.ws_max_size = MAX_HELLO_SIZE if is_agent else MAX_USER_FRAME_SIZE
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        self.all.begin_headers(self)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.all.begin_request(self)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # false if another request was received with it
            self.all.expect_request(self, self.all.idle_timeout)


class _NewConnection:
    """A connection before its TLS handshake is complete."""

    def __init__(self, connection: socket.socket) -> None:
        self.loop = asyncio.get_running_loop()
        self._connection = connection

    def abort(self) -> None:
        """Shut the connection down, which ends the task that waits for it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


class TlsServer:
    """A server that accepts connections and passes those with TLS to uvicorn, which uses it as an asyncio server.

    It counts connections and starts their deadlines before the TLS handshake; uvicorn would do so only after it.
    """

    def __init__(
        self, context: ssl.SSLContext, connections: Connections, protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        self._context, self._connections, self._protocol = context, connections, protocol
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._start_task(self._accept_connections(listener))

    def close(self) -> None:
        """Stop accepting connections, and close those without a complete TLS handshake."""
        for task in tuple(self._tasks):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_connections(self, listener: socket.socket) -> None:
        """Accept connections without end, and do the TLS handshake of each in its own task."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("cannot take a connection in", action="connection-not-accepted", reason=str(error))
                await asyncio.sleep(ACCEPT_PAUSE)
            else:
                self._start_task(self._shake_hands(connection))

    async def _shake_hands(self, connection: socket.socket) -> None:
        """Do the TLS handshake and pass the connection on to the HTTP server.

        Answer unencrypted requests with an error, and close connections that fail.
        """
        counted = _NewConnection(connection)
        self._connections.add(counted)
        is_passed_on = False
        try:
            connection.setblocking(False)
            first = await peek_first_byte(connection)
            if first == TLS_FIRST_BYTE:
                await counted.loop.connect_accepted_socket(
                    self._protocol,
                    connection,
                    ssl=self._context,
                    ssl_handshake_timeout=self._connections.headers_timeout,
                    ssl_shutdown_timeout=GOODBYE_TIMEOUT,
                )
                is_passed_on = True
            elif first:
                async with asyncio.timeout(GOODBYE_TIMEOUT):
                    await _reject_unencrypted(connection)
        except (OSError, TimeoutError):
            pass  # Errors of clients are not logged, since there may be a thousand per second.
        finally:
            self._connections.remove(counted)
            if not is_passed_on:
                connection.close()


async def _reject_unencrypted(connection: socket.socket) -> None:
    """Answer an unencrypted request with an error that explains that the port requires TLS."""
    loop = asyncio.get_running_loop()
    body = json.dumps(PROBLEM).encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/problem+json\r\nContent-Length: {len(body)}\r\n"
    await loop.sock_sendall(connection, f"{head}Connection: close\r\n\r\n".encode() + body)
    connection.shutdown(socket.SHUT_WR)
    unread = MAX_UNREAD
    while unread > 0 and (data := await loop.sock_recv(connection, 65536)):
        unread -= len(data)


class WebSockets(WebSocketsSansIOProtocol):
    """Uvicorn's WebSockets, for which a complete rejection completes the handshake.

    Uvicorn itself logs an error after each rejection with a body.
    """

    async def send(self, message: ASGISendEvent) -> None:
        """Send a message of the application. An agent may send large frames after its hello was answered."""
        await super().send(message)
        self.handshake_complete = self.handshake_complete or self.close_sent
        if message["type"] == "websocket.send" and self.conn.max_message_size == MAX_HELLO_SIZE:
            self.conn.max_message_size = MAX_AGENT_FRAME_SIZE

    def handle_ping(self) -> None:
        """Answer a ping. End the connection of a peer that sends pings and reads no answer."""
        if self.transport.get_write_buffer_size() > MAX_UNREAD_PONGS:
            self.transport.abort()
            return
        super().handle_ping()


class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handling, which calls ``started`` once it listens."""

    def __init__(
        self, app: Any, connections: Connections, started: Callable[[], None], certificate: Certificate | None = None
    ) -> None:
        config = uvicorn.Config(
            app,
            http=connections.protocol_class(),
            ws=WebSockets,
            lifespan="off",
            access_log=False,
            log_config=None,  # the daemon's own logging is used
            log_level="warning",
            timeout_graceful_shutdown=SHUTDOWN_GRACE,
            timeout_keep_alive=IDLE_TIMEOUT,
            ws_per_message_deflate=False,
            backlog=ACCEPTS_PER_TURN,
            proxy_headers=False,
        )
        super().__init__(config)
        self._on_started, self._connections, self._certificate = started, connections, certificate

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets: as uvicorn does without TLS, else by servers that do the TLS handshake themselves."""
        if self._certificate is None:
            await super().startup(sockets)
            for server in self.servers:
                raise_backlog(server)
        else:
            await super().startup([])
            for listener in sockets or ():
                tls_server = TlsServer(self._certificate.context, self._connections, self._make_protocol)
                tls_server.start(listener)
                self.servers.append(tls_server)  # type: ignore[arg-type]
        self._on_started()

    def _make_protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol
