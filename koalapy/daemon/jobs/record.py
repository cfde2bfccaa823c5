"""Keeps the record of what the scheduler is told: files below the data directory, the oldest of which go first.

Each daemon's life is a row of parts, ``BEGAN-PART.jsonl``: the last of them is written on, those before are compressed.
What cannot be written ends the record of this life, and nothing else.
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
from koalapy.record.beginning import Beginning
from koalapy.record.lines import FORMAT, beginning_to_json, line, step_to_json
from koalapy.record.settings import Recording
from koalapy.record.step import Step
from koalapy.system.files import measure_disks

log = structlog.get_logger()

FLUSH_INTERVAL = 1.0
"""Seconds: what a daemon that is killed may not have written of its last moments."""
PART_SIZE = 16 * 1024 * 1024
"""Bytes of a part before it is compressed."""
MAX_WAITING = 200_000
"""Steps that wait for the disk at most."""
_NAME = re.compile(r"(\d{13,16})-(\d{6})\.jsonl(\.gz)?", re.ASCII)
_AT = re.compile(rb'\{"n":\d+,"at":([^,}]+)')


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A file of a life that began so many milliseconds after the epoch."""

    life: int
    number: int
    path: Path

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


class Record:
    """One daemon's; only its own loop calls it, and its files are written by one thread at a time."""

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
        """``part_size``: bytes after which a new file is begun; ``max_waiting``: steps that may wait for the disk."""
        self._part_size, self._max_waiting = part_size, max_waiting
        self._directory, self._settings, self._disks, self._clock = directory, settings, disks, clock
        self._life, self._number = int(beginning.now * 1000), 0
        self._beginning: Beginning | None = beginning
        self._waiting: list[Step] = []
        self._file: BinaryIO | None = None
        self._writing = asyncio.Lock()
        self.problem = ""
        """Why nothing more is recorded; empty while it is."""
        self.failed_at = 0.0

    def keep(self, step: Step) -> None:
        """A step is over."""
        if self.problem:
            return
        self._waiting.append(step)
        if len(self._waiting) > self._max_waiting:
            self._fail(f"the disk has not taken {self._max_waiting} steps")

    async def flush(self) -> None:
        """Write what has come; whatever is wrong with it is said, and not raised."""
        async with self._writing:
            if self.problem:
                return
            steps, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self._write, steps)
            except OSError as error:
                self._fail(f"{self._directory} takes no file: {error.strerror or error}")
            except (ValueError, TypeError, AttributeError, LookupError) as error:
                # A record with a gap is none.
                self._fail(f"a step cannot be written: {error!r:.200}")

    async def close(self) -> None:
        """Write the rest."""
        await self.flush()
        if self._file is not None:
            with contextlib.suppress(OSError):  # which was told of
                self._file.close()
            self._file = None

    def _fail(self, why: str) -> None:
        self.problem, self.failed_at = why, self._clock()
        self._waiting.clear()
        log.error("what the scheduler is told is not recorded any more", action="record-ended", reason=why)

    # In a thread

    def _write(self, steps: list[Step]) -> None:
        if self._file is None:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._tidy()
            self._begin_part()
        assert self._file is not None
        if self._beginning is not None:
            self._file.write(line({"begin": beginning_to_json(self._beginning)}))
            self._beginning = None
        for step in steps:
            self._file.write(line(step_to_json(step)))
        self._file.flush()
        if self._file.tell() >= self._part_size:
            self._file.close()
            self._tidy()
            self._begin_part()
        elif full := [disk for disk in measure_disks({"record": self._directory}) if self._disks.is_full(disk)]:
            raise OSError(0, str(full[0]))

    def _begin_part(self) -> None:
        self._number += 1
        path = self._directory / f"{self._life:013d}-{self._number:06d}.jsonl"
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        head = {"koala_record": FORMAT, "version": __version__, "life": str(self._life), "part": self._number}
        self._file.write(line(head))

    def _tidy(self) -> None:
        """Compress what is not written on any more, and remove what is too old or too much."""
        for leftover in self._directory.glob("*.incoming"):
            leftover.unlink(missing_ok=True)
        for part in self._parts():
            if part.path.suffix != ".gz":
                _compress(part.path)
            else:
                part.path.with_suffix("").unlink(missing_ok=True)
        lives: dict[int, list[Part]] = {}
        for part in self._parts():
            lives.setdefault(part.life, []).append(part)
        used = sum(part.size() for part in self._parts())
        for life in [life for life in sorted(lives) if life != self._life]:
            ended = max(part.path.stat().st_mtime for part in lives[life])
            if used > self._settings.size or ended < self._clock() - self._settings.keep:
                used -= sum(part.size() for part in lives[life])
                for part in reversed(lives[life]):  # what is left of it if we die now has no gap
                    part.path.unlink(missing_ok=True)
        if used > self._settings.size:
            raise OSError(0, f"the record of this daemon alone is more than record.size, {self._settings.size} bytes")

    def _parts(self) -> list[Part]:
        """In order. Of one that is there in both forms the compressed is whole; the other was about to be removed when
        a daemon died, or is of a backup from when it was still written on."""
        found = ((path, _NAME.fullmatch(path.name)) for path in sorted(self._directory.glob("*.jsonl*")))
        named = {(int(match[1]), int(match[2])): path for path, match in found if match}
        return [Part(life, number, path) for (life, number), path in sorted(named.items())]

    # For who exports it

    async def export(self, since: float, until: float) -> Iterator[bytes]:
        """The lives of which anything was then, each from its beginning, as they are now; for another thread."""
        await self.flush()
        return self._lines(since, until)

    def _lines(self, since: float, until: float) -> Iterator[bytes]:
        yield line({"koala_export": FORMAT, "version": __version__, "since": since, "until": until})
        lives: dict[int, list[Part]] = {}
        for part in self._parts() if self._directory.is_dir() else []:
            lives.setdefault(part.life, []).append(part)
        # Before the first is written: meanwhile files are compressed.
        ended = {life: max(part.path.stat().st_mtime for part in parts) for life, parts in lives.items()}
        for life, parts in lives.items():
            if ended[life] >= since and life / 1000 <= until and parts[0].number == 1:
                yield from _life(parts, until)
        if self.problem and self.failed_at < until:
            since_then = datetime.fromtimestamp(self.failed_at, UTC).isoformat(timespec="seconds")
            yield line({"lost": f"nothing since {since_then} was recorded ({self.problem})"})
        yield line({"end": True})


class _Unreadable(Exception):
    """A file of the record, and why."""


def _life(parts: list[Part], until: float) -> Iterator[bytes]:
    """Up to a moment: nothing of one that died before its beginning was written, and a line that says so where the rest
    cannot be read."""
    told = _until(parts, until)
    try:
        begun = list(islice(told, 2))
        if len(begun) == 2:
            yield from begun
            yield from told
    except _Unreadable as error:
        log.error("a part of the record cannot be read", action="record-damaged", reason=str(error))
        yield line({"lost": str(error)})


def _until(parts: list[Part], until: float) -> Iterator[bytes]:
    """The whole lines of a life, up to a moment; one that was cut off by a death is left out."""
    for part in parts:
        try:
            with _opened(part.path) as file:
                for each in file:
                    if not each.endswith(b"\n"):
                        return
                    if (match := _AT.match(each)) and float(match[1]) > until:
                        return
                    yield each
        except (OSError, EOFError, zlib.error) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise _Unreadable(f"the daemon could not read {part.path.name} of its record ({why})") from error


def _opened(path: Path) -> BinaryIO | gzip.GzipFile:
    """It may be compressed meanwhile."""
    if path.suffix != ".gz":
        with contextlib.suppress(FileNotFoundError):
            return path.open("rb")
        path = path.with_name(f"{path.name}.gz")
    return gzip.open(path)


def _compress(path: Path) -> None:
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
