"""The replicas of a cluster: answers other sites and the daemon, and lends replicas to jobs."""

import asyncio
import contextlib
import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from koalapy.agent.transfers.roots import CONTENT, MAX_DEPTH, Content, Roots, is_plain_name, measure_content, printable
from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable
from koalapy.runner.folders import replace_file
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

    A seal is a digest of inode, size and times of change of all files, including the one that cannot be set. While it
    is the same, the content need not be read. Replicas that are lent to programs are made read-only.
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


MAX_CONCURRENT_READS = 4
"""Checksums computed at once for questions; further ones wait."""
STOP_POLL_INTERVAL = 0.2
"""Seconds between two checks for a stop while waiting."""
MAX_ANSWER_SIZE = 16 * 1024 * 1024
"""Maximum characters for a folder's entries; the daemon accepts no message that is much larger."""


class StatQuestion(BaseModel):
    """The question ``stat`` about a file or folder."""

    path: str
    checksum: bool = True


class ReplicaRequest(BaseModel):
    """A replica of the catalogue, or one entry of a folder; ``size`` in bytes is that of the part."""

    path: str
    part: str | None = None
    size: int = Field(ge=0)

    def path_on_disk(self) -> Path:
        """Return the path of the replica, or of its entry ``part``. Raise ``SiteRejected`` if ``part`` is not a plain
        file name."""
        if self.part is None:
            return Path(self.path)
        if not is_plain_name(self.part):
            raise SiteRejected(
                f"{self.part!r} is not the name of one entry of {self.path}: give a name without '/'",
                fault=SiteFault.OUTSIDE,
            )
        return Path(self.path) / self.part


class Replicas:
    """Checks, measures and lends replicas; answers the question ``stat``."""

    def __init__(
        self,
        roots: Roots,
        seals: Seals | None = None,
        clock: Clock = SYSTEM_CLOCK,
        max_answer_size: int = MAX_ANSWER_SIZE,
    ) -> None:
        self.roots, self._clock, self._max_answer_size = roots, clock, max_answer_size
        self._seals = seals or Seals()
        self._reading: dict[Path, threading.Lock] = {}
        self._under_way: dict[tuple[Path, bool], asyncio.Future[Content]] = {}
        # A read may take hours and must not block others.
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT_READS, "stat")
        self._closing = threading.Event()

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def stat_replica(self, payload: Mapping[str, Any]) -> dict[str, object]:
        """Return the canonical path of a file or folder, its size, checksum, and a folder's parts.

        Questions for the same path share one computation.
        """
        question = StatQuestion.model_validate(payload)
        path = await asyncio.to_thread(self.roots.resolve_path, question.path)
        key = path, question.checksum
        looking = self._under_way.get(key)
        if looking is None:
            look = partial(self.measure_replica, path, checksum=question.checksum)
            looking = asyncio.get_running_loop().run_in_executor(self._threads, look)
            self._under_way[key] = looking
            looking.add_done_callback(lambda _: self._under_way.pop(key))
        content = await asyncio.shield(looking)
        parts = None if content.parts is None else [asdict(part) for part in content.parts]
        if parts and await asyncio.to_thread(lambda: len(json.dumps(parts))) > self._max_answer_size:
            raise SiteRejected(
                f"{printable(str(path))} has {len(parts):,} entries; their list is "
                f"longer than the {self._max_answer_size:,} bytes of an agent's answer",
                hint="move them into subfolders",
                fault=SiteFault.IRREGULAR,
            )
        return {"path": str(path), "size": content.size, "checksum": content.checksum, "parts": parts}

    def measure_replica(self, path: Path, *, checksum: bool) -> Content:
        """Return the content of a replica. Block while it is read. Raise ``SiteRejected``."""
        with self.roots.open_path(path) as opened:
            if not checksum:
                return measure_content(opened.descriptor, checksum=False)
            return self._read(path, opened.descriptor, self._closing)

    def _read(self, path: Path, descriptor: int, stop: threading.Event, changed_before: float | None = None) -> Content:
        """Return the content with checksum; remember it unless the replica changed during the read.

        ``changed_before``: the last change by others, if the agent has changed it since.
        """
        seal_before, _ = seal_of(descriptor)
        began = self._clock.now()
        content = measure_content(descriptor, checksum=True, given_up=stop.is_set)
        seal_after, changed = seal_of(descriptor)
        if seal_before == seal_after:
            changed = changed if changed_before is None else changed_before
            self._seals.record_seal(path, seal_after, content.checksum, changed + max(0.0, self._clock.now() - began))
        return content

    def lend_replica(self, request: ReplicaRequest, checksum: str, stop: threading.Event) -> Path:
        """Return the path of a replica for jobs, after making it read-only and verifying its content.

        Read it only if its seal, a digest of sizes and times, has changed. Block. Raise ``SiteRejected``.
        """
        path = self.check_replica(request)
        with self._alone(path, stop), self.roots.open_path(path) as opened:
            seal, changed = seal_of(opened.descriptor)
            is_known, changed_before = self._seals.is_unchanged(path, seal, checksum), None
            if make_read_only(opened.descriptor):
                # The agent's own change of permissions needs no new read if nothing else changed.
                former, (seal, _) = settable_part(seal), seal_of(opened.descriptor)
                is_same = settable_part(seal) == former
                is_known, changed_before = is_known and is_same, changed if is_same else None
            if is_known:
                self._seals.replace_seal(path, seal, checksum)
                return path
            content = self._read(path, opened.descriptor, stop, changed_before)
        if (content.size, content.checksum) != (request.size, checksum):
            change = f"its SHA-256 begins with {content.checksum[:8]} now and not {checksum[:8]}: it was changed"
            raise SiteRejected(f"{printable(str(path))}: {change}", fault=SiteFault.CHANGED)
        return path

    @contextmanager
    def _alone(self, path: Path, stop: threading.Event) -> Iterator[None]:
        """Lock a replica so that one thread at a time reads it. Raise ``SiteUnavailable`` when stopped."""
        lock = self._reading.setdefault(path, threading.Lock())
        while not lock.acquire(timeout=STOP_POLL_INTERVAL):
            if stop.is_set():
                raise SiteUnavailable("it is no longer needed")
        try:
            yield
        finally:
            lock.release()

    def check_replica(self, request: ReplicaRequest) -> Path:
        """Return the path of a readable replica of the right size. Raise ``SiteRejected`` otherwise."""
        path = request.path_on_disk()
        with self.roots.open_path(path) as opened:
            size = measure_content(opened.descriptor, checksum=False).size
            if not opened.is_folder:
                os.pread(opened.descriptor, 1, 0)
        if size != request.size:
            raise SiteRejected(
                f"{printable(str(path))} has {size:,} bytes now and not {request.size:,}", fault=SiteFault.CHANGED
            )
        return path
