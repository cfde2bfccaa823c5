"""Run a daemon: start its parts in order, serve until a signal, and stop in order.

A watchdog detects from a separate thread that the event loop hangs. Then a stand-in answers clients.
"""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from koalapy import __version__
from koalapy.daemon.agents.embedded import EmbeddedAgents
from koalapy.daemon.agents.hub import Hub
from koalapy.daemon.engine.database import query
from koalapy.daemon.engine.duties import Duties, Duty
from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.engine.timeouts import DEFAULT_TIMEOUTS, DaemonTimeouts
from koalapy.daemon.listener.certificate import Certificate
from koalapy.daemon.listener.connections import Connections, TlsServer
from koalapy.model.errors import ProblemCode, StoreUnavailable
from koalapy.ports import Store
from koalapy.protocol.frames import MAX_AGENT_FRAME_SIZE, MAX_HELLO_SIZE
from koalapy.system.event_loop import ACCEPTS_PER_TURN, raise_backlog
from koalapy.system.process import ServiceManager

log = structlog.get_logger()


POLL_INTERVAL = 0.2
"""Seconds between two checks whether the loop accepts connections again."""
MAX_REQUEST_SIZE = 65536
"""Maximum size of a request's headers in bytes."""
HEAD = """HTTP/1.1 503 Service Unavailable
Content-Type: application/problem+json
Content-Length: {length}
Retry-After: 5
Cache-Control: no-store
X-Content-Type-Options: nosniff
Connection: close

"""


class StandIn:
    """A thread that serves new connections on the daemon's port; earlier connections wait for the loop."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext | None = None,
        timeouts: DaemonTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        """``context``: the TLS context of the port; None for a port without TLS."""
        self._listener, self._context, self._timeout_s = listener.dup(), context, timeouts.stand_in_request_s
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self, since: float) -> None:
        """Start answering. ``since``: the monotonic time at which the loop last ran."""
        self._stopping.clear()
        self._thread = threading.Thread(target=self._serve_requests, args=(since,), name="stand-in", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop answering, so that the loop accepts new connections."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        self.stop()
        self._listener.close()

    def _serve_requests(self, since: float) -> None:
        """Answer requests one at a time, in a thread, until stopped; the event loop hangs ``since`` a time."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._stopping.is_set():
            if poll.poll(POLL_INTERVAL * 1000):
                with suppress(OSError), self._listener.accept()[0] as connection:
                    connection.settimeout(self._timeout_s)
                    silence = time.monotonic() - since
                    if self._context is None:
                        self._answer_request(connection, silence)
                    else:
                        with self._context.wrap_socket(connection, server_side=True) as encrypted:
                            self._answer_request(encrypted, silence)

    def _answer_request(self, connection: socket.socket, silence: float) -> None:
        """Read a request, and answer that the daemon has hung for ``silence`` seconds."""
        end, request = time.monotonic() + self._timeout_s, b""
        while b"\r\n\r\n" not in request and len(request) < MAX_REQUEST_SIZE and time.monotonic() < end:
            if not (data := connection.recv(8192)):
                return
            request += data
        body = _build_problem(silence)
        head = HEAD.format(length=len(body)).replace("\n", "\r\n").encode()
        connection.sendall(head + (b"" if request.startswith(b"HEAD ") else body))
        connection.shutdown(socket.SHUT_WR)
        # Unread data would reset the connection before the client reads the answer.
        while time.monotonic() < end and connection.recv(8192):
            pass


def _build_problem(silence: float) -> bytes:
    """Return the body of the answer, which has the fields of ``/readyz`` as well."""
    reason = f"the daemon's loop has not moved for {silence:.0f} s"
    answer = {
        "type": "about:blank",
        "title": "Service Unavailable",
        "status": 503,
        "code": ProblemCode.NOT_READY,
        "detail": reason,
        "field": "",
        "value": None,
        "hint": "its log says where it hangs; a service manager with a watchdog starts it again",
        "ready": False,
        "checks": [{"name": "engine", "cluster": None, "ok": False, "needed": True, "reason": reason}],
    }
    return json.dumps(answer).encode()


MAX_FRAMES = 8
"""Stack frames in the description of where the loop hangs."""


class Watchdog:
    """A watchdog, in a separate thread, of the event loop in which it is started.

    While the loop runs, it sends heartbeats to the service manager. While the loop hangs, it logs where, and a stand-in
    answers clients. If the whole process is stopped, heartbeats stop too, and clients run into their timeouts.
    """

    def __init__(
        self, manager: ServiceManager, status: Callable[[], str] = str, timeouts: DaemonTimeouts = DEFAULT_TIMEOUTS
    ) -> None:
        """``status`` returns the state of the daemon in one line for operators; it is called in the loop."""
        self._manager, self._status, self._timeouts = manager, status, timeouts
        self._shown_status = ""
        self._answered_at = self._heartbeat_at = time.monotonic()
        self._awaits_answer = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._stand_in: StandIn | None = None
        self._hangs = False

    def start(self, stand_in: StandIn | None = None) -> None:
        """Watch the running loop; ``stand_in`` answers clients while it hangs."""
        self._answered_at, self._stand_in = time.monotonic(), stand_in
        watched = asyncio.get_running_loop(), threading.get_ident()
        self._thread = threading.Thread(target=self._watch_loop, args=watched, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._stand_in is not None:
            self._stand_in.close()

    def _watch_loop(self, loop: asyncio.AbstractEventLoop, ident: int) -> None:
        """Test in a thread whether the event loop answers. While it does, send heartbeats to the service manager."""
        interval = self._timeouts.watchdog_interval_s
        pause = min(interval, self._manager.interval or interval)
        while True:
            began = time.monotonic()
            if self._stop.wait(pause):
                return
            now = time.monotonic()
            if now - began > pause + self._timeouts.max_oversleep_s:
                self._answered_at = now
            if not self._awaits_answer:
                self._awaits_answer = True
                try:
                    loop.call_soon_threadsafe(self._note_answer)
                except RuntimeError:  # it is closed
                    return
            self._check_silence(now - self._answered_at, ident)
            if (
                not self._hangs
                and self._manager.interval is not None
                and now - self._heartbeat_at >= self._manager.interval
            ):
                self._heartbeat_at = now
                self._manager.send_heartbeat(self._shown_status)

    def _note_answer(self) -> None:
        """Record in the event loop that it runs, and show a changed status to the service manager."""
        self._answered_at, self._awaits_answer = time.monotonic(), False
        if (status := self._status()) != self._shown_status:
            self._shown_status = status
            self._manager.show_status(status)

    def _check_silence(self, silence: float, ident: int) -> None:
        """Log and report when the event loop hangs or runs again, by the seconds without an answer."""
        hangs, hung = silence > self._timeouts.loop_hangs_s, self._hangs
        self._hangs = hangs
        if hangs and not hung:
            seconds, stack = round(silence, 1), describe_stack(ident)
            log.critical("the daemon's event loop hangs", action="loop-hangs", seconds=seconds, where=stack)
            self._shown_status = ""
            self._manager.show_status(f"its loop hangs: {stack}")
            if self._stand_in is not None:
                self._stand_in.start(self._answered_at)
        elif hung and not hangs:
            log.warning("the daemon's event loop runs again", action="loop-moves")
            if self._stand_in is not None:
                self._stand_in.stop()


def describe_stack(ident: int) -> str:
    """Return where a thread is, as file:line function of its innermost calls first."""
    frame = sys._current_frames().get(ident)
    if frame is None:
        return "nowhere"
    stack = traceback.extract_stack(frame)[-MAX_FRAMES:]
    return " < ".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in reversed(stack))


MAX_UNREAD_PONGS = 64 * 1024 * 1024
"""Bytes that wait for a peer, at which its pings are no longer answered."""
SHUTDOWN_GRACE = 3
"""Seconds that open requests have to end when the daemon stops."""


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
            ws_per_message_deflate=False,
            backlog=ACCEPTS_PER_TURN,
            proxy_headers=False,
        )
        super().__init__(config)
        self._on_started = started
        self._connections, self._certificate = connections, certificate

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


class Daemon:
    """The tasks of ``koala serve``."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        hub: Hub,
        app: Any,
        listener: socket.socket,
        connections: Connections,
        agents: EmbeddedAgents,
        announce: Callable[[str], None],
        duties: Sequence[Duty] = (),
        certificate: Certificate | None = None,
        manager: ServiceManager | None = None,
        status: Callable[[], str] = str,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        """``status`` returns the line that the service manager shows.

        ``give_up`` is called last before the process exits without a clean stop.
        """
        self._give_up = give_up
        self._manager = manager or ServiceManager()
        self._watchdog, self._certificate = Watchdog(self._manager, status), certificate
        self._engine = engine
        self._store = store
        self._hub = hub
        self._listener = listener
        self._agents = agents
        self._announce = announce
        self._end = asyncio.Event()
        self._server = HttpServer(app, connections, self._announce_start, certificate)
        self._duties = Duties(engine, store, self._end.set, duties)
        host, port = listener.getsockname()[:2]
        scheme = "http" if certificate is None else "https"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def _announce_start(self) -> None:
        """Start what needs the daemon's address: embedded agents, service manager and watchdog."""
        self._announce(self.url)
        self._agents.start(self.url)
        log.info(
            "the daemon serves", action="daemon-serves", url=self.url, version=__version__, epoch=self._engine.epoch
        )
        self._manager.notify_ready(f"serves {self.url}")
        self._watchdog.start(StandIn(self._listener, self._certificate.context if self._certificate else None))

    async def run(self) -> None:
        """Run until SIGTERM, SIGINT, the loss of the database's lease, or the unexpected end of engine or server."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end.set)
        engine = asyncio.create_task(self._engine.run(), name="engine")
        server = asyncio.create_task(self._server.serve([self._listener]), name="server")
        ended = asyncio.create_task(self._end.wait(), name="end")
        self._duties.start()
        try:
            await asyncio.wait({engine, server, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            await self._shut_down(engine, server)

    async def _shut_down(self, engine: "asyncio.Task[None]", server: "asyncio.Task[None]") -> None:
        """End connections, requests, agents and engine in this order, then release the lease on the database.

        If the database does not answer, exit the process with code 1 instead.
        """
        log.info("the daemon ends", action="daemon-ends")
        self._manager.notify_stopping()
        self._watchdog.stop()
        self._duties.stop()
        self._engine.drain()
        await self._hub.close()
        self._server.should_exit = True
        await asyncio.wait({server}, timeout=SHUTDOWN_GRACE * 2)
        await self._agents.stop()
        self._engine.stop()
        try:
            await engine
            await query(self._store.release_lease)
        except StoreUnavailable as error:
            log.critical(
                "the daemon exits without a clean stop: the database does not answer",
                action="daemon-ends",
                error=error.message,
            )
            self._give_up()
            sys.stderr.flush()
            os._exit(1)  # threads that wait for the database would delay a normal exit
        await server
