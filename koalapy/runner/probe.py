"""Probing whether this node can open connections to the others: each listens, and the others connect."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
from collections.abc import Callable

from koalapy.runner.link import Loop
from koalapy.runner.settings import Failure

CONNECT_TIMEOUT = 3.0
REPLY_TIMEOUT = 15.0
"""Seconds for the reply of a node that was reached: one that is busy, or stands still for a while, is late with it."""
MAX_CONCURRENT_PROBES = 128
"""Connections that are tried at the same time: a process may have so many files open."""
MAX_REPLY_SIZE = 128
MAX_PEERS = 256
"""Connections of one listener: who probes leaves as soon as it has the reply, so that the oldest makes room."""


def socket_for(host: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


class ProbeListener:
    """A port at this node's address. Who connects is sent this listener's nonce, and the address it came from."""

    def __init__(
        self, loop: Loop, name: str, host: str, ports: tuple[int, int] | None, max_peers: int = MAX_PEERS
    ) -> None:
        """``ports`` are the first and last to choose from. Raises ``Failure``."""
        self._loop, self._max_peers = loop, max_peers
        self._listener = socket_for(host)
        self._peers: dict[int, socket.socket] = {}
        self.nonce = os.urandom(8).hex()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first, last = ports or (0, 0)
        for port in range(first, last + 1):
            try:
                self._listener.bind((host, port))
                self._listener.listen(1024)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or port == last:
                    self._listener.close()
                    where = f"a port of {first}-{last}" if ports else "a port"
                    raise Failure(f"node {name} cannot listen on {where} of {host}: {error.strerror}") from error
        self.port: int = self._listener.getsockname()[1]
        loop.watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        for number in list(self._peers):
            self._disconnect(number)
        self._loop.forget(self._listener.fileno())
        self._listener.close()

    def _accept(self, _events: int) -> None:
        try:
            peer, address = self._listener.accept()
        except OSError:  # gone again
            return
        peer.setblocking(False)
        if len(self._peers) >= self._max_peers:
            self._disconnect(next(iter(self._peers)))
        self._peers[peer.fileno()] = peer
        self._loop.watch(peer.fileno(), lambda _: self._disconnect(peer.fileno()))
        try:
            peer.send(f"{self.nonce} {address[0]}\n".encode())
        except OSError:
            self._disconnect(peer.fileno())

    def _disconnect(self, number: int) -> None:
        self._loop.forget(number)
        self._peers.pop(number).close()


class ProbeRound:
    """Probes of many listeners; ``done`` gets the reasons why some could not be reached, by their number."""

    def __init__(
        self, loop: Loop, host: str, listeners: dict[int, tuple[str, int, str]], done: Callable[[dict[int, str]], None]
    ) -> None:
        """``listeners`` are (host, port, nonce) by number; all connections come from ``host``."""
        self._loop, self._host, self._listeners, self._done = loop, host, listeners, done
        self._next = list(listeners)[::-1]
        self._open: dict[int, tuple[socket.socket, bytes]] = {}
        self._failures: dict[int, str] = {}

    def start(self) -> None:
        self._probe_next()

    def close(self) -> None:
        self._next.clear()
        for number in list(self._open):
            self._disconnect(number)

    def _probe_next(self) -> None:
        while self._next and len(self._open) < MAX_CONCURRENT_PROBES:
            self._probe(self._next.pop())
        if not self._open:
            self._done(self._failures)

    def _probe(self, number: int) -> None:
        host, port, _ = self._listeners[number]
        connection = socket_for(host)
        # It ends at once, so that the port is not kept busy for a minute: ranks may want it next.
        linger = (1).to_bytes(4, sys.byteorder) + bytes(4)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        try:
            connection.bind((self._host, 0))  # as Open MPI does
            code = connection.connect_ex((host, port))
        except OSError as error:
            code = error.errno or errno.EINVAL
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            self._failures[number] = os.strerror(code).lower()
            return
        self._open[number] = connection, b""
        self._loop.watch(connection.fileno(), lambda _: self._connected(number), selectors.EVENT_WRITE)
        self._loop.after(f"probe-{number}", CONNECT_TIMEOUT, lambda: self._finish(number, "timed out"))

    def _connected(self, number: int) -> None:
        connection, _ = self._open[number]
        if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._finish(number, os.strerror(code).lower())
        else:
            self._loop.after(f"probe-{number}", REPLY_TIMEOUT, lambda: self._finish(number, "no reply"))
            self._loop.watch(connection.fileno(), lambda _: self._read_reply(number))

    def _read_reply(self, number: int) -> None:
        connection, reply = self._open[number]
        try:
            data = connection.recv(MAX_REPLY_SIZE)
        except BlockingIOError:
            return
        except OSError as error:
            self._finish(number, (error.strerror or "connection lost").lower())
            return
        reply += data
        self._open[number] = connection, reply
        if not data or b"\n" in reply or len(reply) >= MAX_REPLY_SIZE:
            self._finish(number, self._error_in(reply, self._listeners[number][2]))

    def _error_in(self, reply: bytes, nonce: str) -> str:
        answered, _, seen = reply.decode("ascii", "replace").rstrip("\n").partition(" ")
        if answered != nonce:
            return "something else answers there"
        return "" if seen == self._host else f"it is seen there as {seen}, and Open MPI cannot cross such a translation"

    def _finish(self, number: int, reason: str) -> None:
        if reason:
            self._failures[number] = reason
        self._disconnect(number)
        self._probe_next()

    def _disconnect(self, number: int) -> None:
        connection, _ = self._open.pop(number)
        self._loop.cancel(f"probe-{number}")
        self._loop.forget(connection.fileno())
        connection.close()
