"""Answers to clients survive a loss of power. ``python -m tests.crash --power-loss N`` cuts it at more times."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.crash.disk import Disk, Loss
from tests.crash.grid import Acknowledgement
from tests.crash.power_loss import Cut, Recording, cut_power, record, remove_recording
from tests.crash.runs import temporary_folder
from tests.needs import C_COMPILER, needs

pytestmark = [pytest.mark.processes, needs(C_COMPILER)]

CUTS = 3
STAGE_JOURNAL = re.compile(r"/stages/\.\w+-([^/]+)/journal")


@pytest.fixture(scope="module")
def recording() -> Iterator[Recording]:
    with temporary_folder() as folder:
        recording = record(folder)
        yield recording
        remove_recording(recording)


def test_all_told_is_durable_when_it_is_told(recording: Recording, tmp_path: Path) -> None:
    assert recording.violations == []
    disk, applied, problems = Disk(recording.folder / "data"), 0, []
    for told in recording.acknowledged:
        count = recording.count_changes_before(told.time_s)
        for change in recording.changes[applied:count]:
            disk.apply(change)
        applied = count
        needed = [
            r"job-numbers",
            r"koala\.db(-wal)?",
            r"bundles(/[^/.]+)?",
            r"output",
            r"clusters(/\w+(/spool(/\w+)?)?)?",
        ]
        if told.kind == "ended":
            needed.append(rf"(output|results)/{told.job}(/.*)?")
        for path, is_name in disk.list_forgettable():
            # The database and its log may be in the midst of a later commit: they are read as flushed below.
            is_data = path in ("job-numbers", "koala.db", "koala.db-wal")
            if re.fullmatch("|".join(needed), path) and (is_name or not is_data):
                problems.append(f"{told.kind} {told.job}: {path} may be {'forgotten' if is_name else 'cut'}")
        if not _has_flushed(disk, tmp_path / f"{told.kind}-{told.job}", told):
            problems.append(f"{told.kind} {told.job} {told.state}: the flushed database does not have it")
    assert problems == []


def _has_flushed(disk: Disk, folder: Path, told: Acknowledgement) -> bool:
    """Write the flushed files to ``folder``, and return whether the database there has what a client received."""
    disk.write_to(folder, lambda _path: Loss.STRICT, Random(0))
    with closing(sqlite3.connect(folder / "koala.db")) as connection, suppress(sqlite3.OperationalError):
        row = connection.execute("SELECT state, ending FROM jobs WHERE id = ?", [told.job]).fetchone()
        if row is None or told.kind == "submitted":
            return row is not None
        return row[0] == told.state if told.kind == "ended" else "cancelled" in row
    return False  # not even the tables


@pytest.mark.parametrize("number", range(CUTS))
def test_loss_of_power_forgets_nothing_that_was_told(recording: Recording, number: int) -> None:
    losses = (Loss.STRICT, Loss.CONTENT, Loss.TORN)
    cut = list(recording.choose_cuts(CUTS, losses))[number]
    assert cut_power(recording, cut, keep=True) == []


def test_folder_of_a_stage_is_gone_for_good_before_its_journal(recording: Recording, tmp_path: Path) -> None:
    disk, removed = Disk(recording.folder / "data"), []
    for change in recording.changes:
        if change.kind == "U" and (found := re.search(r"/(clusters/\w+/stages)/\.([^/]+)/journal$", change.path)):
            place = tmp_path / str(len(removed))
            disk.write_to(place, lambda _path: Loss.STRICT, Random(0))
            removed.append([path.name for path in (place / found[1]).glob(found[2])])
        disk.apply(change)
    assert removed
    assert not any(removed)


def test_unflushed_commits_lose_what_was_told(recording: Recording) -> None:
    """Without the flushes of the database before the second answer, the check finds the loss: it can fail."""
    told = [entry for entry in recording.acknowledged if entry.kind == "submitted"]
    log = {change.inode for change in recording.changes if change.path.endswith("/koala.db-wal")}
    count = recording.count_changes_before(told[1].time_s)
    flushed = [
        change
        for change in recording.changes[:count]
        if change.time_s <= told[0].time_s or change.kind != "S" or change.inode not in log
    ]
    unflushed = replace(recording, changes=[*flushed, *recording.changes[count:]])
    violations = cut_power(unflushed, Cut(len(flushed), Loss.STRICT))
    assert str(told[1].job) in {violation.job for violation in violations if violation.rule == "lost"}


@pytest.mark.parametrize("loss", [Loss.STRICT, Loss.CONTENT])
def test_success_whose_files_are_not_sent_does_not_survive_loss_of_power(recording: Recording, loss: Loss) -> None:
    """Cut the power when the journal has the result of the job with files, and the files are not flushed."""
    tokens = {found[1] for change in recording.changes if (found := STAGE_JOURNAL.search(change.path))}
    ends = tuple(f"/{token}/journal" for token in tokens)  # several after an attempt that a busy machine has delayed
    journals = {change.inode for change in recording.changes if change.path.endswith(ends)}
    is_written, cut = False, 0
    for number, change in enumerate(recording.changes, 1):
        if change.inode in journals:
            is_written |= change.kind == "W" and b'"result.0"' in change.data
            if is_written and change.kind == "S":
                cut = number
                break
    assert cut
    assert cut_power(recording, Cut(cut, loss, "clusters"), keep=True) == []
