"""What was foretold of jobs, in SQL and in memory. What came of it is not written beside: the books of jobs say that,
however often a daemon was restarted in between."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import RowMapping, func, select

from koalapy.model.application import application_of
from koalapy.model.job import Job, JobState
from koalapy.model.prediction import Course, Prediction, PredictionKind, PredictionSource
from koalapy.store.database import Database, chunks, upsert
from koalapy.store.memory import Memory
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


class MemoryPredictions:
    """The same port in memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def add_predictions(self, made: Sequence[Prediction]) -> None:
        memory = self._memory
        with memory.lock:
            known = {(each.job, each.kind, each.made_at): each for each in made if each.job in memory.jobs}
            memory.predictions = known | memory.predictions

    def predictions(
        self, since: float, limit: int, owner: str | None = None, application: str = ""
    ) -> list[tuple[Prediction, Course]]:
        with self._memory.lock:
            found = [
                (told, self._course(told, job))
                for told in self._memory.predictions.values()
                if told.made_at >= since
                and (job := self._memory.jobs[told.job])
                and owner in (None, job.spec.owner)
                and application in ("", application_of(job.spec))
            ]
        return sorted(found, key=lambda each: (-each[0].made_at, -each[0].job, each[0].kind))[:limit]

    def _course(self, told: Prediction, job: Job) -> Course:
        tried = {**self._memory.attempts[job.id], **({job.generation: job.attempt} if job.attempt else {})}
        last = tried.get(job.generation)
        starts = [a.barrier_at for a in tried.values() if a.generation > told.generation and a.barrier_at is not None]
        lines = self._memory.timeline[job.id]
        return Course(
            job.state,
            job.spec.walltime,
            job.ended_at,
            min(starts, default=None),
            min((line.at for line in lines if line.event in TOUCHES and line.at >= told.made_at), default=None),
            *((last.barrier_at, last.launched_at, last.ended_at, last.exit_code) if last else ()),
        )
