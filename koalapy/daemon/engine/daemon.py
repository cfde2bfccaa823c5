"""Run a daemon: start its parts in order, serve until a signal, and stop in order.

A watchdog detects from a separate thread that the event loop hangs. Then a service manager restarts the daemon.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
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
from koalapy.model.errors import StoreUnavailable
from koalapy.ports import Store
from koalapy.protocol.frames import MAX_AGENT_FRAME_SIZE, MAX_HELLO_SIZE
from koalapy.system.event_loop import ACCEPTS_PER_TURN, raise_backlog
from koalapy.system.process import ServiceManager

log = structlog.get_logger()


MAX_FRAMES = 8
"""Stack frames in the description of where the loop hangs."""


class Watchdog:
    """A watchdog, in a separate thread, of the event loop in which it is started.

    While the loop runs, it sends heartbeats to the service manager. When the loop hangs, it logs where and sends none.
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
        self._hangs = False

    def start(self) -> None:
        """Watch the running loop."""
        self._answered_at = time.monotonic()
        watched = asyncio.get_running_loop(), threading.get_ident()
        self._thread = threading.Thread(target=self._watch_loop, args=watched, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

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
        elif hung and not hangs:
            log.warning("the daemon's event loop runs again", action="loop-moves")


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
        self._watchdog = Watchdog(self._manager, status)
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
        self._watchdog.start()

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
