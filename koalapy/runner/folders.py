"""Folders of runners below the nodes' own temporary folder, and what is left there of runners that were killed.

A runner holds a lock on a mark in its folder for as long as it lives. Whoever finds a folder of its own user and
machine whose mark nobody holds removes it, also where a program has made folders in it read-only; nothing is followed
on the way, and nothing without a mark is touched.
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
            os.fchmod(folder, 0o700)
            if _empty(folder, but=MARK):
                return False
            os.unlink(MARK, dir_fd=folder)  # last: what is left when we are killed now is found again
        finally:
            os.close(mark)
        os.rmdir(f"{base}/{name}")
    except OSError:
        return False
    finally:
        os.close(folder)
    return True


def remove_tree(folder: str) -> None:
    """Remove a runner's folder with all that is in it, as far as possible; its mark stays as long as anything does."""
    try:
        opened = _open(folder)
        try:
            left = _empty(opened, but=MARK)
            for path, error in left:
                print(f"koala runner: cannot remove {folder}/{path}: {error.strerror}", file=sys.stderr)
            if left:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(MARK, dir_fd=opened)
        finally:
            os.close(opened)
        os.rmdir(folder)
    except OSError as error:
        print(f"koala runner: cannot remove {folder}: {error.strerror}", file=sys.stderr)


def _empty(folder: int, but: str = "") -> list[tuple[str, OSError]]:
    """Remove all that is in a folder, as far as possible; what is left, and why.

    However deep folders lie, one of them is open at a time. ``OSError`` when one is moved meanwhile.
    """
    left: list[tuple[str, OSError]] = []
    way: list[
        tuple[str, os.stat_result, list[str]]
    ] = []  # each folder's name, the one above it, and what is left there
    here, names = os.dup(folder), [name for name in os.listdir(folder) if name != but]
    try:
        while names or way:
            is_empty = not names
            if is_empty:
                name, above, names = way.pop()
                here = _instead_of(here, _above(here, above))
            else:
                name = names.pop()
            try:
                if is_empty:
                    os.rmdir(name, dir_fd=here)
                elif stat.S_ISDIR(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
                    inner, inside = _enter(name, here)
                    way.append((name, os.fstat(here), names))
                    here, names = _instead_of(here, inner), inside
                else:
                    os.unlink(name, dir_fd=here)
            except OSError as error:
                left.append(("/".join((*(each for each, _, _ in way), name)), error))
    finally:
        os.close(here)
    return left


def _enter(name: str, folder: int) -> tuple[int, list[str]]:
    inner = _open(name, folder)
    try:
        return inner, os.listdir(inner)
    except OSError:
        os.close(inner)
        raise


def _above(folder: int, known: os.stat_result) -> int:
    """The folder above, opened, which must be the one that is known."""
    above = os.open("..", _FOLDER, dir_fd=folder)
    if not os.path.samestat(os.fstat(above), known):
        os.close(above)
        raise OSError(errno.ESTALE, "a folder in it was moved")
    return above


def _instead_of(old: int, new: int) -> int:
    os.close(old)
    return new


def _open(name: str, folder: int | None = None) -> int:
    """A folder, no link, opened; of our own also one that a program has made read-only, and from now on it is not."""
    place = os.open(name, _FOLDER | os.O_PATH, dir_fd=folder)
    try:
        found = os.fstat(place)
        if found.st_uid == os.geteuid() and found.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            # By its descriptor, for nobody can put another one there; such a one must be named by its link in /proc.
            os.chmod(f"/proc/self/fd/{place}", stat.S_IMODE(found.st_mode) | stat.S_IRWXU)
        return os.open(".", _FOLDER, dir_fd=place)
    finally:
        os.close(place)
