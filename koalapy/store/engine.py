"""Engines for a database URL, and what their databases say in the words of ``model.errors``."""

import json
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    InterfaceError,
    InternalError,
    NoSuchModuleError,
    OperationalError,
    TimeoutError,
)
from sqlalchemy.pool import QueuePool

from koalapy.model.errors import DatabaseDamaged, StoreUnavailable, UsageError
from koalapy.system.files import make_private_file

RESTART_HINT = "stop the daemon, put the newest copy back (koala restore), and start the daemon"
MIN_SIZE = 512
"""Bytes that a database with a table has at least."""


class OpenFiles:
    """The database and its write-ahead log, by device and inode.

    A connection is kept open, so that SQLite itself never removes the log and makes another one.
    """

    def __init__(self, database: Path) -> None:
        self._anchor = sqlite3.connect(database, check_same_thread=False)
        with closing(self._anchor.execute("SELECT count(*) FROM sqlite_master")) as cursor:
            cursor.fetchone()
        files = (database.absolute(), Path(f"{database.absolute()}-wal"))
        self._identities: Mapping[Path, tuple[int, int]] = {
            path: (found.st_dev, found.st_ino) for path in files if (found := _stat(path)) is not None
        }

    def check(self) -> None:
        """Raise ``StoreUnavailable`` if a file is not the one that was opened, or was cut off."""
        for path, identity in self._identities.items():
            found = _stat(path)
            if found is None:
                raise StoreUnavailable(f"{path} was removed while the daemon uses it", hint=RESTART_HINT)
            if (found.st_dev, found.st_ino) != identity:
                raise StoreUnavailable(f"{path} was replaced while the daemon uses it", hint=RESTART_HINT)
            if not path.name.endswith("-wal") and found.st_size < MIN_SIZE:
                raise StoreUnavailable(f"{path} was truncated while the daemon uses it", hint=RESTART_HINT)

    def close(self) -> None:
        self._anchor.close()


def open_files_of(engine: Engine) -> OpenFiles | None:
    """Return the files of a database; None of one that is in memory, or on a server."""
    name = engine.url.database
    if engine.dialect.name != "sqlite" or not name or name == ":memory:" or name.startswith("file:"):
        return None
    return OpenFiles(Path(name))


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


MEMORY = "memory:"
"""The URL of a database that is gone with its engine."""
SURROGATE = re.compile(r"\\ud", re.IGNORECASE)
"""How surrogates begin in JSON, alone or in pairs."""
SHARED_CONNECTION: dict[str, Any] = {
    "connect_args": {"check_same_thread": False},
    "poolclass": QueuePool,
    "pool_size": 1,
    "max_overflow": 0,
}
WRITING = {"koala_writes": True}
"""Execution options of an engine for transactions that write."""
SNAPSHOT = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
SQLITE_BUSY_TIMEOUT = 3000
"""Milliseconds that SQLite waits for another process to be done with the database."""
RETRY_HINT = "try again when it is back"
POOL_TIMEOUT = 5.0
"""Seconds to wait for a connection, when all are busy."""
POSTGRESQL_TIMEOUTS = {
    "connect_timeout": "5",
    "tcp_user_timeout": "10000",
    "client_encoding": "utf8",
    "options": "-c lock_timeout=5000 -c idle_in_transaction_session_timeout=30000",
}
"""Seconds and milliseconds after which PostgreSQL is taken for gone, and after which it takes us for gone: a
transaction that was cut off must not keep its locks from the next try. A URL may say otherwise."""


def make_engine(url: str) -> Engine:
    """Return an engine for ``sqlite:///PATH``, ``postgresql://HOST/NAME`` or ``memory:``; else ``UsageError``."""
    if url == MEMORY:
        # One connection is the database: threads take turns with it.
        return _sqlite(make_url("sqlite://"), **SHARED_CONNECTION)
    try:
        parts = make_url(url)
        kind = parts.drivername.partition("+")[0]
        if kind == "sqlite":
            return _sqlite(parts)
        if kind in ("postgresql", "postgres"):
            return _postgresql(parts)
    except (ArgumentError, NoSuchModuleError) as error:
        raise _no_database(url) from error
    raise _no_database(url)


def file_of(url: str | None) -> Path | None:
    """The file of a database that is one."""
    if not url or not url.startswith("sqlite"):
        return None
    name = make_url(url).database
    return Path(name) if name and name != ":memory:" and not name.startswith("file:") else None


def _no_database(url: str) -> UsageError:
    kind = url.partition(":")[0]
    return UsageError(
        f"database: {kind}:… is no database that koala knows",
        field="database",
        value=kind,
        hint="give sqlite:///PATH, postgresql://USER@HOST/NAME, or memory: for a trial",
    )


def _dumps(value: Any) -> str:
    """Dump a value without lone surrogates, which no message could carry."""
    text = json.dumps(value, separators=(",", ":"))
    if not SURROGATE.search(text):
        return text
    encodable = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return json.dumps(encodable, separators=(",", ":"))


JSON = {"json_serializer": _dumps}


def _sqlite(url: URL, **options: Any) -> Engine:
    """With a write-ahead log, so that readers never wait for the writer, and transactions that begin when we say so.

    What is committed is on the disk (``synchronous=FULL``): commands are sent after that, and a daemon that forgot
    them would take what runs for strangers. Nobody else may read it: SQLite gives what it puts beside the file the
    file's own mode.
    """
    if url.database and url.database != ":memory:" and not url.database.startswith("file:"):
        path = Path(url.database)
        with suppress(OSError):  # SQLite itself says what is wrong
            make_private_file(path)
            for beside in filter(Path.exists, (Path(f"{path}-wal"), Path(f"{path}-shm"))):
                make_private_file(beside)
    engine = create_engine(url, **JSON, pool_timeout=POOL_TIMEOUT, **options)

    @event.listens_for(engine, "connect")
    def _set_up(connection: Any, _: object) -> None:
        connection.isolation_level = None  # else the driver begins a transaction only at its first change
        connection.execute(f"PRAGMA busy_timeout={SQLITE_BUSY_TIMEOUT}").close()
        if connection.execute("PRAGMA page_count").fetchone()[0] == 0:
            # Only while there is nothing: so what is deleted can be given back to the disk some pages at a time.
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL").close()
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # One that reads before it writes could not wait for another's end: it must be the writer from its beginning.
        writes = connection.get_execution_options().get("koala_writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgresql(url: URL) -> Engine:
    """Through psycopg 3; connections that the server has dropped meanwhile are made again."""
    url = url.set(drivername="postgresql+psycopg", query={**POSTGRESQL_TIMEOUTS, **url.query})
    try:
        return create_engine(url, **JSON, pool_pre_ping=True, pool_timeout=POOL_TIMEOUT)
    except ModuleNotFoundError as error:
        raise UsageError(
            "database: PostgreSQL needs the package psycopg",
            field="database",
            value="postgresql",
            hint="pip install 'koalapy[postgresql]'",
        ) from error


def reading(engine: Engine) -> Engine:
    """The same database, seen by each transaction as of one moment."""
    return engine if engine.dialect.name == "sqlite" else engine.execution_options(**SNAPSHOT)


def writing(engine: Engine) -> Engine:
    """The same database, for transactions that write."""
    return engine.execution_options(**WRITING)


@contextmanager
def unavailable_is_known() -> Iterator[None]:
    """What the database says when it is locked, full, damaged or away becomes ``StoreUnavailable``."""
    try:
        yield
    except (OperationalError, InterfaceError, InternalError) as error:
        reason = " ".join(str(error.orig).split())
        raise StoreUnavailable(f"the database does not answer: {reason}", hint=RETRY_HINT) from error
    except DatabaseError as error:
        if type(error) is not DatabaseError:  # a mistake of ours, such as a constraint
            raise
        reason = " ".join(str(error.orig).split())
        raise DatabaseDamaged(f"the database is damaged: {reason}", hint=RESTART_HINT) from error
    except TimeoutError as error:
        raise StoreUnavailable("the database does not answer: all connections are busy", hint=RETRY_HINT) from error
