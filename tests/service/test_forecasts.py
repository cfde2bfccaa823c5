"""What is foretold of a daemon's jobs: in a process of its own, once a minute at most."""

import asyncio

import pytest

from koalapy.bootstrap.policies import policies
from koalapy.model.errors import BusyError, NotFoundError, UsageError
from koalapy.record.beginning import People
from koalapy.scheduling.queries import Queries
from koalapy.service.forecasts import FRESH, Forecasts
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.twin import Answer, Change, Question, answer
from tests.simulation.test_simulation import grid
from tests.simulation.test_twin import crowd


def queries_at(until: float) -> Queries:
    simulation = Simulation(grid(), until=until)
    simulation.run(crowd(12, walltime=500.0))
    return simulation.scheduler.queries


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


async def test_another_process_answers() -> None:
    told = await Forecasts(queries_at(50.0), People(), Clock(), policies).what_if(Change(add={"new": 12}))
    assert told.changed is not None
    assert told.as_it_is.mean_wait
    assert told.changed.mean_wait
    assert told.changed.mean_wait.middle < told.as_it_is.mean_wait.middle


async def test_a_change_that_cannot_be_is_refused_before_anything_is_simulated() -> None:
    async def work(question: Question) -> Answer:
        raise AssertionError("nothing is to be simulated")

    forecasts = Forecasts(queries_at(50.0), People(), Clock(), policies, work)
    for change in (Change(policy="no-such"), Change(rules={"claim_factor": 7}), Change(first=999)):
        with pytest.raises(UsageError):
            await forecasts.what_if(change)
    with pytest.raises((UsageError, NotFoundError)):
        await forecasts.what_if(Change(drain=("nowhere",)))


async def test_what_was_foretold_holds_for_a_minute() -> None:
    asked: list[float] = []
    clock = Clock()

    async def work(question: Question) -> Answer:
        asked.append(question.moment.now)
        return answer(question)

    forecasts = Forecasts(queries_at(50.0), People(), clock, policies, work)
    ready, expected = await forecasts.expected(12, 60.0)
    assert ready
    assert expected is not None
    assert expected.starts is not None
    clock.now += FRESH - 1
    assert await forecasts.expected(12, 0.0) == (True, expected)
    assert await forecasts.expected(999, 0.0) == (True, None)
    clock.now += 2
    assert (await forecasts.expected(12, 60.0))[1] is not None
    assert asked == [50.0, 111.0]


async def test_who_does_not_wait_for_it_hears_it_later() -> None:
    asked, may_go_on = 0, asyncio.Event()

    async def work(question: Question) -> Answer:
        nonlocal asked
        asked += 1
        await may_go_on.wait()
        return answer(question)

    forecasts = Forecasts(queries_at(50.0), People(), Clock(), policies, work)
    assert await forecasts.expected(12, 0.01) == (False, None)
    assert await forecasts.expected(12, 0.01) == (False, None)
    may_go_on.set()
    ready, expected = await forecasts.expected(12, 60.0)
    assert (ready, asked) == (True, 1)
    assert expected is not None


async def test_a_failure_is_told_and_does_not_last() -> None:
    fails = True

    async def work(question: Question) -> Answer:
        if fails:
            raise BusyError("too long", retry_after=1.0)
        return answer(question)

    forecasts = Forecasts(queries_at(50.0), People(), Clock(), policies, work)
    with pytest.raises(BusyError):
        await forecasts.expected(12, 60.0)
    fails = False
    assert (await forecasts.expected(12, 60.0))[0]


async def test_a_failure_that_nobody_waits_for_leaves_no_complaint() -> None:
    may_go_on = asyncio.Event()

    async def work(question: Question) -> Answer:
        await may_go_on.wait()
        raise BusyError("too long", retry_after=1.0)

    forecasts = Forecasts(queries_at(50.0), People(), Clock(), policies, work)
    assert await forecasts.expected(12, 0.01) == (False, None)
    (under_way,) = asyncio.all_tasks() - {asyncio.current_task()}
    may_go_on.set()
    await asyncio.wait([under_way])
    await asyncio.sleep(0)
    assert not under_way._log_traceback  # type: ignore[attr-defined]  # else asyncio writes to the log, once it is gone
