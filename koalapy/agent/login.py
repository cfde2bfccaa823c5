"""Logins on a head node: the kernel identifies the account, the agent attests it, and the daemon decides.

On the socket the agent sends its cluster and its daemon's URL, the command requests a login, and the agent answers with
a token from the daemon or an error.
"""

import asyncio
import fcntl
import json
import os
import pwd
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import structlog

from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.runners.uplink import Uplink
from koalapy.model.throttle import Throttle
from koalapy.protocol.messages import Vouch, Vouched, Welcome
from koalapy.system.clock import SYSTEM_CLOCK, Clock
from koalapy.system.event_loop import ACCEPTS_PER_TURN, raise_backlog
from koalapy.system.files import DIRECTORY, MAX_LINE_BYTES, open_socket_folder, socket_address
from koalapy.system.process import get_peer

log = structlog.get_logger()

MAX_CONNECTIONS = 128
MAX_CONNECTIONS_PER_ACCOUNT = 4
REQUEST_TIMEOUT_S = 10.0
NAME_SERVICE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 3.0
"""How long a login waits for the daemon's connection: daemon or agent may just have restarted."""
DAEMON_TIMEOUT_S = 10.0
SOCKET_MODE = 0o666
_PROTOCOL = 1
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class LoginRejected(Exception):
    """The agent attests no account; ``hint`` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class LoginServer:
    """A Unix socket at which users of this host log in."""

    def __init__(self, settings: AgentSettings, uplink: Uplink, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._cluster, self._uplink = settings.cluster, uplink
        self._url = settings.url
        self._paths = settings.login_sockets
        """The socket is made at the first path where that is possible."""
        self._own_only = settings.identity == "own"
        """Whether only the agent's own account may log in."""
        self._jobs_are_own = settings.identity == "service"
        """Whether the cluster's jobs run as the agent's account."""
        self._users_url = settings.url
        self._trust = settings.trust
        self._ca = ""
        self._connected = asyncio.Event()
        self._pending: dict[str, asyncio.Future[Vouched]] = {}
        self._throttle = Throttle(burst=12, interval=5.0)
        self._connections: Counter[int] = Counter()
        self._server: asyncio.Server | None = None
        self._bound: BoundSocket | None = None

    async def listen(self) -> None:
        """Listen at the first usable path. Without one, users of this host cannot log in; nothing else is affected."""
        failures = []
        for path in self._paths:
            try:
                self._bound = BoundSocket(path)
            except (OSError, ValueError) as error:
                failures.append(f"{path}: {_error_text(error)}")
                continue
            self._server = await asyncio.start_unix_server(
                self._serve_connection, sock=self._bound.socket, limit=MAX_LINE_BYTES, backlog=ACCEPTS_PER_TURN
            )
            raise_backlog(self._server)
            log.info("users of this host can log in", action="login-socket", cluster=self._cluster, socket=str(path))
            break
        if failures:
            hint = f"make {DIRECTORY} for this account (RuntimeDirectory=koala), or set login_socket"
            log.warning("not every user of this host can log in", action="login-socket", reasons=failures, hint=hint)

    def close(self) -> None:
        """Stop listening for logins, remove the socket, and fail the pending logins."""
        if self._server is not None:
            self._server.close()
        if self._bound is not None:
            self._bound.close()
        self.lost()

    def welcomed(self, message: Welcome, url: str) -> None:
        """Allow logins: the daemon at ``url`` has accepted this agent and named the URL for users."""
        self._connected.set()
        self._url, self._users_url = url, message.users_url or url
        self._ca = self._trust.shared_authorities()

    def lost(self) -> None:
        """Fail pending logins: the connection to the daemon has ended."""
        self._connected.clear()
        for future in self._pending.values():
            if not future.done():
                future.set_result(Vouched(ident="", error="the connection to the daemon has ended", hint="try again"))

    def vouched(self, message: Vouched) -> None:
        """Pass the daemon's answer to the login that waits for it."""
        future = self._pending.get(message.ident)
        if future is not None and not future.done():
            future.set_result(message)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one local client, identified by the kernel, within the limits of connections for each account."""
        uid = -1
        try:
            uid = get_peer(writer.get_extra_info("socket")).uid
            if self._connections.total() >= MAX_CONNECTIONS or self._connections[uid] >= MAX_CONNECTIONS_PER_ACCOUNT:
                return
            self._connections[uid] += 1
            try:
                await self._handle_request(uid, reader, writer)
            finally:
                self._connections[uid] -= 1
                self._connections += Counter()  # removes zero counts
        except (OSError, ValueError, TimeoutError, RecursionError) as error:
            log.info("login connection failed", action="login-broken-off", uid=uid, error=_error_text(error))
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _handle_request(self, uid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the greeting, read a request, and reply with a login or an error.

        Raise ``ValueError`` for any other request.
        """
        greeting = {"koala": _PROTOCOL, "cluster": self._cluster, "url": self._users_url, "ca": self._ca}
        await _send(writer, greeting)
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            line = await reader.readline()
        if not line.endswith(b"\n"):
            return
        request = json.loads(line)
        if not isinstance(request, dict) or request.get("ask") != "login":
            raise ValueError("the request is not for a login")
        try:
            answer = await self._request_login(uid)
        except LoginRejected as rejection:
            log.warning("login rejected", action="login-refused", uid=uid, error=rejection.message)
            await _send(writer, {"error": rejection.message, "hint": rejection.hint})
            return
        login = {"token": answer.token, "user": answer.user, "role": answer.role, "lifetime": answer.lifetime}
        await _send(writer, login if answer.token else {"error": answer.error, "hint": answer.hint})

    async def _request_login(self, uid: int) -> Vouched:
        """Obtain a login from the daemon for the account with this uid. Raise ``LoginRejected``."""
        if self._own_only and uid != os.geteuid():
            owner = await _account_name(os.geteuid())
            raise LoginRejected(f"the agent of {self._cluster} accepts logins of {owner} only")
        if wait := self._throttle.count_if_allowed(uid, self._clock.monotonic()):
            raise LoginRejected(f"too many logins of uid {uid} on {self._cluster}", f"try again in {wait:.0f} s")
        account = await _account_name(uid)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._connected.wait()
        except TimeoutError:
            message = f"the agent of {self._cluster} has no connection to the daemon at {self._url}"
            raise LoginRejected(message, "try again later") from None
        ident = uuid4().hex
        future: asyncio.Future[Vouched] = asyncio.get_running_loop().create_future()
        self._pending[ident] = future
        try:
            runs_jobs = self._jobs_are_own and uid == os.geteuid()
            self._uplink.send_soon(Vouch(ident=ident, account=account, uid=uid, runs_jobs=runs_jobs), urgent=True)
            async with asyncio.timeout(DAEMON_TIMEOUT_S):
                return await future
        except TimeoutError:
            message = f"the daemon at {self._url} has not answered for {DAEMON_TIMEOUT_S:g} s"
            raise LoginRejected(message, "try again later") from None
        finally:
            del self._pending[ident]


class BoundSocket:
    """A socket that every account of this host may connect to, and that only this account can replace."""

    def __init__(self, path: Path) -> None:
        """Make the socket. Raise ``OSError``, or ``ValueError`` if others could replace it or another agent listens."""
        if path.parent == DIRECTORY:
            with suppress(OSError):
                DIRECTORY.mkdir(mode=0o755)
                DIRECTORY.chmod(0o755)
        self._name = path.name
        self._folder, owner = open_socket_folder(path.parent)
        try:
            if owner not in (0, os.geteuid()):
                raise ValueError(f"{path.parent} belongs to another account (uid {owner})")
            self._lock = _open_lock(f".{self._name}.lock", self._folder)
        except BaseException:
            os.close(self._folder)
            raise
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self._bind_socket()
        except BaseException:
            self._release()
            raise
        self._created = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)

    def _bind_socket(self) -> None:
        """Listen under a temporary name and rename it, so that the socket is replaced at once.

        Raise ``ValueError`` if another agent listens there.
        """
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError("another agent listens there") from None
        fresh = f".{self._name}.{os.urandom(4).hex()}"
        self.socket.bind(socket_address(self._folder, fresh))
        try:
            os.chmod(fresh, SOCKET_MODE, dir_fd=self._folder)
            self.socket.listen(MAX_CONNECTIONS)
            self.socket.setblocking(False)
            os.rename(fresh, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            os.unlink(fresh, dir_fd=self._folder)
            raise

    def close(self) -> None:
        """Close the socket and remove it, unless another one has replaced it."""
        with suppress(OSError):
            current = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
            if os.path.samestat(current, self._created):
                os.unlink(self._name, dir_fd=self._folder)
        self._release()

    def _release(self) -> None:
        self.socket.close()
        os.close(self._lock)
        os.close(self._folder)


def _open_lock(name: str, folder: int) -> int:
    """Open a lock file in an open folder. Replace one that another account left. Raise ``OSError``."""
    try:
        return os.open(name, _LOCK_FLAGS, 0o600, dir_fd=folder)
    except PermissionError:
        # The agent ran as another account before. This fails too unless the folder belongs to this account now.
        os.unlink(name, dir_fd=folder)
        return os.open(name, _LOCK_FLAGS, 0o600, dir_fd=folder)


async def _account_name(uid: int) -> str:
    """Return the name of an account of this host. Raise ``LoginRejected`` if it has none."""
    try:
        async with asyncio.timeout(NAME_SERVICE_TIMEOUT_S):
            return (await asyncio.to_thread(pwd.getpwuid, uid)).pw_name
    except KeyError:
        raise LoginRejected(f"this host has no account with the uid {uid}") from None
    except TimeoutError:
        message = f"this host's name service has not answered for {NAME_SERVICE_TIMEOUT_S:g} s"
        raise LoginRejected(message, "try again later") from None


async def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send a message as a line of JSON. Raise ``TimeoutError`` if the client does not read it."""
    writer.write(json.dumps(message).encode() + b"\n")
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        await writer.drain()


def _error_text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
