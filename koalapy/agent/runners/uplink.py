"""The agent's connection to the daemon: reconnects after every break, sends messages in order and in batches."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from functools import partial
from urllib.parse import urlsplit

import structlog
from websockets import CloseCode
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from koalapy.protocol import messages as wire
from koalapy.protocol.frames import MAX_FRAME_SIZE, encode_frame, encode_frames
from koalapy.system.clock import SYSTEM_CLOCK, Clock
from koalapy.system.tls import SYSTEM_TRUST, Trust, explain_tls_error

log = structlog.get_logger()

BATCH_DELAY = 0.005
BATCH_SIZE = 256
"""Messages."""
PING_INTERVAL, PING_TIMEOUT = 10.0, 15.0
"""Seconds. Pings detect a daemon whose host has failed, since its connections are never closed."""
MIN_RECONNECT_PAUSE, MAX_RECONNECT_PAUSE = 0.2, 5.0


class Uplink:
    """The connection: sends a hello, delivers received messages, and sends queued ones."""

    def __init__(
        self,
        url: str,
        token: str,
        hello: Callable[[], wire.Hello],
        synced: Callable[[], Awaitable[None]] | None = None,
        trust: Trust = SYSTEM_TRUST,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Set up. ``synced`` is awaited before each batch, so that reported events are on the disk."""
        self._trust, self._clock = trust, clock
        self._synced = synced
        self._url, self._token, self._hello = url, token, hello
        self._queue: list[wire.FromAgent] = []
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        self.online = asyncio.Event()
        self.online_since = float("-inf")
        """Start of the current or last connection (monotonic)."""
        self._complained = self._welcomed = False

    def send_soon(self, message: wire.FromAgent, *, urgent: bool = False) -> None:
        """Queue a message. Drop it without a connection, since the inventory contains its information."""
        if not self.online.is_set():
            return
        self._queue.append(message)
        self._wake.set()
        if urgent or len(self._queue) >= BATCH_SIZE:
            self._full.set()

    async def keep_connected(self, received: Callable[[wire.FromDaemon], None], lost: Callable[[], None]) -> None:
        """Stay connected until cancelled; call ``lost`` after every break."""
        pause = MIN_RECONNECT_PAUSE
        while True:
            self._welcomed = False
            try:
                headers = {"Authorization": f"Bearer {self._token}"}
                async with connect(
                    self._url,
                    additional_headers=headers,
                    ssl=self._trust.create_context() if self._url.startswith("wss:") else None,
                    compression=None,
                    max_size=MAX_FRAME_SIZE,
                    proxy=None,
                    ping_interval=PING_INTERVAL,
                    ping_timeout=PING_TIMEOUT,
                ) as socket:
                    await self._converse(socket, received)
                self._complain("the daemon closed the connection")
            except (OSError, InvalidHandshake, InvalidURI, ConnectionClosed, TimeoutError, ValueError) as error:
                self._complain(_reason(error, self._url))
            finally:
                self.online.clear()
                self._queue.clear()
                lost()
            if self._welcomed:  # back off while the daemon rejects the agent
                pause = MIN_RECONNECT_PAUSE
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # agents must not reconnect all at once
            pause = min(MAX_RECONNECT_PAUSE, pause * 2)

    def _complain(self, reason: str) -> None:
        """Log once for each interruption why the daemon cannot be reached."""
        if not self._complained:
            log.warning("cannot reach the daemon", action="daemon-away", url=self._url, reason=reason)
            self._complained = True

    async def _converse(self, socket: ClientConnection, received: Callable[[wire.FromDaemon], None]) -> None:
        """Exchange messages with the daemon on one connection until it closes; send the hello first."""
        self._queue.append(self._hello())
        self.online_since = self._clock.monotonic()
        self.online.set()
        self._full.set()
        self._wake.set()
        sender = asyncio.create_task(self._send_batches(socket))
        try:
            async for received_frame in socket:
                for message in wire.from_daemon.validate_json(received_frame):
                    if message.type == "welcome":
                        self._welcomed = True
                        if self._complained:
                            log.info("connected to the daemon again", action="daemon-back", url=self._url)
                            self._complained = False
                    received(message)
        except asyncio.CancelledError:
            await socket.close(CloseCode.GOING_AWAY, "the agent is shutting down")
            raise
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _send_batches(self, socket: ClientConnection) -> None:
        """Send queued messages in batches until cancelled.

        A batch without an urgent message waits ``BATCH_DELAY`` seconds. Reported events must be on the disk.
        """
        while True:
            await self._wake.wait()
            if not self._full.is_set():
                try:
                    async with asyncio.timeout(BATCH_DELAY):
                        await self._full.wait()
                except TimeoutError:
                    pass
            self._wake.clear()
            self._full.clear()
            batch, self._queue = self._queue, []
            if batch:
                if self._synced is not None:
                    await self._synced()
                for frame in encode_frames(batch, partial(encode_frame, wire.from_agent)):
                    await socket.send(frame)


def _reason(error: Exception, url: str) -> str:
    """Return why there is no connection, with detail and hint if the daemon rejected it."""
    if tls_problem := explain_tls_error(error, urlsplit(url).hostname or ""):
        return f"{tls_problem[0]}: {tls_problem[1]}"
    if isinstance(error, InvalidStatus):
        try:
            problem = json.loads(error.response.body or b"")
            return f"{problem['detail']}: {problem['hint']}"
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
    return str(error) or type(error).__name__
