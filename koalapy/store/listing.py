"""Find pages of jobs by indices alone, so that the cost does not grow with the number of jobs.

Each filter field has an index that orders its jobs. For a filter with several fields, jobs are read from the index that
reaches farthest back, some hundred at a time. They are then checked against the other fields.
"""

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Text, cast, func, select, text, union_all

from koalapy.model.job import JobId, JobState
from koalapy.ports import JobFilter
from koalapy.store.database import chunks
from koalapy.store.tables import components, jobs

FIRST_WINDOW = 400
WINDOW = 1000
"""Jobs that one query reads and checks against the filter."""
MAX_LOOKED_AT = 6000
"""Maximum jobs that are read for one page. The client continues with the next page."""

MAX_PAGE_BYTES = 4 * 1024 * 1024
"""Maximum bytes of rows of one page; a page has at least one job."""
EQUAL = ("owner", "name", "application", "priority", "home_site")
"""Filter fields that are compared for equality with the column of the same name."""
ROW_BYTES = 400
"""Bytes that each row counts in addition to its texts."""

Source = Callable[[JobId | None, int], Select[Any]]
"""A function of ``before`` and ``limit`` that returns a query for job ids below ``before``, newest first."""


def page_of_ids(connection: Connection, which: JobFilter) -> tuple[list[JobId], JobId | None]:
    """Return a page of job ids, newest first, and the value of ``before`` for the next page; None on the last page."""
    if which.ids is not None:
        query = select(jobs.c.id).where(jobs.c.id.in_(which.ids), *_conditions(which)).order_by(jobs.c.id.desc())
        return list(connection.execute(query.limit(which.limit)).scalars()), None
    sources = _sources(connection, which)
    is_bounded_above_only = which.max_restarts is not None and which.min_restarts <= 0
    if len(sources) == 1 and not which.cluster and not is_bounded_above_only:
        found = list(connection.execute(sources[0](which.before, which.limit + 1)).scalars())
        return found[: which.limit], found[which.limit - 1] if len(found) > which.limit else None
    return _held_against(connection, which, _farthest(connection, sources, which.before))


def within_page_bytes(connection: Connection, ids: list[JobId], max_bytes: int) -> list[JobId]:
    """Return the first of these jobs, newest first, with rows of at most ``max_bytes``; at least one job."""
    texts = func.length(components.c.error) + func.length(cast(components.c.hosts, Text))
    of_components = (
        select(func.coalesce(func.sum(texts + ROW_BYTES), 0))
        .where(components.c.job_id == jobs.c.id, components.c.generation == jobs.c.generation)
        .scalar_subquery()
    )
    of_job = func.length(cast(jobs.c.spec, Text)) + func.length(jobs.c.reason) + ROW_BYTES
    left = max_bytes
    fitting: list[JobId] = []
    for some in chunks(ids):
        query = select(jobs.c.id, of_job + of_components).where(jobs.c.id.in_(some)).order_by(jobs.c.id.desc())
        for ident, size in connection.execute(query):
            left -= size
            if left < 0 and fitting:
                return fitting
            fitting.append(ident)
    return fitting


def newest_of(owner: str, limit: int) -> Select[Any]:
    """Return a query for the ids of the newest jobs of an owner."""
    return _of_owner(owner, tuple(JobState))(None, limit)


def _held_against(connection: Connection, which: JobFilter, source: Source) -> tuple[list[JobId], JobId | None]:
    found: list[JobId] = []
    before, looked_at, window = which.before, 0, FIRST_WINDOW
    while True:
        seen = source(before, window).subquery()
        count, lowest = connection.execute(select(func.count(), func.min(seen.c.id)).select_from(seen)).one()
        matching = select(jobs.c.id).join(seen, seen.c.id == jobs.c.id).where(*_conditions(which))
        found += connection.execute(matching.order_by(jobs.c.id.desc()).limit(which.limit + 1)).scalars()
        if len(found) > which.limit:
            return found[: which.limit], found[which.limit - 1]
        if count < window:
            return found, None
        looked_at += count
        if looked_at >= MAX_LOOKED_AT:
            return found, lowest
        before, window = lowest, WINDOW


def _farthest(connection: Connection, sources: list[Source], before: JobId | None) -> Source:
    """Return the source with the smallest id at ``WINDOW`` jobs, or with fewer jobs than that."""

    def reach(source: Source) -> int:
        last: int | None = connection.execute(source(before, WINDOW).offset(WINDOW - 1).limit(1)).scalar()
        return last or 0

    return sources[0] if len(sources) == 1 else min(sources, key=reach)


def _sources(connection: Connection, which: JobFilter) -> list[Source]:
    found = [
        _in_order([jobs.c[name] == value])
        for name in ("application", "priority", "name")
        if (value := getattr(which, name))
    ]
    if which.min_restarts > 0:
        counts = _restart_counts(connection, which.min_restarts, which.max_restarts)
        # The second condition repeats the condition of the partial index literally, so that the planner uses the index.
        found.append(_in_order([(jobs.c.restarts == count) & text("restarts > 0") for count in counts]))
    if which.cluster:
        found.append(_on(which.cluster))
    if which.home_site:
        # As above, the condition of the partial index.
        found.append(_in_order([(jobs.c.home_site == which.home_site) & text("home_site <> ''")]))
    states = which.states or tuple(JobState)
    if which.owner:
        found.append(_of_owner(which.owner, states))
    elif which.states:
        found.append(_in_order([jobs.c.state == state for state in states]))
    return found or [_in_order([jobs.c.id > 0])]


def _of_owner(owner: str, states: Sequence[str]) -> Source:
    # The index is on owner, state and id, so each state is read separately.
    return _in_order([(jobs.c.owner == owner) & (jobs.c.state == state) for state in states])


def _restart_counts(connection: Connection, least: int, most: int | None) -> list[int]:
    """Return the restart counts from ``least`` to ``most`` that occur, with one index read for each.

    Return a count that no job has if none occurs.
    """
    counts: list[int] = []
    while True:
        next_count = select(func.min(jobs.c.restarts)).where(jobs.c.restarts >= least, text("restarts > 0"))
        count: int | None = connection.execute(next_count).scalar()
        if count is None or (most is not None and count > most):
            return counts or [-1]
        counts.append(count)
        least = count + 1


def _in_order(alternatives: list[ColumnElement[bool]]) -> Source:
    def source(before: JobId | None, limit: int) -> Select[Any]:
        return _merged([_older(select(jobs.c.id).where(one), jobs.c.id, before, limit) for one in alternatives], limit)

    return source


def _on(cluster: str) -> Source:
    """Return a source of the jobs that had a component on a cluster in any attempt."""
    job = components.c.job_id

    def source(before: JobId | None, limit: int) -> Select[Any]:
        there = select(job.label("id")).where(components.c.cluster == cluster).distinct()
        return _older(there, job, before, limit)

    return source


def _older(query: Select[Any], column: ColumnElement[int], before: JobId | None, limit: int) -> Select[Any]:
    if before is not None:
        query = query.where(column < before)
    return query.order_by(column.desc()).limit(limit)


def _merged(queries: list[Select[Any]], limit: int) -> Select[Any]:
    if len(queries) == 1:
        return queries[0]
    all_of_them = union_all(*(select(query.subquery().c.id) for query in queries)).subquery()
    return select(all_of_them.c.id).order_by(all_of_them.c.id.desc()).limit(limit)


def _conditions(which: JobFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if which.states:
        conditions.append(jobs.c.state.in_(which.states))
    conditions += [jobs.c[name] == value for name in EQUAL if (value := getattr(which, name))]
    if which.min_restarts > 0:
        conditions.append(jobs.c.restarts >= which.min_restarts)
    if which.max_restarts is not None:
        conditions.append(jobs.c.restarts <= which.max_restarts)
    if which.before is not None:
        conditions.append(jobs.c.id < which.before)
    if which.cluster:
        there = (
            select(components.c.job_id)
            .where(components.c.job_id == jobs.c.id, components.c.generation == jobs.c.generation)
            .where(components.c.cluster == which.cluster, components.c.superseded.is_(False))
        )
        conditions.append(there.exists())
    return conditions
