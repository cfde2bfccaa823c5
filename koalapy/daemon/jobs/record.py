"""Write the recording of the scheduler's inputs: files in the data directory, of which the oldest are removed first.

The recording of a daemon run has parts ``BEGAN-PART.jsonl``. The last one is written to, the others are compressed. An
error ends the recording of this run, and nothing else.
"""

import asyncio
import contextlib
import gzip
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import structlog

from koalapy import __version__
from koalapy.model.disk import DiskLimits
from koalapy.simulation.record.format import FORMAT, Beginning, Step, beginning_to_json, encode_line, step_to_json
from koalapy.simulation.record.settings import Recording
from koalapy.system.event_loop import BackgroundTasks
from koalapy.system.files import measure_disks

log = structlog.get_logger()

FLUSH_INTERVAL = 1.0
"""Seconds between two writes: a killed daemon loses at most this much of the recording."""
PART_SIZE = 16 * 1024 * 1024
"""Bytes after which a part is compressed and a new one begins."""
MAX_WAITING = 200_000
"""The most steps that wait to be written."""
_NAME = re.compile(r"(\d{13,16})-(\d{6})\.jsonl(\.gz)?", re.ASCII)
_AT = re.compile(rb'\{"n":\d+,"at":([^,}]+)')


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A file of the recording of the daemon run that began ``began_ms`` milliseconds after the start of 1970."""

    began_ms: int
    number: int
    path: Path

    def file_size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


class Record:
    """The recording of one daemon run. The event loop calls it; one thread at a time writes the files."""

    def __init__(
        self,
        directory: Path,
        settings: Recording,
        disks: DiskLimits,
        beginning: Beginning,
        clock: Callable[[], float] = time.time,
        part_size: int = PART_SIZE,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """``part_size``: bytes after which a new part begins; ``max_waiting``: steps that may wait for the disk."""
        self._part_size, self._max_waiting = part_size, max_waiting
        self._directory, self._settings, self._disks, self._clock = directory, settings, disks, clock
        self._began_ms, self._number = int(beginning.now * 1000), 0
        self._beginning: Beginning | None = beginning
        self._waiting: list[Step] = []
        self._file: BinaryIO | None = None
        self._writing, self._tasks = asyncio.Lock(), BackgroundTasks()
        self.problem = ""
        """The reason why the recording has ended, or an empty string."""
        self.failed_at = 0.0

    def queue_step(self, step: Step) -> None:
        """Queue a finished step."""
        if self.problem:
            return
        self._waiting.append(step)
        if len(self._waiting) > self._max_waiting:
            self._end_recording(f"the disk has not taken {self._max_waiting} steps")

    async def flush(self) -> None:
        """Write queued steps. An error ends the recording and is logged.

        If the caller is cancelled, as at the daemon's end, the writing goes on, and the next call waits for its end.
        """
        await asyncio.shield(self._tasks.spawn(self._flush()))

    async def _flush(self) -> None:
        """Write queued steps; the lock is held until the thread has ended."""
        async with self._writing:
            if self.problem:
                return
            steps, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self._write_steps, steps)
            except OSError as error:
                self._end_recording(f"{self._directory} takes no file: {error.strerror or error}")
            except (ValueError, TypeError, AttributeError, LookupError) as error:
                # End it, since a recording with a gap cannot be replayed.
                self._end_recording(f"a step cannot be written: {error!r:.200}")

    async def close(self) -> None:
        """Write queued steps and close the file."""
        await self.flush()
        if self._file is not None:
            with contextlib.suppress(OSError):  # flush has reported it
                self._file.close()
            self._file = None

    def _end_recording(self, reason: str) -> None:
        """Stop recording for this daemon run, and keep the reason for an alert."""
        self.problem, self.failed_at = reason, self._clock()
        self._waiting.clear()
        log.error("the recording of the scheduler has ended", action="record-ended", reason=reason)

    # In a thread

    def _write_steps(self, steps: list[Step]) -> None:
        """Append steps to the recording; begin a new file when one is large. Raise ``OSError`` on a full disk."""
        if self._file is None:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_old_parts()
            self._begin_part()
        assert self._file is not None
        if self._beginning is not None:
            self._file.write(encode_line({"begin": beginning_to_json(self._beginning)}))
            self._beginning = None
        for step in steps:
            self._file.write(encode_line(step_to_json(step)))
        self._file.flush()
        if self._file.tell() >= self._part_size:
            self._file.close()
            self._remove_old_parts()
            self._begin_part()
        elif full := [disk for disk in measure_disks({"record": self._directory}) if self._disks.is_full(disk)]:
            raise OSError(0, str(full[0]))

    def _begin_part(self) -> None:
        """Open the next file of the recording and write its header."""
        self._number += 1
        path = self._directory / f"{self._began_ms:013d}-{self._number:06d}.jsonl"
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        head = {"koala_record": FORMAT, "version": __version__, "life": str(self._began_ms), "part": self._number}
        self._file.write(encode_line(head))

    def _remove_old_parts(self) -> None:
        """Compress finished parts, and remove recordings that are too old or exceed the size limit."""
        for leftover in self._directory.glob("*.incoming"):
            leftover.unlink(missing_ok=True)
        for part in self._list_parts():
            if part.path.suffix != ".gz":
                _compress_part(part.path)
            else:
                part.path.with_suffix("").unlink(missing_ok=True)
        runs: dict[int, list[Part]] = {}
        for part in self._list_parts():
            runs.setdefault(part.began_ms, []).append(part)
        used = sum(part.file_size() for part in self._list_parts())
        for began in [began for began in sorted(runs) if began != self._began_ms]:
            ended = max(part.path.stat().st_mtime for part in runs[began])
            if used > self._settings.size or ended < self._clock() - self._settings.keep:
                used -= sum(part.file_size() for part in runs[began])
                for part in reversed(runs[began]):  # if we are killed now, the remaining parts have no gap
                    part.path.unlink(missing_ok=True)
        if used > self._settings.size:
            raise OSError(0, f"the record of this daemon alone is more than record.size, {self._settings.size} bytes")

    def _list_parts(self) -> list[Part]:
        """Return all parts in order, the compressed file where both exist.

        Then the plain file was about to be removed when a daemon was killed, or comes from an older backup.
        """
        matches = ((path, _NAME.fullmatch(path.name)) for path in sorted(self._directory.glob("*.jsonl*")))
        paths = {(int(match[1]), int(match[2])): path for path, match in matches if match}
        return [Part(life, number, path) for (life, number), path in sorted(paths.items())]

    async def export_recordings(self, since: float, until: float) -> Iterator[bytes]:
        """Return an iterator over all recordings with steps in that span, from their beginning. Use it in a thread."""
        await self.flush()
        return self._export_lines(since, until)

    def _export_lines(self, since: float, until: float) -> Iterator[bytes]:
        """Yield the recorded daemon runs between two times as JSON lines, with a last line that proves completeness."""
        yield encode_line({"koala_export": FORMAT, "version": __version__, "since": since, "until": until})
        runs: dict[int, list[Part]] = {}
        for part in self._list_parts() if self._directory.is_dir() else []:
            runs.setdefault(part.began_ms, []).append(part)
        # Read now, since compression may change the files during the export.
        ended = {began: max(part.path.stat().st_mtime for part in parts) for began, parts in runs.items()}
        for began, parts in runs.items():
            if ended[began] >= since and began / 1000 <= until and parts[0].number == 1:
                yield from _read_run(parts, until)
        if self.problem and self.failed_at < until:
            since_then = datetime.fromtimestamp(self.failed_at, UTC).isoformat(timespec="seconds")
            yield encode_line({"lost": f"nothing since {since_then} was recorded ({self.problem})"})
        yield encode_line({"end": True})


class _Unreadable(Exception):
    """A part of the recording cannot be read."""


def _read_run(parts: list[Part], until: float) -> Iterator[bytes]:
    """Yield the recording of a daemon run up to a time; nothing if the run was killed before its beginning was written.

    If a later part cannot be read, yield a line with the reason.
    """
    lines = _read_lines(parts, until)
    try:
        begun = list(islice(lines, 2))
        if len(begun) == 2:
            yield from begun
            yield from lines
    except _Unreadable as error:
        log.error("a part of the record cannot be read", action="record-damaged", reason=str(error))
        yield encode_line({"lost": str(error)})


def _read_lines(parts: list[Part], until: float) -> Iterator[bytes]:
    """Yield the complete lines up to a time, without one that a kill has cut off."""
    for part in parts:
        try:
            with _open_part(part.path) as file:
                for entry in file:
                    if not entry.endswith(b"\n"):
                        return
                    if (match := _AT.match(entry)) and float(match[1]) > until:
                        return
                    yield entry
        except (OSError, EOFError, zlib.error) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise _Unreadable(f"the daemon could not read {part.path.name} of its record ({reason})") from error


def _open_part(path: Path) -> BinaryIO | gzip.GzipFile:
    """Open a part, compressed or not; it may be compressed at any time."""
    if path.suffix != ".gz":
        with contextlib.suppress(FileNotFoundError):
            return path.open("rb")
        path = path.with_name(f"{path.name}.gz")
    return gzip.open(path)


def _compress_part(path: Path) -> None:
    """Replace a file by its gzip version; a crash leaves one of them whole."""
    incoming = path.with_name(f"{path.name}.incoming")
    with (
        path.open("rb") as plain,
        os.fdopen(os.open(incoming, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out,
        gzip.GzipFile(filename="", fileobj=out, mode="wb", compresslevel=6) as packed,
    ):
        shutil.copyfileobj(plain, packed)
        packed.close()
        out.flush()
        os.fsync(out.fileno())
    stat = path.stat()
    os.utime(incoming, (stat.st_atime, stat.st_mtime))
    incoming.rename(path.with_name(f"{path.name}.gz"))
    path.unlink()
