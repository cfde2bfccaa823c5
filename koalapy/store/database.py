"""Shared database access of the SQL stores: sessions, helpers, and the lease by which one daemon writes at a time.

The lease is a row with an epoch that each new holder increments.
"""

import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any, TypeVar

import structlog
from sqlalchemy import (
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    RowMapping,
    Table,
    bindparam,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from koalapy.model.errors import ConflictError, LeaseLost, StoreUnavailable
from koalapy.model.job_search import LITERAL_STAR
from koalapy.store.engine import RESTART_HINT, RETRY_HINT, open_files_of, reading, unavailable_is_known, writing
from koalapy.store.tables import lease

log = structlog.get_logger()


LEASE_SECONDS = 30.0
POLL_INTERVAL = 1.0
"""Seconds between two reads of a lease that is watched."""
LOCK_TIMEOUT_S = 10.0
"""Seconds that a transaction waits for earlier ones of this process, also on a busy machine."""
HOLDER_LOCK = 0x6B6F616C
"""First number of the advisory lock of the lease's holder; the second is the epoch."""
START_LOCK = 0x6B6F616C61
"""Number of the advisory lock of daemons that start, one after the other; arbitrary."""
_TRY_LOCK = text("select pg_try_advisory_lock(:kind, :epoch)")
IS_LOCKED = (
    "exists(select 1 from pg_locks where locktype = 'advisory' and granted and objsubid = 2"
    " and database = (select oid from pg_database where datname = current_database())"
    f" and classid::bigint = {HOLDER_LOCK} and objid::bigint = lease.epoch)"
)
"""SQL of whether a session holds the lock of the lease's holder."""
_READ_LOCK = text(f"select {IS_LOCKED} from lease")
_FIND_HOLDER = select(lease.c.instance, lease.c.epoch, lease.c.batch, lease.c.holder, lease.c.expires_at)
"""The columns of the lease that all versions have."""
_NOTE_BATCH = update(lease).values(batch=bindparam("number"))
_READ_LEASE = select(lease.c.epoch, lease.c.holder, lease.c.batch).with_for_update(read=True)
_LOCK_LEASE = select(lease.c.epoch, lease.c.holder, lease.c.batch).with_for_update()
"""Statements of each transaction. To build one takes longer than to run it."""


class FairLock:
    """A lock that threads of this process get in the order in which they asked for it. It is not reentrant.

    SQLite's own waiting is not fair: a thread that writes again and again can starve another one.
    """

    def __init__(self, timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._is_held = False

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """Hold the lock. Raise ``StoreUnavailable`` if it is not free within the timeout."""
        waiter = threading.Lock()
        with self._lock:
            if is_first := not self._is_held:
                self._is_held = True
            else:
                waiter.acquire()
                self._waiting.append(waiter)
        if not is_first and not waiter.acquire(timeout=self._timeout_s):
            with self._lock:
                if waiter in self._waiting:  # else it got the lock just at the timeout
                    self._waiting.remove(waiter)
                    raise StoreUnavailable("the database does not answer: another transaction goes on", hint=RETRY_HINT)
        try:
            yield
        finally:
            with self._lock:
                if self._waiting:
                    self._waiting.popleft().release()
                else:
                    self._is_held = False


@dataclass(frozen=True, slots=True)
class Claim:
    """How a daemon takes the lease."""

    address: str = ""
    """The URL at which it serves, for the clients of standby daemons."""
    dead: float | None = None
    """The expiry of a lease whose holder has ended or hangs; it may be taken unless it was renewed since."""


NEW_CLAIM = Claim()


class HolderSession:
    """A session of a PostgreSQL server with a lock that tells standby daemons that the holder of the lease lives.

    The server drops the lock as soon as the process has ended in any way (``store/standby.py``).
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None

    def hold_lock(self, epoch: int) -> None:
        """Lock the present ``epoch`` of the lease, unless it is locked. After a failure the next call tries again."""
        for _ in range(2):  # a server that was restarted has closed the old session, and may accept a new one at once
            try:
                if self._connection is None:
                    self._connection = self._engine.connect()
                    self._connection.execution_options(isolation_level="AUTOCOMMIT")
                if not self._connection.execute(_READ_LOCK).scalar():
                    self._connection.execute(_TRY_LOCK, {"kind": HOLDER_LOCK, "epoch": epoch})
            except SQLAlchemyError:
                self.close()
            else:
                return

    def close(self) -> None:
        if self._connection is not None:
            with suppress(SQLAlchemyError):
                self._connection.invalidate()
            self._connection.close()
            self._connection = None


class Lease:
    """A lease that this process holds until ``release``. Every writing transaction checks it."""

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
        check_files: Callable[[], None] = lambda: None,
        claim: Claim | None = NEW_CLAIM,
        upgrade: Callable[[Connection], None] = lambda _: None,
    ) -> None:
        """Take the lease. Raise ``ConflictError`` if another daemon holds it. Without a ``claim`` only read it.

        ``check_files`` raises ``StoreUnavailable`` if the database files were removed or replaced, so that writes would
        be lost. ``upgrade`` upgrades the tables in the transaction that takes the lease, so that no daemon of an older
        version writes to them afterwards.
        """
        self._engine, self._clock, self._check_files = engine, clock, check_files
        self._write_lock = FairLock() if engine.dialect.name == "sqlite" else None
        self.last_commit = 0, 0
        """Epoch and number of the last transaction of the previous holder."""
        self._batch = 0
        """Number of the last batch that is known to be stored."""
        self._rising = 0
        """The epoch (number of the lease's holder) that ``raise_epoch`` is writing, which may already be stored."""
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{_boot_of(os.getpid())}"
        self._session: HolderSession | None = None
        self.instance: str
        if claim is None:
            with engine.connect() as connection:
                self.instance, self.epoch = connection.execute(select(lease.c.instance)).scalar_one(), 0
            return
        self._address, self._upgrade = claim.address, upgrade
        doubtful = self._try_to_acquire(claim.dead)
        if doubtful is not None:
            self._watch_lease(doubtful, sleep)
            self._try_to_acquire(dead=doubtful)
        if engine.dialect.name == "postgresql":
            self._session = HolderSession(engine)
            self._session.hold_lock(self.epoch)

    def _try_to_acquire(self, dead: float | None) -> float | None:
        """Take the lease and return None, or return its expiry if clocks do not show whether its holder lives.

        ``dead`` is such an expiry, which its holder did not renew. Raise ``ConflictError`` if another daemon holds the
        lease.
        """
        with self._engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text(f"select pg_advisory_xact_lock({START_LOCK})"))
            is_used = inspect(connection).has_table(lease.name)
            row = connection.execute(_FIND_HOLDER.with_for_update()).first() if is_used else None
            now = self._clock()  # read after the lock: the holder may have renewed while this waited
            if row is not None and _is_doubtful(connection, row.holder, row.expires_at, now, dead):
                return float(row.expires_at)
            self._upgrade(connection)  # which may take longer than a lease
            if row is None:
                self.instance, self.epoch = uuid.uuid4().hex[:8], 1
                connection.execute(insert(lease).values(id=1, instance=self.instance, **self._lease_values()))
                return None
            self.last_commit = row.epoch, row.batch
            self.instance, self.epoch = row.instance, row.epoch + 1
            connection.execute(update(lease).values(**self._lease_values()))
            return None

    def _watch_lease(self, expiry: float, sleep: Callable[[float], None]) -> None:
        """Watch a lease for as long as it lasts. Raise ``ConflictError`` if its holder renews it."""
        problem = "this machine's clock does not show whether the lease has ended: it is watched"
        log.warning(problem, action="lease-watched", s=LEASE_SECONDS)
        for _ in range(int(LEASE_SECONDS / POLL_INTERVAL)):
            sleep(POLL_INTERVAL)
            with self._engine.connect() as connection:
                row = connection.execute(_FIND_HOLDER).one()
            if row.expires_at != expiry:
                if row.expires_at <= 0.0:
                    return  # released
                raise _conflict_error(row.holder)

    def _lease_values(self) -> dict[str, object]:
        return {
            "epoch": self.epoch,
            "holder": self.holder,
            "address": self._address,
            "expires_at": self._clock() + LEASE_SECONDS,
            "batch": 0,
        }

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Begin a transaction that checks the lease. Raise ``LeaseLost`` or ``StoreUnavailable``."""
        with self._checked_transaction() as connection:
            self._check_lease(connection)
            yield connection

    @contextmanager
    def _checked_transaction(self) -> Iterator[Connection]:
        """Yield a connection in a transaction. Check before and after it that the database files were not replaced."""
        self._check_files()
        lock = nullcontext() if self._write_lock is None else self._write_lock.acquire()
        with lock, unavailable_is_known(), self._engine.begin() as connection:
            yield connection
        self._check_files()

    @contextmanager
    def writing_once(self, number: int) -> Iterator[Connection | None]:
        """Begin transaction ``number``, or yield None if it was committed before.

        Numbers increase with each new transaction. The response to a commit may be lost although it was carried out.
        """
        with self._checked_transaction() as connection:
            last_number = self._check_lease(connection, to_change=True)
            if last_number >= number:
                yield None
            else:
                connection.execute(_NOTE_BATCH, {"number": number})
                yield connection
        self._batch = max(self._batch, number)

    def _check_lease(self, connection: Connection, *, to_change: bool = False) -> int:
        """Return the number of the last stored batch, and lock the row until the transaction ends.

        Raise ``LeaseLost`` if another daemon has taken the lease. Raise ``StoreUnavailable`` if the content is older
        than the last commit, as after a copy was restored.
        """
        row = connection.execute(_LOCK_LEASE if to_change else _READ_LEASE).one()
        if row.epoch < self.epoch or (row.epoch == self.epoch and row.batch < self._batch):
            raise StoreUnavailable(
                "the database was replaced by an older copy while the daemon used it", hint=RESTART_HINT
            )
        if row.epoch != self.epoch and (row.epoch, row.holder) != (self._rising, self.holder):
            raise LeaseLost(
                f"another daemon (run {row.epoch}) has taken over the database from this one (run {self.epoch})"
            )
        return int(row.batch)

    def raise_epoch(self, epoch: int) -> None:
        """Store a higher epoch, the number that each new holder of the lease increments.

        May be repeated if the result is unknown. Raise ``LeaseLost`` if another daemon has taken over.
        """
        self._rising = epoch
        with self.writing() as connection:
            connection.execute(update(lease).values(epoch=epoch))
        self.epoch = epoch

    def renew(self, now: float) -> None:
        with self._checked_transaction() as connection:
            self._check_lease(connection, to_change=True)
            connection.execute(update(lease).values(expires_at=now + LEASE_SECONDS))
        if self._session is not None:
            self._session.hold_lock(self.epoch)

    def release(self) -> None:
        """Set the lease to expired, so that the next daemon starts at once."""
        with self._checked_transaction() as connection:
            connection.execute(update(lease).where(lease.c.epoch == self.epoch).values(expires_at=0.0))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


def current_holder(engine: Engine, now: float) -> str:
    """Return the host and process that may hold a lease now; empty if no process does or the database has no lease."""
    with unavailable_is_known(), engine.connect() as connection:
        if not inspect(connection).has_table(lease.name):
            return ""
        row = connection.execute(select(lease.c.holder, lease.c.expires_at)).first()
        if row is None or row.expires_at <= 0.0 or not _may_hold(connection, row.holder):
            return ""
        # A daemon that cannot renew its lease, as on a full disk, goes on.
        is_here = row.holder.rsplit(":", 2)[0] == socket.gethostname()
        if row.expires_at <= now and not is_here and not _is_locked(connection):
            return ""
    return str(row.holder.rsplit(":", 1)[0])


def _is_doubtful(connection: Connection, holder: str, expiry: float, now: float, dead: float | None) -> bool:
    """Return whether a lease has to be watched before it is taken; False if it may be taken at once.

    Raise ``ConflictError`` if its holder lives. ``dead`` is the expiry of a lease that was watched: its holder lives if
    it has another one. Clocks may differ: a locked lease may last after its expiry, and one far ahead may have ended.
    """
    if expiry <= 0.0 or expiry == dead:
        return False
    if dead is not None or (now < expiry <= now + LEASE_SECONDS and _may_hold(connection, holder)):
        raise _conflict_error(holder)
    return _is_locked(connection) if expiry <= now else _may_hold(connection, holder)


def _may_hold(connection: Connection, holder: str) -> bool:
    """Return whether the holder may still run. A process of another container may have its host name and id."""
    return may_live(holder) or _is_locked(connection)


def _is_locked(connection: Connection) -> bool:
    """Return whether the session of the lease's holder goes on, which a PostgreSQL server knows."""
    return connection.dialect.name == "postgresql" and bool(connection.execute(_READ_LOCK).scalar())


def _conflict_error(holder: str) -> ConflictError:
    return ConflictError(
        f"another daemon ({holder.rsplit(':', 1)[0]}) serves this database",
        hint="end it first, or give this one its own --data-dir; with PostgreSQL, --standby waits to take over from it",
    )


def _boot_of(pid: int) -> str:
    """Return the start time of a process on this machine in clock ticks; empty if the process does not exist."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def may_live(holder: str) -> bool:
    """Return whether the holder may still run. Only a process on this machine can be known to have ended."""
    host, pid, boot = holder.rsplit(":", 2)
    return host != socket.gethostname() or _boot_of(int(pid)) == boot


Id = TypeVar("Id", int, str)

MAX_IDS = 500
"""Maximum ids in one query."""
MAX_INSERTIONS = 1000
"""Maximum compiled insertions that are kept."""


class Database:
    """A database, opened by the daemon that holds its lease.

    Methods raise ``StoreUnavailable`` if the database does not respond. Writing raises ``LeaseLost`` if another daemon
    has taken over.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        claim: Claim | None = NEW_CLAIM,
        upgrade: Callable[[Connection], None] = lambda _: None,
    ) -> None:
        """``claim``: how to take the lease; None: the database is only read, and each write raises ``LeaseLost``.
        ``upgrade`` upgrades the tables in the transaction that takes the lease."""
        self.engine = engine
        self._reader = reading(engine)
        with unavailable_is_known():
            self.lease = Lease(writing(engine), clock, sleep, self.check_files, claim, upgrade)
            self._files = open_files_of(engine)

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    def check_files(self) -> None:
        """Raise ``StoreUnavailable`` if the database's files were removed or replaced."""
        if self._files is not None:
            self._files.check()

    def close(self) -> None:
        self.lease.close()
        self.engine.dispose()
        if self._files is not None:
            self._files.close()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yield a connection in a read transaction, which sees one consistent snapshot."""
        self.check_files()  # a new connection would open any file of that name
        with unavailable_is_known(), self._reader.connect() as connection:
            yield connection

    def rows(self, query: Any) -> Sequence[RowMapping]:
        with self.reading() as connection:
            return connection.execute(query).mappings().all()

    def writing(self) -> AbstractContextManager[Connection]:
        """Begin a writing transaction, which checks the lease."""
        return self.lease.writing()


class DatabaseStore:
    """Some tables of a database. Calls block; writing raises the errors of ``Database``."""

    def __init__(self, database: Database) -> None:
        self._database = database


class Insertion:
    """A compiled statement that inserts rows with certain columns into a table.

    It converts values as SQLAlchemy does, which compiles and converts anew in each ``execute``.
    """

    def __init__(self, dialect: Dialect, table: Table, names: tuple[str, ...]) -> None:
        compiled: Any = insert(table).inline().compile(dialect=dialect, column_keys=names)
        self._text: str = compiled.string
        self._is_positional: bool = compiled.positional
        self._names: tuple[str, ...] = tuple(compiled.positiontup) if compiled.positional else names
        self._converters = [
            (index, convert)
            for index, name in enumerate(self._names)
            if (convert := table.c[name].type.dialect_impl(dialect).bind_processor(dialect)) is not None
        ]

    def execute(self, connection: Connection, rows: Iterable[dict[str, Any]]) -> None:
        """Insert rows, which may have more columns."""
        select_values: Any = itemgetter(*self._names, *self._names[:1])  # two names at least, for a tuple
        parameters: list[Any] = []
        for row in rows:
            values = list(select_values(row))
            del values[-1]
            for index, convert in self._converters:
                values[index] = convert(values[index])
            parameters.append(tuple(values) if self._is_positional else dict(zip(self._names, values, strict=True)))
        connection.exec_driver_sql(self._text, parameters)


_insertions: dict[tuple[str, Table, tuple[str, ...]], Insertion] = {}


def insert_rows(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows of the same columns. A column that is None in all of them becomes NULL, or its server's default."""
    if not rows:
        return
    names = tuple(name for name in rows[0] if any(row[name] is not None for row in rows))
    key = connection.dialect.name, table, names
    insertion = _insertions.get(key)
    if insertion is None:
        if len(_insertions) >= MAX_INSERTIONS:
            _insertions.clear()
        insertion = _insertions[key] = Insertion(connection.dialect, table, names)
    insertion.execute(connection, rows)


def upsert(
    connection: Connection, table: Table, values: Sequence[dict[str, Any]], *, replace: bool = True, add: bool = False
) -> None:
    """Insert rows. Replace existing rows with the same keys, or with ``replace=False`` leave them unchanged.

    With ``add``, add the values to those of existing rows.
    """
    if not values:
        return
    connection.execute(_make_upsert(connection.dialect.name, table, tuple(values[0]), replace, add), list(values))


@cache
def _make_upsert(dialect_name: str, table: Any, names: tuple[str, ...], replace: bool, add: bool) -> Any:
    """Return the statement of ``upsert`` for rows with these columns. To build it takes longer than to execute it."""
    statement = (sqlite if dialect_name == "sqlite" else postgresql).insert(table)
    keys = [column.name for column in table.primary_key]
    changed = {name: statement.excluded[name] for name in names if name not in keys} if replace else {}
    if add:
        changed = {name: table.c[name] + value for name, value in changed.items()}
    if changed:
        return statement.on_conflict_do_update(index_elements=keys, set_=changed)
    return statement.on_conflict_do_nothing()


def chunks(ids: Iterable[Id]) -> Iterator[list[Id]]:
    """Yield ids in lists that are short enough for one query."""
    all_ids = list(ids)
    for start in range(0, len(all_ids), MAX_IDS):
        yield all_ids[start : start + MAX_IDS]


def matches_pattern(connection: Connection, column: ColumnElement[str], pattern: str) -> ColumnElement[bool]:
    """Return the condition that a text matches a pattern, in which only ``*`` has a special meaning.

    ``LITERAL_STAR`` represents the character ``*``.
    """
    if connection.dialect.name == "sqlite":  # its LIKE ignores case
        escaped = pattern.replace("[", "[[]").replace("?", "[?]").replace(LITERAL_STAR, "[*]")
        return column.op("GLOB", is_comparison=True)(escaped)
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_").replace("*", "%")
    return column.like(escaped.replace(LITERAL_STAR, "*"), escape="\\")
