"""Job numbers are never reused, even after an older copy of the database is restored."""

import errno
import os
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.errors import StoreUnavailable
from koalapy.store.job_numbers import BLOCK, NUMBERS_FILE, UNKNOWN_PAST, JobNumbers, recorded_commit, recorded_numbers
from koalapy.store.opening import Stores, open_stores
from koalapy.store.output import OutputStore
from tests.store.jobs import make_batch, make_job

BOOT, LATER_BOOT = "b" * 36, "c" * 36


def make_job_numbers(folder: Path, boot: str = BOOT, folders: Sequence[Path] = ()) -> JobNumbers:
    return JobNumbers(folder / NUMBERS_FILE, folders, boot)


def open_in_folder(folder: Path) -> Stores:
    output = OutputStore(folder / "output", 1000)
    return open_stores(f"sqlite:///{folder / 'koala.db'}", output, job_numbers=make_job_numbers(folder))


def test_next_job_after_restored_copy_exceeds_used_numbers(tmp_path: Path) -> None:
    stores = open_in_folder(tmp_path)
    assert stores.saved.next_job == 1
    stores.jobs.write(make_batch(make_job(1)))
    with sqlite3.connect(tmp_path / "koala.db") as source, sqlite3.connect(tmp_path / "copy") as target:
        source.backup(target)
    stores.jobs.write(make_batch(make_job(2)))
    stores.jobs.write(make_batch(make_job(7)))
    stores.jobs.release_lease()
    stores.jobs.close()
    for file in tmp_path.glob("koala.db*"):
        file.unlink()
    shutil.copy(tmp_path / "copy", tmp_path / "koala.db")
    with sqlite3.connect(tmp_path / "koala.db") as copy:
        copy.execute("update lease set expires_at = 0")
    assert open_in_folder(tmp_path).saved.next_job == 8


def test_last_given_after_kill_has_no_gap(tmp_path: Path) -> None:
    first = make_job_numbers(tmp_path)
    assert first.last_given(0) == 0
    first.give(3)
    assert make_job_numbers(tmp_path).last_given(3) == 3


def test_replaced_daemon_changes_nothing_of_its_successor(tmp_path: Path) -> None:
    replaced = make_job_numbers(tmp_path)
    replaced.last_given(0)
    replaced.give(3)
    replaced.note_commit((1, 7))
    successor = make_job_numbers(tmp_path)
    successor.give(successor.last_given(3) + 1)
    successor.note_commit((2, 1))
    replaced.note_commit((1, 8))
    replaced.close()
    assert recorded_commit(tmp_path) == (2, 1)
    assert recorded_numbers(tmp_path / NUMBERS_FILE, used_only=True) == 4
    assert make_job_numbers(tmp_path, LATER_BOOT).last_given(3) > 4


@pytest.mark.parametrize("is_closed", [True, False])
def test_last_given_after_reboot_skips_block_unless_closed(tmp_path: Path, is_closed: bool) -> None:
    first = make_job_numbers(tmp_path)
    first.last_given(0)
    first.give(3)
    if is_closed:
        first.close()
    assert make_job_numbers(tmp_path, LATER_BOOT).last_given(1) == (3 if is_closed else 3 + BLOCK)


def test_last_given_includes_output_and_result_folders(tmp_path: Path) -> None:
    for name in ("12", "x13", "014", "9" * 30):
        (tmp_path / "output" / name).mkdir(parents=True)
    assert make_job_numbers(tmp_path, folders=(tmp_path / "output", tmp_path / "results")).last_given(0) == 12


@pytest.mark.parametrize("content", [None, b"", b"\0" * 80, b"1 2 3"])
def test_last_given_without_readable_file_skips_numbers(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / NUMBERS_FILE).write_bytes(content)
    assert make_job_numbers(tmp_path).last_given(5) == 5 + UNKNOWN_PAST
    assert make_job_numbers(tmp_path).last_given(0) == 0


@given(st.lists(st.one_of(st.integers(1, 3 * BLOCK), st.sampled_from(["kill", "close", "fail"]))))
def test_job_numbers_after_any_end_never_decrease(
    tmp_path_factory: pytest.TempPathFactory, events: list[int | str]
) -> None:
    folder, boot, highest = tmp_path_factory.mktemp("data"), 0, 0
    current = make_job_numbers(folder, f"{boot:036x}")
    current.last_given(0)
    for event in events:
        if isinstance(event, int):
            highest += event
            current.give(highest)
            continue
        if event == "close":
            current.close()
        boot += event == "fail"
        current = make_job_numbers(folder, f"{boot:036x}")
        assert current.last_given(0) >= highest
        highest = current.last_given(0)


def test_give_without_writable_file_raises_store_unavailable(tmp_path: Path) -> None:
    (tmp_path / NUMBERS_FILE).mkdir()
    with pytest.raises(StoreUnavailable, match="cannot be used"):
        make_job_numbers(tmp_path).give(1)
    with pytest.raises(StoreUnavailable, match="cannot be used"):
        make_job_numbers(tmp_path).last_given(1)


def test_give_after_failed_write_writes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon stores the job once its number is given, so a number that is not recorded may be used twice."""
    current = make_job_numbers(tmp_path)
    current.give(1)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(StoreUnavailable):
            current.give(2 + BLOCK)
    current.give(2 + BLOCK)
    assert recorded_numbers(tmp_path / NUMBERS_FILE, used_only=True) == 2 + BLOCK
    assert recorded_numbers(tmp_path / NUMBERS_FILE) == 2 + 2 * BLOCK


def test_give_after_file_removal_writes_new_file(tmp_path: Path) -> None:
    current = make_job_numbers(tmp_path)
    current.give(1)
    os.unlink(tmp_path / NUMBERS_FILE)
    current.give(2)
    assert make_job_numbers(tmp_path).last_given(0) == 2
    assert recorded_numbers(tmp_path / NUMBERS_FILE) >= 2
    assert recorded_numbers(tmp_path / "none") == 0


def damage_log(folder: Path, damage: str) -> None:
    log = folder / "koala.db-wal"
    content = bytearray(log.read_bytes())
    match damage:
        case "delete":
            log.unlink()
        case "cut":
            log.write_bytes(content[: len(content) * 2 // 3])
        case "flip":
            content[len(content) // 2] ^= 0x10
            log.write_bytes(content)


@pytest.mark.parametrize("damage", ["delete", "cut", "flip", "none"])
def test_start_with_damaged_log_of_database_alerts_of_lost_changes(tmp_path: Path, damage: str) -> None:
    """The copy is what a killed daemon leaves: its database and the log of its last transactions."""
    stores = open_in_folder(tmp_path / "killed")
    for job in range(1, 6):
        stores.jobs.write(make_batch(make_job(job)))
    shutil.copytree(tmp_path / "killed", tmp_path / "damaged")
    stores.jobs.close()
    damage_log(tmp_path / "damaged", damage)
    for _ in range(2):  # the alert lasts when the daemon starts again
        numbers = make_job_numbers(tmp_path / "damaged")
        output = OutputStore(tmp_path / "damaged/output", 1000)
        path = tmp_path / "damaged/koala.db"
        opened = open_stores(f"sqlite:///{path}", output, lambda: 1e12, numbers)
        alerts = [alert for alert in numbers.alerts if alert.target == "lost changes"]
        assert bool(alerts) == (damage != "none")
        if alerts:
            assert "may be missing" in alerts[0].cause
            assert opened.saved.next_job == 6
        opened.jobs.release_lease()
        opened.jobs.close()


def test_start_with_output_of_unknown_job_alerts_of_lost_changes(tmp_path: Path) -> None:
    (tmp_path / "output/7").mkdir(parents=True)
    numbers = make_job_numbers(tmp_path, folders=[tmp_path / "output"])
    open_stores(
        f"sqlite:///{tmp_path / 'koala.db'}", OutputStore(tmp_path / "output", 1000), job_numbers=numbers
    ).jobs.close()
    assert [alert.cause for alert in numbers.alerts] == [
        "the database lacks changes that it had acknowledged; jobs 1 to 7 may be missing"
    ]


def test_start_with_unreadable_numbers_alerts_of_their_file(tmp_path: Path) -> None:
    stores = open_in_folder(tmp_path)
    stores.jobs.write(make_batch(make_job(3)))
    stores.jobs.release_lease()
    stores.jobs.close()
    (tmp_path / NUMBERS_FILE).write_bytes(b"garbage")
    numbers = make_job_numbers(tmp_path)
    saved = open_stores(
        f"sqlite:///{tmp_path / 'koala.db'}", OutputStore(tmp_path / "output", 1000), job_numbers=numbers
    ).saved
    (alert,) = numbers.alerts
    assert saved.next_job == 3 + UNKNOWN_PAST + 1
    assert f"from {saved.next_job} on" in alert.summary
    assert alert.cause == f"{tmp_path / NUMBERS_FILE} has no readable number"
