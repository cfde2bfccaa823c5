"""A database that is removed or replaced while a daemon uses it."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import NotSupportedError

from koalapy.model.errors import DatabaseDamaged, StoreUnavailable
from koalapy.store.database import Database
from koalapy.store.engine import make_engine, unavailable_is_known
from koalapy.store.output import OutputStore
from koalapy.store.records import OutputPiece
from koalapy.store.sql import JobStore
from tests.databases import migrate
from tests.store.jobs import make_batch, make_job


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "koala.db"


@pytest.fixture
def store(path: Path) -> JobStore:
    engine = make_engine(f"sqlite:///{path}")
    migrate(engine)
    return JobStore(Database(engine))


def copy_database(path: Path) -> Path:
    with sqlite3.connect(path) as source, sqlite3.connect(copy := path.with_name("copy.db")) as target:
        source.backup(target)
    return copy


def remove_all(path: Path) -> None:
    for file in path.parent.glob("koala.db*"):
        file.unlink()


def remove_log(path: Path) -> None:
    Path(f"{path}-wal").unlink()


def replace_log(path: Path) -> None:
    remove_log(path)
    Path(f"{path}-wal").touch()


def move_directory(path: Path) -> None:
    path.parent.rename(path.parent.with_name("moved"))


def replace_by_copy(path: Path) -> None:
    copy = copy_database(path)
    remove_all(path)
    shutil.copy(copy, path)


def replace_by_hard_link(path: Path) -> None:
    copy = copy_database(path)
    remove_all(path)
    os.link(copy, path)


def truncate(path: Path) -> None:
    os.truncate(path, 0)


DAMAGES = [
    (remove_all, "removed"),
    (remove_log, "removed"),
    (replace_log, "replaced"),
    (move_directory, "removed"),
    (replace_by_copy, "replaced"),
    (replace_by_hard_link, "replaced"),
    (truncate, "truncated"),
]


@pytest.mark.parametrize(("damage", "change"), DAMAGES)
def test_store_with_damaged_files_is_unavailable(
    store: JobStore, path: Path, damage: Callable[[Path], None], change: str
) -> None:
    store.write(make_batch(make_job(1)))
    damage(path)
    with pytest.raises(StoreUnavailable, match=f"was {change} while the daemon uses it"):
        store.write(make_batch(make_job(2)))
    with pytest.raises(StoreUnavailable, match=change):
        store.renew_lease(1.0)
    with pytest.raises(StoreUnavailable, match=change):
        store.load()
    with pytest.raises(StoreUnavailable, match=change):
        store.release_lease()


def test_commit_with_removed_file_raises_store_unavailable(store: JobStore, path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="removed"), store.database.writing():
        remove_all(path)


def test_store_with_restored_files_continues(store: JobStore, path: Path) -> None:
    store.write(make_batch(make_job(1)))
    moved = path.parent.with_name("moved")
    move_directory(path)
    with pytest.raises(StoreUnavailable):
        store.write(make_batch(make_job(2)))
    moved.rename(path.parent)
    store.write(make_batch(make_job(2)))
    assert len(store.load().jobs) == 2


def test_store_without_used_connection_keeps_log(store: JobStore) -> None:
    store.write(make_batch(make_job(1)))
    store.database.engine.dispose()  # its connections are closed; SQLite would remove the log with the last
    store.write(make_batch(make_job(2)))


@pytest.mark.parametrize("change", ["update lease set epoch = epoch - 1", "update lease set batch = 0"])
def test_store_with_older_content_is_unavailable(store: JobStore, path: Path, change: str) -> None:
    store.write(make_batch(make_job(1)))
    with sqlite3.connect(path) as connection:
        connection.execute(change)
    with pytest.raises(StoreUnavailable, match="the database was replaced by an older copy"):
        store.write(make_batch(make_job(2)))


def test_store_with_damaged_content_raises_store_unavailable(store: JobStore, path: Path) -> None:
    store.write(make_batch(make_job(1)))
    with sqlite3.connect(path) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")
    path.write_bytes(b"x" * path.stat().st_size)
    store.database.engine.dispose()
    with pytest.raises(StoreUnavailable, match="damaged"):
        store.load()


def test_output_in_replaced_folder_raises_error(tmp_path: Path) -> None:
    output = OutputStore(tmp_path / "output", 1000)
    output.append("1.1.0", [OutputPiece(0, b"one")])
    (tmp_path / "output").rename(tmp_path / "before")
    for _ in ("removed", "replaced"):
        with pytest.raises(OSError, match=r"replaced|No such file"):
            output.append("1.1.0", [OutputPiece(3, b"two")])
        (tmp_path / "output").mkdir(exist_ok=True)
    (tmp_path / "output").rmdir()
    (tmp_path / "before").rename(tmp_path / "output")
    assert output.append("1.1.0", [OutputPiece(3, b"two")]) == 6


def test_damaged_file_error_hints_koala_restore(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 100)
    engine = create_engine(f"sqlite:///{path}")
    with pytest.raises(DatabaseDamaged) as refusal, unavailable_is_known(), engine.connect() as connection:
        connection.execute(text("SELECT count(*) FROM sqlite_master"))
    engine.dispose()
    assert "koala restore" in (refusal.value.hint or "")


def test_prepared_query_of_changed_table_counts_as_unavailable() -> None:
    """PostgreSQL answers so to a standby daemon that reads the lease while another one upgrades the database."""
    with pytest.raises(StoreUnavailable, match="cached plan"), unavailable_is_known():
        raise NotSupportedError("select", {}, Exception("cached plan must not change result type"))
