"""The folders of components, each with a journal of what the agent must know after a crash.

Programs may write into these folders: the agent opens only regular files and follows no link.
"""

import asyncio
import contextlib
import ctypes
import errno
import json
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from koalapy.agent.runners.runner_messages import parse_result
from koalapy.agent.transfers.roots import remove_tree
from koalapy.runner.account_files import LOG_END as LAST_LINE_WINDOW
from koalapy.runner.account_files import MAX_RESULT
from koalapy.runner.account_files import RUNNER_LOG as RUNNER_LOG
from koalapy.runner.folders import make_durable_folder
from koalapy.runner.result_archive import CONTENT
from koalapy.runner.session import FILE_TAG_LENGTH, open_file
from koalapy.runner.settings import SECRET_FILE

log = structlog.get_logger()

_libc = ctypes.CDLL(None, use_errno=True)
_WRITING = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
SYNC_THREADS = 3
"""Maximum number of threads that flush files at the same time."""
FILES_PER_THREAD = 8
"""Files that a thread flushes before another one is used: each start of a thread's work takes processor time."""
MAX_SINGLE_FLUSHES = 1000
"""Files and folders that are flushed one by one, each of which takes some milliseconds."""
REMOVED_SUFFIX = ".forgotten"
MAX_JOURNAL = 64 * 1024 * 1024
"""Maximum bytes of a journal. The agent writes none that is larger."""
JOURNAL = "journal"
DAMAGED_JOURNAL = "journal.damaged"
"""New name of a journal that cannot be used. Its folder then counts as one without a record."""
_CHECKED_LINE = re.compile(rb"(.*) ([0-9a-f]{8})", re.DOTALL)
_SPOILED_BY_PROGRAMS = (errno.EINVAL, errno.ELOOP, errno.ENXIO, errno.EACCES, errno.ENOENT, errno.EISDIR)
"""Errors of reading a file that a program has replaced or removed, or whose mode it has changed."""
NOT_EMPTY = re.compile(r"\S")
LAST_HEARD_FILE = "heard"
"""A file per daemon instance, modified at each contact."""


def read_regular(path: Path, max_size: int, *, end: bool = False) -> bytes:
    """Return the content of a regular file of at most ``max_size`` bytes; ``end``: its last bytes. Raise ``OSError``
    for anything else."""
    with open(open_regular(path, access=CONTENT), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_size and not end:
            raise _odd(path)
        file.seek(max(0, size - max_size))
        return file.read(min(max_size, size))


def open_regular(path: Path, flags: int = 0, *, access: int = _WRITING | os.O_CREAT) -> int:
    """Open a regular file, by default for writing, created with mode 0600, and return its descriptor. Raise ``OSError``
    for anything else."""
    descriptor = os.open(path, access | flags, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _odd(path)
    return descriptor


def _odd(path: Path) -> OSError:
    """Return the error for a path that is not a regular file."""
    return OSError(errno.EINVAL, "not a file of the agent or a runner", str(path))


def has_failed_disk(error: Exception) -> bool:
    """Return whether a disk or its server has failed to read a file, whose content may be whole."""
    return isinstance(error, OSError) and error.errno not in _SPOILED_BY_PROGRAMS


class DiskSync:
    """Flushes files and folders to the disk in batches.

    All callers that wait share one flush, and writes during a flush wait for the next one.
    """

    def __init__(self) -> None:
        self._dirty: dict[Path, None] = {}
        self._failed: dict[Path, OSError] = {}
        self._written_count = self._synced_count = 0
        self._sync_task: asyncio.Task[None] | None = None

    def mark_written(self, *paths: Path) -> None:
        """Record written files, or folders with changed entries."""
        self._dirty.update(dict.fromkeys(paths))
        self._written_count += 1

    async def wait_synced(self) -> None:
        """Wait until everything written so far is on the disk, or has failed."""
        target = self._written_count
        while self._synced_count < target:
            if self._sync_task is None or self._sync_task.done():
                self._sync_task = asyncio.create_task(self._sync_all())
            await asyncio.shield(self._sync_task)

    def find_error(self, folder: Path) -> OSError | None:
        """Return the error of a failed flush in a folder, if any."""
        return next((error for path, error in self._failed.items() if folder in (path, path.parent)), None)

    async def _sync_all(self) -> None:
        """Flush everything written so far to the disk, journals after all other files; note which paths failed."""
        upto, dirty, self._dirty = self._written_count, list(self._dirty), {}
        for is_journal in (False, True):
            paths = [path for path in dirty if (path.name == JOURNAL) is is_journal]
            thread_count = min(SYNC_THREADS, -(-len(paths) // FILES_PER_THREAD))
            shares = [paths[number::thread_count] for number in range(thread_count)]
            for results in await asyncio.gather(*(asyncio.to_thread(_sync_paths, share) for share in shares)):
                for path, error in results:
                    self._failed.pop(path, None)
                    if error is not None:
                        self._failed[path] = error
        self._synced_count = upto

    def forget_folder(self, folder: Path) -> None:
        self._failed = {p: e for p, e in self._failed.items() if folder not in (p, p.parent)}


def _sync_paths(paths: Iterable[Path]) -> list[tuple[Path, OSError | None]]:
    """Flush files and folders to the disk, one after another; return the error of each, None on success."""
    results: list[tuple[Path, OSError | None]] = []
    for path in paths:
        problem = None
        try:
            sync_path(path)
        except OSError as error:
            problem = None if isinstance(error, FileNotFoundError) else error  # it was removed in between
        results.append((path, problem))
    return results


def sync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk. Raise ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # do not block on a pipe
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path, stop: threading.Event, max_single: int = MAX_SINGLE_FLUSHES) -> None:
    """Flush a folder, its name and content to the disk until ``stop`` is set. Follow no links. Raise ``OSError``.

    Above ``max_single`` files and folders, flush the whole file system.
    """
    folders, paths = [folder], [folder.parent]
    while folders:
        with os.scandir(path := folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    paths.append(Path(entry.path))
                if len(paths) > max_single:
                    sync_file_system(folder)
                    return
        paths.append(path)
    for path in paths:
        if not stop.is_set():
            sync_path(path)


def sync_file_system(path: Path) -> None:
    """Flush all that was written to the file system of a path to the disk, by any account. Raise ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if _libc.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(descriptor)


class DamagedJournal(ValueError):
    """A line of a journal was changed, so that its record is lost."""


@dataclass(eq=False, slots=True)
class JournalFolder:
    """One component's folder. Each line of its journal is a JSON object and its checksum."""

    path: Path
    disk_sync: DiskSync | None = None
    """Flushes written lines in batches. Without it each line is flushed at once."""
    secret_of: Callable[[int], bytes | None] | None = None
    """Returns a node's secret, which verifies the files of its runner. Without it all files are trusted."""
    _unwritten: bytes = b""
    _end: int | None = None
    """Where the journal ended before a write that failed, and may have left a part of a line; None without one."""

    def write_entry(self, **entry: Any) -> None:
        """Append to the journal, in the event loop's thread. Raise ``OSError`` if not all of it could be written."""
        lines = self._unwritten + _line(entry)
        path = self.path / JOURNAL
        descriptor = open_regular(path, os.O_APPEND)
        try:
            size = os.fstat(descriptor).st_size
            if self._end is not None and size > self._end:
                os.ftruncate(descriptor, size := self._end)
            self._end = size
            try:
                if os.write(descriptor, lines) < len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        self.mark_written(*([path] if size else [path, self.path]))
        self._unwritten, self._end = b"", None

    def mark_written(self, *paths: Path) -> None:
        """Flush written files, or folders with changed entries; ``disk_sync`` does so later. Raise ``OSError``."""
        if self.disk_sync is not None:
            self.disk_sync.mark_written(*paths)
        else:
            for path in paths:
                sync_path(path)

    def note_entry(self, **entry: Any) -> None:
        """Append an event that has happened. If the disk is full, ``write_late_entries`` writes it later."""
        self._unwritten += _line(entry)
        self.write_late_entries()

    @property
    def has_unwritten(self) -> bool:
        """Whether events are noted that ``write_late_entries`` has yet to write."""
        return bool(self._unwritten)

    def write_late_entries(self) -> bool:
        """Retry what could not be written before. Return whether everything is written."""
        if self._unwritten:
            try:
                self.write_entry()
            except OSError as error:
                log.warning(
                    "cannot write a journal", action="journal-not-written", reason=format_write_error(self.path, error)
                )
        return not self._unwritten

    async def wait_synced(self) -> None:
        """Wait until everything written is on the disk. Raise ``OSError`` if that fails."""
        if self.disk_sync is not None:
            await self.disk_sync.wait_synced()
            if problem := self.disk_sync.find_error(self.path):
                raise problem

    def load_entries(self) -> dict[str, Any]:
        """Return the journal's entries as one mapping, later ones over earlier ones.

        Cut off an unfinished last line: the agent was killed while writing it, before it had an effect. Raise
        ``DamagedJournal`` if any other line was changed, ``OSError`` if the journal cannot be read.
        """
        entries: dict[str, Any] = {}
        path = self.path / JOURNAL
        try:
            content = read_regular(path, MAX_JOURNAL)
        except FileNotFoundError:
            return entries
        *lines, unfinished = content.split(b"\n")
        for line in filter(None, lines):
            if not _is_whole(line):
                raise DamagedJournal(f"the line {line[:60]!r} does not match its checksum")
            entries |= json.loads(line.rpartition(b" ")[0])
        if unfinished:
            if _is_whole(unfinished[:-1]):
                raise DamagedJournal("its last line is complete, but the newline after it was changed")
            with contextlib.suppress(OSError):
                os.truncate(path, len(content) - len(unfinished))
        return entries

    def set_damaged_aside(self) -> None:
        """Rename a damaged journal. The folder is then removed with the component or by the next agent."""
        with contextlib.suppress(OSError):
            (self.path / JOURNAL).rename(self.path / DAMAGED_JOURNAL)

    def read_result(self, node: int) -> dict[str, Any] | None:
        """Return the result that a node's runner saved, None if there is no valid one."""
        try:
            return parse_result(self.read_runner_file(node, self.path / f"result.{node}.json", MAX_RESULT))
        except (OSError, ValueError, RecursionError):
            return None

    def read_runner_file(self, node: int, path: Path, max_size: int) -> bytes:
        """Return a file of a node's runner. Raise ``ValueError`` if another process wrote it, else ``OSError``."""
        if self.secret_of is None:
            return read_regular(path, max_size)
        if (secret := self.secret_of(node)) is None:
            raise OSError(errno.EAGAIN, "the node's secret is not known yet", str(path))
        return open_file(secret, path.name, read_regular(path, max_size + FILE_TAG_LENGTH))

    def last_log_line(self, pattern: re.Pattern[str] = NOT_EMPTY) -> str:
        """Return the last line of the runner log in which a pattern occurs; empty if there is none."""
        try:
            lines = (
                read_regular(self.path / RUNNER_LOG, LAST_LINE_WINDOW, end=True).decode(errors="replace").splitlines()
            )
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if pattern.search(line)), "")

    def unsent_files(self) -> dict[int, list[tuple[int, Path]]]:
        """Return the files with output that runners did not send, by node, with their offsets in the stream."""
        by_node: dict[int, list[tuple[int, Path]]] = {}
        for path in self.path.glob("output.*.*"):
            _, node, start = path.name.split(".", 2)
            if node.isdecimal() and start.isdecimal():
                by_node.setdefault(int(node), []).append((int(start), path))
        return {node: sorted(files) for node, files in by_node.items()}

    def remove_folder(self) -> None:
        """Rename and then remove the folder. The next agent removes it if this one is killed in between."""
        self._unwritten = b""
        renamed = self.path.with_name(f"{self.path.name}{REMOVED_SUFFIX}")
        try:
            self.path.rename(renamed)
        except OSError:  # removed before, or an earlier removal was interrupted
            remove_tree(self.path)
        remove_tree(renamed)
        if self.disk_sync is not None:
            self.disk_sync.forget_folder(self.path)


def _line(entry: dict[str, Any]) -> bytes:
    """Return a journal line: an entry in JSON and its checksum. Return nothing for an empty entry."""
    text = json.dumps(entry).encode()
    return b"%s %08x\n" % (text, zlib.crc32(text)) if entry else b""


def _is_whole(line: bytes) -> bool:
    """Return whether a journal line has the right checksum."""
    match = _CHECKED_LINE.fullmatch(line)
    return match is not None and zlib.crc32(match[1]) == int(match[2], 16)


def _restore_access(folder: Path) -> None:
    """Give the owner of a folder all rights again: a program that worked there may have changed its mode."""
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            folder.chmod(mode | stat.S_IRWXU)


def format_write_error(path: Path, error: OSError) -> str:
    """Return an error message with the path that cannot be written and the disk that it is on."""
    mount = path.absolute()
    while not os.path.ismount(mount):
        mount = mount.parent
    return f"the spool {path} cannot be written: {error.strerror or error} (disk of {mount})"


class Spool:
    """The folders of all components, by daemon instance and token."""

    def __init__(self, directory: Path, secret_of: Callable[[str, str, int], bytes | None] | None = None) -> None:
        """Create the directory. ``secret_of`` returns a node's secret by instance, token and index."""
        self._directory, self._secret_of = directory, secret_of
        self._instances: set[str] = set()
        """Daemons with folders that this process has made or found, and recorded as written."""
        self.disk_sync = DiskSync()
        make_durable_folder(directory)

    def make_folder(self, instance: str, token: str) -> JournalFolder:
        """Create the folder of a component's journal if it does not exist, and return it. Raise ``OSError``."""
        path = self._directory / instance / token
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.disk_sync.mark_written(path, path.parent, *(() if instance in self._instances else (self._directory,)))
        self._instances.add(instance)
        return self._folder(path)

    def _folder(self, path: Path) -> JournalFolder:
        secret_by_token = self._secret_of
        secret_of = secret_by_token and partial(secret_by_token, path.parent.name, path.name)
        return JournalFolder(path, self.disk_sync, secret_of)

    def discard_folder(self, instance: str, token: str) -> None:
        JournalFolder(self._directory / instance / token, self.disk_sync).remove_folder()

    def record_contact(self, instance: str) -> None:
        """Record that a daemon was in contact now, so that it does not expire. Raise ``OSError``."""
        (self._directory / instance).mkdir(mode=0o700, exist_ok=True)
        (self._directory / instance / LAST_HEARD_FILE).touch(mode=0o600)

    def silence_of(self, instance: str) -> float:
        """Return the seconds since the last contact with a daemon; 0 if none is recorded, or one in the future."""
        with contextlib.suppress(FileNotFoundError):
            seconds = time.time() - (self._directory / instance / LAST_HEARD_FILE).stat().st_mtime
            if seconds >= 0:  # else the clock was set back
                return seconds
        self.record_contact(instance)
        return 0.0

    def remove_leftovers(self) -> list[Path]:
        """Remove what killed agents left: half-removed folders, those without a journal, temporary secret files.

        Return the paths of the folders. Open the others to this account again, if programs have closed them.
        """
        leftovers = list(self._directory.glob(f"*/*{REMOVED_SUFFIX}"))
        for heard in self._directory.glob(f"*/{LAST_HEARD_FILE}"):
            folders = [path for path in heard.parent.iterdir() if path.is_dir() and not path.is_symlink()]
            for path in folders:
                _restore_access(path)
            leftovers += [path for path in folders if path not in leftovers and not (path / JOURNAL).exists()]
        for path in leftovers:
            remove_tree(path)
        for path in self._directory.glob(f"*/*/.{SECRET_FILE.format(node='*')}.*"):
            with contextlib.suppress(OSError):
                path.unlink()
        return leftovers

    def load_folders(self) -> Iterator[tuple[str, str, JournalFolder]]:
        for journal in sorted(self._directory.glob("*/*/journal")):
            yield journal.parent.parent.name, journal.parent.name, self._folder(journal.parent)
