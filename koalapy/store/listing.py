"""Find pages of jobs through indices only, so that the cost does not grow with the number of jobs.

Each filter field has an index that orders its jobs. For a filter with several fields, jobs are read from the index that
reaches farthest back, some hundred at a time. They are then checked against the other fields.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, Text, cast, func, or_, select, text, true, union_all

from koalapy.model.job import JobId, JobState
from koalapy.model.job_search import LITERAL_STAR
from koalapy.store.database import chunks, matches_pattern
from koalapy.store.records import JobFilter
from koalapy.store.tables import WITHOUT_TASKS, components, jobs

FIRST_WINDOW = 400
WINDOW = 1000
"""Jobs that one query reads and checks against the filter."""
MAX_LOOKED_AT = 6000
"""Maximum jobs that are read for one page. The client continues with the next page."""

MAX_COUNTED = 10_000
"""Jobs that are read to count those that match a filter."""

MAX_PAGE_BYTES = 4 * 1024 * 1024
"""Maximum bytes of rows of one page; a page has at least one job."""
EQUAL = ("owner", "name", "application", "priority", "home_site")
"""Filter fields that are compared for equality with the column of the same name."""
COLUMN_OF_KIND = {"user": "owner", "app": "application", "home": "home_site"}
"""The columns with the texts of terms of a search, where the names differ."""
ROW_BYTES = 400
"""Bytes that each row counts in addition to its texts."""

SUM_OF_SIZES = {
    "sqlite": "(SELECT sum(json_extract(value, '$.size')) FROM json_each(jobs.spec, '$.request.components'))",
    "postgresql": "(SELECT sum(CAST(part ->> 'size' AS int)) "
    "FROM json_array_elements(jobs.spec -> 'request' -> 'components') part)",
}
"""The nodes of a request that has components, by dialect."""
MAX_INTEGER = 2**31 - 1
"""Largest value that PostgreSQL compares with an integer."""

Source = Callable[[JobId | None, int], Select[Any]]
"""A function of ``before`` and ``limit`` that returns a query for job ids below ``before``, newest first."""


def page_of_ids(connection: Connection, job_filter: JobFilter) -> tuple[list[JobId], JobId | None]:
    """Return a page of job ids, newest first, and the value of ``before`` for the next page; None on the last page."""
    if job_filter.ids is not None:
        query = (
            select(jobs.c.id)
            .where(jobs.c.id.in_(job_filter.ids), *_conditions_for(connection, job_filter))
            .order_by(jobs.c.id.desc())
        )
        return _cut_page(list(connection.execute(query.limit(job_filter.limit + 1)).scalars()), job_filter)
    bounds = _bounds_of(connection, job_filter)
    job_filter = replace(job_filter, before=bounds.before)
    sources = _sources_for(connection, job_filter, bounds.first)
    if len(sources) == 1 and not _has_conditions(job_filter):
        ids = list(connection.execute(sources[0](job_filter.before, job_filter.limit + 1)).scalars())
        return _cut_page(ids, job_filter)
    return _search_source(connection, job_filter, _select_farthest(connection, sources, job_filter.before))


def _cut_page(ids: list[JobId], job_filter: JobFilter) -> tuple[list[JobId], JobId | None]:
    """Return a page and the value of ``before`` for the next one, from the ids of a page and one more, if any."""
    return ids[: job_filter.limit], ids[job_filter.limit - 1] if len(ids) > job_filter.limit else None


def count_jobs(connection: Connection, job_filter: JobFilter) -> tuple[int, bool]:
    """Return how many jobs of a source match a filter, and whether the source was read to its end."""
    bounds = _bounds_of(connection, job_filter)
    sources = _sources_for(connection, job_filter, bounds.first)
    source = _select_farthest(connection, sources, bounds.before)
    window = source(bounds.before, MAX_COUNTED + 1).subquery()
    examined: int = connection.execute(select(func.count()).select_from(window)).scalar_one()
    if len(sources) == 1 and not _has_conditions(job_filter):
        return min(examined, MAX_COUNTED), examined <= MAX_COUNTED
    matching = select(func.count()).select_from(jobs).join(window, window.c.id == jobs.c.id)
    count: int = connection.execute(matching.where(*_conditions_for(connection, job_filter))).scalar_one()
    return count, examined <= MAX_COUNTED


class _Bounds(NamedTuple):
    """The ids between which all jobs of a filter are: at least ``first``, less than ``before``."""

    first: JobId
    before: JobId | None


def _bounds_of(connection: Connection, job_filter: JobFilter) -> _Bounds:
    """Return the bounds of a filter's page. Jobs have ids in the order of their submission."""
    first, before = job_filter.first, job_filter.before
    if job_filter.array is not None:
        return _Bounds(1, before)  # the tasks of an array are submitted at their turns
    if job_filter.since is not None:
        first = max(first, _first_id_since(connection, job_filter.since))
    untils = [time_s for time_s in (job_filter.until, job_filter.ended_until) if time_s is not None]
    if untils:  # a job is submitted before it ends
        end = _first_id_since(connection, min(untils))
        before = end if before is None else min(before, end)
    return _Bounds(first, before)


def _first_id_since(connection: Connection, time_s: float) -> JobId:
    """Return the smallest id from which on jobs were submitted at or after a time, by a binary search.

    The tasks of an array count as submitted with it, since their numbers follow its own.
    """
    low, high = connection.execute(select(func.min(jobs.c.id), func.max(jobs.c.id))).one()
    if low is None:
        return 1
    end: int = high + 1
    while low < end:
        middle = (low + end) // 2
        columns = jobs.c.id, jobs.c.submitted_at, jobs.c.array_job
        row = connection.execute(select(*columns).where(jobs.c.id >= middle).order_by(jobs.c.id).limit(1)).first()
        if row is not None and _submission_time(connection, row) < time_s:
            low = row.id + 1
        else:
            end = middle
    return int(low)


def _submission_time(connection: Connection, row: Row[Any, Any, Any]) -> float:
    """Return when a job, or the array of a task, was submitted, in seconds."""
    of_array = select(jobs.c.submitted_at).where(jobs.c.id == row.array_job)
    array_time = None if row.array_job is None else connection.execute(of_array).scalar()
    return float(row.submitted_at if array_time is None else array_time)


def _has_conditions(job_filter: JobFilter) -> bool:
    """Return whether jobs of the only source must still be checked against the filter."""
    has_only_most = job_filter.max_restarts is not None and job_filter.min_restarts <= 0
    has_times = job_filter.since is not None or job_filter.until is not None
    has_field = bool(job_filter.states) or job_filter.min_restarts > 0 or any(getattr(job_filter, n) for n in EQUAL)
    has_ends = job_filter.ended_since is not None or job_filter.ended_until is not None
    is_one_field = job_filter.array is None or not (has_times or has_field)
    has_sizes = job_filter.min_size > 0 or job_filter.max_size is not None
    return bool(job_filter.cluster or job_filter.texts) or has_ends or has_only_most or has_sizes or not is_one_field


def within_page_bytes(connection: Connection, ids: list[JobId], max_bytes: int) -> list[JobId]:
    """Return the first of these jobs, newest first, with rows of at most ``max_bytes``; at least one job."""
    texts = func.length(components.c.error) + func.length(cast(components.c.hosts, Text))
    of_components = (
        select(func.coalesce(func.sum(texts + ROW_BYTES), 0))
        .where(components.c.job_id == jobs.c.id, components.c.generation == jobs.c.generation)
        .scalar_subquery()
    )
    of_job = func.length(cast(jobs.c.spec, Text)) + func.length(jobs.c.reason) + ROW_BYTES
    remaining_bytes = max_bytes
    fitting: list[JobId] = []
    for chunk in chunks(ids):
        query = select(jobs.c.id, of_job + of_components).where(jobs.c.id.in_(chunk)).order_by(jobs.c.id.desc())
        for ident, size in connection.execute(query):
            remaining_bytes -= size
            if remaining_bytes < 0 and fitting:
                return fitting
            fitting.append(ident)
    return fitting


def newest_of(owner: str, limit: int) -> Select[Any]:
    """Return a query for the ids of the newest jobs of an owner."""
    return _of_owner(owner, tuple(JobState), 1)(None, limit)


def _search_source(connection: Connection, job_filter: JobFilter, source: Source) -> tuple[list[JobId], JobId | None]:
    """Return the ids from a source that match the filter, and ``before`` for the next page; None on the last page.

    The page ends early after ``MAX_LOOKED_AT`` jobs, so it may have fewer ids than the limit, or none.
    """
    ids: list[JobId] = []
    before, looked_at, window = job_filter.before, 0, FIRST_WINDOW
    while True:
        window_jobs = source(before, window).subquery()
        count, lowest = connection.execute(
            select(func.count(), func.min(window_jobs.c.id)).select_from(window_jobs)
        ).one()
        matching = (
            select(jobs.c.id)
            .join(window_jobs, window_jobs.c.id == jobs.c.id)
            .where(*_conditions_for(connection, job_filter))
        )
        ids += connection.execute(matching.order_by(jobs.c.id.desc()).limit(job_filter.limit + 1)).scalars()
        if len(ids) > job_filter.limit:
            return ids[: job_filter.limit], ids[job_filter.limit - 1]
        if count < window:
            return ids, None
        looked_at += count
        if looked_at >= MAX_LOOKED_AT:
            return ids, lowest
        before, window = lowest, WINDOW


def _select_farthest(connection: Connection, sources: list[Source], before: JobId | None) -> Source:
    """Return the most selective source: it reaches farthest back within ``WINDOW`` jobs, or has fewer jobs."""

    def reach(source: Source) -> int:
        last: int | None = connection.execute(source(before, WINDOW).offset(WINDOW - 1).limit(1)).scalar()
        return last or 0

    return sources[0] if len(sources) == 1 else min(sources, key=reach)


def _sources_for(connection: Connection, job_filter: JobFilter, first: JobId) -> list[Source]:
    """Return sources, functions that return a query for ids from ``first`` on, one for each filter field with an index.

    Every source has all jobs that match the filter, and others.
    """
    sources = [
        _in_order([jobs.c[name] == value], first)
        for name in ("application", "priority", "name")
        if (value := getattr(job_filter, name))
    ]
    if job_filter.min_restarts > 0:
        counts = _restart_counts(connection, job_filter.min_restarts, job_filter.max_restarts)
        # The second condition repeats the condition of the partial index literally, so that the planner uses the index.
        sources.append(_in_order([(jobs.c.restarts == count) & text("restarts > 0") for count in counts], first))
    if job_filter.cluster:
        sources.append(_on_cluster(job_filter.cluster, first))
    if job_filter.home_site:
        # As above, the condition of the partial index.
        sources.append(_in_order([(jobs.c.home_site == job_filter.home_site) & text("home_site <> ''")], first))
    states = job_filter.states or tuple(JobState)
    if job_filter.array is not None:
        return [_select_in_order([jobs.c.array_job == job_filter.array], first)]
    if job_filter.owner:
        sources.append(_of_owner(job_filter.owner, states, first))
    elif job_filter.states:
        sources.append(_in_order([jobs.c.state == state for state in states], first))
    # Without tasks, whose rows may be very many, only the indices on other fields have the jobs.
    return sources or [_in_order([jobs.c.state == state for state in states], first)]


def _of_owner(owner: str, states: Sequence[str], first: JobId) -> Source:
    # The index is on owner, state and id, so each state is read separately.
    return _in_order([(jobs.c.owner == owner) & (jobs.c.state == state) for state in states], first)


def _restart_counts(connection: Connection, minimum: int, maximum: int | None) -> list[int]:
    """Return the restart counts from ``minimum`` to ``maximum`` that occur, with one index read for each.

    Return a count that no job has if none occurs.
    """
    counts: list[int] = []
    while True:
        next_count = select(func.min(jobs.c.restarts)).where(jobs.c.restarts >= minimum, text("restarts > 0"))
        count: int | None = connection.execute(next_count).scalar()
        if count is None or (maximum is not None and count > maximum):
            return counts or [-1]
        counts.append(count)
        minimum = count + 1


def _in_order(alternatives: list[ColumnElement[bool]], first: JobId) -> Source:
    """Return a source of the jobs that meet any of the conditions, without tasks of arrays."""
    return _select_in_order([condition & text(WITHOUT_TASKS) for condition in alternatives], first)


def _select_in_order(alternatives: list[ColumnElement[bool]], first: JobId) -> Source:
    """Return a function of ``before`` and ``limit`` that returns a query for jobs that meet any of the conditions."""

    def source(before: JobId | None, limit: int) -> Select[Any]:
        return _merge_queries(
            [
                _limit_page(select(jobs.c.id).where(condition), jobs.c.id, first, before, limit)
                for condition in alternatives
            ],
            limit,
        )

    return source


def _on_cluster(cluster: str, first: JobId) -> Source:
    """Return a source of the jobs that had a component on a cluster in any attempt."""
    job = components.c.job_id

    def source(before: JobId | None, limit: int) -> Select[Any]:
        jobs_of_cluster = select(job.label("id")).where(components.c.cluster == cluster).distinct()
        return _limit_page(jobs_of_cluster, job, first, before, limit)

    return source


def _limit_page(
    query: Select[Any], column: ColumnElement[int], first: JobId, before: JobId | None, limit: int
) -> Select[Any]:
    if first > 1:
        query = query.where(column >= first)
    if before is not None:
        query = query.where(column < before)
    return query.order_by(column.desc()).limit(limit)


def _merge_queries(queries: list[Select[Any]], limit: int) -> Select[Any]:
    if len(queries) == 1:
        return queries[0]
    union = union_all(*(select(query.subquery().c.id) for query in queries)).subquery()
    return select(union.c.id).order_by(union.c.id.desc()).limit(limit)


def _conditions_for(connection: Connection, job_filter: JobFilter) -> list[ColumnElement[bool]]:
    """Return the SQL conditions that a job must all meet to match the filter."""
    conditions: list[ColumnElement[bool]] = []
    if job_filter.states:
        conditions.append(jobs.c.state.in_(job_filter.states))
    conditions += [jobs.c[name] == value for name in EQUAL if (value := getattr(job_filter, name))]
    if job_filter.min_restarts > 0:
        conditions.append(jobs.c.restarts >= job_filter.min_restarts)
    if job_filter.max_restarts is not None:
        conditions.append(jobs.c.restarts <= job_filter.max_restarts)
    total_size = jobs.c.spec["request", "total_size"].as_integer()  # only flexible requests have it
    size = func.coalesce(total_size, text(SUM_OF_SIZES[connection.dialect.name]))
    if job_filter.min_size > 0:
        conditions.append(size >= min(job_filter.min_size, MAX_INTEGER))
    if job_filter.max_size is not None:
        conditions.append(size <= min(job_filter.max_size, MAX_INTEGER))
    if job_filter.before is not None:
        conditions.append(jobs.c.id < job_filter.before)
    if job_filter.ids is None:
        is_task = jobs.c.array_job == job_filter.array
        conditions.append(is_task if job_filter.array is not None else jobs.c.array_job.is_(None))
    if job_filter.since is not None:
        conditions.append(jobs.c.submitted_at >= job_filter.since)
    if job_filter.until is not None:
        conditions.append(jobs.c.submitted_at < job_filter.until)
    if job_filter.ended_since is not None:
        conditions.append(jobs.c.ended_at >= job_filter.ended_since)
    if job_filter.ended_until is not None:
        conditions.append(jobs.c.ended_at < job_filter.ended_until)
    if job_filter.cluster:
        conditions.append(_has_component(components.c.cluster == job_filter.cluster))
    conditions += [_text_condition(connection, *term) for term in job_filter.texts]
    return conditions


def _has_component(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that a component of a job's last attempt meets a condition."""
    in_gang = (components.c.generation == jobs.c.generation) & components.c.superseded.is_(False)
    return select(components.c.job_id).where(components.c.job_id == jobs.c.id, in_gang, condition).exists()


def _text_condition(
    connection: Connection, kind: str, values: tuple[str, ...], is_opposite: bool
) -> ColumnElement[bool]:
    """Return the condition of a term of a search (``JobFilter.texts``). ``any``: other jobs may match, too."""
    if kind == "any":
        texts = [jobs.c.name, jobs.c.owner, jobs.c.application, components.c.cluster]
        *of_job, cluster = [or_(*(matches_pattern(connection, func.lower(t), v) for v in values)) for t in texts]
        matches = or_(*of_job, _has_component(cluster))
        if is_opposite:
            return ~matches
        # The database lowers only ASCII letters. Before the first attempt, no column has the clusters of the request.
        return matches | (jobs.c.generation == 0) if all(map(str.isascii, values)) else true()
    column = components.c.cluster if kind == "cluster" else jobs.c[COLUMN_OF_KIND.get(kind, kind)]
    exact = [value.replace(LITERAL_STAR, "*") for value in values if "*" not in value]
    patterns = [matches_pattern(connection, column, value) for value in values if "*" in value]
    condition = or_(column.in_(exact), *patterns)
    if kind == "cluster":
        # Before the first attempt, the clusters that the request names count, which no column has.
        return ~_has_component(condition) if is_opposite else (jobs.c.generation == 0) | _has_component(condition)
    return ~condition if is_opposite else condition
