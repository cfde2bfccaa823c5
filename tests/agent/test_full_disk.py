"""Disks that are low, full or silent: reports, and rejected work."""

import asyncio
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.components.component import Component
from koalapy.agent.components.outputlog import OutputLog
from koalapy.agent.core import reporter
from koalapy.agent.core import spool as spool_module
from koalapy.agent.core.spool import DamagedJournal, DiskSync, JournalFolder, Spool
from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.model.disk import LOW_FILES, MIN_FILES, Disk, DiskLimits
from koalapy.runner.folders import make_folder
from koalapy.system.files import measure_disks
from tests.agent.conftest import FakeDaemon, Site
from tests.agent.fake_runner import claim_component
from tests.agent.memory_agent import running_agent
from tests.agent.memory_lrm import MemoryLrm
from tests.signals import hanging_threads, pass_time

T = "7.1.0"
DEADLINE = 30.0


class FullDisk:
    """Makes all writes to journal folders fail while `full` is set."""

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


def is_acknowledged(daemon: FakeDaemon, ident: int) -> bool:
    return any(ack["id"] == ident and not ack["error"] for ack in daemon.received("ack"))


async def test_ended_program_is_over_while_its_output_cannot_be_stored(
    monkeypatch: pytest.MonkeyPatch, daemon: FakeDaemon, agent: Path
) -> None:
    """Else its walltime or a drain could end a program that has ended."""
    runner = await claim_component(daemon, agent)
    await daemon.open_barrier(["true"], T)
    await runner.receive("open")
    runner.send(t="running")
    await daemon.wait_for_state(T, "running")
    monkeypatch.setattr(OutputLog, "_store_lines", lambda *_, **__: False)
    runner.send(t="exit", code=0, error="", infrastructure=False, stopped=False)
    await daemon.wait_until(lambda: daemon.status(T)["over"])


async def test_unrecorded_component_fails_naming_disk(disk: FullDisk, daemon: FakeDaemon, agent: Path) -> None:
    disk.full = True
    await daemon.submit_component(T)
    status = await daemon.wait_for_state(T, "ended")
    assert status["infrastructure"]
    assert str(agent) in status["error"]
    assert "No space left on device (disk of /" in status["error"]
    assert len(daemon.inventories) == 1, "the connection stays open"
    disk.full = False
    daemon.messages.clear()
    await claim_component(daemon, agent)
    disk.full = True
    await daemon.open_barrier(["true"], T)
    await daemon.wait_until(lambda: "No space left" in daemon.status(T)["error"])


async def test_runner_is_kept_until_its_result_is_recorded(disk: FullDisk, daemon: FakeDaemon, agent: Path) -> None:
    runner = await claim_component(daemon, agent)
    await daemon.open_barrier(["true"], T)
    await runner.receive("open")
    disk.full = True
    exiting = asyncio.create_task(runner.report_exit())
    await daemon.wait_until(lambda: daemon.status(T)["over"])
    await pass_time(5.0)
    assert not exiting.done()
    disk.full = False
    await exiting
    assert "result.0" in JournalFolder(agent / "test" / T).load_entries()


async def test_full_disk_is_cluster_problem_before_failure(disk: FullDisk, daemon: FakeDaemon, agent: Path) -> None:
    """The daemon then sends no further component there, and jobs keep their restarts."""
    disk.full = True
    await daemon.submit_component(T)
    await daemon.wait_for_state(T, "ended")
    messages = [message for message in daemon.messages if message["type"] in ("report", "status")]
    failed = next(index for index, message in enumerate(messages) if message.get("error"))
    problems = [message["problem"] for message in messages[:failed] if message["type"] == "report"]
    assert "No space left on device" in problems[-1]
    disk.full = False
    daemon.messages.clear()
    await claim_component(daemon, agent)
    await daemon.wait_until(lambda: not daemon.report().get("problem", "none yet"))


async def test_stop_is_acknowledged_once_written(disk: FullDisk, daemon: FakeDaemon, tmp_path: Path) -> None:
    async with running_agent(lrm := MemoryLrm(), daemon, tmp_path):
        runner = await claim_component(daemon, tmp_path)
        disk.full = True
        stopped = await daemon.send_command("stop", T, reason="test")
        unknown = await daemon.send_command("stop", "8.1.0", reason="test")
        await runner.receive("stop")
        runner.writer.close()
        lrm.end_job("1")
        lrm.changed.set()
        await daemon.wait_for_state(T, "ended")
        assert not is_acknowledged(daemon, stopped)
        disk.full = False
        await daemon.wait_until(lambda: is_acknowledged(daemon, stopped) and is_acknowledged(daemon, unknown))
    journal = JournalFolder(tmp_path / "test" / T).load_entries()
    assert journal["stop"] == "test"
    assert journal["end"]["hosts"]
    assert JournalFolder(tmp_path / "test" / "8.1.0").load_entries()["stop"] == "test"


async def test_agent_without_temporary_folder_serves_and_removes_left_folders(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python finds no folder for temporary files while all are full."""

    def fail() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    (base := tmp_path / "tmp").mkdir()
    os.close(make_folder(str(base), T, 0)[1])
    async with running_agent(MemoryLrm(), daemon, tmp_path / "agent", environment={"TMPDIR": str(base)}):
        await daemon.wait_until(lambda: not os.listdir(base))


@pytest.mark.processes
async def test_unsynced_record_has_no_effect(monkeypatch: pytest.MonkeyPatch, site: Site, daemon: FakeDaemon) -> None:
    """Before the sync, no job is submitted, nothing is acknowledged and no program starts."""
    sync_path, has_space = spool_module.sync_path, threading.Event()
    is_syncing = threading.Event()

    def sync_slowly(path: Path) -> None:
        is_syncing.set()
        assert has_space.wait(DEADLINE)
        sync_path(path)

    monkeypatch.setattr(spool_module, "sync_path", sync_slowly)
    lrm = LocalLrm(site.cluster, "koala-")
    await lrm.open()
    submitted = await daemon.submit_component(T)
    assert await asyncio.to_thread(is_syncing.wait, DEADLINE)
    assert ((await lrm.take_snapshot()).jobs, daemon.received("ack")) == ((), [])
    await lrm.close()
    has_space.set()
    await daemon.wait_for_state(T, "claimed")
    assert is_acknowledged(daemon, submitted)
    has_space.clear(), is_syncing.clear()
    marker = site.settings.directory / "ran"
    await daemon.open_barrier(["touch", str(marker)], T)
    assert await asyncio.to_thread(is_syncing.wait, DEADLINE)
    assert not marker.exists()
    has_space.set()
    await daemon.wait_for_state(T, "ended")
    assert marker.exists()


async def test_disk_syncs_of_several_writers_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(spool_module, "sync_path", synced.append)
    disk_sync = DiskSync()
    files = [tmp_path / str(number) / name for number in range(10) for name in ("journal", "stream.0")]
    for path in files:
        disk_sync.mark_written(path)
    await asyncio.gather(*(disk_sync.wait_synced() for _ in range(20)))
    assert sorted(synced) == sorted(files), "each file is synced once"
    assert {path.name for path in synced[:10]} == {"stream.0"}, "journals follow what they record"
    await disk_sync.wait_synced()
    assert len(synced) == 20, "nothing was written since then"


async def test_late_disk_error_is_raised_in_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared file system may report a lack of space only at the sync."""

    def raise_quota_error(path: Path) -> None:
        if path.name == "journal":
            raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(spool_module, "sync_path", raise_quota_error)
    spool = Spool(tmp_path)
    folder, other_folder = spool.make_folder("test", T), spool.make_folder("test", "8.1.0")
    folder.write_entry(stop="x")
    with pytest.raises(OSError, match="quota"):
        await folder.wait_synced()
    await other_folder.wait_synced()
    await spool.disk_sync.wait_synced()
    folder.remove_folder()
    await folder.wait_synced()


# Truncated folders

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
def test_truncated_folder_loads_no_false_state(
    tmp_path_factory: pytest.TempPathFactory, count: int, ran: bool, torn: str, fraction: float, noise: bytes
) -> None:
    path = tmp_path_factory.mktemp("spool")
    folder = JournalFolder(path, DiskSync())
    for entry in ENTRIES[:count]:
        folder.write_entry(**entry)
    if ran:
        (path / "result.0.json").write_text(json.dumps(RAN))
    (path / "output").write_bytes(b"0123456789")
    if (path / torn).exists():
        content = (path / torn).read_bytes()
        (path / torn).write_bytes(content[: int(fraction * len(content))] + noise)
    try:
        component = Component.load_journal("test", T, folder)
    except DamagedJournal:
        assert torn == "journal"
        assert noise
        return
    assert component.size in (0, 1)
    assert component.lrm_job in (None, "77")
    assert component.plan in (None, PLAN)
    assert component.exit_code in (None, 3)
    assert component.error == ""
    assert component.ended <= (count >= 5)
    component.on_job_ended(None)
    assert component.ended
    assert (
        component.exit_code == 3 or component.stop is not None or component.error or not ran or component.plan is None
    )
    # Later entries are read after any truncated one.
    folder.write_entry(stop="later")
    assert folder.load_entries()["stop"] == "later"


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
def test_disk_text_ignores_small_changes(free: int) -> None:
    assert str(Disk("spool", "/s", free, 10**15)) == str(Disk("spool", "/s", free, 10**15, 10**6))
    assert len(str(Disk("spool", "/s", free, 10**15))) < 60


def test_folders_on_one_disk_are_reported_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (disk,) = measure_disks({"spool": tmp_path / "a", "stages": tmp_path / "not" / "there" / "yet"})
    assert (disk.what, disk.path) == ("spool", str(tmp_path / "a"))
    assert 0 < disk.free <= disk.size


class SimulatedDisk:
    """A disk with free space set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 100 * GB
        monkeypatch.setattr(
            reporter, "measure_disks", lambda folders: [Disk("spool", "/the/spool", self.free, 1000 * GB)]
        )


@pytest.fixture
def simulated_disk(monkeypatch: pytest.MonkeyPatch) -> SimulatedDisk:
    return SimulatedDisk(monkeypatch)


async def test_disk_is_reported_low_then_full_then_free(
    simulated_disk: SimulatedDisk, tmp_path: Path, daemon: FakeDaemon
) -> None:
    async with running_agent(MemoryLrm(), daemon, tmp_path):
        await daemon.wait_until(lambda: daemon.report().get("disks", []) != [])
        assert (daemon.report()["notices"], daemon.report()["problem"]) == ([], "")
        simulated_disk.free = 500 * MB
        notice = "the disk of its spool (/the/spool) has 500 MB left"
        await daemon.wait_until(lambda: daemon.report()["notices"] == [notice])
        assert daemon.report()["problem"] == ""
        simulated_disk.free = 3 * MB
        await daemon.wait_until(
            lambda: daemon.report()["problem"] == "the disk of its spool (/the/spool) has 3 MB left"
        )
        assert daemon.report()["notices"] == []
        assert daemon.report()["total"] == 2, "running components are still counted"
        simulated_disk.free = 100 * GB
        await daemon.wait_until(lambda: (daemon.report()["problem"], daemon.report()["notices"]) == ("", []))


async def test_agent_on_full_disk_writes_address_later(
    tmp_path: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, full, address = os.replace, True, tmp_path / "agent.json"

    def replace_unless_full(source: Path, target: Path) -> None:
        if full and Path(target) == address:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_unless_full)
    async with running_agent(MemoryLrm(), daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        assert not address.exists()
        full = False
        await daemon.wait_until(address.exists)
        await claim_component(daemon, tmp_path)


async def test_silent_disk_is_reported(tmp_path: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that is down blocks the measurement."""
    reading, writing = os.pipe()
    monkeypatch.setattr(reporter, "measure_disks", lambda folders: os.read(reading, 1) and [])
    async with running_agent(MemoryLrm(), daemon, tmp_path):
        with hanging_threads():
            await daemon.wait_until(lambda: "has not answered" in daemon.report().get("problem", ""))
        os.write(writing, b"x" * 1000)
        await daemon.wait_until(lambda: daemon.report()["problem"] == "")
        monkeypatch.setattr(reporter, "measure_disks", lambda folders: [])
    os.close(writing)
    os.close(reading)
