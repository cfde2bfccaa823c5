"""What hub and heads have in common: children, streams that wait to be taken, limits, and the list of live attempts."""

import errno
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from koalapy.relay.attempts import Attempt, AttemptNode, Limits
from koalapy.relay.server import Server
from koalapy.runner.connections import (
    MAX_CONTROL_LINE,
    ControlChannel,
    Credentials,
    LineConnection,
    Loop,
    Refused,
    Side,
    challenge_child,
    get_text,
    parse_line,
)
from koalapy.runner.relay_protocol import get_stream
from koalapy.runner.relay_streams import Pair, PipePool

log = structlog.get_logger()

CHECK_INTERVAL_S = 1.0
MAX_LOGGED_REFUSALS = 10
"""Refusals that are logged between two checks; all are counted."""
MAX_LOGGED_LENGTH = 300
StreamId = tuple[str, int, int]
"""Attempt, opening node, number."""
Via = tuple[str, ...]
"""The name of a control connection that a stream depends on."""


@dataclass(slots=True, eq=False)
class Child:
    """A process below this one, with an authenticated control connection."""

    via: Via
    connection: LineConnection
    channel: ControlChannel
    stream_key: bytes


@dataclass(slots=True, eq=False)
class Stream:
    """A stream of an attempt, from its first line to its end."""

    id: StreamId
    attempt: Attempt
    source: AttemptNode
    target: AttemptNode
    vias: tuple[Via, ...]
    """The control connections without which it ends."""
    taker: Via = ()
    """The child that must take a dialled stream."""
    opener: Side | None = None
    """The opener's connection, until the stream is taken."""
    received: bytes = b""
    """Bytes that arrived with the opener's first line."""
    expires_at: float = 0.0
    pair: Pair | None = None


def describe_child(via: Via) -> str:
    """Return a child's name for users: ``("node", attempt, index)`` or ``("head", cluster)``."""
    return f"the relay of node {via[2]}" if via[0] == "node" else f"the relay of {via[1]}"


class Relay:
    """The streams and children of a hub or head."""

    server: Server
    """Accepts the connections of children."""

    def __init__(self, loop: Loop, limits: Limits) -> None:
        self.loop, self.limits = loop, limits
        self._alarm = f"relay-check-{id(self)}"
        self.pool = PipePool()
        self.servers: Sequence[Server] = ()
        self.attempts: dict[str, Attempt] = {}
        """The live attempts, by token."""
        self.children: dict[Via, Child] = {}
        self.streams: dict[StreamId, Stream] = {}
        self.total_streams = 0
        self.refusals: Counter[str] = Counter()
        self._logged_refusals = 0
        self.lost: dict[str, dict[str, Any]] = {}
        """For each live attempt that has lost streams: ``why``, and ``via``, the lost control connection."""
        self.on_event: Callable[[dict[str, Any]], None] = lambda _: None
        """Called with each event for the daemon or the agent."""
        loop.set_alarm(self._alarm, CHECK_INTERVAL_S, self._check)

    # The list of live attempts

    def set_keys(self, message: Mapping[str, Any]) -> None:
        """Use the keys in a state. Raise ``ValueError`` and change nothing if they are invalid."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return what the answer to a state says of this relay."""
        return {}

    def replace_state(self, message: Mapping[str, Any]) -> None:
        """Replace the keys, and the list by ``attempts``. Raise ``ValueError`` and change nothing if it is invalid.

        A known attempt stays as it is, with its streams: its runners have the ports that they were given, also if the
        daemon's configuration has changed since.
        """
        now, entries = self.loop.time(), message.get("attempts")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("a state needs attempts, a list of objects")
        attempts = {attempt.token: attempt for attempt in (Attempt(entry, self.limits, now) for entry in entries)}
        self.set_keys(message)
        for token in self.attempts.keys() - attempts.keys():
            self.remove_attempt(token)
        self.attempts = attempts | self.attempts

    def get_attempt(self, token: str) -> Attempt:
        """Return a live attempt. Raise ``Refused`` if it is not in the list."""
        attempt = self.attempts.get(token)
        if attempt is None:
            raise Refused("not-live", f"attempt {ascii(token)[:80]} is not live")
        return attempt

    def add_attempt(self, entry: dict[str, Any]) -> None:
        """Add an attempt, or replace it if its entry has changed, which ends its streams. Raise ``ValueError``."""
        attempt = Attempt(entry, self.limits, self.loop.time())
        former = self.attempts.get(attempt.token)
        if former is None or former.content != attempt.content:
            self.remove_attempt(attempt.token)
            self.attempts[attempt.token] = attempt

    def remove_attempt(self, token: str) -> None:
        """End an attempt and its streams, and report its totals. Ignore an unknown attempt."""
        attempt = self.attempts.pop(token, None)
        if attempt is None:
            return
        for stream in [s for s in self.streams.values() if s.attempt is attempt]:
            self.end_stream(stream, "its attempt has ended")
        for via in [via for via in self.children if via[1] == token and via[0] == "node"]:
            self._close_child(via)
        self.lost.pop(token, None)
        moved = [[source, target, count[0]] for (source, target), count in attempt.bytes_moved.items()]
        self.on_event({"t": "removed", "attempt": token, "streams": attempt.total_streams, "bytes": moved})

    # Children

    def handle_first_line(self, connection: LineConnection, line: bytes) -> None:
        """Act on the first line of a child's connection. Raise ``Refused``."""
        message = parse_line(line)
        if message["t"] == "hello":
            self._challenge(connection, message)
        elif message["t"] == "open":
            self.open_stream(connection, line, message)
        elif message["t"] == "take":
            self._take_stream(connection, line, message)
        else:
            raise Refused("malformed", f"{message['t']!r:.30} cannot begin a connection")

    def find_credentials(self, hello: dict[str, Any]) -> tuple[Via, Credentials]:
        """Return the name and credentials of the child that sends a hello. Raise ``Refused``."""
        raise NotImplementedError

    def authenticate_child(self, line: bytes, message: dict[str, Any]) -> Child:
        """Return the child that has sent the first line of a stream. Raise ``Refused``."""
        raise NotImplementedError

    def open_stream(self, connection: LineConnection, line: bytes, message: dict[str, Any]) -> None:
        """Act on the first line of a stream that a child opens. Raise ``Refused``."""
        raise NotImplementedError

    def _challenge(self, connection: LineConnection, hello: dict[str, Any]) -> None:
        via, credentials = self.find_credentials(hello)
        session, stream_key, challenge = challenge_child(credentials, hello)
        channel = ControlChannel(session, connection.send, self.loop.time, self.limits.heartbeat, self.limits.silence)
        child = Child(via, connection, channel, stream_key)

        def end(_connection: LineConnection, error: OSError | None) -> None:
            if self.children.get(via) is child:
                self.lose_child(via, "its connection ended" if error is None else error.strerror or str(error))

        def admit(_connection: LineConnection, answer: bytes) -> None:
            channel.receive(answer)
            self.find_credentials(hello)  # its attempt may have ended in the meantime
            if via in self.children:
                self.lose_child(via, "it has connected again")
            self.children[via] = child
            connection.on_line, connection.on_end = lambda _, line: self._receive_line(child, line), end
            connection.max_line = MAX_CONTROL_LINE
            channel.send({"t": "welcome"})

        self.server.expect_another(connection, admit)
        connection.send(challenge)

    def _receive_line(self, child: Child, line: bytes) -> None:
        try:
            message = child.channel.receive(line)
            if message["t"] == "refused":  # its taker cannot take a stream
                reason = get_text(message, "why", MAX_CONTROL_LINE)
                self.refuse(Refused("taker", f"{' '.join(child.via)}: {reason[:MAX_LOGGED_LENGTH]}"))
                stream = self.streams.get(get_stream(message))
                if stream is not None and stream.taker == child.via:
                    self.end_stream(stream, reason)
            elif message["t"] == "bye":
                self._close_child(child.via)
                self._end_streams(child.via, "its node has ended")
        except Refused as error:
            self.refuse(error)
            self.lose_child(child.via, str(error))

    def lose_child(self, via: Via, reason: str) -> None:
        """End the streams of a child after the end of its control connection."""
        self._close_child(via)
        self.lose_streams(via, f"{describe_child(via)} is lost: {reason}", self.attempts_of(via))

    def attempts_of(self, via: Via) -> Iterable[str]:
        """Return the attempts that cannot continue without a child, whether or not they have streams."""
        return ()

    def lose_streams(self, via: Via, reason: str, tokens: Iterable[str] = ()) -> None:
        """End the streams over a control connection, and report their attempts and ``tokens`` as lost.

        When a process dies, its streams may break before its control connection, so those count, too.
        """
        since = self.loop.time() - self.limits.silence
        broken = {a.token for a in self.attempts.values() if a.broken_at.get(via, float("-inf")) >= since}
        for token in self._end_streams(via, reason) | broken | {*tokens}:
            if token in self.attempts and token not in self.lost:
                self.lost[token] = {"why": reason, "via": via}
                log.warning(
                    "an attempt has lost its relayed links", action="relay-attempt-lost", attempt=token, reason=reason
                )
                self.on_event({"t": "lost", "attempt": token, **self.lost[token]})

    def _end_streams(self, via: Via, reason: str) -> set[str]:
        """End the streams over a control connection, and return their attempts."""
        ended = [stream for stream in self.streams.values() if via in stream.vias]
        for stream in ended:
            self.end_stream(stream, reason)
        return {stream.attempt.token for stream in ended}

    def _close_child(self, via: Via) -> None:
        child = self.children.pop(via, None)
        if child is not None:
            child.connection.close()

    # Streams

    def admit_stream(self, stream_id: StreamId, attempt: Attempt) -> None:
        """Raise ``Refused`` unless the limits and the number of a stream allow it. Record its number."""
        attempt.admit(*stream_id[1:], self.loop.time())
        if len(self.streams) >= self.limits.streams:
            raise Refused("streams", f"this relay has {len(self.streams)} streams, its limit")

    def check_port(self, attempt: Attempt, target: int, port: int) -> AttemptNode:
        """Return the target node of a stream. Raise ``Refused`` if it has no such port."""
        node = attempt.node(target)
        if port not in node.ports:
            raise Refused("port", f"port {port} is not one of node {target} in attempt {attempt.token}")
        return node

    def add_stream(self, stream: Stream) -> None:
        self.streams[stream.id] = stream
        self.total_streams += 1
        stream.attempt.stream_count += 1
        stream.attempt.total_streams += 1

    def dial(self, stream: Stream, opener: LineConnection, port: int, target: int, ticket: str = "") -> None:
        """Let a child take a stream; its ``opener`` waits. Raise ``Refused`` if it is not connected or at a limit."""
        taker = self.child_at(stream.taker)
        attempt, source, number = stream.id
        self.admit_stream(stream.id, stream.attempt)
        stream.expires_at = self.loop.time() + self.limits.dial_timeout
        self.add_stream(stream)
        message = {"t": "dial", "attempt": attempt, "from": source, "stream": number, "to": target, "port": port}
        taker.channel.send({**message, "ticket": ticket} if ticket else message)
        if stream.id not in self.streams:
            raise Refused("absent", f"{describe_child(stream.taker)} is lost")
        stream.received, stream.opener = opener.detach(), opener.side.settle()

    def child_at(self, via: Via) -> Child:
        """Return a connected child. Raise ``Refused``."""
        child = self.children.get(via)
        if child is None:
            raise Refused("absent", f"{' '.join(via)} is not connected")
        return child

    def _take_stream(self, connection: LineConnection, line: bytes, message: dict[str, Any]) -> None:
        """Join a dialled stream with the connection of its taker. Raise ``Refused``."""
        child = self.authenticate_child(line, message)
        stream = self.streams.get(get_stream(message))
        if stream is None or stream.taker != child.via or stream.opener is None:
            raise Refused("not-dialled", f"{' '.join(child.via)} takes a stream that was not dialled")
        opener, stream.opener = stream.opener, None
        buffered = connection.detach()
        self.join(stream, opener, connection.side.settle(), (stream.received, buffered))

    def join(self, stream: Stream, opener: Side, taker: Side, pending: tuple[bytes, bytes]) -> None:
        """Pass bytes between the opener's and the taker's connection. ``pending``: for the taker, for the opener."""
        source, target = stream.source.cluster, stream.target.cluster
        counters = stream.attempt.counter(source, target), stream.attempt.counter(target, source)
        stream.pair = Pair(
            self.loop, self.pool, (opener, taker), pending, counters, lambda error: self._finish(stream, error)
        )
        stream.pair.start()

    def _finish(self, stream: Stream, error: OSError | None) -> None:
        if isinstance(error, ssl.SSLError):
            self.refuse(Refused("tls", f"TLS with the head of another cluster has failed: {error.reason or error}"))
        elif error is not None and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOSPC):
            self.refuse(Refused("files", error.strerror or str(error)))
        if error is not None:
            stream.attempt.broken_at |= dict.fromkeys(stream.vias, self.loop.time())
        if self.streams.pop(stream.id, None) is not None:
            stream.attempt.stream_count -= 1

    def end_stream(self, stream: Stream, reason: str) -> None:
        """Reset the connections of a stream."""
        if stream.pair is not None:
            stream.pair.close(ConnectionResetError(errno.ECONNRESET, reason))
        else:
            if stream.opener is not None:
                stream.opener.close(reset=True)
            self._finish(stream, None)

    def refuse(self, reason: Refused) -> None:
        """Count and log a refusal."""
        self.refusals[reason.reason] += 1
        if self._logged_refusals < MAX_LOGGED_REFUSALS:
            self._logged_refusals += 1
            log.warning(
                "a relayed stream is refused", action="relay-stream-refused", kind=reason.reason, reason=str(reason)
            )

    # Duties

    def _check(self) -> None:
        self.loop.set_alarm(self._alarm, CHECK_INTERVAL_S, self._check)
        self._logged_refusals = 0
        self.check()

    def check(self) -> None:
        """End dead children and streams that were not taken in time."""
        for via, child in list(self.children.items()):
            if reason := child.channel.check():
                self.lose_child(via, reason)
        for server in self.servers:
            server.close_slow_strangers()
        now = self.loop.time()
        for stream in list(self.streams.values()):
            if stream.taker and stream.pair is None and stream.expires_at <= now:
                reason = f"{' '.join(stream.taker)} has not taken a stream in time"
                self.refuse(Refused("untaken", reason))
                self.end_stream(stream, reason)

    def close(self) -> None:
        """Reset all streams and close all connections."""
        self.loop.cancel_alarm(self._alarm)
        for server in self.servers:
            server.close()
        for stream in list(self.streams.values()):
            self.end_stream(stream, "the relay ends")
        for via in list(self.children):
            self._close_child(via)
        self.pool.close()
