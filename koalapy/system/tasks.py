"""Background tasks of an object, and long loops that let other tasks run."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TypeVar

T = TypeVar("T")

SLICE_SIZE = 500
"""Items of one slice, where each takes about a microsecond to look at."""


async def iterate_in_slices(items: Sequence[T], size: int = SLICE_SIZE) -> AsyncIterator[Sequence[T]]:
    """Yield ``size`` items at a time, and let other tasks run in between."""
    for start in range(0, len(items), size):
        if start:
            await asyncio.sleep(0)
        yield items[start : start + size]


class BackgroundTasks:
    """Keep tasks until they end; the event loop itself holds no strong reference to them."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run ``work`` as a task."""
        task = asyncio.create_task(work)
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    def cancel(self) -> None:
        for task in self.running:
            task.cancel()

    async def wait(self) -> None:
        """Wait until all tasks have ended, whatever their outcome."""
        await asyncio.gather(*self.running, return_exceptions=True)
