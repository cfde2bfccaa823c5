"""The counts of jobs are those of what is stored, so that who goes by them finds no job to be otherwise."""

import asyncio
import threading
from pathlib import Path

import pytest

from koalapy.model.job import ComponentState, Job, JobSpec, JobState
from koalapy.model.reports import ComponentStatus
from koalapy.model.request import FlexibleRequest
from koalapy.ports import Batch
from koalapy.service.tally import Tally
from tests.service.test_hub import DEADLINE
from tests.service.test_jobs import SPEC, job_when, north_and_jobs


def job(ident: int, state: JobState) -> Job:
    return Job(ident, JobSpec(FlexibleRequest(1), ("true",)), 1.0, state)


def test_jobs_are_counted_by_what_became_of_them() -> None:
    tally = Tally([job(1, JobState.QUEUED), job(2, JobState.RUNNING), job(3, JobState.HELD)])
    assert (tally.queued, tally.active) == (1, 1)
    tally.update([job(1, JobState.PLACED), job(4, JobState.QUEUED), job(5, JobState.UNKNOWN)])
    assert (tally.queued, tally.active) == (1, 3)
    tally.update([job(1, JobState.SUCCEEDED), job(2, JobState.QUEUED), job(4, JobState.CANCELLED)])
    tally.update([job(1, JobState.SUCCEEDED), job(6, JobState.FAILED)])
    assert (tally.queued, tally.active) == (1, 1)


async def test_an_end_counts_when_it_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with north_and_jobs(tmp_path) as (daemon, north, jobs):
        await jobs.submit(SPEC)
        assert jobs.health()["queued"] == 0
        assert jobs.health()["active"] == 1
        await job_when(jobs, JobState.CLAIMING, 1)
        north.says(ComponentStatus(token="1.1.0.fa", state=ComponentState.CLAIMED, hosts=("a", "b")))
        await job_when(jobs, JobState.STARTING, 1)
        real, may_write = daemon.store.write, threading.Event()

        def slow(batch: Batch) -> None:
            assert may_write.wait(DEADLINE)
            real(batch)

        monkeypatch.setattr(daemon.store, "write", slow)
        north.says(ComponentStatus(token="1.1.0.fa", state=ComponentState.ENDED, hosts=("a", "b"), program_exit=0))
        async with asyncio.timeout(DEADLINE):
            while daemon.scheduler.job(1) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert not (await jobs.get(1)).job.state.is_final, "that is what anybody reads"
        assert (jobs.health()["active"], (await jobs.metrics(60.0)).active) == (1, 1)
        may_write.set()
        async with asyncio.timeout(DEADLINE):
            while jobs.health()["active"]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (await jobs.get(1)).job.state is JobState.SUCCEEDED
        assert (await jobs.metrics(60.0)).active == 0
