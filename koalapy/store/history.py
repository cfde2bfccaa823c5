"""Statistics of ended jobs, and their deletion."""

from collections.abc import Sequence
from math import inf
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Select, case, delete, func, select, tuple_, update

from koalapy.model.history import (
    DayFilter,
    EndedJob,
    Figures,
    HistoryFilter,
    HistoryPage,
    Key,
    Kind,
    PastComponent,
    PastComponents,
)
from koalapy.model.job import ACTIVE_STATES, FINAL_STATES, JobId, JobState
from koalapy.model.job_spec import Priority
from koalapy.model.limits import NodeUse
from koalapy.model.request import ClusterName
from koalapy.store import tables
from koalapy.store.advice import MAX_RETAINED_RUNS, retain_runs
from koalapy.store.database import Database
from koalapy.store.ended_jobs import MAX_EXAMINED, read_page
from koalapy.store.sql import jobs_of
from koalapy.store.usage import THEIRS_ARE_USERS, days_of

MAX_FREED_PAGES = 1000
"""Maximum unused pages of SQLite that are returned to the disk in one step."""

_jobs, _parts, _days, _lease = tables.jobs.c, tables.components.c, tables.days.c, tables.lease.c
_history = tables.history.c
_KEY = (_parts.job_id, _parts.generation, _parts.index)
_FINAL = [state.value for state in FINAL_STATES]


class SqlHistory:
    """The ``HistoryStore`` port on a database."""

    def __init__(
        self,
        database: Database,
        max_runs: int = MAX_RETAINED_RUNS,
        max_freed_pages: int = MAX_FREED_PAGES,
        max_examined: int = MAX_EXAMINED,
    ) -> None:
        self._database, self._max_runs, self._max_freed_pages = database, max_runs, max_freed_pages
        self._max_examined = max_examined

    def node_use(self, since: float) -> list[NodeUse]:
        active = _jobs.state.in_([state.value for state in ACTIVE_STATES])
        under_way = active & (_parts.generation == _jobs.generation)
        query = select(_jobs.owner, _parts.size, _parts.claimed_at, _parts.ended_at)
        query = query.join(tables.jobs, _jobs.id == _parts.job_id).where(
            _parts.ended_at > since, _parts.claimed_at < _parts.ended_at, THEIRS_ARE_USERS, ~under_way
        )
        rows = self._database.rows(query)
        return [NodeUse(row["owner"], row["size"], row["claimed_at"], row["ended_at"]) for row in rows]

    def days(self, day_filter: DayFilter) -> dict[Key, Figures]:
        with self._database.reading() as connection:
            return days_of(connection, day_filter)

    def first_day(self) -> int | None:
        query = select(func.min(_days.day).label("day")).where(_days.kind == Kind.GRID.value)
        return next((row["day"] for row in self._database.rows(query)), None)

    def first_submission(self) -> float | None:
        rows = self._database.rows(select(_jobs.submitted_at).order_by(_jobs.id).limit(1))
        return next((row["submitted_at"] for row in rows), None)

    def nodes_by_day(self, until: int) -> list[tuple[int, ClusterName, int]]:
        query = select(_days.day, _days.name, _days.nodes).order_by(_days.day)
        query = query.where(_days.kind == Kind.CLUSTER.value, _days.day <= until, _days.nodes > 0)
        return [(row["day"], row["name"], row["nodes"]) for row in self._database.rows(query)]

    def ended_jobs(self, after: tuple[float, JobId], until: float, limit: int) -> list[EndedJob]:
        query = select(
            _jobs.id,
            _jobs.submitted_at,
            _jobs.placed_at,
            _jobs.started_at,
            _history.ended_at,
            _jobs.state,
            _jobs.owner,
            _jobs.application,
            _jobs.priority,
            _jobs.spec["walltime"].as_float().label("walltime"),
            _history.nodes,
            _history.clusters,
            _jobs.home_site,
        ).join(tables.history, _history.job_id == _jobs.id)
        query = query.where(tuple_(_history.ended_at, _history.job_id) > tuple_(*after), _history.ended_at < until)
        rows = self._database.rows(query.order_by(_history.ended_at, _history.job_id).limit(limit))
        return [_ended_job(row) for row in rows]

    def ended_page(self, which: HistoryFilter) -> HistoryPage:
        with self._database.reading() as connection:
            return read_page(connection, which, self._max_examined)

    def ended_components(self, since: float, limit: int, cluster: ClusterName = "") -> PastComponents:
        if cluster:
            window = self._newest_on(cluster)
        else:
            window = select(*_KEY).where(_parts.ended_at > since).order_by(_parts.ended_at.desc())
        start = case((_parts.claimed_at < since, since), else_=_parts.claimed_at)
        largest = _select_of(window.limit(self._max_examined)).where(
            _parts.ended_at > since, _parts.claimed_at < _parts.ended_at
        )
        largest = largest.order_by((_parts.size * (_parts.ended_at - start)).desc(), _parts.job_id.desc()).limit(limit)
        found = self._past_components(largest, _parts.ended_at, _parts.job_id, _parts.index)
        last = _select_of(window.offset(self._max_examined - 1).limit(1)).with_only_columns(_parts.ended_at)
        ends = [row["ended_at"] for row in self._database.rows(last)]
        return PastComponents(found, ends[0] if ends and ends[0] is not None else -inf)

    def failed_components(self, cluster: ClusterName, limit: int) -> list[PastComponent]:
        failed = _select_of(self._newest_on(cluster).limit(self._max_examined))
        failed = failed.where(_parts.ended_at.is_not(None), _parts.error != "")
        failed = failed.order_by(_parts.ended_at.desc(), _parts.job_id.desc()).limit(limit)
        return self._past_components(failed, _parts.ended_at.desc(), _parts.job_id.desc(), _parts.index)

    def _newest_on(self, cluster: ClusterName) -> Select[Any]:
        """Return a query for the components of a cluster, those of the newest jobs first."""
        return select(*_KEY).where(_parts.cluster == cluster).order_by(_parts.job_id.desc())

    def _past_components(self, selected: Select[Any], *order: ColumnElement[Any]) -> list[PastComponent]:
        """Return the components of which a query selects the keys."""
        keys, attempt, other = selected.subquery(), tables.attempts.c, tables.components.alias()
        of_attempt = (other.c.job_id == _parts.job_id) & (other.c.generation == _parts.generation)
        is_shared = select(other.c.index).where(of_attempt, other.c.cluster != _parts.cluster).exists()
        names = ("generation", "cluster", "size", "claimed_at", "ended_at", "error")
        query = select(
            _parts.job_id.label("job"),
            *(_parts[name] for name in names),
            attempt.barrier_at,
            attempt.launched_at,
            is_shared.label("is_shared"),
        )
        query = query.select_from(keys).join(tables.components, tuple_(*_KEY) == _key_of(keys.c))
        has_attempt = (attempt.job_id == _parts.job_id) & (attempt.generation == _parts.generation)
        rows = self._database.rows(query.join(tables.attempts, has_attempt).order_by(*order))
        return [PastComponent(**{**row, "is_shared": bool(row["is_shared"])}) for row in rows]

    def expired_jobs(self, before: float, limit: int, *, internal: bool) -> list[JobId]:
        query = select(_jobs.id).where(_jobs.internal == internal, _jobs.ended_at < before, _jobs.state.in_(_FINAL))
        return [row["id"] for row in self._database.rows(query.order_by(_jobs.ended_at).limit(limit))]

    def remove(self, jobs: Sequence[JobId]) -> None:
        with self._database.writing() as connection:
            removed = jobs_of(connection, select(tables.jobs).where(_jobs.id.in_(jobs)))
            retain_runs(connection, removed, self._max_runs)
            connection.execute(delete(tables.jobs).where(_jobs.id.in_(jobs)))
            last = max((job.last_number for job in removed), default=0)
            connection.execute(update(tables.lease).where(_lease.last_job < last).values(last_job=last))

    def size(self) -> int | None:
        with self._database.reading() as connection:
            if not self._database.is_sqlite:
                return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())
            pages = int(connection.exec_driver_sql("PRAGMA page_count").scalar_one())
            return pages * int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())

    def shrink(self) -> bool:
        if not self._database.is_sqlite:
            return False  # PostgreSQL reclaims space by itself
        with self._database.writing() as connection:
            free = int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())
            # Python's driver executes one step, of one page, whatever the argument is.
            for _ in range(min(free, self._max_freed_pages)):
                connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
        return free > self._max_freed_pages


def _select_of(window: Select[Any]) -> Select[Any]:
    """Return a query for the keys of the components of a window, which conditions may narrow."""
    keys = window.subquery()
    return select(*_KEY).select_from(keys).join(tables.components, tuple_(*_KEY) == _key_of(keys.c))


def _key_of(columns: Any) -> ColumnElement[Any]:
    """Return the primary key of a component as one value."""
    return tuple_(columns.job_id, columns.generation, columns.index)


def _ended_job(row: RowMapping) -> EndedJob:
    values = {
        "state": JobState(row["state"]),
        "priority": Priority(row["priority"]),
        "clusters": tuple(row["clusters"]),
    }
    return EndedJob(**{**row, **values})
