"""Stores in memory for tests of their users."""

from pathlib import Path
from typing import Any

from sqlalchemy import event

from koalapy.store.database import Database
from koalapy.store.engine import MEMORY, make_engine
from koalapy.store.opening import Stores, stores_in_database
from koalapy.store.output import OutputStore
from tests.databases import empty_database

JOURNAL_VERSIONS = slice(18, 20)
"""Bytes of a SQLite file that say whether it has a write-ahead log, which a database in memory cannot have."""


def memory_stores() -> Stores:
    """Open new stores in memory. Output is not kept."""
    engine, content = make_engine(MEMORY), bytearray(empty_database())
    content[JOURNAL_VERSIONS] = b"\1\1"

    @event.listens_for(engine, "connect")
    def _fill(connection: Any, _: object) -> None:
        connection.deserialize(content)

    return stores_in_database(Database(engine), OutputStore(Path("unused"), 0))
