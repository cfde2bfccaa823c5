"""Migrated SQLite databases for tests, copied from one that is migrated once per process."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import Engine, event

from koalapy.store.engine import SQLITE_BUSY_TIMEOUT, make_engine, unavailable_is_known, writing
from koalapy.store.opening import upgrade


def migrate(engine: Engine, revision: str = "head") -> None:
    """Upgrade a database that no daemon uses to a revision."""
    with unavailable_is_known(), writing(engine).begin() as connection:
        upgrade(connection, revision)


@cache
def empty_database() -> bytes:
    """Return the file of a migrated database without content."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "koala.db")
        migrate(engine := make_engine(f"sqlite:///{path}"))
        engine.dispose()  # the last connection moves the write-ahead log into the file
        return path.read_bytes()


def open_database(path: Path, busy_timeout_ms: int = SQLITE_BUSY_TIMEOUT) -> Engine:
    """Return an engine for a migrated database, which is made unless the file exists.

    Nothing is flushed to the disk: no test of this process cuts the power. ``busy_timeout_ms`` limits the wait for
    another connection that writes.
    """
    if not path.exists():
        path.write_bytes(empty_database())
    engine = make_engine(f"sqlite:///{path}")

    @event.listens_for(engine, "connect")
    def _hurry(connection: Any, _: object) -> None:
        for pragma in ("synchronous=OFF", f"busy_timeout={busy_timeout_ms}"):
            connection.execute(f"PRAGMA {pragma}").close()

    return engine
