"""Run queries in threads outside the event loop, and watch whether the database accepts writes.

Accepted changes are written sooner or later, since the daemon acts on stored changes only. While the database is
unavailable, changes of users are rejected, and a change with an open outcome is reported as such after a timeout.
"""

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from itertools import takewhile
from typing import Any, ParamSpec, TypeVar

import structlog

from koalapy.daemon.observability.timings import Timings
from koalapy.model.errors import StoreUnavailable
from koalapy.system.clock import SYSTEM_CLOCK

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger()

SLOW_AFTER_S = 2.0
"""Seconds after which a database that has not answered counts as unavailable."""
MIN_WORK_S = 0.005
"""Processor time in ``SLOW_AFTER_S`` by which a transaction goes on: one that waits for its database uses less."""
COMMIT_TIMEOUT_S = 10.0
"""Seconds for which a client waits for a commit while the database is unavailable."""
QUERY_TIMEOUT_S = 5.0
"""Timeout of one query from its start, and of waiting ones since another was answered."""
RENEWAL_LIMIT_S = 10.0
"""Seconds after the last renewal of a shared database's lease for which this daemon renews leases of components."""
UNKNOWN_OUTCOME = "look again later: the change is made as a whole or not at all"

READ_TIMINGS = Timings()
"""Durations of all queries of this process."""


class Threads(Executor):
    """A pool of daemon threads, which do not block the end of the process when they hang, unlike Python's own pool.

    Work is queued by user, and users take turns. ``max_per_user`` limits the threads of one user.
    """

    def __init__(self, max_threads: int, name: str, max_per_user: int | None = None) -> None:
        self._max_threads, self._name, self._max_per_user = max_threads, name, max_per_user or max_threads
        self._queues: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()
        """Waiting work by user, in the order of their turns."""
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._begun = self._open = 0
        """The number of started threads, and of work items that are not done."""
        self.answered = 0
        """The number of queries that have been answered."""

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        return self.submit_for("", work, *args, **kwargs)

    def submit_for(self, user: str, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Submit work of a user. The daemon's own work has user ``""`` and may take all threads."""
        result: Future[T] = Future()

        def run_work() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(work(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
                    result.set_exception(error)

        with self._changed:
            self._open += 1
            if self._begun < min(self._open, self._max_threads):
                threading.Thread(target=self._run_worker, name=f"{self._name}_{self._begun}", daemon=True).start()
                self._begun += 1
            self._queues.setdefault(user, deque()).append(run_work)
            self._changed.notify()
        return result

    def note_answer(self) -> None:
        """Count an answered query."""
        with self._changed:
            self.answered += 1

    def _run_worker(self) -> None:
        """Run queued work in one thread of the pool without end; each user gets one turn after another."""
        while True:
            with self._changed:
                while (user := self._next_user()) is None:
                    self._changed.wait()
                waiting = self._queues.pop(user)
                work = waiting.popleft()
                if waiting:
                    self._queues[user] = waiting  # as the last user
                self._running[user] += 1
            work()
            with self._changed:
                self._open -= 1
                self._running[user] -= 1
                if not self._running[user]:
                    del self._running[user]
                self._changed.notify()

    def _next_user(self) -> str | None:
        """Return the next user that may have one more thread, or None."""
        return next((user for user in self._queues if not user or self._running[user] < self._max_per_user), None)


class _ThreadsOfUser(Executor):
    """An executor that submits to shared threads as one user."""

    def __init__(self, threads: Threads, user: str) -> None:
        self._threads, self._user = threads, user

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        return self._threads.submit_for(self._user, work, *args, **kwargs)


_readers = Threads(8, "reader", max_per_user=3)
_finders = Threads(2, "finder")
"""For queries of some rows by their keys, which do not wait for those that read many rows."""
_workers = Threads(8, "database")
"""Separate pools, so that queries of a hanging database block neither writes nor the default pool."""
READING_USER: ContextVar[str] = ContextVar("reading_user", default="")
"""The user of the current request; empty in the daemon's own tasks."""


async def run_in_database(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``work`` in a database thread without a timeout, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_workers, lambda: work(*args, **kwargs))


async def query(question: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``question`` in a reader thread and return its result. Raise ``StoreUnavailable`` on timeout."""
    return await _run_query(_readers, lambda: question(*args, **kwargs))


async def find_by_key(question: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a ``question`` for some rows by their keys, as ``query`` does but before those that read many rows."""
    return await _run_query(_finders, lambda: question(*args, **kwargs))


async def _run_query(threads: Threads, question: Callable[[], T]) -> T:
    """Run a question in one of the threads. Raise ``StoreUnavailable`` once it has run for ``QUERY_TIMEOUT_S``.

    While it waits for a thread it is not late, unless no other question was answered for that time.
    """
    has_begun = threading.Event()

    def answer() -> T:
        has_begun.set()
        try:
            return question()
        finally:
            threads.note_answer()

    asking = asyncio.get_running_loop().run_in_executor(_ThreadsOfUser(threads, READING_USER.get()), answer)
    began, failed, is_late = time.monotonic(), False, False
    try:
        while not is_late:
            had_begun, answered_before = has_begun.is_set(), threads.answered
            if (await asyncio.wait({asking}, timeout=QUERY_TIMEOUT_S))[0]:
                return asking.result()
            is_late = had_begun or (not has_begun.is_set() and threads.answered == answered_before)
        raise StoreUnavailable(f"the database has not answered for {QUERY_TIMEOUT_S:g} s", hint="try again later")
    except StoreUnavailable:
        failed = True
        raise
    finally:
        asking.cancel()
        READ_TIMINGS.note(time.monotonic() - began, failed=failed)


class DatabaseMonitor:
    """The state of the database, as its writers report it."""

    def __init__(self) -> None:
        self.away = asyncio.Event()
        """Set while the database is unavailable."""
        self._waiters: set[asyncio.Future[None]] = set()
        """Futures that are completed when the database becomes unavailable."""
        self._problems: dict[str, str] = {}
        self._since = 0.0
        self.lease_renewed_at: float | None = None
        """Time since boot of the last renewal; None before the first."""
        self.lease_lost = False
        self.is_lease_shared = False
        """Whether a daemon of another machine may take the lease."""
        self._under_way: set[asyncio.Future[Any]] = set()
        self._writing: dict[str, None] = {}
        """The writers with a transaction that has not ended, in the order in which these began."""

    @property
    def problem(self) -> str:
        """The reason why the database is unavailable, or an empty string."""
        return next(iter(self._problems.values()), "")

    @property
    def lease_age(self) -> float:
        """Return the seconds since the last renewal began, with those for which the machine was suspended."""
        return 0.0 if self.lease_renewed_at is None else SYSTEM_CLOCK.since_boot() - self.lease_renewed_at

    @property
    def may_renew_components(self) -> bool:
        """Return whether the leases of components may be renewed.

        A daemon that has taken over counts them from its start, and waits for 30 s more (ADR 30).
        """
        return not self.is_lease_shared or (not self.lease_lost and self.lease_age < RENEWAL_LIMIT_S)

    @property
    def unavailable_for(self) -> float:
        """Seconds for which the database has been unavailable; 0 if it is available."""
        return time.monotonic() - self._since if self._problems else 0.0

    async def run_transaction(
        self, writer: str, threads: Executor | None, work: Callable[[], T], on_silence: Callable[[], None]
    ) -> T:
        """Run a transaction in a thread, and return its result.

        Call ``on_silence`` after each ``SLOW_AFTER_S`` in which the database seems not to answer: the thread has used
        hardly any processor time, and does not wait for an earlier transaction. On a busy machine a large one takes
        longer.
        """
        clocks: list[tuple[int, float]] = []

        def run_work() -> T:
            clocks.append((time.pthread_getcpuclockid(threading.get_ident()), time.thread_time()))
            return work()

        running = asyncio.get_running_loop().run_in_executor(threads, run_work)
        self._writing[writer] = None
        running.add_done_callback(lambda _: self._writing.pop(writer, None))
        used = 0.0
        while not (await asyncio.wait({running}, timeout=SLOW_AFTER_S))[0]:
            used_before, used = used, sum(time.clock_gettime(clock) - began for clock, began in clocks)
            earlier = takewhile(lambda name: name != writer, self._writing)
            if used - used_before < MIN_WORK_S and not any(name not in self._problems for name in earlier):
                on_silence()
        return running.result()

    def note_failure(self, writer: str, reason: str = "") -> None:
        """Record that the transaction of a writer failed, or that it has not ended after ``SLOW_AFTER_S``.

        While it has not ended, the ``reason`` is that of an earlier failure, if there was one.
        """
        silence = 0.0 if reason else SLOW_AFTER_S
        reason = reason or self._problems.get(writer) or f"the database has not answered for {SLOW_AFTER_S:g} s"
        if not self._problems:
            self._since = time.monotonic() - silence
            log.error("the database is unavailable", action="database-away", error=reason)
        self._problems[writer] = reason
        self.away.set()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def note_success(self, writer: str) -> None:
        """Record that a transaction of the writer succeeded."""
        if self._problems.pop(writer, "") and not self._problems:
            self.away.clear()
            duration = f"{time.monotonic() - self._since:.1f} s"
            log.info("the database is available again", action="database-back", after=duration)

    def check_available(self) -> None:
        """Raise ``StoreUnavailable`` while the database is unavailable."""
        if self._problems:
            raise self.make_error()

    def make_error(self) -> StoreUnavailable:
        return StoreUnavailable(f"{self.problem}; nothing was changed", hint="try again when the database is back")

    async def await_outcome(self, work: Awaitable[T], hint: str = UNKNOWN_OUTCOME) -> T:
        """Return the result of work that waits for a commit.

        If the database stays unavailable for ``COMMIT_TIMEOUT_S``, raise ``StoreUnavailable`` with ``hint``; the work
        goes on.
        """
        working = asyncio.ensure_future(work)
        self._under_way.add(working)
        working.add_done_callback(self._under_way.discard)
        while not working.done():
            await self._until_done_or_away(working)
            if not working.done():
                await asyncio.wait({working}, timeout=COMMIT_TIMEOUT_S)
            if not working.done() and self.problem:
                working.add_done_callback(_end_quietly)
                raise StoreUnavailable(f"{self.problem}; the change may still be made", hint=hint)
        return working.result()

    async def _until_done_or_away(self, working: "asyncio.Future[Any]") -> None:
        """Wait until the work is done or the database becomes unavailable, whichever is first."""
        away: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._problems:
            away.set_result(None)
        self._waiters.add(away)
        try:
            await asyncio.wait({working, away}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiters.discard(away)


def _end_quietly(work: "asyncio.Future[Any]") -> None:
    """Log the error of work that no client waits for any more."""
    error = None if work.cancelled() else work.exception()
    if error is not None:
        log.warning("a change with an open outcome was not made", action="change-not-done", error=str(error))
