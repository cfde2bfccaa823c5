"""How many connections the daemon has, and for how long: who only holds one open takes it from nobody else."""

import asyncio
from typing import Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_CONNECTIONS = 4096
"""HTTP connections, where the system allows so many."""
RESERVED = 64
"""Connections of these that no request of a user's may keep busy: for those that come, and for agents."""
OWN_FILES = 256
"""Files that the daemon needs for itself: its database, its embedded agents, the agents' WebSockets."""
FILES_WANTED = 2 * MAX_CONNECTIONS + OWN_FILES
"""Open files; programs of embedded clusters inherit the limit."""
HEADERS_TIMEOUT = 20.0
"""Seconds from the beginning of a connection, or from the last answer, until a request's headers are complete."""


class Held(Protocol):
    """What keeps a connection open."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def abort(self) -> None: ...


class Connections:
    """The HTTP connections: when there are too many, one that waits for a request makes way, the oldest first."""

    def __init__(self, files: int, headers_timeout: float = HEADERS_TIMEOUT) -> None:
        # A request may have a file open beside its connection.
        self.max_open = min(MAX_CONNECTIONS, max(2 * RESERVED, (files - OWN_FILES) // 2))
        self.headers_timeout = headers_timeout
        self._open: set[Held] = set()
        self._waiting: dict[Held, asyncio.TimerHandle] = {}
        """Those without a request, and when they are closed; in the order in which they began to wait."""

    @property
    def max_requests(self) -> int:
        """Requests of users at a time."""
        return self.max_open - RESERVED

    def protocol(self) -> type["Connection"]:
        """What uvicorn makes for each connection."""

        class Counted(Connection):
            all = self

        return Counted

    def opened(self, connection: Held) -> None:
        self._open.add(connection)
        self.waits(connection)
        if len(self._open) > self.max_open:
            self._close(next(iter(self._waiting)))

    def waits(self, connection: Held) -> None:
        """It has no request, or not the whole head of one: it may have until the deadline."""
        if connection in self._open and connection not in self._waiting:
            self._waiting[connection] = connection.loop.call_later(self.headers_timeout, self._close, connection)

    def works(self, connection: Held) -> None:
        if timer := self._waiting.pop(connection, None):
            timer.cancel()

    def left(self, connection: Held) -> None:
        """It is closed, or not HTTP any more."""
        self.works(connection)
        self._open.discard(connection)

    def _close(self, connection: Held) -> None:
        self.left(connection)
        connection.abort()


class Connection(HttpToolsProtocol):
    """Uvicorn's, which waits for a request as long as it takes, but for one that tells when it waits."""

    all: Connections

    def abort(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.all.left(self)
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self.all.left(self)
        super().handle_websocket_upgrade()

    def on_headers_complete(self) -> None:
        self.all.works(self)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else another request came along with it
            self.all.waits(self)
