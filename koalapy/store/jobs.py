"""Jobs with their last attempts, read from the tables."""

from itertools import groupby
from typing import Any

from sqlalchemy import Connection, select

from koalapy.model.job import Attempt, Job, JobId
from koalapy.store import rows, tables

AT_ONCE = 500
"""Ids in one query."""


def jobs_of(connection: Connection, query: Any) -> list[Job]:
    """Those of whole rows of ``jobs`` that a query finds, in its order."""
    found = connection.execute(query).mappings().all()
    ids = [row["id"] for row in found if row["generation"]]
    attempts: dict[tuple[int, int], Attempt] = {}
    for start in range(0, len(ids), AT_ONCE):
        attempts |= _attempts(connection, ids[start : start + AT_ONCE])
    return [rows.job_from_row(row, attempts.get((row["id"], row["generation"]))) for row in found]


def _attempts(connection: Connection, ids: list[JobId]) -> dict[tuple[int, int], Attempt]:
    """The last attempt of each of these jobs."""
    jobs, attempts, components = tables.jobs.c, tables.attempts.c, tables.components.c
    of_component = (components.job_id == jobs.id) & (components.generation == jobs.generation)
    of_attempt = (attempts.job_id == jobs.id) & (attempts.generation == jobs.generation)
    found = connection.execute(
        select(tables.components)
        .join(tables.jobs, of_component)
        .where(jobs.id.in_(ids))
        .order_by(components.job_id, components.index)
    ).mappings()
    by_job = {
        key: tuple(rows.component_from_row(row) for row in group)
        for key, group in groupby(found, key=lambda row: (row["job_id"], row["generation"]))
    }
    tried = connection.execute(select(tables.attempts).join(tables.jobs, of_attempt).where(jobs.id.in_(ids))).mappings()
    return {
        (row["job_id"], row["generation"]): rows.attempt_from_row(row, by_job[(row["job_id"], row["generation"])])
        for row in tried
    }
