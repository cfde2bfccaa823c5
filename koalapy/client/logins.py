"""Logins of a client: saved by an earlier command, or newly obtained from an agent of this head node.

Saved logins are private files of this account and machine, one for each URL of a daemon. They expire by this machine's
clock, independently of the daemon's clock.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from koalapy.client import agent_socket
from koalapy.client.agent_socket import Login
from koalapy.client.errors import CliError, Exit, printable
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts
from koalapy.system.files import open_own_folder, read_private_file, write_private_file
from koalapy.system.local_token import account_directory, check_token
from koalapy.system.login_socket import DIRECTORY

RETRY_PAUSE_S = 0.05


class SilentAgentsError(CliError):
    """No responding agent of this host belongs to the daemon, and some agents do not respond."""


def find_login(
    url: str | None, timeouts: ClientTimeouts = DEFAULT_TIMEOUTS, well_known: Path = DIRECTORY
) -> Login | None:
    """Return a login for the daemon at a URL, or without a URL for the only daemon; None if no agent belongs to it.

    Renew a login that is about to expire if possible. Raise ``CliError`` if the agent rejects the request for a login.
    """
    saved = _find_saved(url)
    if saved is not None and not saved.is_due:
        return saved
    if not agent_socket.find_sockets(well_known):
        return saved
    with _lock_logins(timeouts.agent_login_s):
        renewed = _find_saved(url)
        if renewed is not None and not renewed.is_due:
            return renewed
        try:
            return log_in(saved.url if saved is not None else url, timeouts, well_known)
        except CliError:
            if saved is None:
                raise
            return saved


def log_in(url: str | None, timeouts: ClientTimeouts = DEFAULT_TIMEOUTS, well_known: Path = DIRECTORY) -> Login | None:
    """Obtain a new login and save it. Return None and raise errors as ``find_login`` does."""
    paths = agent_socket.find_sockets(well_known)
    if not paths:
        return None
    agents, wrong = agent_socket.contact_agents(paths, timeouts, well_known)
    if url is not None:
        agents = [agent for agent in agents if agent.url == url]
    elif len(urls := sorted({agent.url for agent in agents})) > 1:
        raise CliError(
            f"this host has agents of several daemons: {' and '.join(urls)}", Exit.USAGE, "set KOALA_URL to one of them"
        )
    refused: CliError | None = None
    for agent in agents:
        try:
            login = agent_socket.log_in(agent, timeouts, well_known)
        except CliError as error:
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

    Raise ``CliError`` if ``url`` is None and logins for several daemons are saved.
    """
    if url is not None:
        return of_url(url)
    saved = list_valid()
    if len(saved) > 1:
        urls = " and ".join(login.url for login in saved)
        raise CliError(f"this account is logged in at {urls}", Exit.USAGE, "set KOALA_URL to one of them")
    return saved[0] if saved else None


# Files of logins


def login_directory() -> Path | None:
    """Return the folder of saved logins; None for an account without a home."""
    return account_directory("logins")


@contextmanager
def _open_folder(*, make: bool = False) -> Iterator[int]:
    """Open the folder as a file descriptor. Raise ``OSError``, or ``ValueError`` if other accounts may access it."""
    path = login_directory()
    if path is None:
        raise OSError("the account has no home")
    folder = open_own_folder(path, make=make)
    try:
        yield folder
    finally:
        os.close(folder)


def save_login(login: Login) -> None:
    """Save a login and replace an earlier one. Raise ``OSError`` and ``ValueError`` as ``_open_folder`` does."""
    with _open_folder(make=True) as folder:
        os.fchmod(folder, 0o700)
        os.close(write_private_file(_file_name(login.url), folder, json.dumps(asdict(login))))


@contextmanager
def _lock_logins(timeout_s: float) -> Iterator[None]:
    """Block other commands of this account that log in, since one login serves all of them.

    Run the block without the lock after the timeout, or if the file system has no locks.
    """
    lock = -1
    # Each caller opens the file separately, so that threads of one process also exclude each other.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(OSError, ValueError), _open_folder(make=True) as folder:
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
    with suppress(OSError, ValueError), _open_folder() as folder:
        os.unlink(_file_name(url), dir_fd=folder)


def _read_all(names: list[str] | None) -> list[Login]:
    """Return the valid logins in these files, or in all files if ``names`` is None."""
    with suppress(OSError, ValueError), _open_folder() as folder:
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
