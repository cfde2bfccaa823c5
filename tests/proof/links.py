"""Connections in memory: of agents to the daemon, and of runners to agents. A schedule cuts and delays them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextvars import copy_context
from random import Random
from typing import Any

from websockets.exceptions import ConnectionClosedError

from koalapy.agent.runners import uplink

LATENCY_S = 0.002
GAP_S = 1e-6
"""Seconds between two frames, since timers of the same time run in any order."""


class Uplink:
    """One connection of an agent to the daemon: the agent's socket, and the connection that the daemon serves."""

    def __init__(self, path: "Path") -> None:
        self._path = path
        self._to_daemon: asyncio.Queue[str | None] = asyncio.Queue()
        self._to_agent: asyncio.Queue[str | None] = asyncio.Queue()
        self.is_broken = False

    # The agent's side

    async def send(self, frame: str | bytes) -> None:
        if self.is_broken:
            raise ConnectionClosedError(None, None)
        self._path.carry(self._to_daemon, str(frame) if isinstance(frame, str) else frame.decode(), self)

    async def __aiter__(self) -> AsyncIterator[str]:
        while (frame := await self._to_agent.get()) is not None:
            yield frame
        if self.is_broken:
            raise ConnectionClosedError(None, None)

    # The daemon's side

    async def frames(self) -> AsyncIterator[str]:
        while (frame := await self._to_daemon.get()) is not None:
            yield frame

    async def close(self, *_: object) -> None:
        self.end()

    def end_broken(self) -> None:
        self.end(is_broken=True)

    def end(self, *, is_broken: bool = False) -> None:
        """End the connection on both sides; data under way is lost."""
        self.is_broken = self.is_broken or is_broken
        self._to_daemon.put_nowait(None)
        self._to_agent.put_nowait(None)


class DaemonSide:
    """What the hub gets of a connection."""

    def __init__(self, connection: Uplink, path: "Path") -> None:
        self._connection, self._path = connection, path
        self.frames, self.close = connection.frames, connection.close

    async def send(self, frame: str) -> None:
        self._path.sent.append(frame)
        self._path.carry(self._connection._to_agent, frame, self._connection)


class Path:
    """The way between one agent and the daemon."""

    def __init__(self, random: Random, serve: Callable[[Any], Any]) -> None:
        """``serve`` is called with the daemon's side of each connection; it raises ``OSError`` without a daemon."""
        self._random, self._serve = random, serve
        self.context = copy_context()
        """That of the daemon, which outlives the agents."""
        self.is_cut = False
        self.slowness_s = 0.0
        """Longest additional delay of a frame."""
        self.live: set[Uplink] = set()
        self.sent: list[str] = []
        """Frames of all daemons to the agent."""
        self._free_at = 0.0

    def carry(self, queue: asyncio.Queue[str | None], frame: str, connection: Uplink) -> None:
        """Deliver a frame in order; a cut path drops it, and the connection breaks later."""
        if self.is_cut:
            return
        loop = asyncio.get_running_loop()
        delay = LATENCY_S + (self._random.uniform(0, self.slowness_s) if self.slowness_s else 0.0)
        self._free_at = max(self._free_at + GAP_S, loop.time() + delay)
        loop.call_at(self._free_at, self._deliver, queue, frame, connection)

    def _deliver(self, queue: asyncio.Queue[str | None], frame: str, connection: Uplink) -> None:
        if connection in self.live and not connection.is_broken:
            queue.put_nowait(frame)

    def cut(self) -> None:
        """Drop all frames from now on; the agent notices after the timeout of its pings."""
        self.is_cut = True
        for connection in self.live:
            asyncio.get_running_loop().call_later(uplink.PING_TIMEOUT, connection.end_broken)

    def heal(self) -> None:
        self.is_cut = False

    def break_all(self) -> None:
        """Break all connections at once, as the end of either process does."""
        for connection in list(self.live):
            connection.end(is_broken=True)

    def repeat_commands(self, count: int) -> None:
        """Deliver the commands among the first ``count`` frames once more, in the present connections."""
        for frame in self.sent[:count]:
            commands = [message for message in json.loads(frame) if message["type"] in ("submit", "open", "stop")]
            for connection in self.live if commands else ():
                self.carry(connection._to_agent, json.dumps(commands), connection)

    def connect(self) -> "Connecting":
        return Connecting(self)


class Connecting:
    """An attempt of an agent to connect."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = Uplink(path)
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Uplink:
        await asyncio.sleep(LATENCY_S)
        if self._path.is_cut:
            raise OSError("unreachable")
        self._path.live.add(self._connection)
        try:
            serving = self._path._serve(DaemonSide(self._connection, self._path))
            self._serving = asyncio.create_task(serving, context=self._path.context.copy())
        except OSError:
            self._path.live.discard(self._connection)
            raise
        return self._connection

    async def __aexit__(self, *_: object) -> None:
        self._connection.end()
        self._path.live.discard(self._connection)
