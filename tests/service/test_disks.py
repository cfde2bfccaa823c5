"""The daemon's own disks, as its health tells them."""

from pathlib import Path

import pytest

from koalapy.model.disk import Disk, DiskLimits
from koalapy.model.reports import ClusterReport
from koalapy.service import disks
from koalapy.service.disks import DiskWatch
from koalapy.service.jobs import Jobs
from tests.service.test_hub import until
from tests.service.test_jobs import north_and_jobs


async def test_health_tells_of_a_disk_that_is_low(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with north_and_jobs(tmp_path) as (_, _, jobs):
        assert isinstance(jobs, Jobs)
        jobs.disks = watch = DiskWatch({"data directory": tmp_path}, DiskLimits())
        free = 100
        monkeypatch.setattr(disks, "look", lambda folders: [Disk("data directory", "/d", free, 10**12)])
        await watch.look()
        words = "the disk of its data directory (/d) has 100 bytes left"
        health = jobs.health()
        assert (health["status"], health["ready"], health["problems"]) == ("degraded", True, [words])
        assert health["disks"] == [{"what": "data directory", "path": "/d", "free": 100, "size": 10**12, "files": None}]
        free = 10**11
        await watch.look()
        assert jobs.health()["problems"] == []

        def broken(folders: object) -> list[Disk]:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(disks, "look", broken)
        await watch.look()
        assert jobs.health()["problems"] == ["the daemon's disks cannot be looked at: Input/output error"]


async def test_what_agents_say_of_their_disks_is_in_the_book(tmp_path: Path) -> None:
    async with north_and_jobs(tmp_path) as (daemon, north, _):
        disk = Disk("spool", "/s", 5, 10)
        north.says(
            ClusterReport(
                total=4,
                idle=4,
                background=0,
                down=0,
                holding=[],
                problem="full",
                disks=(Disk(what="spool", path="/s", free=5, size=10),),
            )
        )
        await until(daemon, "north", ("unreachable", 4, "full"))
        assert daemon.scheduler.grid["north"].disks == (disk,)
