"""Open the stores of a daemon: the database of a URL, and the output of components."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script.revision import ResolutionError
from alembic.util import CommandError
from sqlalchemy import Connection, text

from koalapy.model.errors import UsageError
from koalapy.store.advice import AdviceStore
from koalapy.store.audit import AuditStore
from koalapy.store.database import NEW_CLAIM, Claim, Database
from koalapy.store.engine import MEMORY, check_sessions, make_engine
from koalapy.store.history import HistoryStore
from koalapy.store.job_numbers import JobNumbers
from koalapy.store.output import OutputStore
from koalapy.store.records import NOTHING_SAVED, Saved
from koalapy.store.service_tables import (
    AlertMarkStore,
    FileStore,
    MeasurementStore,
    NotificationStore,
    ReservationStore,
    SampleStore,
    ShareWeightStore,
    TokenStore,
)
from koalapy.store.sql import JobStore


def migrations_directory() -> Path:
    """Return the folder of the migrations: next to this file in a wheel, at the top of a checkout."""
    inside = Path(__file__).parent / "migrations"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "migrations"


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_directory()))
    return config


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Upgrade the tables to a revision in the present transaction; do nothing if they have the revision.

    Raise ``UsageError`` if another version created them.
    """
    if connection.dialect.name == "postgresql":
        _check_encoding(connection)
    config = alembic_config()
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, revision)
    except CommandError as error:
        if not isinstance(error.__cause__, ResolutionError):
            raise
        revision = str(error.__cause__.argument)
        problem = f"the database is of another version of koalapy (revision {revision})"
        hint = "install that version again, or put back a copy of the database from before it"
        raise UsageError(problem, field="database", value=revision, hint=hint) from error


def _check_encoding(connection: Connection) -> None:
    """Raise ``UsageError`` if a PostgreSQL database has an encoding other than UTF8."""
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


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores of a daemon.

    ``saved`` is the state that the previous daemon left; ``jobs`` holds the lease until released.
    """

    jobs: JobStore
    saved: Saved
    files: FileStore
    measurements: MeasurementStore
    advice: AdviceStore
    history: HistoryStore
    tokens: TokenStore
    audit: AuditStore
    notifications: NotificationStore
    samples: SampleStore
    alert_marks: AlertMarkStore
    reservations: ReservationStore
    share_weights: ShareWeightStore
    output: OutputStore


def open_stores(
    url: str,
    output: OutputStore,
    clock: Callable[[], float] = time.time,
    job_numbers: JobNumbers | None = None,
    claim: Claim | None = NEW_CLAIM,
) -> Stores:
    """Migrate the database, open the stores and take the lease. Without a ``claim`` only open them for reading.

    With a database in memory, job numbers start at 1. Raise ``UsageError`` for an invalid URL or a pooler, and
    ``ConflictError`` if another daemon holds the lease.
    """
    engine = make_engine(url)
    check_sessions(engine)
    if claim is None:
        return stores_in_database(Database(engine, clock, claim=None), output, is_read_only=True)
    database = Database(engine, clock, claim=claim, upgrade=upgrade)
    return stores_in_database(database, output, None if url == MEMORY else job_numbers)


def stores_in_database(
    database: Database, output: OutputStore, job_numbers: JobNumbers | None = None, *, is_read_only: bool = False
) -> Stores:
    """Return the stores of a migrated database. Those that are only read have no saved state."""
    jobs = JobStore(database, job_numbers)
    return Stores(
        jobs,
        NOTHING_SAVED if is_read_only else jobs.load(),
        FileStore(database),
        MeasurementStore(database),
        AdviceStore(database),
        HistoryStore(database),
        TokenStore(database),
        AuditStore(database),
        NotificationStore(database),
        SampleStore(database),
        AlertMarkStore(database),
        ReservationStore(database),
        ShareWeightStore(database),
        output,
    )
