"""Sizes and SHA-256 checksums of files and folders."""

import hashlib
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from koalapy.agent.transfers.roots import open_entry, printable
from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable
from koalapy.model.replica import Part
from koalapy.model.wording import is_utf8

CHUNK_SIZE = 1024 * 1024
MAX_DEPTH = 100
"""Maximum nesting of folders, each of which is open while its content is read."""
POLL_INTERVAL = 0.02
"""Seconds between two reads of a growing file."""


@dataclass(frozen=True, slots=True)
class Content:
    """Size, checksum and parts of a file or folder; ``checksum`` is empty if it was not requested."""

    size: int
    checksum: str
    parts: tuple[Part, ...] | None = None


def measure_content(descriptor: int, *, checksum: bool, given_up: Callable[[], bool] = lambda: False) -> Content:
    """Return size and checksum of an open file or folder.

    Raise ``OSError`` if it cannot be read, ``SiteRejected`` if it contains other types of files, ``SiteUnavailable`` if
    cancelled by ``given_up``. The checksum of a folder is the SHA-256 of its entries sorted by name: kind,
    checksum and name of each, with spaces between and a zero byte at the end.
    """
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        return _measure_folder(descriptor, checksum, MAX_DEPTH, given_up)
    return _measure_file(descriptor, checksum, given_up)


def _measure_file(descriptor: int, checksum: bool, given_up: Callable[[], bool]) -> Content:
    """Return size and SHA-256 of an open file; leave the checksum empty unless ``checksum`` is set."""
    if not checksum:
        return Content(os.fstat(descriptor).st_size, "")
    digest, size = hashlib.sha256(), 0
    while data := os.read(descriptor, CHUNK_SIZE):
        if given_up():
            raise SiteUnavailable("the agent is stopping")
        digest.update(data)
        size += len(data)
    return Content(size, digest.hexdigest())


def _measure_folder(descriptor: int, checksum: bool, depth: int, given_up: Callable[[], bool]) -> Content:
    """Measure an open folder recursively, with its entries in order of their names, down to ``depth`` levels."""
    if depth == 0:
        raise SiteRejected(
            f"the folder contains folders nested more than {MAX_DEPTH} deep: use fewer levels",
            fault=SiteFault.IRREGULAR,
        )
    names = sorted(os.listdir(descriptor))
    if odd := [name for name in names if not is_utf8(name)]:
        raise SiteRejected(
            f"the folder contains {odd[0]!r}, a name that is not valid UTF-8: rename it", fault=SiteFault.IRREGULAR
        )
    parts = tuple(_part(descriptor, name, checksum, depth, given_up) for name in names)
    if not checksum:
        return Content(sum(part.size for _, part in parts), "", tuple(part for _, part in parts))
    digest = hashlib.sha256()
    for kind, part in parts:
        digest.update(f"{kind} {part.checksum} {part.name}\0".encode())
    return Content(sum(part.size for _, part in parts), digest.hexdigest(), tuple(part for _, part in parts))


def _part(folder: int, name: str, checksum: bool, depth: int, given_up: Callable[[], bool]) -> tuple[str, Part]:
    """Measure one entry of an open folder; return its kind, "file" or "folder", and its size and checksum."""
    if given_up():
        raise SiteUnavailable("the agent is stopping")
    if not checksum:
        # Opening it would reveal nothing more.
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            return "file", Part(name, status.st_size, "")
    entry = open_entry(folder, name)
    try:
        if stat.S_ISDIR(os.fstat(entry).st_mode):
            content = _measure_folder(entry, checksum, depth - 1, given_up)
            return "folder", Part(name, content.size, content.checksum)
        content = _measure_file(entry, checksum, given_up)
        return "file", Part(name, content.size, content.checksum)
    except OSError as error:
        raise SiteRejected(f"{printable(name)} cannot be read: {error.strerror}", fault=SiteFault.UNREADABLE) from error
    finally:
        os.close(entry)


class GrowingDigest:
    """The checksum of a file that grows, computed in a thread by ``compute_content``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_complete = threading.Event()
        self._given_up = False

    def mark_complete(self) -> None:
        self._is_complete.set()

    def cancel(self) -> None:
        self._given_up = True
        self._is_complete.set()

    def compute_content(self) -> Content:
        """Read the file until it is complete. Raise ``OSError`` if it cannot be read or never existed."""
        while True:
            last = self._is_complete.is_set()  # before opening: the file may be created and completed right after
            try:
                descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                break
            except FileNotFoundError:
                if last:
                    raise
                self._is_complete.wait(POLL_INTERVAL)
        try:
            return self._read(descriptor)
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int) -> Content:
        """Read a file that is still growing until ``mark_complete`` is called; stop early if reading is given up."""
        digest, size = hashlib.sha256(), 0
        buffer = memoryview(bytearray(CHUNK_SIZE))
        while not self._given_up:
            last = self._is_complete.is_set()
            while not self._given_up and (count := os.readv(descriptor, [buffer])):
                digest.update(buffer[:count])
                size += count
            if last:
                break
            self._is_complete.wait(POLL_INTERVAL)
        return Content(size, digest.hexdigest())
