"""Seals of replicas, which show that the content is unchanged since it was read.

A seal covers inode, size and times of change of all files, including the one that cannot be set. Replicas that are lent
to programs are made read-only.
"""

import contextlib
import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from koalapy.agent.transfers.digest import MAX_DEPTH
from koalapy.agent.transfers.roots import CONTENT
from koalapy.model.errors import SiteFault, SiteRejected
from koalapy.runner.atomic_files import replace_file
from koalapy.system.clock import SYSTEM_CLOCK, Clock

SETTLED = 2.0
"""Seconds after a change until a further one gets a different time even on the coarsest clock."""
MAX_RETAINED_SEALS = 10_000
"""Maximum number of remembered seals."""
WRITING = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


def seal_of(descriptor: int) -> tuple[str, float]:
    """Return the seal of an open file or folder, and its last change (seconds since 1970). Raise ``OSError``.

    The seal is a digest of names, sizes and times in two words. The first includes the settable modification time, the
    second the change time, which only the kernel sets.
    """
    digest, kernels, changed = hashlib.sha256(), hashlib.sha256(), 0
    for name, status in _entries(descriptor, MAX_DEPTH):
        kind = stat.S_IFMT(status.st_mode)
        digest.update(
            f"{name}\0{kind} {status.st_ino} {status.st_size} {status.st_mtime_ns}\0".encode(errors="replace")
        )
        kernels.update(f"{status.st_ctime_ns} ".encode())
        changed = max(changed, status.st_mtime_ns, status.st_ctime_ns)
    return f"{digest.hexdigest()} {kernels.hexdigest()}", changed / 1e9


def settable_part(seal: str) -> str:
    """Return the first word of a seal, which changes of permissions or names do not affect."""
    return seal.partition(" ")[0]


def make_read_only(descriptor: int) -> bool:
    """Remove write permission from an open file or all files in an open folder. Return whether any changed.

    Skip files of other accounts, though root could change them, and files with several names. Folders keep their
    permissions, so that their owners can remove files.
    """
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        return _protect(descriptor)
    protected = False
    for folder, names in _folders(descriptor, MAX_DEPTH):
        for name in names:
            with contextlib.suppress(OSError):
                if not _is_to_protect(os.stat(name, dir_fd=folder, follow_symlinks=False)):
                    continue
                file = os.open(name, CONTENT, dir_fd=folder)
                try:
                    protected |= _protect(file)
                finally:
                    os.close(file)
    return protected


def _protect(descriptor: int) -> bool:
    """Remove write permission from an open file if it may be changed here. Return whether it was."""
    status = os.fstat(descriptor)
    if _is_to_protect(status):
        with contextlib.suppress(OSError):  # a file system without permissions, or read-only
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~WRITING)
            return True
    return False


def _is_to_protect(status: os.stat_result) -> bool:
    """Return whether a file is writable, belongs to this account and has no other names."""
    ours_alone = status.st_uid == os.geteuid() and status.st_nlink == 1
    return stat.S_ISREG(status.st_mode) and ours_alone and bool(status.st_mode & WRITING)


def _folders(descriptor: int, depth: int) -> Iterator[tuple[int, list[str]]]:
    """Yield an open folder and all below it, with the names in each."""
    if depth == 0:
        raise SiteRejected(
            f"the folder contains folders nested more than {MAX_DEPTH} deep: use fewer levels",
            fault=SiteFault.IRREGULAR,
        )
    names = sorted(os.listdir(descriptor))
    yield descriptor, names
    for name in names:
        if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
            folder = os.open(name, CONTENT | os.O_DIRECTORY, dir_fd=descriptor)
            try:
                yield from _folders(folder, depth - 1)
            finally:
                os.close(folder)


def _entries(descriptor: int, depth: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield name and status of an open file or folder, and of everything below it."""
    status = os.fstat(descriptor)
    yield "", status
    if stat.S_ISDIR(status.st_mode):
        for folder, names in _folders(descriptor, depth):
            for name in names:
                yield name, os.stat(name, dir_fd=folder, follow_symlinks=False)


class Seals:
    """The seals and checksums of replicas that were read, saved in a file if one is given. Thread-safe.

    A seal is a digest of names, sizes and times. While it is the same, the content need not be read.
    """

    def __init__(
        self, path: Path | None = None, clock: Clock = SYSTEM_CLOCK, max_retained: int = MAX_RETAINED_SEALS
    ) -> None:
        self._path, self._clock, self._max_retained = path, clock, max_retained
        self._lock = threading.Lock()
        self._seals: dict[str, list[str]] = {}
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            stored = json.loads(path.read_text()) if path is not None else {}
            self._seals = {str(place): [str(seal), str(checksum)] for place, (seal, checksum) in stored.items()}

    def is_unchanged(self, place: Path, seal: str, checksum: str) -> bool:
        """Return whether content with this seal had that checksum when it was read."""
        with self._lock:
            return self._seals.get(str(place)) == [seal, checksum]

    def replace_seal(self, place: Path, seal: str, checksum: str) -> None:
        """Replace a seal after the agent itself changed permissions."""
        with self._lock:
            if self._seals.get(str(place)) != [seal, checksum]:
                self._seals.pop(str(place), None)
                self._keep(place, seal, checksum)
                self._save()

    def record_seal(self, place: Path, seal: str, checksum: str, changed: float) -> None:
        """Save the seal of content that was read. Skip recent changes, since another one might get the same seal."""
        with self._lock:
            if self._seals.get(str(place)) == [seal, checksum]:
                return
            self._seals.pop(str(place), None)
            if self._clock.now() - changed > SETTLED:
                self._keep(place, seal, checksum)
            self._save()

    def _keep(self, place: Path, seal: str, checksum: str) -> None:
        """Store a seal and forget the oldest ones above the limit."""
        self._seals[str(place)] = [seal, checksum]
        while len(self._seals) > self._max_retained:
            del self._seals[next(iter(self._seals))]

    def _save(self) -> None:
        """Write the seals to the file, if there is one. Ignore errors: replicas are then read again after a restart."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # the replicas are read again after a restart
            replace_file(self._path, json.dumps(self._seals).encode())
