"""Periodic duties, independent of changes of the machine's clock."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.util import datetime_repr
from hypothesis import given
from hypothesis import strategies as st

from koalapy.daemon.engine.database import DatabaseMonitor
from koalapy.daemon.engine.duties import CalendarTrigger, Duties, Duty, following_run, next_due, repeat_duty
from koalapy.model.errors import ConflictError
from koalapy.store.database import Database, current_holder
from koalapy.store.engine import make_engine
from koalapy.store.opening import upgrade
from koalapy.store.sql import JobStore

MOMENTS = st.datetimes(datetime(1971, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
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
            await duties.follow_clock()
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


@given(MOMENTS, INTERVALS, MOMENTS)
def test_calendar_trigger_after_clock_step_fires_within_interval(
    now: datetime, interval: float, previous: datetime
) -> None:
    trigger = CalendarTrigger(interval)
    fire_time = trigger.get_next_fire_time(previous, now)
    assert now < fire_time <= now + trigger.interval
    assert trigger.get_next_fire_time(fire_time, now) == fire_time


def test_calendar_trigger_after_400_days_lists_one_run() -> None:
    scheduler = AsyncIOScheduler(timezone="UTC")
    job = scheduler.add_job(print, CalendarTrigger(600.0))
    now = datetime(2026, 11, 25, tzinfo=UTC)
    job.next_run_time = now
    runs = job._get_run_times(now + timedelta(days=400, seconds=1))
    assert len(runs) == 1, datetime_repr(runs[-1])


@given(MOMENTS, MOMENTS)
def test_following_run_after_clock_set_back_is_within_interval(planned: datetime, now: datetime) -> None:
    trigger = CalendarTrigger(600.0)
    assert following_run(planned, trigger, now) <= now + trigger.interval
    assert following_run(planned, trigger, now) <= planned


async def test_lease_renewed_after_clock_was_set_forward_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, now = f"sqlite:///{tmp_path / 'koala.db'}", 5000.0
    store = JobStore(Database(make_engine(url), lambda: 1000.0, upgrade=upgrade))
    engine: Any = SimpleNamespace(clock=lambda: 1002.0, database=DatabaseMonitor())
    monkeypatch.setattr(time, "time", lambda: now)
    await Duties(engine, store, lambda: None).renew_lease()
    assert current_holder(make_engine(url), now), "koala restore is refused"
    with pytest.raises(ConflictError, match="another daemon"):
        Database(make_engine(url), lambda: now)
    store.close()
