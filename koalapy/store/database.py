"""Shared database access of the SQL stores: sessions, the lease check and helpers."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from operator import itemgetter
from typing import Any, TypeVar

from sqlalchemy import Connection, Dialect, Engine, RowMapping, Table, insert
from sqlalchemy.dialects import postgresql, sqlite

from koalapy.store.engine import open_files_of, reading, unavailable_is_known, writing
from koalapy.store.lease import Lease

Id = TypeVar("Id", int, str)

MAX_IDS = 500
"""Maximum ids in one query."""
MAX_INSERTIONS = 1000
"""Maximum compiled insertions that are kept."""


class Database:
    """A migrated database, opened by the daemon that holds its lease.

    Methods raise ``StoreUnavailable`` if the database does not respond. Writing raises ``LeaseLost`` if another daemon
    has taken over.
    """

    def __init__(
        self, engine: Engine, clock: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.engine = engine
        self._reader = reading(engine)
        with unavailable_is_known():
            self._files = open_files_of(engine)
            self.lease = Lease(writing(engine), clock, sleep, self.check_files)

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    def check_files(self) -> None:
        """Raise ``StoreUnavailable`` if the database's files were removed or replaced."""
        if self._files is not None:
            self._files.check()

    def close(self) -> None:
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


def upsert(connection: Connection, table: Table, values: Sequence[dict[str, Any]], *, replace: bool = True) -> None:
    """Insert rows. Replace existing rows with the same keys, or with ``replace=False`` leave them unchanged."""
    if not values:
        return
    connection.execute(_make_upsert(connection.dialect.name, table, tuple(values[0]), replace), list(values))


@cache
def _make_upsert(dialect_name: str, table: Any, names: tuple[str, ...], replace: bool) -> Any:
    """Return the statement of ``upsert`` for rows with these columns. To build it takes longer than to execute it."""
    statement = (sqlite if dialect_name == "sqlite" else postgresql).insert(table)
    keys = [column.name for column in table.primary_key]
    changed = {name: statement.excluded[name] for name in names if name not in keys} if replace else {}
    if changed:
        return statement.on_conflict_do_update(index_elements=keys, set_=changed)
    return statement.on_conflict_do_nothing()


def chunks(ids: Iterable[Id]) -> Iterator[list[Id]]:
    """Yield ids in lists that are short enough for one query."""
    all_ids = list(ids)
    for start in range(0, len(all_ids), MAX_IDS):
        yield all_ids[start : start + MAX_IDS]
