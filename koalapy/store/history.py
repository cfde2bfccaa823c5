"""Jobs that are over and not kept any more: taken out of the books, but for what outlives them."""

from collections.abc import Sequence

from sqlalchemy import delete, select, update

from koalapy.model.history import DayFilter, EndedJob, Figures, Key
from koalapy.model.job import ACTIVE_STATES, FINAL_STATES, JobId
from koalapy.model.limits import NodeUse
from koalapy.model.request import ClusterName
from koalapy.store import tables
from koalapy.store.advice import MAX_RETAINED_RUNS, retain_runs
from koalapy.store.database import Database
from koalapy.store.days import days_of, ended_jobs, first_day, nodes_by_day
from koalapy.store.sql import jobs_of
from koalapy.store.usage import THEIRS_ARE_USERS

MAX_FREED_PAGES = 1000
"""Of SQLite's pages that are not used any more, given back to the disk in one step."""

_jobs, _parts, _lease = tables.jobs.c, tables.components.c, tables.lease.c


class SqlHistory:
    """The ``HistoryStore`` port on a database."""

    def __init__(
        self, database: Database, max_runs: int = MAX_RETAINED_RUNS, max_freed_pages: int = MAX_FREED_PAGES
    ) -> None:
        self._database, self._max_runs, self._max_freed_pages = database, max_runs, max_freed_pages

    def node_use(self, since: float) -> list[NodeUse]:
        active = _jobs.state.in_([state.value for state in ACTIVE_STATES])
        under_way = active & (_parts.generation == _jobs.generation)
        query = select(_jobs.owner, _parts.size, _parts.claimed_at, _parts.ended_at)
        query = query.join(tables.jobs, _jobs.id == _parts.job_id).where(
            _parts.ended_at > since, _parts.claimed_at < _parts.ended_at, THEIRS_ARE_USERS, ~under_way
        )
        rows = self._database.rows(query)
        return [NodeUse(row["owner"], row["size"], row["claimed_at"], row["ended_at"]) for row in rows]

    def days(self, which: DayFilter) -> dict[Key, Figures]:
        with self._database.reading() as connection:
            return days_of(connection, which)

    def first_day(self) -> int | None:
        with self._database.reading() as connection:
            return first_day(connection)

    def first_submission(self) -> float | None:
        rows = self._database.rows(select(_jobs.submitted_at).order_by(_jobs.id).limit(1))
        return next((row["submitted_at"] for row in rows), None)

    def nodes_by_day(self, until: int) -> list[tuple[int, ClusterName, int]]:
        with self._database.reading() as connection:
            return nodes_by_day(connection, until)

    def ended(self, after: tuple[float, JobId], until: float, limit: int) -> list[EndedJob]:
        with self._database.reading() as connection:
            return ended_jobs(connection, after, until, limit)

    def over(self, before: float, limit: int, *, internal: bool) -> list[JobId]:
        final = _jobs.state.in_([state.value for state in FINAL_STATES])
        query = select(_jobs.id).where(_jobs.internal == internal, _jobs.ended_at < before, final)
        return [row["id"] for row in self._database.rows(query.order_by(_jobs.ended_at).limit(limit))]

    def remove(self, jobs: Sequence[JobId]) -> None:
        with self._database.writing() as connection:
            removed = jobs_of(connection, select(tables.jobs).where(_jobs.id.in_(jobs)))
            retain_runs(connection, removed, self._max_runs)
            connection.execute(delete(tables.jobs).where(_jobs.id.in_(jobs)))
            higher = _lease.last_job < max(jobs)
            connection.execute(update(tables.lease).where(higher).values(last_job=max(jobs)))

    def size(self) -> int | None:
        with self._database.reading() as connection:
            if not self._database.is_sqlite:
                return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())
            pages = int(connection.exec_driver_sql("PRAGMA page_count").scalar_one())
            return pages * int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())

    def shrink(self) -> bool:
        if not self._database.is_sqlite:
            return False  # PostgreSQL does it by itself
        with self._database.writing() as connection:
            free = int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())
            # Python's driver takes one step of it, which is one page, whatever number it is given.
            for _ in range(min(free, self._max_freed_pages)):
                connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
        return free > self._max_freed_pages
