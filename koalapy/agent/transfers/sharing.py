"""One pull for all stages that want the same: the first brings it, the others copy it from there.

Whoever copies verifies what came of it, as after a pull, for a program may have written to its input. So nobody depends
on anybody: if there is nothing to be copied, or something else, it is pulled.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from koalapy.agent.transfers.stage_error import StageError
from koalapy.protocol.messages import StageFile

Content = tuple[str, str, str | None, str, int]
"""A replica, or an entry of it, as the catalogue has it. The checksum alone would not do: empty files have that of
empty folders."""


def content_of(file: StageFile) -> Content:
    return file.source, file.path, file.part, file.checksum, file.size


class SharedTask:
    """Something that one stage at a time does for all that want it."""

    def __init__(self) -> None:
        self.wanted = 0
        """How many stages are on it or wait for it."""
        self.free = asyncio.Lock()
        self.failure: StageError | None = None


class SharedTasks:
    """Those that somebody is on or waits for."""

    def __init__(self) -> None:
        self._known: dict[Content, SharedTask] = {}

    @asynccontextmanager
    async def alone(self, file: StageFile) -> AsyncIterator[None]:
        """Wait until nobody else brings this; ``StageError`` when it could not be had from its source meanwhile."""
        task = self._known.setdefault(content_of(file), SharedTask())
        task.wanted += 1
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
            task.wanted -= 1
            if not task.wanted:
                del self._known[content_of(file)]
