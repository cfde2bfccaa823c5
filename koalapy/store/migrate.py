"""Bring what earlier versions left to where this one has it: the tables, by ``migrations/``, and output."""

from pathlib import Path

import structlog
from alembic import command
from alembic.config import Config
from alembic.script.revision import ResolutionError
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, delete, select, text

from koalapy.model.errors import UsageError
from koalapy.model.job import token_of
from koalapy.ports import OutputPiece, OutputStore
from koalapy.store import tables
from koalapy.store.database import Database
from koalapy.store.engine import unavailable_is_known, writing

log = structlog.get_logger()

LOCK_NUMBER = 0x6B6F616C61
"""Any number, as long as every daemon of this database takes the same one."""


def migrations_directory() -> Path:
    """Where the revisions are: in the wheel beside this file, in a checkout at its top."""
    inside = Path(__file__).parent / "migrations"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "migrations"


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_directory()))
    return config


def migrate(engine: Engine, revision: str = "head") -> None:
    """Upgrade to a revision; does nothing when already there.

    ``StoreUnavailable`` when there is no database, ``UsageError`` for one that a later version of koalapy has upgraded.
    """
    config = alembic_config()
    with unavailable_is_known(), writing(engine).begin() as connection:
        if connection.dialect.name == "postgresql":
            _check_encoding(connection)
            connection.execute(text("select pg_advisory_xact_lock(:number)"), {"number": LOCK_NUMBER})
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, revision)
        except CommandError as error:
            if not isinstance(error.__cause__, ResolutionError):
                raise
            found = error.__cause__.argument
            raise UsageError(
                f"the database is of a later version of koalapy (revision {found})",
                field="database",
                value=found,
                hint="install that version again, or put back a copy of the database from before it",
            ) from error


def _check_encoding(connection: Connection) -> None:
    """Raise ``UsageError`` for a database that does not hold every text as it is."""
    encoding: str = connection.execute(text("show server_encoding")).scalar_one()
    if encoding != "UTF8":
        name = connection.engine.url.database
        raise UsageError(
            f"the database {name} has the encoding {encoding}, which does not hold every text; it must be UTF8",
            field="database",
            value=encoding,
            hint="make another with createdb --encoding=UTF8 --template=template0 NAME, name it in database, and move "
            "what is in this one there by pg_dump --encoding=UTF8",
        )


def move_output(database: Database, target: OutputStore) -> int:
    """Move output that earlier versions kept in the database to files; of how many components that was. ``OSError``.

    To be killed in between does no harm: what is there already is not written twice.
    """
    output = tables.output.c
    keys = output.job_id, output.generation, output.component
    with database.reading() as connection:
        components = connection.execute(select(*keys).distinct().order_by(*keys)).all()
    for job, generation, component in components:
        this = (output.job_id == job) & (output.generation == generation) & (output.component == component)
        with database.reading() as connection:
            query = select(output.offset, output.data).where(this).order_by(output.offset)
            for part in connection.execution_options(yield_per=64).execute(query).partitions():
                pieces = [OutputPiece(row.offset, row.data, missing=row.offset) for row in part]
                target.append(token_of(job, generation, component, nonce=""), pieces)
        with database.writing() as connection:
            connection.execute(delete(tables.output).where(this))
    if components:
        log.info("output was moved out of the database", action="output-moved", components=len(components))
    return len(components)
