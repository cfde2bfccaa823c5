"""Store ended jobs for lists and sums, and read pages of them through indices only. Also keep daily figures.

Each row of ``history`` has what lists select, sort and sum. Rows are read in the order of the ends, newest first,
through the index that reaches farthest back. The cost of a page is bounded: it examines ``MAX_EXAMINED`` rows.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Integer, Select, bindparam, case, func, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite

from koalapy.model.history import (
    NAMES,
    DayFilter,
    EndedJob,
    Figures,
    HistoryFilter,
    HistoryPage,
    HistoryPosition,
    HistorySort,
    HistorySums,
    Key,
    Kind,
    count_ended_jobs,
    day_of,
    node_seconds_of,
)
from koalapy.model.job import Job, JobId, JobState
from koalapy.model.job_spec import Priority
from koalapy.store.database import chunks, matches_pattern, upsert
from koalapy.store.records import Batch, ClusterRecord
from koalapy.store.tables import components, history, history_clusters, jobs
from koalapy.store.tables import days as day_table

MAX_EXAMINED = 10_000
"""Maximum rows that are read for one page. The client continues with the next page."""
FIRST_WINDOW = 500
"""Rows that the first query of a page examines."""
REACH = 1000
"""Rows by which indices are compared."""

Source = Callable[[HistoryPosition | None, int], Select[Any]]
"""A function of a position and a limit that returns a query for rows after the position, the last end first."""


def write_ended(connection: Connection, ended_jobs: Iterable[Job]) -> None:
    """Store users' jobs that end in a transaction. Called after their attempts are stored."""
    users_jobs = [job for job in ended_jobs if not job.spec.internal]
    earlier = _earlier_node_seconds(connection, [job.id for job in users_jobs if job.generation > 1])
    rows = [_to_row(job, earlier.get(job.id, 0.0)) for job in users_jobs]
    upsert(connection, history, rows)
    clusters = [
        {"job_id": row["job_id"], "cluster": cluster, "ended_at": row["ended_at"]}
        for row in rows
        for cluster in row["clusters"]
    ]
    upsert(connection, history_clusters, clusters)


def _earlier_node_seconds(connection: Connection, ids: list[JobId]) -> dict[JobId, float]:
    """Return the node-seconds of the attempts before the last one, by job."""
    sums: dict[JobId, float] = {}
    used = components.c.size * (components.c.ended_at - components.c.claimed_at)
    query = select(components.c.job_id, func.sum(used)).join(jobs, jobs.c.id == components.c.job_id)
    query = query.where(
        components.c.generation < jobs.c.generation, components.c.ended_at > components.c.claimed_at
    ).group_by(components.c.job_id)
    for chunk in chunks(ids):
        sums |= {job: float(seconds) for job, seconds in connection.execute(query.where(jobs.c.id.in_(chunk)))}
    return sums


def _to_row(job: Job, earlier_node_seconds: float) -> dict[str, Any]:
    """Return the row of an ended job."""
    gang = job.attempt.gang if job.attempt is not None else ()
    started, ended = job.started_at, job.submitted_at if job.ended_at is None else job.ended_at
    run_end = job.attempt.ended_at if job.attempt is not None and job.attempt.ended_at is not None else ended
    measured = [component for component in gang if component.cpu_time is not None]
    return {
        "job_id": job.id,
        "ended_at": ended,
        "owner": job.spec.owner,
        "name": job.spec.name,
        "state": job.state.value,
        "clusters": sorted({component.cluster for component in gang}),
        "nodes": sum(component.size for component in gang),
        "wait_time": None if started is None else max(0.0, started - job.submitted_at),
        "run_time": None if started is None else max(0.0, run_end - started),
        "node_seconds": earlier_node_seconds + (node_seconds_of(job.attempt) if job.attempt is not None else 0.0),
        "measured_nodes": sum(component.measured_nodes for component in gang),
        "cpu_time": sum(component.cpu_time or 0.0 for component in measured) if measured else None,
        "cpu_available": sum(component.cpu_available or 0.0 for component in measured) if measured else None,
        "peak_memory": max((c.peak_memory for c in gang if c.peak_memory is not None), default=None),
    }


def read_page(connection: Connection, filters: HistoryFilter, max_examined: int = MAX_EXAMINED) -> HistoryPage:
    """Return a page of ended jobs, with sums if the filter requests them."""
    source, remaining = _choose_source(connection, filters)
    sums, sums_next = None, None
    by_end = filters.sort is HistorySort.ENDED
    if filters.with_sums or not by_end:
        window = source(filters.before, max_examined)
        sums_next = _last_position(connection, window, max_examined)
        if filters.with_sums:
            sums = _read_sums(connection, window, remaining)
    if by_end:
        ids, next_position = _newest_ids(connection, filters, source, remaining, max_examined)
    else:
        ids, next_position = _largest_ids(connection, window, remaining, filters), sums_next
    return HistoryPage(read_ended_jobs(connection, ids), next_position, sums, sums_next)


def _choose_source(connection: Connection, filters: HistoryFilter) -> tuple[Source, list[ColumnElement[bool]]]:
    """Return the most selective source, and the conditions that its rows must still meet."""
    conditions: dict[str, ColumnElement[bool]] = {}
    if filters.owner:
        conditions["owner"] = history.c.owner == filters.owner
    if filters.name and "*" not in filters.name:
        conditions["name"] = history.c.name == filters.name
    if len(filters.states) == 1:
        conditions["state"] = history.c.state == filters.states[0].value
    if filters.cluster:
        conditions["cluster"] = history_clusters.c.cluster == filters.cluster
    remaining = {name: condition for name, condition in conditions.items() if name != "cluster"}
    if filters.cluster:
        of_job = (history_clusters.c.job_id == history.c.job_id) & (history_clusters.c.cluster == filters.cluster)
        remaining["cluster"] = select(history_clusters.c.job_id).where(of_job).exists()
    if "*" in filters.name:
        remaining["pattern"] = matches_pattern(connection, history.c.name, filters.name)
    if len(filters.states) > 1:
        remaining["states"] = history.c.state.in_([state.value for state in filters.states])
    sources = {name: _make_source(filters, condition) for name, condition in conditions.items()}

    def reach(name: str) -> float:
        last = _last_position(connection, sources[name](filters.before, REACH), REACH)
        return float("-inf") if last is None else last.ended_at

    if not sources:
        return _make_source(filters, None), list(remaining.values())
    best = next(iter(sources)) if len(sources) == 1 else min(sources, key=reach)
    remaining.pop(best)
    return sources[best], list(remaining.values())


def _make_source(filters: HistoryFilter, condition: ColumnElement[bool] | None) -> Source:
    """Return a source of the rows of a span that meet a condition with an index."""
    table = history_clusters if filters.cluster and condition is not None and _is_on_clusters(condition) else history
    ended, job = table.c.ended_at, table.c.job_id

    def source(before: HistoryPosition | None, limit: int) -> Select[Any]:
        query = select(ended, job).where(ended >= filters.since, ended < filters.until)
        if condition is not None:
            query = query.where(condition)
        if before is not None:
            query = query.where(ended <= before.ended_at, tuple_(ended, job) < tuple_(before.ended_at, before.job))
        return query.order_by(ended.desc(), job.desc()).limit(limit)

    return source


def _is_on_clusters(condition: ColumnElement[bool]) -> bool:
    return condition.left.table is history_clusters


def _last_position(connection: Connection, window: Select[Any], size: int) -> HistoryPosition | None:
    """Return the position of the last row of a window; None if the window has fewer rows than its size."""
    row = connection.execute(window.offset(size - 1).limit(1)).first()
    return HistoryPosition(float(row[0]), int(row[1])) if row else None


def _matching(window: Select[Any], remaining: list[ColumnElement[bool]], *columns: Any) -> Select[Any]:
    """Return a query for columns of the jobs of a window that meet the remaining conditions."""
    ids = window.subquery()
    return select(*columns).select_from(ids).join(history, history.c.job_id == ids.c.job_id).where(*remaining)


def _newest_ids(
    connection: Connection,
    filters: HistoryFilter,
    source: Source,
    remaining: list[ColumnElement[bool]],
    max_examined: int,
) -> tuple[list[JobId], HistoryPosition | None]:
    """Return the ids of a page, the last end first, and the position of the next page; None on the last page."""
    positions: list[HistoryPosition] = []
    before, examined = filters.before, 0
    size = min(max_examined, max(FIRST_WINDOW, filters.limit + 1)) if remaining else filters.limit + 1
    while True:
        window = source(before, size)
        query = _matching(window, remaining, history.c.ended_at, history.c.job_id) if remaining else window
        if remaining:
            query = query.order_by(history.c.ended_at.desc(), history.c.job_id.desc())
        rows = connection.execute(query.limit(filters.limit + 1 - len(positions)))
        positions += [HistoryPosition(float(ended), int(job)) for ended, job in rows]
        if len(positions) > filters.limit:
            return [position.job for position in positions[: filters.limit]], positions[filters.limit - 1]
        before, examined = _last_position(connection, window, size), examined + size
        if before is None or examined >= max_examined:
            return [position.job for position in positions], before
        size = min(4 * size, max_examined - examined)


def _largest_ids(
    connection: Connection, window: Select[Any], remaining: list[ColumnElement[bool]], filters: HistoryFilter
) -> list[JobId]:
    """Return the ids of the first jobs of a window in the filter's order."""
    used = history.c.cpu_time / case((history.c.cpu_available > 0, history.c.cpu_available))
    order = {
        HistorySort.WAIT: history.c.wait_time.desc(),
        HistorySort.RUN: history.c.run_time.desc(),
        HistorySort.NODES: history.c.nodes.desc(),
        HistorySort.NODE_HOURS: history.c.node_seconds.desc(),
        HistorySort.CPU: history.c.cpu_time.desc(),
        HistorySort.EFFICIENCY: used.asc(),
        HistorySort.MEMORY: history.c.peak_memory.desc(),
    }[filters.sort]
    query = _matching(window, remaining, history.c.job_id).order_by(order.nulls_last(), history.c.job_id.desc())
    return list(connection.execute(query.limit(filters.limit)).scalars())


def _read_sums(connection: Connection, window: Select[Any], remaining: list[ColumnElement[bool]]) -> HistorySums:
    """Return the sums over the jobs of a window that meet the remaining conditions."""

    def count(condition: ColumnElement[bool]) -> ColumnElement[int]:
        return func.count(case((condition, 1)))

    has_run, complete = history.c.run_time.is_not(None), history.c.measured_nodes >= history.c.nodes
    columns: dict[str, ColumnElement[Any]] = {
        "jobs": func.count(),
        **{state: count(history.c.state == state) for state in ("succeeded", "failed", "cancelled")},
        "started": count(has_run),
        **{
            name: func.coalesce(func.sum(history.c[name]), 0.0)
            for name in ("wait_time", "run_time", "node_seconds", "cpu_time", "cpu_available")
        },
        "unmeasured": count(has_run & ~complete),
        "peak_memory": func.max(history.c.peak_memory),
    }
    labelled = [column.label(name) for name, column in columns.items()]
    return HistorySums(**connection.execute(_matching(window, remaining, *labelled)).mappings().one())


def read_ended_jobs(connection: Connection, ids: list[JobId]) -> list[EndedJob]:
    """Return ended jobs in the order of the ids."""
    of_jobs = ("id", "array_job", "array_index", "application", "priority", "reason", "exit_code", "restarts")
    times = ("submitted_at", "started_at")
    of_history = ("name", "owner", "state", "clusters", "nodes", "ended_at", "wait_time", "run_time", "node_seconds")
    measured = ("measured_nodes", "cpu_time", "cpu_available", "peak_memory")
    requested = [jobs.c.spec[name].as_float().label(name) for name in ("memory", "walltime")]
    columns = [*(jobs.c[name] for name in (*of_jobs, *times)), *(history.c[name] for name in (*of_history, *measured))]
    entries: dict[JobId, EndedJob] = {}
    for chunk in chunks(ids):
        query = select(*columns, *requested).join(history, history.c.job_id == jobs.c.id).where(jobs.c.id.in_(chunk))
        for row in connection.execute(query).mappings():
            values = {
                "state": JobState(row["state"]),
                "priority": Priority(row["priority"]),
                "clusters": tuple(row["clusters"]),
                "memory": None if row["memory"] is None else int(row["memory"]),
            }
            entries[row["id"]] = EndedJob(**{**row, **values})
    return [entries[ident] for ident in ids]


THEIRS_ARE_USERS = case((jobs.c.internal, 1), else_=0) == 0
"""Condition for jobs of users, in queries that find jobs by their components: it is written to use no index on jobs."""


KEYS = ("kind", "day", "name")


def add_batch(connection: Connection, batch: Batch) -> None:
    """Add the jobs and attempts that end in a transaction to the daily figures, as part of the transaction."""
    ended = [job for job in batch.jobs.values() if job.state.is_final and job.tasks is None]
    if ended or batch.attempts:
        days = count_ended_jobs(ended, [(batch.jobs[job], one) for job, one in batch.attempts if job in batch.jobs])
        rows = [
            _key_columns(key) | {name: getattr(figures, name) for name in NAMES}
            for key, figures in sorted(days.items())
        ]
        upsert(connection, day_table, rows, add=True)
        write_ended(connection, ended)
    _store_node_counts(connection, batch.clusters, day_of(batch.at))


def _store_node_counts(connection: Connection, records: Iterable[ClusterRecord], day: int) -> None:
    """Store the largest number of nodes that each cluster had on a day."""
    rows = [_key_columns(Key(Kind.CLUSTER, day, r.name)) | {"nodes": r.total} for r in records if r.total > 0]
    if rows:
        connection.execute(_count_statement(connection.dialect.name), rows)


@cache
def _count_statement(dialect: str) -> Any:
    """Return the statement that raises the numbers of nodes. Cached as that of ``_add_statement``."""
    statement = (sqlite if dialect == "sqlite" else postgresql).insert(day_table)
    nodes, rises = statement.excluded.nodes, day_table.c.nodes < statement.excluded.nodes
    return statement.on_conflict_do_update(index_elements=KEYS, set_={"nodes": nodes}, where=rises)


def _key_columns(key: Key) -> dict[str, Any]:
    return {"kind": key.kind.value, "day": key.day, "name": key.name}


def days_of(connection: Connection, day_filter: DayFilter) -> dict[Key, Figures]:
    """Return the daily figures that match a query; each line of several days has the key of its first day."""
    values = {name: getattr(day_filter, name) for name in ("first", "last", "name", "days", "offset", "limit")}
    values["kind"] = day_filter.kind.value
    rows = connection.execute(_days_query(has_name=day_filter.name is not None), values)
    return {Key(day_filter.kind, int(row[0]), row[1]): _to_figures(row[2:]) for row in rows}


@cache
def _days_query(*, has_name: bool) -> Select[Any]:
    """Return the query for the sums of a ``DayFilter``, with its fields as parameters."""
    columns = day_table.c
    start = columns.day - (columns.day - bindparam("offset", type_=Integer)) % bindparam("days", type_=Integer)
    days = select(start.label("period"), *(columns[name] for name in ("name", *NAMES))).where(
        columns.kind == bindparam("kind"), columns.day >= bindparam("first"), columns.day <= bindparam("last")
    )
    days = days.where((columns.jobs > 0) | (columns.node_seconds > 0))
    if has_name:
        days = days.where(columns.name == bindparam("name"))
    rows = days.subquery().c
    query = select(rows.period, rows.name, *(func.sum(rows[name]) for name in NAMES))
    return query.group_by(rows.period, rows.name).order_by(rows.period, rows.name).limit(bindparam("limit"))


def _to_figures(sums: Sequence[Any]) -> Figures:
    # PostgreSQL returns sums of integers as Decimal.
    values = {name: value if isinstance(value, float) else int(value) for name, value in zip(NAMES, sums, strict=True)}
    return Figures(**values)  # type: ignore[arg-type]
