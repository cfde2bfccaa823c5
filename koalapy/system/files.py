"""Create and read files that no other account may read, and measure disks.

Imports little, since the command line reads it at start.
"""

import os
import stat
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from koalapy.model.disk import Disk
from koalapy.model.errors import UsageError
from koalapy.system.login_socket import FOLDER, WRITABLE_BY_OTHERS

FOR_OTHERS = 0o077
"""What group and others may do, among a mode's bits."""
_WRITABLE_BY_ALL = 0o1002
"""For everybody to write, or kept from the worst of that as /tmp is."""
_OF_FILE_SYSTEMS = {"lost+found"}


def private_directory(path: Path, contents: Collection[str], field: str) -> Path:
    """The directory, made or tightened to 0700, without symbolic links. ``UsageError`` (``field``) when it is not ours.

    One that exists and others may read is only tightened when it is empty, or has something of ``contents``: nobody
    loses a shared folder to a slip of the hand.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory = path.resolve(strict=True)
        seen = directory.stat()
        inside = set(os.listdir(directory)) - _OF_FILE_SYSTEMS if seen.st_uid == os.geteuid() else set()
    except OSError as error:
        raise UsageError(
            f"cannot use {path}: {error.strerror}", field=field, value=str(path), hint="give a directory of your own"
        ) from error
    if seen.st_uid != os.geteuid():
        raise UsageError(
            f"{directory} belongs to another account (uid {seen.st_uid})",
            field=field,
            value=str(path),
            hint="give a directory of your own, or run as that account",
        )
    mode = stat.S_IMODE(seen.st_mode)
    if not mode & FOR_OTHERS:
        return directory
    if mode & _WRITABLE_BY_ALL or (inside and inside.isdisjoint(contents)):
        why = "is for all to write" if mode & _WRITABLE_BY_ALL else "may be read by others, and holds other things"
        raise UsageError(
            f"{directory} {why}",
            field=field,
            value=str(path),
            hint="give a directory of its own, or tighten it yourself: chmod 700",
        )
    directory.chmod(0o700)
    return directory


def open_own_folder(directory: Path, *, make: bool = False) -> int:
    """Open a folder with secrets; with ``make``, make it or tighten it to 0700.

    Raise ``OSError``, and ``ValueError`` unless it is this account's and no other account may write there.
    """
    if make:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        folder = os.open(directory, FOLDER)
    except OSError:
        if directory.is_symlink():
            raise ValueError("is a symbolic link") from None
        raise
    seen = os.fstat(folder)
    if seen.st_uid != os.geteuid() or seen.st_mode & WRITABLE_BY_OTHERS:
        os.close(folder)
        is_ours = seen.st_uid == os.geteuid()
        raise ValueError("may be written by others" if is_ours else f"belongs to another account (uid {seen.st_uid})")
    if make:
        os.fchmod(folder, 0o700)
    return folder


def private_file(path: Path) -> None:
    """See to it that a file is there, if only empty, and 0600. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        tighten(descriptor)
    finally:
        os.close(descriptor)


def owner_only(path: str, flags: int) -> int:
    """As the ``opener`` of ``open``: a file that is made so is 0600, whatever files of jobs are to be."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def tighten(descriptor: int) -> None:
    """Take from group and others what they may do with an open file, if it is ours."""
    seen = os.fstat(descriptor)
    if seen.st_uid == os.geteuid() and stat.S_IMODE(seen.st_mode) & FOR_OTHERS:
        os.fchmod(descriptor, stat.S_IMODE(seen.st_mode) & ~FOR_OTHERS)


def read_private(name: str, folder: int) -> tuple[int, str]:
    """A file of ours in an open folder that nobody else could read: open, and its text. ``OSError``, ``ValueError``."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode):
            raise ValueError("it is no file")
        if seen.st_uid != os.geteuid():
            raise ValueError(f"it belongs to another account (uid {seen.st_uid})")
        if stat.S_IMODE(seen.st_mode) & FOR_OTHERS:
            raise ValueError("others may read it")
        return descriptor, os.read(descriptor, 1 << 16).decode()
    except BaseException:
        os.close(descriptor)
        raise


def write_private(name: str, folder: int, text: str, before: Callable[[int], None] = lambda _: None) -> int:
    """Put a file 0600 into an open folder, whole or not at all; it stays open. Raises ``OSError``.

    ``before`` is called with the file when it is written and has not got its name yet.
    """
    fresh = f".{name}.{os.urandom(8).hex()}"
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with open(os.dup(descriptor), "w", encoding="utf-8") as file:
            file.write(text)
        os.fsync(descriptor)
        before(descriptor)
        os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except BaseException:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(fresh, dir_fd=folder)
        raise
    return descriptor


def file_identity(path: Path) -> tuple[int, int]:
    """Return device and inode of a file or folder, which differ once it is replaced. Raise ``OSError``."""
    status = path.stat()
    return status.st_dev, status.st_ino


def measure_disks(folders: Mapping[str, Path]) -> list[Disk]:
    """Measure the disks of some folders, each disk once and under the first folder on it. Raise ``OSError``."""
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
