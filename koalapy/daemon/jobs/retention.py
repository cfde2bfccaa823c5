"""Remove expired jobs, their files first and their rows last, and expired bundles and results."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from koalapy.daemon.engine.database import run_in_database
from koalapy.daemon.files.bundles import Bundles
from koalapy.daemon.files.results import Results
from koalapy.daemon.jobs.output import Outputs
from koalapy.model.errors import LeaseLost, StoreUnavailable
from koalapy.model.job import JobId
from koalapy.store.history import HistoryStore

T = TypeVar("T")

log = structlog.get_logger()

FIRST_BATCH = 50
MAX_BATCH = 1000
"""The most jobs that one transaction removes."""
LONG_TRANSACTION = 0.2
"""If a transaction takes longer than this, in seconds, the next one removes half as many jobs."""
MAX_STUCK = 100
"""Jobs with files that cannot be removed after which a run is aborted: then the disk is at fault."""
HOUSEKEEPING_INTERVAL = 600.0
"""Seconds between two runs of housekeeping."""
PAUSE = 0.02
"""Seconds between two transactions, in which other writers get their turn."""


class Retention:
    """The removal of expired jobs in batches. An interrupted run is continued by the next."""

    def __init__(
        self,
        store: HistoryStore,
        outputs: Outputs,
        results: Results,
        jobs_keep: float | None,
        internal_keep: float,
        clock: Callable[[], float],
        is_ending: Callable[[], bool] = lambda: False,
        needed: Callable[[], Collection[JobId]] = frozenset,
        max_stuck: int = MAX_STUCK,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``jobs_keep``, ``internal_keep``: seconds for which ended jobs of users (None: without limit) and of the
        daemon are kept. ``needed`` returns the jobs with results that other jobs still need.

        ``max_stuck``: jobs with files that cannot be removed after which a run is aborted.
        """
        self._needed = needed
        self._max_stuck, self._monotonic = max_stuck, monotonic
        self._store, self._outputs, self._results = store, outputs, results
        self._jobs_keep, self._internal_keep, self._clock = jobs_keep, internal_keep, clock
        self._is_ending = is_ending
        self._batch_size = FIRST_BATCH
        self._stuck: dict[JobId, OSError] = {}
        """The errors of jobs with files that could not be removed in this run."""

    async def remove_expired(self) -> int:
        """Remove all expired jobs and return their number. Raise ``OSError`` at the end if files of some remain."""
        now = self._clock()
        self._stuck.clear()
        removed = await self._remove_all(now - self._internal_keep, internal=True)
        if self._jobs_keep is not None:
            removed += await self._remove_all(now - self._jobs_keep, internal=False)
        has_more = True
        while has_more and not self._is_ending():
            has_more = await run_in_database(self._store.shrink)
            await asyncio.sleep(PAUSE)
        if self._stuck:
            raise next(iter(self._stuck.values()))
        return removed

    async def _remove_all(self, horizon: float, *, internal: bool) -> int:
        """Remove the jobs that ended before ``horizon``, batch by batch, and return their number."""
        removed = 0
        while not self._is_ending():
            protected = {*self._stuck, *self._needed()}
            limit = self._batch_size + len(protected)
            expired = await run_in_database(self._store.expired_jobs, horizon, limit, internal=internal)
            jobs = [job for job in expired if job not in protected]
            if not jobs:
                break
            removed += await self._remove_jobs(jobs)
            await asyncio.sleep(PAUSE)
        return removed

    async def _remove_jobs(self, old: Sequence[JobId]) -> int:
        """Remove jobs and their files; return how many.

        Jobs with files that cannot be removed stay. Adapt the batch size.
        """
        # Files first: without its row, a remaining file of a job would never be found. And on a full disk a database
        # can delete rows only once files are gone.
        jobs = await self._without_files(old)
        if not jobs:
            return 0
        began = self._monotonic()
        await run_in_database(self._store.remove, jobs)
        took = self._monotonic() - began
        size = self._batch_size // 2 if took > LONG_TRANSACTION else self._batch_size * 2
        self._batch_size = min(max(1, size), MAX_BATCH)
        # Remove output that arrived during the transaction.
        await self._outputs.remove_output(frozenset(jobs))
        return len(jobs)

    async def _without_files(self, jobs: Sequence[JobId]) -> Sequence[JobId]:
        """Remove output and results, and return the jobs without any left. Errors of one job do not affect others."""
        try:
            await self._outputs.remove_output(frozenset(jobs))
            await self._results.remove_results(jobs)
        except OSError as error:
            if len(jobs) > 1:
                half = len(jobs) // 2
                return [*await self._without_files(jobs[:half]), *await self._without_files(jobs[half:])]
            self._stuck[jobs[0]] = error
            if len(self._stuck) > self._max_stuck:
                raise
            return ()
        return jobs


@dataclass(slots=True)
class Housekeeping:
    """The periodic removal of expired bundles, results and jobs."""

    bundles: Bundles
    results: Results
    retention: Retention
    results_keep: float | None
    """Seconds for which results are kept after the end of their job; None without limit."""
    clock: Callable[[], float]

    async def remove_expired(self) -> None:
        """Remove expired bundles, results and jobs. An error with one kind does not affect the others."""
        horizon = None if self.results_keep is None else self.clock() - self.results_keep
        try:
            bundles = await _log_disk_errors(self.bundles.remove_unused(), [])
            results = await _log_disk_errors(self.results.remove_expired(horizon), [])
            jobs = await _log_disk_errors(self.retention.remove_expired(), 0)
        except (StoreUnavailable, LeaseLost) as error:
            _log_failure(error)
            return
        if bundles or results or jobs:
            log.info(
                "expired data was removed", action="retention-done", bundles=len(bundles), results_of=results, jobs=jobs
            )


async def _log_disk_errors(removal: Awaitable[T], nothing: T) -> T:
    """Return the result of a removal. After an ``OSError``, log it and return ``nothing``."""
    try:
        return await removal
    except OSError as error:
        _log_failure(error)
        return nothing


def _log_failure(error: Exception) -> None:
    log.error("some expired data could not be removed", action="retention-failed", error=str(error))


def removal_clock(clock: Callable[[], float]) -> Callable[[], float]:
    """Return the clock by which data expires: the earlier of the daemon's and the machine's.

    If the daemon was started while the machine's clock was ahead, nothing is removed too early.
    """
    return lambda: min(clock(), time.time())
