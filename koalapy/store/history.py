"""Jobs that are over and not kept any more: taken out of the books, but for what outlives them."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Engine, delete, insert, select, update

from koalapy.model.advice import Run, Size, run_of
from koalapy.model.job import FINAL_STATES, JobId
from koalapy.store import tables
from koalapy.store.engine import reading, unavailable_is_known
from koalapy.store.jobs import jobs_of
from koalapy.store.lease import Lease

RUNS_KEPT = 5000
"""Of jobs that are gone, the newest, from which the advisor learns when a daemon starts."""
PAGES_AT_ONCE = 1000
"""Of SQLite's pages that are not used any more, given back to the disk in one step."""

_jobs, _runs, _lease = tables.jobs.c, tables.runs.c, tables.lease.c


class SqlHistory:
    """The ``HistoryStore`` port on a migrated database, for who holds its lease."""

    def __init__(self, engine: Engine, lease: Lease) -> None:
        self._engine = engine
        self._reader = reading(engine)
        self._lease = lease

    def over(self, before: float, limit: int, *, internal: bool) -> list[JobId]:
        final = _jobs.state.in_([state.value for state in FINAL_STATES])
        query = select(_jobs.id).where(_jobs.internal == internal, _jobs.ended_at < before, final)
        with unavailable_is_known(), self._reader.connect() as connection:
            return list(connection.execute(query.order_by(_jobs.ended_at).limit(limit)).scalars())

    def remove(self, jobs: Sequence[JobId]) -> None:
        with self._lease.writing() as connection:
            _keep_runs(connection, jobs)
            connection.execute(delete(tables.jobs).where(_jobs.id.in_(jobs)))
            higher = _lease.last_job < max(jobs)
            connection.execute(update(tables.lease).where(higher).values(last_job=max(jobs)))

    def shrink(self) -> bool:
        if self._engine.dialect.name != "sqlite":
            return False  # PostgreSQL does it by itself
        with self._lease.writing() as connection:
            if not connection.exec_driver_sql("PRAGMA auto_vacuum").scalar_one():
                return False  # made by an earlier version: what is free is used again
            free = int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())
            # Python's driver takes one step of it, which is one page, whatever number it is given.
            for _ in range(min(free, PAGES_AT_ONCE)):
                connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
        return free > PAGES_AT_ONCE


def kept_runs(connection: Connection, limit: int) -> list[Run]:
    """What jobs that are gone have taught, the newest of it, from the oldest on."""
    query = select(_runs.run).order_by(_runs.job_id.desc()).limit(limit)
    return [_run(data) for data in connection.execute(query).scalars()][::-1]


def _run(data: dict[str, Any]) -> Run:
    return Run(**data | {"size": Size(*data["size"]), "clusters": tuple(data["clusters"])})


def _keep_runs(connection: Connection, jobs: Sequence[JobId]) -> None:
    over = jobs_of(connection, select(tables.jobs).where(_jobs.id.in_(jobs)))
    runs = [{"job_id": job.id, "run": run._asdict()} for job in over if (run := run_of(job)) is not None]
    if not runs:
        return
    connection.execute(insert(tables.runs), runs)
    newest = select(_runs.job_id).order_by(_runs.job_id.desc())
    too_old = connection.execute(newest.offset(RUNS_KEPT).limit(1)).scalar()
    if too_old is not None:
        connection.execute(delete(tables.runs).where(_runs.job_id <= too_old))
