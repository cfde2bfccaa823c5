"""Whether the database takes what is written, and how long anybody waits for it.

What was taken on is written sooner or later, for nothing may be done that is not. But nothing more is taken on from
users while that does not work, and nobody is kept waiting: what may still become true is told as such.
"""

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import structlog

from koalapy.daemon.observability.timings import Timings
from koalapy.model.errors import StoreUnavailable

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger()

SLOW_AFTER_S = 2.0
"""Seconds after which a database that has not answered counts as away."""
COMMIT_TIMEOUT_S = 3.0
"""Seconds for which somebody is kept waiting while the database is away."""
QUERY_TIMEOUT_S = 5.0
"""Seconds that a question to the database may take."""
UNKNOWN_OUTCOME = "ask for it in a while: it is done or not, and nothing is done by half"

READ_TIMINGS = Timings()
"""Questions to the database, of all who ask in this process."""


class Threads(Executor):
    """Run work in at most ``most`` threads; a hanging one does not keep the process from ending, as one of Python's own
    pool would.

    Work is queued by user, and users take turns. With ``most_per_user`` no user has more threads at once.
    """

    def __init__(self, most: int, name: str, most_per_user: int | None = None) -> None:
        self._most, self._name, self._most_per_user = most, name, most_per_user or most
        self._queues: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()
        """The work that waits by user; the user whose turn comes next is first."""
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._begun = self._open = 0
        """Threads, and work that is not done yet."""

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        return self.submit_for("", work, *args, **kwargs)

    def submit_for(self, user: str, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Submit work of a user; work of the daemon itself is that of user ``""``, which may have all threads."""
        answer: Future[T] = Future()

        def do() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(work(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001 - it is raised where that is waited for
                    answer.set_exception(error)

        with self._changed:
            self._open += 1
            if self._begun < min(self._open, self._most):
                threading.Thread(target=self._run, name=f"{self._name}_{self._begun}", daemon=True).start()
                self._begun += 1
            self._queues.setdefault(user, deque()).append(do)
            self._changed.notify()
        return answer

    def _run(self) -> None:
        while True:
            with self._changed:
                while (user := self._next_user()) is None:
                    self._changed.wait()
                waiting = self._queues.pop(user)
                do = waiting.popleft()
                if waiting:
                    self._queues[user] = waiting  # behind all others
                self._running[user] += 1
            do()
            with self._changed:
                self._open -= 1
                self._running[user] -= 1
                if not self._running[user]:
                    del self._running[user]
                self._changed.notify()

    def _next_user(self) -> str | None:
        """Return the first user in turn who may have one more thread."""
        return next((user for user in self._queues if not user or self._running[user] < self._most_per_user), None)


class _ThreadsOfUser(Executor):
    """Submit the work of one user to threads that users share."""

    def __init__(self, threads: Threads, user: str) -> None:
        self._threads, self._user = threads, user

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        return self._threads.submit_for(self._user, work, *args, **kwargs)


_readers = Threads(8, "reader", most_per_user=3)
_workers = Threads(8, "database")
"""Those who ask a database that hangs keep nobody else from a thread: neither of these nor of the common pool."""
READING_USER: ContextVar[str] = ContextVar("reading_user", default="")
"""The user whose request is under way; empty in the daemon's own tasks."""


async def run_in_database(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What comes of work in the database, however long that takes."""
    return await asyncio.get_running_loop().run_in_executor(_workers, lambda: work(*args, **kwargs))


async def query(question: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The answer to a question to the database; ``StoreUnavailable`` when there is none in time."""
    reader = _ThreadsOfUser(_readers, READING_USER.get())
    asking = asyncio.get_running_loop().run_in_executor(reader, lambda: question(*args, **kwargs))
    began, failed = time.monotonic(), False
    try:
        return await asyncio.wait_for(asking, QUERY_TIMEOUT_S)
    except StoreUnavailable:
        failed = True
        raise
    except TimeoutError:
        failed = True
        raise StoreUnavailable(
            f"the database has not answered for {QUERY_TIMEOUT_S:g} s", hint="ask again later"
        ) from None
    finally:
        READ_TIMINGS.note(time.monotonic() - began, failed=failed)


class DatabaseMonitor:
    """What is known of the database from those who write to it."""

    def __init__(self) -> None:
        self.away = asyncio.Event()
        """Set while it takes nothing."""
        self._waiters: set[asyncio.Future[None]] = set()
        """Of those who wait for work: each is done as soon as the database takes nothing."""
        self._problems: dict[str, str] = {}
        self._since = 0.0
        self.lease_renewed_at: float | None = None
        """When it last was, by the monotonic clock; None where nobody renews it."""
        self.lease_lost = False
        self._under_way: set[asyncio.Future[Any]] = set()

    @property
    def problem(self) -> str:
        """Why it takes nothing; empty while it does."""
        return next(iter(self._problems.values()), "")

    def note_failure(self, who: str, reason: str) -> None:
        """Somebody's transaction was not taken."""
        if not self._problems:
            self._since = time.monotonic()
            log.error("the database takes nothing", action="database-away", error=reason)
        self._problems[who] = reason
        self.away.set()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def note_success(self, who: str) -> None:
        """The same one's transaction was."""
        if self._problems.pop(who, "") and not self._problems:
            self.away.clear()
            log.info("the database is back", action="database-back", after=f"{time.monotonic() - self._since:.1f} s")

    def check(self) -> None:
        """``StoreUnavailable`` while it takes nothing."""
        if self._problems:
            raise self.make_error()

    def make_error(self) -> StoreUnavailable:
        return StoreUnavailable(f"{self.problem}; nothing was changed", hint="try again when the database is back")

    async def await_outcome(self, work: Awaitable[T], hint: str = UNKNOWN_OUTCOME) -> T:
        """What comes of some work that waits for a commit; it goes on when it takes longer than anybody should wait.

        Then it is a ``StoreUnavailable`` with that hint.
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
                raise StoreUnavailable(f"{self.problem}; it is not known yet whether this will be done", hint=hint)
        return working.result()

    async def _until_done_or_away(self, working: "asyncio.Future[Any]") -> None:
        away: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._problems:
            away.set_result(None)
        self._waiters.add(away)
        try:
            await asyncio.wait({working, away}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiters.discard(away)


def _end_quietly(work: "asyncio.Future[Any]") -> None:
    """Of work that nobody waits for any more."""
    error = None if work.cancelled() else work.exception()
    if error is not None:
        log.warning("what was asked for was not done after all", action="change-not-done", error=str(error))
