"""The event loop of ring 1."""

import asyncio
import threading
import time

import pytest

from tests.signals import until
from tests.virtual_time import VirtualClock, VirtualTimeLoop


async def test_timer_on_virtual_time_takes_no_real_time() -> None:
    clock, began = VirtualClock(asyncio.get_running_loop()), time.monotonic()
    started_at = clock.monotonic()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 86_400)
    assert clock.monotonic() == started_at + 86_400
    assert time.monotonic() - began < 3_600


async def test_virtual_time_waits_for_working_thread() -> None:
    loop = asyncio.get_running_loop()
    started_at, may_end = loop.time(), threading.Event()
    working = asyncio.ensure_future(asyncio.to_thread(may_end.wait))
    late = loop.call_later(1.0, lambda: None)
    threading.Timer(0.05, may_end.set).start()
    await working
    late.cancel()
    assert loop.time() == started_at


async def test_virtual_time_ignores_hanging_thread() -> None:
    loop, may_end = asyncio.get_running_loop(), threading.Event()
    assert isinstance(loop, VirtualTimeLoop)
    working = asyncio.ensure_future(asyncio.to_thread(may_end.wait))
    with loop.hanging_threads(), pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(working), 30)
    may_end.set()
    await working


async def test_virtual_time_waits_for_socket_data() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    started_at = asyncio.get_running_loop().time()
    async with asyncio.timeout(0.001):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"line\n")
        assert await reader.readline() == b"line\n"
    writer.close()
    server.close()
    assert asyncio.get_running_loop().time() == started_at


async def test_until_returns_the_first_true_value() -> None:
    items: list[int] = []
    asyncio.get_running_loop().call_later(5.0, items.append, 7)
    assert await until(lambda: items) == [7]


async def test_until_with_a_false_condition_raises_timeout() -> None:
    with pytest.raises(TimeoutError):
        await until(lambda: False)


async def test_until_with_a_failing_condition_raises_its_error() -> None:
    items: list[int] = []
    asyncio.get_running_loop().call_later(5.0, items.append, 7)
    with pytest.raises(ZeroDivisionError):
        await until(lambda: items and 1 / 0)


async def test_until_sees_what_a_thread_changes_before_it_ends() -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        has_begun.set()
        may_end.wait()

    working = asyncio.ensure_future(asyncio.to_thread(work))
    assert await until(has_begun.is_set)
    may_end.set()
    await working
