"""Folders of runners below the nodes' own temporary folder, and what is left there of runners that were killed.

A runner holds a lock on a mark in its folder for as long as it lives. Whoever finds a folder of its own user and
machine whose mark nobody holds removes it; nothing is followed on the way, and nothing without a mark is touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat

MARK = ".koala-runner"
_NAME = re.compile(r"koala-[0-9a-z.]{1,100}-\d{1,7}-[0-9a-f]{8}", re.ASCII)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_folder(base: str, token: str, node: int) -> tuple[str, int]:
    """A new folder and the descriptor that keeps it: it is given up when that is closed, or its process is gone."""
    path = f"{base}/koala-{token}-{node}-{os.urandom(4).hex()}"
    os.mkdir(path, 0o700)
    mark = os.open(f"{path}/{MARK}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # where there are no locks nobody will take it for left
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(mark, socket.gethostname().encode())
    return path, mark


def sweep(base: str) -> list[str]:
    """Remove what killed runners left below a folder; the names of what was removed."""
    try:
        names = [name for name in os.listdir(base) if _NAME.fullmatch(name)]
    except OSError:
        return []
    return [name for name in names if _remove_if_left(base, name)]


def _remove_if_left(base: str, name: str) -> bool:
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
            _empty(folder, but=MARK)
            os.unlink(MARK, dir_fd=folder)  # last: what is left when we are killed now is found again
        finally:
            os.close(mark)
        os.rmdir(f"{base}/{name}")
    except OSError:
        return False
    finally:
        os.close(folder)
    return True


def _empty(folder: int, but: str = "") -> None:
    for name in os.listdir(folder):
        if name == but:
            continue
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            inner = os.open(name, _FOLDER, dir_fd=folder)
            try:
                _empty(inner)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
