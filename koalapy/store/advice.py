"""SQL storage of followed advice, and of the runs from which the advisor learns."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby

from sqlalchemy import Connection, RowMapping, case, delete, func, insert, select, update
from sqlalchemy.sql import bindparam

from koalapy.model.advice import CLOCK_TOLERANCE_S, AdvisedPlacement, Option, Run, Size, completed_run_of
from koalapy.model.job import Job, JobState
from koalapy.store import tables
from koalapy.store.database import DatabaseStore
from koalapy.store.listing import newest_of

MAX_RETAINED_RUNS = 5000
"""Maximum runs of deleted jobs that are stored for the advisor."""

MAX_JOBS_OF_OWNER = 2000
"""Newest jobs of an owner that are searched for application names."""

_runs = tables.runs.c
_advice, _jobs, _attempts, _components = tables.advice.c, tables.jobs.c, tables.attempts.c, tables.components.c


class AdviceStore(DatabaseStore):
    """The followed advice, and the runs from which the advisor learns."""

    def record(self, application: str, limit: int, owner: str | None = None) -> list[AdvisedPlacement]:
        """Return advised placements, newest first. An empty ``application`` matches all, ``owner=None`` all owners."""
        query = select(tables.advice).order_by(_advice.job_id.desc(), _advice.generation.desc()).limit(limit)
        if application:
            query = query.where(_advice.application == application)
        if owner is not None:
            query = query.join(tables.jobs, _jobs.id == _advice.job_id).where(_jobs.owner == owner)
        return [_to_placement(row) for row in self._database.rows(query)]

    def applications_of(self, owner: str) -> set[str]:
        """Return the known applications of an owner's jobs."""
        last = newest_of(owner, MAX_JOBS_OF_OWNER).subquery()
        query = select(_jobs.application).join(last, last.c.id == _jobs.id).where(_jobs.application != "").distinct()
        return {row["application"] for row in self._database.rows(query)}

    def runs(self, limit: int) -> list[Run]:
        """Return the last runs of jobs with a known application, oldest first.

        Precede them with the runs that the advisor kept of deleted jobs, up to ``limit`` runs in all.
        """
        succeeded = (_jobs.state == JobState.SUCCEEDED.value) & (_jobs.application != "")
        # Limits the search: at least ``limit`` jobs have succeeded since this job.
        oldest = select(_jobs.id).where(succeeded).order_by(_jobs.id.desc()).offset(limit - 1).limit(1)
        first = func.coalesce(oldest.scalar_subquery(), 0)
        walltime = _jobs.spec["walltime"].as_float()
        lasted = _attempts.ended_at - _attempts.launched_at
        failed = (_jobs.state == JobState.FAILED.value) & _attempts.exit_code.is_(None)
        killed = failed & (lasted >= walltime - CLOCK_TOLERANCE_S)
        last = (
            select(_jobs.id, _jobs.generation, (_jobs.state == JobState.FAILED.value).label("killed"))
            .join(tables.attempts, (_attempts.job_id == _jobs.id) & (_attempts.generation == _jobs.generation))
            .where(_jobs.id >= first, case((succeeded, 1), (killed & (_jobs.application != ""), 1), else_=0) == 1)
            .order_by(_jobs.id.desc())
            .limit(limit)
            .subquery()
        )
        attempt = (_attempts.job_id == last.c.id) & (_attempts.generation == last.c.generation)
        component = (_components.job_id == last.c.id) & (_components.generation == last.c.generation)
        per_node = _jobs.spec["processes_per_node"].as_integer()
        query = (
            select(
                last.c.id,
                last.c.killed,
                _jobs.application,
                per_node.label("per_node"),
                _components.cluster,
                _components.size,
                _attempts.barrier_at,
                _attempts.ended_at,
            )
            .select_from(last)
            .join(tables.jobs, _jobs.id == last.c.id)
            .join(tables.attempts, attempt)
            .join(tables.components, component)
            .where(_components.superseded.is_(False), _attempts.barrier_at.is_not(None))
            .where(_attempts.ended_at.is_not(None))
            .order_by(last.c.id)
        )
        with self._database.reading() as connection:
            components = connection.execute(query).mappings()
            runs = [_to_run(list(rows)) for _, rows in groupby(components, key=lambda row: row["id"])]
            return [*_retained_runs(connection, limit - len(runs)), *runs]


def write_advised(connection: Connection, placements: Sequence[AdvisedPlacement]) -> None:
    """Insert advised placements. Their jobs must be placed in the same transaction."""
    if not placements:
        return
    rows = []
    for advised in placements:
        row = {name: getattr(advised, name) for name in _PLAIN}
        rows.append(row | {"job_id": advised.job, "options": [asdict(option) for option in advised.options]})
    connection.execute(insert(tables.advice), rows)


def complete_advised(connection: Connection, jobs: Iterable[Job]) -> None:
    """Store the run times of jobs in the advice table. Ignore jobs that failed or were placed without advice."""
    ran = [
        {"job": job.id, "of": job.generation, "seconds": run.seconds}
        for job in jobs
        if job.state is JobState.SUCCEEDED and (run := completed_run_of(job)) is not None
    ]
    if ran:
        same = (_advice.job_id == bindparam("job")) & (_advice.generation == bindparam("of"))
        connection.execute(update(tables.advice).where(same).values(actual=bindparam("seconds")), ran)


_PLAIN = ("generation", "application", "at", "clusters", "predicted", "reason", "actual")


def _to_placement(row: RowMapping) -> AdvisedPlacement:
    options = tuple(Option(**{**option, "clusters": tuple(option["clusters"])}) for option in row["options"])
    return AdvisedPlacement(job=row["job_id"], options=options, **{name: row[name] for name in _PLAIN})


def _to_run(rows: Sequence[RowMapping]) -> Run:
    """Return the run of one job from the rows of its components."""
    first = rows[0]
    size = Size(sum(row["size"] for row in rows), first["per_node"] or 0)
    clusters = tuple(sorted({row["cluster"] for row in rows}))
    seconds = max(0.0, first["ended_at"] - first["barrier_at"])
    return Run(first["application"], size, clusters, seconds, bool(first["killed"]))


def retain_runs(connection: Connection, jobs: Iterable[Job], max_runs: int) -> None:
    """Store the runs of jobs that will be deleted, and delete all but the newest ``max_runs``."""
    runs = [{"job_id": job.id, "run": run._asdict()} for job in jobs if (run := completed_run_of(job)) is not None]
    if not runs:
        return
    connection.execute(insert(tables.runs), runs)
    newest = select(_runs.job_id).order_by(_runs.job_id.desc())
    too_old = connection.execute(newest.offset(max_runs).limit(1)).scalar()
    if too_old is not None:
        connection.execute(delete(tables.runs).where(_runs.job_id <= too_old))


def _retained_runs(connection: Connection, limit: int) -> list[Run]:
    """Return the newest retained runs, oldest first."""
    query = select(_runs.run).order_by(_runs.job_id.desc()).limit(limit)
    retained = connection.execute(query).scalars().all()[::-1]
    return [Run(**run | {"size": Size(*run["size"]), "clusters": tuple(run["clusters"])}) for run in retained]
