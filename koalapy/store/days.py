"""Days as they add up, in SQL: written in one transaction with the jobs that end in them, and read without these."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select
from sqlalchemy.dialects import postgresql, sqlite

from koalapy.model.history import NAMES, DayFilter, Days, Figures, Key, Kind, count_ended_jobs, day_of, pair_with_jobs
from koalapy.ports import Batch, ClusterRecord
from koalapy.store.tables import days as table

KEYS = ("kind", "day", "name")


def add_batch(connection: Connection, batch: Batch) -> None:
    """What a transaction ends, as part of it."""
    over = [job for job in batch.jobs.values() if job.state.is_final]
    if over or batch.attempts:
        _add(connection, count_ended_jobs(over, pair_with_jobs(batch.attempts, batch.jobs)))
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
