"""Cut the power of a recorded run at many times, and continue from what the disk kept.

All answers to clients must still be true: submissions exist once, reported ends stay, cancellations hold. No
attempt runs twice.
"""

import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.chaos import victims
from tests.chaos.checker import check
from tests.chaos.evidence import Evidence, ReportedJob, Submission, Violation
from tests.chaos.marks import Mark, MarkReader
from tests.chaos.rank import MARKS
from tests.chaos.run import read_jobs, wait_until_idle
from tests.crash.disk import Change, Disk, Loss, read_changes
from tests.crash.grid import RUN_TIMEOUT_S, Acknowledgement, CrashGrid, CrashRun, split_arrays
from tests.crash.workload import FILES

CLUSTERS_FOLDER = "clusters/"
SCOPES = ("all", "daemon", "clusters")
"""Which disk forgets: the one of all processes, that of the daemon, or those of the clusters."""


@dataclass(frozen=True)
class Cut:
    """A loss of power right before the change after the ``change``-th recorded one: all answers until then are sent."""

    change: int
    loss: Loss
    scope: str = "all"
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.change} {self.loss} {self.scope} {self.seed}"

    def loss_of(self, path: str) -> Loss:
        """Return what the disk of a path below the data directory forgets."""
        is_cluster = path.startswith(CLUSTERS_FOLDER)
        is_lost = self.scope == "all" or is_cluster == (self.scope == "clusters")
        return self.loss if is_lost else Loss.NOTHING


@dataclass(frozen=True)
class Recording:
    """A run without a failure: its writes, the answers to clients, and the marks of the ranks."""

    folder: Path
    changes: Sequence[Change]
    acknowledged: Sequence[Acknowledgement]
    marks: Sequence[Mark]
    violations: Sequence[Violation]
    bundle: str
    """The id of the uploaded input."""

    def count_changes_before(self, time_s: float) -> int:
        return sum(change.time_s <= time_s for change in self.changes)

    def choose_cuts(self, count: int, losses: Sequence[Loss], seed: int = 0) -> Iterator[Cut]:
        """Yield cuts right after acknowledgements, and at random changes, alternating between losses and scopes."""
        chance = random.Random(seed)
        after_answers = [self.count_changes_before(told.time_s) for told in self.acknowledged]
        places = after_answers + [chance.randrange(1, len(self.changes)) for _ in range(count)]
        chance.shuffle(places)
        for number, place in enumerate(places[:count]):
            yield Cut(place, losses[number % len(losses)], SCOPES[number // len(losses) % len(SCOPES)], number)


def record(folder: Path) -> Recording:
    """Run the workload in ``folder``, and return its record. The folder is moved aside."""
    grid = CrashGrid(folder, record_writes=True)
    run = CrashRun(grid)
    outcome = run.execute()
    changes = list(read_changes(grid.interposer.writes))
    marks = list(MarkReader(folder).new())
    folder.rename(_recorded_folder(folder))
    folder.mkdir()
    return Recording(folder, changes, run.acknowledged, marks, outcome.violations, run.bundle)


def remove_recording(recording: Recording) -> None:
    shutil.rmtree(_recorded_folder(recording.folder), ignore_errors=True)


def _recorded_folder(folder: Path) -> Path:
    """Return where the folder of a recorded run is kept."""
    return folder.with_name(f"{folder.name}.recorded")


def cut_power(recording: Recording, cut: Cut, *, keep: bool = False) -> list[Violation]:
    """Continue the recorded run from a loss of power; return the violations.

    ``keep``: after a violation or an error, print the cut, and keep the folder and the record.
    """
    folder = recording.folder
    shutil.rmtree(folder)
    folder.mkdir()
    violations: list[Violation] | None = None
    try:
        violations = _continue_run(recording, cut)
    finally:
        victims.kill_all(folder)
        if keep and violations != []:
            _keep_folder(recording, cut, violations or [])
    return violations


def _keep_folder(recording: Recording, cut: Cut, violations: Sequence[Violation]) -> None:
    kept = Path(tempfile.mkdtemp(prefix="koala-power-loss-", dir="/tmp"))
    recording.folder.rename(kept / "continued")
    recording.folder.mkdir()
    shutil.copy(_recorded_folder(recording.folder) / "control/writes", kept)
    print(f"cut {cut} of {len(recording.changes)} (change, loss, scope, seed): see {kept}", file=sys.stderr)
    for violation in violations:
        print(f"  {violation}", file=sys.stderr)


def _continue_run(recording: Recording, cut: Cut) -> list[Violation]:
    """Start the grid again, submit everything with the same keys, wait for all ends, and check."""
    folder = recording.folder
    disk = Disk(folder / "data")
    for change in recording.changes[: cut.change]:
        disk.apply(change)
    disk.write_to(folder / "data", cut.loss_of, random.Random(cut.seed))
    time_s = next((change.time_s for change in recording.changes[cut.change : cut.change + 1]), math.inf)
    lines = (_recorded_folder(folder) / MARKS).read_text().splitlines(keepends=True)
    early = [line for line, mark in zip(lines, recording.marks, strict=True) if mark.time_s < time_s]
    (folder / MARKS).write_text("".join(early))
    told = [entry for entry in recording.acknowledged if entry.time_s < time_s]
    grid = CrashGrid(folder)
    grid.interposer.start_new_boot("00000000-0000-0000-0000-000000000001")
    run = CrashRun(grid)
    if any(entry.kind == "submitted" and entry.number == FILES for entry in told):
        run.bundle = recording.bundle
    with run.serving():
        client = grid.client()
        lost = [entry for entry in told if not run.has_job(client, entry.job)]
        run.submit_all(client, cancel=not any(entry.kind == "cancelled" for entry in told))
        run.wait_for_ends(client)
        final_reports = wait_until_idle(grid, client)
        jobs = read_jobs(client, time.monotonic() + RUN_TIMEOUT_S, run.troubles, run.array_ids())
        alerts = client.get("/api/v1/alerts", time.monotonic() + RUN_TIMEOUT_S)["alerts"]
        client.close()
    remains = run.stop_grid()
    marks = list(MarkReader(folder).new())
    submissions = [_add_earlier(submission, told) for submission in run.submissions]
    facts = run.read_facts()
    evidence = Evidence(submissions, jobs, marks, [], final_reports, remains, run.troubles, facts, was_power_lost=True)
    return sorted(
        [
            *check(split_arrays(evidence)),
            *(Violation("lost", str(entry.job), f"{entry.kind} was acknowledged, and is missing") for entry in lost),
            *_check_ends(told, jobs, marks[len(early) :]),
            *(Violation("alert", "", str(alert)) for alert in alerts if alert["target"] == "lost changes"),
        ]
    )


def _add_earlier(submission: Submission, told: Sequence[Acknowledgement]) -> Submission:
    """Return a submission with the numbers, and the cancellation, that were acknowledged before the loss of power."""
    number = submission.planned.number
    ids = tuple(entry.job for entry in told if entry.kind == "submitted" and entry.number == number)
    cancelled = any(entry.kind == "cancelled" and entry.number == number for entry in told)
    return replace(submission, ids=(*ids, *submission.ids), cancel_tried=submission.cancel_tried or cancelled)


def _check_ends(
    told: Sequence[Acknowledgement], jobs: Sequence[ReportedJob], late: Sequence[Mark]
) -> Iterator[Violation]:
    """Yield jobs that changed after their end was reported, or that ran again."""
    by_id = {job.id: job for job in jobs}
    for entry in told:
        job = by_id.get(entry.job)
        if job is None or entry.kind == "submitted":
            continue
        state = entry.state or "cancelled"
        if job.state != state:
            yield Violation("end lost", str(job.id), f"{job.name} was reported {state}, and is {job.state}")
        for mark in late:
            if entry.kind == "ended" and mark.job == str(job.id) and mark.event == "begin":
                yield Violation("ran again", str(job.id), f"{mark}, after it was reported {state}")
