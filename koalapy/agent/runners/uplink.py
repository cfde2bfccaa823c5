"""The agent's connection to the daemon, and the questions that the daemon and agents ask each other over it.

It reconnects after every break, and sends messages in order and in batches.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import structlog
from pydantic import ValidationError
from websockets import CloseCode
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.protocol import messages as wire
from koalapy.protocol.frames import MAX_FRAME_SIZE, encode_frame, join_frames
from koalapy.protocol.messages import Answer, Ask
from koalapy.system.clock import SYSTEM_CLOCK, Clock
from koalapy.system.tls import SYSTEM_TRUST, Trust, explain_tls_error

log = structlog.get_logger()

BATCH_DELAY = 0.005
BATCH_SIZE = 256
"""Messages."""
MAX_UNREAD = 16 * 1024 * 1024
"""Characters of droppable messages of one component that wait for a daemon to read them."""
OPEN_TIMEOUT = 10.0
"""Seconds for a daemon to accept a connection."""
PING_INTERVAL, PING_TIMEOUT = 10.0, 15.0
"""Seconds. Pings detect a failure of the daemon's host, which closes no connections."""
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
        other_urls: Sequence[str] = (),
    ) -> None:
        """Set up. ``synced`` is awaited before each batch, so that reported events are on the disk.

        ``other_urls``: those of standby daemons, which are tried in turn.
        """
        self._trust, self._clock = trust, clock
        self._synced = synced
        self._urls, self.position = (url, *other_urls), 0
        """The addresses of all daemons, and the index of the present or next one."""
        self._token, self._hello = token, hello
        self._queue: list[str] = []
        """Encoded messages."""
        self._offered: Counter[str] = Counter()
        """Characters of droppable messages that are queued or being sent, by the sending component."""
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        self.online = asyncio.Event()
        self.online_since = float("-inf")
        """Start of the current or last connection (monotonic)."""
        self._complained = self._welcomed = False

    @property
    def _url(self) -> str:
        return self._urls[self.position]

    def send_soon(self, message: wire.FromAgent, *, urgent: bool = False) -> None:
        """Queue a message. Drop it without a connection, since the inventory contains its information."""
        if self.online.is_set():
            self._queue_text(_encode(message), urgent=urgent)

    def offer_message(self, message: wire.FromAgent, sender: str) -> bool:
        """Queue a message of a component's runner that may be dropped. Return False if too much of it waits already."""
        if self.online.is_set():
            text = _encode(message)
            if self._offered[sender] + len(text) > MAX_UNREAD:
                return False
            self._offered[sender] += len(text)
            self._queue_text(text, urgent=True)
        return True

    def _queue_text(self, text: str, *, urgent: bool) -> None:
        self._queue.append(text)
        self._wake.set()
        if urgent or len(self._queue) >= BATCH_SIZE:
            self._full.set()

    async def keep_connected(self, received: Callable[[wire.FromDaemon], None], lost: Callable[[], None]) -> None:
        """Stay connected until cancelled; call ``lost`` after every break."""
        pause, failures = MIN_RECONNECT_PAUSE, 0
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
                    open_timeout=OPEN_TIMEOUT,
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
                self._offered.clear()
                lost()
            if self._welcomed:  # back off while the daemon rejects the agent
                pause, failures = MIN_RECONNECT_PAUSE, 0
            else:
                failures += 1
                self.position = (self.position + 1) % len(self._urls)
                if failures % len(self._urls):
                    continue  # the other daemons at once
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # agents must not reconnect all at once
            pause = min(MAX_RECONNECT_PAUSE, pause * 2)

    def _complain(self, reason: str) -> None:
        """Log once for each interruption why the daemon cannot be reached."""
        if not self._complained:
            log.warning("cannot reach the daemon", action="daemon-away", url=self._url, reason=reason)
            self._complained = True

    async def _converse(self, socket: ClientConnection, received: Callable[[wire.FromDaemon], None]) -> None:
        """Exchange messages with the daemon on one connection until it closes; send the hello first."""
        await socket.send(encode_frame(wire.from_agent, [self._hello()]))
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
            sending = self._offered.copy()
            if batch:
                if self._synced is not None:
                    await self._synced()
                for frame in join_frames(batch):
                    await socket.send(frame)
            self._offered -= sending


def _encode(message: wire.FromAgent) -> str:
    return encode_frame(wire.from_agent, [message])[1:-1]


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


ANSWER_TIMEOUT = 20.0
"""Seconds that another agent has to answer while this one is connected."""
RECONNECT_ALLOWANCE = 120.0
"""Seconds after a reconnect in which other agents may still be offline: a daemon restart disconnects all."""
REPEAT_INTERVAL = 5.0
"""Seconds after which a question without an answer is sent again."""

ASKER = "asker"
"""Key of every payload: the asking agent's cluster, set by the daemon; empty for the daemon itself."""
Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, object]]]
"""Answers the payload of a question. Raises ``SiteError`` if it cannot."""


class Questions:
    """The questions of this agent to other agents, and its answers to other agents and the daemon."""

    def __init__(self, uplink: Uplink, handlers: Mapping[str, Handler], clock: Clock = SYSTEM_CLOCK) -> None:
        """Set up. ``handlers`` by the kind of question that each answers."""
        self._uplink, self._handlers, self._clock = uplink, handlers, clock
        self._asking: dict[str, asyncio.Future[Answer]] = {}
        self._answering: dict[str, asyncio.Task[None]] = {}

    @property
    def is_recently_connected(self) -> bool:
        """Return whether other agents may still be reconnecting, since this one did so just now."""
        return self._clock.monotonic() - self._uplink.online_since < RECONNECT_ALLOWANCE

    async def ask_cluster(
        self, cluster: str, kind: str, payload: Mapping[str, object], timeout: float = ANSWER_TIMEOUT
    ) -> dict[str, Any]:
        """Return the answer of another cluster's agent.

        Raise ``SiteUnavailable`` if it does not answer, ``SiteRejected`` if it rejects the question. Time without a
        connection does not count towards the timeout.
        """
        ident = uuid4().hex
        question = Ask(ident=ident, what=kind, payload=dict(payload), cluster=cluster)
        answer_future = self._asking[ident] = asyncio.get_running_loop().create_future()
        try:
            for _ in range(max(1, round(timeout / REPEAT_INTERVAL))):
                await self._uplink.online.wait()
                self._uplink.send_soon(question, urgent=True)
                finished, _ = await asyncio.wait((answer_future,), timeout=min(REPEAT_INTERVAL, timeout))
                if finished:
                    break
            else:
                raise SiteUnavailable(f"{cluster} has not answered for {timeout:g} s")
        finally:
            del self._asking[ident]
        answer = answer_future.result()
        if answer.fault in (SiteFault.UNAVAILABLE, SiteFault.LOST):
            raise SiteUnavailable(answer.error or "no answer")
        if answer.error:
            raise SiteRejected(answer.error, fault=answer.fault or SiteFault.REFUSED)
        return dict(answer.payload)

    def receive_answer(self, message: Answer) -> None:
        """Pass an answer to the call that waits for it. Ignore late ones."""
        waiting = self._asking.get(message.ident)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def answer_question(self, message: Ask) -> None:
        """Answer a question, however long that takes. Ignore repetitions of a question that is being answered."""
        if message.ident not in self._answering:
            task = asyncio.create_task(self._send_answer(message))
            self._answering[message.ident] = task
            task.add_done_callback(lambda task: self._finish_answer(message, task))

    def _finish_answer(self, message: Ask, task: "asyncio.Task[None]") -> None:
        """Unregister an answered question. If its handler crashed, log that and send an error as the answer."""
        del self._answering[message.ident]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error(
                "question failed by an error in the agent", action="question-failed", what=message.what, exc_info=error
            )
            text = f"{type(error).__name__}: {error}"
            refusal = Answer(ident=message.ident, cluster=message.cluster, error=text, fault=SiteFault.REFUSED)
            self._uplink.send_soon(refusal, urgent=True)

    async def stop_answering(self) -> None:
        """Cancel all answers that are being computed, and wait for their end."""
        for task in list(self._answering.values()):
            task.cancel()
        await asyncio.gather(*self._answering.values(), return_exceptions=True)

    async def _send_answer(self, message: Ask) -> None:
        """Run the handler of a question and send its answer, or the error that it raised."""
        answer = Answer(ident=message.ident, cluster=message.cluster)
        handler = self._handlers.get(message.what)
        try:
            if handler is None:
                raise SiteRejected(
                    f"this agent does not support the question {message.what!r}", fault=SiteFault.UNKNOWN
                )
            answer = answer.model_copy(
                update={"payload": dict(await handler({**message.payload, ASKER: message.cluster}))}
            )
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            answer = answer.model_copy(update={"error": f"{field}: {first['msg']}", "fault": SiteFault.INVALID})
        except SiteError as error:
            text = f"{error.message}: {error.hint}" if error.hint else error.message
            fault = error.fault if isinstance(error, SiteRejected) else SiteFault.UNAVAILABLE
            answer = answer.model_copy(update={"error": text, "fault": fault})
        except OSError as error:
            log.warning("question failed", action="question-failed", what=message.what, reason=str(error))
            answer = answer.model_copy(update={"error": error.strerror or str(error), "fault": SiteFault.UNAVAILABLE})
        self._uplink.send_soon(answer, urgent=True)
