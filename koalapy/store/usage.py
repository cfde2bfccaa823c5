"""Statistics in SQL (semantics 12): daily figures, updated when jobs end, and the use of clusters."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, case, false, func, select
from sqlalchemy.dialects import postgresql, sqlite

from koalapy.model.history import DAY, NAMES, DayFilter, Figures, Key, Kind, count_ended_jobs, day_of, pair_with_jobs
from koalapy.model.job import ACTIVE_STATES, FINAL_STATES, JobState
from koalapy.model.job_spec import Priority
from koalapy.ports import Batch, ClusterRecord, MeanTimes, Usage
from koalapy.store.ended_jobs import write_ended
from koalapy.store.tables import attempts, components, jobs
from koalapy.store.tables import days as day_table

USERS = (jobs.c.internal == false()) & (jobs.c.array_size == 0)
"""Condition for jobs of users. The daemon's own jobs, such as network measurements, do not count as use. The tasks of
an array count, not the array."""
THEIRS_ARE_USERS = case((jobs.c.internal, 1), else_=0) == 0
"""The same condition, for queries that find jobs by their components. It is written to use no index on jobs."""
NO_ORDER = components.c.cluster.concat("")
"""The cluster, written so that no index on components is used for its order."""


def usage_between(connection: Connection, start: float, end: float) -> Usage:
    """Return the use between two times. Components that still run at the end count until then."""
    if start % DAY == 0 and end - start > DAY:
        return _by_days(connection, start, end)
    nodes: dict[str, float] = {}
    for query in (_ended_in(start, end), _not_ended(start, end)):
        for cluster, seconds in connection.execute(query):
            nodes[cluster] = nodes.get(cluster, 0.0) + float(seconds)
    by_state = select(jobs.c.state, func.count(), func.sum(jobs.c.restarts)).group_by(jobs.c.state)
    rows = connection.execute(by_state.where(USERS, jobs.c.ended_at > start, jobs.c.ended_at <= end)).all()
    ended = [(JobState(state), count, restarts) for state, count, restarts in rows if JobState(state) in FINAL_STATES]
    states = {state: count for state, count, _ in ended}
    return Usage(nodes, _mean_times(connection, start, end), states, sum(restarts for _, _, restarts in ended))


def _by_days(connection: Connection, start: float, now: float) -> Usage:
    """Return the use from the beginning of a day until now: the daily figures, and the use by unfinished attempts."""
    first, last = day_of(start), day_of(now)

    def all_of(kind: Kind) -> dict[str, Figures]:
        days = days_of(connection, DayFilter(kind, first, last, days=last - first + 1, offset=first))
        return {key.name: figures for key, figures in days.items()}

    nodes = {name: figures.node_seconds for name, figures in all_of(Kind.CLUSTER).items()}
    for query in (_not_ended(start, now), _ended_of_live(start, now)):
        for cluster, seconds in connection.execute(query):
            nodes[cluster] = nodes.get(cluster, 0.0) + float(seconds)
    totals, means = all_of(Kind.GRID).get("", Figures()), all_of(Kind.PRIORITY)
    states = {state: int(getattr(totals, state.value)) for state in FINAL_STATES}
    return Usage(
        {name: seconds for name, seconds in nodes.items() if seconds},
        {priority: _means_of(means.get(priority.value, Figures())) for priority in Priority},
        {state: count for state, count in states.items() if count},
        totals.restarts,
    )


def _means_of(sums: Figures) -> MeanTimes:
    """Convert sums of seconds to means; a mean of no values is None."""

    def mean(total: float, count: int) -> float | None:
        return total / count if count else None

    return MeanTimes(
        sums.ran,
        mean(sums.queue_time, sums.ran),
        mean(sums.wait_time, sums.ran),
        mean(sums.startup_overhead, sums.ran),
        mean(sums.response_time, sums.ran),
        mean(sums.start_delay, sums.start_delays),
    )


def _ended_of_live(start: float, end: float) -> Select[str, float]:
    """Return a query for the use by ended components of unfinished attempts, which the daily figures do not include
    yet."""
    ended, claimed = components.c.ended_at, components.c.claimed_at
    alive = [state.value for state in JobState if state not in FINAL_STATES]
    query = select(components.c.cluster, _node_seconds(start, ended)).select_from(jobs)
    query = query.join(components, (components.c.job_id == jobs.c.id) & (components.c.generation == jobs.c.generation))
    # Found by unfinished jobs, since ended components may be very many.
    since = case((ended > start, 1), else_=0) == 1
    query = query.where(
        THEIRS_ARE_USERS, jobs.c.state.in_(alive), jobs.c.generation > 0, since, claimed < end, claimed <= ended
    )
    return query.group_by(components.c.cluster)


def _node_seconds(start: float, until: ColumnElement[float]) -> ColumnElement[float]:
    """Return the node-seconds of components until a time, from ``start`` or the later reservation of their nodes."""
    claimed = components.c.claimed_at
    since = case((claimed > start, claimed), else_=start)
    return func.sum(components.c.size * (until - since))


def _ended_in(start: float, end: float) -> Select[str, float]:
    """Return a query for the use by components that have ended since ``start``."""
    ended, claimed = components.c.ended_at, components.c.claimed_at
    until = case((ended < end, ended), else_=end)
    cluster = func.min(components.c.cluster)
    query = select(cluster, _node_seconds(start, until)).join(jobs, jobs.c.id == components.c.job_id)
    query = query.where(THEIRS_ARE_USERS, ended > start, claimed < end, claimed <= ended)
    return query.group_by(NO_ORDER)


def _not_ended(start: float, end: float) -> Select[str, float]:
    """Return a query for the use by components that have not ended, of unfinished jobs."""
    active = [state.value for state in ACTIVE_STATES]
    until = case((components.c.claimed_at < end, end), else_=components.c.claimed_at)
    query = select(components.c.cluster, _node_seconds(start, until)).join(jobs, jobs.c.id == components.c.job_id)
    query = query.where(THEIRS_ARE_USERS, jobs.c.state.in_(active), components.c.generation == jobs.c.generation)
    query = query.where(components.c.ended_at.is_(None), components.c.claimed_at < end)
    return query.group_by(components.c.cluster)


def _mean_times(connection: Connection, start: float, end: float) -> dict[Priority, MeanTimes]:
    """Return mean times in seconds, by priority, of jobs that ran and ended between two times."""
    last = (attempts.c.job_id == jobs.c.id) & (attempts.c.generation == jobs.c.generation)
    job, attempt = jobs.c, attempts.c
    query = select(
        job.priority,
        func.count(),
        func.avg(job.placed_at - job.submitted_at),
        func.avg(job.started_at - job.submitted_at),
        func.avg(job.started_at - job.placed_at),
        func.avg(job.ended_at - job.submitted_at),
        func.avg(attempt.start_estimate - job.first_start_estimate),
    ).join(attempts, last)
    query = query.where(USERS, job.ended_at > start, job.ended_at <= end, attempt.barrier_at.is_not(None))
    query = query.where(job.state.in_([JobState.SUCCEEDED.value, JobState.FAILED.value])).group_by(job.priority)
    times = {Priority(row[0]): MeanTimes(*row[1:]) for row in connection.execute(query)}
    return {priority: times.get(priority, MeanTimes()) for priority in Priority}


KEYS = ("kind", "day", "name")


def add_batch(connection: Connection, batch: Batch) -> None:
    """Add the jobs and attempts that end in a transaction to the daily figures, as part of the transaction."""
    ended_jobs = [job for job in batch.jobs.values() if job.state.is_final and job.tasks is None]
    if ended_jobs or batch.attempts:
        days = count_ended_jobs(ended_jobs, pair_with_jobs(batch.attempts, batch.jobs))
        rows = [
            _key_columns(key) | {name: getattr(figures, name) for name in NAMES}
            for key, figures in sorted(days.items())
        ]
        if rows:
            connection.execute(_add_statement(connection.dialect.name), rows)
        write_ended(connection, ended_jobs)
    _store_node_counts(connection, batch.clusters, day_of(batch.at))


@cache
def _add_statement(dialect: str) -> Any:
    """Return the statement that adds figures. Cached, since building it takes longer than executing it."""
    statement = (sqlite if dialect == "sqlite" else postgresql).insert(day_table)
    sums = {name: day_table.c[name] + statement.excluded[name] for name in NAMES}
    return statement.on_conflict_do_update(index_elements=KEYS, set_=sums)


def _store_node_counts(connection: Connection, records: Iterable[ClusterRecord], day: int) -> None:
    """Store the largest number of nodes that each cluster had on a day."""
    rows = [
        _key_columns(Key(Kind.CLUSTER, day, record.name)) | {"nodes": record.total}
        for record in records
        if record.total > 0
    ]
    if rows:
        statement = (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(day_table)
        update = statement.on_conflict_do_update(
            index_elements=KEYS,
            set_={"nodes": statement.excluded.nodes},
            where=day_table.c.nodes < statement.excluded.nodes,
        )
        connection.execute(update, rows)


def _key_columns(key: Key) -> dict[str, Any]:
    return {"kind": key.kind.value, "day": key.day, "name": key.name}


def days_of(connection: Connection, day_filter: DayFilter) -> dict[Key, Figures]:
    """Return the daily figures that match a query; each line of several days has the key of its first day."""
    columns = day_table.c
    period = columns.day - (columns.day - day_filter.offset) % day_filter.days  # the first day of a line
    query = select(period.label("period"), columns.name, *(func.sum(columns[name]).label(name) for name in NAMES))
    query = query.where(
        columns.kind == day_filter.kind.value, columns.day >= day_filter.first, columns.day <= day_filter.last
    )
    query = query.where((columns.jobs > 0) | (columns.node_seconds > 0))
    if day_filter.name is not None:
        query = query.where(columns.name == day_filter.name)
    query = query.group_by(period, columns.name).order_by(period, columns.name).limit(day_filter.limit)
    return {Key(day_filter.kind, int(row[0]), row[1]): _to_figures(row[2:]) for row in connection.execute(query)}


def _to_figures(sums: Sequence[Any]) -> Figures:
    # PostgreSQL returns sums of integers as Decimal.
    values = {name: value if isinstance(value, float) else int(value) for name, value in zip(NAMES, sums, strict=True)}
    return Figures(**values)  # type: ignore[arg-type]
