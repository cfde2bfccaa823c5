"""Statistics of ended jobs, and their deletion."""

from collections.abc import Collection, Sequence
from functools import cache
from math import inf
from typing import Any

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Integer,
    Select,
    bindparam,
    case,
    cast,
    delete,
    exists,
    func,
    select,
    tuple_,
    type_coerce,
    update,
)

from koalapy.model.history import (
    DAY,
    DayFilter,
    EndedJob,
    Figures,
    HistoryFilter,
    HistoryPage,
    Key,
    Kind,
    PastComponent,
)
from koalapy.model.job import ACTIVE_STATES, FINAL_STATES, JobId, PlannedStart
from koalapy.model.limits import Charge, NodeUse
from koalapy.model.request import ClusterName
from koalapy.store import tables
from koalapy.store.advice import MAX_RETAINED_RUNS, retain_runs
from koalapy.store.database import Database
from koalapy.store.ended_jobs import MAX_EXAMINED, THEIRS_ARE_USERS, days_of, read_ended_jobs, read_page
from koalapy.store.sql import PLANNED, jobs_of

MAX_FREED_PAGES = 1000
"""Maximum unused pages of SQLite that are returned to the disk in one step."""

_jobs, _parts, _days, _lease = tables.jobs.c, tables.components.c, tables.days.c, tables.lease.c
_history = tables.history.c
_FINAL = [state.value for state in FINAL_STATES]


class HistoryStore:
    """The ended jobs and the daily figures."""

    def __init__(
        self,
        database: Database,
        max_runs: int = MAX_RETAINED_RUNS,
        max_freed_pages: int = MAX_FREED_PAGES,
        max_examined: int = MAX_EXAMINED,
    ) -> None:
        self._database, self._max_runs, self._max_freed_pages = database, max_runs, max_freed_pages
        self._max_examined = max_examined

    def node_use(self, since: float, until: float, owners: Collection[str] = ()) -> list[NodeUse]:
        """Return the node use of each component in a time range, in ended attempts of users' jobs; ``owners``: only of
        these users."""
        active = _jobs.state.in_([state.value for state in ACTIVE_STATES])
        under_way = active & (_parts.generation == _jobs.generation)
        query = select(_jobs.owner, _parts.size, _parts.claimed_at, _parts.ended_at)
        query = query.join(tables.jobs, _jobs.id == _parts.job_id).where(
            _parts.ended_at > since, _parts.claimed_at < _parts.ended_at, THEIRS_ARE_USERS, ~under_way
        )
        query = query.where(_parts.claimed_at < until, *([_jobs.owner.in_(owners)] if owners else []))
        with self._database.reading() as connection:
            return [NodeUse(*row) for row in connection.execute(query)]

    def charges(self, since: float, now: float) -> list[Charge]:
        """Return the use by user and day that fair share charges: the last attempts of ended jobs of users. Attempts
        lost by preemption or failures of the infrastructure are not charged, also if the job ends in its queue. Nor are
        jobs in a reservation, since its owner is. Ends after ``now``, by a clock that was ahead, count as now."""
        part, sibling, attempt = tables.components, tables.components.alias(), tables.attempts.c
        is_same = (sibling.c.job_id == _parts.job_id) & (sibling.c.generation == _parts.generation)
        failed = exists().where(is_same, sibling.c.infrastructure)
        day, nodes = cast(_parts.ended_at / DAY, Integer), _parts.size * _parts.node_part
        used = func.sum(nodes * (_parts.ended_at - _parts.claimed_at)).label("used")
        query = select(_jobs.owner, func.max(_parts.ended_at).label("at"), used)
        query = query.join_from(part, tables.jobs, _jobs.id == _parts.job_id)
        of_attempt = (attempt.job_id == _parts.job_id) & (attempt.generation == _parts.generation)
        query = query.join(tables.attempts, of_attempt).where(
            _parts.ended_at > since,
            _parts.claimed_at < _parts.ended_at,
            THEIRS_ARE_USERS,
            _jobs.state.in_(_FINAL),
            _parts.generation == _jobs.generation,
            func.coalesce(attempt.ended_at, 0.0) >= func.coalesce(_jobs.ended_at, 0.0),
            ~failed,
            func.coalesce(_jobs.spec["reservation"].as_string(), "") == "",
        )
        rows = self._database.rows(query.group_by(_jobs.owner, day))
        return [Charge(row["owner"], row["used"], min(row["at"], now)) for row in rows]

    def days(self, day_filter: DayFilter) -> dict[Key, Figures]:
        """Return the daily figures that match a filter, including those of deleted jobs."""
        with self._database.reading() as connection:
            return days_of(connection, day_filter)

    def first_day(self) -> int | None:
        """Return the first day with figures; None without any."""
        query = select(func.min(_days.day).label("day")).where(_days.kind == Kind.GRID.value)
        return next((row["day"] for row in self._database.rows(query)), None)

    def first_submission(self) -> float | None:
        """Return the submission time of the oldest stored job; None without one."""
        rows = self._database.rows(select(_jobs.submitted_at).order_by(_jobs.id).limit(1))
        return next((row["submitted_at"] for row in rows), None)

    def nodes_by_day(self, until: int) -> list[tuple[int, ClusterName, int]]:
        """Return (day, cluster, maximum nodes) in order of days up to ``until``, where clusters reported nodes."""
        query = select(_days.day, _days.name, _days.nodes).order_by(_days.day)
        query = query.where(_days.kind == Kind.CLUSTER.value, _days.day <= until, _days.nodes > 0)
        return [(row["day"], row["name"], row["nodes"]) for row in self._database.rows(query)]

    def ended_jobs(self, after: tuple[float, JobId], until: float, limit: int) -> list[EndedJob]:
        """Return at most ``limit`` jobs of users that ended before ``until``, in order of end and id. ``after`` is the
        end and id of the last job of the previous call."""
        end, job = _history.ended_at, _history.job_id
        query = select(job).where(tuple_(end, job) > tuple_(*after), end < until).order_by(end, job).limit(limit)
        with self._database.reading() as connection:
            return read_ended_jobs(connection, list(connection.execute(query).scalars()))

    def count_outcomes(self, since: float, until: float, slot_s: float) -> list[tuple[int, str, int]]:
        """Return how many users' jobs ended in a time range, by slot of ``slot_s`` seconds and final state."""
        age, state = (_history.ended_at - since) / slot_s, _history.state
        slot = (cast(age, Integer) - case((cast(age, Integer) > age, 1), else_=0)).label("slot")  # PostgreSQL rounds
        query = select(slot, state, func.count().label("jobs"))
        query = query.where(_history.ended_at >= since, _history.ended_at <= until)
        rows = self._database.rows(query.group_by(slot, state))
        return [(row["slot"], row["state"], row["jobs"]) for row in rows]

    def planned_starts(self, limit: int) -> list[PlannedStart]:
        """Return the past planned starts of the newest ``limit`` jobs with one, oldest first."""
        query = select(_jobs.planned_start).where(_jobs.planned_start.is_not(None)).order_by(_jobs.id.desc())
        rows = [PLANNED.validate_python(row["planned_start"]) for row in self._database.rows(query.limit(limit))]
        return [planned for planned in reversed(rows) if planned.late is not None]

    def ended_page(self, history_filter: HistoryFilter) -> HistoryPage:
        """Return a page of users' ended jobs, the last end first unless the filter has another order. A page that is
        not the last may have fewer jobs than the limit, or none, to bound its cost."""
        with self._database.reading() as connection:
            return read_page(connection, history_filter, self._max_examined)

    def ended_components(
        self, since: float, until: float, limit: int, cluster: ClusterName = ""
    ) -> tuple[list[PastComponent], bool]:
        """Return the components with the most node-seconds in a time range, at most ``limit``, in order of their end,
        and whether others may be missing. Only the components that ended last are examined, or those of the newest jobs
        of one cluster."""
        values = {"since": since, "until": until, "cluster": cluster, "examined": self._max_examined, "limit": limit}
        largest, window = _largest_components(on_cluster=bool(cluster)), _window(on_cluster=bool(cluster))
        with self._database.reading() as connection:
            components = [PastComponent(*row) for row in connection.execute(largest, values)]
            remaining = connection.execute(window.offset(self._max_examined).limit(1), values)
            return components, len(components) == limit or remaining.first() is not None

    def failed_components(self, cluster: ClusterName, limit: int) -> list[PastComponent]:
        """Return the components of a cluster that ended with an error, of the newest jobs, the last end first. Only the
        components of the newest jobs are examined."""
        values = {"cluster": cluster, "until": inf, "examined": self._max_examined, "limit": limit}
        with self._database.reading() as connection:
            return [PastComponent(*row) for row in connection.execute(_failed_components(), values)]

    def expired_jobs(self, before: float, limit: int, *, internal: bool) -> list[JobId]:
        """Return jobs that ended before a time, oldest end first: those of users, or the daemon's own."""
        query = select(_jobs.id).where(_jobs.internal == internal, _jobs.ended_at < before, _jobs.state.in_(_FINAL))
        return [row["id"] for row in self._database.rows(query.order_by(_jobs.ended_at).limit(limit))]

    def remove(self, jobs: Sequence[JobId]) -> None:
        """Delete jobs. Their ids are not reused, and their runs are retained for the advisor."""
        with self._database.writing() as connection:
            removed = jobs_of(connection, select(tables.jobs).where(_jobs.id.in_(jobs)))
            retain_runs(connection, removed, self._max_runs)
            connection.execute(delete(tables.jobs).where(_jobs.id.in_(jobs)))
            last = max((job.last_number for job in removed), default=0)
            connection.execute(update(tables.lease).where(_lease.last_job < last).values(last_job=last))

    def size(self) -> int | None:
        """Return the size of the database in bytes; None if unknown."""
        with self._database.reading() as connection:
            if not self._database.is_sqlite:
                return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())
            size = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
            return int(connection.exec_driver_sql(size).scalar_one())

    def shrink(self) -> bool:
        """Return unused space to the disk in a bounded step. Return whether more is left."""
        if not self._database.is_sqlite:
            return False  # PostgreSQL reclaims space by itself
        with self._database.writing() as connection:
            free = int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())
            # Python's driver executes one step, of one page, whatever the argument is.
            for _ in range(min(free, self._max_freed_pages)):
                connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
        return free > self._max_freed_pages


def _window(*, on_cluster: bool) -> Select[Any]:
    """Return a query for the components that ended since ``since`` and did not begin after ``until``, the last ones
    first; or, on one ``cluster``, for all of its components that did not, those of the newest jobs first."""
    names = ("job_id", "generation", "index", "cluster", "size", "claimed_at", "ended_at", "error")
    query = select(*(_parts[name] for name in names)).where(func.coalesce(_parts.claimed_at, 0.0) < bindparam("until"))
    if on_cluster:
        return query.where(_parts.cluster == bindparam("cluster")).order_by(_parts.job_id.desc())
    return query.where(_parts.ended_at > bindparam("since")).order_by(_parts.ended_at.desc())


@cache
def _largest_components(*, on_cluster: bool) -> Select[Any]:
    """Return the query for the ``limit`` components with the most node-seconds among the ``examined`` ones."""
    since: ColumnElement[float] = bindparam("since")
    until: ColumnElement[float] = bindparam("until")
    window = _window(on_cluster=on_cluster).limit(bindparam("examined")).subquery().c
    start = case((window.claimed_at < since, since), else_=window.claimed_at)
    end = case((window.ended_at > until, until), else_=window.ended_at)
    largest = select(*window).where(window.ended_at > since, window.claimed_at < window.ended_at)
    weight = window.size * (end - start)
    chosen = largest.order_by(weight.desc(), window.job_id.desc()).limit(bindparam("limit")).subquery().c
    return _with_attempts(chosen).order_by(chosen.ended_at, chosen.job_id, chosen["index"])


@cache
def _failed_components() -> Select[Any]:
    """Return the query for the last components of a cluster that ended early."""
    window = _window(on_cluster=True).limit(bindparam("examined")).subquery().c
    failed = select(*window).where(window.ended_at.is_not(None), window.error != "")
    last = failed.order_by(window.ended_at.desc(), window.job_id.desc()).limit(bindparam("limit")).subquery().c
    return _with_attempts(last).order_by(last.ended_at.desc(), last.job_id.desc(), last["index"])


def _with_attempts(component: Any) -> Select[Any]:
    """Return a query for the fields of ``PastComponent``, in their order, of found components."""
    attempt, sibling = tables.attempts.c, tables.components.alias().c
    of_attempt = (sibling.job_id == component.job_id) & (sibling.generation == component.generation)
    is_shared = select(sibling["index"]).where(of_attempt, sibling.cluster != component.cluster).exists()
    has_attempt = (attempt.job_id == component.job_id) & (attempt.generation == component.generation)
    return select(
        component.job_id,
        component.generation,
        component.cluster,
        component.size,
        component.claimed_at,
        attempt.barrier_at,
        attempt.launched_at,
        component.ended_at,
        component.error,
        type_coerce(is_shared, Boolean),
        case((THEIRS_ARE_USERS, _jobs.owner), else_=""),
    ).where(has_attempt, _jobs.id == component.job_id)
