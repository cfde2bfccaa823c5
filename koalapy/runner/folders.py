"""Replace files atomically, create runners' folders on nodes, and remove those of killed runners.

A running runner locks a file, the mark, in its folder. Another runner of the same account and machine removes a folder
whose mark is not locked, even if the program has made parts of it read-only. It follows no links and touches no folder
without a mark.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Union

    Path = Union[str, os.PathLike[str]]


def replace_file(path: Path, content: bytes, mode: int = 0o600, *, sync: bool = True) -> None:
    """Write a temporary file in the same folder and rename it to ``path``. Raise ``OSError``.

    ``sync``: flush file and folder to the disk, so that the content survives a failure of the machine.
    """
    folder, name = os.path.split(os.fspath(path))
    fresh = os.path.join(folder, f".{name}.{os.urandom(8).hex()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if mode != 0o600:
                os.fchmod(descriptor, mode)
            if sync:
                os.fsync(descriptor)
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
    if sync:
        sync_folder(folder or ".")


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk. Raise ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def short_socket_path(path: Path) -> Iterator[str]:
    """Yield a path of a Unix socket for ``bind`` and ``connect``, which allow 107 bytes only. Raise ``OSError``."""
    folder, name = os.path.split(os.fspath(path))
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


MARK = ".koala-runner"
_NAME = re.compile(r"koala-[0-9a-z.]{1,100}-\d{1,7}-[0-9a-f]{8}", re.ASCII)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_folder(base: str, token: str, node: int) -> tuple[str, int]:
    """Create a folder; return its path and the descriptor of its mark, a file whose lock reserves it."""
    path = f"{base}/koala-{token}-{node}-{os.urandom(4).hex()}"
    os.mkdir(path, 0o700)
    mark = os.open(f"{path}/{MARK}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # without locks no runner can find the mark unlocked
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(mark, socket.gethostname().encode())
    return path, mark


def remove_stale_folders(base: str) -> list[str]:
    """Remove the folders of killed runners below a folder; return their names."""
    try:
        names = [name for name in os.listdir(base) if _NAME.fullmatch(name)]
    except OSError:
        return []
    return [name for name in names if _remove_if_stale(base, name)]


def _remove_if_stale(base: str, name: str) -> bool:
    """Remove a folder if the runner that made it was killed. Return False if it is in use, foreign or not removable."""
    try:
        folder = os.open(f"{base}/{name}", _FOLDER)
    except OSError:
        return False
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            return False
        mark = os.open(MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.pread(mark, 1000, 0) != socket.gethostname().encode():
                return False
            os.fchmod(folder, 0o700)
            if _remove_content(folder, keep=MARK):
                return False
            os.unlink(MARK, dir_fd=folder)  # last, so that the folder is found again if we are killed before
        finally:
            os.close(mark)
        os.rmdir(f"{base}/{name}")
    except OSError:
        return False
    finally:
        os.close(folder)
    return True


def remove_tree(folder: str) -> None:
    """Remove a runner's folder as far as possible. Its mark, a lock file, is removed last. Print what remains."""
    try:
        opened = _open(folder)
        try:
            failures = _remove_content(opened, keep=MARK)
            for path, error in failures:
                print(f"koala runner: cannot remove {folder}/{path}: {error.strerror}", file=sys.stderr)
            if failures:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(MARK, dir_fd=opened)
        finally:
            os.close(opened)
        os.rmdir(folder)
    except OSError as error:
        print(f"koala runner: cannot remove {folder}: {error.strerror}", file=sys.stderr)


def remove_path(path: str) -> None:
    """Remove a file, a link, or a folder with its content, including read-only folders. Raise ``OSError``."""
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    opened = _open(path)
    try:
        for _, error in _remove_content(opened):
            raise error
    finally:
        os.close(opened)
    os.rmdir(path)


def _remove_content(folder: int, keep: str = "") -> list[tuple[str, OSError]]:
    """Remove the content of a folder as far as possible; return the paths that remain, with their errors.

    Keep one folder open at a time, however deep they are. Raise ``OSError`` if a folder is moved at the same time.
    """
    failures: list[tuple[str, OSError]] = []
    # Of each open level: the folder's name, the status of its parent, and the remaining names in the parent.
    levels: list[tuple[str, os.stat_result, list[str]]] = []
    here, names = os.dup(folder), [name for name in os.listdir(folder) if name != keep]
    try:
        while names or levels:
            is_empty = not names
            if is_empty:
                name, parent, names = levels.pop()
                here = _replace_descriptor(here, _open_parent(here, parent))
            else:
                name = names.pop()
            try:
                if is_empty:
                    os.rmdir(name, dir_fd=here)
                elif stat.S_ISDIR(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
                    inner, inner_names = _open_and_list(name, here)
                    levels.append((name, os.fstat(here), names))
                    here, names = _replace_descriptor(here, inner), inner_names
                else:
                    os.unlink(name, dir_fd=here)
            except OSError as error:
                failures.append(("/".join((*(level for level, _, _ in levels), name)), error))
    finally:
        os.close(here)
    return failures


def _open_and_list(name: str, folder: int) -> tuple[int, list[str]]:
    """Open a subfolder of an open folder, and return its descriptor and the names in it. Raise ``OSError``."""
    inner = _open(name, folder)
    try:
        return inner, os.listdir(inner)
    except OSError:
        os.close(inner)
        raise


def _open_parent(folder: int, expected: os.stat_result) -> int:
    parent = os.open("..", _FOLDER, dir_fd=folder)
    if not os.path.samestat(os.fstat(parent), expected):
        os.close(parent)
        raise OSError(errno.ESTALE, "a folder in it was moved")
    return parent


def _replace_descriptor(old: int, new: int) -> int:
    os.close(old)
    return new


def _open(name: str, folder: int | None = None) -> int:
    """Open a folder that is not a link. If this account owns it, first give the owner all permissions."""
    handle = os.open(name, _FOLDER | os.O_PATH, dir_fd=folder)
    try:
        status = os.fstat(handle)
        if status.st_uid == os.geteuid() and status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            # By its descriptor, so that no other folder can replace it. chmod accepts that only through /proc.
            os.chmod(f"/proc/self/fd/{handle}", stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
        return os.open(".", _FOLDER, dir_fd=handle)
    finally:
        os.close(handle)
