"""What comes by the calendar (APScheduler): the safety-net scan, the renewal of the lease, and duties of others."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from koalapy.model.errors import LeaseLost, StoreUnavailable
from koalapy.ports import Store
from koalapy.scheduling.events import PeriodicScan
from koalapy.service.database import SLOW_AFTER
from koalapy.service.engine import RETRY_PAUSE, Engine, WorkItem

log = structlog.get_logger()

LEASE_RENEWAL = 2.0
"""Seconds between renewals, a small part of the lease: by them it is known soon that the database takes nothing."""
LEASE = "lease"


@dataclass(frozen=True, slots=True)
class Duty:
    """Something that is to be done every ``interval`` seconds, never twice at once."""

    name: str
    interval: float
    work: Callable[[], Awaitable[None]]


class Duties:
    """Starts and stops the periodic duties of one daemon."""

    def __init__(
        self, engine: Engine, store: Store, on_lease_lost: Callable[[], None], others: Sequence[Duty] = ()
    ) -> None:
        self._others = others
        self._engine = engine
        self._store = store
        self._on_lease_lost = on_lease_lost
        self._stopped = False
        self._calendar = AsyncIOScheduler(
            timezone="UTC", job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None}
        )

    def start(self) -> None:
        self._engine.database.lease_renewed_at = time.monotonic()  # it was taken just now
        interval = self._engine.queries.rules.scan_interval
        self._calendar.add_job(self.scan, "interval", seconds=interval, id="scan")
        self._calendar.add_job(self.renew_lease, "interval", seconds=LEASE_RENEWAL, id="lease")
        for duty in self._others:
            # The calendar asks whether it is a coroutine's function; of what only returns one it awaits nothing.
            self._calendar.add_job(_do, "interval", [duty], seconds=duty.interval, id=duty.name)
        self._calendar.start()

    def stop(self) -> None:
        self._stopped = True
        self._calendar.shutdown(wait=False)

    async def scan(self) -> None:
        self._engine.post(WorkItem(events=(PeriodicScan(),)))

    async def renew_lease(self) -> None:
        """Once; where the database does not take it, until the next is near: whether it does may show here first."""
        began = asyncio.get_running_loop().time()
        while not self._stopped and asyncio.get_running_loop().time() - began < LEASE_RENEWAL / 2:
            renewing = asyncio.ensure_future(asyncio.to_thread(self._store.renew_lease, self._engine.clock()))
            await asyncio.wait({renewing}, timeout=SLOW_AFTER)
            if not renewing.done():
                self._engine.database.failed(LEASE, f"the database has not answered for {SLOW_AFTER:g} s")
            try:
                await renewing
            except StoreUnavailable as error:
                self._engine.database.failed(LEASE, error.message)
                await asyncio.sleep(RETRY_PAUSE)
                continue
            except LeaseLost as error:
                log.critical("another daemon has taken over: this one ends", action="lease-lost", error=str(error))
                self._engine.database.lease_lost = True
                self._on_lease_lost()
            self._engine.database.succeeded(LEASE)
            self._engine.database.lease_renewed_at = time.monotonic()
            return


async def _do(duty: Duty) -> None:
    await duty.work()
