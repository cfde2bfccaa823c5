"""What was written is brought to the disk itself before anything follows from it: in threads, many files at once."""

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path


class DiskSync:
    """Knows which files and folders were written since they were last on the disk.

    Those who wait share a round, and while one is under way the next one gathers: a burst costs few of them.
    """

    def __init__(self) -> None:
        self._dirty: dict[Path, None] = {}
        self._failed: dict[Path, OSError] = {}
        self._asked = self._done = 0
        self._round: asyncio.Task[None] | None = None

    def written(self, *paths: Path) -> None:
        """Something was written to these: files, or folders in which names came or went."""
        self._dirty.update(dict.fromkeys(paths))
        self._asked += 1

    async def synced(self) -> None:
        """Return when all that was written before is on the disk, or cannot be brought there."""
        wanted = self._asked
        while self._done < wanted:
            if self._round is None or self._round.done():
                self._round = asyncio.create_task(self._sync())
            await asyncio.shield(self._round)

    def problem(self, folder: Path) -> OSError | None:
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

    def forget(self, folder: Path) -> None:
        """It was removed."""
        for path in _within(folder, self._failed):
            del self._failed[path]


def _within(folder: Path, paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if folder in (path, path.parent)]


def _sync(path: Path) -> OSError | None:
    try:
        sync(path)
    except FileNotFoundError:
        return None  # removed meanwhile
    except OSError as error:
        return error
    return None


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk; ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place is not waited at
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
