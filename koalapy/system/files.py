"""Create and read files that no other account may read, check the sockets of logins, and measure disks.

At a socket, each side learns the account of the other from the kernel (``SO_PEERCRED``). So no secret is sent to an
agent, and no process can claim to be another account. Imports little, since the command line reads it at start.
"""

import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from koalapy.model.errors import UsageError

if TYPE_CHECKING:
    from koalapy.model.disk import Disk

DIRECTORY = Path("/run/koala")
"""Created by root, or by systemd for the agents' account; no other account can create anything in ``/run``."""
SOCKET_NAME = "login.sock"
"""In the directory of an agent that may not listen in ``DIRECTORY``."""
MAX_LINE_BYTES = 256 * 1024
"""Limit of one message, which is a line of JSON."""
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
WRITABLE_BY_OTHERS = 0o022


def well_known_path(cluster: str) -> Path:
    """Return the socket at which the command line looks for a cluster's agent without any configuration."""
    return DIRECTORY / f"{cluster}.sock"


def open_socket_folder(path: Path) -> tuple[int, int]:
    """Open the folder of a socket; return its descriptor and the uid of its owner.

    Raise ``OSError``, or ``ValueError`` if other accounts could put their own socket there.
    """
    folder = os.open(path, FOLDER_FLAGS)
    status = os.fstat(folder)
    if status.st_mode & WRITABLE_BY_OTHERS:
        os.close(folder)
        raise ValueError(f"{path} may be written by others than its owner")
    return folder, status.st_uid


def socket_address(folder: int, name: str) -> str:
    """Return the address of a socket in an open folder. It is short, whatever the length of the folder's path."""
    return f"/proc/self/fd/{folder}/{name}"


FOR_OTHERS = 0o077
"""Permission bits of group and others."""
_WRITABLE_BY_ALL = 0o1002
"""The write bit of others, and the sticky bit that ``/tmp`` has."""
_FILE_SYSTEM_ENTRIES = {"lost+found"}


def make_private_directory(path: Path, contents: Collection[str], field: str) -> Path:
    """Create a directory with mode 0700, or restrict an existing one; return its path without symbolic links.

    An existing directory that others may read is restricted only if it is empty or holds an entry of ``contents``.
    So a mistyped path does not lock other accounts out of a shared folder. Raise ``UsageError`` for ``field`` if it
    cannot be used.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory = path.resolve(strict=True)
        status = directory.stat()
        entries = set(os.listdir(directory)) - _FILE_SYSTEM_ENTRIES if status.st_uid == os.geteuid() else set()
    except OSError as error:
        raise UsageError(
            f"cannot use {path}: {error.strerror}",
            field=field,
            value=str(path),
            hint="give a directory that this account may create or owns",
        ) from error
    if status.st_uid != os.geteuid():
        raise UsageError(
            f"{directory} belongs to another account (uid {status.st_uid})",
            field=field,
            value=str(path),
            hint="give a directory of this account, or run as that account",
        )
    mode = stat.S_IMODE(status.st_mode)
    if not mode & FOR_OTHERS:
        return directory
    if mode & _WRITABLE_BY_ALL or (entries and entries.isdisjoint(contents)):
        is_writable = mode & _WRITABLE_BY_ALL
        problem = "is writable by all accounts" if is_writable else "may be read by others and contains other files"
        raise UsageError(
            f"{directory} {problem}",
            field=field,
            value=str(path),
            hint="give a new directory, or restrict this one yourself: chmod 700",
        )
    directory.chmod(0o700)
    return directory


def open_own_folder(directory: Path, *, make: bool = False) -> int:
    """Open a folder with secrets; ``make``: create it, or restrict it to mode 0700.

    Raise ``OSError``, or ``ValueError`` unless this account owns it and no other account may write there. The text of
    the ``ValueError`` continues the folder's name.
    """
    if make:
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.mkdir(exist_ok=True, mode=0o700)
    try:
        folder = os.open(directory, FOLDER_FLAGS)
    except OSError:
        if directory.is_symlink():
            raise ValueError("is a symbolic link") from None
        raise
    status = os.fstat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & WRITABLE_BY_OTHERS:
        os.close(folder)
        if status.st_uid != os.geteuid():
            raise ValueError(f"belongs to another account (uid {status.st_uid})")
        raise ValueError("may be written by others")
    if make:
        os.fchmod(folder, 0o700)
    return folder


@contextmanager
def opened_own_folder(directory: Path | None, *, make: bool = False) -> Iterator[int]:
    """Open a folder as ``open_own_folder`` does while the block runs; None: of an account without a home."""
    if directory is None:
        raise OSError("the account has no home")
    folder = open_own_folder(directory, make=make)
    try:
        yield folder
    finally:
        os.close(folder)


def make_private_file(path: Path) -> None:
    """Create an empty file if there is none, and remove all permissions of others. Raise ``OSError``."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & FOR_OTHERS:
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~FOR_OTHERS)
    finally:
        os.close(descriptor)


def open_owner_only(path: str, flags: int) -> int:
    """Create a file with mode 0600, whatever the umask; an ``opener`` for ``open``."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def read_private_file(name: str, folder: int) -> tuple[int, str]:
    """Open and read a file in an open folder; return its descriptor and its text.

    Raise ``OSError``, or ``ValueError`` unless this account owns it and no other account may read it.
    """
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_uid != os.geteuid():
            raise ValueError(f"it belongs to another account (uid {status.st_uid})")
        if stat.S_IMODE(status.st_mode) & FOR_OTHERS:
            raise ValueError("other accounts may read it")
        return descriptor, os.read(descriptor, 1 << 16).decode()
    except BaseException:
        os.close(descriptor)
        raise


def write_private_file(name: str, folder: int, text: str, prepare: Callable[[int], None] = lambda _: None) -> int:
    """Write a file with mode 0600 atomically into an open folder; return its descriptor. Raise ``OSError``.

    ``prepare`` is called with the descriptor when the content is written, before the file gets its name.
    """
    temporary = f".{name}.{os.urandom(8).hex()}"
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with open(os.dup(descriptor), "w", encoding="utf-8") as file:
            file.write(text)
        os.fsync(descriptor)
        prepare(descriptor)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except BaseException:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise
    return descriptor


def file_identity(path: Path) -> tuple[int, int]:
    """Return device and inode of a file or folder, which differ once it is replaced. Raise ``OSError``."""
    status = path.stat()
    return status.st_dev, status.st_ino


def measure_disks(folders: Mapping[str, Path]) -> "list[Disk]":
    """Measure the disks of some folders, each disk once and under the first folder on it. Raise ``OSError``."""
    from koalapy.model.disk import Disk  # slow to import, and commands measure none

    disks: dict[int, Disk] = {}
    for purpose, folder in folders.items():
        path = folder.absolute()
        while not path.exists():
            path = path.parent
        device = path.stat().st_dev
        if device not in disks:
            status = os.statvfs(path)
            size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
            disks[device] = Disk(purpose, str(folder), free, size, status.f_favail if status.f_files else None)
    return list(disks.values())
