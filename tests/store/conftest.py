"""Migrated stores, each in a database of its own: in SQLite, and where it is installed in PostgreSQL."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from koalapy.store.migrate import migrate
from koalapy.store.sql import SqlStore, make_engine
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


@pytest.fixture(params=["sqlite", "postgresql"] if INSTALLED else ["sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'koala.db'}"
    server: Server = request.getfixturevalue("server")
    return server.new_database()


Open = Callable[[], SqlStore]


@pytest.fixture
def open_store(url: str) -> Iterator[Open]:
    """Opens a store as a new daemon would; the one before lets go of its lease first."""
    yield from stores(url)


def stores(url: str) -> Iterator[Open]:
    opened: list[SqlStore] = []

    def open_next() -> SqlStore:
        if opened:
            opened[-1].release_lease()
        engine = make_engine(url)
        migrate(engine)
        opened.append(SqlStore(engine, now=1000.0))
        return opened[-1]

    yield open_next
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Open) -> SqlStore:
    return open_store()
