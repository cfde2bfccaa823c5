"""Run the runner's event loop, and connect to its agent: JSON over TCP, one message a line."""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections.abc import Callable

from koalapy.runner.session import TAG_LENGTH, Line, Session, make_nonce
from koalapy.runner.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


MAX_LAG = 1.0
"""Seconds: if a step of the loop takes longer than planned by more than this, the process was stopped."""
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
"""Options that detect a lost host within half a minute, whether or not anything is sent to it."""
RECEIVE_SIZE = 64 * 1024
MAX_CHALLENGE_LENGTH = 1000
"""Bytes to read from a peer that is not authenticated."""
encode = json.JSONEncoder(separators=(",", ":")).encode


def dial(host: str, port: int) -> socket.socket:
    """Connect within 3 s. Ask the resolver only for host names. Raise ``OSError``."""
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        connection.settimeout(3.0)
        connection.connect((host, port))
        for level, option, value in KEEPALIVE:
            connection.setsockopt(level, option, value)
        connection.setblocking(False)
    except OSError:
        connection.close()
        raise
    return connection


class Loop:
    """An event loop of one thread: callbacks for readable files and for alarms.

    Its time stands still while this process is stopped. Files are handled before alarms.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._alarms: dict[str, tuple[float, Callable[[], None]]] = {}
        self._slept = 0.0
        self._awake_at = time.monotonic()

    def time(self) -> float:
        """Return a monotonic time in seconds, without the time for which this process was stopped."""
        return time.monotonic() - self._slept

    def watch(self, file: int, callback: Callable[[int], None], events: int = selectors.EVENT_READ) -> None:
        if file in self._selector.get_map():
            self._selector.modify(file, events, callback)
        else:
            self._selector.register(file, events, callback)

    def forget(self, file: int) -> None:
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

    def cancel_alarm(self, name: str) -> None:
        self._alarms.pop(name, None)

    def turn(self) -> None:
        """Wait until a file is ready or an alarm is due, and call the callbacks."""
        self.awake(MAX_LAG)
        now = self.time()
        timeout = max(0.0, min((due for due, _ in self._alarms.values()), default=now + 60) - now)
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


class Link:
    """The connection to the agent, which is re-established whenever it breaks.

    Before the peer has proved to be our agent, the runner sends it no message and follows none of its messages.
    """

    def __init__(
        self,
        loop: Loop,
        settings: Settings,
        hello: Callable[[], dict[str, Any]],
        receive: Callable[[dict[str, Any]], None],
    ) -> None:
        """``hello`` describes this runner to an authenticated agent. ``receive`` handles its messages."""
        self._loop, self._settings, self._hello, self._receive = loop, settings, hello, receive
        self._socket: socket.socket | None = None
        self._nonce = ""
        self._session: Session | None = None
        self._has_warned = False
        self._incoming: list[bytes] = []
        """Pieces of an incomplete line."""
        self._outgoing = bytearray()
        self._backoff = 0.05
        self.on_disconnect: Callable[[], None] = lambda: None
        """Called when the connection to an authenticated agent ends."""
        self.welcomed = False
        self.address = ""
        """This node's address on the last connection."""

    def connect(self) -> None:
        """Connect to the address in the agent's file, and begin authentication. Retry later if that fails."""
        try:
            with open(self._settings.agent_file, encoding="utf-8") as file:
                address = json.load(file)
            try:
                self._socket = dial(address["host"], address["port"])
            finally:
                self._loop.awake()
        except (OSError, ValueError, LookupError, TypeError, OverflowError):  # the file may be damaged
            self._loop.set_alarm("connect", self._backoff, self.connect)
            self._backoff = min(2.0, self._backoff * 2)
            return
        self.address = self._socket.getsockname()[0]
        self._loop.watch(self._socket.fileno(), self._handle_ready)
        self._nonce = make_nonce()
        settings = self._settings
        hello = {"component": settings.component_name, "node": settings.node, "nonce": self._nonce}
        self._send_line({"t": "hello", **hello})

    def reconnect(self) -> None:
        """Replace the connection, since a silent agent may have been replaced at another address."""
        self.close()
        self.connect()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, or drop it without a connection: important ones are repeated after the agent's welcome."""
        if self._session is not None:
            self._send_line(message)

    def _send_line(self, message: dict[str, Any]) -> None:
        if self._socket is None:
            return
        line = Line(encode(message).encode())
        self._outgoing += line.ended if self._session is None else self._session.seal(line)
        self._flush_outgoing()

    def close(self) -> None:
        """Close the connection and drop unsent messages, without planning another attempt."""
        self._loop.cancel_alarm("connect")  # else it would connect twice after a reconnection
        had_session = self._session is not None
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
        self._socket, self._incoming, self._session, self.welcomed = None, [], None, False
        self._outgoing.clear()
        if had_session:
            self.on_disconnect()

    def _handle_ready(self, events: int) -> None:
        """Write and read what the socket is ready for. Drop the connection if the peer has closed it or it failed."""
        if events & selectors.EVENT_WRITE:
            self._flush_outgoing()
        if events & selectors.EVENT_READ and self._socket is not None:
            try:
                data = self._socket.recv(RECEIVE_SIZE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                self._receive_lines(data)
            else:
                self._drop_connection()

    def _receive_lines(self, data: bytes) -> None:
        """Handle the complete lines of new data, and keep the rest. Disconnect a peer that is not our agent."""
        *lines, remainder = data.split(b"\n")
        if lines:
            lines[0], self._incoming = b"".join((*self._incoming, lines[0])), []
        self._incoming.append(remainder)
        connection = self._socket
        for line in lines:
            if self._socket is not connection:
                return
            try:
                message = self._authenticate_line(line)
            except (ValueError, LookupError, TypeError) as error:
                self._reject_peer(error)
                return
            if message is None:
                continue
            if message["t"] == "welcome":
                self.welcomed, self._backoff = True, 0.05
            self._receive(message)
        if self._session is None and len(remainder) > MAX_CHALLENGE_LENGTH:
            self._reject_peer(ValueError("its line is too long"))

    def _reject_peer(self, error: Exception) -> None:
        if not self._has_warned:
            print(f"koala runner: the process at the agent's port is not our agent: {error!r}", file=sys.stderr)
        self._has_warned = True
        self._drop_connection()

    def _authenticate_line(self, line: bytes) -> dict[str, Any] | None:
        """Return the agent's message, or None for its challenge. Raise ``ValueError`` if it is not our agent."""
        if self._session is not None:
            return dict(json.loads(self._session.open(line)))
        settings = self._settings
        nonces = self._nonce, str(json.loads(line[TAG_LENGTH:])["nonce"])
        session = Session(settings.secret, settings.component_name, settings.node, nonces, is_agent=False)
        session.open(line)
        self._session = session
        self.send({"t": "here", **self._hello()})
        return None

    def _flush_outgoing(self) -> None:
        """Send what the socket takes now, and watch the socket for the rest."""
        if self._socket is None:
            return
        try:
            sent = self._socket.send(self._outgoing) if self._outgoing else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop_connection()
            return
        del self._outgoing[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._loop.watch(self._socket.fileno(), self._handle_ready, events)

    def _drop_connection(self) -> None:
        self.close()
        self._loop.set_alarm("connect", self._backoff, self.connect)
        self._backoff = min(2.0, self._backoff * 2)
