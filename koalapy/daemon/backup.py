"""Copy a daemon's data into a backup while it runs, and restore a backup."""

import hashlib
import json
import os
import secrets
import shutil
import sqlite3
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from koalapy import __version__
from koalapy.config.settings import load_settings
from koalapy.config.strict_yaml import installed_configuration
from koalapy.model.errors import ConflictError, DatabaseDamaged, NotFoundError, StoreUnavailable, UsageError
from koalapy.runner.folders import replace_file, sync_folder
from koalapy.store.database import current_holder
from koalapy.store.engine import file_of, make_engine
from koalapy.store.job_numbers import COMMIT_FILE, LOSS_FILE, NUMBERS_FILE, UNKNOWN_PAST, JobNumbers, recorded_numbers

DATABASE, FILES, CONFIGURATION, MANIFEST = "koala.db", "files", "koala.yaml", "backup.json"
"""The entries of a backup. The manifest is written last, so a folder without one is an incomplete backup."""
CHECKSUMS = "SHA256SUMS"
"""The checksums of the other entries, which ``sha256sum --check`` verifies as well."""
DISPLACED = "before-restore-"
"""Prefix of the folder in which a restore keeps the data that it replaced."""
INCOMING = ".restore-"
UNFINISHED = ".restore-unfinished"
"""A file in the data directory while a restore replaces its entries."""
DATABASE_SUFFIXES = ("-wal", "-shm", "-journal", "")
"""Endings of the names of the files of a SQLite database, itself last."""
NOT_COPIED = ("clusters", *(f"{DATABASE}{suffix}" for suffix in DATABASE_SUFFIXES), COMMIT_FILE, LOSS_FILE)
"""Entries of a data directory that are not copied as files.

Folders of agents hold only the state of running jobs, and the database is copied separately. A restored database lacks
the changes since its backup.
"""
CHUNK_SIZE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class BackupSummary:
    """The content of a backup; sizes in bytes."""

    version: str
    """Version of koalapy that made the backup."""
    made_at: float
    """Seconds since the epoch."""
    database: str
    """``sqlite``, or ``elsewhere`` if the backup has no database."""
    database_size: int
    files: int
    files_size: int
    configuration: str
    """The configuration file that was copied; empty if there was none."""
    checksums: str = ""
    """SHA-256 of the file of checksums; empty in backups of earlier versions, which have none."""


def make_backup(target: Path, data_dir: Path, config: Path | None, *, files_only: bool) -> BackupSummary:
    """Copy the database, then the files of a data directory and the configuration, into a new folder `target`.

    The daemon may be running: the database is copied as of one point in time, and the files after it, so that no file
    that the database names is missing. Raise ``UsageError`` if the database is PostgreSQL (without `files_only`) or
    `target` is inside the data directory, ``NotFoundError`` if there is no data, ``ConflictError`` if `target` is not
    empty, and ``StoreUnavailable`` if a file cannot be read or written.
    """
    config = config or installed_configuration()
    database = _sqlite_file(load_settings(config).database, data_dir)
    if database is None and not files_only:
        raise UsageError(
            "the database is PostgreSQL, which koala backup does not copy",
            field="database",
            hint="run umask 077; pg_dump --format=custom --file=DUMP first, then koala backup DIR --files-only",
        )
    if not data_dir.is_dir() or (database is not None and not files_only and not database.is_file()):
        raise NotFoundError(
            f"there is no daemon's data in {data_dir}", field="--data-dir", hint="give the --data-dir of koala serve"
        )
    if target.resolve().is_relative_to(data_dir.resolve()):
        raise UsageError(f"{target} is in the data directory", field="DIR", hint="give a folder outside of it")
    _make_empty_folder(target)
    try:
        size = _copy_database(database, target / DATABASE) if database is not None and not files_only else 0
        files, files_size = _copy_folder(data_dir, target / FILES, NOT_COPIED, follow_links=True)
        if config is not None:
            _copy_file(config, target / CONFIGURATION)
        kind, config_path = "sqlite" if size else "elsewhere", "" if config is None else str(config)
        paths = sorted(path for path in target.rglob("*") if path.is_file() and not path.is_symlink())
        checksums = "".join(f"{_hash_file(path)}  {path.relative_to(target)}\n" for path in paths)
        _write_private(target / CHECKSUMS, checksums)
        checksum = _hash_file(target / CHECKSUMS)
        summary = BackupSummary(__version__, time.time(), kind, size, files, files_size, config_path, checksum)
        _write_private(target / MANIFEST, json.dumps(asdict(summary), indent=2))
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError):
            raise _storage_error(error, target) from error
        raise
    return summary


def restore_backup(
    source: Path, data_dir: Path, config: Path | None, *, replace: bool
) -> tuple[BackupSummary, Path | None]:
    """Restore a backup into a data directory; return its summary and the folder of the replaced data, None if none.

    Without `replace`, the data directory must be empty. A backup without a database leaves the present one. Raise
    ``ConflictError`` if the directory is not empty or a daemon uses it, ``UsageError`` if the backup is of SQLite but
    the configuration names PostgreSQL, ``NotFoundError`` if the backup is incomplete, and ``StoreUnavailable`` if a
    file cannot be read or written, or differs from its checksum.
    """
    summary = _read_manifest(source)
    _verify_checksums(source, summary)
    url = load_settings(config or installed_configuration()).database
    database = _sqlite_file(url, data_dir)
    if database is None and summary.database == "sqlite":
        raise UsageError(
            "the configuration names PostgreSQL, and the backup is of SQLite",
            field="database",
            hint="leave database out of the configuration, or give the configuration of the backup: --config",
        )
    _check_no_daemon(url, database)
    entries = os.listdir(data_dir) if data_dir.is_dir() else []
    kept = {"clusters"}
    if database is not None and summary.database != "sqlite":  # pg_restore replaces that of PostgreSQL
        kept |= _list_database_entries(database, data_dir)
    present = sorted(name for name in entries if name not in kept and not name.startswith((DISPLACED, INCOMING)))
    is_file_elsewhere = database is not None and database.parent != data_dir and database.exists()
    if (present or is_file_elsewhere) and not replace:
        raise ConflictError(
            f"{data_dir if present else database} is not empty",
            field="--data-dir",
            value=str(data_dir),
            hint="give an empty folder, or --replace, which keeps what is there in a folder beside",
        )
    try:
        with _folder_for(data_dir) as incoming:
            _copy_folder(source / FILES, incoming, kept)
            if summary.database == "sqlite":
                _prepare_database_folder(incoming, data_dir, database)
                _copy_database(source / DATABASE, incoming / DATABASE)
            _raise_numbers(incoming, database, data_dir)
            _give_to_owner_of(data_dir, incoming)
            displaced = _swap_data(incoming, data_dir, present, database)
    except OSError as error:
        raise _storage_error(error, data_dir) from error
    return summary, displaced


def _sqlite_file(url: str | None, data_dir: Path) -> Path | None:
    return file_of(url) if url else data_dir / DATABASE


def _storage_error(error: OSError, path: Path) -> StoreUnavailable:
    return StoreUnavailable(
        f"{error.filename or path}: {(error.strerror or str(error)).lower()}",
        hint="make room or mend it, and try again",
    )


def _make_empty_folder(path: Path) -> None:
    """Create a private folder, or make an empty one private. Raise ``ConflictError`` if it is not empty."""
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        is_empty = not any(path.iterdir())
        if is_empty:
            path.chmod(0o700)
    except OSError as error:
        raise _storage_error(error, path) from error
    if not is_empty:
        raise ConflictError(f"{path} is not empty", field="DIR", value=str(path), hint="give a new folder")


# Backup


def _copy_database(source: Path, target: Path) -> int:
    """Copy a SQLite database as of one point in time, and check the copy; return its size in bytes."""
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        with closing(_connect_database(source, "ro")) as original, closing(_connect_database(target, "rw")) as copy:
            original.backup(copy)
            check_result = copy.execute("PRAGMA quick_check(1)").fetchone()
        if check_result != ("ok",):
            raise StoreUnavailable(f"{source} is damaged: {check_result[0]}", hint="restore an earlier backup")
    except sqlite3.Error as error:
        raise StoreUnavailable(
            f"cannot copy {source}: {error}",
            hint="check that it is a SQLite database of koala that this account may read",
        ) from error
    return target.stat().st_size


def _connect_database(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode={mode}", uri=True, timeout=30.0)


def _copy_folder(
    source: Path, target: Path, excluded: Collection[str], *, follow_links: bool = False
) -> tuple[int, int]:
    """Copy regular files and folders, but no links; return the numbers of files and bytes.

    Skip entries that are removed during the copy. ``follow_links``: copy the content of linked folders.
    """
    target.mkdir(mode=0o700, exist_ok=True)
    files = size = 0
    try:
        entries = sorted(os.scandir(source), key=lambda entry: entry.name)
    except FileNotFoundError:
        return 0, 0
    for entry in entries:
        if entry.name in excluded or entry.name.startswith((DISPLACED, INCOMING)):
            continue
        if entry.is_dir(follow_symlinks=follow_links):
            nested = _copy_folder(Path(entry.path), target / entry.name, ())
            files, size = files + nested[0], size + nested[1]
        elif entry.is_file(follow_symlinks=False):
            with suppress(FileNotFoundError):
                size += _copy_file(Path(entry.path), target / entry.name)
                files += 1
    return files, size


def _copy_file(source: Path, target: Path) -> int:
    """Copy a regular file into a new private file, and return its size in bytes. Skip anything else and return 0."""
    descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return 0
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as copy:
            shutil.copyfileobj(file, copy, CHUNK_SIZE)
            return copy.tell()


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Restore


def _verify_checksums(source: Path, summary: BackupSummary) -> None:
    """Raise ``StoreUnavailable`` if a file of a backup is missing or has another content than it had."""
    if not summary.checksums:
        return
    damaged = CHECKSUMS
    try:
        if _hash_file(source / CHECKSUMS) == summary.checksums:
            lines = (source / CHECKSUMS).read_text().splitlines()
            pairs = (line.split("  ", 1) for line in lines)
            damaged = next((name for checksum, name in pairs if _hash_file(source / name) != checksum), "")
            if not damaged:
                return
    except OSError as error:
        raise _storage_error(error, source) from error
    raise StoreUnavailable(
        f"the backup {source} is damaged: {damaged} differs from its checksum", hint="restore another backup"
    )


def _read_manifest(source: Path) -> BackupSummary:
    """Return the summary of a backup. Raise ``NotFoundError`` if the folder has none, as after an aborted backup."""
    try:
        return BackupSummary(**json.loads((source / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise NotFoundError(
            f"{source} is not a whole backup: it has no readable {MANIFEST}",
            field="DIR",
            value=str(source),
            hint="give a folder that koala backup has made",
        ) from error


def _list_database_entries(database: Path, data_dir: Path) -> set[str]:
    """Return the entries of a data directory that stay with its database; some may not exist."""
    entries, root = {COMMIT_FILE, LOSS_FILE}, data_dir.resolve()
    if (place := database.parent.resolve() / database.name).is_relative_to(root):
        first, *below = place.relative_to(root).parts
        entries.update([first] if below else (f"{first}{suffix}" for suffix in DATABASE_SUFFIXES))
    return entries


def check_restored(data_dir: Path) -> None:
    """Raise ``UsageError`` if a restore into a data directory was killed while it replaced the content."""
    if (data_dir / UNFINISHED).exists():
        raise UsageError(
            f"koala restore was interrupted while it replaced the data in {data_dir}",
            field="--data-dir",
            value=str(data_dir),
            hint=f"repeat koala restore with --replace; what it replaces is in {data_dir}/{DISPLACED}*",
        )


def _check_no_daemon(url: str | None, database: Path | None) -> None:
    """Raise ``ConflictError`` if a running daemon uses the database at ``url``, or else the file ``database``.

    A damaged file counts as unused.
    """
    if database is not None and not database.exists():
        return
    engine = make_engine(url or f"sqlite:///{database}")
    try:
        holder = current_holder(engine, time.time())
    except DatabaseDamaged:
        if database is None:
            raise
        holder = ""  # The damaged file is going to be replaced.
    finally:
        engine.dispose()
    if holder:
        raise ConflictError(
            f"a daemon ({holder}) uses this database",
            field="--data-dir",
            hint="stop it first: systemctl stop koala-serve",
        )


@contextmanager
def _folder_for(data_dir: Path) -> Iterator[Path]:
    """Yield a new folder in the data directory for the restored data, and remove it and those of killed restores."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    incoming = data_dir / f"{INCOMING}{secrets.token_hex(4)}"
    incoming.mkdir(mode=0o700)
    try:
        yield incoming
    finally:
        for folder in data_dir.glob(f"{INCOMING}*/"):
            shutil.rmtree(folder, ignore_errors=True)


def _prepare_database_folder(incoming: Path, data_dir: Path, database: Path | None) -> None:
    """Make the folder of a database in the data directory, without the database files that were copied with the others.

    A daemon wrote them meanwhile, and a write-ahead log among them would change the restored database.
    """
    root = data_dir.resolve()
    if database is not None and (folder := database.parent.resolve()).is_relative_to(root):
        place = incoming / folder.relative_to(root)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for suffix in DATABASE_SUFFIXES:
            (place / f"{database.name}{suffix}").unlink(missing_ok=True)


def _raise_numbers(incoming: Path, replaced: Path | None, data_dir: Path) -> None:
    """Keep the job numbers and the epoch (number of the daemon run) of the replaced data, so that none is used twice.

    ``last_job`` of the lease stays as it was: the jobs up to it were removed by age, and those after it are lost.
    """
    last_job, epoch = max(recorded_numbers(folder / NUMBERS_FILE) for folder in (incoming, data_dir)), 0
    with suppress(sqlite3.Error):
        if replaced is not None and replaced.exists():
            with closing(_connect_database(replaced, "ro")) as old:
                removed, epoch = old.execute("SELECT last_job, epoch FROM lease").fetchone() or (0, 0)
                last_job = max(last_job, removed, *old.execute("SELECT coalesce(max(id), 0) FROM jobs").fetchone())
    with suppress(FileNotFoundError):
        names = os.listdir(data_dir / "output")
        used = max((int(name) for name in names if name.isdecimal() and len(name) < 19), default=0)
        last_job = max(last_job, used if last_job or not used else used + UNKNOWN_PAST)
    if last_job:
        with closing(JobNumbers(incoming / NUMBERS_FILE)) as numbers:
            numbers.give(last_job)
    if (copy := incoming / DATABASE).exists():
        with closing(_connect_database(copy, "rw")) as restored, suppress(sqlite3.OperationalError):  # without tables
            restored.execute("UPDATE lease SET epoch = max(epoch, ?), expires_at = 0", (epoch,))
            restored.commit()


def _give_to_owner_of(data_dir: Path, incoming: Path) -> None:
    """Give restored files to the owner of the data directory if this process runs as root."""
    owner = data_dir.stat()
    if os.geteuid() == 0 and owner.st_uid != 0:
        for path in (incoming, *incoming.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _swap_data(incoming: Path, data_dir: Path, present: list[str], database: Path | None) -> Path | None:
    """Move the present data into a new folder and the restored data into its place, the database last.

    Return the folder with the replaced data, or None if there was none. A replaced database outside of the data
    directory is renamed where it is. If anything fails, the present data is moved back.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    displaced = data_dir / f"{DISPLACED}{stamp}-{secrets.token_hex(2)}"
    renames = [(data_dir / name, displaced / name) for name in present]
    renames += [(entry, data_dir / entry.name) for entry in incoming.iterdir() if entry.name != DATABASE]
    restored, target = incoming / DATABASE, database or data_dir / DATABASE
    copy = target.with_name(f"{INCOMING}{secrets.token_hex(4)}")
    try:
        if restored.exists():
            if not target.parent.resolve().is_relative_to(data_dir.resolve()):
                olds = (Path(f"{target}{suffix}") for suffix in DATABASE_SUFFIXES)
                renames += [(old, old.with_name(f"{DISPLACED}{stamp}-{old.name}")) for old in olds if old.exists()]
                shutil.move(restored, copy)  # it may be on another disk
                _give_to_owner_of(data_dir, copy)  # a copy to another disk is of this account
                restored = copy
            renames.append((restored, target))
        if present:
            displaced.mkdir(mode=0o700)
            _give_to_owner_of(data_dir, displaced)
        with _marked_unfinished(data_dir):
            _rename_all(renames)
    except BaseException:
        with suppress(OSError):
            copy.unlink(missing_ok=True)
            displaced.rmdir()
        raise
    return displaced if present else None


@contextmanager
def _marked_unfinished(data_dir: Path) -> Iterator[None]:
    """Mark a data directory while its entries are replaced, so that no daemon uses it if this process is killed."""
    mark = data_dir / UNFINISHED
    replace_file(mark, b"")
    _give_to_owner_of(data_dir, mark)
    try:
        yield
    finally:
        sync_folder(data_dir)
        mark.unlink()


def _rename_all(renames: Sequence[tuple[Path, Path]]) -> None:
    """Rename files and folders, each a source and a target. If one fails, undo those before it."""
    try:
        for source, target in renames:
            source.rename(target)
    except BaseException:
        for source, target in reversed(renames):
            if not os.path.lexists(source):
                with suppress(OSError):
                    target.rename(source)
        raise
