"""Databases of schedules without costs that are equal for all of them: migrations and the compilation of statements."""

from functools import cache

from sqlalchemy import Engine

from koalapy.store.engine import MEMORY, file_of, make_engine
from tests.databases import empty_database


@cache
def _compiling_engine() -> Engine:
    engine = make_engine(MEMORY)
    engine.connect().close()  # completes its dialect
    return engine


def make_similar_engine(url: str) -> Engine:
    """Return an engine of a migrated database, which shares its compiled statements with all others."""
    if (path := file_of(url)) is not None and not path.exists():
        path.write_bytes(empty_database())
    engine, compiling = make_engine(url), _compiling_engine()
    engine.dialect, engine._compiled_cache = compiling.dialect, compiling._compiled_cache
    return engine
