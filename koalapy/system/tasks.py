"""Background tasks of an object."""

import asyncio
from collections.abc import Coroutine


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
