"""Jobs after a restore of the database: those that the copy lacks are removed and do not answer for new ones."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import wait_until

pytestmark = pytest.mark.processes

ONE = {"type": "flexible", "total_size": 1}


def copy_database(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    with closing(sqlite3.connect(source)) as original, closing(sqlite3.connect(target)) as duplicate:
        original.backup(duplicate)


def restore_database(backup: Path, database: Path) -> None:
    for path in database.parent.glob(f"{database.name}*"):
        path.unlink()
    copy_database(backup, database)


def test_every_job_runs_after_database_restore(make_grid: Callable[..., EmbeddedGrid], tmp_path: Path) -> None:
    grid = make_grid(KOALA_RULES__UNREACHABLE_AFTER="1")
    database, backup = grid.directory / "koala.db", tmp_path / "backup.db"
    copy_database(database, backup)
    grid.kill_daemon()
    grid.start()  # with the epoch that the copy's next daemon will have
    ended_gate, open_gate = grid.make_gate(), grid.make_gate()
    old = [grid.submit(ONE, *gate.hold) for gate in (ended_gate, ended_gate, open_gate, open_gate)]
    assert old == [1, 2, 3, 4]
    wait_until(lambda: all(grid.list_programs(ident) for ident in old), "all to run")
    remaining_pids = [program.pid for program in grid.list_programs(3) + grid.list_programs(4)]
    grid.kill_daemon()
    ended_gate.open()
    wait_until(lambda: not grid.list_programs(1) and not grid.list_programs(2), "two to end while no daemon is there")
    restore_database(backup, database)
    grid.start()
    new = [grid.submit(ONE, "sh", "-c", f"echo this is {number}") for number in range(4)]
    assert min(new) > max(old), "no job number is used twice once the agents have reported"
    for number, ident in enumerate(new):
        job = grid.wait_for_end(ident)
        assert (job["state"], job["restarts"]) == ("succeeded", 0), job
        assert grid.read_output(ident) == f"this is {number}\n"
    wait_until(
        lambda: not {p.pid for p in grid.list_workers()} & set(remaining_pids), "what nobody knows any more to be ended"
    )
    grid.wait_until_idle()
