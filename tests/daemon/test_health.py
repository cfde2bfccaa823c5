"""The daemon's health: its disks, and its job counts as stored."""

import asyncio
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from koalapy.daemon.alerts import health as service_health
from koalapy.daemon.alerts.health import HealthMonitor
from koalapy.daemon.engine.engine import WorkItem
from koalapy.model.disk import Disk, DiskLimits
from koalapy.model.job import ComponentState, JobState
from koalapy.model.reports import ClusterReport, ComponentStatus
from koalapy.scheduler.events import ClusterDrained
from koalapy.store.records import Batch
from koalapy.system.clock import SYSTEM_CLOCK
from tests import signals
from tests.daemon.test_hub import DEADLINE, wait_for_state
from tests.daemon.test_jobs import SPEC, job_when, north_and_jobs
from tests.identities import ADA


async def test_health_with_low_disk_is_degraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with north_and_jobs(tmp_path) as (daemon, _, _):
        health = HealthMonitor(daemon.engine, daemon.queries, {"data directory": tmp_path}, DiskLimits())
        free = 10**9
        monkeypatch.setattr(
            service_health, "measure_disks", lambda folders: [Disk("data directory", str(tmp_path), free, 10**12)]
        )
        await health.check_disks()
        problem = f"the disk of its data directory ({tmp_path}) has"
        report = health.make_report()
        assert (report.status, report.ready, report.problems) == ("degraded", True, [f"{problem} 1 GB left"])
        assert report.disks == [Disk("data directory", str(tmp_path), 10**9, 10**12, None)]
        free = 100
        await health.check_disks()
        report = health.make_report()
        assert (report.status, report.ready, report.problems) == ("degraded", False, [f"{problem} 100 bytes left"])
        free = 10**11
        await health.check_disks()
        assert (health.make_report().ready, health.make_report().problems) == (True, [])

        def broken(folders: object) -> list[Disk]:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(service_health, "measure_disks", broken)
        await health.check_disks()
        assert health.make_report().problems == ["the daemon's disks cannot be looked at: Input/output error"]
        assert not health.make_report().ready, "who does not know says no"


async def test_health_with_unwritable_or_silent_disk_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with north_and_jobs(tmp_path) as (daemon, _, _):
        health = HealthMonitor(daemon.engine, daemon.queries, {"data directory": tmp_path}, DiskLimits(0, 0))

        def read_only(folder: Path) -> None:
            raise OSError(30, "Read-only file system")

        with monkeypatch.context() as patched:
            patched.setattr(service_health, "_try_to_write", read_only)
            await health.check_disks()
        problem = f"the disk of its data directory ({tmp_path}) takes no file: Read-only file system"
        assert health.check_readiness().reasons == [problem]
        assert health.check_readiness().status == f"not ready; {problem}"
        answers = threading.Event()
        monkeypatch.setattr(service_health, "_try_to_write", lambda folder: answers.wait(DEADLINE))
        looking = asyncio.create_task(health.check_disks())
        silent = [f"the daemon's disks have not answered for {service_health.DISK_TIMEOUT:g} s"]
        with signals.hanging_threads():
            await signals.until(lambda: health.check_readiness().reasons == silent)
        answers.set()
        await looking
        assert health.check_readiness().ready


async def test_health_with_overdue_lease_or_cycle_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with north_and_jobs(tmp_path) as (daemon, north, _):
        health = HealthMonitor(daemon.engine, daemon.queries, {}, DiskLimits())
        database = daemon.engine.database
        now = time.monotonic()
        monkeypatch.setattr(service_health, "time", SimpleNamespace(monotonic=lambda: now))
        database.lease_renewed_at = SYSTEM_CLOCK.since_boot() - service_health.LEASE_OVERDUE - 1
        assert health.check_readiness().reasons == ["the lease was renewed 11 s ago: another daemon may take over"]
        database.lease_renewed_at = SYSTEM_CLOCK.since_boot()
        assert health.check_readiness().ready
        writes, may_write = threading.Event(), threading.Event()
        monkeypatch.setattr(daemon.store, "write", lambda batch: writes.set() or may_write.wait(DEADLINE))
        north.say_to_daemon(ClusterReport(total=3, idle=3))
        daemon.engine.post(WorkItem(events=(ClusterDrained("south", "ops", ""),)))
        await signals.until(writes.is_set)
        assert daemon.engine.cycle_started_at is not None
        now = daemon.engine.cycle_started_at + service_health.ROUND_TIMEOUT
        assert health.check_readiness().reasons == ["a round of the engine does not end since 3 s"]
        may_write.set()
        await signals.until(lambda: health.check_readiness().ready)
        database.lease_lost = True
        assert health.check_readiness().reasons == ["another daemon has taken over"]
        daemon.engine.draining = True
        assert health.check_readiness().reasons == ["another daemon has taken over", "the daemon is ending"]


async def test_health_of_cluster_without_report_is_a_fault(tmp_path: Path) -> None:
    async with north_and_jobs(tmp_path) as (daemon, _, _):
        health = HealthMonitor(daemon.engine, daemon.queries, {}, DiskLimits())
        checks = {(check.name, check.cluster): check for check in health.check_readiness().checks}
        assert checks["agent", "south"].reason == "its agent has not connected yet"
        assert checks["resource manager", "south"].reason == "nothing is known of it while the agent is away"
        assert checks["agent", "north"].ok
        assert (health.check_readiness().ready, health.check_readiness(of_clusters=True).ready) == (True, False)
        strangers = health.check_readiness().for_strangers()
        assert {check.reason for check in strangers.checks} == {"", service_health.FOR_USERS}
        assert [check.ok for check in strangers.checks] == [check.ok for check in health.check_readiness().checks]


@pytest.mark.evidence("N6")
async def test_health_for_strangers_names_neither_paths_nor_versions(tmp_path: Path) -> None:
    async with north_and_jobs(tmp_path) as (daemon, _, _):
        health = HealthMonitor(daemon.engine, daemon.queries, {"data directory": tmp_path}, DiskLimits())
        await health.check_disks()
        daemon.engine.database.note_failure("writer", f"{tmp_path} is locked")
        report = health.make_report()
        assert report.version
        assert report.disks
        assert str(tmp_path) in str(report.problems)
        strangers = asdict(report.for_strangers())
        assert (strangers.pop("status"), strangers.pop("ready")) == (report.status, report.ready)
        assert strangers.pop("problems") == [service_health.FOR_USERS]
        assert not any(strangers.values())
        reasons = {check.reason for check in health.check_readiness().for_strangers().checks}
        assert reasons == {"", service_health.FOR_USERS}


async def test_disks_reported_by_agents_are_shown(tmp_path: Path) -> None:
    async with north_and_jobs(tmp_path) as (daemon, north, _):
        disk = Disk("spool", "/s", 5, 10)
        north.say_to_daemon(
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
        await wait_for_state(daemon, "north", ("unreachable", 4, "full"))
        assert daemon.scheduler.queries.grid["north"].last_report.disks == (disk,)


async def test_job_counts_follow_job_states(tmp_path: Path) -> None:
    async with north_and_jobs(tmp_path) as (daemon, _, jobs):
        health = HealthMonitor(daemon.engine, daemon.queries, {}, DiskLimits())

        def counts() -> tuple[int, int]:
            return health.make_report().queued, health.make_report().active

        for ident, expected in enumerate([(0, 1), (0, 2), (1, 2)], 1):
            await jobs.submit(SPEC, ADA)
            assert counts() == expected, ident
        await jobs.hold(3, ADA, "")
        assert counts() == (0, 2)
        await jobs.release(3, ADA)
        assert counts() == (1, 2)
        await jobs.cancel(3, ADA, "")
        assert counts() == (0, 2)


async def test_job_counts_follow_stored_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with north_and_jobs(tmp_path) as (daemon, north, jobs):
        health = HealthMonitor(daemon.engine, daemon.queries, {}, DiskLimits())
        await jobs.submit(SPEC, ADA)
        assert health.make_report().queued == 0
        assert health.make_report().active == 1
        await job_when(jobs, JobState.CLAIMING, 1)
        north.say_to_daemon(ComponentStatus(token="1.1.0.fa", state=ComponentState.CLAIMED, hosts=("a", "b")))
        await job_when(jobs, JobState.STARTING, 1)
        real, may_write = daemon.store.write, threading.Event()

        def slow(batch: Batch) -> None:
            assert may_write.wait(DEADLINE)
            real(batch)

        monkeypatch.setattr(daemon.store, "write", slow)
        north.say_to_daemon(
            ComponentStatus(token="1.1.0.fa", state=ComponentState.ENDED, hosts=("a", "b"), program_exit=0)
        )
        await signals.until(lambda: daemon.scheduler.queries.job(1) is None)
        assert not (await jobs.get(1)).job.state.is_final, "that is what anybody reads"
        assert health.make_report().active == 1
        may_write.set()
        await signals.until(lambda: not health.make_report().active)
        assert (await jobs.get(1)).job.state is JobState.SUCCEEDED


async def test_readiness_is_false_while_folder_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "output"
    folder.mkdir()
    async with north_and_jobs(tmp_path) as (daemon, _, _):
        health = HealthMonitor(daemon.engine, daemon.queries, {"output": folder}, DiskLimits(0, 0))
        await health.check_disks()
        assert health.check_readiness().ready
        folder.rename(tmp_path / "before")
        await health.check_disks()
        assert f"its output ({folder}) was removed while the daemon uses it" in health.make_report().problems
        folder.mkdir()
        await health.check_disks()
        assert health.check_readiness().reasons == [f"its output ({folder}) was replaced while the daemon uses it"]
        folder.rmdir()
        (tmp_path / "before").rename(folder)
        await health.check_disks()
        assert health.check_readiness().ready
