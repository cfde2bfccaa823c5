"""Databases of schedules without costs that are equal for all of them: migrations and the compilation of statements."""

import tempfile
from functools import cache
from pathlib import Path

from sqlalchemy import Engine

from koalapy.store.engine import MEMORY, file_of, make_engine
from koalapy.store.opening import migrate


@cache
def empty_database() -> bytes:
    """Return the file of a migrated database without content."""
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(f"sqlite:///{folder}/koala.db")
        migrate(engine)
        engine.dispose()
        return Path(folder, "koala.db").read_bytes()


def migrate_by_copy(engine: Engine, **_: object) -> None:
    """Write a migrated database to an empty file; the parameters of ``migrate`` have no effect."""
    path = file_of(engine.url)
    assert path is not None
    if path.stat().st_size == 0:
        path.write_bytes(empty_database())


@cache
def _compiling_engine() -> Engine:
    engine = make_engine(MEMORY)
    engine.connect().close()  # completes its dialect
    return engine


def make_similar_engine(url: str) -> Engine:
    """Return an engine that shares its compiled statements with all others."""
    engine, compiling = make_engine(url), _compiling_engine()
    engine.dialect, engine._compiled_cache = compiling.dialect, compiling._compiled_cache
    return engine
