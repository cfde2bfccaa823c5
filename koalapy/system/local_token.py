"""The token that a daemon makes for itself, and the account's register by which the command line finds it.

The register is a folder with a file for each address at which a daemon of this account serves. A daemon holds a lock on
its files while it lives, and names the machine, so that its token is shown to nobody else: not to whoever listens at
that address afterwards, nor on another machine with the same home. Standard library only.
"""

import fcntl
import json
import os
import pwd
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from koalapy.model.errors import UsageError
from koalapy.system.files import open_own_folder, read_private, write_private
from koalapy.system.login_socket import FOLDER

TOKEN_FILE = "token"
"""In a daemon's data directory."""
MIN_TOKEN_LENGTH = 16
"""Characters."""


def checked_token(token: str) -> str:
    """A token as it may be shown in a header; ``ValueError`` for one that cannot be, or could be guessed."""
    if not token.strip():
        raise ValueError("a blank token would let everybody in: give a long random word")
    if not all("!" <= sign <= "~" for sign in token):
        raise ValueError("a token has letters, digits and signs of ASCII only, and no spaces")
    if len(token) < MIN_TOKEN_LENGTH:
        raise ValueError(f"a token of {len(token)} characters can be guessed: give {MIN_TOKEN_LENGTH} or more")
    return token


def own_token(data_dir: Path) -> tuple[str, str]:
    """The token in a daemon's data directory, and why it is a new one if there was another that is of no use.

    Raises ``UsageError`` when it cannot be written.
    """
    path, why = data_dir / TOKEN_FILE, ""
    try:
        folder = os.open(data_dir, FOLDER)
        try:
            try:
                descriptor, text = read_private(TOKEN_FILE, folder)
                os.close(descriptor)
                return checked_token(text.strip()), ""
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:
                why = error.strerror or "" if isinstance(error, OSError) else str(error)
            token = os.urandom(32).hex()
            os.close(write_private(TOKEN_FILE, folder, f"{token}\n"))
            return token, why
        finally:
            os.close(folder)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}",
            field="--data-dir",
            value=str(data_dir),
            hint="see that there is room, and that the directory may be written",
        ) from error


def account_directory(kind: str) -> Path | None:
    """Return where this account keeps one kind of state between commands; None without a home.

    The name has the machine in it, since machines may share a home.
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
    """Return where this account's register of daemons is; None without a home."""
    return account_directory("daemons")


class Registration:
    """A daemon's entries in the register, from their making to ``close``."""

    def __init__(self, token: str, addresses: Iterable[tuple[str, int]], certificate: Path | None = None) -> None:
        """``certificate`` is where the one stands that the daemon shows, if it speaks TLS.

        Raises ``OSError`` where there can be no register, ``UsageError`` when it belongs to somebody else.
        """
        directory = register_directory()
        if directory is None:
            raise OSError("the account has no home")
        try:
            self._folder = open_own_folder(directory, make=True)
        except ValueError as error:
            raise UsageError(
                f"{directory} {error}: a token is not written there",
                field="XDG_STATE_HOME",
                value=str(directory),
                hint="remove it, set XDG_STATE_HOME to a folder of this account, or configure tokens",
            ) from error
        self._entries: dict[str, int] = {}
        self._sweep()
        try:
            for host, port in addresses:
                shown = None if certificate is None else str(certificate)
                entry = json.dumps({"token": token, "machine": _machine(), "certificate": shown})
                name = address_of(host, port)
                self._entries[name] = write_private(
                    name, self._folder, entry, before=lambda file: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the entries, unless they are another's by now."""
        for name, descriptor in self._entries.items():
            with suppress(OSError):
                there = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
                if os.path.samestat(there, os.fstat(descriptor)):
                    os.unlink(name, dir_fd=self._folder)
            os.close(descriptor)
        os.close(self._folder)

    def _sweep(self) -> None:
        """Remove what daemons left that were killed."""
        for name in os.listdir(self._folder):
            with suppress(OSError):
                if not name.startswith(".") and not _lives(name, self._folder):
                    os.unlink(name, dir_fd=self._folder)


@dataclass(frozen=True, slots=True)
class Found:
    """A token for an address, or why there is none."""

    token: str = ""
    why: str = ""
    certificate: Path | None = None
    """The file with the one that the daemon shows; None where it speaks no TLS."""


def find_token(host: str, port: int) -> Found:
    """The token of this account's daemon that serves at this very address on this machine."""
    directory = register_directory()
    if directory is None:
        return Found(why="this account has no home with a register of its daemons")
    try:
        folder = open_own_folder(directory)
    except FileNotFoundError:
        return Found(why=f"no daemon of this account serves at {address_of(host, port)}")
    except (OSError, ValueError) as error:
        return Found(why=f"{directory} {error.strerror if isinstance(error, OSError) else error}")
    try:
        return _find(address_of(host, port), folder)
    finally:
        os.close(folder)


def _find(name: str, folder: int) -> Found:
    try:
        descriptor, text = read_private(name, folder)
    except FileNotFoundError:
        return Found(why=_elsewhere(name, folder))
    except (OSError, ValueError) as error:
        return Found(why=f"the register's entry of {name} is of no use: {error}")
    try:
        entry = json.loads(text)
        if not _is_locked(descriptor):
            return Found(why=f"the daemon of this account that served at {name} has ended")
        if entry["machine"] != _machine():
            return Found(why=f"the daemon of this account that serves at {name} is on another machine")
        shown = entry.get("certificate")
        return Found(str(entry["token"]), certificate=None if shown is None else Path(shown))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Found(why=f"the register's entry of {name} is of no use")
    finally:
        os.close(descriptor)


def _elsewhere(name: str, folder: int) -> str:
    known = sorted(other for other in os.listdir(folder) if not other.startswith(".") and _lives(other, folder))
    there = f"; known are {', '.join(known[:5])}" if known else ""
    return f"no daemon of this account serves at {name}{there}"


def address_of(host: str, port: int) -> str:
    """As a URL has them, and the name of their entry: an address has one only, however it is written."""
    try:
        address = ip_address(host)
    except ValueError:
        return f"{host.lower().replace('/', '_')}:{port}"
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _lives(name: str, folder: int) -> bool:
    """Whether an entry is that of a daemon which lives."""
    try:
        descriptor, _ = read_private(name, folder)
    except (OSError, ValueError):
        return False
    try:
        return _is_locked(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_locked(descriptor: int) -> bool:
    """Whether the daemon that wrote this lives; the kernel lets go of its lock when it ends in any way."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _machine() -> str:
    """This machine since it was booted, and of containers this one: where an address means the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return os.uname().nodename
