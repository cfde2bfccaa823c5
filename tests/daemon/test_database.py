"""Database threads, shared by users in turn, and what counts as silence of the database."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import pytest

from koalapy.daemon.engine.database import SLOW_AFTER_S, DatabaseMonitor, Threads, _run_query
from koalapy.model.errors import StoreUnavailable
from koalapy.system.clock import SYSTEM_CLOCK
from tests import signals
from tests.virtual_time import VirtualTimeLoop

DEADLINE = 20.0


@pytest.mark.parametrize(
    ("is_shared", "renewed_ago", "is_lost", "may_renew"),
    [(False, 3600.0, False, True), (True, 5.0, False, True), (True, 11.0, False, False), (True, 0.0, True, False)],
)
def test_monitor_of_shared_database_allows_renewals_only_after_own_renewal(
    is_shared: bool, renewed_ago: float, is_lost: bool, may_renew: bool
) -> None:
    """Otherwise the programs of a cluster that only this daemon reaches outlive what its successor waits for."""
    monitor = DatabaseMonitor()
    monitor.is_lease_shared, monitor.lease_lost = is_shared, is_lost
    monitor.lease_renewed_at = SYSTEM_CLOCK.since_boot() - renewed_ago
    assert monitor.may_renew_components is may_renew


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


def virtual_loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


async def test_query_behind_answered_queries_is_not_late() -> None:
    threads, gates = Threads(1, "test"), [threading.Event() for _ in range(3)]
    earlier = [asyncio.create_task(_run_query(threads, gate.wait)) for gate in gates]
    last = asyncio.create_task(_run_query(threads, lambda: "answer"))
    for gate, running in zip(gates, earlier, strict=True):
        await asyncio.sleep(0)
        virtual_loop().jump(4.0)
        gate.set()
        assert await running
    assert await last == "answer"


async def test_queries_behind_hanging_query_are_late(gate: threading.Event) -> None:
    threads = Threads(1, "test")
    with signals.hanging_threads():
        queries = (_run_query(threads, gate.wait) for _ in range(3))
        answers = await asyncio.gather(*queries, return_exceptions=True)
    assert [type(answer) for answer in answers] == [StoreUnavailable] * 3
    gate.set()
    assert await _run_query(threads, lambda: "answer") == "answer", "no thread is left to late queries"


async def test_transaction_that_computes_is_no_silence_of_the_database(gate: threading.Event) -> None:
    """On a busy machine a large transaction takes seconds, and the renewal of the lease waits for it."""
    monitor, silent, rounds = DatabaseMonitor(), list[str](), list[float]()

    def compute() -> None:
        while not gate.is_set():
            until = time.thread_time() + 0.01
            while time.thread_time() < until:
                pass
            rounds.append(until)

    writing = asyncio.create_task(monitor.run_transaction("engine", None, compute, lambda: silent.append("engine")))
    await signals.until(lambda: rounds)
    waiting = asyncio.create_task(monitor.run_transaction("lease", None, gate.wait, lambda: silent.append("lease")))
    for _ in range(4):
        enough = len(rounds) + 2
        await signals.until(lambda enough=enough: len(rounds) >= enough)  # type: ignore[misc]
        virtual_loop().jump(SLOW_AFTER_S)
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(writing, waiting)
    assert silent == []


async def test_first_silence_is_noted_in_thread_that_has_worked_before(gate: threading.Event) -> None:
    monitor, threads, silent = DatabaseMonitor(), Threads(1, "test"), list[float]()

    def compute() -> None:
        while time.thread_time() < 0.02:
            pass

    await asyncio.wrap_future(threads.submit(compute))
    began, now = virtual_loop().time(), virtual_loop().time
    hanging = asyncio.create_task(
        monitor.run_transaction("engine", threads, gate.wait, lambda: silent.append(now() - began))
    )
    with signals.hanging_threads():
        await signals.until(lambda: silent)
    gate.set()
    await hanging
    assert silent[0] < 2 * SLOW_AFTER_S


async def test_transactions_of_hanging_database_are_silent(gate: threading.Event) -> None:
    monitor = DatabaseMonitor()

    async def write(writer: str) -> None:
        await monitor.run_transaction(writer, None, gate.wait, partial(monitor.note_failure, writer))
        monitor.note_success(writer)

    writing = [asyncio.create_task(write(writer)) for writer in ("engine", "lease")]
    with signals.hanging_threads():
        await signals.until(lambda: set(monitor._problems) == {"engine", "lease"})
    gate.set()
    await asyncio.gather(*writing)
    assert not monitor.problem
