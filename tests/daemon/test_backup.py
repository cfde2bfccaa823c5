"""Creation and restoration of backups of a data directory, without a running daemon."""

import errno
import json
import os
import shutil
import sqlite3
import stat
import time
from contextlib import closing
from pathlib import Path

import pytest

from koalapy.daemon.backup import check_restored, make_backup, restore_backup
from koalapy.model.errors import ConflictError, NotFoundError, StoreUnavailable, UsageError
from koalapy.store.job_numbers import BLOCK, COMMIT_FILE, recorded_numbers
from koalapy.store.opening import open_stores
from koalapy.store.output import OutputStore


@pytest.fixture(autouse=True)
def _no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KOALA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("koalapy.daemon.backup.installed_configuration", lambda: None)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Create a data directory of a stopped daemon, with files of every kind."""
    folder = tmp_path / "data"
    folder.mkdir()
    stores = open_stores(f"sqlite:///{folder / 'koala.db'}", OutputStore(folder / "output", 1000), time.time)
    stores.jobs.release_lease()
    stores.jobs.close()
    for name in ("token", "output/7/1.1.0@0", "results/1.tar", "clusters/north/spool/x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")
        (folder / name).chmod(0o644)
    (folder / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe")
    return folder


def list_paths(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def read_lease(database: Path) -> tuple[int, int, float]:
    with closing(sqlite3.connect(database)) as connection:
        row: tuple[int, int, float] = connection.execute("SELECT last_job, epoch, expires_at FROM lease").fetchone()
        return row


def execute_sql(database: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(statement, values)
        connection.commit()


@pytest.mark.evidence("A6")
def test_make_backup_under_loose_umask_is_private(data_dir: Path, tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        summary = make_backup(tmp_path / "backup", data_dir, None, files_only=False)
    finally:
        os.umask(umask)
    assert (summary.database, summary.files) == ("sqlite", 3)
    folder = tmp_path / "backup"
    assert list_paths(folder) == [
        "SHA256SUMS", "backup.json", "files/output/7/1.1.0@0", "files/results/1.tar", "files/token", "koala.db"
    ]  # fmt: skip
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert (folder / "files/token").read_text() == "content of token"


def test_restore_backup_into_empty_folder_gives_same_data(data_dir: Path, tmp_path: Path) -> None:
    make_backup(tmp_path / "backup", data_dir, None, files_only=False)
    target = tmp_path / "other"
    _, displaced = restore_backup(tmp_path / "backup", target, None, replace=False)
    assert displaced is None
    assert list_paths(target) == ["koala.db", "output/7/1.1.0@0", "results/1.tar", "token"]
    for path in (target, *target.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert read_lease(target / "koala.db")[1:] == (1, 0.0)


def test_restore_backup_with_replace_keeps_old_data_and_numbers(data_dir: Path, tmp_path: Path) -> None:
    make_backup(tmp_path / "backup", data_dir, None, files_only=False)
    execute_sql(data_dir / "koala.db", "UPDATE lease SET last_job = 40, epoch = 9")
    (data_dir / "token").write_text("another")
    with pytest.raises(ConflictError, match="is not empty"):
        restore_backup(tmp_path / "backup", data_dir, None, replace=False)
    assert (data_dir / "token").read_text() == "another"
    _, displaced = restore_backup(tmp_path / "backup", data_dir, None, replace=True)
    assert displaced is not None
    assert (displaced / "token").read_text() == "another"
    assert read_lease(displaced / "koala.db")[:2] == (40, 9)
    assert (data_dir / "token").read_text() == "content of token"
    assert read_lease(data_dir / "koala.db") == (0, 9, 0.0), "no job was removed by age"
    assert recorded_numbers(data_dir / "job-numbers") == 40
    assert (data_dir / "clusters/north/spool/x").exists(), "agents keep what runs"
    (data_dir / "koala.db").write_text("not a database at all, but something that is damaged")
    restore_backup(tmp_path / "backup", data_dir, None, replace=True)
    assert recorded_numbers(data_dir / "job-numbers") == 40, "as recorded by the data that is replaced"
    (data_dir / "job-numbers").unlink()
    (data_dir / "koala.db").write_text("not a database at all, but something that is damaged")
    (data_dir / "output/51").mkdir()
    restore_backup(tmp_path / "backup", data_dir, None, replace=True)
    assert recorded_numbers(data_dir / "job-numbers") > 51 + BLOCK, "by the output, as the database does not say"


@pytest.mark.parametrize("entry", ["koala.db", "files/token", "files/output/7/1.1.0@0", "SHA256SUMS"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_restore_backup_with_damaged_file_is_refused(data_dir: Path, tmp_path: Path, entry: str, damage: str) -> None:
    make_backup(tmp_path / "backup", data_dir, None, files_only=False)
    restore_backup(tmp_path / "backup", tmp_path / "first", None, replace=False)
    file = tmp_path / "backup" / entry
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink() if damage == "remove" else file.write_bytes(content if damage == "flip" else content[:-1])
    with pytest.raises(StoreUnavailable):
        restore_backup(tmp_path / "backup", tmp_path / "second", None, replace=False)
    assert not (tmp_path / "second").exists()


def test_restore_backup_of_earlier_version_has_no_checksums(data_dir: Path, tmp_path: Path) -> None:
    make_backup(tmp_path / "backup", data_dir, None, files_only=False)
    (tmp_path / "backup/SHA256SUMS").unlink()
    manifest = json.loads((tmp_path / "backup/backup.json").read_text())
    del manifest["checksums"]
    (tmp_path / "backup/backup.json").write_text(json.dumps(manifest))
    restore_backup(tmp_path / "backup", tmp_path / "restored", None, replace=False)
    assert (tmp_path / "restored/token").exists()


@pytest.mark.parametrize("is_renewed", [True, False])
def test_restore_backup_while_daemon_runs_is_rejected(data_dir: Path, tmp_path: Path, is_renewed: bool) -> None:
    make_backup(tmp_path / "backup", data_dir, None, files_only=False)
    database = data_dir / "koala.db"
    stores = open_stores(f"sqlite:///{database}", OutputStore(data_dir / "output", 1000), time.time)
    if not is_renewed:
        execute_sql(database, "UPDATE lease SET expires_at = 1.0")
    with pytest.raises(ConflictError, match=r"a daemon \(.*\) uses this database"):
        restore_backup(tmp_path / "backup", data_dir, None, replace=True)
    if is_renewed:
        stores.jobs.release_lease()
    else:
        execute_sql(database, "UPDATE lease SET holder = 'elsewhere:1:1'")
    stores.jobs.close()
    restore_backup(tmp_path / "backup", data_dir, None, replace=True)


def test_make_backup_into_full_or_own_folder_is_rejected(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match="is not empty"):
        make_backup(tmp_path, data_dir, None, files_only=False)
    with pytest.raises(UsageError, match="is in the data directory"):
        make_backup(data_dir / "backup", data_dir, None, files_only=False)
    with pytest.raises(NotFoundError):
        make_backup(tmp_path / "backup", tmp_path / "nothing", None, files_only=False)


def test_make_backup_of_damaged_database_leaves_no_backup(data_dir: Path, tmp_path: Path) -> None:
    (data_dir / "koala.db").write_text("nothing that SQLite knows, and more of it than one would think")
    with pytest.raises(StoreUnavailable, match="cannot copy"):
        make_backup(tmp_path / "backup", data_dir, None, files_only=False)
    assert not (tmp_path / "backup").exists()


def test_restore_backup_without_manifest_is_rejected(data_dir: Path, tmp_path: Path) -> None:
    make_backup(tmp_path / "backup", data_dir, None, files_only=False)
    for text in ("", "[]", json.dumps({"version": "1"})):
        (tmp_path / "backup/backup.json").write_text(text)
        with pytest.raises(NotFoundError, match="is not a whole backup"):
            restore_backup(tmp_path / "backup", tmp_path / "other", None, replace=False)
    assert not (tmp_path / "other").exists()


def test_make_backup_with_postgresql_needs_files_only(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "koala.yaml"
    config.write_text("database: postgresql://koala:secret@db.example.org/koala\n")
    config.chmod(0o644)
    with pytest.raises(UsageError, match="PostgreSQL") as refusal:
        make_backup(tmp_path / "backup", data_dir, config, files_only=False)
    assert "pg_dump" in refusal.value.hint
    summary = make_backup(tmp_path / "backup", data_dir, config, files_only=True)
    assert (summary.database, summary.configuration) == ("elsewhere", str(config))
    assert stat.S_IMODE((tmp_path / "backup/koala.yaml").stat().st_mode) == 0o600
    assert not (tmp_path / "backup/koala.db").exists()
    monkeypatch.setattr("koalapy.daemon.backup.current_holder", lambda engine, now: "")
    (data_dir / COMMIT_FILE).touch()
    _, displaced = restore_backup(tmp_path / "backup", data_dir, config, replace=True)
    assert displaced is not None
    assert (displaced / COMMIT_FILE).exists(), "the database of the dump lacks that commit"


@pytest.mark.parametrize(
    ("failing", "is_elsewhere", "error"),
    [
        ("results", False, OSError(errno.EBUSY, "Device or resource busy")),
        ("koala.db", True, OSError(errno.EACCES, "Permission denied")),
        ("koala.db", False, KeyboardInterrupt()),
    ],
)
def test_failed_restore_with_replace_moves_data_back(
    monkeypatch: pytest.MonkeyPatch,
    data_dir: Path,
    tmp_path: Path,
    failing: str,
    is_elsewhere: bool,
    error: BaseException,
) -> None:
    database, config = data_dir / "koala.db", tmp_path / "koala.yaml"
    if is_elsewhere:
        (tmp_path / "db").mkdir()
        database = database.rename(tmp_path / "db" / "koala.db")
    config.write_text(f"database: sqlite:///{database}\n")
    make_backup(tmp_path / "backup", data_dir, config, files_only=False)
    execute_sql(database, "UPDATE lease SET last_job = 40")
    (data_dir / "token").write_text("another")
    rename, errors, before = Path.rename, [error], list_paths(tmp_path)

    def rename_or_fail(source: Path, target: Path) -> Path:
        if target.name == failing and errors:
            raise errors.pop()
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", rename_or_fail)
    with pytest.raises(StoreUnavailable if isinstance(error, OSError) else KeyboardInterrupt):
        restore_backup(tmp_path / "backup", data_dir, config, replace=True)
    assert [path for path in list_paths(tmp_path) if not path.endswith(("-wal", "-shm"))] == before
    assert not list(tmp_path.glob("*/*restore-*"))
    assert (data_dir / "token").read_text() == "another"
    assert read_lease(database)[0] == 40


def restore_and_die(source: Path, data_dir: Path, renames: int) -> None:
    """Restore, and end this process at once after some renames, or at the end."""
    rename, left = Path.rename, iter(range(renames))

    def rename_or_die(source: Path, target: Path) -> Path:
        return rename(source, target) if next(left, None) is not None else os._exit(9)

    Path.rename = rename_or_die  # type: ignore[assignment,method-assign]
    restore_backup(source, data_dir, None, replace=True)
    os._exit(0)


@pytest.mark.processes
def test_killed_restore_keeps_daemons_away_until_it_is_repeated(data_dir: Path, tmp_path: Path) -> None:
    """It is killed before each of its renames and after the last one."""
    make_backup(tmp_path / "backup", data_dir, None, files_only=False)
    (data_dir / "token").write_text("another")
    template, outcomes = tmp_path / "template", list[int]()
    data_dir.rename(template)
    for count in range(20):
        shutil.rmtree(data_dir, ignore_errors=True)
        shutil.copytree(template, data_dir, symlinks=True, ignore=shutil.ignore_patterns("pipe"))
        child = os.fork()
        if not child:
            restore_and_die(tmp_path / "backup", data_dir, count)
        _, status = os.waitpid(child, 0)
        outcomes.append(os.waitstatus_to_exitcode(status))
        if not outcomes[-1]:
            break
        with pytest.raises(UsageError, match="was interrupted") as error:
            check_restored(data_dir)
        assert "--replace" in error.value.hint
        restore_backup(tmp_path / "backup", data_dir, None, replace=True)
        check_restored(data_dir)
        assert (data_dir / "token").read_text() == "content of token"
        assert read_lease(data_dir / "koala.db")[1:] == (1, 0.0)
        assert [path.read_text() for path in data_dir.glob("before-restore-*/token")].count("another") == 1
        assert not list(data_dir.glob(".restore-*"))
    assert len(outcomes) > 8
    assert outcomes == [9] * (len(outcomes) - 1) + [0]
    check_restored(data_dir)


@pytest.mark.parametrize("name", ["koala.db", "jobs.db", "db/koala.db"])
def test_restore_of_files_only_leaves_the_present_database(data_dir: Path, tmp_path: Path, name: str) -> None:
    config, database = tmp_path / "koala.yaml", data_dir / name
    database.parent.mkdir(exist_ok=True)
    (data_dir / "koala.db").rename(database)
    config.write_text(f"database: sqlite:///{database}\n")
    make_backup(tmp_path / "backup", data_dir, config, files_only=True)
    execute_sql(database, "UPDATE lease SET last_job = 40")
    (data_dir / "token").write_text("another")
    (data_dir / COMMIT_FILE).touch()
    _, displaced = restore_backup(tmp_path / "backup", data_dir, config, replace=True)
    assert displaced is not None
    assert read_lease(database)[0] == 40
    assert (data_dir / COMMIT_FILE).exists()
    assert (data_dir / "token").read_text() == "content of token"
    assert list_paths(displaced) == ["link", "output/7/1.1.0@0", "results/1.tar", "token"]


def test_backup_has_the_content_of_linked_folders(data_dir: Path, tmp_path: Path) -> None:
    (data_dir / "output").rename(tmp_path / "large-disk")
    (data_dir / "output").symlink_to(tmp_path / "large-disk")
    (data_dir / "results" / "loop").symlink_to(data_dir)
    make_backup(tmp_path / "backup", data_dir, None, files_only=False)
    restore_backup(tmp_path / "backup", tmp_path / "other", None, replace=False)
    assert list_paths(tmp_path / "other") == ["koala.db", "output/7/1.1.0@0", "results/1.tar", "token"]


def test_backup_of_external_database_is_restored_in_place(data_dir: Path, tmp_path: Path) -> None:
    config, database = tmp_path / "koala.yaml", tmp_path / "db" / "k.db"
    database.parent.mkdir()
    (data_dir / "koala.db").rename(database)
    config.write_text(f"database: sqlite:///{database}\n")
    make_backup(tmp_path / "backup", data_dir, config, files_only=False)
    execute_sql(database, "UPDATE lease SET last_job = 8")
    restore_backup(tmp_path / "backup", data_dir, config, replace=True)
    assert recorded_numbers(data_dir / "job-numbers") == 8
    assert stat.S_IMODE(database.stat().st_mode) == 0o600
    assert len(list(database.parent.glob("before-restore-*k.db"))) == 1
    assert not (data_dir / "koala.db").exists()


@pytest.mark.parametrize("name", ["koala.db", "jobs.db", "db/koala.db"])
def test_backup_of_used_database_in_data_directory_is_restored_in_place(tmp_path: Path, name: str) -> None:
    data_dir, config = tmp_path / "data", tmp_path / "koala.yaml"
    database = data_dir / name
    database.parent.mkdir(parents=True)
    config.write_text(f"database: sqlite:///{database}\n")
    stores = open_stores(f"sqlite:///{database}", OutputStore(data_dir / "output", 1000), time.time)
    make_backup(tmp_path / "backup", data_dir, config, files_only=False)  # with the write-ahead log of the daemon
    stores.jobs.release_lease()
    stores.jobs.close()
    execute_sql(database, "UPDATE lease SET epoch = 9")
    _, displaced = restore_backup(tmp_path / "backup", data_dir, config, replace=True)
    assert displaced is not None
    assert read_lease(displaced / name)[1] == 9
    assert read_lease(database) == (0, 9, 0.0)
    shutil.rmtree(data_dir)
    restore_backup(tmp_path / "backup", data_dir, config, replace=False)
    assert read_lease(database) == (0, 1, 0.0)
    assert list_paths(data_dir) == [name]


def test_restore_to_another_disk_gives_database_to_owner_of_data_directory(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, database, given = tmp_path / "koala.yaml", tmp_path / "db" / "koala.db", list[Path]()
    database.parent.mkdir()
    (data_dir / "koala.db").rename(database)
    config.write_text(f"database: sqlite:///{database}\n")
    make_backup(tmp_path / "backup", data_dir, config, files_only=False)
    if os.getuid() == 0:
        os.chown(data_dir, 1, 1)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda path, *owner, **_: given.append(path))
    monkeypatch.setattr(shutil, "move", shutil.copy2)  # a rename keeps the owner, but is impossible
    restore_backup(tmp_path / "backup", data_dir, config, replace=True)
    assert database.parent in {path.parent for path in given}
