"""Wait for a condition, without sleeping where time is virtual."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tests.virtual_time import VirtualTimeLoop

T = TypeVar("T")

MAX_WAIT_S = 60.0
POLL_INTERVAL_S = 0.01


@contextmanager
def hanging_threads() -> Iterator[None]:
    """Let virtual time pass although a thread is busy, for a test in which one hangs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    with loop.hanging_threads():
        yield


async def until(condition: Callable[[], T], timeout_s: float = MAX_WAIT_S) -> T:
    """Return the first true value of a condition that tasks, threads or other processes make true.

    On virtual time it is evaluated after each turn of the loop; otherwise it is polled. Raise ``TimeoutError`` when it
    stays false for that long.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualTimeLoop):
        async with asyncio.timeout(timeout_s):
            return await loop.watch(condition)
    async with asyncio.timeout(timeout_s):
        while not (value := condition()):  # noqa: ASYNC110 - real processes set no event
            await asyncio.sleep(POLL_INTERVAL_S)
        return value


async def poll(condition: Callable[[], Awaitable[T]], timeout_s: float = MAX_WAIT_S) -> T:
    """Return the first true result of an asynchronous function, called at intervals of the loop's time."""
    async with asyncio.timeout(timeout_s):
        while not (value := await condition()):  # noqa: ASYNC110 - the condition is itself awaited
            await asyncio.sleep(POLL_INTERVAL_S)
        return value


async def pass_time(seconds: float) -> None:
    """Wait for seconds of virtual time."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop), "only virtual time passes at once"
    event = asyncio.Event()
    loop.call_later(seconds, event.set)
    await event.wait()
