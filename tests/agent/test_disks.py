"""Room on an agent's disks: what is low is told, and where there is none nothing is started until there is again."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.core import disks
from koalapy.model.disk import LOW_FILES, MIN_FILES, Disk, DiskLimits
from koalapy.system.limits import disks_of
from tests.agent.conftest import FakeDaemon
from tests.agent.memory_agent import serving
from tests.agent.memory_lrm import MemoryLrm
from tests.agent.played_runner import claim
from tests.signals import hanging_threads

LIMITS = DiskLimits()
GB, MB = 10**9, 10**6


@pytest.mark.parametrize(
    ("disk", "low", "full"),
    [
        (Disk("spool", "/s", 500 * GB, 1000 * GB, 10**6), False, False),
        (Disk("spool", "/s", 1 * GB, 1000 * GB, 10**6), True, False),
        (Disk("spool", "/s", 60 * MB, 1000 * GB, 10**6), True, True),
        (Disk("spool", "/s", 60 * MB, 100 * MB, 10**6), False, False),
        (Disk("spool", "/s", 4 * MB, 100 * MB, 10**6), True, False),
        (Disk("spool", "/s", 0, 100 * MB, 10**6), True, True),
        (Disk("spool", "/s", 500 * GB, 1000 * GB, LOW_FILES - 1), True, False),
        (Disk("spool", "/s", 500 * GB, 1000 * GB, MIN_FILES - 1), True, True),
        (Disk("spool", "/s", 500 * GB, 1000 * GB, None), False, False),
        (Disk("spool", "/s", 0, 0, None), False, False),
    ],
)
def test_when_a_disk_is_low(disk: Disk, low: bool, full: bool) -> None:
    assert (LIMITS.is_low(disk), LIMITS.is_full(disk)) == (low, full)
    assert not DiskLimits(0, 0).is_low(disk)
    assert not DiskLimits(0, 0).is_full(disk)


@given(st.integers(0, 10**15))
def test_what_is_said_of_a_disk_changes_seldom(free: int) -> None:
    assert str(Disk("spool", "/s", free, 10**15)) == str(Disk("spool", "/s", free, 10**15, 10**6))
    assert len(str(Disk("spool", "/s", free, 10**15))) < 60


def test_of_folders_on_one_disk_the_first_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (found,) = disks_of({"spool": tmp_path / "a", "stages": tmp_path / "not" / "there" / "yet"})
    assert (found.what, found.path) == ("spool", str(tmp_path / "a"))
    assert 0 < found.free <= found.size


class Room:
    """What a disk says that it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 100 * GB
        monkeypatch.setattr(disks, "disks_of", lambda folders: [Disk("spool", "/the/spool", self.free, 1000 * GB)])


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    return Room(monkeypatch)


async def test_disk_is_reported_low_then_full_then_free(room: Room, tmp_path: Path, daemon: FakeDaemon) -> None:
    async with serving(MemoryLrm(), daemon, tmp_path):
        await daemon.until(lambda: daemon.report().get("disks", []) != [])
        assert (daemon.report()["notices"], daemon.report()["problem"]) == ([], "")
        room.free = 500 * MB
        words = "the disk of its spool (/the/spool) has 500 MB left"
        await daemon.until(lambda: daemon.report()["notices"] == [words])
        assert daemon.report()["problem"] == ""
        room.free = 3 * MB
        await daemon.until(lambda: daemon.report()["problem"] == "the disk of its spool (/the/spool) has 3 MB left")
        assert daemon.report()["notices"] == []
        assert daemon.report()["total"] == 2, "what runs goes on, and is counted"
        room.free = 100 * GB
        await daemon.until(lambda: (daemon.report()["problem"], daemon.report()["notices"]) == ("", []))


async def test_an_agent_starts_on_a_full_disk_and_tells_runners_where_it_is_when_there_is_room(
    tmp_path: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, full, address = os.replace, True, tmp_path / "agent.json"

    def no_room(source: Path, target: Path) -> None:
        if full and Path(target) == address:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", no_room)
    async with serving(MemoryLrm(), daemon, tmp_path):
        await daemon.until(lambda: bool(daemon.inventories))
        assert not address.exists()
        full = False
        await daemon.until(address.exists)
        await claim(daemon, tmp_path)


async def test_silent_disk_is_reported(tmp_path: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file server that is away."""
    reading, writing = os.pipe()
    monkeypatch.setattr(disks, "disks_of", lambda folders: os.read(reading, 1) and [])
    async with serving(MemoryLrm(), daemon, tmp_path):
        with hanging_threads():
            await daemon.until(lambda: "has not answered" in daemon.report().get("problem", ""))
        os.write(writing, b"x" * 1000)
        await daemon.until(lambda: daemon.report()["problem"] == "")
        monkeypatch.setattr(disks, "disks_of", lambda folders: [])
    os.close(writing)
    os.close(reading)
