"""The agents that are connected: what each is sent, and whether it is still there."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import count
from typing import Any, Protocol

from koalapy.model.request import ClusterName
from koalapy.protocol import messages as wire

CHECKS_PER_TIMEOUT = 4
"""How often, in the time after which silence means that an agent is gone, it is seen whether it is silent."""
MAX_OVERSLEEP = 1.0
"""Waking so many seconds later than we wanted to, we were asleep, and it was us who did not listen."""
MAX_UNREAD = 64 * 1024 * 1024
"""Characters that wait for an agent to read them, of what may be dropped."""
_sequence = count(1)


class Connection(Protocol):
    """One open WebSocket, as the hub sees it."""

    def frames(self) -> AsyncIterator[str]: ...

    async def send(self, frame: str) -> None: ...

    async def close(self, reason: str) -> None: ...


class Session:
    """Messages out in batches, in order; and how long nothing came in, as far as anybody listened."""

    def __init__(self, cluster: str, connection: Connection, hello: wire.Hello, max_unread: int = MAX_UNREAD) -> None:
        """``max_unread``: characters that may wait for an agent that does not read."""
        self._max_unread = max_unread
        self.cluster = cluster
        self.connection = connection
        self.hello = hello
        self.ready = False
        """Whether commands may be sent."""
        self.silence = 0.0
        """Seconds."""
        self._heard_at = asyncio.get_running_loop().time()
        self.hangs = False
        """Whether it was asked in vain, and not heard since."""
        self._awaited = False
        """Whether jobs wait for its cluster's nodes."""
        self._renewal: int | None = None
        """A question for a renewal that is answered once its inventory has been taken in."""
        self._heard = asyncio.Event()
        self._busy = False
        self._asked: dict[int, float] = {}
        self._queue: list[Any] = []
        self._offered = self._sending = 0
        """Characters of what was offered, in the queue and on its way."""
        self._wake = asyncio.Event()

    @property
    def who(self) -> str:
        """The agent, for people."""
        return f"process {self.hello.pid} on {self.hello.host}"

    def start(self, messages: Iterable[Any]) -> None:
        """Its inventory has been taken in: commands may be sent, first those that wait."""
        self.ready = True
        if self._renewal is not None:
            self.renew_lease(self._renewal)
        if self._awaited:
            self._probe(look=False)
        self.put(messages)

    def put(self, messages: Iterable[Any]) -> None:
        self._queue.extend(messages)
        self._wake.set()

    def offer(self, message: wire.FromDaemon) -> bool:
        """Put what is not kept and not repeated; False when too much waits already, as for one who does not read."""
        size = len(wire.frame(wire.from_daemon, [message]))
        if self._offered + self._sending + size > self._max_unread:
            return False
        self._offered += size
        self.put([message])
        return True

    def renew_lease(self, number: int) -> None:
        """Answer a question for a renewal, once the scheduler counts the cluster as in reach: until then it may give up
        components that are not renewed."""
        if self.ready:
            self.offer(wire.LeaseRenewed(number=number))
        else:
            self._renewal = number

    async def pump(self) -> None:
        """Send what is put, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages, self._queue = self._queue, []
            self._sending, self._offered = self._offered, 0
            for frame in wire.command_frames(messages):
                await self.connection.send(frame)
                await asyncio.sleep(0)  # other tasks run, though the frame was taken at once
            self._sending = 0

    # Whether it is there

    async def listen(self, frames: AsyncIterator[str]) -> AsyncIterator[str]:
        """The frames as they come, with note taken of that."""
        async for frame in frames:
            self.silence, self.hangs = 0.0, False
            self._heard_at = asyncio.get_running_loop().time()
            self._heard.set()
            self._busy = True
            yield frame
            self._busy = False

    @property
    def heard_ago(self) -> float:
        """Seconds since the last frame at most: leases may have been renewed until then."""
        return min(self.silence, asyncio.get_running_loop().time() - self._heard_at)

    def end(self) -> None:
        """Nobody need wait for it any more."""
        self._heard.set()

    async def silent(self, timeout: float) -> None:
        """Wait until nothing was heard for so many seconds though we listened; it is asked meanwhile."""
        loop = asyncio.get_running_loop()
        pause = timeout / CHECKS_PER_TIMEOUT
        while self.silence < timeout:
            began = loop.time()
            await asyncio.sleep(pause)
            # What came while we slept, or did something else, waits to be read.
            if self._busy or loop.time() - began > pause + MAX_OVERSLEEP:
                continue
            self.silence += pause
            self._probe(look=False)

    async def answers(self, timeout: float) -> bool:
        """Whether the agent says anything within so many seconds, being asked."""
        if self._busy:
            return True
        self._heard.clear()
        self._probe(look=False)
        try:
            async with asyncio.timeout(timeout):
                await self._heard.wait()
        except TimeoutError:
            self.hangs = True
        return not self.hangs

    # What it knows

    def jobs_wait(self, *, awaited: bool) -> None:
        """Have it look for free nodes more often while jobs wait for them: told at once when that begins, and by every
        question whether it is there.
        """
        begins = awaited and not self._awaited
        self._awaited = awaited
        if begins and self.ready:
            self._probe(look=False)

    def ask_to_confirm(self, now: float) -> None:
        """Have it look afresh, and say when all it knows is told."""
        self._asked[self._probe(look=True)] = now

    def confirmed(self, sequence: int) -> float | None:
        """As of when all is told that was known; None for an answer to nothing, or to a question of no such weight."""
        return self._asked.pop(sequence, None)

    def _probe(self, *, look: bool) -> int:
        probe = wire.Probe(sequence=next(_sequence), look=look, awaited=self._awaited)
        self.put([probe])
        return probe.sequence


class Sessions:
    """The session of each connected agent by cluster; sends what the engine decides to those that are ready."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sessions: dict[ClusterName, Session] = {}
        self._awaited: frozenset[ClusterName] = frozenset()
        """Clusters for whose nodes jobs wait."""

    def get(self, cluster: ClusterName) -> Session | None:
        return self._sessions.get(cluster)

    def add(self, session: Session) -> None:
        """Make a session its cluster's, in place of an earlier one."""
        self._sessions[session.cluster] = session
        session.jobs_wait(awaited=session.cluster in self._awaited)

    def remove(self, session: Session) -> bool:
        """Remove a session; return False if it is not its cluster's any more."""
        if self._sessions.get(session.cluster) is not session:
            return False
        del self._sessions[session.cluster]
        return True

    def versions(self) -> dict[ClusterName, str]:
        """Return the versions of the agents that are connected."""
        return {cluster: session.hello.version for cluster, session in self._sessions.items()}

    def send(self, cluster: ClusterName, messages: Iterable[Any]) -> None:
        """Send commands; those of an agent that is not ready stay in the outbox."""
        if (session := self._sessions.get(cluster)) is not None and session.ready:
            session.put(messages)

    def request_confirmation(self, cluster: ClusterName) -> None:
        """Have an agent tell all it knows, and then that it has."""
        if (session := self._sessions.get(cluster)) is not None and session.ready:
            session.ask_to_confirm(self._clock())

    def set_awaited_clusters(self, clusters: frozenset[ClusterName]) -> None:
        """Have the agents of these clusters, and of no others, look for free nodes more often."""
        changed, self._awaited = clusters ^ self._awaited, clusters
        for cluster in changed:
            if (session := self._sessions.get(cluster)) is not None:
                session.jobs_wait(awaited=cluster in clusters)

    def offer(self, cluster: ClusterName, message: wire.FromDaemon) -> bool:
        """Send a message that is not kept; return False if the agent is away or does not read."""
        session = self._sessions.get(cluster)
        return session is not None and session.offer(message)

    async def close(self) -> None:
        for session in list(self._sessions.values()):
            await session.connection.close("the daemon is shutting down")
