"""Streams between clients and nodes of jobs: permission, limits and flow control. Nothing of them is stored.

Interactive jobs without a client are cancelled.
"""

import asyncio
import base64
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import structlog

from koalapy.daemon.agents.session import Session, Sessions
from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.daemon.jobs.job_records import array_error
from koalapy.model.errors import (
    BusyError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    ProblemCode,
    SiteRejected,
    SiteUnavailable,
)
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Component, ComponentState, Job, JobId, JobState
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list
from koalapy.protocol import messages as wire
from koalapy.runner.streams import STREAM_PIECE, STREAM_WINDOW
from koalapy.scheduler.events import JobCancelled
from koalapy.scheduler.queries import Queries

log = structlog.get_logger()


MAX_USER_STREAMS = 256
"""Clients of one user at a time."""
MAX_STREAMS = 1000
"""Clients of all users at a time."""
OPEN_TIMEOUT = 20.0
"""Seconds that a node has to open a stream."""
MAX_RESIZES = 100
"""Changes of a terminal's size within one second."""
StreamKind = Literal["terminal", "input"]


StreamItem = bytes | wire.StreamOpened | wire.StreamCredit | wire.StreamEnd
"""Output of the node, or another message of it."""


class StreamViolation(Exception):
    """A client sent more than it was allowed to."""


class Stream:
    """One open stream: the messages that its client has not received yet, and the bytes that each side may send."""

    def __init__(
        self,
        name: str,
        job: JobId,
        cluster: ClusterName,
        send: Callable[[wire.StreamToNode], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.job, self.cluster, self._send, self._clock = name, job, cluster, send, clock
        self.node = ""
        self._queue: deque[StreamItem] = deque()
        self._arrived = asyncio.Event()
        self._credit: wire.StreamCredit | None = None
        """The newest credit that the client has not received."""
        self._sent, self._sendable = 0, STREAM_WINDOW
        self._received, self._used = 0, 0
        self._is_opened = self._has_all_output = self._has_all_input = False
        self._size: tuple[int, int] | None = None
        """Rows and columns that the client has set last."""
        self._resizes, self._resizes_since = 0, 0.0
        """Changes of the size since a time, which is at most a second ago at the last of them."""
        self.end: wire.StreamEnd | None = None
        """The last message; None while the stream is open."""

    def add_message(self, message: wire.StreamFromNode) -> bool:
        """Queue a message of the node for the client. Return False if the node has sent more than it was allowed to."""
        if self.end is not None:
            return True
        item: StreamItem
        if isinstance(message, wire.StreamCredit):
            if message.offset > self._sent:
                return False
            if message.offset + STREAM_WINDOW > self._sendable:
                self._sendable = message.offset + STREAM_WINDOW
                self._credit = message
                self._arrived.set()
            return True
        if isinstance(message, wire.StreamData):
            item = base64.b64decode(message.data)
            if self._has_all_output or not (item or message.is_last):
                return False
            if message.offset != self._received or self._received + len(item) > self._used + STREAM_WINDOW:
                return False
            self._received += len(item)
            self._has_all_output = message.is_last
        elif isinstance(message, wire.StreamOpened):
            if self._is_opened:
                return False
            self._is_opened, item = True, message
        else:
            self.end = item = message
        self._queue.append(item)
        self._arrived.set()
        return True

    async def next_item(self) -> StreamItem:
        """Wait for the next output or message of the node and return it; the last one is a ``StreamEnd``."""
        while not self._queue and self._credit is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._credit is not None:
            credit, self._credit = self._credit, None
            return credit
        return self._queue.popleft()

    def begin(self, opened: wire.StreamOpened) -> None:
        """Note the node, and the bytes of input that its program has used on earlier streams."""
        self.node, self._sent = opened.node, opened.used
        self._sendable = opened.used + STREAM_WINDOW

    @property
    def input_sent(self) -> int:
        """Return the bytes of input before the next one."""
        return self._sent

    def send_input(self, data: bytes, *, is_last: bool = False) -> None:
        """Send input of the client to the node. Raise ``StreamViolation`` for more than the node can take.

        Ignore input after the last one.
        """
        if self._has_all_input or not (data or is_last):
            return
        if self._sent + len(data) > self._sendable:
            raise StreamViolation(f"more than {STREAM_WINDOW} bytes were sent without a credit for them")
        self._has_all_input = is_last
        for start in range(0, max(1, len(data)), STREAM_PIECE):
            piece = data[start : start + STREAM_PIECE]
            is_end = is_last and start + STREAM_PIECE >= len(data)
            text = base64.b64encode(piece).decode()
            self._send_or_end(wire.StreamData(stream=self.name, offset=self._sent, data=text, is_last=is_end))
            self._sent += len(piece)

    def confirm_output(self, offset: int) -> None:
        """Note that the client has used output up to ``offset``, and let the node send more."""
        if not self._used <= offset <= self._received:
            raise StreamViolation(f"the credit {offset} is not between {self._used} and {self._received}")
        if offset == self._used:
            return
        self._used = offset
        self._send_or_end(wire.StreamCredit(stream=self.name, offset=offset))

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal. Raise ``StreamViolation`` if it changes too often."""
        if (rows, columns) == self._size:
            return
        now = self._clock()
        if now - self._resizes_since >= 1.0:
            self._resizes, self._resizes_since = 0, now
        if self._resizes >= MAX_RESIZES:
            raise StreamViolation(f"the size of the terminal was changed more than {MAX_RESIZES} times in a second")
        self._resizes += 1
        self._size = (rows, columns)
        self._send_or_end(wire.StreamResize(stream=self.name, rows=rows, columns=columns))

    def _send_or_end(self, message: wire.StreamToNode) -> None:
        """Send a message to the node; end the stream if its agent does not read, since bytes would be missing."""
        if self.end is None and not self._send(message):
            self.add_message(wire.StreamEnd(stream=self.name, error=f"the agent of {self.cluster} does not answer"))


class Streams:
    """All open streams by name. Only the agent of a stream's cluster may send on it."""

    def __init__(
        self,
        queries: Queries,
        sessions: Sessions,
        open_timeout: float = OPEN_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queries, self._sessions, self._open_timeout, self._clock = queries, sessions, open_timeout, clock
        self._streams: dict[str, Stream] = {}
        self._of_users: Counter[str] = Counter()
        self._closing = ""
        """Reason for which no stream is opened any more; empty while streams are opened."""

    async def open_stream(
        self,
        job: JobId,
        caller: Identity,
        kind: StreamKind = "terminal",
        cluster: ClusterName = "",
        node: str = "",
        **terminal: Any,
    ) -> Stream:
        """Open a stream to a node of the caller's running job, to be closed by ``close_stream``.

        Without cluster and node it leads to the node that starts the program. ``terminal``: ``command``, ``rows``,
        ``columns`` and ``term`` of ``wire.StreamOpen``.

        Raise ``ForbiddenError``, ``ConflictError``, ``NotFoundError`` or ``SiteError``.
        """
        running = self._queries.job(job)
        if running is None:
            raise ConflictError(f"job {job} has ended", field="job", value=job, hint="submit it again")
        is_owner = caller.owns(running.spec.owner) and not running.spec.internal
        if not is_owner and not caller.has_role(Role.ADMIN):
            raise ForbiddenError(
                f"job {job} is not yours, and only its owner may open a terminal on its nodes",
                field="job",
                value=job,
                hint="ask its owner",
                code=ProblemCode.NOT_OWNER,
            )
        component = _find_component(running, kind, cluster, node)
        session = self._check_site(component.cluster, kind, is_owner=is_owner)
        assert running.attempt is not None
        order = wire.StreamOpen(
            stream=uuid.uuid4().hex,
            token=running.token(component.index),
            node=node,
            kind=kind,
            user=caller.user,
            is_owner=is_owner,
            **terminal,
        )
        stream = Stream(order.stream, job, component.cluster, session.offer_message, self._clock)
        self._streams[stream.name] = stream
        try:
            if not session.offer_message(order):
                raise SiteUnavailable(f"the agent of {component.cluster} does not answer", hint="try again")
            async with asyncio.timeout(self._open_timeout):
                answer = await stream.next_item()
            if isinstance(answer, wire.StreamEnd):
                raise SiteRejected(answer.error, field="job", value=job)
            if not isinstance(answer, wire.StreamOpened):
                raise SiteRejected(f"the agent of {component.cluster} has not opened the stream it was asked for")
        except BaseException as error:
            self.close_stream(stream)
            if isinstance(error, TimeoutError):
                text = f"{component.cluster} has not opened the stream within {self._open_timeout:g} s"
                raise SiteUnavailable(text, hint="try again") from None
            raise
        stream.begin(answer)
        return stream

    def close_stream(self, stream: Stream) -> None:
        """Forget a stream, and end it at its node."""
        self._streams.pop(stream.name, None)
        if stream.end is None:
            self._sessions.offer_message(stream.cluster, wire.StreamEnd(stream=stream.name))

    def receive_message(self, session: Session, message: wire.StreamFromNode) -> None:
        """Queue a message of a node for its client. End the stream if the agent exceeds its credit."""
        stream = self._streams.get(message.stream)
        if stream is None or stream.cluster != session.cluster:
            return  # it was closed, or belongs to another cluster
        if not stream.add_message(message):
            if self._sessions.budgets.may_log(session.cluster):
                log.warning("agent sent too much on a stream", action="agent-oversteps", cluster=session.cluster)
            self._end_stream(stream, f"the agent of {stream.cluster} broke the rules of the stream")
            session.offer_message(wire.StreamEnd(stream=stream.name))

    def end_streams_of(self, cluster: ClusterName, reason: str) -> None:
        """End the streams of a cluster, since its agent is disconnected."""
        for stream in self._streams.values():
            if stream.cluster == cluster:
                self._end_stream(stream, f"the connection to cluster {cluster} was lost: {reason}")

    def shut_down(self) -> None:
        """End all streams, and open no further ones."""
        self._closing = "the daemon is shutting down; the job goes on"
        for stream in self._streams.values():
            self._end_stream(stream, self._closing)

    @staticmethod
    def _end_stream(stream: Stream, reason: str) -> None:
        stream.add_message(wire.StreamEnd(stream=stream.name, error=reason))

    @contextmanager
    def count_client(self, user: str) -> Iterator[None]:
        """Count a client of a user while the block runs. Raise ``BusyError`` if there are too many."""
        if self._closing:
            raise BusyError(self._closing, retry_after=5.0, hint="try again when it is back")
        if self._of_users[user] >= MAX_USER_STREAMS or self._of_users.total() >= MAX_STREAMS:
            scope, count = (user, self._of_users[user])
            if count < MAX_USER_STREAMS:
                scope, count = "the daemon", MAX_STREAMS
            text = f"{scope} has {count} terminals and interactive programs, which is the limit"
            raise BusyError(text, retry_after=10.0, hint="end some of them")
        self._of_users[user] += 1
        try:
            yield
        finally:
            self._of_users[user] -= 1
            if not self._of_users[user]:
                del self._of_users[user]

    def _check_site(self, cluster: ClusterName, kind: StreamKind, *, is_owner: bool) -> Session:
        """Return the session of a cluster's agent. Raise an error if it is away or allows no such stream."""
        session = self._sessions.get(cluster)
        if session is None or not session.ready:
            raise SiteUnavailable(f"{cluster} is out of reach", hint="try again when its agent is connected")
        interactive = session.hello.interactive
        if not interactive:
            raise ConflictError(
                f"the agent of {cluster} has version {session.hello.version}, which has no terminals",
                hint="ask the site to update its agent",
            )
        if kind == "terminal" and (interactive == "none" or (not is_owner and interactive != "administrators")):
            users = "the owners of jobs only" if interactive == "owner" else "no user"
            raise ForbiddenError(
                f"cluster {cluster} allows terminals on its nodes to {users}",
                field="cluster",
                value=cluster,
                hint=f"its setting clusters.{cluster}.interactive is {interactive}",
            )
        return session


def _find_component(job: Job, kind: StreamKind, cluster: ClusterName, node: str) -> Component:
    """Return the running component of the requested cluster, else of the node's name, else the one that starts the
    program. Raise ``NotFoundError`` or ``ConflictError``."""
    attempt = job.attempt
    if job.tasks is not None:
        raise array_error(job, "each of its tasks has nodes of its own", "shell")
    if attempt is None or not job.state.is_active:
        raise ConflictError(
            f"job {job.id} is {job.state}: it has no nodes",
            field="job",
            value=job.id,
            hint=f"wait until it runs; koala explain {job.id} shows why it waits",
        )
    gang = attempt.gang
    component: Component | None = attempt.head
    if kind == "input":
        component = gang[0]  # it has rank 0
    elif cluster:
        component = next((c for c in gang if c.cluster == cluster), None)
    elif node:
        component = next((c for c in gang if node in c.hosts), attempt.head)
    if component is None:
        clusters = format_list([c.cluster for c in gang])
        raise NotFoundError(
            f"job {job.id} has no nodes on {cluster}",
            field="cluster",
            value=cluster,
            code=ProblemCode.COMPONENT_NOT_FOUND,
            hint=f"it runs on {clusters}",
        )
    if component.state is not ComponentState.RUNNING:
        raise ConflictError(
            f"the program of job {job.id} does not run on {component.cluster}: its component is {component.state}",
            field="job",
            value=job.id,
            hint="wait until it runs",
        )
    return component


CHECK_INTERVAL = 5.0
ABSENCE_GRACE = 60.0
"""Seconds that an interactive job goes on without a client: a daemon or a client may need as long to come back."""
ACTOR = "koala"
"""The user that cancels such jobs, in their timeline."""


class Attendance:
    """The clients of unfinished interactive jobs."""

    def __init__(self, engine: Engine, clock: Callable[[], float], grace: float = ABSENCE_GRACE) -> None:
        """``clock`` is monotonic; ``grace``: seconds that a job goes on without a client."""
        self._engine, self._queries, self._clock, self._grace = engine, engine.queries, clock, grace
        self._clients: Counter[JobId] = Counter()
        self._absent_since: dict[JobId, float] = {}
        """By interactive job without a client: when it was submitted, or its last client left."""
        for job in engine.queries.jobs():  # clients come back after a restart of the daemon
            self._note_change(job, None)
        engine.subscribe(self._note_change)

    def _note_change(self, job: Job, previous_state: JobState | None) -> None:
        """Begin the grace of a new interactive job."""
        if job.spec.interactive and previous_state is None and job.id not in self._clients:
            self._absent_since[job.id] = self._clock()

    @contextmanager
    def attend(self, job: JobId) -> Iterator[None]:
        """Count a client of a job while the block runs."""
        self._clients[job] += 1
        self._absent_since.pop(job, None)
        try:
            yield
        finally:
            self._clients[job] -= 1
            if not self._clients[job]:
                del self._clients[job]
                self._absent_since[job] = self._clock()

    async def cancel_unattended(self) -> None:
        """Cancel the jobs that have exceeded their grace; called periodically."""
        now = self._clock()
        for job in [*self._absent_since]:
            if now - self._absent_since.get(job, now) <= self._grace:  # perhaps its client came back during a commit
                continue
            if self._queries.job(job) is None:
                self._absent_since.pop(job, None)
                continue
            log.info("job without a client", action="job-unattended", job=job)
            reason = f"its client (koala run or koala shell) was not connected for {self._grace:g} s"
            await self._engine.commit(WorkItem(events=(JobCancelled(job, reason, ACTOR, False),)))
            self._absent_since.pop(job, None)
