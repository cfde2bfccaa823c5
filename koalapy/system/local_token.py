"""Make the daemon's own token, and find it from the command line through a register of the account.

The register is a folder with one file for each address at which a daemon of this account serves. A running daemon locks
its files, and each file names the machine. So the command line shows a token neither to a program that listens at the
address later, nor to one on another machine with the same home. A daemon that is not ready yet has a locked file named
for its port, and the command line waits for it. Standard library only.
"""

import fcntl
import json
import os
import pwd
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from koalapy.model.errors import UsageError
from koalapy.system.files import FOLDER_FLAGS, open_own_folder, opened_own_folder, read_private_file, write_private_file

TOKEN_FILE = "token"
"""Name in a daemon's data directory."""
MIN_TOKEN_LENGTH = 16


def check_token(token: str) -> str:
    """Return the token. Raise ``ValueError`` if it cannot be sent in an HTTP header, or is easy to guess."""
    if not token.strip():
        raise ValueError("the token is blank: give a long random text")
    if not all("!" <= character <= "~" for character in token):
        raise ValueError("the token contains spaces or characters outside ASCII: give letters, digits and punctuation")
    if len(token) < MIN_TOKEN_LENGTH:
        raise ValueError(f"a token of {len(token)} characters can be guessed: give {MIN_TOKEN_LENGTH} or more")
    return token


def load_or_make_token(data_dir: Path, name: str = TOKEN_FILE) -> tuple[str, str]:
    """Return the token in a file of a daemon's data directory, which is made if there is none.

    The second value says why an unusable token was replaced, and is empty otherwise. Raise ``UsageError`` if a new
    token cannot be written.
    """
    path, problem = data_dir / name, ""
    try:
        folder = os.open(data_dir, FOLDER_FLAGS)
        try:
            try:
                descriptor, text = read_private_file(name, folder)
                os.close(descriptor)
                return check_token(text.strip()), ""
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:
                problem = error.strerror or "" if isinstance(error, OSError) else str(error)
            token = os.urandom(32).hex()
            os.close(write_private_file(name, folder, f"{token}\n"))
            return token, problem
        finally:
            os.close(folder)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}",
            field="--data-dir",
            value=str(data_dir),
            hint="check that the disk has space and that this account may write to the directory",
        ) from error


def account_directory(kind: str) -> Path | None:
    """Return the directory of one kind of state that all commands of this account use; None without a home.

    Its name includes the machine's, since machines may share a home.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    if not state.startswith("/"):
        home = os.environ.get("HOME", "")
        if not home.startswith("/"):
            try:
                home = pwd.getpwuid(os.geteuid()).pw_dir
            except KeyError:
                return None
        state = f"{home}/.local/state"
    return Path(state, "koala", f"{kind}-{os.uname().nodename.replace('/', '_')}")


def register_directory() -> Path | None:
    """Return the directory of this account's register of daemons; None without a home."""
    return account_directory("daemons")


class Registration:
    """The entries of a running daemon in the register, until ``close``."""

    def __init__(self, token: str, addresses: Iterable[tuple[str, int]], certificate: Path | None = None) -> None:
        """Write an entry for each address. ``certificate``: the file with the daemon's certificate for TLS.

        Raise ``OSError`` if the register cannot be written, and ``UsageError`` if other accounts could write to it.
        """
        directory = register_directory()
        if directory is None:
            raise OSError("the account has no home")
        try:
            self._folder = open_own_folder(directory, make=True)
        except ValueError as error:
            raise UsageError(
                f"{directory} {error}, so the daemon does not write its token there",
                field="XDG_STATE_HOME",
                value=str(directory),
                hint="remove it, set XDG_STATE_HOME to a folder of this account, or configure tokens",
            ) from error
        self._entries: dict[str, int] = {}
        for name in os.listdir(self._folder):  # entries of daemons that were killed
            with suppress(OSError):
                if not name.startswith(".") and not _is_entry_of_running_daemon(name, self._folder):
                    os.unlink(name, dir_fd=self._folder)
        try:
            for host, port in addresses:
                path = None if certificate is None else str(certificate)
                entry = json.dumps({"token": token, "machine": _machine_id(), "certificate": path})
                name = format_address(host, port)
                self._entries[name] = write_private_file(name, self._folder, entry, prepare=_lock)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the entries that no later daemon has replaced."""
        for name, descriptor in self._entries.items():
            _remove_entry(name, self._folder, descriptor)
            os.close(descriptor)
        os.close(self._folder)


def _remove_entry(name: str, folder: int, descriptor: int) -> None:
    """Remove an entry of the register, unless another process has replaced it."""
    with suppress(OSError):
        if os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(descriptor)):
            os.unlink(name, dir_fd=folder)


@contextmanager
def register_start(port: int) -> Iterator[None]:
    """Write to the register that a daemon starts at a port, for the duration of the block.

    Do nothing if another daemon starts there, or if the register cannot be written: then commands do not wait.
    """
    with ExitStack() as stack:
        name = _starting_name(port)
        with suppress(OSError, ValueError):
            if not is_start_registered(port):
                folder = stack.enter_context(opened_own_folder(register_directory(), make=True))
                lock = write_private_file(name, folder, _machine_id(), prepare=_lock)
                stack.callback(os.close, lock)
                stack.callback(_remove_entry, name, folder, lock)
        yield


def is_start_registered(port: int) -> bool:
    """Return whether a daemon of this account starts at a port of this machine, and is not ready yet."""
    try:
        with opened_own_folder(register_directory()) as folder:
            machine, is_running = _read_file(_starting_name(port), folder)
            return is_running and machine == _machine_id()
    except (OSError, ValueError):
        return False


def _read_file(name: str, folder: int) -> tuple[str, bool]:
    """Return the text of a file in the register, and whether the daemon that wrote it runs.

    The kernel drops a daemon's lock however it ends. Raise ``OSError``, or ``ValueError`` for an unsuited file.
    """
    descriptor, text = read_private_file(name, folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return text, False
    except BlockingIOError:
        return text, True
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _starting_name(port: int) -> str:
    return f".starting-{port}"


@dataclass(frozen=True, slots=True)
class TokenSearch:
    """The result of a search for a daemon's token: the token, or the reason why there is none."""

    token: str = ""
    reason: str = ""
    certificate: Path | None = None
    """The file with the certificate that the daemon shows; None if it speaks no TLS."""


def find_token(host: str, port: int) -> TokenSearch:
    """Look up the token of this account's daemon that serves at this address of this machine."""
    directory, name = register_directory(), format_address(host, port)
    if directory is None:
        return TokenSearch(reason="this account has no home with a register of its daemons")
    try:
        with opened_own_folder(register_directory()) as folder:
            return _read_entry(name, folder)
    except FileNotFoundError:
        return TokenSearch(reason=f"no daemon of this account serves at {name}")
    except (OSError, ValueError) as error:
        return TokenSearch(reason=f"{directory} {error.strerror if isinstance(error, OSError) else error}")


def _read_entry(name: str, folder: int) -> TokenSearch:
    """Return the token in an entry of the open register, or the reason why this client cannot use it."""
    try:
        text, is_running = _read_file(name, folder)
    except FileNotFoundError:
        entries = [entry for entry in os.listdir(folder) if not entry.startswith(".")]
        running = sorted(entry for entry in entries if _is_entry_of_running_daemon(entry, folder))
        hint = f"; its daemons serve at {', '.join(running[:5])}" if running else ""
        return TokenSearch(reason=f"no daemon of this account serves at {name}{hint}")
    except (OSError, ValueError) as error:
        return TokenSearch(reason=f"the register's entry of {name} cannot be used: {error}")
    try:
        entry = json.loads(text)
        if not is_running:
            return TokenSearch(reason=f"the daemon of this account that served at {name} has ended")
        if entry["machine"] != _machine_id():
            return TokenSearch(reason=f"the daemon of this account that serves at {name} is on another machine")
        path = entry.get("certificate")
        return TokenSearch(str(entry["token"]), certificate=None if path is None else Path(path))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return TokenSearch(reason=f"the register's entry of {name} is damaged")


def format_address(host: str, port: int) -> str:
    """Return host and port as in a URL, normalized, since this is also the name of their entry in the register."""
    try:
        address = ip_address(host)
    except ValueError:
        return f"{host.lower().replace('/', '_')}:{port}"
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _is_entry_of_running_daemon(name: str, folder: int) -> bool:
    """Return whether the daemon that wrote an entry runs; False for an entry that cannot be read."""
    try:
        return _read_file(name, folder)[1]
    except (OSError, ValueError):
        return False


def _machine_id() -> str:
    """Identify this boot of this machine, and within it the network namespace, as of a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return os.uname().nodename
