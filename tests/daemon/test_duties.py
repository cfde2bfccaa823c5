"""Periodic duties, independent of changes of the machine's clock."""

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.daemon.engine.duties import CLOCK_CHECK_INTERVAL_S, Duties, Duty, follow_calendar, next_due, repeat_duty

INTERVALS = st.floats(0.1, 1e6)


class Ends(BaseException):
    """Ends a duty that would otherwise run indefinitely."""


@pytest.mark.parametrize("by_calendar", [False, True])
def test_duties_with_function_returning_awaitable_await_it(by_calendar: bool) -> None:
    async def play() -> None:
        is_done = asyncio.Event()

        async def work() -> None:
            is_done.set()

        rules = SimpleNamespace(scan_interval=1000.0)
        engine: Any = SimpleNamespace(queries=SimpleNamespace(rules=rules), database=SimpleNamespace())
        duty = Duty("audit", 0.01, lambda: work(), by_calendar)
        duties = Duties(engine, cast(Any, None), lambda: None, [duty])
        duties.start()
        try:
            async with asyncio.timeout(30):
                await is_done.wait()
        finally:
            duties.stop()

    asyncio.run(play())


async def test_repeat_duty_after_error_continues_without_missed_runs() -> None:
    now, runs, slept = 100.0, list[float](), list[float]()

    async def work() -> None:
        nonlocal now
        runs.append(now)
        if len(runs) == 1:
            raise ValueError("once")
        if len(runs) == 2:
            now += 1000.0  # the duty takes long, or the process was stopped
        if len(runs) == 5:
            raise Ends

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    with pytest.raises(Ends):
        await repeat_duty(Duty("x", 2.0, work), lambda: now, sleep)
    assert runs == [102.0, 104.0, 1104.0, 1106.0, 1108.0]
    assert slept == [2.0, 2.0, 0.0, 2.0, 2.0]


@given(st.floats(0, 1e9), INTERVALS, st.floats(0, 1e9))
def test_next_due_is_at_most_one_interval_ahead(due: float, interval: float, late: float) -> None:
    due_at = next_due(due, interval, due + late)
    assert due + late <= due_at <= due + late + interval


@pytest.mark.parametrize("step", [0.0, 20.0, 3600.0, 400 * 86400.0, -20.0, -3600.0, -400 * 86400.0])
async def test_duty_by_calendar_after_clock_step_runs_once_within_interval(step: float) -> None:
    interval, now, elapsed, runs = 600.0, 1_790_000_290.0, 0.0, list[tuple[float, float]]()

    async def work() -> None:
        runs.append((now, elapsed))
        if len(runs) == 3:
            raise Ends

    async def sleep(seconds: float) -> None:
        nonlocal now, elapsed
        if not elapsed:
            now += step
        now, elapsed = now + seconds, elapsed + seconds

    with pytest.raises(Ends):
        await follow_calendar(Duty("x", interval, work, by_calendar=True), lambda: now, sleep)
    assert runs[0][1] <= interval + CLOCK_CHECK_INTERVAL_S
    for (_, earlier), (at, later) in pairwise(runs):
        assert at % interval == 0
        assert later - earlier <= interval
