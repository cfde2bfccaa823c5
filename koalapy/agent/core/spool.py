"""What an agent must still know after a crash: a folder for each component, with a journal of what was decided.

Programs may write into these folders, too: only regular files are opened, and no link is followed.
"""

import asyncio
import contextlib
import errno
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from koalapy.agent.runners.runner_messages import parse_result
from koalapy.agent.transfers.trees import remove_tree
from koalapy.runner.account_files import LOG_END as LAST_LINE_WINDOW
from koalapy.runner.account_files import MAX_RESULT
from koalapy.runner.account_files import RUNNER_LOG as RUNNER_LOG
from koalapy.runner.result_archive import CONTENT
from koalapy.runner.session import FILE_TAG_LENGTH, open_file

log = structlog.get_logger()

_WRITING = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CHUNK = 1024 * 1024
REMOVED_SUFFIX = ".forgotten"
MAX_JOURNAL = 64 * 1024 * 1024
"""Bytes of a journal at most: of what has more, most was not written by us."""
DAMAGED_JOURNAL = "journal.damaged"
"""What a journal is renamed to when it cannot be used: its folder counts as one without a record."""
_CHECKED_LINE = re.compile(rb"(.*) ([0-9a-f]{8})", re.DOTALL)
LAST_HEARD_FILE = "heard"
"""A file of each daemon instance: its time is when the daemon was last heard of."""


def read_regular(path: Path, most: int, *, end: bool = False) -> bytes:
    """A file; ``end``: the last of it. What is no file, or has more bytes, is an ``OSError``."""
    descriptor = os.open(path, CONTENT)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or (found.st_size > most and not end):
            raise _odd(path)
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            if end:
                file.seek(max(0, found.st_size - most))
            pieces, left = [], most
            while left and (data := file.read(min(left, _CHUNK))):
                pieces.append(data)
                left -= len(data)
            return b"".join(pieces)
    finally:
        os.close(descriptor)


def open_regular(path: Path, flags: int = 0) -> int:
    """The descriptor of a file to write, only ours to read where it is made; what is no file is an ``OSError``."""
    descriptor = os.open(path, _WRITING | os.O_CREAT | flags, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _odd(path)
    return descriptor


def _odd(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is nothing that we or a runner leave", str(path))


class DiskSync:
    """Knows which files and folders were written since they were last on the disk.

    Those who wait share a round, and while one is under way the next one gathers: a burst costs few of them.
    """

    def __init__(self) -> None:
        self._dirty: dict[Path, None] = {}
        self._failed: dict[Path, OSError] = {}
        self._asked = self._done = 0
        self._round: asyncio.Task[None] | None = None

    def mark_written(self, *paths: Path) -> None:
        """Something was written to these: files, or folders in which names came or went."""
        self._dirty.update(dict.fromkeys(paths))
        self._asked += 1

    async def wait_synced(self) -> None:
        """Return when all that was written before is on the disk, or cannot be brought there."""
        wanted = self._asked
        while self._done < wanted:
            if self._round is None or self._round.done():
                self._round = asyncio.create_task(self._sync())
            await asyncio.shield(self._round)

    def find_error(self, folder: Path) -> OSError | None:
        """Why something in a folder could not be brought to the disk."""
        return next((error for path, error in self._failed.items() if folder in (path, path.parent)), None)

    async def _sync(self) -> None:
        upto, paths = self._asked, list(self._dirty)
        self._dirty = {}
        errors = await asyncio.gather(*(asyncio.to_thread(_sync, path) for path in paths))
        for path, error in zip(paths, errors, strict=True):
            if error is None:
                self._failed.pop(path, None)
            else:
                self._failed[path] = error
        self._done = upto

    def forget_folder(self, folder: Path) -> None:
        self._failed = {p: e for p, e in self._failed.items() if folder not in (p, p.parent)}


def _sync(path: Path) -> OSError | None:
    try:
        sync_path(path)
    except FileNotFoundError:
        return None  # removed meanwhile
    except OSError as error:
        return error
    return None


def sync_path(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk; ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place is not waited at
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class DamagedJournal(ValueError):
    """A journal has a line that is not as it was written, so that something it recorded is lost."""


@dataclass(eq=False, slots=True)
class JournalFolder:
    """One component's folder. Its journal has one JSON object a line, each followed by its checksum."""

    path: Path
    disk_sync: DiskSync | None = None
    """Who brings it to the disk; without one, each line is brought there at once."""
    secret_of: Callable[[int], bytes | None] | None = None
    """The secret of a node, by which what its runner left is known to be its; without one, all is taken for that."""
    _late: bytes = b""

    def write_entry(self, **entry: Any) -> None:
        """Add to the journal; ``OSError`` also when there was room for a part of it only."""
        self._append(self._late + _line(entry))
        self._late = b""

    def note_entry(self, **entry: Any) -> None:
        """The same of what has happened already: where there is no room it is written later, in ``catch_up``."""
        self._late += _line(entry)
        self.write_late_entries()

    def write_late_entries(self) -> bool:
        """Write what could not be written before; whether nothing of that is left."""
        if self._late:
            try:
                self.write_entry()
            except OSError as error:
                log.warning(
                    "a journal cannot be written",
                    action="journal-not-written",
                    reason=format_write_error(self.path, error),
                )
        return not self._late

    async def wait_synced(self) -> None:
        """Return when all that was written is on the disk; ``OSError`` when it cannot be brought there."""
        if self.disk_sync is not None:
            await self.disk_sync.wait_synced()
            if problem := self.disk_sync.find_error(self.path):
                raise problem

    def _append(self, lines: bytes) -> None:
        path = self.path / "journal"
        descriptor = open_regular(path, os.O_APPEND)
        try:
            size = os.fstat(descriptor).st_size
            try:
                if os.write(descriptor, lines) < len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        paths = [path] if size else [path, self.path]
        if self.disk_sync is not None:
            self.disk_sync.mark_written(*paths)
        else:
            for each in paths:
                sync_path(each)

    def load_entries(self) -> dict[str, Any]:
        """Return the journal's entries as one mapping, later ones over earlier ones.

        A last line without its end was being written when the agent was killed; it had no effect, so cut it off.
        Raise ``DamagedJournal`` if any other line is not as it was written, and ``OSError`` if it cannot be read.
        """
        known: dict[str, Any] = {}
        path = self.path / "journal"
        try:
            content = read_regular(path, MAX_JOURNAL)
        except FileNotFoundError:
            return known
        *lines, unfinished = content.split(b"\n")
        for line in filter(None, lines):
            if not _is_whole(line):
                raise DamagedJournal(f"the checksum of {line[:60]!r} is wrong")
            known |= json.loads(line.rpartition(b" ")[0])
        if unfinished:
            if _is_whole(unfinished[:-1]):
                raise DamagedJournal("the end of its last line is not as it was written")
            with contextlib.suppress(OSError):
                os.truncate(path, len(content) - len(unfinished))
        return known

    def set_damaged_aside(self) -> None:
        """Make this a folder without a record, which is removed with the component or by the next agent."""
        with contextlib.suppress(OSError):
            (self.path / "journal").rename(self.path / DAMAGED_JOURNAL)

    def read_result(self, node: int) -> dict[str, Any] | None:
        """What a node's runner left for us when it ended, where it could."""
        try:
            return parse_result(self.read_runner_file(node, self.path / f"result.{node}.json", MAX_RESULT))
        except (OSError, ValueError, RecursionError):
            return None

    def read_runner_file(self, node: int, path: Path, most: int) -> bytes:
        """What a node's runner left in a file; ``OSError``, and ``ValueError`` when it is not from that runner."""
        if self.secret_of is None:
            return read_regular(path, most)
        if (secret := self.secret_of(node)) is None:
            raise OSError(errno.EAGAIN, "the node's secret is not known yet", str(path))
        return open_file(secret, path.name, read_regular(path, most + FILE_TAG_LENGTH))

    def last_log_line(self) -> str:
        """The last line that a runner, or who was to start it, wrote for people; empty when there is none."""
        try:
            lines = (
                read_regular(self.path / RUNNER_LOG, LAST_LINE_WINDOW, end=True).decode(errors="replace").splitlines()
            )
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def unsent_files(self) -> dict[int, list[tuple[int, Path]]]:
        """The files with output that runners had not sent, by node and the places in its stream where they begin."""
        by_node: dict[int, list[tuple[int, Path]]] = {}
        for path in self.path.glob("output.*.*"):
            _, node, start = path.name.split(".", 2)
            if node.isdecimal() and start.isdecimal():
                by_node.setdefault(int(node), []).append((int(start), path))
        return {node: sorted(files) for node, files in by_node.items()}

    def remove_folder(self) -> None:
        """Forget it at once, and then remove what there is; who is killed in between leaves that to the next agent."""
        self._late = b""
        gone = self.path.with_name(f"{self.path.name}{REMOVED_SUFFIX}")
        with contextlib.suppress(OSError):
            self.path.rename(gone)
        for path in (gone, self.path):
            remove_tree(path)
        if self.disk_sync is not None:
            self.disk_sync.forget_folder(self.path)


def _line(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry).encode()
    return b"%s %08x\n" % (text, zlib.crc32(text)) if entry else b""


def _is_whole(line: bytes) -> bool:
    match = _CHECKED_LINE.fullmatch(line)
    return match is not None and zlib.crc32(match[1]) == int(match[2], 16)


def format_write_error(path: Path, error: OSError) -> str:
    """Why a file or folder of ours could not be written, with the disk that it is on."""
    mount = path.absolute()
    while not os.path.ismount(mount):
        mount = mount.parent
    return f"the spool {path} cannot be written: {error.strerror or error} (disk of {mount})"


class Spool:
    """The folders of all components, by daemon instance and token."""

    def __init__(self, directory: Path, secret_of: Callable[[str, str, int], bytes | None] | None = None) -> None:
        """``secret_of`` a node: by instance, token and index."""
        self._directory, self._secret_of = directory, secret_of
        self.disk_sync = DiskSync()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def make_folder(self, instance: str, token: str) -> JournalFolder:
        path = self._directory / instance / token
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.disk_sync.mark_written(path, path.parent, self._directory)
        return self._folder(path)

    def _folder(self, path: Path) -> JournalFolder:
        known = self._secret_of
        secret_of = known and partial(known, path.parent.name, path.name)
        return JournalFolder(path, self.disk_sync, secret_of)

    def discard_folder(self, instance: str, token: str) -> None:
        JournalFolder(self._directory / instance / token, self.disk_sync).remove_folder()

    def record_contact(self, instance: str) -> None:
        (self._directory / instance).mkdir(mode=0o700, exist_ok=True)
        (self._directory / instance / LAST_HEARD_FILE).touch(mode=0o600)

    def silence_of(self, instance: str) -> float:
        """Seconds since a daemon was heard of; counted from now when that was never noted, or later than now."""
        with contextlib.suppress(FileNotFoundError):
            seconds = time.time() - (self._directory / instance / LAST_HEARD_FILE).stat().st_mtime
            if seconds >= 0:  # else the clock was set back since
                return seconds
        self.record_contact(instance)
        return 0.0

    def remove_leftovers(self) -> list[Path]:
        """Remove folders that were about to be forgotten, and those in which nothing was written down."""
        gone = list(self._directory.glob(f"*/*{REMOVED_SUFFIX}"))
        for heard in self._directory.glob(f"*/{LAST_HEARD_FILE}"):
            folders = (path for path in heard.parent.iterdir() if path.is_dir() and not path.is_symlink())
            gone += [path for path in folders if path not in gone and not (path / "journal").exists()]
        for path in gone:
            remove_tree(path)
        return gone

    def load_folders(self) -> Iterator[tuple[str, str, JournalFolder]]:
        for journal in sorted(self._directory.glob("*/*/journal")):
            yield journal.parent.parent.name, journal.parent.name, self._folder(journal.parent)
