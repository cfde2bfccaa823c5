"""Sessions of connected agents: queue their messages, and detect that they stop answering."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from itertools import count
from typing import Any, Protocol

from koalapy.daemon.agents.budgets import Budgets
from koalapy.model.request import ClusterName
from koalapy.protocol import messages as wire
from koalapy.protocol.frames import command_frames, encode_frame, find_plan

CHECKS_PER_TIMEOUT = 4
"""Checks for silence during the time after which a silent agent is disconnected."""
MAX_OVERSLEEP = 1.0
"""If a sleep takes this many seconds longer, the daemon itself was stopped and did not listen."""
MAX_UNREAD = 64 * 1024 * 1024
"""Characters of droppable messages that wait for an agent to read them."""
MAX_QUEUED = 50_000
"""Messages that wait for an agent to read them, before it is disconnected; it gets its commands again."""
CLOSE_TIMEOUT_S = 3.0
"""Time that agents have to read the end of their connections when the daemon stops."""
_sequence = count(1)


class Connection(Protocol):
    """An open WebSocket of an agent."""

    def frames(self) -> AsyncIterator[str]: ...

    async def send(self, frame: str) -> None: ...

    def close(self, reason: str) -> Coroutine[Any, Any, None]: ...


class Session:
    """The session of one connected agent: its outgoing queue, and how long it has been silent."""

    def __init__(self, cluster: str, connection: Connection, hello: wire.Hello, max_unread: int = MAX_UNREAD) -> None:
        """``max_unread``: characters that may wait for an agent that does not read."""
        self._max_unread = max_unread
        self.cluster = cluster
        self.connection = connection
        self.hello = hello
        self.ready = False
        """Whether commands may be sent."""
        self.connected_at = 0.0
        self.silence = 0.0
        """Seconds."""
        self._heard_at = asyncio.get_running_loop().time()
        self.clock_offset: float | None = None
        """Seconds by which the agent's wall clock is ahead of the daemon's, when last reported; None: unknown."""
        self.hangs = False
        """Whether the agent has left a probe unanswered and has sent nothing since."""
        self._awaited = False
        """Whether jobs wait for nodes of the cluster."""
        self._renewal: int | None = None
        """The newest lease renewal, which is to be confirmed once the agent's inventory is applied."""
        self._heard = asyncio.Event()
        self._busy = False
        self._confirmation_times: dict[int, float] = {}
        self._queue: list[Any] = []
        self._offered = self._sending = 0
        """Characters of droppable messages that are queued, and that are being sent."""
        self._wake = asyncio.Event()
        self.large_frames = asyncio.Lock()
        """Held for one turn of the event loop before a large frame is built; all sessions share it."""

    @property
    def process_and_host(self) -> str:
        """The agent's process and host, for messages."""
        return f"process {self.hello.pid} on {self.hello.host}"

    def start_sending(self, messages: Iterable[Any]) -> None:
        """Send ``messages`` and further commands, since the agent's inventory is applied.

        They are all open commands, so they replace the queued ones, which alone are dictionaries.
        """
        self.ready = True
        self._queue = [message for message in self._queue if not isinstance(message, dict)]
        if self._awaited:
            self._send_probe(look=False)
        self.queue_messages(messages)

    def queue_messages(self, messages: Iterable[Any]) -> None:
        self._queue.extend(messages)
        self._wake.set()

    def offer_message(self, message: wire.FromDaemon) -> bool:
        """Queue a message that may be dropped. Return False if too much waits already."""
        size = len(encode_frame(wire.from_daemon, [message]))
        if self._offered + self._sending + size > self._max_unread:
            return False
        self._offered += size
        self.queue_messages([message])
        return True

    def renew_lease(self, number: int) -> None:
        """Confirm a renewal of the lease, the time for which components run without the daemon.

        Wait until the scheduler counts the cluster as reachable: before, it may restart the components elsewhere. The
        confirmation is sent before queued messages, and is never dropped. It replaces that of an earlier renewal.
        """
        self._renewal = number
        self._wake.set()

    async def send_queued(self) -> None:
        """Send queued messages until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages, self._queue = self._queue, []
            self._sending, self._offered = self._offered, 0
            await self._send_renewal()
            frames = command_frames(messages, joins_opens=self.hello.joins_opens)
            has_plans = any(find_plan(message) is not None for message in messages)
            while True:
                if has_plans:
                    async with self.large_frames:
                        await asyncio.sleep(0)
                if (frame := next(frames, None)) is None:
                    break
                await self.connection.send(frame)
                await self._send_renewal()
                await asyncio.sleep(0)  # other tasks run, though the frame was taken at once
            self._sending = 0

    async def _send_renewal(self) -> None:
        if self.ready and self._renewal is not None:
            renewed, self._renewal = wire.LeaseRenewed(number=self._renewal), None
            await self.connection.send(encode_frame(wire.from_daemon, [renewed]))

    async def receive_frames(self, frames: AsyncIterator[str]) -> AsyncIterator[str]:
        """Yield received frames, and note that the agent is not silent."""
        async for frame in frames:
            self.silence, self.hangs = 0.0, False
            self._heard_at = asyncio.get_running_loop().time()
            self._heard.set()
            self._busy = True
            yield frame
            self._busy = False

    @property
    def heard_ago(self) -> float:
        """An upper bound of the seconds since the last frame: leases may have been renewed until then."""
        return min(self.silence, asyncio.get_running_loop().time() - self._heard_at)

    def release_waiters(self) -> None:
        """Wake the tasks that wait for an answer of the agent."""
        self._heard.set()

    async def wait_until_silent(self, timeout: float) -> str:
        """Wait for the heartbeat timeout: ``timeout`` seconds without a message from the agent. Probe it in between.

        End earlier if it reads nothing. Return what it does not do.
        """
        loop = asyncio.get_running_loop()
        pause = timeout / CHECKS_PER_TIMEOUT
        while self.silence < timeout:
            began = loop.time()
            await asyncio.sleep(pause)
            if len(self._queue) > MAX_QUEUED:
                return "does not read what it is sent"
            # Frames that arrived while the daemon was busy or stopped wait to be read.
            if self._busy or loop.time() - began > pause + MAX_OVERSLEEP:
                continue
            self.silence += pause
            self._send_probe(look=False)
        return f"has not answered for {self.silence:g} s"

    async def answers_probe(self, timeout: float) -> bool:
        """Probe the agent, and return whether it sends anything within ``timeout`` seconds."""
        if self._busy:
            return True
        self._heard.clear()
        self._send_probe(look=False)
        try:
            async with asyncio.timeout(timeout):
                await self._heard.wait()
        except TimeoutError:
            self.hangs = True
        return not self.hangs

    def set_awaited(self, *, awaited: bool) -> None:
        """Tell the agent, in this and every later probe, whether to look for free nodes more often for waiting jobs."""
        begins = awaited and not self._awaited
        self._awaited = awaited
        if begins and self.ready:
            self._send_probe(look=False)

    def ask_to_confirm(self, now: float) -> None:
        """Ask the agent to query its resource manager, and to confirm once it has reported everything."""
        self._confirmation_times[self._send_probe(look=True)] = now

    def take_confirmation(self, sequence: int) -> float | None:
        """Return the time as of which everything is reported; None if no confirmation was asked for."""
        return self._confirmation_times.pop(sequence, None)

    def _send_probe(self, *, look: bool) -> int:
        """Send a check of the connection, and return its number. ``look``: the agent also polls its nodes."""
        probe = wire.Probe(sequence=next(_sequence), look=look, awaited=self._awaited)
        self.queue_messages([probe])
        return probe.sequence


class Sessions:
    """The session of each connected agent by cluster; sends what the engine decides to those that are ready."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.budgets = Budgets()
        self._sessions: dict[ClusterName, Session] = {}
        self._awaited: frozenset[ClusterName] = frozenset()
        """Clusters with nodes that jobs wait for."""
        self._large_frames = asyncio.Lock()

    def get(self, cluster: ClusterName) -> Session | None:
        return self._sessions.get(cluster)

    def add(self, session: Session) -> None:
        """Set the session of a cluster, in place of an earlier one."""
        self._sessions[session.cluster], session.connected_at = session, self._clock()
        session.large_frames = self._large_frames
        session.set_awaited(awaited=session.cluster in self._awaited)

    def remove(self, session: Session) -> bool:
        """Remove a session; return False if another session has replaced it."""
        if self._sessions.get(session.cluster) is not session:
            return False
        del self._sessions[session.cluster]
        return True

    def may_ignore_containers(self, cluster: ClusterName) -> bool:
        """Return whether an agent is of a version that may run a program without the container image of its job."""
        session = self._sessions.get(cluster)
        return session is not None and session.hello.container_runtime is None

    def agent_versions(self) -> dict[ClusterName, str]:
        """Return the versions of the agents that are connected."""
        return {cluster: session.hello.version for cluster, session in self._sessions.items()}

    def clock_offsets(self) -> dict[ClusterName, float]:
        """Return by how many seconds the clocks of connected agents are ahead of the daemon's, where known."""
        offsets = {cluster: session.clock_offset for cluster, session in self._sessions.items()}
        return {cluster: offset for cluster, offset in offsets.items() if offset is not None}

    def send_commands(self, cluster: ClusterName, messages: Iterable[Any]) -> None:
        """Send commands; those of an agent that is not ready stay in the outbox."""
        if (session := self._sessions.get(cluster)) is not None and session.ready:
            session.queue_messages(messages)

    def request_confirmation(self, cluster: ClusterName) -> None:
        """Ask an agent to report its full state and to confirm that it has."""
        if (session := self._sessions.get(cluster)) is not None and session.ready:
            session.ask_to_confirm(self._clock())

    def set_awaited_clusters(self, clusters: frozenset[ClusterName]) -> None:
        """Make the agents of these clusters, and only these, look for free nodes more often."""
        changed, self._awaited = clusters ^ self._awaited, clusters
        for cluster in changed:
            if (session := self._sessions.get(cluster)) is not None:
                session.set_awaited(awaited=cluster in clusters)

    def offer_message(self, cluster: ClusterName, message: wire.FromDaemon) -> bool:
        """Send a message that may be dropped; return False if the agent is disconnected or does not read."""
        session = self._sessions.get(cluster)
        return session is not None and session.offer_message(message)

    async def close(self) -> None:
        """Close all connections together. Those of agents that do not read end with the server."""
        reason = "the daemon is shutting down"
        closing = [asyncio.create_task(session.connection.close(reason)) for session in self._sessions.values()]
        if closing:
            _, unfinished = await asyncio.wait(closing, timeout=CLOSE_TIMEOUT_S)
            for task in unfinished:
                task.cancel()
