"""Trying whether this node can open connections to the others: each has a door at which the others knock."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
from collections.abc import Callable

from koalapy.runtime.link import Loop
from koalapy.runtime.settings import Failure

KNOCK_WITHIN = 3.0
AT_ONCE = 128
"""Connections that are tried at the same time: a process may have so many files open."""
LONGEST_WORD = 128
GUESTS = 256
"""Connections at a door: who knocks leaves as soon as it has heard the word, so that the oldest makes room."""


def socket_for(host: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


class Door:
    """A port at this node's address. Who comes is told a word that only this door knows, and whence it came."""

    def __init__(self, loop: Loop, name: str, host: str, ports: tuple[int, int] | None) -> None:
        """``ports`` are the first and last to choose from. Raises ``Failure``."""
        self._loop = loop
        self._listener = socket_for(host)
        self._guests: dict[int, socket.socket] = {}
        self.word = os.urandom(8).hex()
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
        loop.watch(self._listener.fileno(), self._come)

    def close(self) -> None:
        for number in list(self._guests):
            self._leave(number)
        self._loop.forget(self._listener.fileno())
        self._listener.close()

    def _come(self, _events: int) -> None:
        try:
            guest, address = self._listener.accept()
        except OSError:  # gone again
            return
        guest.setblocking(False)
        if len(self._guests) >= GUESTS:
            self._leave(next(iter(self._guests)))
        self._guests[guest.fileno()] = guest
        self._loop.watch(guest.fileno(), lambda _: self._leave(guest.fileno()))
        try:
            guest.send(f"{self.word} {address[0]}\n".encode())
        except OSError:
            self._leave(guest.fileno())

    def _leave(self, number: int) -> None:
        self._loop.forget(number)
        self._guests.pop(number).close()


class Round:
    """Knocking at many doors; ``done`` gets the reasons why some could not be reached, by their number."""

    def __init__(
        self, loop: Loop, host: str, doors: dict[int, tuple[str, int, str]], done: Callable[[dict[int, str]], None]
    ) -> None:
        """``doors`` are (host, port, word) by number; all connections come from ``host``."""
        self._loop, self._host, self._doors, self._done = loop, host, doors, done
        self._next = list(doors)[::-1]
        self._open: dict[int, tuple[socket.socket, bytes]] = {}
        self._failures: dict[int, str] = {}

    def begin(self) -> None:
        self._go_on()

    def close(self) -> None:
        self._next.clear()
        for number in list(self._open):
            self._leave(number)

    def _go_on(self) -> None:
        while self._next and len(self._open) < AT_ONCE:
            self._knock(self._next.pop())
        if not self._open:
            self._done(self._failures)

    def _knock(self, number: int) -> None:
        host, port, _ = self._doors[number]
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
        self._loop.after(f"knock-{number}", KNOCK_WITHIN, lambda: self._end(number, "timed out"))

    def _connected(self, number: int) -> None:
        connection, _ = self._open[number]
        if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._end(number, os.strerror(code).lower())
        else:
            self._loop.watch(connection.fileno(), lambda _: self._hear(number))

    def _hear(self, number: int) -> None:
        connection, heard = self._open[number]
        try:
            data = connection.recv(LONGEST_WORD)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(number, (error.strerror or "connection lost").lower())
            return
        heard += data
        self._open[number] = connection, heard
        if not data or b"\n" in heard or len(heard) >= LONGEST_WORD:
            self._end(number, self._wrong(heard, self._doors[number][2]))

    def _wrong(self, heard: bytes, word: str) -> str:
        said, _, seen = heard.decode("ascii", "replace").rstrip("\n").partition(" ")
        if said != word:
            return "something else answers there"
        return "" if seen == self._host else f"it is seen there as {seen}, and Open MPI cannot cross such a translation"

    def _end(self, number: int, reason: str) -> None:
        if reason:
            self._failures[number] = reason
        self._leave(number)
        self._go_on()

    def _leave(self, number: int) -> None:
        connection, _ = self._open.pop(number)
        self._loop.cancel(f"knock-{number}")
        self._loop.forget(connection.fileno())
        connection.close()
