"""Accept connections, and read their first line."""

import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from koalapy.relay.attempts import Limits
from koalapy.runner.connections import (
    MAX_FIRST_LINE,
    LineConnection,
    LineTooLong,
    Loop,
    Refused,
    Side,
    open_listener,
    reset_socket,
)
from koalapy.runner.relay_streams import Listener, PipePool

BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Stranger:
    """A connection that has not sent its first line yet, or a child's answer to a challenge."""

    address: str
    since: float
    handle: Callable[[LineConnection, bytes], None]


class Server:
    """A listening socket of a hub or head, and the connections to it that have not sent their first line."""

    def __init__(
        self,
        loop: Loop,
        pool: PipePool,
        address: tuple[str, int],
        make_side: Callable[[socket.socket], Side],
        limits: Limits,
        handle: Callable[[LineConnection, bytes], None],
        refuse: Callable[[Refused], None],
    ) -> None:
        """Listen. ``make_side`` returns the side of an accepted connection. Raise ``OSError``.

        ``handle`` gets each connection with its first line; it detaches or keeps the connection, or raises ``Refused``.
        ``refuse`` records a refusal.
        """
        self._loop, self._pool, self._make_side, self._limits = loop, pool, make_side, limits
        self._handle, self._refuse = handle, refuse
        self._strangers: dict[LineConnection, Stranger] = {}
        """In order of their arrival."""
        self._listener = Listener(
            loop, open_listener(address, BACKLOG), self._accept, lambda reason: refuse(Refused("files", reason))
        )
        self.port = self._listener.port
        self._listener.resume()

    @property
    def stranger_count(self) -> int:
        return len(self._strangers)

    def close(self) -> None:
        self._listener.close()
        for connection in self._strangers:
            connection.close(reset=True)
        self._strangers.clear()

    def close_slow_strangers(self) -> None:
        """Close connections that have not sent their first line in time."""
        until = self._loop.time() - self._limits.first_line_timeout
        for connection, stranger in list(self._strangers.items()):
            if stranger.since <= until:
                self._drop(connection, Refused("slow", f"{stranger.address} has sent no line in time"))

    def _accept(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        if len(self._strangers) >= self._limits.strangers:
            addresses = Counter(stranger.address for stranger in self._strangers.values())
            address = addresses.most_common(1)[0][0]
            oldest = next(c for c, stranger in self._strangers.items() if stranger.address == address)
            self._drop(oldest, Refused("strangers", f"{address} has most of {len(self._strangers)} new connections"))
        try:
            lines = self._expect_line(self._make_side(connection))
        except OSError as error:
            reset_socket(connection)
            self._refuse(Refused("files", error.strerror or str(error)))
            return
        self._strangers[lines] = Stranger(peer[0], self._loop.time(), self._handle)
        lines.start()

    def adopt(self, side: Side, address: str, line: bytes, handle: Callable[[LineConnection, bytes], None]) -> None:
        """Send a line to a connection that was not accepted here, and expect a first line of it. Raise ``OSError``."""
        connection = self._expect_line(side)
        self._strangers[connection] = Stranger(address, self._loop.time(), handle)
        if line:
            connection.send(line)

    def expect_another(self, connection: LineConnection, handle: Callable[[LineConnection, bytes], None]) -> None:
        """Expect another line of a connection, in as much time as for the first one, which is being handled."""
        address = self._strangers.pop(connection).address
        self._strangers[connection] = Stranger(address, self._loop.time(), handle)

    def _expect_line(self, side: Side) -> LineConnection:
        buffer = self._pool.small if side.is_plain else self._pool.large
        return LineConnection(self._loop, side, buffer, self._receive_first_line, self._end, MAX_FIRST_LINE)

    def _drop(self, connection: LineConnection, reason: Refused) -> None:
        self._strangers.pop(connection, None)
        connection.close(reset=True)
        self._refuse(reason)

    def _receive_first_line(self, connection: LineConnection, line: bytes) -> None:
        stranger = self._strangers.get(connection)
        if stranger is None:
            return
        try:
            stranger.handle(connection, line)
        except Refused as error:
            self._drop(connection, error)
        except (ValueError, RecursionError) as error:
            self._drop(connection, Refused("malformed", f"{stranger.address} has sent an invalid line: {error!r:.200}"))
        if self._strangers.get(connection) is stranger:
            del self._strangers[connection]

    def _end(self, connection: LineConnection, error: OSError | None) -> None:
        self._strangers.pop(connection, None)
        if isinstance(error, LineTooLong):
            self._refuse(Refused("malformed", str(error)))
        elif isinstance(error, ssl.SSLError):
            self._refuse(Refused("tls", f"the TLS handshake failed: {error.reason or error}"))
