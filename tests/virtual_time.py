"""An event loop with virtual time, which jumps to the next timer when nothing else can run."""

import asyncio
import selectors
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, TypeVar

from koalapy.system.clock import Clock

T = TypeVar("T")

MAX_THREAD_WAIT_S = 60.0
"""Seconds of real time that the loop waits for threads before it fails the test."""
WATCH_INTERVAL_S = 0.005
"""Seconds of real time after which conditions are evaluated again while a thread works."""
START = 1_000.0
"""The loop's time when it begins."""
EPOCH = 1_700_000_000.0
"""The wall clock, in seconds since 1970, when the loop's time is 0."""


class _Selector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Report I/O that is ready; where there is none, let the loop jump instead of waiting."""

    loop: "VirtualTimeLoop"
    _waited_s = 0.0
    """Seconds of real time since a thread last woke the loop."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if events := super().select(0):
            return events
        if timeout is not None and timeout <= 0:
            return []
        if self.loop.waits_for_threads():
            return self._wait_for_threads()
        if timeout is None:
            # No timer and no thread: only a signal or a thread that the loop does not know can wake it.
            return super().select(MAX_THREAD_WAIT_S)
        self.loop.jump(timeout)
        return []

    def _wait_for_threads(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until a thread ends, but no longer than until conditions that it may have changed are due."""
        wait_s = WATCH_INTERVAL_S if self.loop.has_watched_conditions() else MAX_THREAD_WAIT_S
        events = super().select(wait_s)
        self._waited_s = 0.0 if events else self._waited_s + wait_s
        if self._waited_s >= MAX_THREAD_WAIT_S:
            raise RuntimeError(
                f"a thread has not ended for {MAX_THREAD_WAIT_S:g} s: mark what hangs with loop.hanging_threads()"
            )
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Run callbacks, I/O and threads as usual, and skip all waiting.

    Time does not pass while a callback can run, I/O is ready, or a thread works that was begun through the loop
        (``asyncio.to_thread``, ``run_in_executor``). Otherwise it jumps to the next timer.
    """

    def __init__(self) -> None:
        self._now = START
        self._threads: set[asyncio.Future[Any]] = set()
        self._are_threads_hanging = False
        self._watched: dict[asyncio.Future[Any], Callable[[], Any]] = {}
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """Move the loop's time forward."""
        self._now += seconds

    def waits_for_threads(self) -> bool:
        return bool(self._threads) and not self._are_threads_hanging

    @contextmanager
    def hanging_threads(self) -> Iterator[None]:
        """Let time pass although threads are busy, for tests in which one hangs."""
        self._are_threads_hanging = True
        try:
            yield
        finally:
            self._are_threads_hanging = False

    def has_watched_conditions(self) -> bool:
        return bool(self._watched)

    async def watch(self, condition: Callable[[], T]) -> T:
        """Return the first true value of a condition, evaluated now and after each turn of the loop."""
        if value := condition():
            return value
        future: asyncio.Future[T] = self.create_future()
        self._watched[future] = condition
        try:
            return await future
        finally:
            del self._watched[future]

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        for future, condition in list(self._watched.items()):
            if not future.done():
                try:
                    if value := condition():
                        future.set_result(value)
                except Exception as error:  # noqa: BLE001 - it is raised in the test that waits
                    future.set_exception(error)

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future: asyncio.Future[Any] = super().run_in_executor(executor, func, *args)
        self._threads.add(future)
        future.add_done_callback(self._threads.discard)
        return future


class VirtualClock(Clock):
    """The clock of a loop with virtual time. The wall clock can be set independently."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.offset = 0.0
        """Seconds by which the wall clock was set forward."""

    def now(self) -> float:
        return EPOCH + self.offset + self._loop.time()

    def monotonic(self) -> float:
        return self._loop.time()

    def since_boot(self) -> float:
        return self._loop.time()
