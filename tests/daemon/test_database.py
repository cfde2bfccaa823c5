"""Database threads, shared by users in turn."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from koalapy.daemon.engine.database import Threads

DEADLINE = 20.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Yield an event that blocks submitted work; set it at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def submit_work(
    threads: Threads, user: str, count: int, gate: threading.Event, order: list[str]
) -> list["Future[None]"]:
    def work() -> None:
        order.append(user)
        gate.wait(DEADLINE)

    return [threads.submit_for(user, work) for _ in range(count)]


def test_threads_with_user_at_limit_serve_other_users(gate: threading.Event) -> None:
    threads, order = Threads(3, "test", max_per_user=2), list[str]()
    submit_work(threads, "eve", 50, gate, order)
    assert threads.submit_for("ada", lambda: "answer").result(DEADLINE) == "answer"
    assert set(order) <= {"eve"}
    assert len(order) <= 2


def test_threads_with_one_thread_serve_users_in_turn(gate: threading.Event) -> None:
    threads, order = Threads(1, "test"), list[str]()
    waiting = submit_work(threads, "", 1, gate, order)  # occupies the thread until all work is queued
    waiting += submit_work(threads, "eve", 4, gate, order)
    waiting += submit_work(threads, "ada", 2, gate, order)
    gate.set()
    for future in waiting:
        future.result(DEADLINE)
    assert order == ["", "eve", "ada", "eve", "ada", "eve", "eve"]


def test_threads_with_work_of_daemon_use_all_threads(gate: threading.Event) -> None:
    threads, order = Threads(3, "test", max_per_user=1), list[str]()
    submit_work(threads, "", 2, gate, order)
    assert threads.submit(lambda: "answer").result(DEADLINE) == "answer"


def test_threads_with_failing_work_raise_error_and_continue() -> None:
    threads = Threads(1, "test", max_per_user=1)
    with pytest.raises(ZeroDivisionError):
        threads.submit_for("eve", lambda: 1 // 0).result(DEADLINE)
    assert threads.submit_for("eve", lambda: "answer").result(DEADLINE) == "answer"


async def test_threads_with_cancelled_work_skip_it(gate: threading.Event) -> None:
    threads, order = Threads(1, "test"), list[str]()
    submit_work(threads, "eve", 1, gate, order)
    cancelled = submit_work(threads, "eve", 1, gate, order)[0]
    assert cancelled.cancel()
    gate.set()
    assert await asyncio.wrap_future(threads.submit_for("ada", lambda: "answer")) == "answer"
    assert order == ["eve"]
