"""Short scheduling steps: the daemon serves requests while many jobs are placed."""

import asyncio
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from koalapy.daemon.engine.engine import Engine, Outbox, WorkItem
from koalapy.model.errors import StoreUnavailable
from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.reports import ClusterReport, Inventory
from koalapy.model.request import FlexibleRequest
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.events import InventoryReceived, JobCancelled, JobSubmitted, Reported
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState
from koalapy.store.database import Database
from koalapy.store.engine import make_engine
from koalapy.store.records import ClusterRecord
from koalapy.store.sql import JobStore
from tests import signals
from tests.databases import migrate

JOBS = 200
TRIES = 20
"""Number of placements for which a step has time."""
DEADLINE = 30.0


def describe_north(name: str) -> ClusterRecord:
    return ClusterRecord(name, "slurm", "usable", JOBS, 0, 0, 0, 0, 0, "", None, 1, 1.0)


def open_database(folder: Path) -> Database:
    database = make_engine(f"sqlite:///{folder}/koala.db")
    migrate(database)
    return Database(database)


def count_ticks() -> Callable[[], float]:
    ticks = count()
    return lambda: float(next(ticks))


async def test_engine_placing_many_jobs_serves_requests_between_steps(tmp_path: Path) -> None:
    store = JobStore(open_database(tmp_path))
    state = SchedulerState(Rules(step_budget=float(TRIES)), builtin_policies(), [ClusterStatus("north")])
    scheduler = Scheduler(state, nonces=str, clock=count_ticks())

    engine = Engine(scheduler, store, Outbox((), 1), epoch=1, describe=describe_north)
    placed: list[int] = []
    engine.subscribe(lambda job, previous_state: placed.append(job.id) if job.state is JobState.CLAIMING else None)
    running = asyncio.create_task(engine.run())
    here = InventoryReceived("north", Inventory(())), Reported("north", ClusterReport(JOBS, JOBS, 0))
    await engine.commit(WorkItem(here))
    jobs = [Job(ident, JobSpec(FlexibleRequest(1), ("program",)), time.time()) for ident in range(1, JOBS + 1)]
    await engine.commit(WorkItem(tuple(JobSubmitted(job) for job in jobs)))
    assert placed == list(range(1, TRIES + 1)), "nobody waits for the others to be placed"
    await engine.commit(WorkItem((JobCancelled(JOBS),)))
    assert len(placed) < JOBS - TRIES, "and who asks for something meanwhile is answered"
    await signals.until(lambda: len(placed) >= JOBS - 1)
    assert placed == list(range(1, JOBS))
    assert not scheduler.is_unfinished
    engine.stop()
    await running
    store.close()


async def test_engine_with_more_events_than_budget_defers_them(tmp_path: Path) -> None:
    store = JobStore(open_database(tmp_path))
    scheduler = Scheduler(SchedulerState(Rules(), builtin_policies(), [ClusterStatus("north")]), nonces=str)

    engine = Engine(scheduler, store, Outbox((), 1), epoch=1, describe=describe_north, take_in_budget_s=0.0)
    jobs = [Job(ident, JobSpec(FlexibleRequest(1), ("program",)), time.time()) for ident in range(1, 21)]
    waiting = [asyncio.create_task(engine.commit(WorkItem((JobSubmitted(job),)))) for job in jobs]
    await asyncio.sleep(0)
    running = asyncio.create_task(engine.run())
    async with asyncio.timeout(DEADLINE):
        await asyncio.gather(*waiting)
    assert engine.instruments.cycles.total.count >= len(jobs)
    assert [job.id for job in store.load().jobs] == [job.id for job in jobs]
    engine.stop()
    await running
    store.close()


class StoreWithoutEpochs(JobStore):
    """A store that cannot write a higher epoch."""

    def raise_epoch(self, epoch: int) -> None:
        raise StoreUnavailable(f"epoch {epoch} is not written")


async def test_engine_epoch_that_is_not_stored_is_not_used(tmp_path: Path) -> None:
    store = StoreWithoutEpochs(open_database(tmp_path))
    scheduler = Scheduler(SchedulerState(Rules(), builtin_policies(), [ClusterStatus("north")]), nonces=str)
    engine = Engine(scheduler, store, Outbox((), 1), epoch=1, describe=describe_north)
    engine.post(WorkItem(epoch=2))
    engine.stop()
    with pytest.raises(StoreUnavailable, match="epoch 2 is not written"):
        await engine.run()
    assert engine.epoch == 1
    assert engine.outbox.new_id() < 2 * 10**9, "commands still have ids of the stored epoch"
    store.close()
