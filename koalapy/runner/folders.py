"""Replace files atomically, create runners' folders on nodes, and remove those of killed runners.

A running runner locks a file, the mark, in its folder. Another runner of the same account and machine removes a folder
with an unlocked mark, even if the program has made parts of it read-only. It follows no links and touches no folder
without a mark.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Union

    Path = Union[str, os.PathLike[str]]


def replace_file(
    path: Path, content: bytes, mode: int = 0o600, *, sync: bool = True, modified_at: int | None = None
) -> None:
    """Write a temporary file in the same folder and rename it to ``path``. Raise ``OSError``.

    ``sync``: flush file and folder to the disk, so that the content survives a failure of the machine.
    ``modified_at``: the file's time of modification; default: now.
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
            if modified_at is not None:
                os.utime(descriptor, (modified_at, modified_at))
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


def make_durable_folder(path: Path) -> None:
    """Create a private folder with its missing parents, and flush its name to the disk. Raise ``OSError``.

    The name of an existing folder is flushed too: the process that created it may have been killed before it did that.
    """
    parent = os.path.dirname(path) or "."
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        make_durable_folder(parent)
        make_durable_folder(path)
        return
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    with contextlib.suppress(PermissionError):  # another account made the parent, and its names durable
        sync_folder(parent)


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
            if _empty_folder(folder):
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
        opened = os.open(folder, _FOLDER)
        try:
            if remaining := _empty_folder(opened):
                print(f"koala runner: cannot remove {', '.join(remaining)} in {folder}", file=sys.stderr)
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
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _remove_entry(os.path.basename(path), folder)
    finally:
        os.close(folder)


def _empty_folder(folder: int) -> list[str]:
    """Remove the entries of an open folder except its mark. Return the names of those that cannot be removed."""
    os.fchmod(folder, 0o700)
    remaining = []
    for name in os.listdir(folder):
        try:
            if name != MARK:
                _remove_entry(name, folder)
        except OSError:
            remaining.append(name)
    return remaining


def _remove_entry(name: str, folder: int) -> None:
    """Remove an entry of an open folder with its content, however deep. Follow no links. Raise ``OSError``."""
    try:
        os.unlink(name, dir_fd=folder)
        return
    except IsADirectoryError:
        path = f"/proc/self/fd/0/{name}"  # by its standard input, so that no other folder can replace the open one
    files = [(os.POSIX_SPAWN_DUP2, folder, 0), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    for command in (("rm", "-rf"), ("chmod", "-R", "u+rwx"), ("rm", "-rf")):
        pid = os.posix_spawnp(command[0], [*command, path], os.environ, file_actions=files)
        code = os.waitpid(pid, 0)[1]
        if code == 0 and command[0] == "rm":
            return
    raise OSError(errno.ENOTEMPTY, "it cannot be removed", name)
