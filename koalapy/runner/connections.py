"""Run an event loop, exchange lines over connections that do not block, and authenticate both of their sides.

A runner connects to its agent, the relay of a node to its head, and a head to the hub. The process that connects is the
child, the other one its parent. Both have a key that is never sent, and prove it in a handshake: the child's ``hello``
with its name and a nonce, the parent's ``challenge`` with another nonce, and the child's ``here``. From the challenge
on, each line begins with a tag (``session.py``).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import reprlib
import selectors
import socket
import struct
import time

from koalapy.runner.session import TAG_LENGTH, Line, Session, derive_key, make_nonce

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
KEEPALIVE_IDLE_S = 60
ACCEPT_PAUSE_S = 0.1
"""Pause after a failed accept: its cause, often too many open files, may last, and so does the pending connection."""
MAX_LAG = 1.0
"""Seconds: if a step of the loop takes longer than planned by more than this, the process was stopped."""
RESET = struct.pack("ii", 1, 0)
"""Linger for no time: closing the socket resets the connection."""
IP_BIND_ADDRESS_NO_PORT = 24
MAX_FIRST_LINE = 2048
"""Bytes of a line before authentication."""
MAX_CONTROL_LINE = 4096
HEARTBEAT_INTERVAL_S = 5.0
SILENCE_LIMIT_S = 15.0
"""Time without a line of the peer, after which a control connection counts as dead."""
encode = json.JSONEncoder(separators=(",", ":")).encode
SURROGATE = re.compile("[\ud800-\udfff]")


class Loop:
    """An event loop of one thread: callbacks for readable files and for alarms.

    Its time stops while this process is stopped. Files are handled before alarms.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._alarms: dict[str, tuple[float, Callable[[], None]]] = {}
        self._slept = 0.0
        self._awake_at = time.monotonic()

    def time(self) -> float:
        """Return a monotonic time in seconds, without the time for which this process was stopped."""
        return time.monotonic() - self._slept

    def watch(self, file: int, callback: Callable[[int], object], events: int = READ) -> None:
        if file in self._selector.get_map():
            self._selector.modify(file, events, callback)
        else:
            self._selector.register(file, events, callback)

    def pause(self, file: int) -> None:
        """Do not call the callback of a listener for ``ACCEPT_PAUSE_S``."""
        key = self._selector.unregister(file)
        self.set_alarm(f"resume-{file}", ACCEPT_PAUSE_S, lambda: self.watch(file, key.data, key.events))

    def forget(self, file: int) -> None:
        self.cancel_alarm(f"resume-{file}")
        if file >= 0 and file in self._selector.get_map():  # negative: the socket is closed
            self._selector.unregister(file)

    def close(self) -> None:
        self._selector.close()

    def awake(self, at_most: float = float("inf")) -> None:
        """Record that this process runs. Of the time since the last call, count ``at_most`` seconds as running."""
        excess = self.time() - self._awake_at - at_most
        if excess > 0:
            self._slept += excess
        self._awake_at = self.time()

    def set_alarm(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, after some seconds. An alarm of the same name is replaced."""
        self._alarms[name] = (self.time() + seconds, callback)

    def has_alarm(self, name: str) -> bool:
        return name in self._alarms

    def cancel_alarm(self, name: str) -> None:
        self._alarms.pop(name, None)

    def turn(self) -> None:
        """Wait until a file is ready or an alarm is due, and call the callbacks."""
        self.awake(MAX_LAG)
        now = self.time()
        # At most a minute: the selector takes no timeout of more than 24 days.
        timeout = max(0.0, min([now + 60, *(due for due, _ in self._alarms.values())]) - now)
        files = self._selector.get_map()
        ready = self._selector.select(timeout)
        self.awake(timeout + MAX_LAG)
        for key, events in ready:
            if files.get(key.fd) is key:  # an earlier callback may have closed it
                key.data(events)
        self.awake(MAX_LAG)
        now = self.time()
        for name, alarm in list(self._alarms.items()):
            due, callback = alarm
            if due <= now and self._alarms.get(name) is alarm:  # an earlier callback may have moved it
                del self._alarms[name]
                callback()


class Refused(Exception):
    """A stream or connection is refused. ``reason``: a short label, for metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def tune_stream(connection: socket.socket) -> socket.socket:
    """Set the options of a stream's connection and return it.

    It has no ``TCP_USER_TIMEOUT``: with that, Linux ends a connection if its reader reads nothing for so long.
    """
    connection.setblocking(False)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    return connection


class Side:
    """One connection of a stream without TLS, perhaps not established yet."""

    is_plain = True
    at_end = False
    """Whether ``receive`` has returned the last bytes already and will return 0."""
    is_handshaking = False
    """Whether ``send`` takes nothing until the peer has answered, since TLS is being established."""

    def __init__(self, connection: socket.socket, *, is_connecting: bool = False) -> None:
        self._socket, self._is_connecting = connection, is_connecting
        self._must_end = False
        self._receive, self._send = connection.recv_into, connection.send

    def settle(self) -> Side:
        """Return the side to use in a stream, once a line was received."""
        return self

    def fileno(self) -> int:
        return self._socket.fileno()

    def events(self) -> int:
        """Return the events to wait for in addition to those of the stream."""
        return WRITE if self._is_connecting else 0

    def progress(self) -> None:
        """Handle an event: complete the connection, and send pending bytes. Raise ``OSError``."""
        if self._is_connecting:
            self._is_connecting = not finish_connecting(self._socket)
            if self._must_end and not self._is_connecting:
                self._socket.shutdown(socket.SHUT_WR)

    def receive(self, buffer: memoryview) -> int | None:
        """Read into a buffer; None if there is nothing now, 0 at the end. Raise ``OSError``."""
        if self._is_connecting:
            return None
        try:
            return self._receive(buffer)
        except BlockingIOError:
            return None

    def send(self, data: memoryview) -> int:
        """Return the number of bytes that the connection takes now. Raise ``OSError``."""
        if self._is_connecting:
            return 0
        try:
            return self._send(data)
        except BlockingIOError:
            return 0

    def end(self) -> None:
        """Send the end of the data, at once or when the connection is established. Raise ``OSError``."""
        self._must_end = True
        if not self._is_connecting:
            self._socket.shutdown(socket.SHUT_WR)

    def close(self, *, reset: bool = False) -> None:
        """Close the connection; ``reset``: so that the other side sees an error instead of an end."""
        if reset:
            reset_socket(self._socket)
        else:
            self._socket.close()


def finish_connecting(connection: socket.socket) -> bool:
    """Return whether a connection is established. Raise ``OSError`` if that has failed."""
    number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number:
        raise OSError(number, os.strerror(number))
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def begin_connecting(host: str, port: int, source: str = "") -> tuple[socket.socket, bool]:
    """Return a connection that is being established, and whether it still is. Raise ``OSError``.

    ``host``: an address; of a name, the resolver may block. ``source``: the address to connect from, or nothing.
    """
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        tune_stream(connection)
        if source:
            # The kernel chooses the port when it knows both addresses, so that many streams may share one.
            with contextlib.suppress(OSError):  # kernels before 4.2 do not know it
                connection.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            connection.bind((source, 0))
        number = connection.connect_ex((host, port))
        if number not in (0, errno.EINPROGRESS):
            raise OSError(number, os.strerror(number))
    except BaseException:
        connection.close()
        raise
    return connection, number != 0


def connect_side(host: str, port: int, source: str = "") -> Side:
    """Begin to connect to an address, from another one if ``source`` is given. Raise ``OSError``."""
    connection, is_connecting = begin_connecting(host, port, source)
    return Side(connection, is_connecting=is_connecting)


def open_listener(address: tuple[str, int], backlog: int) -> socket.socket:
    """Return a socket that listens at an address and a port. Raise ``OSError``."""
    listener = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def reset_socket(connection: socket.socket) -> None:
    """Close a connection so that its peer sees an error instead of an end."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    connection.close()


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


def get_text(message: dict[str, Any], name: str, max_length: int = 255) -> str:
    """Return a text of a message. Raise ``Refused`` if it is missing, too long, or has surrogates."""
    value = message.get(name)
    if isinstance(value, str) and len(value) <= max_length and not SURROGATE.search(value):
        return value
    raise Refused("malformed", f"a peer has sent {reprlib.repr(value)[:50]} as {name}, which must be a short text")


MAX_OUTPUT = 1024 * 1024
"""Bytes of lines that a peer may leave unread."""


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
        on_end: Callable[[LineConnection, OSError | None], object],
        max_line: int,
        max_output: int = MAX_OUTPUT,
    ) -> None:
        """``on_line`` may detach the side. ``on_end`` is called once if the peer or an error ends the connection.

        ``max_line``, ``max_output``: bytes to keep of an incomplete line, and of lines that the peer does not read.
        """
        self._loop, self.side, self._buffer = loop, side, buffer
        self.on_line, self.on_end = on_line, on_end
        self.max_line, self._max_output = max_line, max_output
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._searched = 0
        """Bytes of an incomplete line that contain no end."""
        self._watched = 0
        self.is_open = True
        self._update()

    def start(self) -> None:
        """Read bytes that have arrived already."""
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
        """Stop using the side, and return the bytes received after the last line."""
        self._loop.forget(self.side.fileno())
        self.is_open = False
        return bytes(self._incoming)

    def close(self, *, reset: bool = False) -> None:
        """Close the connection without calling ``on_end``."""
        if self.is_open:
            self._loop.forget(self.side.fileno())
            self.is_open = False
            self.side.close(reset=reset)

    def _handle(self, events: int) -> None:
        """Send and read what the side is ready for. Errors of ``on_line`` are the caller's."""
        if not self.is_open:
            return
        try:
            self.side.progress()
            self._flush()
            size = self.side.receive(self._buffer) if events & READ else None
        except OSError as error:
            self._end(error)
            return
        if size == 0:
            self._end(None)
            return
        if size:
            self._incoming += self._buffer[:size]
            self._handle_lines()
        self._update()

    def _handle_lines(self) -> None:
        while self.is_open:
            end = self._incoming.find(b"\n", self._searched)
            self._searched = len(self._incoming)
            if (end if end >= 0 else self._searched) > self.max_line:
                self._end(LineTooLong(errno.EMSGSIZE, f"a line has more than {self.max_line} bytes"))
            elif end < 0:
                return
            else:
                line = bytes(self._incoming[:end])
                del self._incoming[: end + 1]
                self._searched = 0
                self.on_line(self, line)

    def _flush(self) -> None:
        if self._outgoing:
            with memoryview(self._outgoing) as data:
                sent = self.side.send(data)
            del self._outgoing[:sent]

    def _update(self) -> None:
        if self.is_open:
            has_output = self._outgoing and not self.side.is_handshaking
            events = READ | self.side.events() | (WRITE if has_output else 0)
            if events != self._watched:
                self._watched = events
                self._loop.watch(self.side.fileno(), self._handle, events)

    def _end(self, error: OSError | None) -> None:
        if self.is_open:
            self.close(reset=error is not None)
            self.on_end(self, error)


class Credentials:
    """The key and the name of a child: of a node in a component or an attempt, or of a cluster's head."""

    def __init__(self, key: bytes, name: str, node: int = 0, field: str = "name") -> None:
        """``field``: that of the name in a hello."""
        self.key, self.name, self.node, self.field = key, name, node, field

    def open_session(self, nonces: tuple[str, str], *, is_parent: bool) -> tuple[Session, bytes]:
        """Return the session of a control connection, and the key of first lines. ``nonces``: child's and parent's."""
        session = Session(self.key, self.name, self.node, nonces, is_agent=is_parent)
        return session, derive_key(self.key, "stream", self.name, str(self.node), *nonces)


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
        """``now``: a clock that stops while this process is stopped."""
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


class ParentLink:
    """The child's side of an authenticated connection.

    Before the parent has proved that it has the key, it gets no message but the hello, and none of its messages is
    followed.
    """

    def __init__(
        self,
        loop: Loop,
        side: Side,
        buffer: memoryview,
        credentials: Credentials,
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[Exception], None],
        *,
        describe: Callable[[], dict[str, Any]] = dict,
        interval: float = HEARTBEAT_INTERVAL_S,
        silence_limit: float = SILENCE_LIMIT_S,
        max_line: int = MAX_CONTROL_LINE,
        max_output: int = MAX_OUTPUT,
    ) -> None:
        """``on_message`` gets messages of the parent, and raises ``Refused`` for an invalid one. ``on_lost`` is called
        once with the error that has ended the connection. ``describe``: what the child tells an authenticated parent.
        """
        self._loop, self._credentials, self._nonce = loop, credentials, make_nonce()
        self._on_message, self._on_lost, self._describe = on_message, on_lost, describe
        self._interval, self._silence_limit, self._max_line = interval, silence_limit, max_line
        self._deadline = loop.time() + silence_limit
        """Time until which the parent must have answered the hello."""
        self._connection = LineConnection(loop, side, buffer, self._authenticate, self._end, MAX_FIRST_LINE, max_output)
        self.channel: ControlChannel | None = None
        """None before authentication."""
        self.stream_key = b""

    def start(self) -> None:
        """Send the hello."""
        names = {self._credentials.field: self._credentials.name, "node": self._credentials.node}
        self._connection.send(encode({"t": "hello", **names, "nonce": self._nonce}).encode() + b"\n")

    @property
    def is_connecting(self) -> bool:
        return bool(self._connection.side.events() & WRITE)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, or drop it before authentication."""
        if self.channel is not None:
            self.channel.send(message)

    def check(self) -> None:
        """Send a heartbeat if one is due, and end the connection to a dead parent."""
        if self.channel is not None:
            reason = self.channel.check()
        else:
            reason = "no answer" if self._loop.time() > self._deadline else ""
        if reason:
            self._lose(TimeoutError(reason))

    def close(self) -> None:
        """Close the connection without calling ``on_lost``."""
        self._connection.close()

    def _authenticate(self, connection: LineConnection, challenge: bytes) -> None:
        """Verify the parent, and prove this child's key."""
        try:
            nonces = self._nonce, get_text(parse_line(challenge), "nonce")
            session, self.stream_key = self._credentials.open_session(nonces, is_parent=False)
            session.open(challenge)
        except (Refused, ValueError) as error:
            self._lose(Refused("unauthenticated", f"the parent is not ours: {error}"))
            return
        self.channel = ControlChannel(session, connection.send, self._loop.time, self._interval, self._silence_limit)
        connection.on_line, connection.max_line = self._receive, self._max_line
        self.channel.send({"t": "here", **self._describe()})

    def _receive(self, _connection: LineConnection, line: bytes) -> None:
        if self.channel is not None:
            try:
                self._on_message(self.channel.receive(line))
            except Refused as error:
                self._lose(error)

    def _end(self, _connection: LineConnection, error: OSError | None) -> None:
        self._on_lost(error or ConnectionResetError("it closed the connection"))

    def _lose(self, error: Exception) -> None:
        if self._connection.is_open:
            self.close()
            self._on_lost(error)


def describe_error(error: Exception) -> str:
    """Return the reason of an error without its number."""
    return getattr(error, "strerror", None) or str(error)
