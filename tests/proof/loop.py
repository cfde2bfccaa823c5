"""An event loop with a virtual time and an order of callbacks that depend only on a seed."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar
from heapq import heappop
from itertools import count
from typing import Any
from unittest.mock import patch
from uuid import UUID

from tests.virtual_time import EPOCH, VirtualTimeLoop

OWNER: ContextVar[str] = ContextVar("owner", default="")
"""The process of the grid whose code runs: the life of an agent. Its tasks and timers inherit it."""


class SingleThreadLoop(VirtualTimeLoop):
    """Run the work of all executors at once, in the loop's own thread, and nothing of owners that were killed.

    No I/O and no other thread can wake it.
    """

    # Of asyncio
    _ready: deque[Any]
    _scheduled: list[Any]
    _timer_cancelled_count: int
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self.killed: set[str] = set()
        """Owners of which nothing runs any more, not even what cleans up."""
        self._dropped: list[Any] = []
        """What killed owners would have run. It keeps their tasks until the end."""
        self._passes = 0
        self._awaited: dict[asyncio.Future[None], int] = {}

    async def run_passes(self, count: int) -> None:
        """Let callbacks run ``count`` times, as many as are ready each time, however much time that takes."""
        future = self.create_future()
        self._awaited[future] = self._passes + count
        await future

    def finish(self) -> None:
        """Cancel all tasks, those of killed owners as well, and close the loop."""
        self.killed.clear()
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        self._ready.extend(self._dropped)
        self.run_until_complete(asyncio.wait(tasks, timeout=100.0) if tasks else asyncio.sleep(0))
        self.close()

    def _run_once(self) -> None:
        """Run the callbacks that are ready, or else move to the time of the next timer."""
        ready, scheduled, killed = self._ready, self._scheduled, self.killed
        while scheduled and (scheduled[0]._cancelled or scheduled[0]._when <= self._now or not ready):
            timer = heappop(scheduled)
            timer._scheduled = False
            if timer._cancelled:
                self._timer_cancelled_count -= 1
            else:
                self._now = max(self._now, timer._when)
                ready.append(timer)
        if not ready and not self._stopping:
            raise RuntimeError("nothing can happen any more: a task waits for what no other does")
        self._passes += 1
        for future, passes in list(self._awaited.items()):
            if passes <= self._passes:
                del self._awaited[future]
                if not future.done():
                    future.set_result(None)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if killed and handle._context.get(OWNER, "") in killed:
                self._dropped.append(handle)
            else:
                handle._run()

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()

        def settle(set_outcome: Callable[[Any], None], outcome: object) -> None:
            if not future.done():
                set_outcome(outcome)

        # The caller learns of it later, or never: it may be killed between an effect and what follows.
        try:
            self.call_soon(settle, future.set_result, func(*args))
        except Exception as error:  # noqa: BLE001 - it belongs to the caller
            self.call_soon(settle, future.set_exception, error)
        return future


@contextmanager
def repeatable_process(loop: VirtualTimeLoop, seed: int) -> Iterator[None]:
    """Replace the clocks, the random numbers and the identifiers of this process by those of a schedule."""
    state, numbers = random.getstate(), count(1)
    random.seed(seed)
    try:
        with (
            patch.object(time, "time", lambda: EPOCH + loop.time()),
            patch.object(time, "monotonic", loop.time),
            patch.object(time, "thread_time", lambda: 0.0),
            patch("secrets.randbelow", random.randrange),
            patch("uuid.uuid4", lambda: UUID(int=next(numbers))),
            patch("koalapy.agent.runners.uplink.uuid4", lambda: UUID(int=next(numbers))),
        ):
            yield
    finally:
        random.setstate(state)
