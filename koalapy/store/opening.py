"""Opens every store that a daemon has: in the database that a URL names, and components' output beside it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from koalapy.ports import (
    AdviceStore,
    AuditStore,
    FileStore,
    HistoryStore,
    MeasurementStore,
    NotificationStore,
    OutputStore,
    PredictionStore,
    Saved,
    TokenStore,
)
from koalapy.store.advice import SqlAdvice
from koalapy.store.audit import SqlAudit
from koalapy.store.database import Database
from koalapy.store.engine import MEMORY, make_engine
from koalapy.store.files import SqlFiles
from koalapy.store.history import SqlHistory
from koalapy.store.job_numbers import JobNumbers
from koalapy.store.measurements import SqlMeasurements
from koalapy.store.migrate import migrate
from koalapy.store.notifications import SqlNotifications
from koalapy.store.predictions import SqlPredictions
from koalapy.store.sql import SqlStore
from koalapy.store.tokens import SqlTokens


@dataclass(frozen=True, slots=True)
class Stores:
    """``saved`` is what the daemon before this one left; the lease is held until ``jobs`` lets go of it."""

    jobs: SqlStore
    saved: Saved
    files: FileStore
    measurements: MeasurementStore
    advice: AdviceStore
    history: HistoryStore
    tokens: TokenStore
    audit: AuditStore
    notifications: NotificationStore
    predictions: PredictionStore
    output: OutputStore


def open_stores(
    url: str, output: OutputStore, clock: Callable[[], float] = time.time, job_numbers: JobNumbers | None = None
) -> Stores:
    """Open the stores and take the lease. In memory, numbers of jobs begin anew with each daemon.

    Raise ``UsageError`` for what is no database, and ``ConflictError`` when another daemon holds it.
    """
    engine = make_engine(url)
    migrate(engine)
    return stores_in_database(Database(engine, clock), output, None if url == MEMORY else job_numbers)


def stores_in_database(database: Database, output: OutputStore, job_numbers: JobNumbers | None = None) -> Stores:
    """Return the stores of a database that has been migrated."""
    jobs = SqlStore(database, job_numbers)
    return Stores(
        jobs,
        jobs.load(),
        SqlFiles(database),
        SqlMeasurements(database),
        SqlAdvice(database),
        SqlHistory(database),
        SqlTokens(database),
        SqlAudit(database),
        SqlNotifications(database),
        SqlPredictions(database),
        output,
    )
