"""Accept connections whose first line is not known yet."""

import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from koalapy.relay.attempts import Limits
from koalapy.runner.connections import (
    MAX_FIRST_LINE,
    LineConnection,
    LineTooLong,
    Refused,
    Side,
    is_sealed,
    reset_socket,
)
from koalapy.runner.link import Loop
from koalapy.runner.relay_streams import Listener, PipePool

BACKLOG = 4096
MAX_TRUSTED = 4096


@dataclass(frozen=True, slots=True)
class Stranger:
    """A connection that has not sent its first line."""

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
        """Connections from addresses that have authenticated no stream, in order of their arrival."""
        self._expected: dict[LineConnection, Stranger] = {}
        """Connections from other addresses. An overloaded relay may have many."""
        self._trusted: dict[str, None] = {}
        """Addresses that have authenticated a stream, the last ones."""
        listener = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._listener = Listener(loop, listener, self._accept, lambda reason: refuse(Refused("files", reason)))
        self.port = self._listener.port
        self._listener.resume()

    @property
    def stranger_count(self) -> int:
        return len(self._strangers) + len(self._expected)

    def close(self) -> None:
        self._listener.close()
        for connection in (*self._strangers, *self._expected):
            connection.close(reset=True)
        self._strangers.clear()
        self._expected.clear()

    def close_slow_strangers(self) -> None:
        """Close connections that have not sent their first line in time."""
        until = self._loop.time() - self._limits.first_line_timeout
        for connections in (self._strangers, self._expected):
            for connection, stranger in list(connections.items()):
                if stranger.since > until:
                    break
                self._drop(connection, Refused("slow", f"{stranger.address} has sent no first line in time"))

    def _accept(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        is_trusted = peer[0] in self._trusted
        connections = self._expected if is_trusted else self._strangers
        if len(connections) >= (self._limits.streams if is_trusted else self._limits.strangers):
            self._drop_oldest(connections)
        try:
            lines = self._expect_line(self._make_side(connection))
        except OSError as error:
            reset_socket(connection)
            self._refuse(Refused("files", error.strerror or str(error)))
            return
        connections[lines] = Stranger(peer[0], self._loop.time(), self._handle)
        lines.start()

    def adopt(self, side: Side, address: str, line: bytes, handle: Callable[[LineConnection, bytes], None]) -> None:
        """Send a line to a connection that was not accepted here, and expect a first line of it. Raise ``OSError``."""
        connection = self._expect_line(side)
        self._expected[connection] = Stranger(address, self._loop.time(), handle)
        if line:
            connection.send(line)

    def _expect_line(self, side: Side) -> LineConnection:
        buffer = self._pool.small if side.is_plain else self._pool.large
        return LineConnection(self._loop, side, buffer, self._receive_first_line, self._end, MAX_FIRST_LINE)

    def _drop_oldest(self, connections: Mapping[LineConnection, Stranger]) -> None:
        counts = Counter(stranger.address for stranger in connections.values())
        address = counts.most_common(1)[0][0]
        oldest = next(c for c, stranger in connections.items() if stranger.address == address)
        self._drop(oldest, Refused("strangers", f"{address} has most of {len(connections)} new connections"))

    def _forget(self, connection: LineConnection) -> Stranger | None:
        return self._strangers.pop(connection, None) or self._expected.pop(connection, None)

    def _drop(self, connection: LineConnection, reason: Refused) -> None:
        self._forget(connection)
        connection.close(reset=True)
        self._refuse(reason)

    def _receive_first_line(self, connection: LineConnection, line: bytes) -> None:
        stranger = self._forget(connection)
        if stranger is None:
            return
        try:
            stranger.handle(connection, line)
        except Refused as error:
            self._drop(connection, error)
            return
        if is_sealed(line):
            self._trusted.pop(stranger.address, None)
            self._trusted[stranger.address] = None
            if len(self._trusted) > MAX_TRUSTED:
                del self._trusted[next(iter(self._trusted))]

    def _end(self, connection: LineConnection, error: OSError | None) -> None:
        self._forget(connection)
        if isinstance(error, LineTooLong):
            self._refuse(Refused("malformed", str(error)))
        elif isinstance(error, ssl.SSLError):
            self._refuse(Refused("tls", f"the TLS handshake failed: {error.reason or error}"))
