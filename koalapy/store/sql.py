"""The store in SQL: SQLite (WAL) for one machine, PostgreSQL for production, through the same tables."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from sqlalchemy import Connection, Engine, Table, delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql import bindparam

from koalapy.model.job import FINAL_STATES, Attempt, Component, Job, JobId, Priority, TimelineEntry
from koalapy.ports import Batch, JobFilter, OutboxEntry, Saved, Submitted, Usage
from koalapy.store import rows, tables
from koalapy.store.advice import complete_advised, write_advised
from koalapy.store.engine import make_engine, reading, unavailable_is_known, writing
from koalapy.store.jobs import AT_ONCE, jobs_of
from koalapy.store.lease import Lease
from koalapy.store.usage import usage_between

__all__ = ["SqlStore", "make_engine"]


class SqlStore:
    """The ``Store`` port on an SQL database that has been migrated; holds the lease while it is open."""

    def __init__(self, engine: Engine, now: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self._engine = engine
        self._writer = writing(engine)
        self._reader = reading(engine)
        with unavailable_is_known():
            self.lease = Lease(self._writer, now, sleep)
        self.instance = self.lease.instance
        self.epoch = self.lease.epoch
        self._known: set[JobId] = set()
        self._numbers = count(1)

    def close(self) -> None:
        self._engine.dispose()

    def renew_lease(self, now: float) -> None:
        self.lease.renew(now)

    def raise_epoch(self, epoch: int) -> None:
        self.lease.raise_epoch(epoch)
        self.epoch = epoch

    def release_lease(self) -> None:
        self.lease.release()

    # Writing

    def write(self, batch: Batch) -> None:
        """All of the batch in one transaction; a batch that comes again because its fate was unknown is stored once."""
        batch.number = batch.number or next(self._numbers)
        with self.lease.writing_once(batch.number) as connection:
            if connection is not None:
                self._write(connection, batch)
        for job in batch.jobs.values():
            (self._known.discard if job.state.is_final else self._known.add)(job.id)

    def _write(self, connection: Connection, batch: Batch) -> None:
        self._write_jobs(connection, batch.jobs.values())
        self._write_attempts(connection, batch.attempts)
        _insert(connection, tables.timeline, [rows.entry_to_row(entry) for entry in batch.timeline])
        _insert(
            connection,
            tables.outbox,
            [{"id": e.id, "cluster": e.cluster, "payload": e.payload, "written_at": batch.at} for e in batch.outbox],
        )
        if batch.acknowledged:
            statement = delete(tables.outbox).where(tables.outbox.c.id == bindparam("done"))
            connection.execute(statement, [{"done": done} for done in batch.acknowledged])
        # A key is the first job's that was stored with it, whatever another says.
        self._insert_new(
            connection,
            tables.submissions,
            [{"key": s.key, "job_id": s.job, "digest": s.digest, "at": batch.at} for s in batch.submitted],
        )
        self._upsert(connection, tables.clusters, [rows.cluster_to_row(record) for record in batch.clusters])
        self._upsert(
            connection,
            tables.queues,
            [{"priority": priority.value, "scans": scans} for priority, scans in batch.scans.items()],
        )
        write_advised(connection, batch.advised)
        complete_advised(connection, batch.jobs.values())

    def _write_jobs(self, connection: Connection, jobs: Iterable[Job]) -> None:
        new: list[Job] = []
        old: list[Job] = []
        for job in jobs:
            (old if job.id in self._known else new).append(job)
        _insert(connection, tables.jobs, [rows.new_job_to_row(job) for job in new])
        if old:
            statement = update(tables.jobs).where(tables.jobs.c.id == bindparam("key"))
            connection.execute(statement, [rows.job_to_row(job) | {"key": job.id} for job in old])
        self._write_attempts(connection, [(job.id, job.attempt) for job in (*new, *old) if job.attempt is not None])

    def _write_attempts(self, connection: Connection, tried: Sequence[tuple[JobId, Attempt]]) -> None:
        self._upsert(connection, tables.attempts, [rows.attempt_to_row(job, attempt) for job, attempt in tried])
        self._upsert(
            connection,
            tables.components,
            [rows.component_to_row(job, attempt.generation, c) for job, attempt in tried for c in attempt.components],
        )

    def _insert_new(self, connection: Connection, table: Table, values: list[dict[str, Any]]) -> None:
        """Those rows whose keys are not there yet."""
        if values:
            connection.execute(self._insert_into(table).on_conflict_do_nothing(), values)

    def _upsert(self, connection: Connection, table: Table, values: Sequence[dict[str, Any]]) -> None:
        if not values:
            return
        statement = self._insert_into(table)
        keys = [column.name for column in table.primary_key]
        changed = {name: statement.excluded[name] for name in values[0] if name not in keys}
        connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed), list(values))

    def _insert_into(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        return sqlite.insert(table) if self._engine.dialect.name == "sqlite" else postgresql.insert(table)

    # Reading

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """The database as of one moment, so that what belongs together is of one age."""
        with unavailable_is_known(), self._reader.connect() as connection:
            yield connection

    def load(self) -> Saved:
        """Everything that is not over."""
        unfinished = tables.jobs.c.state.not_in([state.value for state in FINAL_STATES])
        with self._reading() as connection:
            jobs = jobs_of(connection, select(tables.jobs).where(unfinished))
            outbox = connection.execute(select(tables.outbox).order_by(tables.outbox.c.id)).mappings()
            clusters = connection.execute(select(tables.clusters)).mappings()
            there = connection.execute(select(func.max(tables.jobs.c.id))).scalar() or 0
            gone = connection.execute(select(tables.lease.c.last_job)).scalar() or 0
            queues = connection.execute(select(tables.queues)).mappings()
            self._known = {job.id for job in jobs}
            return Saved(
                tuple(jobs),
                tuple(OutboxEntry(row["id"], row["cluster"], row["payload"]) for row in outbox),
                tuple(rows.cluster_from_row(row) for row in clusters),
                max(there, gone) + 1,
                {Priority(row["priority"]): row["scans"] for row in queues},
            )

    def submitted(self, keys: Collection[str]) -> dict[str, Submitted]:
        known, wanted = tables.submissions.c, list(keys)
        found: dict[str, Submitted] = {}
        with self._reading() as connection:
            for start in range(0, len(wanted), AT_ONCE):
                some = known.key.in_(wanted[start : start + AT_ONCE])
                rows_found = connection.execute(select(known.key, known.job_id, known.digest).where(some))
                found |= {key: Submitted(key, job, digest) for key, job, digest in rows_found}
        return found

    def job(self, job: JobId) -> Job | None:
        with self._reading() as connection:
            found = jobs_of(connection, select(tables.jobs).where(tables.jobs.c.id == job))
            return found[0] if found else None

    def jobs(self, which: JobFilter) -> list[Job]:
        """One page, newest first."""
        query = select(tables.jobs).order_by(tables.jobs.c.id.desc()).limit(which.limit)
        if which.states:
            query = query.where(tables.jobs.c.state.in_(which.states))
        if which.owner:
            query = query.where(tables.jobs.c.owner == which.owner)
        if which.name:
            query = query.where(tables.jobs.c.name == which.name)
        if which.cluster:
            query = query.where(
                select(tables.components.c.job_id)
                .where(tables.components.c.job_id == tables.jobs.c.id)
                .where(tables.components.c.generation == tables.jobs.c.generation)
                .where(tables.components.c.cluster == which.cluster)
                .where(tables.components.c.superseded.is_(False))
                .exists()
            )
        if which.before is not None:
            query = query.where(tables.jobs.c.id < which.before)
        if which.ids is not None:
            query = query.where(tables.jobs.c.id.in_(which.ids))
        with self._reading() as connection:
            return jobs_of(connection, query)

    def timeline(self, job: JobId, after: int = 0, limit: int | None = None) -> list[TimelineEntry]:
        # By the index alone as far as it is passed over.
        ids = select(tables.timeline.c.id).where(tables.timeline.c.job_id == job).order_by(tables.timeline.c.id)
        page = ids.offset(after).limit(limit).subquery()
        query = select(tables.timeline).join(page, page.c.id == tables.timeline.c.id).order_by(page.c.id)
        with self._reading() as connection:
            return [rows.entry_from_row(row) for row in connection.execute(query).mappings()]

    def attempts(self, job: JobId, last: int | None = None) -> list[Attempt]:
        attempts, components = tables.attempts, tables.components
        query = select(attempts).where(attempts.c.job_id == job).order_by(attempts.c.generation.desc()).limit(last)
        by_generation: dict[int, list[Component]] = defaultdict(list)
        with self._reading() as connection:
            tried = connection.execute(query).mappings().all()[::-1]
            first = tried[0]["generation"] if tried else 0
            parts = select(components).where(components.c.job_id == job, components.c.generation >= first)
            for row in connection.execute(parts.order_by(components.c.index)).mappings():
                by_generation[row["generation"]].append(rows.component_from_row(row))
        return [rows.attempt_from_row(row, tuple(by_generation[row["generation"]])) for row in tried]

    def usage(self, start: float, end: float) -> Usage:
        with self._reading() as connection:
            return usage_between(connection, start, end)


def _insert(connection: Connection, table: Table, values: list[dict[str, Any]]) -> None:
    if values:
        connection.execute(insert(table), values)
