"""The daemon's record: whole after whatever happens to daemon and disk, bounded, and never in the daemon's way."""

import gzip
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from koalapy.daemon.alerts.daemon_checks import RecordCheck
from koalapy.daemon.jobs import record as records
from koalapy.daemon.jobs.record import Record
from koalapy.model.alert import AlertKind
from koalapy.model.disk import Disk, DiskLimits
from koalapy.policies.registry import builtin_policies
from koalapy.record.beginning import Beginning, KnownCluster
from koalapy.record.replay import History, replay
from koalapy.record.settings import Recording
from koalapy.record.step import Step
from koalapy.scheduler.events import PeriodicScan
from koalapy.scheduler.rules import Rules

BEGAN = 1.7e9


def record(
    folder: Path, began: float = BEGAN, settings: Recording | None = None, disks: DiskLimits | None = None, **sizes: int
) -> Record:
    begun = Beginning(Rules(), tuple(builtin_policies().names()), (KnownCluster("north"),), now=began)
    limits = disks or DiskLimits(0, 0)
    return Record(folder / "record", settings or Recording(), limits, begun, lambda: began, **sizes)


def steps(count: int, began: float = BEGAN) -> Sequence[Step]:
    return [Step(number, began + number, (PeriodicScan(),)) for number in range(1, count + 1)]


async def kept(one: Record, some: Sequence[Step]) -> None:
    for step in some:
        one.queue_step(step)
    await one.flush()


async def exported(
    one: Record, folder: Path, since: float = 0.0, until: float = 2e9, lost: list[str] | None = None
) -> list[History]:
    path = folder / "export"
    path.write_bytes(b"".join(await one.export_recordings(since, until)))
    return list(replay(path, builtin_policies(), lost))


async def test_what_was_kept_is_exported(tmp_path: Path) -> None:
    one = record(tmp_path)
    await kept(one, steps(3))
    one.queue_step(steps(4)[3])
    (life,) = await exported(one, tmp_path)
    assert (life.steps, life.ended, life.divergence) == (4, BEGAN + 4, None)
    assert (tmp_path / "record").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "record").iterdir())
    assert [life.steps for life in await exported(one, tmp_path, until=BEGAN + 2.5)] == [2]
    assert await exported(one, tmp_path, until=BEGAN - 1) == []
    await one.close()


async def test_one_who_was_killed_in_the_middle_of_a_line_loses_that_line(tmp_path: Path) -> None:
    one = record(tmp_path)
    await kept(one, steps(3))
    (path,) = (tmp_path / "record").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    another = record(tmp_path, BEGAN + 100)
    await kept(another, steps(1, BEGAN + 100))
    assert [life.steps for life in await exported(another, tmp_path)] == [2, 1]
    assert path.with_name(f"{path.name}.gz").exists()
    assert not path.exists()
    await another.close()


async def test_one_who_was_killed_while_a_part_was_compressed_loses_nothing(tmp_path: Path) -> None:
    one = record(tmp_path)
    await kept(one, steps(3))
    (path,) = (tmp_path / "record").iterdir()
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))  # and not yet removed
    path.with_name(f"{path.name}.incoming").write_bytes(b"half")
    assert [life.steps for life in await exported(one, tmp_path)] == [3]
    another = record(tmp_path, BEGAN + 100)
    await kept(another, steps(1, BEGAN + 100))
    assert [life.steps for life in await exported(another, tmp_path)] == [3, 1]
    assert len(list((tmp_path / "record").iterdir())) == 2
    await another.close()


async def test_one_who_died_before_its_beginning_was_written_is_left_out(tmp_path: Path) -> None:
    """Or whose disk was full by then: the others can be replayed all the same."""
    for number, count in enumerate((3, 2)):
        one = record(tmp_path, BEGAN + 100 * number)
        await kept(one, steps(count, BEGAN + 100 * number))
        await one.close()
    (path,) = (tmp_path / "record").glob(f"{int((BEGAN + 100) * 1000)}*")
    whole = path.read_bytes()
    head = whole.index(b"\n") + 1
    for length in (0, 5, head, head + 20):
        path.write_bytes(whole[:length])
        assert [life.steps for life in await exported(one, tmp_path)] == [3]


@pytest.mark.parametrize(
    "spoil", [lambda packed: packed[:-100], lambda packed: packed[:60] + b"\xff" * 9, lambda _: b"no"]
)
async def test_of_one_that_is_damaged_it_is_said_what_is_lost(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    old, one = record(tmp_path), record(tmp_path, BEGAN + 100)
    await kept(old, steps(900))
    await old.close()
    await kept(one, steps(2, BEGAN + 100))
    (path,) = (tmp_path / "record").glob("*.gz")
    path.write_bytes(spoil(path.read_bytes()))
    lost: list[str] = []
    *before, last = await exported(one, tmp_path, lost=lost)
    assert (last.steps, last.divergence) == (2, None)
    assert all(life.steps < 900 and life.divergence is None for life in before)
    (told,) = lost
    assert told.startswith(f"the daemon could not read {path.name} of its record (")
    await one.close()


async def test_a_backup_of_a_part_that_was_written_on_replaces_nothing(tmp_path: Path) -> None:
    old = record(tmp_path)
    await kept(old, steps(20))
    (path,) = (tmp_path / "record").iterdir()
    backup = path.read_bytes()
    await kept(old, steps(90)[20:])
    await old.close()
    one = record(tmp_path, BEGAN + 100)
    await kept(one, steps(1, BEGAN + 100))
    await one.close()
    path.write_bytes(backup)
    another = record(tmp_path, BEGAN + 200)
    await kept(another, steps(1, BEGAN + 200))
    assert [life.steps for life in await exported(another, tmp_path)] == [90, 1, 1]
    assert not path.exists()
    await another.close()


async def test_a_long_life_is_in_parts_and_read_as_one(tmp_path: Path) -> None:
    one = record(tmp_path, part_size=500)
    for step in steps(40):
        await kept(one, [step])
    parts = sorted(path.name for path in (tmp_path / "record").iterdir())
    assert len(parts) > 3
    assert sum(name.endswith(".gz") for name in parts) == len(parts) - 1
    assert [life.steps for life in await exported(one, tmp_path)] == [40]
    await one.close()


async def test_daemons_that_have_ended_long_ago_are_forgotten(tmp_path: Path) -> None:
    for number in range(3):
        began = BEGAN + 100 * number
        one = record(tmp_path, began, Recording(keep=150.0))
        await kept(one, steps(1, began))
        await one.close()
        for path in (tmp_path / "record").glob(f"{int(began * 1000)}*"):
            os.utime(path, (began, began))
    left = sorted(path.name.partition("-")[0] for path in (tmp_path / "record").iterdir())
    assert left == [str(int((BEGAN + 100 * number) * 1000)) for number in (1, 2)]


async def test_the_oldest_make_room_and_then_it_ends(tmp_path: Path) -> None:
    old = record(tmp_path, part_size=500)
    await kept(old, steps(30))
    await old.close()
    size = Recording(size=2**20)
    object.__setattr__(size, "size", 3000)
    one = record(tmp_path, BEGAN + 1000, size, part_size=500)
    for step in steps(400, BEGAN + 1000):
        await kept(one, [step])
    assert "more than record.size" in one.problem
    assert not list((tmp_path / "record").glob(f"{int(BEGAN * 1000)}*"))
    (life,) = await exported(one, tmp_path)
    assert 1 < life.steps < 400, "what was recorded until then can be replayed"
    (alert,) = [each async for each in RecordCheck(one)(BEGAN + 2000)]
    assert (alert.kind, alert.cause, alert.since) == (AlertKind.RECORD, one.problem, BEGAN + 1000)
    await one.close()


async def test_a_disk_that_takes_nothing_ends_the_record_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "record").touch()
    one = record(tmp_path)
    await kept(one, steps(2))
    assert "takes no file" in one.problem
    await kept(one, steps(3))
    assert await exported(one, tmp_path) == []
    await one.close()


async def test_a_disk_that_is_nearly_full_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk("record", str(tmp_path), 10**6, 10**12)
    monkeypatch.setattr(records, "measure_disks", lambda _: [disk])
    one = record(tmp_path, disks=DiskLimits())
    await kept(one, steps(2))
    assert f"{disk}" in one.problem
    lost: list[str] = []
    assert [life.steps for life in await exported(one, tmp_path, lost=lost)] == [2]
    assert lost == [f"nothing since 2023-11-14T22:13:20+00:00 was recorded ({one.problem})"]
    lost.clear()
    await exported(one, tmp_path, until=BEGAN, lost=lost)
    assert lost == [], "up to then all was recorded"
    await one.close()


async def test_steps_do_not_pile_up_for_a_disk_that_hangs(tmp_path: Path) -> None:
    one = record(tmp_path, max_waiting=10)
    for step in steps(12):
        one.queue_step(step)
    assert "has not taken 10 steps" in one.problem
    await one.close()


async def test_a_step_that_cannot_be_written_ends_it_before_there_is_a_gap(tmp_path: Path) -> None:
    one = record(tmp_path)
    await kept(one, steps(2))
    await kept(one, [Step(3, BEGAN + 3, (cast(PeriodicScan, object()),)), Step(4, BEGAN + 4)])
    assert "a step cannot be written" in one.problem
    await kept(one, [Step(5, BEGAN + 5)])
    assert [life.steps for life in await exported(one, tmp_path)] == [2]
    await one.close()
