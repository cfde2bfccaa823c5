"""How stages share the pulls of a site: turns, one pull for all stages with the same input, and errors."""

import asyncio
import errno
import itertools
from bisect import insort
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from koalapy.model.reports import StageFault
from koalapy.protocol.messages import StageFile

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ContentKey = tuple[str, str, str | None, str, int]
"""Identifies a replica, or an entry of one, in the catalogue. A checksum is not enough: empty files and empty folders
share one."""


class StageError(Exception):
    """A stage has failed; ``fault`` names the responsible side, ``source`` and ``file`` where and which file."""

    def __init__(self, message: str, fault: StageFault, *, source: str = "", file: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fault: StageFault = fault
        self.source = source
        self.file = file


def site_error(cluster: str, error: OSError) -> StageError:
    """Return the error for a local file that could not be created or written."""
    problem = "the disk is full" if error.errno in FULL else "a file cannot be written"
    return StageError(f"{problem} on {cluster}: {error.strerror or error}", "site")


class Turns:
    """Grants turns in the order of arrival; an interrupted pull keeps its position."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._places = itertools.count()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def next_position(self) -> int:
        """Return a position, valid for any number of turns."""
        return next(self._places)

    @asynccontextmanager
    async def wait_turn(self, place: int) -> AsyncIterator[None]:
        """Wait for a turn and hold it until the end of the block. ``place``: a position from ``next_position``."""
        await self._wait(place)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, place: int) -> None:
        """Take a turn, or wait for one; the lowest ``place``, the position in the order of arrival, is next."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        insort(self._waiting, (place, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove((place, turn))
            else:
                self._pass_on()  # It was granted while the waiter was being cancelled.
            raise

    def _pass_on(self) -> None:
        """Grant the turn to the first waiter that is not cancelled."""
        for index, (_, turn) in enumerate(self._waiting):
            if not turn.done():
                del self._waiting[index]
                turn.set_result(None)
                return
        self._free += 1


def content_key(file: StageFile) -> ContentKey:
    """Return the key by which stages recognize that they need the same input."""
    return file.source, file.path, file.part, file.checksum, file.size


class SharedTask:
    """A pull of one input that several stages need: one stage at a time does it, and the others wait."""

    def __init__(self) -> None:
        self.users = 0
        """Number of stages that run it or wait for it."""
        self.free = asyncio.Lock()
        self.failure: StageError | None = None


class SharedTasks:
    """The shared tasks that are running or awaited."""

    def __init__(self) -> None:
        self._tasks: dict[ContentKey, SharedTask] = {}

    @asynccontextmanager
    async def run_exclusively(self, file: StageFile) -> AsyncIterator[None]:
        """Wait until no other stage pulls this file. Raise ``StageError`` if its source has failed."""
        task = self._tasks.setdefault(content_key(file), SharedTask())
        task.users += 1
        try:
            async with task.free:
                if task.failure is not None:
                    raise task.failure
                yield
        except StageError as failure:
            # An error without a source affects this stage only.
            task.failure = failure if failure.source and failure.fault != "site" else None
            raise
        finally:
            task.users -= 1
            if not task.users:
                del self._tasks[content_key(file)]
