"""The lines by which the relays of nodes, heads and the hub authenticate each other and agree about streams.

See docs/adr/0034-relayed-links.md for the lines and the keys.
"""

from __future__ import annotations

import errno
import hmac
import json

from koalapy.runner.link import encode
from koalapy.runner.relay_streams import READ, WRITE
from koalapy.runner.session import TAG_LENGTH, TAG_SIZE, Line, Session, derive_key, make_nonce

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from koalapy.runner.link import Loop
    from koalapy.runner.relay_streams import Side

MAX_FIRST_LINE = 2048
"""Bytes of a line before authentication."""
MAX_CONTROL_LINE = 4096
HEARTBEAT_INTERVAL_S = 5.0
SILENCE_LIMIT_S = 15.0
"""Time without a line of the peer, after which a control connection counts as dead."""
MAX_STREAM = 2**53
MAX_NODES = 1_000_000
REPLAY_WINDOW = 65_536
"""Stream numbers of one node that are remembered. Lower numbers are refused."""


class Refused(Exception):
    """A stream or connection is refused. ``reason``: a short label, for metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def derive_node_key(secret: bytes, attempt: str) -> bytes:
    """Return the key of a node's relay from the secret that its runner and its agent share."""
    return derive_key(secret, "relay", attempt)


def derive_pair_key(attempt_key: bytes, one: str, other: str) -> bytes:
    """Return the key that the heads of two clusters share in an attempt."""
    return derive_key(attempt_key, "pair", *sorted((one, other)))


def derive_direct_key(pair_key: bytes, opener: str, taker: str) -> bytes:
    """Return the key for first lines of streams that one cluster's head opens directly at another's."""
    return derive_key(pair_key, "direct", opener, taker)


def make_ticket(pair_key: bytes, stream: tuple[str, int, int], target: int, port: int) -> str:
    """Return the proof that the head of the opening node's cluster opens a stream.

    ``stream``: attempt, opening node, number.
    """
    return derive_key(pair_key, "ticket", *map(str, stream), str(target), str(port))[:TAG_SIZE].hex()


def check_ticket(ticket: str, pair_key: bytes, stream: tuple[str, int, int], target: int, port: int) -> None:
    """Raise ``Refused`` if a ticket is not for this stream."""
    if not hmac.compare_digest(ticket.encode(), make_ticket(pair_key, stream, target, port).encode()):
        raise Refused("ticket", "the ticket of a stream is wrong: its two sites were given other keys")


def seal_line(key: bytes, message: dict[str, Any]) -> bytes:
    """Return a first line with its tag and its end."""
    content = encode(message).encode()
    return _make_tag(key, content) + content + b"\n"


def _make_tag(key: bytes, content: bytes) -> bytes:
    return hmac.new(key, content, "sha256").digest()[:TAG_SIZE].hex().encode()


def is_sealed(line: bytes) -> bool:
    return not line.startswith(b"{")


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the message of a line without its tag, which is not checked. Raise ``Refused``."""
    try:
        message = json.loads(line[TAG_LENGTH:] if is_sealed(line) else line)
        if isinstance(message, dict) and isinstance(message.get("t"), str):
            return message
    except (ValueError, RecursionError):
        pass
    raise Refused("malformed", "a peer has sent a line that is not of this protocol")


def check_seal(key: bytes, line: bytes) -> None:
    """Raise ``Refused`` if a first line was not made with this key."""
    if not hmac.compare_digest(_make_tag(key, line[TAG_LENGTH:]), line[:TAG_LENGTH]):
        raise Refused("unauthenticated", "a peer has sent a line with a wrong tag: it has another key")


def get_number(message: dict[str, Any], name: str, first: int, last: int) -> int:
    """Return an integer of a message. Raise ``Refused`` if it is missing or out of bounds."""
    value = message.get(name)
    if type(value) is int and first <= value <= last:
        return value
    raise Refused("malformed", f"a peer has sent {ascii(value)[:50]} as {name}, which must be from {first} to {last}")


def get_text(message: dict[str, Any], name: str, max_length: int = 255) -> str:
    """Return a text of a message. Raise ``Refused`` if it is missing or too long."""
    value = message.get(name)
    if isinstance(value, str) and len(value) <= max_length:
        return value
    raise Refused("malformed", f"a peer has sent {ascii(value)[:50]} as {name}, which must be a short text")


def get_stream(message: dict[str, Any]) -> tuple[str, int, int]:
    """Return the attempt, opening node and number of a stream. Raise ``Refused``."""
    source = get_number(message, "from", 0, MAX_NODES)
    return get_text(message, "attempt"), source, get_number(message, "stream", 0, MAX_STREAM)


def get_target(message: dict[str, Any]) -> tuple[int, int]:
    """Return the node and the port that a stream goes to. Raise ``Refused``."""
    return get_number(message, "to", 0, MAX_NODES), get_number(message, "port", 1, 65535)


class UsedNumbers:
    """Stream numbers of one node, of which each may be used once."""

    def __init__(self, window: int = REPLAY_WINDOW) -> None:
        self._window, self._used, self._highest = window, set[int](), -1

    def use(self, number: int) -> bool:
        """Return whether a number was not used before, and record its use."""
        if number in self._used or number <= self._highest - self._window:
            return False
        self._used.add(number)
        self._highest = max(self._highest, number)
        if len(self._used) > 2 * self._window:
            self._used = {n for n in self._used if n > self._highest - self._window}
        return True


class TokenBucket:
    """A limit on events: ``burst`` at once, then ``rate`` per second."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst, self._tokens, self._at = rate, burst, burst, now

    def take(self, now: float) -> bool:
        """Return whether an event is allowed now, and count it."""
        # The clock of a loop goes back when it notices that its process was stopped.
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def wait_time(self) -> float:
        """Return the seconds from the last event until the next one is allowed."""
        return max(0.0, (1 - self._tokens) / self._rate)


class Ranges:
    """Ranges of ports."""

    def __init__(self, pairs: Iterable[Iterable[int]]) -> None:
        """``pairs``: the first and last port of each range. Raise ``ValueError`` for others than ports."""
        self._ranges: list[tuple[int, int]] = []
        for first, last in pairs:
            if not (type(first) is int and type(last) is int and 0 < first <= last < 65536):
                raise ValueError(f"{first!r} to {last!r} is no range of ports")
            self._ranges.append((first, last))

    def __contains__(self, port: object) -> bool:
        return isinstance(port, int) and any(first <= port <= last for first, last in self._ranges)


class Credentials:
    """The name and key of one side of a control connection: of a node in an attempt, or of a cluster's head."""

    def __init__(self, key: bytes, name: str, node: int = 0) -> None:
        self.key, self.name, self.node = key, name, node

    def open_session(self, nonces: tuple[str, str], *, is_parent: bool) -> tuple[Session, bytes]:
        """Return the session of a control connection, and the key of first lines. ``nonces``: child's and parent's."""
        session = Session(self.key, self.name, self.node, nonces, is_agent=is_parent)
        return session, derive_key(self.key, "stream", self.name, str(self.node), *nonces)


class ChildHandshake:
    """The child's side of authentication on a control connection."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials, self._nonce = credentials, make_nonce()

    def hello(self) -> bytes:
        """Return the first line."""
        message = {"t": "hello", "name": self._credentials.name, "node": self._credentials.node, "nonce": self._nonce}
        return encode(message).encode() + b"\n"

    def accept(self, challenge: bytes) -> tuple[Session, bytes]:
        """Return the session and the key of first lines from the parent's answer. Raise ``Refused``."""
        message = parse_line(challenge)
        nonces = self._nonce, get_text(message, "nonce")
        session, stream_key = self._credentials.open_session(nonces, is_parent=False)
        try:
            session.open(challenge)
        except ValueError as error:
            raise Refused("unauthenticated", f"the parent is not ours: {error}") from error
        return session, stream_key


def challenge_child(credentials: Credentials, hello: dict[str, Any]) -> tuple[Session, bytes, bytes]:
    """Return the session, the key of first lines and the parent's answer to a hello. Raise ``Refused``."""
    nonce = make_nonce()
    nonces = get_text(hello, "nonce"), nonce
    session, stream_key = credentials.open_session(nonces, is_parent=True)
    return session, stream_key, session.seal(Line(encode({"t": "challenge", "nonce": nonce}).encode()))


class ControlChannel:
    """An authenticated control connection: seals and opens its lines, sends heartbeats, and detects a dead peer."""

    def __init__(
        self,
        session: Session,
        send: Callable[[bytes], None],
        now: Callable[[], float],
        interval: float = HEARTBEAT_INTERVAL_S,
        silence_limit: float = SILENCE_LIMIT_S,
    ) -> None:
        """``now``: a clock that stands still while this process is stopped."""
        self._session, self._send, self._now = session, send, now
        self._interval, self._silence_limit = interval, silence_limit
        self._heard_at, self._sent_at = now(), float("-inf")

    def send(self, message: dict[str, Any]) -> None:
        self._sent_at = self._now()
        self._send(self._session.seal(Line(encode(message).encode())))

    def receive(self, line: bytes) -> dict[str, Any]:
        """Return the message of a line. Raise ``Refused`` if the peer has not sent it next."""
        try:
            self._session.open(line)
        except ValueError as error:
            raise Refused("unauthenticated", str(error)) from error
        self._heard_at = self._now()
        return parse_line(line)

    def check(self) -> str:
        """Send a heartbeat if one is due. Return why the peer counts as dead; empty if it does not."""
        now = self._now()
        if now - self._sent_at >= self._interval:
            self.send({"t": "alive"})
        silence = now - self._heard_at
        return f"no sign of life for {silence:.0f} s" if silence > self._silence_limit else ""


class LineTooLong(OSError):
    """A peer has sent more than it may before the end of a line."""


class LineConnection:
    """A connection that exchanges lines, or begins with one."""

    def __init__(
        self,
        loop: Loop,
        side: Side,
        buffer: memoryview,
        on_line: Callable[[LineConnection, bytes], None],
        on_end: Callable[[LineConnection, OSError | None], None],
        max_line: int,
        max_output: int = 1024 * 1024,
    ) -> None:
        """``on_line`` may detach the side. ``on_end`` is called once if the peer or an error ends the connection.

        ``max_line``, ``max_output``: bytes to keep of an incomplete line, and of lines that the peer does not read.
        """
        self._loop, self.side, self._buffer = loop, side, buffer
        self.on_line, self.on_end = on_line, on_end
        self.max_line, self._max_output = max_line, max_output
        self._incoming, self._outgoing = b"", bytearray()
        self._watched = 0
        self.is_open = True
        self._update()

    def start(self) -> None:
        """Read what has arrived already."""
        self._handle(READ)

    def send(self, line: bytes) -> None:
        """Send a line, with its end."""
        if self.is_open:
            self._outgoing += line
            try:
                self._flush()
                if len(self._outgoing) > self._max_output:
                    raise OSError(errno.ENOBUFS, "the peer does not read")
            except OSError as error:
                self._end(error)
                return
            self._update()

    def detach(self) -> bytes:
        """Stop using the side, and return what was received after the last line."""
        self._loop.forget(self.side.fileno())
        self.is_open = False
        return self._incoming

    def close(self, *, reset: bool = False) -> None:
        """Close the connection without calling ``on_end``."""
        if self.is_open:
            self._loop.forget(self.side.fileno())
            self.is_open = False
            self.side.close(reset=reset)

    def _handle(self, events: int) -> None:
        if not self.is_open:
            return
        try:
            self.side.progress()
            self._flush()
            size = self.side.receive(self._buffer) if events & READ else None
            if size == 0:
                self._end(None)
                return
            if size:
                self._receive(bytes(self._buffer[:size]))
        except OSError as error:
            self._end(error)
            return
        self._update()

    def _receive(self, data: bytes) -> None:
        self._incoming += data
        while self.is_open:
            line, end, rest = self._incoming.partition(b"\n")
            if len(line) > self.max_line:
                raise LineTooLong(errno.EMSGSIZE, f"a line has more than {self.max_line} bytes")
            if not end:
                return
            self._incoming = rest
            self.on_line(self, line)

    def _flush(self) -> None:
        if self._outgoing:
            sent = self.side.send(memoryview(bytes(self._outgoing)))
            del self._outgoing[:sent]

    def _update(self) -> None:
        if self.is_open:
            events = READ | self.side.events() | (WRITE if self._outgoing else 0)
            if events != self._watched:
                self._watched = events
                self._loop.watch(self.side.fileno(), self._handle, events)

    def _end(self, error: OSError | None) -> None:
        if self.is_open:
            self.close(reset=error is not None)
            self.on_end(self, error)
