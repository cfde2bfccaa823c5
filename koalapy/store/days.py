"""Days as they add up, in SQL: written in one transaction with the jobs that end in them, and read without these."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, and_, false, func, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from koalapy.model.history import NAMES, DayFilter, Days, EndedJob, Figures, Key, Kind, day_of, owners, tally
from koalapy.model.job import FINAL_STATES, JobId, JobState, Priority
from koalapy.model.request import ClusterName
from koalapy.ports import Batch, ClusterRecord
from koalapy.store.tables import components, jobs
from koalapy.store.tables import days as table

KEYS = ("kind", "day", "name")
BETWEEN = "\n"
"""Names of clusters, none of which has it."""


def add_batch(connection: Connection, batch: Batch) -> None:
    """What a transaction ends, as part of it."""
    over = [job for job in batch.jobs.values() if job.state.is_final]
    if over or batch.attempts:
        _add(connection, tally(over, owners(batch.attempts, batch.jobs)))
    _note_nodes(connection, batch.clusters, day_of(batch.at))


def _add(connection: Connection, found: Days) -> None:
    rows = [_key(key) | {name: getattr(figures, name) for name in NAMES} for key, figures in sorted(found.items())]
    if rows:
        connection.execute(_adding(connection.dialect.name), rows)


@cache
def _adding(dialect: str) -> Any:
    """Made once: to make it takes longer than to carry it out."""
    statement = (sqlite if dialect == "sqlite" else postgresql).insert(table)
    more = {name: table.c[name] + statement.excluded[name] for name in NAMES}
    return statement.on_conflict_do_update(index_elements=KEYS, set_=more)


def _note_nodes(connection: Connection, records: Iterable[ClusterRecord], day: int) -> None:
    rows = [_key(Key(Kind.CLUSTER, day, each.name)) | {"nodes": each.total} for each in records if each.total > 0]
    if rows:
        statement = (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(table)
        most = {"nodes": statement.excluded.nodes}
        more = statement.on_conflict_do_update(
            index_elements=KEYS, set_=most, where=table.c.nodes < statement.excluded.nodes
        )
        connection.execute(more, rows)


def _key(key: Key) -> dict[str, Any]:
    return {"kind": key.kind.value, "day": key.day, "name": key.name}


def days_of(connection: Connection, which: DayFilter) -> dict[Key, Figures]:
    """Several days together by the first of them."""
    period = _period(which.days, which.offset)
    query = select(period.label("period"), table.c.name, *(func.sum(table.c[name]).label(name) for name in NAMES))
    query = query.where(table.c.kind == which.kind.value, table.c.day >= which.first, table.c.day <= which.last)
    query = query.where((table.c.jobs > 0) | (table.c.node_seconds > 0))
    if which.name is not None:
        query = query.where(table.c.name == which.name)
    query = query.group_by(period, table.c.name).order_by(period, table.c.name).limit(which.limit)
    return {Key(which.kind, int(row[0]), row[1]): _figures(row[2:]) for row in connection.execute(query)}


def _period(length: int, offset: int) -> ColumnElement[int]:
    """The first day of each span of so many days; spans begin at days that are ``offset`` more than a multiple."""
    return table.c.day - (table.c.day - offset) % length


def _figures(sums: Sequence[Any]) -> Figures:
    # Sums of whole numbers are Decimal with PostgreSQL.
    told = {name: value if isinstance(value, float) else int(value) for name, value in zip(NAMES, sums, strict=True)}
    return Figures(**told)  # type: ignore[arg-type]


def nodes_by_day(connection: Connection, until: int) -> list[tuple[int, ClusterName, int]]:
    """What is known of the clusters' sizes up to a day: the most nodes in it, of days in which that was told."""
    query = select(table.c.day, table.c.name, table.c.nodes).order_by(table.c.day)
    query = query.where(table.c.kind == Kind.CLUSTER.value, table.c.day <= until, table.c.nodes > 0)
    return [(row.day, row.name, row.nodes) for row in connection.execute(query)]


def ended_jobs(connection: Connection, after: tuple[float, JobId], until: float, limit: int) -> list[EndedJob]:
    job, part = jobs.c, components.c
    beyond = or_(job.ended_at > after[0], and_(job.ended_at == after[0], job.id > after[1]))
    there = (part.job_id == job.id) & (part.generation == job.generation) & part.superseded.is_(False)

    def of_parts(value: ColumnElement[Any]) -> Any:
        return select(value).where(there).correlate(jobs).scalar_subquery()

    final = [state.value for state in FINAL_STATES]
    query = select(
        job.id,
        job.submitted_at,
        job.placed_at,
        job.started_at,
        job.ended_at,
        job.state,
        job.owner,
        job.application,
        job.priority,
        job.spec["walltime"].as_float().label("walltime"),
        of_parts(func.sum(part.size)).label("nodes"),
        of_parts(func.aggregate_strings(part.cluster, BETWEEN)).label("clusters"),
        job.home_site,
    ).where(job.internal == false(), job.ended_at >= after[0], beyond, job.ended_at < until, job.state.in_(final))
    found = connection.execute(query.order_by(job.ended_at, job.id).limit(limit)).mappings()
    return [_ended_job(row) for row in found]


def _ended_job(row: RowMapping) -> EndedJob:
    values = dict(row)
    nodes, clusters = values.pop("nodes"), values.pop("clusters") or ""
    values |= {"state": JobState(values["state"]), "priority": Priority(values["priority"])}
    return EndedJob(**values, nodes=int(nodes or 0), clusters=tuple(sorted(set(filter(None, clusters.split(BETWEEN))))))


def first_day(connection: Connection) -> int | None:
    found: int | None = connection.execute(
        select(func.min(table.c.day)).where(table.c.kind == Kind.GRID.value)
    ).scalar()
    return found
