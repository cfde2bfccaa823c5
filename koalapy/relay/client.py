"""Control a relay from the daemon or an agent: asyncio's side of the control socket."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from koalapy.runner.folders import short_socket_path

log = structlog.get_logger()

MAX_LINE = 64 * 1024 * 1024
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 5.0
HEARTBEAT_INTERVAL_S, ANSWER_TIMEOUT_S = 5.0, 15.0
"""Pause between two questions to an idle relay, and the time after which one that does not answer counts as away."""


class RelayRejected(Exception):
    """The relay has rejected a request."""


async def log_rejection(change: Awaitable[None]) -> None:
    """Wait for a change of a relay's attempts, and log it if the relay rejects it: relayed links fail then."""
    try:
        await change
    except RelayRejected as error:
        log.error("the relay has rejected an attempt", action="relay-rejected", reason=str(error))


class RelayClient:
    """A connection to a relay's control socket that is established again whenever it breaks."""

    def __init__(
        self, path: Path, state: Callable[[], dict[str, Any]], on_event: Callable[[dict[str, Any]], None]
    ) -> None:
        """``state`` returns keys and all live attempts; it is sent first on each connection.

        ``on_event`` gets the relay's events: ``lost`` (attempt, why, and via: the lost ``Via``),
        ``removed`` (attempt, streams, bytes), ``away`` when the connection ends, and ``hub`` (connected, why) of a
        head. Each connection begins with ``state``, the relay's answer: ``lost``, and of a head ``hub_connected``,
        ``certificate``, and the addresses ``listen`` and ``listen_for_heads``. The attempts in it are reported as
        ``lost``, too.
        """
        self._path, self._state, self._on_event = path, state, on_event
        self._writer: asyncio.StreamWriter | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self.connected = asyncio.Event()
        """Set while the relay knows the state."""

    async def keep_connected(self) -> None:
        """Stay connected until cancelled."""
        pause, is_warned = FIRST_PAUSE_S, False
        while True:
            try:
                await self._converse()
                reason = "it closed the connection"
                pause = FIRST_PAUSE_S
            except (OSError, ValueError, KeyError, TypeError, RelayRejected) as error:
                reason = str(error)
            finally:
                self._disconnect()
            if not is_warned or pause == FIRST_PAUSE_S:
                log.warning("cannot reach the relay", action="relay-away", path=str(self._path), reason=reason)
                is_warned = True
            await asyncio.sleep(pause)
            pause = min(MAX_PAUSE_S, pause * 2)

    async def add(self, entry: dict[str, Any]) -> None:
        """Add an attempt. Without a connection do nothing: the next state contains it. Raise ``RelayRejected``."""
        await self._change("add", attempt=entry)

    async def remove(self, attempt: str) -> None:
        """Remove an attempt, which resets its streams. Without a connection do nothing."""
        await self._change("remove", attempt=attempt)

    async def metrics(self) -> str:
        """Return the metrics as Prometheus text; empty without a connection."""
        with suppress(ConnectionError):
            return str((await self._request("metrics"))["text"])
        return ""

    async def _change(self, kind: str, **fields: Any) -> None:
        """Send a change, also while the relay reads a state, which was made before the change."""
        with suppress(ConnectionError):
            await self._request(kind, **fields)

    async def _converse(self) -> None:
        """Send the state, and handle what the relay sends until it closes the connection."""
        with short_socket_path(self._path) as path:
            reader, self._writer = await asyncio.open_unix_connection(path, limit=MAX_LINE)
        receiving, beating = asyncio.ensure_future(self._receive(reader)), None
        try:
            answer = await self._request("state", **self._state())
            self._on_event({**answer, "t": "state"})
            for attempt, loss in answer["lost"].items():
                self._on_event({"t": "lost", "attempt": attempt, **loss})
            self.connected.set()
            beating = asyncio.ensure_future(self._send_heartbeats())
            await asyncio.wait({receiving, beating}, return_when=asyncio.FIRST_COMPLETED)
            for task in (beating, receiving):
                if task.done():
                    task.result()
        finally:
            receiving.cancel()
            if beating is not None:
                beating.cancel()

    async def _send_heartbeats(self) -> None:
        """Ask the relay regularly. Raise ``ConnectionError`` once it does not answer in time."""
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            with suppress(RelayRejected):  # a relay of an older version does not know the question
                await self._request("describe")

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            if message["t"] not in ("done", "error", "metrics"):
                self._on_event(message)
                continue
            answer = self._answers.pop(message.get("id"), None)
            if answer is not None and not answer.done():
                answer.set_result(message)
                await asyncio.sleep(0)  # a state counts before the events that follow it, even in one piece with it
        self._disconnect()

    async def _request(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return the relay's answer.

        Raise ``RelayRejected``, or ``ConnectionError`` if the connection breaks or the relay hangs.
        """
        if self._writer is None:
            raise ConnectionResetError("the relay is not connected")
        self._count += 1
        answer = self._answers[self._count] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps({"t": kind, "id": self._count, **fields}).encode() + b"\n")
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                message: dict[str, Any] = await answer
        except TimeoutError as error:
            self._disconnect()
            raise ConnectionResetError(f"it has not answered for {ANSWER_TIMEOUT_S:g} s") from error
        if message["t"] == "error":
            raise RelayRejected(message["why"])
        return message

    def _disconnect(self) -> None:
        if self.connected.is_set():
            self.connected.clear()
            self._on_event({"t": "away"})
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("the relay has closed the connection"))
        self._answers.clear()
