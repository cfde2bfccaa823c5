"""Logins on a head node: the kernel says which account asks, the agent vouches for it, and the daemon decides.

On the socket the agent greets with its cluster and its daemon's URL, the command asks, and the agent answers with a
token that the daemon made, or with why there is none.
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
from koalapy.system.login_socket import DIRECTORY, MAX_LINE_BYTES, get_peer, open_socket_folder, socket_address

log = structlog.get_logger()

MAX_CONNECTIONS = 128
MAX_CONNECTIONS_PER_ACCOUNT = 4
QUESTION_TIMEOUT = 10.0
"""Seconds that a command has to ask."""
NAME_TIMEOUT = 5.0
"""Seconds that the host's name service has to say what an account is called."""
WELCOME_TIMEOUT = 3.0
"""Seconds for which a daemon is waited for that the agent is not connected to: one of the two may have begun anew."""
ANSWER_TIMEOUT = 10.0
FOR_ALL = 0o666
_PROTOCOL = 1


class Refused(Exception):
    """Nobody is vouched for; ``hint`` is the way out."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class LoginServer:
    def __init__(self, settings: AgentSettings, uplink: Uplink, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._cluster, self._url, self._uplink = settings.cluster, settings.url, uplink
        self._paths = settings.login_sockets
        """The first is taken where one may listen."""
        self._own_only = settings.identity == "own"
        """Only for this account it vouches."""
        self._jobs_are_own = settings.identity == "service"
        """Whether the cluster's jobs run as the agent's account."""
        self._users_url = settings.url
        self._trust = settings.trust
        self._ca = ""
        self._welcome = asyncio.Event()
        self._asking: dict[str, asyncio.Future[Vouched]] = {}
        self._pace = Throttle(burst=12, interval=5.0)
        self._connections: Counter[int] = Counter()
        self._server: asyncio.Server | None = None
        self._bound: BoundSocket | None = None

    async def listen(self) -> None:
        """Where that can be; users of this host cannot log in else, and nothing else is the worse for it."""
        failures = []
        for path in self._paths:
            try:
                self._bound = BoundSocket(path)
            except (OSError, ValueError) as error:
                failures.append(f"{path}: {_reason(error)}")
                continue
            self._server = await asyncio.start_unix_server(
                self._serve, sock=self._bound.socket, limit=MAX_LINE_BYTES, backlog=ACCEPTS_PER_TURN
            )
            raise_backlog(self._server)
            log.info("users of this host can log in", action="login-socket", cluster=self._cluster, socket=str(path))
            break
        if failures:
            hint = f"make {DIRECTORY} for this account (RuntimeDirectory=koala), or set login_socket"
            log.warning("not every user of this host can log in", action="login-socket", reasons=failures, hint=hint)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._bound is not None:
            self._bound.close()
        self.lost()

    # What the daemon says

    def welcomed(self, message: Welcome) -> None:
        self._welcome.set()
        self._users_url = message.users_url or self._url
        self._ca = self._trust.shared_authorities()

    def lost(self) -> None:
        """There is no connection to the daemon any more: who waits for an answer gets none."""
        self._welcome.clear()
        for waiting in self._asking.values():
            if not waiting.done():
                waiting.set_result(Vouched(ident="", error="the daemon hung up", hint="try again"))

    def vouched(self, message: Vouched) -> None:
        """An answer counts once, and only for what was asked."""
        waiting = self._asking.get(message.ident)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    # What users say

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        uid = -1
        try:
            uid = get_peer(writer.get_extra_info("socket")).uid
            if self._connections.total() >= MAX_CONNECTIONS or self._connections[uid] >= MAX_CONNECTIONS_PER_ACCOUNT:
                return
            self._connections[uid] += 1
            try:
                await self._converse(uid, reader, writer)
            finally:
                self._connections[uid] -= 1
                self._connections += Counter()  # what is zero is left out
        except (OSError, ValueError, TimeoutError, RecursionError) as error:
            log.info("a login was broken off", action="login-broken-off", uid=uid, error=_reason(error))
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _converse(self, uid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = {"koala": _PROTOCOL, "cluster": self._cluster, "url": self._users_url, "ca": self._ca}
        await _say(writer, greeting)
        async with asyncio.timeout(QUESTION_TIMEOUT):
            line = await reader.readline()
        if not line.endswith(b"\n"):
            return
        question = json.loads(line)
        if not isinstance(question, dict) or question.get("ask") != "login":
            raise ValueError("it asks for something else than a login")
        try:
            answer = await self._vouch(uid)
        except Refused as refusal:
            log.warning("nobody is vouched for", action="login-refused", uid=uid, error=refusal.message)
            await _say(writer, {"error": refusal.message, "hint": refusal.hint})
            return
        told = {"token": answer.token, "user": answer.user, "role": answer.role, "lifetime": answer.lifetime}
        await _say(writer, told if answer.token else {"error": answer.error, "hint": answer.hint})

    async def _vouch(self, uid: int) -> Vouched:
        if self._own_only and uid != os.geteuid():
            own = await _account(os.geteuid())
            raise Refused(f"the agent of {self._cluster} is {own}'s own: it vouches for nobody else")
        if wait := self._pace.count_if_allowed(uid, self._clock.monotonic()):
            raise Refused("too many logins", f"try again in {wait:.0f} s")
        account = await _account(uid)
        try:
            async with asyncio.timeout(WELCOME_TIMEOUT):
                await self._welcome.wait()
        except TimeoutError:
            away = f"the agent of {self._cluster} does not reach the daemon at {self._url}"
            raise Refused(away, "try again later") from None
        ident = uuid4().hex
        waiting: asyncio.Future[Vouched] = asyncio.get_running_loop().create_future()
        self._asking[ident] = waiting
        try:
            runs_jobs = self._jobs_are_own and uid == os.geteuid()
            self._uplink.send_soon(Vouch(ident=ident, account=account, uid=uid, runs_jobs=runs_jobs), urgent=True)
            async with asyncio.timeout(ANSWER_TIMEOUT):
                return await waiting
        except TimeoutError:
            silent = f"the daemon at {self._url} has not answered for {ANSWER_TIMEOUT:g} s"
            raise Refused(silent, "try again later") from None
        finally:
            del self._asking[ident]


class BoundSocket:
    """A socket that every account of this host may connect to, and only this one has made; held while this lives."""

    def __init__(self, path: Path) -> None:
        """Raises ``OSError``, and ``ValueError`` where others could put theirs, or another agent listens already."""
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
            self._bind()
        except BaseException:
            self._release()
            raise
        self._seen = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)

    def _bind(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError("another agent listens there") from None
        fresh = f".{self._name}.{os.urandom(4).hex()}"
        self.socket.bind(socket_address(self._folder, fresh))
        try:
            os.chmod(fresh, FOR_ALL, dir_fd=self._folder)
            self.socket.listen(MAX_CONNECTIONS)
            self.socket.setblocking(False)
            os.rename(fresh, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            os.unlink(fresh, dir_fd=self._folder)
            raise

    def close(self) -> None:
        with suppress(OSError):
            there = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
            if os.path.samestat(there, self._seen):
                os.unlink(self._name, dir_fd=self._folder)
        self._release()

    def _release(self) -> None:
        self.socket.close()
        os.close(self._lock)
        os.close(self._folder)


def _open_lock(name: str, folder: int) -> int:
    try:
        return os.open(name, _LOCK, 0o600, dir_fd=folder)
    except PermissionError:
        # The agent ran as another account before; the folder is ours now, or this fails, too.
        os.unlink(name, dir_fd=folder)
        return os.open(name, _LOCK, 0o600, dir_fd=folder)


_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


async def _account(uid: int) -> str:
    """What this host calls an account; ``Refused`` when it does not know."""
    try:
        async with asyncio.timeout(NAME_TIMEOUT):
            return (await asyncio.to_thread(pwd.getpwuid, uid)).pw_name
    except KeyError:
        raise Refused(f"this host knows no account with the uid {uid}") from None
    except TimeoutError:
        silent = f"this host's name service has not answered for {NAME_TIMEOUT:g} s"
        raise Refused(silent, "try again later") from None


async def _say(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    async with asyncio.timeout(QUESTION_TIMEOUT):
        await writer.drain()


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
