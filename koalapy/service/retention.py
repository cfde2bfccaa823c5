"""How long jobs are kept that are over: then everything of theirs goes, files first and the books last."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from koalapy.model.job import JobId
from koalapy.ports import HistoryStore
from koalapy.service.output import Outputs
from koalapy.service.results import Results

FIRST = 50
MOST = 1000
"""Jobs that are removed in one transaction."""
LONG = 0.2
"""Seconds that a transaction may take while others wait to write: the next one is of half as many jobs."""
MOST_STUCK = 100
"""Jobs whose files cannot be removed that are passed over in one round: with more it is the disk's trouble."""
PAUSE = 0.02
"""Seconds between two transactions, in which others write."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Seconds after their end for which jobs are kept: users', for ever if None, and the daemon's own."""

    jobs: float | None
    internal: float


class Retention:
    """Removes jobs that ended long ago, some at a time; what is interrupted goes on the next time."""

    def __init__(
        self,
        store: HistoryStore,
        outputs: Outputs,
        results: Results,
        keeping: Keeping,
        clock: Callable[[], float],
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store, self._outputs, self._results = store, outputs, results
        self._keeping, self._clock = keeping, clock
        self._is_ending = is_ending
        self._at_once = FIRST
        self._stuck: dict[JobId, OSError] = {}
        """Jobs that stay for this round because files of theirs do, and why."""

    async def tidy(self) -> int:
        """Remove all whose time is over; how many there were. ``OSError`` at the end when files of some stay."""
        keeping, now = self._keeping, self._clock()
        self._stuck.clear()
        gone = await self._remove_all(now - keeping.internal, internal=True)
        if keeping.jobs is not None:
            gone += await self._remove_all(now - keeping.jobs, internal=False)
        more = True
        while more and not self._is_ending():
            more = await asyncio.to_thread(self._store.shrink)
            await asyncio.sleep(PAUSE)
        if self._stuck:
            raise next(iter(self._stuck.values()))
        return gone

    async def _remove_all(self, before: float, *, internal: bool) -> int:
        gone = 0
        while not self._is_ending():
            limit = self._at_once + len(self._stuck)
            found = await asyncio.to_thread(self._store.over, before, limit, internal=internal)
            jobs = [job for job in found if job not in self._stuck]
            if not jobs:
                break
            gone += await self._remove(jobs)
            await asyncio.sleep(PAUSE)
        return gone

    async def _remove(self, old: Sequence[JobId]) -> int:
        # A file of a job that nobody knows would stay for ever: as long as there may be one, the job is known. And on a
        # full disk a database can let go of nothing before files have.
        jobs = await self._without_output(old)
        if not jobs:
            return 0
        await self._results.remove(jobs)
        began = time.monotonic()
        await asyncio.to_thread(self._store.remove, jobs)
        took = time.monotonic() - began
        self._at_once = max(1, self._at_once // 2) if took > LONG else min(MOST, self._at_once * 2)
        # What was on its way meanwhile.
        await self._outputs.remove(frozenset(jobs))
        return len(jobs)

    async def _without_output(self, jobs: Sequence[JobId]) -> Sequence[JobId]:
        """Remove their output; those of which none is left. One that cannot be removed keeps no other."""
        try:
            await self._outputs.remove(frozenset(jobs))
        except OSError as error:
            if len(jobs) > 1:
                half = len(jobs) // 2
                return [*await self._without_output(jobs[:half]), *await self._without_output(jobs[half:])]
            self._stuck[jobs[0]] = error
            if len(self._stuck) > MOST_STUCK:
                raise
            return ()
        return jobs
