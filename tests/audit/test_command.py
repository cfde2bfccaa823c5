"""``koala audit`` prints findings, and its exit code tells whether there are any."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from koalapy.cli.daemon.audit import audit_grid
from koalapy.client.errors import Exit
from koalapy.daemon.backup import make_backup, restore_backup
from koalapy.model.errors import UsageError
from koalapy.model.job import JobState, TimelineEntry
from koalapy.store.job_numbers import NUMBERS_FILE, JobNumbers
from koalapy.store.opening import Stores, open_stores
from koalapy.store.output import OutputStore
from koalapy.store.records import Batch
from tests.audit.test_readers import NAME, SACCT
from tests.store.jobs import make_job


def write_cancelled(stores: Stores, job: int) -> None:
    """Store a job that was cancelled at once."""
    ended = make_job(job, JobState.CANCELLED, ended_at=9.0)
    entry = TimelineEntry(job, 9.0, "submitted", JobState.CANCELLED, "", 0, None, None, "")
    stores.jobs.write(Batch(at=2.0, epoch=stores.jobs.epoch, jobs={job: ended}, timeline=[entry]))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a data directory with a database, which has job 8 only."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    stores = open_stores(f"sqlite:///{folder}/koala.db", OutputStore(folder / "output", 1000))
    write_cancelled(stores, 8)
    stores.jobs.release_lease()
    stores.jobs.close()
    return folder


def instance_of(data: Path) -> str:
    from koalapy.audit.readers import read_instance

    return read_instance(f"sqlite:///{data}/koala.db")


def write_accounting(data: Path, job: int) -> str:
    name = NAME.replace("3e322907", instance_of(data)).replace("-7.", f"-{job}.")
    (data / "sacct").write_text(SACCT.replace(NAME, name))
    return f"south={data / 'sacct'}"


def test_audit_without_violation_prints_sources_and_returns_0(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit_grid(data) == Exit.OK
    assert capsys.readouterr().out == "1 jobs; 0 violations; read: database\n"


def test_audit_with_violation_prints_evidence_and_returns_1(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit_grid(data, accounting=[write_accounting(data, 9)]) == Exit.FAILED
    output = capsys.readouterr().out
    assert "run-recorded" in output
    assert "sacct of south: 9.2 component 1 held south1,south2,big of south from 2026-11-29 14:00:00.000" in output


def test_audit_as_json_has_findings_and_what_is_not_proved(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sqlite3.connect(data / "koala.db") as database:
        database.execute("UPDATE lease SET last_job = 7")  # removed by age
    assert audit_grid(data, accounting=[write_accounting(data, 7)], as_json=True) == Exit.OK
    report = json.loads(capsys.readouterr().out)
    missing = {
        "rule": "run-recorded",
        "missing": "the database has no record of the job any more",
        "jobs": 1,
        "examples": [7],
    }
    assert (report["violations"], report["not_proved"]) == (0, [missing])


def test_audit_after_restored_backup_finds_job_that_it_lacks(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_backup(tmp_path / "backup", data, None, files_only=False)
    stores = open_stores(f"sqlite:///{data}/koala.db", OutputStore(data / "output", 1000))
    write_cancelled(stores, 9)
    stores.jobs.release_lease()
    stores.jobs.close()
    restore_backup(tmp_path / "backup", data, None, replace=True)
    assert audit_grid(data, accounting=[write_accounting(data, 9)]) == Exit.FAILED
    assert "run-recorded  9.2  it ran, and the database has no such job" in capsys.readouterr().out


def test_audit_tells_jobs_that_a_restored_backup_lacks_from_later_ones_that_were_removed_by_age(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, output = f"sqlite:///{data}/koala.db", OutputStore(data / "output", 1000)

    def add_job(number: int | None = None) -> int:
        """Store an ended job, by default with the next number, as a daemon does between its start and end."""
        with closing(JobNumbers(data / NUMBERS_FILE, [data / "output"])) as numbers:
            stores = open_stores(url, output, job_numbers=numbers)
            job = number or stores.saved.next_job
            numbers.give(job)
            write_cancelled(stores, job)
            if number is None:
                stores.history.remove([job])
            stores.jobs.release_lease()
            stores.jobs.close()
        return job

    add_job(9)
    make_backup(tmp_path / "backup", data, None, files_only=False)
    add_job(10)
    restore_backup(tmp_path / "backup", data, None, replace=True)
    later = add_job()
    assert later > 10
    assert audit_grid(data, accounting=[write_accounting(data, later)]) == Exit.OK
    assert audit_grid(data, accounting=[write_accounting(data, 10)]) == Exit.FAILED
    assert "run-recorded  10.2  it ran, and the database has no such job" in capsys.readouterr().out


def test_audit_of_missing_files_names_them(tmp_path: Path, data: Path) -> None:
    with pytest.raises(UsageError, match=r"absent/koala\.db does not exist"):
        audit_grid(tmp_path / "absent")
    with pytest.raises(UsageError, match="spool folder nowhere does not exist"):
        audit_grid(data, spool=["north=nowhere"])
