"""What will become of those who wait, as it is or with a change: worked out in a process of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from koalapy.model.job import JobId
from koalapy.placement.registry import Registry
from koalapy.record.beginning import People
from koalapy.scheduling.queries import Queries
from koalapy.service.apart import apart, pieces
from koalapy.simulation.moment import moment_of
from koalapy.simulation.twin import Answer, Change, Expected, Forecast, Question, answer

FRESH = 60.0
"""Seconds for which what was foretold is told again."""


@dataclass(frozen=True, slots=True)
class _Told:
    at: float
    forecast: Forecast


class Forecasts:
    """One at a time, so that it takes no more than the processors' idle time."""

    def __init__(
        self,
        queries: Queries,
        people: People,
        clock: Callable[[], float],
        policies: Callable[[], Registry],
        work: Callable[[Question], Awaitable[Answer]] | None = None,
    ) -> None:
        """``policies``: a function of a module, by which another process knows them, too."""
        self._queries, self._people, self._clock, self._policies = queries, people, clock, policies
        self._work = work or _apart
        self._one_at_a_time = asyncio.Lock()
        self._told: _Told | None = None
        self._under_way: asyncio.Task[None] | None = None

    async def what_if(self, change: Change) -> Answer:
        """``UsageError`` or ``NotFoundError`` for a change that cannot be, ``BusyError`` when it takes too long."""
        async with self._one_at_a_time:
            return await self._answer(change)

    async def expected(self, job: JobId, patience: float) -> tuple[bool, Expected | None]:
        """Of a job that is not over, as of a minute ago at most: whether that is known within so many seconds, and what
        it is; None of one that has just come, or is held."""
        if self._told is None or not 0 <= self._clock() - self._told.at < FRESH:
            if self._under_way is None or self._under_way.done():
                self._under_way = asyncio.create_task(self._tell_anew())
                self._under_way.add_done_callback(_hear_out)
            await asyncio.wait([self._under_way], timeout=patience)
            if not self._under_way.done():
                return False, None
            self._under_way.result()
        return True, self._told.forecast.of(job) if self._told else None

    async def _tell_anew(self) -> None:
        async with self._one_at_a_time:
            await self._answer(Change())

    async def _answer(self, change: Change) -> Answer:
        moment = moment_of(self._queries, self._people, self._clock())
        change.check(moment, self._queries.policies)
        told = await self._work(Question(moment, change, self._policies))
        self._told = _Told(moment.now, told.as_it_is)
        return told


async def _apart(question: Question) -> Answer:
    beginning = question.moment.beginning
    moment = replace(question.moment, beginning=replace(beginning, jobs=()))
    return await apart(answer, replace(question, moment=moment), *pieces(beginning.jobs))


def _hear_out(task: asyncio.Task[None]) -> None:
    """Whoever still waits is told of a failure; nobody may."""
    if not task.cancelled():
        task.exception()
