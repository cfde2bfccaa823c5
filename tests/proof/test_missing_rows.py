"""The audit finds each row that is deleted from the database of a grid, but those of which no other source tells."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest

from koalapy.audit.readers import read_database
from koalapy.audit.rules import find_violations
from tests.proof.grid import ProofGrid
from tests.proof.schedules import Element, run_schedule

pytestmark = pytest.mark.processes

ELEMENTS = [
    Element("job0", 0.5, "fixed"),
    Element("job1", 1.0, "array"),
    Element("job2", 2.0, "dependent"),
    Element("job3", 3.0, "flexible"),
    Element("job4", 8.0, "lasting"),
    Element("fault0", 12.0, "cut past the lease"),
]
FOUND = {"jobs", "attempts", "components", "timeline", "history", "history_clusters"}
NOT_FOUND = {"alembic_version", "audit_chain", "clusters", "days", "lease", "queues", "submissions", "use_sums"}
"""See docs/reliability.md: nothing tells of them, or they are no evidence of a promise."""


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the database of a grid with ended jobs, one of them after a lost attempt."""
    path = tmp_path_factory.mktemp("ended") / "koala.db"

    def keep(grid: ProofGrid) -> list[object]:
        with closing(sqlite3.connect(grid.data / "koala.db")) as ended, closing(sqlite3.connect(path)) as copy:
            ended.backup(copy)
        return []

    keeping = patch.object(ProofGrid, "find_violations", keep)
    assert run_schedule(4, fault=lambda: keeping, elements=ELEMENTS).violations == []
    return path


def count_findings(path: Path) -> int:
    return len(find_violations(read_database(f"sqlite:///{path}")))


def list_rows(path: Path) -> dict[str, list[int]]:
    """Return the numbers of the rows of each table that has any."""
    with closing(sqlite3.connect(path)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {name: [row for (row,) in database.execute(f"SELECT rowid FROM {name}")] for name in tables}
    return {name: numbers for name, numbers in rows.items() if numbers}


def test_database_of_ended_grid_lacks_no_row(database: Path) -> None:
    assert count_findings(database) == 0
    with closing(sqlite3.connect(database)) as ended:
        assert ended.execute("SELECT max(generation) FROM jobs").fetchone() == (2,)
    assert FOUND < list_rows(database).keys() <= FOUND | NOT_FOUND


def test_job_that_was_unknown_when_its_program_ran_lacks_no_row(database: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(database, tmp_path))
    with closing(sqlite3.connect(copy)) as changed, changed:
        changed.execute("UPDATE timeline SET event = 'unknown' WHERE event = 'running' AND job_id = 1")
        assert changed.execute("SELECT changes()").fetchone() != (0,)
    assert count_findings(copy) == 0


@pytest.mark.parametrize("table", sorted(FOUND))
def test_any_deleted_row_is_found(database: Path, table: str, tmp_path: Path) -> None:
    silent, copy = [], tmp_path / "koala.db"
    for number in list_rows(database)[table]:
        shutil.copy(database, copy)
        with closing(sqlite3.connect(copy)) as changed, changed:
            changed.execute(f"DELETE FROM {table} WHERE rowid = ?", (number,))
        if not count_findings(copy):
            silent.append(number)
    assert silent == []
