"""What clients were told survives a loss of power. ``python -m tests.crash --power-loss N`` cuts it at more times."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.crash.disk import Disk, Loss
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


def test_all_told_is_durable_when_it_is_told(recording: Recording) -> None:
    assert recording.violations == []
    disk, applied, problems = Disk(recording.folder / "data"), 0, []
    for told in recording.acknowledged:
        count = recording.count_changes_before(told.time_s)
        for change in recording.changes[applied:count]:
            disk.apply(change)
        applied = count
        needed = [r"job-numbers", r"koala\.db", r"bundles(/[^/.]+)?", r"output", r"clusters(/\w+(/spool(/\w+)?)?)?"]
        if told.kind == "ended":
            needed.append(rf"(output|results)/{told.job}(/.*)?")
        for path, is_name in disk.list_forgettable():
            # A checkpoint may be writing the database, of which the flushed log still has all.
            if re.fullmatch("|".join(needed), path) and (is_name or path not in ("job-numbers", "koala.db")):
                problems.append(f"{told.kind} {told.job}: {path} may be {'forgotten' if is_name else 'cut'}")
    assert problems == []


@pytest.mark.parametrize("number", range(CUTS))
def test_loss_of_power_forgets_nothing_that_was_told(recording: Recording, number: int) -> None:
    losses = (Loss.STRICT, Loss.CONTENT, Loss.TORN)
    cut = list(recording.choose_cuts(CUTS, losses))[number]
    assert cut_power(recording, cut) == []


def test_unflushed_commits_lose_what_was_told(recording: Recording) -> None:
    """Without the flushes of the database after the first answer, the check finds the loss: it can fail."""
    told = [entry.time_s for entry in recording.acknowledged if entry.kind == "submitted"]
    log = {change.inode for change in recording.changes if change.path.endswith("/koala.db-wal")}
    changes = [
        change
        for change in recording.changes[: recording.count_changes_before(told[2])]
        if change.time_s <= told[0] or change.kind != "S" or change.inode not in log
    ]
    violations = cut_power(replace(recording, changes=changes), Cut(len(changes), Loss.STRICT))
    assert {violation.job for violation in violations if violation.rule == "lost"}


@pytest.mark.parametrize("loss", [Loss.STRICT, Loss.CONTENT])
def test_success_whose_files_are_not_sent_does_not_survive_loss_of_power(recording: Recording, loss: Loss) -> None:
    """Cut the power when the journal has the result of the job with files, and nobody has flushed the files."""
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
    assert cut_power(recording, Cut(cut, loss, "clusters")) == []
