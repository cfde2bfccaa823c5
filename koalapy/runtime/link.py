"""The runner's event loop, and its connection to the agent: JSON, one message a line, over TCP."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable

from koalapy.runtime.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


encode = json.JSONEncoder(separators=(",", ":")).encode


def dial(host: str, port: int) -> socket.socket:
    """Connect within 3 s, without asking the resolver if the address is a number; ``OSError``."""
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        connection.settimeout(3.0)
        connection.connect((host, port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
    except OSError:
        connection.close()
        raise
    return connection


class Loop:
    """Callbacks by readiness of a file and by time; one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._alarms: dict[str, tuple[float, Callable[[], None]]] = {}

    def watch(self, file: int, callback: Callable[[int], None], events: int = selectors.EVENT_READ) -> None:
        if file in self._selector.get_map():
            self._selector.modify(file, events, callback)
        else:
            self._selector.register(file, events, callback)

    def forget(self, file: int) -> None:
        if file in self._selector.get_map():
            self._selector.unregister(file)

    def after(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Call back once, in that many seconds; setting an alarm of the same name anew moves it."""
        self._alarms[name] = (time.monotonic() + seconds, callback)

    def cancel(self, name: str) -> None:
        self._alarms.pop(name, None)

    def turn(self) -> None:
        now = time.monotonic()
        timeout = min((due for due, _ in self._alarms.values()), default=now + 60) - now
        files = self._selector.get_map()
        for key, events in self._selector.select(max(0.0, timeout)):
            if files.get(key.fd) is key:  # an earlier callback may have closed it
                key.data(events)
        now = time.monotonic()
        for name, (due, callback) in list(self._alarms.items()):
            if due <= now and self._alarms.get(name, (0, None))[1] is callback:
                del self._alarms[name]
                callback()


class Link:
    """The connection to the agent; made again after every break, for as long as the lease lasts."""

    def __init__(self, loop: Loop, settings: Settings, hello: Callable[[], dict[str, Any]]) -> None:
        self._loop, self._settings, self._hello = loop, settings, hello
        self._socket: socket.socket | None = None
        self._incoming: list[bytes] = []
        """Pieces of a line that has not ended."""
        self._outgoing = bytearray()
        self._backoff = 0.05
        self.welcomed = False
        self.address = ""
        """This node's own, as far as the connection tells."""
        self.receive: Callable[[dict[str, Any]], None] = lambda message: None

    def connect(self) -> None:
        try:
            with open(self._settings.agent_file, encoding="utf-8") as file:
                address = json.load(file)
            self._socket = dial(address["host"], address["port"])
        except (OSError, ValueError, KeyError):
            self._loop.after("connect", self._backoff, self.connect)
            self._backoff = min(2.0, self._backoff * 2)
            return
        self.address = self._socket.getsockname()[0]
        self._loop.watch(self._socket.fileno(), self._ready)
        self.send(self._hello())

    def send(self, message: dict[str, Any]) -> None:
        """Send, or drop while there is no connection: whatever matters is said again after the welcome."""
        if self._socket is None:
            return
        self._outgoing += encode(message).encode() + b"\n"
        self._flush()

    def close(self) -> None:
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
        self._socket, self._incoming, self.welcomed = None, [], False
        self._outgoing.clear()

    def _ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if events & selectors.EVENT_READ and self._socket is not None:
            try:
                data = self._socket.recv(256 * 1024)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                self._take(data)
            else:
                self._broken()

    def _take(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0], self._incoming = b"".join((*self._incoming, lines[0])), []
        self._incoming.append(rest)
        for line in lines:
            message = json.loads(line)
            if message["t"] == "welcome":
                self.welcomed, self._backoff = True, 0.05
            self.receive(message)

    def _flush(self) -> None:
        if self._socket is None:
            return
        try:
            sent = self._socket.send(self._outgoing) if self._outgoing else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._broken()
            return
        del self._outgoing[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._loop.watch(self._socket.fileno(), self._ready, events)

    def _broken(self) -> None:
        self.close()
        self._loop.after("connect", self._backoff, self.connect)
