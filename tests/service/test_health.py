"""The daemon's health: its disks, and its jobs as they are stored: who goes by that finds none to be otherwise."""

import asyncio
import threading
from pathlib import Path

import pytest

from koalapy.model.disk import Disk, DiskLimits
from koalapy.model.job import ComponentState, JobState
from koalapy.model.reports import ClusterReport, ComponentStatus
from koalapy.ports import Batch
from koalapy.service import health as service_health
from koalapy.service.health import HealthMonitor
from tests.identities import ADA
from tests.service.test_hub import DEADLINE, until
from tests.service.test_jobs import SPEC, job_when, north_and_jobs


async def test_health_tells_of_a_disk_that_is_low(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with north_and_jobs(tmp_path) as (daemon, _, _):
        health = HealthMonitor(daemon.engine, {"data directory": tmp_path}, DiskLimits())
        free = 100
        monkeypatch.setattr(service_health, "disks_of", lambda folders: [Disk("data directory", "/d", free, 10**12)])
        await health.look_at_disks()
        words = "the disk of its data directory (/d) has 100 bytes left"
        report = health.report()
        assert (report.status, report.ready, report.problems) == ("degraded", True, [words])
        assert report.disks == [Disk("data directory", "/d", 100, 10**12, None)]
        free = 10**11
        await health.look_at_disks()
        assert health.report().problems == []

        def broken(folders: object) -> list[Disk]:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(service_health, "disks_of", broken)
        await health.look_at_disks()
        assert health.report().problems == ["the daemon's disks cannot be looked at: Input/output error"]


async def test_what_agents_say_of_their_disks_is_in_the_book(tmp_path: Path) -> None:
    async with north_and_jobs(tmp_path) as (daemon, north, _):
        disk = Disk("spool", "/s", 5, 10)
        north.says(
            ClusterReport(
                total=4,
                idle=4,
                background=0,
                down=0,
                holding=frozenset(),
                problem="full",
                disks=(Disk(what="spool", path="/s", free=5, size=10),),
            )
        )
        await until(daemon, "north", ("unreachable", 4, "full"))
        assert daemon.scheduler.queries.grid["north"].disks == (disk,)


async def test_jobs_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    async with north_and_jobs(tmp_path) as (daemon, _, jobs):
        health = HealthMonitor(daemon.engine, {}, DiskLimits())

        def counts() -> tuple[int, int]:
            return health.report().queued, health.report().active

        for ident, wanted in enumerate([(0, 1), (0, 2), (1, 2)], 1):
            await jobs.submit(SPEC, ADA)
            assert counts() == wanted, ident
        await jobs.hold(3, ADA, "")
        assert counts() == (0, 2)
        await jobs.release(3, ADA)
        assert counts() == (1, 2)
        await jobs.cancel(3, ADA, "")
        assert counts() == (0, 2)


async def test_an_end_counts_when_it_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with north_and_jobs(tmp_path) as (daemon, north, jobs):
        health = HealthMonitor(daemon.engine, {}, DiskLimits())
        await jobs.submit(SPEC, ADA)
        assert health.report().queued == 0
        assert health.report().active == 1
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
            while daemon.scheduler.queries.job(1) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert not (await jobs.get(1)).job.state.is_final, "that is what anybody reads"
        assert (health.report().active, (await jobs.metrics(60.0)).active) == (1, 1)
        may_write.set()
        async with asyncio.timeout(DEADLINE):
            while health.report().active:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (await jobs.get(1)).job.state is JobState.SUCCEEDED
        assert (await jobs.metrics(60.0)).active == 0
