"""The logins that this account keeps, one for each daemon: files 0600 in a folder of its own, by machine.

They are found again by the very URL to which they may be shown. When one ends is counted by this machine's clock from
when it was made: whatever the daemon's clock says.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from koalapy.system.local_token import checked_token, open_own_folder, state_directory
from koalapy.system.private_files import read_private, write_private

RENEWED_BEFORE = 0.1
"""Of its lifetime, from when on a login is renewed."""
RETRY_PAUSE = 0.05
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Login:
    """A token that a head node's agent got for this account."""

    url: str
    token: str
    user: str
    role: str
    cluster: str
    """Whose agent vouched."""
    socket: str
    """Where it is asked again."""
    made_at: float
    """Seconds since the epoch."""
    lifetime: float
    """Seconds."""
    ca: str = ""
    """Certificates in PEM by which the daemon is known."""

    @property
    def ends_at(self) -> float:
        return self.made_at + self.lifetime

    @property
    def is_valid(self) -> bool:
        """As far as we know: one that was revoked is no more. A clock that was set back ends it, too."""
        return 0 <= time.time() - self.made_at < self.lifetime

    @property
    def is_due(self) -> bool:
        """Whether to renew it."""
        return time.time() - self.made_at > self.lifetime * (1 - RENEWED_BEFORE)

    def __repr__(self) -> str:
        return f"Login({self.user} at {self.url})"


def directory() -> Path | None:
    """Where they are; None for an account without a home."""
    state = state_directory()
    return state and state / f"logins-{os.uname().nodename.replace('/', '_')}"


def save(login: Login) -> None:
    """In place of one before it. Raises ``OSError``, and ``ValueError`` where the folder is not ours alone."""
    where = directory()
    if where is None:
        raise OSError("the account has no home")
    where.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = open_own_folder(where)
    try:
        os.fchmod(folder, 0o700)
        os.close(write_private(_name(login.url), folder, json.dumps(asdict(login))))
    finally:
        os.close(folder)


@contextmanager
def alone(timeout: float) -> Iterator[None]:
    """Hold back the other commands of this account that want to log in: one login is enough for all of them.

    After so many seconds, or where nothing can be held, it is gone on without.
    """
    try:
        where = directory()
        if where is None:
            raise OSError("the account has no home")
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = open_own_folder(where)
    except (OSError, ValueError):
        yield
        return
    try:
        # Another open file for each who asks: threads of one process wait for each other, too.
        lock = os.open(".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError:
        lock = -1
    finally:
        os.close(folder)
    try:
        if lock >= 0:
            _wait_for(lock, time.monotonic() + timeout)
        yield
    finally:
        if lock >= 0:
            os.close(lock)


def _wait_for(lock: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                return
            time.sleep(RETRY_PAUSE)
        except OSError:  # a file system that knows no locks
            return


def of_url(url: str) -> Login | None:
    """The login for a daemon, unless it has ended."""
    return next((login for login in _read_all([_name(url)]) if login.url == url), None)


def valid() -> list[Login]:
    """All that have not ended."""
    return _read_all(None)


def forget(url: str, token: str | None = None) -> None:
    """With a ``token`` only that one: another command may have a new login already."""
    if token is not None and ((kept := of_url(url)) is None or kept.token != token):
        return
    where = directory()
    if where is not None:
        with suppress(OSError, ValueError):
            folder = open_own_folder(where)
            try:
                os.unlink(_name(url), dir_fd=folder)
            finally:
                os.close(folder)


def _read_all(names: list[str] | None) -> list[Login]:
    where = directory()
    try:
        folder = open_own_folder(where) if where is not None else None
    except (OSError, ValueError):
        return []
    if folder is None:
        return []
    try:
        wanted = names if names is not None else sorted(n for n in os.listdir(folder) if not n.startswith("."))
        return [login for name in wanted if (login := _read(name, folder)) is not None and login.is_valid]
    finally:
        os.close(folder)


def _read(name: str, folder: int) -> Login | None:
    try:
        descriptor, text = read_private(name, folder)
        os.close(descriptor)
        login = Login(**json.loads(text))
        checked_token(login.token)
        texts = (login.url, login.user, login.role, login.cluster, login.socket, login.ca)
        is_whole = all(isinstance(text, str) for text in texts) and login.made_at + login.lifetime >= 0
        return login if is_whole else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _name(url: str) -> str:
    return sha256(url.encode()).hexdigest()[:32]
