"""A migrated SQLite store in a file of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from koalapy.store.migrate import migrate
from koalapy.store.sql import SqlStore, make_engine


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'koala.db'}"


@pytest.fixture
def open_store(url: str) -> Iterator[Callable[[], SqlStore]]:
    """Opens a store as a new daemon would; the one before lets go of its lease first."""
    stores: list[SqlStore] = []

    def open_next() -> SqlStore:
        if stores:
            stores[-1].release_lease()
        engine = make_engine(url)
        migrate(engine)
        stores.append(SqlStore(engine, now=1000.0))
        return stores[-1]

    yield open_next
    for store in stores:
        store.close()


@pytest.fixture
def store(open_store: Callable[[], SqlStore]) -> SqlStore:
    return open_store()
