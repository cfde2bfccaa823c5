"""Stores, each in a place of its own: in memory, in SQLite, and where it is installed in PostgreSQL.

``stores`` are of each kind, and what every kind must do is tested with them; ``store`` is of each that speaks SQL.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from koalapy.store.database import Database
from koalapy.store.engine import make_engine
from koalapy.store.memory import Memory
from koalapy.store.migrate import migrate
from koalapy.store.opening import Stores, stores_in_database, stores_in_memory
from koalapy.store.output import FileOutput
from koalapy.store.sql import SqlStore
from tests.needs import postgresql
from tests.store.postgresql import Server

INSTALLED = postgresql()
collect_ignore = [] if INSTALLED else ["test_postgresql.py"]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    assert INSTALLED is not None
    server = Server(INSTALLED)
    server.start()
    yield server
    server.remove()


SQL = ["sqlite", *([pytest.param("postgresql", marks=pytest.mark.processes)] if INSTALLED else [])]


@pytest.fixture(params=SQL)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, request, tmp_path)


def url_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if kind == "sqlite":
        return f"sqlite:///{folder / 'koala.db'}"
    server: Server = request.getfixturevalue("server")
    return server.new_database()


OpenAll = Callable[[], Stores]


@pytest.fixture(params=["memory", *SQL])
def open_stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenAll]:
    """Opens all stores of one place as a new daemon would; the one before lets go of its lease first."""
    output = FileOutput(tmp_path / "output", 1000)
    if request.param == "memory":
        memory, before = Memory(), list[Stores]()

        def open_next() -> Stores:
            for stores in before:
                stores.jobs.release_lease()
            before.append(stores_in_memory(memory, output))
            return before[-1]

        yield open_next
        return
    opened = sql_stores(url_of(request.param, request, tmp_path))
    open_store = next(opened)
    yield lambda: stores_in_database(open_store().database, output)
    next(opened, None)


@pytest.fixture
def stores(open_stores: OpenAll) -> Stores:
    return open_stores()


def database_of(stores: Stores) -> Database | None:
    return stores.jobs.database if isinstance(stores.jobs, SqlStore) else None


Open = Callable[[], SqlStore]


@pytest.fixture
def open_store(url: str) -> Iterator[Open]:
    """As ``open_stores``."""
    yield from sql_stores(url)


def sql_stores(url: str) -> Iterator[Open]:
    opened: list[SqlStore] = []

    def open_next() -> SqlStore:
        if opened:
            opened[-1].release_lease()
        engine = make_engine(url)
        migrate(engine)
        opened.append(SqlStore(Database(engine, lambda: 1000.0)))
        return opened[-1]

    yield open_next
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Open) -> SqlStore:
    return open_store()
