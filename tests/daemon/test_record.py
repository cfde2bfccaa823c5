"""The daemon's record: complete after crashes and full disks, bounded, and without effect on the daemon."""

import asyncio
import gzip
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from koalapy.daemon.alerts.daemon_checks import check_record
from koalapy.daemon.jobs import record as records
from koalapy.daemon.jobs.record import Record
from koalapy.model.alert import AlertKind
from koalapy.model.disk import Disk, DiskLimits
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.events import PeriodicScan
from koalapy.scheduler.rules import Rules
from koalapy.simulation.record.format import Beginning, KnownCluster, Step
from koalapy.simulation.record.replay import History, replay
from koalapy.simulation.record.settings import Recording
from tests.signals import MAX_WAIT_S, until

BEGAN = 1.7e9


def make_record(
    folder: Path,
    began: float = BEGAN,
    settings: Recording | None = None,
    disks: DiskLimits | None = None,
    clock: Callable[[], float] | None = None,
    **sizes: int,
) -> Record:
    begun = Beginning(Rules(), tuple(builtin_policies().names()), (KnownCluster("north"),), now=began)
    limits = disks or DiskLimits(0, 0)
    return Record(folder / "record", settings or Recording(), limits, begun, clock or (lambda: began), **sizes)


def make_steps(count: int, began: float = BEGAN) -> Sequence[Step]:
    return [Step(number, began + number, (PeriodicScan(),)) for number in range(1, count + 1)]


async def write_steps(recording: Record, steps: Sequence[Step]) -> None:
    for step in steps:
        recording.queue_step(step)
    await recording.flush()


async def export_steps(
    recording: Record, folder: Path, since: float = 0.0, until: float = 2e9, lost: list[str] | None = None
) -> list[History]:
    path = folder / "export"
    path.write_bytes(b"".join(await recording.export_recordings(since, until)))
    return list(replay(path, builtin_policies(), lost))


async def test_record_exports_queued_steps(tmp_path: Path) -> None:
    recording = make_record(tmp_path)
    await write_steps(recording, make_steps(3))
    recording.queue_step(make_steps(4)[3])
    (life,) = await export_steps(recording, tmp_path)
    assert (life.steps, life.ended, life.divergence) == (4, BEGAN + 4, None)
    assert (tmp_path / "record").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "record").iterdir())
    assert [life.steps for life in await export_steps(recording, tmp_path, until=BEGAN + 2.5)] == [2]
    assert await export_steps(recording, tmp_path, until=BEGAN - 1) == []
    await recording.close()


async def test_record_with_cut_line_omits_it(tmp_path: Path) -> None:
    recording = make_record(tmp_path)
    await write_steps(recording, make_steps(3))
    (path,) = (tmp_path / "record").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    another = make_record(tmp_path, BEGAN + 100)
    await write_steps(another, make_steps(1, BEGAN + 100))
    assert [life.steps for life in await export_steps(another, tmp_path)] == [2, 1]
    assert path.with_name(f"{path.name}.gz").exists()
    assert not path.exists()
    await another.close()


async def test_record_after_crash_in_compression_loses_nothing(tmp_path: Path) -> None:
    recording = make_record(tmp_path)
    await write_steps(recording, make_steps(3))
    (path,) = (tmp_path / "record").iterdir()
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))  # the crash was before its removal
    path.with_name(f"{path.name}.incoming").write_bytes(b"half")
    assert [life.steps for life in await export_steps(recording, tmp_path)] == [3]
    another = make_record(tmp_path, BEGAN + 100)
    await write_steps(another, make_steps(1, BEGAN + 100))
    assert [life.steps for life in await export_steps(another, tmp_path)] == [3, 1]
    assert len(list((tmp_path / "record").iterdir())) == 2
    await another.close()


async def test_record_without_beginning_is_omitted(tmp_path: Path) -> None:
    """A daemon may have crashed, or its disk may have been full. Other records can still be replayed."""
    for number, count in enumerate((3, 2)):
        recording = make_record(tmp_path, BEGAN + 100 * number)
        await write_steps(recording, make_steps(count, BEGAN + 100 * number))
        await recording.close()
    (path,) = (tmp_path / "record").glob(f"{int((BEGAN + 100) * 1000)}*")
    content = path.read_bytes()
    head = content.index(b"\n") + 1
    for length in (0, 5, head, head + 20):
        path.write_bytes(content[:length])
        assert [life.steps for life in await export_steps(recording, tmp_path)] == [3]


@pytest.mark.parametrize(
    "spoil", [lambda packed: packed[:-100], lambda packed: packed[:60] + b"\xff" * 9, lambda _: b"no"]
)
async def test_record_with_damage_reports_lost_part(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    old, recording = make_record(tmp_path), make_record(tmp_path, BEGAN + 100)
    await write_steps(old, make_steps(900))
    await old.close()
    await write_steps(recording, make_steps(2, BEGAN + 100))
    (path,) = (tmp_path / "record").glob("*.gz")
    path.write_bytes(spoil(path.read_bytes()))
    lost: list[str] = []
    *intact, last = await export_steps(recording, tmp_path, lost=lost)
    assert (last.steps, last.divergence) == (2, None)
    assert all(life.steps < 900 and life.divergence is None for life in intact)
    (lost_line,) = lost
    assert lost_line.startswith(f"the daemon could not read {path.name} of its record (")
    await recording.close()


async def test_record_restored_older_part_is_ignored(tmp_path: Path) -> None:
    old = make_record(tmp_path)
    await write_steps(old, make_steps(20))
    (path,) = (tmp_path / "record").iterdir()
    backup = path.read_bytes()
    await write_steps(old, make_steps(90)[20:])
    await old.close()
    recording = make_record(tmp_path, BEGAN + 100)
    await write_steps(recording, make_steps(1, BEGAN + 100))
    await recording.close()
    path.write_bytes(backup)
    another = make_record(tmp_path, BEGAN + 200)
    await write_steps(another, make_steps(1, BEGAN + 200))
    assert [life.steps for life in await export_steps(another, tmp_path)] == [90, 1, 1]
    assert not path.exists()
    await another.close()


async def test_record_closed_while_a_cancelled_flush_goes_on_has_all_steps(tmp_path: Path) -> None:
    earlier = make_record(tmp_path)
    await write_steps(earlier, make_steps(1))
    await earlier.close()
    begun, released = threading.Event(), threading.Event()

    def clock() -> float:
        """Return the time, with which the thread looks for expired parts once the test has let it."""
        begun.set()
        assert released.wait(MAX_WAIT_S)
        return BEGAN + 100

    recording = make_record(tmp_path, BEGAN + 100, clock=clock, part_size=1)
    first, second, third = make_steps(3, BEGAN + 100)
    released.set()
    await write_steps(recording, [first])
    begun.clear()
    released.clear()
    flushing = asyncio.create_task(write_steps(recording, [second]))
    await until(begun.is_set)
    flushing.cancel()
    await asyncio.wait({flushing})
    recording.queue_step(third)
    closing = asyncio.create_task(recording.close())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not closing.done()
    released.set()
    await closing
    assert (recording.problem, (await export_steps(recording, tmp_path))[-1].steps) == ("", 3)


async def test_record_of_long_run_is_read_across_parts(tmp_path: Path) -> None:
    recording = make_record(tmp_path, part_size=500)
    for step in make_steps(40):
        await write_steps(recording, [step])
    parts = sorted(path.name for path in (tmp_path / "record").iterdir())
    assert len(parts) > 3
    assert sum(name.endswith(".gz") for name in parts) == len(parts) - 1
    assert [life.steps for life in await export_steps(recording, tmp_path)] == [40]
    await recording.close()


async def test_record_of_expired_run_is_removed(tmp_path: Path) -> None:
    for number in range(3):
        began = BEGAN + 100 * number
        recording = make_record(tmp_path, began, Recording(keep=150.0))
        await write_steps(recording, make_steps(1, began))
        await recording.close()
        for path in (tmp_path / "record").glob(f"{int(began * 1000)}*"):
            os.utime(path, (began, began))
    remaining = sorted(path.name.partition("-")[0] for path in (tmp_path / "record").iterdir())
    assert remaining == [str(int((BEGAN + 100 * number) * 1000)) for number in (1, 2)]


async def test_record_over_size_removes_oldest_then_ends(tmp_path: Path) -> None:
    old = make_record(tmp_path, part_size=500)
    await write_steps(old, make_steps(30))
    await old.close()
    size = Recording(size=2**20)
    object.__setattr__(size, "size", 3000)
    recording = make_record(tmp_path, BEGAN + 1000, size, part_size=500)
    for step in make_steps(400, BEGAN + 1000):
        await write_steps(recording, [step])
    assert "more than record.size" in recording.problem
    assert not list((tmp_path / "record").glob(f"{int(BEGAN * 1000)}*"))
    (life,) = await export_steps(recording, tmp_path)
    assert 1 < life.steps < 400, "what was recorded until then can be replayed"
    (alert,) = [found_alert async for found_alert in check_record(recording, BEGAN + 2000)]
    assert (alert.kind, alert.cause, alert.since) == (AlertKind.RECORD, recording.problem, BEGAN + 1000)
    await recording.close()


async def test_record_with_write_error_ends_recording(tmp_path: Path) -> None:
    (tmp_path / "record").touch()
    recording = make_record(tmp_path)
    await write_steps(recording, make_steps(2))
    assert "takes no file" in recording.problem
    await write_steps(recording, make_steps(3))
    assert await export_steps(recording, tmp_path) == []
    await recording.close()


async def test_record_on_nearly_full_disk_ends_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk("record", str(tmp_path), 10**6, 10**12)
    monkeypatch.setattr(records, "measure_disks", lambda _: [disk])
    recording = make_record(tmp_path, disks=DiskLimits())
    await write_steps(recording, make_steps(2))
    assert f"{disk}" in recording.problem
    lost: list[str] = []
    assert [life.steps for life in await export_steps(recording, tmp_path, lost=lost)] == [2]
    assert lost == [f"nothing since 2023-11-14T22:13:20+00:00 was recorded ({recording.problem})"]
    lost.clear()
    await export_steps(recording, tmp_path, until=BEGAN, lost=lost)
    assert lost == [], "up to then all was recorded"
    await recording.close()


async def test_record_with_hanging_disk_bounds_queue(tmp_path: Path) -> None:
    recording = make_record(tmp_path, max_waiting=10)
    for step in make_steps(12):
        recording.queue_step(step)
    assert "has not taken 10 steps" in recording.problem
    await recording.close()


async def test_record_with_unwritable_step_ends_without_gap(tmp_path: Path) -> None:
    recording = make_record(tmp_path)
    await write_steps(recording, make_steps(2))
    await write_steps(recording, [Step(3, BEGAN + 3, (cast(PeriodicScan, object()),)), Step(4, BEGAN + 4)])
    assert "a step cannot be written" in recording.problem
    await write_steps(recording, [Step(5, BEGAN + 5)])
    assert [life.steps for life in await export_steps(recording, tmp_path)] == [2]
    await recording.close()
