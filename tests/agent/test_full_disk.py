"""Disks that are low, full or silent: reports, and what is not begun."""

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.components.component import Component
from koalapy.agent.core import reporter
from koalapy.agent.core import spool as spool_module
from koalapy.agent.core.spool import DamagedJournal, DiskSync, JournalFolder, Spool
from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.model.disk import LOW_FILES, MIN_FILES, Disk, DiskLimits
from koalapy.system.files import measure_disks
from tests.agent.conftest import FakeDaemon, Site
from tests.agent.memory_agent import serving
from tests.agent.memory_lrm import MemoryLrm
from tests.agent.played_runner import claim
from tests.signals import hanging_threads

T = "7.1.0"
DEADLINE = 30.0


class FullDisk:
    """Folders in which nothing can be written while there is no room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        write, make = JournalFolder.write_entry, Spool.make_folder

        def checked_write(folder: JournalFolder, **entry: Any) -> None:
            self._check()
            write(folder, **entry)

        def checked_make(spool: Spool, instance: str, token: str) -> JournalFolder:
            self._check()
            return make(spool, instance, token)

        monkeypatch.setattr(JournalFolder, "write_entry", checked_write)
        monkeypatch.setattr(Spool, "make_folder", checked_make)

    def _check(self) -> None:
        if self.full:
            raise OSError(28, "No space left on device")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def acknowledged(daemon: FakeDaemon, ident: int) -> bool:
    return any(ack["id"] == ident and not ack["error"] for ack in daemon.received("ack"))


async def test_component_not_written_down_fails_naming_disk(disk: FullDisk, daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(MemoryLrm(), daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        disk.full = True
        await daemon.submit(T)
        status = await daemon.reaches(T, "ended")
        assert status["infrastructure"]
        assert str(tmp_path) in status["error"]
        assert "No space left on device (disk of /" in status["error"]
        assert len(daemon.inventories) == 1, "the connection is as good as before"
        disk.full = False
        daemon.messages.clear()
        await claim(daemon, tmp_path)
        disk.full = True
        await daemon.open(["true"], T)
        await daemon.wait_until(lambda: "No space left" in daemon.status(T)["error"])


async def test_full_disk_is_cluster_problem_before_failure(disk: FullDisk, daemon: FakeDaemon, tmp_path: Path) -> None:
    """So the daemon sends no further component there, and jobs keep their restarts."""
    async with serving(MemoryLrm(), daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        disk.full = True
        await daemon.submit(T)
        await daemon.reaches(T, "ended")
        kinds = [message for message in daemon.messages if message["type"] in ("report", "status")]
        failed = next(place for place, message in enumerate(kinds) if message.get("error"))
        told = [message["problem"] for message in kinds[:failed] if message["type"] == "report"]
        assert "No space left on device" in told[-1]
        disk.full = False
        daemon.messages.clear()
        await claim(daemon, tmp_path)
        await daemon.wait_until(lambda: not daemon.report().get("problem", "none yet"))


async def test_stop_is_acknowledged_once_written(disk: FullDisk, daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(lrm := MemoryLrm(), daemon, tmp_path):
        runner = await claim(daemon, tmp_path)
        disk.full = True
        known = await daemon.command("stop", T, reason="test")
        unknown = await daemon.command("stop", "8.1.0", reason="test")
        await runner.receive("stop")
        runner.writer.close()
        lrm.end("1")
        lrm.changed.set()
        await daemon.reaches(T, "ended")
        assert not acknowledged(daemon, known)
        disk.full = False
        await daemon.wait_until(lambda: acknowledged(daemon, known) and acknowledged(daemon, unknown))
    journal = JournalFolder(tmp_path / "test" / T).load_entries()
    assert journal["stop"] == "test"
    assert journal["end"]["hosts"]
    assert JournalFolder(tmp_path / "test" / "8.1.0").load_entries()["stop"] == "test"


@pytest.mark.processes
async def test_unsynced_record_has_no_effect(monkeypatch: pytest.MonkeyPatch, site: Site, daemon: FakeDaemon) -> None:
    """Neither a job in the resource manager, nor a word to the daemon, nor a program."""
    real, room = spool_module.sync_path, threading.Event()
    waiting = threading.Event()

    def slow(path: Path) -> None:
        waiting.set()
        assert room.wait(DEADLINE)
        real(path)

    monkeypatch.setattr(spool_module, "sync_path", slow)
    lrm = LocalLrm(site.cluster, "koala-")
    await lrm.open()
    submitted = await daemon.submit(T)
    assert await asyncio.to_thread(waiting.wait, DEADLINE)
    assert ((await lrm.take_snapshot()).jobs, daemon.received("ack")) == ((), [])
    await lrm.close()
    room.set()
    await daemon.reaches(T, "claimed")
    assert acknowledged(daemon, submitted)
    room.clear(), waiting.clear()
    go = site.settings.directory / "ran"
    await daemon.open(["touch", str(go)], T)
    assert await asyncio.to_thread(waiting.wait, DEADLINE)
    assert not go.exists()
    room.set()
    await daemon.reaches(T, "ended")
    assert go.exists()


async def test_waiting_for_the_disk_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(spool_module, "sync_path", synced.append)
    together = DiskSync()
    files = [tmp_path / str(number) for number in range(20)]
    for path in files:
        together.mark_written(path)
    await asyncio.gather(*(together.wait_synced() for _ in range(20)))
    assert sorted(synced) == sorted(files), "each once"
    await together.wait_synced()
    assert len(synced) == 20, "nothing was written since"


async def test_late_disk_error_is_raised_in_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shared file system does, which finds only then that there is no room."""

    def refuse(path: Path) -> None:
        if path.name == "journal":
            raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(spool_module, "sync_path", refuse)
    spool = Spool(tmp_path)
    folder, other = spool.make_folder("test", T), spool.make_folder("test", "8.1.0")
    folder.write_entry(stop="x")
    with pytest.raises(OSError, match="quota"):
        await folder.wait_synced()
    await other.wait_synced()
    await spool.disk_sync.wait_synced()
    folder.remove_folder()
    await folder.wait_synced()


# Torn folders

RAN = {"code": 3, "error": "", "infrastructure": False, "stopped": False, "host": "127.0.1.1", "name": "n1"}
PLAN = {"launcher": "processes", "head": T, "nodes": [], "contexts": []}
END = {"exit_code": 3, "error": "", "infrastructure": False, "hosts": ["127.0.1.1"]}
ENTRIES: list[dict[str, object]] = [
    {"submit": {"size": 1, "walltime": None, "name": "x", "stage": None, "collect": []}},
    {"lrm": "77"},
    {"open": PLAN},
    {"stop": "enough"},
    {"end": END},
    {"collected": True},
]


@given(
    st.integers(0, len(ENTRIES)),
    st.booleans(),
    st.sampled_from(["journal", "result.0.json", "output"]),
    st.floats(0, 1),
    st.binary(max_size=3),
)
def test_folder_truncated_anywhere_loads_nothing_false(
    tmp_path_factory: pytest.TempPathFactory, count: int, ran: bool, torn: str, where: float, noise: bytes
) -> None:
    path = tmp_path_factory.mktemp("spool")
    folder = JournalFolder(path, DiskSync())
    for entry in ENTRIES[:count]:
        folder.write_entry(**entry)
    if ran:
        (path / "result.0.json").write_text(json.dumps(RAN))
    (path / "output").write_bytes(b"0123456789")
    if (path / torn).exists():
        whole = (path / torn).read_bytes()
        (path / torn).write_bytes(whole[: int(where * len(whole))] + noise)
    try:
        found = Component.load_journal("test", T, folder)
    except DamagedJournal:
        assert torn == "journal"
        assert noise
        return
    assert found.size in (0, 1)
    assert found.lrm_job in (None, "77")
    assert found.plan in (None, PLAN)
    assert found.exit_code in (None, 3)
    assert found.error == ""
    assert found.ended <= (count >= 5)
    found.on_job_ended(None)
    assert found.ended
    assert found.exit_code == 3 or found.stop is not None or found.error or not ran or found.plan is None
    # What comes afterwards is read whatever was torn before it.
    folder.write_entry(stop="later")
    assert folder.load_entries()["stop"] == "later"


def test_truncated_result_is_ignored(tmp_path: Path) -> None:
    folder = JournalFolder(tmp_path)
    for text in ("3", "[]", "{}", json.dumps({"code": 0})):
        (tmp_path / "result.0.json").write_text(text)
        assert folder.read_result(0) is None


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
def test_disk_limits_define_low_disks(disk: Disk, low: bool, full: bool) -> None:
    assert (LIMITS.is_low(disk), LIMITS.is_full(disk)) == (low, full)
    assert not DiskLimits(0, 0).is_low(disk)
    assert not DiskLimits(0, 0).is_full(disk)


@given(st.integers(0, 10**15))
def test_disk_text_changes_seldom(free: int) -> None:
    assert str(Disk("spool", "/s", free, 10**15)) == str(Disk("spool", "/s", free, 10**15, 10**6))
    assert len(str(Disk("spool", "/s", free, 10**15))) < 60


def test_folders_on_one_disk_are_reported_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (found,) = measure_disks({"spool": tmp_path / "a", "stages": tmp_path / "not" / "there" / "yet"})
    assert (found.what, found.path) == ("spool", str(tmp_path / "a"))
    assert 0 < found.free <= found.size


class Room:
    """What a disk says that it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 100 * GB
        monkeypatch.setattr(
            reporter, "measure_disks", lambda folders: [Disk("spool", "/the/spool", self.free, 1000 * GB)]
        )


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    return Room(monkeypatch)


async def test_disk_is_reported_low_then_full_then_free(room: Room, tmp_path: Path, daemon: FakeDaemon) -> None:
    async with serving(MemoryLrm(), daemon, tmp_path):
        await daemon.wait_until(lambda: daemon.report().get("disks", []) != [])
        assert (daemon.report()["notices"], daemon.report()["problem"]) == ([], "")
        room.free = 500 * MB
        words = "the disk of its spool (/the/spool) has 500 MB left"
        await daemon.wait_until(lambda: daemon.report()["notices"] == [words])
        assert daemon.report()["problem"] == ""
        room.free = 3 * MB
        await daemon.wait_until(
            lambda: daemon.report()["problem"] == "the disk of its spool (/the/spool) has 3 MB left"
        )
        assert daemon.report()["notices"] == []
        assert daemon.report()["total"] == 2, "what runs goes on, and is counted"
        room.free = 100 * GB
        await daemon.wait_until(lambda: (daemon.report()["problem"], daemon.report()["notices"]) == ("", []))


async def test_agent_on_full_disk_writes_address_later(
    tmp_path: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, full, address = os.replace, True, tmp_path / "agent.json"

    def no_room(source: Path, target: Path) -> None:
        if full and Path(target) == address:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", no_room)
    async with serving(MemoryLrm(), daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        assert not address.exists()
        full = False
        await daemon.wait_until(address.exists)
        await claim(daemon, tmp_path)


async def test_silent_disk_is_reported(tmp_path: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file server that is away."""
    reading, writing = os.pipe()
    monkeypatch.setattr(reporter, "measure_disks", lambda folders: os.read(reading, 1) and [])
    async with serving(MemoryLrm(), daemon, tmp_path):
        with hanging_threads():
            await daemon.wait_until(lambda: "has not answered" in daemon.report().get("problem", ""))
        os.write(writing, b"x" * 1000)
        await daemon.wait_until(lambda: daemon.report()["problem"] == "")
        monkeypatch.setattr(reporter, "measure_disks", lambda folders: [])
    os.close(writing)
    os.close(reading)
