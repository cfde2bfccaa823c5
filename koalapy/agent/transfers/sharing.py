"""How stages share the pulls of a site: whose turn it is, one pull for all that want the same, and how one fails."""

import asyncio
import errno
import itertools
from bisect import insort
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from koalapy.protocol.messages import StageFile

Fault = Literal["site", "source", "file"]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ContentKey = tuple[str, str, str | None, str, int]
"""A replica, or an entry of it, as the catalogue has it. The checksum alone would not do: empty files have that of
empty folders."""


class StageError(Exception):
    """It will not go on: ``fault`` says whom to blame, ``source`` and ``file`` which cluster and logical file."""

    def __init__(self, message: str, fault: Fault, *, source: str = "", file: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fault: Fault = fault
        self.source = source
        self.file = file


def site_error(cluster: str, error: OSError) -> StageError:
    """A file of ours could not be made or written."""
    problem = "there is no room left" if error.errno in FULL else "a file cannot be written"
    return StageError(f"{problem} on {cluster}: {error.strerror or error}", "site")


class Turns:
    """Given in the order of arrival; who was cut and comes again still goes before all that came later."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._places = itertools.count()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def next_position(self) -> int:
        """A place in the order, for as many turns as it takes."""
        return next(self._places)

    @asynccontextmanager
    async def wait_turn(self, place: int) -> AsyncIterator[None]:
        """Wait, however long it takes, and have a turn until the end of the block."""
        await self._wait(place)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, place: int) -> None:
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
                self._pass_on()  # It was given in the very moment in which nobody wanted it any more.
            raise

    def _pass_on(self) -> None:
        """To whoever has waited longest. One that gave up in this moment has not left the line yet."""
        for index, (_, turn) in enumerate(self._waiting):
            if not turn.done():
                del self._waiting[index]
                turn.set_result(None)
                return
        self._free += 1


def content_key(file: StageFile) -> ContentKey:
    return file.source, file.path, file.part, file.checksum, file.size


class SharedTask:
    """Something that one stage at a time does for all that want it."""

    def __init__(self) -> None:
        self.users = 0
        """How many stages are on it or wait for it."""
        self.free = asyncio.Lock()
        self.failure: StageError | None = None


class SharedTasks:
    """Those that somebody is on or waits for."""

    def __init__(self) -> None:
        self._tasks: dict[ContentKey, SharedTask] = {}

    @asynccontextmanager
    async def run_exclusively(self, file: StageFile) -> AsyncIterator[None]:
        """Wait until nobody else brings this; ``StageError`` when it could not be had from its source meanwhile."""
        task = self._tasks.setdefault(content_key(file), SharedTask())
        task.users += 1
        try:
            async with task.free:
                if task.failure is not None:
                    raise task.failure
                yield
        except StageError as failure:
            # What names no source concerns that one stage only.
            task.failure = failure if failure.source and failure.fault != "site" else None
            raise
        finally:
            task.users -= 1
            if not task.users:
                del self._tasks[content_key(file)]
