"""Fixtures of stores in a new database: SQLite, and PostgreSQL if it is installed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from koalapy.store.database import Database
from koalapy.store.engine import make_engine
from koalapy.store.opening import Stores, stores_in_database
from koalapy.store.output import OutputStore
from koalapy.store.sql import JobStore
from tests.databases import migrate
from tests.needs import find_postgresql
from tests.store.postgresql import Server

INSTALLED = find_postgresql()
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
Open = Callable[[], JobStore]


@pytest.fixture
def open_stores(url: str, tmp_path: Path) -> Iterator[OpenAll]:
    """Open all stores of one database as a new daemon does, after the previous daemon has released its lease."""
    output, opened = OutputStore(tmp_path / "output", 1000), list[Stores]()

    def open_next() -> Stores:
        if opened:
            opened[-1].jobs.release_lease()
        engine = make_engine(url)
        migrate(engine)
        opened.append(stores_in_database(Database(engine, lambda: 1000.0), output))
        return opened[-1]

    yield open_next
    for stores in opened:
        stores.jobs.close()


@pytest.fixture
def stores(open_stores: OpenAll) -> Stores:
    return open_stores()


@pytest.fixture
def open_store(open_stores: OpenAll) -> Open:
    return lambda: open_stores().jobs


@pytest.fixture
def store(stores: Stores) -> JobStore:
    return stores.jobs
