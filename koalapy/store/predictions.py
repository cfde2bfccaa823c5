"""Predictions of start, run time and end of jobs. Their outcomes are read from the tables of jobs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import RowMapping, func, select

from koalapy.model.job import JobState
from koalapy.model.prediction import Course, Prediction, PredictionKind, PredictionSource
from koalapy.store.database import Database, chunks, upsert
from koalapy.store.tables import attempts, jobs, predictions, timeline

TOUCHES = ("held", "released", "priority")
"""What people do to a job that waits, and that nobody foretold."""


class SqlPredictions:
    """The ``PredictionStore`` port on a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_predictions(self, made: Sequence[Prediction]) -> None:
        with self._database.writing() as connection:
            # A job that was removed meanwhile takes what was foretold of the others with it.
            there = {
                ident
                for some in chunks({each.job for each in made})
                for ident in connection.execute(select(jobs.c.id).where(jobs.c.id.in_(some))).scalars()
            }
            upsert(connection, predictions, [_row(each) for each in made if each.job in there], replace=False)

    def predictions(
        self, since: float, limit: int, owner: str | None = None, application: str = ""
    ) -> list[tuple[Prediction, Course]]:
        told, job, last = predictions.c, jobs.c, attempts.alias("last")
        later = attempts.alias("later").c
        is_last = (last.c.job_id == job.id) & (last.c.generation == job.generation)
        started = select(func.min(later.barrier_at)).where(later.job_id == told.job_id)
        started = started.where(later.generation > told.generation).correlate(predictions)
        touched = select(func.min(timeline.c.at)).where(timeline.c.job_id == told.job_id, timeline.c.event.in_(TOUCHES))
        touched = touched.where(timeline.c.at >= told.made_at).correlate(predictions)
        query = (
            select(
                predictions,
                job.state,
                job.spec["walltime"].as_float().label("walltime"),
                job.ended_at,
                started.scalar_subquery().label("started_at"),
                touched.scalar_subquery().label("touched_at"),
                last.c.barrier_at,
                last.c.launched_at,
                last.c.ended_at.label("attempt_ended_at"),
                last.c.exit_code,
            )
            .select_from(predictions.join(jobs, job.id == told.job_id).outerjoin(last, is_last))
            .where(told.made_at >= since)
            .order_by(told.made_at.desc(), told.job_id.desc(), told.kind)
            .limit(limit)
        )
        if owner is not None:
            query = query.where(job.owner == owner)
        if application:
            query = query.where(job.application == application)
        return [_told(row) for row in self._database.rows(query)]


def _row(made: Prediction) -> dict[str, Any]:
    row = asdict(made)
    return row | {"job_id": row.pop("job"), "conditions": dict(made.conditions)}


def _told(row: RowMapping) -> tuple[Prediction, Course]:
    values = {name: value for name, value in row.items() if name in Prediction.__slots__}
    values |= {"kind": PredictionKind(row["kind"]), "source": PredictionSource(row["source"])}
    course = {name: value for name, value in row.items() if name in Course.__slots__}
    return Prediction(job=row["job_id"], **values), Course(**course | {"state": JobState(row["state"])})
