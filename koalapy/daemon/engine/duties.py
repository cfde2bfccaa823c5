"""Periodic work of the daemon: the safety-net scan, the renewal of the lease, and the duties of other services.

Duties run by the monotonic clock, so that a step of the machine's clock neither delays nor repeats them. APScheduler
runs only those that follow the calendar.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.base import BaseTrigger

from koalapy.daemon.engine.engine import RETRY_INTERVAL_S, Engine, WorkItem
from koalapy.model.errors import LeaseLost, StoreUnavailable
from koalapy.scheduler.events import PeriodicScan
from koalapy.store.sql import JobStore
from koalapy.system.clock import SYSTEM_CLOCK

log = structlog.get_logger()

LEASE_RENEWAL_INTERVAL_S = 2.0
"""A small part of the lease, since a failed renewal is the first sign of an unavailable database."""
CLOCK_CHECK_INTERVAL_S = 30.0
"""Interval of comparing the next runs by calendar with the machine's clock."""
LEASE = "lease"


@dataclass(frozen=True, slots=True)
class Duty:
    """Work to do every ``interval`` seconds, never twice at the same time."""

    name: str
    interval: float
    work: Callable[[], Awaitable[None]]
    by_calendar: bool = False
    """Whether to run when the machine's clock shows a multiple of the interval."""


class CalendarTrigger(BaseTrigger):  # type: ignore[misc]
    """A trigger at each multiple of an interval since the start of 1970. All missed runs together become one."""

    def __init__(self, seconds: float) -> None:
        self.interval = timedelta(seconds=seconds)

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        del previous_fire_time  # APScheduler would list every run since then
        since = now - datetime.fromtimestamp(0, UTC)
        return now + self.interval - since % self.interval


def next_due(due: float, interval: float, now: float) -> float:
    """Return when a duty is due after ``due``, without runs that were missed."""
    return max(due + interval, now)


async def repeat_duty(
    duty: Duty, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Run a duty every ``interval`` seconds until cancelled. Log errors and go on."""
    due = clock() + duty.interval
    while True:
        await sleep(max(0.0, due - clock()))
        await _run_duty(duty)
        due = next_due(due, duty.interval, clock())


async def _run_duty(duty: Duty) -> None:
    try:
        await duty.work()
    except Exception as error:
        log.error("a duty failed", action="duty-failed", duty=duty.name, exc_info=error)


class Duties:
    """The periodic duties of one daemon."""

    def __init__(
        self, engine: Engine, store: JobStore, on_lease_lost: Callable[[], None], other_duties: Sequence[Duty] = ()
    ) -> None:
        self._other_duties = other_duties
        self._engine = engine
        self._store = store
        self._on_lease_lost = on_lease_lost
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []
        self._calendar = AsyncIOScheduler(
            timezone="UTC", job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None}
        )

    def start(self) -> None:
        """Start all periodic tasks.

        Those that follow the machine's clock run in APScheduler, others in their own task.
        """
        # The store took the lease when it was opened.
        self._engine.database.lease_renewed_at = SYSTEM_CLOCK.since_boot()
        built_in = [
            Duty("scan", self._engine.queries.rules.scan_interval, self.post_scan),
            Duty("lease", LEASE_RENEWAL_INTERVAL_S, self.renew_lease),
            Duty("calendar", CLOCK_CHECK_INTERVAL_S, self.follow_clock),
        ]
        for duty in (*built_in, *self._other_duties):
            if duty.by_calendar:
                self._calendar.add_job(_run_duty, CalendarTrigger(duty.interval), [duty], id=duty.name)
            else:
                self._tasks.append(asyncio.create_task(repeat_duty(duty), name=duty.name))
        self._calendar.start()

    def stop(self) -> None:
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        self._calendar.shutdown(wait=False)

    async def follow_clock(self) -> None:
        """Reschedule the runs by calendar in case the machine's clock was set."""
        now = datetime.now(UTC)
        for job in self._calendar.get_jobs():
            job.modify(next_run_time=following_run(job.next_run_time, job.trigger, now))

    async def post_scan(self) -> None:
        self._engine.post(WorkItem(events=(PeriodicScan(),)))

    async def renew_lease(self) -> None:
        """Renew the daemon's sole right to write to the database; on failure retry until the next renewal is near."""
        began, database = asyncio.get_running_loop().time(), self._engine.database
        while not self._stopped and asyncio.get_running_loop().time() - began < LEASE_RENEWAL_INTERVAL_S / 2:
            # By the machine's clock, as other processes read it: the engine's own ignores that it was set.
            renew, renewed_at = partial(self._store.renew_lease, SYSTEM_CLOCK.now()), SYSTEM_CLOCK.since_boot()
            try:
                await database.run_transaction(LEASE, None, renew, partial(database.note_failure, LEASE))
            except StoreUnavailable as error:
                database.note_failure(LEASE, error.message)
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            except LeaseLost as error:
                log.critical("another daemon has taken the lease: this one ends", action="lease-lost", error=str(error))
                database.lease_lost = True
                self._on_lease_lost()
                return
            database.note_success(LEASE)
            database.lease_renewed_at = renewed_at  # this process may have been stopped since
            return


def following_run(planned: datetime, trigger: Any, now: datetime) -> datetime:
    """Return the next run of a calendar job: as planned, or sooner if the clock was set back."""
    soonest: datetime = trigger.get_next_fire_time(None, now)
    return min(planned, soonest)
