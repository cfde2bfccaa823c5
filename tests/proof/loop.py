"""An event loop whose virtual time and order of callbacks depend on nothing but a seed."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import Any
from unittest.mock import patch
from uuid import UUID

from tests.virtual_time import EPOCH, VirtualTimeLoop

OWNER: ContextVar[str] = ContextVar("owner", default="")
"""The process of the grid whose code runs: the life of an agent. Its tasks and timers inherit it."""


class SingleThreadLoop(VirtualTimeLoop):
    """Run the work of all executors at once, in the loop's own thread, and nothing of owners that were killed."""

    def __init__(self) -> None:
        super().__init__()
        self.killed: set[str] = set()
        """Owners of which nothing runs any more, not even what cleans up."""
        self._dropped: list[tuple[Callable[..., object], tuple[object, ...], Context]] = []
        """What killed owners would have run. It keeps their tasks until the end."""

    def finish(self) -> None:
        """Cancel all tasks, those of killed owners as well, and close the loop."""
        self.killed.clear()
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        for callback, args, context in self._dropped:
            self.call_soon(callback, *args, context=context)
        self.run_until_complete(asyncio.wait(tasks, timeout=100.0) if tasks else asyncio.sleep(0))
        self.close()

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        context = copy_context() if context is None else context
        return super().call_soon(self._run_unless_killed, callback, args, context, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context
        return super().call_at(when, self._run_unless_killed, callback, args, context, context=context)

    def _run_unless_killed(self, callback: Callable[..., object], args: tuple[object, ...], context: Context) -> None:
        if OWNER.get() in self.killed:
            self._dropped.append((callback, args, context))
        else:
            callback(*args)

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it belongs to the caller
            future.set_exception(error)
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
            patch("uuid.uuid4", lambda: UUID(int=next(numbers))),
            patch("koalapy.agent.runners.uplink.uuid4", lambda: UUID(int=next(numbers))),
        ):
            yield
    finally:
        random.setstate(state)
