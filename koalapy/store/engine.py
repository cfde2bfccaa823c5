"""Create engines for database URLs, and convert database errors to those of ``model.errors``."""

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
    NotSupportedError,
    OperationalError,
    TimeoutError,
)
from sqlalchemy.pool import QueuePool

from koalapy.model.errors import DatabaseDamaged, StoreUnavailable, UsageError
from koalapy.system.files import make_private_file

RESTART_HINT = "stop the daemon, put the newest copy back (koala restore), and start the daemon"
MIN_SIZE = 512
"""Minimum size in bytes of a database with a table."""


class OpenFiles:
    """The files of a SQLite database and its write-ahead log, identified by device and inode.

    One connection stays open, so that SQLite never deletes and recreates the log.
    """

    def __init__(self, database: Path) -> None:
        self._anchor = sqlite3.connect(database, check_same_thread=False)
        with closing(self._anchor.execute("SELECT count(*) FROM sqlite_master")) as cursor:
            cursor.fetchone()
        files = (database.absolute(), Path(f"{database.absolute()}-wal"))
        self._identities: Mapping[Path, tuple[int, int]] = {
            path: (status.st_dev, status.st_ino) for path in files if (status := _stat_file(path)) is not None
        }

    def check(self) -> None:
        """Raise ``StoreUnavailable`` if a file was removed, replaced or truncated since it was opened."""
        for path, identity in self._identities.items():
            status = _stat_file(path)
            if status is None:
                raise StoreUnavailable(f"{path} was removed while the daemon uses it", hint=RESTART_HINT)
            if (status.st_dev, status.st_ino) != identity:
                raise StoreUnavailable(f"{path} was replaced while the daemon uses it", hint=RESTART_HINT)
            if not path.name.endswith("-wal") and status.st_size < MIN_SIZE:
                raise StoreUnavailable(f"{path} was truncated while the daemon uses it", hint=RESTART_HINT)

    def close(self) -> None:
        self._anchor.close()


def open_files_of(engine: Engine) -> OpenFiles | None:
    """Return the files of a database; None for a database in memory or on a server."""
    path = file_of(engine.url)
    return None if path is None else OpenFiles(path)


def _stat_file(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


MEMORY = "memory:"
"""URL of a database in memory, which ends with its engine."""
SURROGATE = re.compile(r"\\ud", re.IGNORECASE)
"""Beginning of an escaped surrogate in JSON, paired or not."""
SHARED_CONNECTION: dict[str, Any] = {
    "connect_args": {"check_same_thread": False},
    "poolclass": QueuePool,
    "pool_size": 1,
    "max_overflow": 0,
}
WRITING = {"koala_writes": True}
"""Execution options of an engine for writing transactions."""
# With postgresql_readonly, later writes would ignore a read-only server.
SNAPSHOT = {"isolation_level": "REPEATABLE READ"}
SQLITE_BUSY_TIMEOUT = 3000
"""Milliseconds that SQLite waits while another process locks the database."""
RETRY_HINT = "try again when it is back"
POOLER_HINT = (
    "connect to the server itself, or let PgBouncer use pool_mode = session and ignore_startup_parameters = options"
)
POOL_TIMEOUT = 5.0
"""Seconds to wait for a free connection."""
MAX_OVERFLOW = 20
"""Connections beyond the 5 that are kept, so that each thread of the daemon can have one."""
POSTGRESQL_TIMEOUTS = {
    "connect_timeout": "5",
    "tcp_user_timeout": "10000",
    "client_encoding": "utf8",
    "options": "-c lock_timeout=5000 -c idle_in_transaction_session_timeout=30000",
}
"""Timeouts of PostgreSQL connections, in seconds (``connect_timeout``) and milliseconds (others).

The client gives up an unresponsive server. The server ends an idle transaction of a lost client, since its locks would
block the next try. A URL may override these.
"""


def make_engine(url: str) -> Engine:
    """Return an engine for ``sqlite:///PATH``, ``postgresql://HOST/NAME`` or ``memory:``.

    Raise ``UsageError`` for others.
    """
    if url == MEMORY:
        # The database exists in one connection only, which threads share.
        return _sqlite_engine(make_url("sqlite://"), **SHARED_CONNECTION)
    try:
        parts = make_url(url)
        kind = parts.drivername.partition("+")[0]
        if kind == "sqlite":
            return _sqlite_engine(parts)
        if kind in ("postgresql", "postgres"):
            return _postgresql_engine(parts)
    except ArgumentError as error:
        raise _no_database(url) from error
    raise _no_database(url)


def file_of(url: str | URL | None) -> Path | None:
    """Return the file of a SQLite database; None for other databases and in memory."""
    if not url or not str(url).startswith("sqlite"):
        return None
    name = make_url(url).database
    return Path(name) if name and name != ":memory:" and not name.startswith("file:") else None


def _no_database(url: str) -> UsageError:
    """Return the error for a URL that names no supported database."""
    kind = url.partition(":")[0]
    hint = "give sqlite:///PATH, postgresql://USER@HOST/NAME, or memory: for a trial"
    return UsageError(f"database: {kind}:… is not a database that koala knows", field="database", value=kind, hint=hint)


def _encode_json(value: Any) -> str:
    """Return a value as JSON without lone surrogates, which no message can contain."""
    text = _to_json(value)
    if not SURROGATE.search(text):
        return text
    encodable = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return _to_json(encodable)


_to_json = json.JSONEncoder(separators=(",", ":")).encode
JSON = {"json_serializer": _encode_json}


def _sqlite_engine(url: URL, **options: Any) -> Engine:
    """Return an engine with a write-ahead log and explicit transactions, so that readers never wait for the writer.

    Commits are durable (``synchronous=FULL``). Commands are sent only afterwards, and a daemon that lost them would
    treat its own processes as foreign. The file is private to the account; SQLite gives its companion files the same
    mode.
    """
    if (path := file_of(url)) is not None:
        with suppress(OSError):  # SQLite itself reports the error
            make_private_file(path)
            for companion in filter(Path.exists, (Path(f"{path}-wal"), Path(f"{path}-shm"))):
                make_private_file(companion)
    options = {"max_overflow": MAX_OVERFLOW} | options
    engine = create_engine(url, **JSON, pool_timeout=POOL_TIMEOUT, **options)

    @event.listens_for(engine, "connect")
    def _set_up(connection: Any, _: object) -> None:
        """Set a new connection's transaction mode, timeout and durability."""
        connection.isolation_level = None  # otherwise the driver begins a transaction only at the first change
        connection.execute(f"PRAGMA busy_timeout={SQLITE_BUSY_TIMEOUT}").close()
        if connection.execute("PRAGMA page_count").fetchone()[0] == 0:
            # Works only in an empty database. It lets deleted pages be returned to the disk in steps.
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL").close()
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A transaction that reads first and then writes could not wait for another writer, so it locks at its
        # beginning.
        writes = connection.get_execution_options().get("koala_writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgresql_engine(url: URL) -> Engine:
    """Return an engine that uses psycopg 3 and replaces connections that the server has closed."""
    url = url.set(drivername="postgresql+psycopg", query={**POSTGRESQL_TIMEOUTS, **url.query})
    try:
        return create_engine(url, **JSON, pool_pre_ping=True, pool_timeout=POOL_TIMEOUT, max_overflow=MAX_OVERFLOW)
    except ModuleNotFoundError as error:
        problem, hint = "database: PostgreSQL needs the package psycopg", "pip install 'koalapy[postgresql]'"
        raise UsageError(problem, field="database", value="postgresql", hint=hint) from error


def check_sessions(engine: Engine) -> None:
    """Raise ``UsageError`` if a pooler gives the session of an idle connection of this process to another one."""
    if engine.dialect.name != "postgresql":
        return
    query = "select pg_backend_pid()"
    with unavailable_is_known(), engine.connect() as idle, engine.connect() as busy:
        session = idle.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql(query).scalar()
        if busy.exec_driver_sql(query).scalar() == session or idle.exec_driver_sql(query).scalar() != session:
            problem = "database: a pooler gives each transaction another session of the PostgreSQL server"
            raise UsageError(problem, field="database", hint=POOLER_HINT)


def reading(engine: Engine) -> Engine:
    """Return an engine for transactions that read one consistent snapshot."""
    return engine if engine.dialect.name == "sqlite" else engine.execution_options(**SNAPSHOT)


def writing(engine: Engine) -> Engine:
    """Return an engine for transactions that write."""
    return engine.execution_options(**WRITING)


@contextmanager
def unavailable_is_known() -> Iterator[None]:
    """Convert errors of a locked, full, damaged or unreachable database to ``StoreUnavailable``."""
    try:
        yield
    except (OperationalError, InterfaceError, InternalError, NotSupportedError) as error:
        # PostgreSQL does not support a prepared query once another daemon has changed its tables.
        reason = " ".join(str(error.orig).split())
        hint = POOLER_HINT if "unsupported startup parameter" in reason else RETRY_HINT
        raise StoreUnavailable(f"the database does not answer: {reason}", hint=hint) from error
    except DatabaseError as error:
        if type(error) is not DatabaseError:  # a programming error, such as a violated constraint
            raise
        reason = " ".join(str(error.orig).split())
        raise DatabaseDamaged(f"the database is damaged: {reason}", hint=RESTART_HINT) from error
    except TimeoutError as error:
        raise StoreUnavailable("the database does not answer: all connections are busy", hint=RETRY_HINT) from error
