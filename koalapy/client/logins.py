"""Logins of a client: saved by an earlier command, or newly obtained from an agent of this head node.

The agent's socket is checked before any data is sent or trusted. Its folder must belong to root or to this account, or
be ``/run/koala``, where root controls the listening accounts. The listening process must belong to root or to the owner
of the folder.

Saved logins are private files of this account and machine, one for each URL of a daemon. They expire by this machine's
clock, independently of the daemon's clock.
"""

import fcntl
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts
from koalapy.system.files import (
    DIRECTORY,
    MAX_LINE_BYTES,
    SOCKET_NAME,
    open_socket_folder,
    opened_own_folder,
    read_private_file,
    socket_address,
    write_private_file,
)
from koalapy.system.local_token import account_directory, check_token
from koalapy.system.process import get_peer

VARIABLE = "KOALA_LOGIN_SOCKET"
OWN_AGENTS = "~/.local/share/koala/clusters"
"""Default folder of the agents of an account."""
RETRY_PAUSE = 0.02
"""Pause in seconds before another connection attempt to a busy agent."""
ROOT = 0
RENEWAL_SHARE = 0.9
"""Fraction of its lifetime after which a login is renewed."""


@dataclass(frozen=True, slots=True)
class Login:
    """A token that a head node's agent obtained for this account."""

    url: str
    token: str
    user: str
    role: str
    cluster: str
    """The cluster of the agent."""
    socket: str
    """The socket of the agent."""
    made_at: float
    """Time of creation, as a Unix timestamp."""
    lifetime: float
    """Lifetime in seconds."""
    ca: str = ""
    """Trusted certificates of the daemon, in PEM."""

    @property
    def ends_at(self) -> float:
        return self.made_at + self.lifetime

    @property
    def is_valid(self) -> bool:
        """Return whether the login has not expired by this machine's clock. Setting the clock back expires it too."""
        return 0 <= time.time() - self.made_at < self.lifetime

    @property
    def is_due(self) -> bool:
        """Return whether to renew the login."""
        return time.time() - self.made_at > self.lifetime * RENEWAL_SHARE

    def __repr__(self) -> str:
        return f"Login({self.user} at {self.url})"


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent that has named its cluster and daemon."""

    path: Path
    cluster: str
    url: str
    """URL of its daemon for users."""
    ca: str


def find_sockets(well_known: Path = DIRECTORY) -> list[Path]:
    """Return the socket paths of possible agents for this account. ``well_known``: the folder created by root."""
    if path := os.environ.get(VARIABLE):
        return [Path(path).absolute()]
    paths: list[Path] = []
    for folder, pattern in ((well_known, "*.sock"), (Path(os.path.expanduser(OWN_AGENTS)), f"*/{SOCKET_NAME}")):
        with suppress(OSError):
            paths += sorted(folder.glob(pattern))
    return paths


def contact_agents(
    paths: Iterable[Path], timeouts: ClientTimeouts = DEFAULT_TIMEOUTS, well_known: Path = DIRECTORY
) -> tuple[list[Agent], list[str]]:
    """Return the agents that respond at these paths, and the errors of the other paths."""
    responding, errors = [], []
    for path in paths:
        try:
            with _Conversation(path, timeouts.agent_greeting_s, timeouts.sleep, well_known) as conversation:
                responding.append(conversation.read_greeting())
        except GridError as error:
            errors.append(str(error))
    return responding, errors


def request_login(agent: Agent, timeouts: ClientTimeouts = DEFAULT_TIMEOUTS, well_known: Path = DIRECTORY) -> Login:
    """Request a new login from an agent. Raise ``GridError`` if the agent rejects the request."""
    with _Conversation(agent.path, timeouts.agent_login_s, timeouts.sleep, well_known) as conversation:
        greeting = conversation.read_greeting()
        answer = conversation.send_question({"ask": "login"})
        if "error" in answer:
            raise GridError(
                f"the agent of {greeting.cluster} rejects the login: {answer['error']}",
                Exit.NOT_ALLOWED,
                str(answer.get("hint") or ""),
            )
        try:
            return Login(
                url=greeting.url,
                token=check_token(str(answer["token"])),
                user=str(answer["user"]),
                role=str(answer["role"]),
                cluster=greeting.cluster,
                socket=str(agent.path),
                made_at=time.time(),
                lifetime=float(answer["lifetime"]),
                ca=greeting.ca,
            )
        except (KeyError, ValueError, TypeError) as error:
            raise conversation.not_agent_error() from error


class _Conversation:
    """A conversation with an agent under one deadline. Every failure is a ``GridError``."""

    def __init__(self, path: Path, timeout: float, sleep: Callable[[float], None], well_known: Path) -> None:
        self._path, self._timeout, self._sleep, self._well_known = path, timeout, sleep, well_known
        self._ends_at = time.monotonic() + timeout
        self._socket = socket.socket(socket.AF_UNIX)
        self._read = b""
        try:
            self._connect_socket()
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> "_Conversation":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _connect_socket(self) -> None:
        """Connect to the agent, and check that root or the owner of the folder runs it.

        Raise ``GridError`` if the agent does not respond or cannot be trusted.
        """
        try:
            folder, owner = open_socket_folder(self._path.parent)
        except (OSError, ValueError) as error:
            raise self._untrusted_error(error.strerror if isinstance(error, OSError) else str(error)) from error
        try:
            if owner not in (ROOT, os.geteuid()) and not self._is_folder_made_by_root():
                raise self._untrusted_error(f"{self._path.parent} belongs to another account (uid {owner})")
            self._connect_before_deadline(socket_address(folder, self._path.name))
            uid = get_peer(self._socket).uid
        except OSError as error:
            raise self._no_answer_error(error) from error
        finally:
            os.close(folder)
        if uid not in (ROOT, owner):
            raise self._untrusted_error(f"who listens there is neither root nor its folder's owner (uid {uid})")

    def _is_folder_made_by_root(self) -> bool:
        """Return whether the folder is the well-known one, in a parent folder where only root writes."""
        if self._path.parent != self._well_known:
            return False
        above = os.stat(self._well_known.parent)
        return above.st_uid == ROOT and not stat.S_IMODE(above.st_mode) & 0o022

    def _connect_before_deadline(self, address: str) -> None:
        """Connect the socket, and try repeatedly while the agent is busy. Raise ``OSError``, also at the deadline."""
        while True:
            self._limit_timeout()
            try:
                self._socket.connect(address)
                return
            except BlockingIOError:  # its queue of connections is full, or it hangs
                self._sleep(RETRY_PAUSE)

    def read_greeting(self) -> Agent:
        """Return the cluster and the daemon that the agent names first on each connection."""
        answer = self._read_answer()
        cluster, url, ca = answer.get("cluster"), answer.get("url"), answer.get("ca", "")
        if not (isinstance(cluster, str) and isinstance(url, str) and isinstance(ca, str)) or not _is_url(url):
            raise self.not_agent_error()
        return Agent(self._path, cluster, url.rstrip("/"), ca)

    def send_question(self, question: dict[str, str]) -> dict[str, Any]:
        """Send one line of JSON to the agent and return its response. Raise ``GridError`` if none arrives."""
        try:
            self._limit_timeout()
            self._socket.sendall(json.dumps(question).encode() + b"\n")
        except OSError as error:
            raise self._no_answer_error(error) from error
        return self._read_answer()

    def _read_answer(self) -> dict[str, Any]:
        """Return the next line that the agent sends, a JSON object. Raise ``GridError`` if none arrives in time."""
        while b"\n" not in self._read:
            try:
                self._limit_timeout()
                piece = self._socket.recv(MAX_LINE_BYTES)
            except OSError as error:
                raise self._no_answer_error(error) from error
            self._read += piece
            if not piece or len(self._read) > 2 * MAX_LINE_BYTES:
                raise self.not_agent_error()
        line, _, self._read = self._read.partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self.not_agent_error()
        return answer

    def _limit_timeout(self) -> None:
        """Limit the next operation to the remaining time."""
        remaining_s = self._ends_at - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(remaining_s)

    def _no_answer_error(self, error: OSError) -> GridError:
        """Convert a socket error to an error for the user, with advice."""
        message = f"the agent at {self._path} does not answer"
        if isinstance(error, TimeoutError):
            return GridError(
                f"{message} (waited {self._timeout:g} s)", Exit.UNREACHABLE, "contact the administrator of this host"
            )
        return GridError(
            f"{message} ({(error.strerror or str(error)).lower()})", Exit.UNREACHABLE, "start the agent, or wait for it"
        )

    def _untrusted_error(self, reason: str | None) -> GridError:
        hint = f"unset {VARIABLE}, or set it to the agent's own socket"
        return GridError(f"{self._path}: {reason}", Exit.NOT_ALLOWED, hint)

    def not_agent_error(self) -> GridError:
        return GridError(f"the listener at {self._path} is not an agent", Exit.UNREACHABLE, f"set {VARIABLE}")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


RETRY_PAUSE_S = 0.05


class SilentAgentsError(GridError):
    """No responding agent of this host belongs to the daemon, and some agents do not respond."""


def find_login(
    url: str | None, timeouts: ClientTimeouts = DEFAULT_TIMEOUTS, well_known: Path = DIRECTORY
) -> Login | None:
    """Return a login for the daemon at a URL, or without a URL for the only daemon; None if no agent belongs to it.

    Renew a login that is about to expire if possible. Raise ``GridError`` if the agent rejects the request for a login.
    """
    saved = _find_saved(url)
    if saved is not None and not saved.is_due:
        return saved
    if not find_sockets(well_known):
        return saved
    with _lock_logins(timeouts.agent_login_s):
        renewed = _find_saved(url)
        if renewed is not None and not renewed.is_due:
            return renewed
        try:
            chosen = saved.url if saved is not None else url
            return log_in([chosen] if chosen else [], timeouts, well_known) or saved
        except GridError:
            if saved is None:
                raise
            return saved


def log_in(
    chosen: Collection[str], timeouts: ClientTimeouts = DEFAULT_TIMEOUTS, well_known: Path = DIRECTORY
) -> Login | None:
    """Obtain a new login for one of the chosen URLs, or for the only daemon if none is chosen, and save it.

    Return None and raise errors as ``find_login`` does.
    """
    paths = find_sockets(well_known)
    if not paths:
        return None
    agents, wrong = contact_agents(paths, timeouts, well_known)
    if chosen:
        agents = [agent for agent in agents if agent.url in chosen]
    elif len(urls := sorted({agent.url for agent in agents})) > 1:
        raise GridError(
            f"this host has agents of several daemons: {' and '.join(urls)}", Exit.USAGE, "set KOALA_URL to one of them"
        )
    refused: GridError | None = None
    for agent in agents:
        try:
            login = request_login(agent, timeouts, well_known)
        except GridError as error:
            refused = refused or error
            continue
        try:
            save_login(login)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            print(f"koala: the login cannot be stored: {printable(f'{login_directory()} {reason}')}", file=sys.stderr)
        return login
    if refused is not None:
        raise refused
    if wrong:
        raise SilentAgentsError(wrong[0], Exit.UNREACHABLE)
    return None


def _find_saved(url: str | None) -> Login | None:
    """Return the valid saved login for a daemon, or for the only one if ``url`` is None. Return None if there is none.

    Raise ``GridError`` if ``url`` is None and logins for several daemons are saved.
    """
    if url is not None:
        return of_url(url)
    saved = list_valid()
    if len(saved) > 1:
        urls = " and ".join(login.url for login in saved)
        raise GridError(f"this account is logged in at {urls}", Exit.USAGE, "set KOALA_URL to one of them")
    return saved[0] if saved else None


# Files of logins


def login_directory() -> Path | None:
    """Return the folder of saved logins; None for an account without a home."""
    return account_directory("logins")


def save_login(login: Login) -> None:
    """Save a login and replace an earlier one. Raise ``OSError`` and ``ValueError`` as ``open_own_folder`` does."""
    with opened_own_folder(login_directory(), make=True) as folder:
        os.close(write_private_file(_file_name(login.url), folder, json.dumps(asdict(login))))


@contextmanager
def _lock_logins(timeout_s: float) -> Iterator[None]:
    """Block other commands of this account that log in, since one login serves all of them.

    Run the block without the lock after the timeout, or if the file system has no locks.
    """
    lock = -1
    # Each caller opens the file separately, so that threads of one process also exclude each other.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(OSError, ValueError), opened_own_folder(login_directory(), make=True) as folder:
        lock = os.open(".lock", flags, 0o600, dir_fd=folder)
    deadline = time.monotonic() + timeout_s
    try:
        while lock >= 0 and time.monotonic() <= deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(RETRY_PAUSE_S)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        if lock >= 0:
            os.close(lock)


def of_url(url: str) -> Login | None:
    """Return the saved login for a daemon; None if there is none or it has expired."""
    return next((login for login in _read_all([_file_name(url)]) if login.url == url), None)


def list_valid() -> list[Login]:
    """Return all saved logins that have not expired."""
    return _read_all(None)


def forget_login(url: str, token: str | None = None) -> None:
    """Delete a saved login. With a ``token``, delete only that one, since another command may have saved a new one."""
    if token is not None and ((saved := of_url(url)) is None or saved.token != token):
        return
    with suppress(OSError, ValueError), opened_own_folder(login_directory()) as folder:
        os.unlink(_file_name(url), dir_fd=folder)


def _read_all(names: list[str] | None) -> list[Login]:
    """Return the valid logins in these files, or in all files if ``names`` is None."""
    with suppress(OSError, ValueError), opened_own_folder(login_directory()) as folder:
        file_names = names if names is not None else sorted(n for n in os.listdir(folder) if not n.startswith("."))
        return [login for name in file_names if (login := _read_login(name, folder)) is not None and login.is_valid]
    return []


def _read_login(name: str, folder: int) -> Login | None:
    """Read a saved login from a file; None if the file is missing or invalid. ``folder``: descriptor of its folder."""
    try:
        descriptor, text = read_private_file(name, folder)
        os.close(descriptor)
        login = Login(**json.loads(text))
        check_token(login.token)
        texts = (login.url, login.user, login.role, login.cluster, login.socket, login.ca)
        is_whole = all(isinstance(text, str) for text in texts) and login.made_at + login.lifetime >= 0
        return login if is_whole else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _file_name(url: str) -> str:
    return sha256(url.encode()).hexdigest()[:32]
