"""The agent's connections to its runners, JSON lines over TCP, and the secrets that authenticate both sides.

Every node of every component has a secret, which is never sent. All derive from one key, which no file of an agent or a
job contains: an embedded resource manager keeps it in memory, apart from its jobs; elsewhere it derives from the
agent's token, for only the agent knows that.
"""

import asyncio
import fcntl
import json
import os
import stat
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import structlog

from koalapy.agent.core.spool import format_write_error
from koalapy.agent.lrm.port import Lrm
from koalapy.agent.runners.runner_messages import parse_hello, parse_message
from koalapy.runner.folders import replace_file
from koalapy.runner.link import KEEPALIVE
from koalapy.runner.session import TAG_LENGTH, Line, Session, derive_key, derive_token_key
from koalapy.runner.settings import SECRET_FILE
from koalapy.system.event_loop import ACCEPTS_PER_TURN, accept_waiting, raise_backlog
from koalapy.system.process import count_open_files

log = structlog.get_logger()

MAX_HELLO_LENGTH = 8 * 1024
"""Maximum bytes of a line before authentication."""
MAX_LINE_LENGTH = 4 * 1024 * 1024
"""Maximum bytes of a line: the address list of a large gang is the longest."""
MAX_UNSENT = 4 * MAX_LINE_LENGTH
"""Bytes that may wait for a runner that does not read, before its connection is closed."""
HELLO_TIMEOUT = 30.0
"""Seconds to authenticate."""
INTRODUCTION_TIMEOUT = 2.0
"""Seconds to wait for challenged runners when all pending messages are to be read."""
MAX_UNAUTHENTICATED = 256
"""Maximum connections that are not authenticated."""
OPEN_FILES_WARNING = 0.9
"""Fraction of the open files limit from which a warning is logged."""
OPEN_FILES_HINT = "raise LimitNOFILE in the agent's unit, or ulimit -Hn"
LOOP_TURN = 0.002
"""Seconds for one turn of the event loop."""


def lrm_name(instance: str, token: str) -> str:
    """Return the name of a component's job in the resource manager. The agent touches only jobs with such names."""
    return f"koala-{instance}-{token}"


class RunnerSecrets:
    """Derives the secrets of nodes on demand."""

    def __init__(self, lrm: Lrm, cluster: str, token: str) -> None:
        self._lrm, self._cluster, self._token = lrm, cluster, token

    def secret_of(self, component: str, node: int) -> bytes | None:
        """Return the secret of a component's node; None while the resource manager's key is unknown."""
        key = self._lrm.runners_key()
        return None if key is None else derive_key(key or self._own_key, "runner", component, str(node))

    def secret_of_token(self, instance: str, token: str, node: int) -> bytes | None:
        """Return the secret of a node by its component's daemon and token."""
        return self.secret_of(lrm_name(instance, token), node)

    def hex_secrets(self, component: str, size: int) -> tuple[str, ...]:
        """Return the secrets of all nodes in hex; none while the key is unknown."""
        secrets = [self.secret_of(component, node) for node in range(size)]
        return tuple(secret.hex() for secret in secrets if secret is not None)

    @cached_property
    def _own_key(self) -> bytes:
        """The key for runners' secrets from the agent's token, derived once, since that takes long by design."""
        return derive_token_key(self._token, f"runners of {self._cluster}")


def secret_files(secrets: Sequence[str]) -> dict[str, bytes]:
    """Return name and content of the files in a component's folder from which its runners read their secrets."""
    return {SECRET_FILE.format(node=node): secret.encode() for node, secret in enumerate(secrets)}


def write_secrets(folder: Path, secrets: Sequence[str]) -> None:
    """Write the secret files into a folder. Raise ``OSError``."""
    for name, secret in secret_files(secrets).items():
        replace_file(folder / name, secret, sync=False)


def encode_line(message: dict[str, Any]) -> Line:
    """Return a message as a line of JSON, to be sent to one or many runners."""
    return Line(json.dumps(message, separators=(",", ":")).encode())


class RunnerHandler(Protocol):
    """The handler of runners' messages."""

    def create_challenge(self, runner: "RunnerConnection", hello: dict[str, Any]) -> tuple[Session, str] | None:
        """Return the session and nonce to challenge a runner with; None to reject it."""
        ...

    def admit_runner(self, runner: "RunnerConnection", here: dict[str, Any]) -> bool:
        """Return whether an authenticated runner is accepted."""
        ...

    def on_forgery(self, runner: "RunnerConnection") -> None:
        """Handle a message without the tag of the runner of this connection."""

    def receive_message(self, runner: "RunnerConnection", message: dict[str, Any]) -> None: ...

    def on_disconnect(self, runner: "RunnerConnection") -> None: ...


class LineBuffer:
    """Splits received data into lines, and keeps an unfinished one; looks at each byte once."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.size = 0

    def split_lines(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that end within ``data``."""
        *ends, partial = data.split(b"\n")
        for end in ends:
            line = b"".join((*self._pieces, end))
            self._pieces, self.size = [], 0
            yield line
        if partial:
            self._pieces.append(partial)
            self.size += len(partial)


class RunnerConnection(asyncio.Protocol):
    """One runner's connection; the handler sets ``component`` and ``node``.

    Any host may connect, so size and time are limited until the runner is authenticated.
    """

    def __init__(self, handler: RunnerHandler, connections: "RunnerConnections") -> None:
        self._handler, self._connections = handler, connections
        self._transport: asyncio.Transport | None = None
        self._line = LineBuffer()
        self.received_bytes = 0
        """Bytes."""
        self.is_authenticated = False
        self.component, self.node = "", 0
        self._session: Session | None = None
        self.introduced: asyncio.Future[None] | None = None
        """Done when the runner is authenticated or the connection is closed."""

    @property
    def is_challenged(self) -> bool:
        return self._session is not None

    @property
    def address(self) -> str:
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(peer[0]) if peer else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        for level, option, value in KEEPALIVE:
            transport.get_extra_info("socket").setsockopt(level, option, value)
        self.introduced = asyncio.get_running_loop().create_future()
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)
        try:
            for line in self._line.split_lines(data):
                self._check(len(line))
                self._take(line)
                if self._transport is None or self._transport.is_closing():
                    return
            self._check(self._line.size)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("invalid runner message", action="runner-message-invalid", error=repr(error)[:300])
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._transport = None
        if self.is_authenticated:
            self._handler.on_disconnect(self)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait since the runner does not read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send_message(self, message: dict[str, Any]) -> None:
        self.send_line(encode_line(message))

    def send_line(self, line: Line) -> None:
        """Send a line. Close the connection instead if too much waits to be sent."""
        if self.unsent_bytes > MAX_UNSENT:
            error = f"node {self.node} of {self.component} does not read what it is sent"
            log.warning("runner disconnected", action="runner-message-invalid", error=error)
            self.close()
        elif self._transport is not None:
            self._transport.write(line.ended if self._session is None else self._session.seal(line))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def read_pending(self) -> None:
        """Wait until all data that has arrived by now is processed."""
        if self._transport is None or self._transport.is_closing():
            return
        file = self._transport.get_extra_info("socket").fileno()
        unread = int.from_bytes(fcntl.ioctl(file, termios.FIONREAD, bytes(4)), sys.byteorder)
        target = self.received_bytes + unread
        while self._transport is not None and not self._transport.is_closing() and self.received_bytes < target:  # noqa: ASYNC110
            await asyncio.sleep(LOOP_TURN)

    def _check(self, size: int) -> None:
        """Raise ``ValueError`` for a line of too many bytes; fewer are allowed before authentication."""
        longest = TAG_LENGTH + (MAX_LINE_LENGTH if self.is_authenticated else MAX_HELLO_LENGTH)
        if size > longest:
            raise ValueError(f"a line of more than {longest} bytes")

    def _take(self, line: bytes) -> None:
        """Verify the tag of a line and handle it: hello, then proof of the key, then messages. Close on an error."""
        if self._session is not None:
            try:
                line = self._session.open(line)
            except ValueError:
                self._handler.on_forgery(self)
                self.close()
                return
        if self.is_authenticated:
            self._handler.receive_message(self, parse_message(line))
        elif self._session is None:
            if (challenge := self._handler.create_challenge(self, parse_hello(line))) is not None:
                self._session, nonce = challenge
                self.send_message({"t": "challenge", "nonce": nonce})
            else:
                self.close()
        else:
            message = parse_message(line)
            if message["t"] == "here" and self._handler.admit_runner(self, message):
                self.is_authenticated = True
                self._connections.mark_authenticated(self)
            else:
                self.close()


class RunnerConnections:
    """All connections, authenticated or not."""

    def __init__(self, max_unauthenticated: int = MAX_UNAUTHENTICATED) -> None:
        self._max_unauthenticated = max_unauthenticated
        self.runners: set[RunnerConnection] = set()
        self._unauthenticated: dict[RunnerConnection, asyncio.TimerHandle] = {}
        """Connections and their timeouts, the oldest first."""

    @property
    def all_connections(self) -> list[RunnerConnection]:
        return [*self.runners, *self._unauthenticated]

    @property
    def challenged(self) -> list[RunnerConnection]:
        """Connections that have received a challenge and not answered yet."""
        return [connection for connection in self._unauthenticated if connection.is_challenged]

    def add(self, connection: RunnerConnection) -> None:
        """Add a connection. Close the oldest unauthenticated one if there are too many."""
        if len(self._unauthenticated) >= self._max_unauthenticated:
            oldest = next(iter(self._unauthenticated))
            self._forget(oldest)  # connection_lost runs in a later turn; others may connect in this one
            oldest.close()
        timeout = asyncio.get_running_loop().call_later(HELLO_TIMEOUT, connection.close)
        self._unauthenticated[connection] = timeout

    def mark_authenticated(self, connection: RunnerConnection) -> None:
        self._forget(connection)
        self.runners.add(connection)

    def remove(self, connection: RunnerConnection) -> None:
        self._forget(connection)
        self.runners.discard(connection)

    def close(self) -> None:
        for connection in self.all_connections:
            connection.close()

    def _forget(self, connection: RunnerConnection) -> None:
        """Cancel a connection's timeout for authentication, and notify the waiters that it is over."""
        if connection.introduced is not None and not connection.introduced.done():
            connection.introduced.set_result(None)
        if timeout := self._unauthenticated.pop(connection, None):
            timeout.cancel()


class RunnerServer:
    """Listens for runners. Reuses its port after a restart if possible, so that they reconnect at once."""

    def __init__(
        self, host: str, address_file: Path, *, is_public: bool = False, max_unauthenticated: int = MAX_UNAUTHENTICATED
    ) -> None:
        """Set up. ``is_public``: the address file is read by runners of other accounts."""
        self._host, self._is_public = host, is_public
        self._file = address_file
        self._connections = RunnerConnections(max_unauthenticated)
        self._server: asyncio.Server | None = None
        self._unwritten = ""
        """Content to write to the address file; empty when written."""
        self.address = ""
        """Address for runners, as text."""
        self._short_of_files = False

    async def listen(self, handler: RunnerHandler) -> None:
        """Accept runners from now on. Use the port of the earlier agent, which runners know, if it is free."""

        def connection() -> RunnerConnection:
            return RunnerConnection(handler, self._connections)

        try:
            port = int(json.loads(self._file.read_bytes())["port"]) if self._is_ours() else 0
            self._server = await _listen(connection, self._host, port)
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            self._server = await _listen(connection, self._host, 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"{self._host}:{port}"
        self._unwritten = json.dumps({"host": self._host, "port": port})
        self.write_address()

    def write_address(self) -> None:
        """Write the address file if it changed. If the disk is full, the next call retries."""
        if not self._unwritten:
            return
        try:
            if not self._is_ours() or self._file.read_bytes() != self._unwritten.encode():
                replace_file(self._file, self._unwritten.encode(), 0o644 if self._is_public else 0o600)
        except OSError as error:
            log.error("address not written", action="address-not-written", reason=format_write_error(self._file, error))
            return
        self._unwritten = ""

    def _is_ours(self) -> bool:
        """Return whether the address file is a regular file of this account, so that it can be trusted."""
        try:
            status = self._file.lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()

    def check_open_files(self) -> None:
        """Log a warning once when the limit of open files is near, since further runners could not connect."""
        was_short, (used, limit) = self._short_of_files, count_open_files()
        self._short_of_files = used > limit * OPEN_FILES_WARNING
        if self._short_of_files and not was_short:
            log.warning(
                "the limit of open files is nearly reached",
                action="open-files-low",
                open_files=used,
                limit=limit,
                hint=OPEN_FILES_HINT,
            )

    async def read_pending(self) -> None:
        """Process the data that runners sent while this process was stopped.

        Runners that are still authenticating are waited for ``INTRODUCTION_TIMEOUT`` seconds.
        """
        if self._server is not None:
            await accept_waiting(self._server)
        await asyncio.sleep(LOOP_TURN)  # accepted sockets become connections
        for connection in self._connections.all_connections:
            await connection.read_pending()
        if introducing := self._connections.challenged:
            await asyncio.wait(
                [connection.introduced for connection in introducing if connection.introduced],
                timeout=INTRODUCTION_TIMEOUT,
            )
            for connection in introducing:
                await connection.read_pending()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._connections.close()


async def _listen(connection: Callable[[], RunnerConnection], host: str, port: int) -> asyncio.Server:
    server = await asyncio.get_running_loop().create_server(connection, host, port, backlog=ACCEPTS_PER_TURN)
    raise_backlog(server)
    return server
