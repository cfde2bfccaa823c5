"""The job store in SQL: SQLite (WAL) for one machine, PostgreSQL for production, with the same tables.

The outbox stores commands, and each plan that the commands of an attempt refer to once.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from itertools import count, groupby
from operator import attrgetter
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import (
    BindParameter,
    Connection,
    Result,
    RowMapping,
    Select,
    Table,
    delete,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.sql import bindparam

from koalapy.model.application import application_of
from koalapy.model.dependency import Clause
from koalapy.model.job import (
    FINAL_STATES,
    ArrayTasks,
    Attempt,
    ClusterRefusal,
    Component,
    Job,
    JobId,
    PlannedStart,
    TimelineEntry,
)
from koalapy.model.job import TimelineEntry as Entry
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.protocol.frames import PLAN, Plan
from koalapy.store import tables
from koalapy.store.advice import complete_advised, write_advised
from koalapy.store.audit import write_audit
from koalapy.store.database import Database, chunks, insert_rows, upsert
from koalapy.store.ended_jobs import add_batch
from koalapy.store.job_numbers import JobNumbers
from koalapy.store.listing import MAX_PAGE_BYTES, count_jobs, page_of_ids, within_page_bytes
from koalapy.store.records import Batch, ClusterRecord, JobFilter, JobPage, OutboxEntry, Saved, Submitted
from koalapy.store.service_tables import write_notifications
from koalapy.store.tables import outbox, plans

PlanKey = tuple[JobId, int]


class PlansInUse:
    """An index of unacknowledged commands by the plan, a job's nodes and programs, that they contain."""

    def __init__(self, entries: Iterable[OutboxEntry] = ()) -> None:
        self._plan_of: dict[int, PlanKey] = {}
        self._commands: dict[PlanKey, set[int]] = defaultdict(set)
        self._add_entries(entries)

    def note(self, batch: Batch) -> None:
        """Update the index from a batch that was stored."""
        self._add_entries(batch.outbox)
        for ident in batch.acknowledged:
            key = self._plan_of.pop(ident, None)
            if key is not None:
                self._commands[key].discard(ident)
                if not self._commands[key]:
                    del self._commands[key]

    def unused_after(self, batch: Batch) -> list[PlanKey]:
        """Return the plans that no command needs any more after a batch is stored."""
        acknowledged = set(batch.acknowledged)
        keys = {key for ident in acknowledged if (key := self._plan_of.get(ident)) is not None}
        added = {plan.key for entry in batch.outbox if (plan := _plan_of(entry)) is not None}
        return [key for key in keys - added if self._commands[key] <= acknowledged]

    def _add_entries(self, entries: Iterable[OutboxEntry]) -> None:
        for entry in entries:
            if (plan := _plan_of(entry)) is not None:
                self._plan_of[entry.id] = plan.key
                self._commands[plan.key].add(entry.id)


def write_commands(connection: Connection, batch: Batch) -> None:
    """Store the commands of a batch, and each plan once."""
    if not batch.outbox:
        return
    new_plans = {plan.key: plan for entry in batch.outbox if (plan := _plan_of(entry)) is not None}
    texts = [{"job_id": plan.job, "generation": plan.generation, "text": plan.text} for plan in new_plans.values()]
    upsert(connection, plans, texts)
    rows = [
        {"id": e.id, "cluster": e.cluster, "payload": _stored_payload(e), "written_at": batch.at} for e in batch.outbox
    ]
    connection.execute(insert(outbox), rows)


def remove_plans(connection: Connection, keys: Iterable[PlanKey]) -> None:
    for job, generation in keys:
        connection.execute(delete(plans).where(plans.c.job_id == job, plans.c.generation == generation))


def commands_of(connection: Connection, rows: Iterable[Mapping[Any, Any]]) -> tuple[OutboxEntry, ...]:
    """Return the commands of outbox rows, with their plans.

    Skip a command without its plan, since it can start nothing; the attempt of its component then ends by its deadline.
    """
    by_key = {
        (row.job_id, row.generation): Plan(row.job_id, row.generation, row.text)
        for row in connection.execute(select(plans))
    }
    commands = []
    for row in rows:
        payload = row["payload"]
        if PLAN in payload:
            plan = by_key.get(tuple(payload[PLAN]))
            if plan is None:
                continue
            payload = payload | {PLAN: plan}
        commands.append(OutboxEntry(row["id"], row["cluster"], payload))
    return tuple(commands)


def _plan_of(entry: OutboxEntry) -> Plan | None:
    plan = entry.payload.get(PLAN)
    return plan if isinstance(plan, Plan) else None


def _stored_payload(entry: OutboxEntry) -> dict[str, Any]:
    plan = _plan_of(entry)
    return entry.payload if plan is None else entry.payload | {PLAN: list(plan.key)}


class JobStore:
    """The jobs, the source of truth of the daemon. Calls block; writing raises ``StoreUnavailable`` if a retry may
    succeed, and ``LeaseLost`` if another daemon has taken over."""

    def __init__(
        self, database: Database, job_numbers: JobNumbers | None = None, max_page_bytes: int = MAX_PAGE_BYTES
    ) -> None:
        """``job_numbers``: records used job numbers outside the database; None: they are not recorded."""
        self.database, self._max_page_bytes = database, max_page_bytes
        self._lease, self._job_numbers = database.lease, job_numbers
        self._known: set[JobId] = set()
        self._written: dict[JobId, Attempt] = {}
        """The last stored attempts of unfinished jobs. Components that have not changed since are not written again."""
        self._plans = PlansInUse()
        self._numbers = count(1)

    @property
    def instance(self) -> str:
        """Return the id of the stored data, the same for every daemon that opens it."""
        return self._lease.instance

    @property
    def epoch(self) -> int:
        """Return the epoch of the lease that this process holds."""
        return self._lease.epoch

    def close(self) -> None:
        self.database.close()
        if self._job_numbers is not None:
            self._job_numbers.close()

    def renew_lease(self, now: float) -> None:
        self._lease.renew(now)

    def raise_epoch(self, epoch: int) -> None:
        """Continue with a higher epoch of the lease. Raise ``LeaseLost`` if another daemon has taken over."""
        self._lease.raise_epoch(epoch)

    def release_lease(self) -> None:
        """Release the lease, so that the next daemon starts at once."""
        self._lease.release()

    # Writing

    def write(self, batch: Batch) -> None:
        """Write a batch in one transaction. A batch that is retried because its result is unknown is stored once."""
        if self._job_numbers is not None and batch.jobs:
            self._job_numbers.give(max(job.last_number for job in batch.jobs.values()))
        batch.number = batch.number or next(self._numbers)
        with self._lease.writing_once(batch.number) as connection:
            if connection is not None:
                self._write_batch(connection, batch)
        for job in batch.jobs.values():
            if job.state.is_final:
                self._known.discard(job.id)
                self._written.pop(job.id, None)
            else:
                self._known.add(job.id)
                if job.attempt is not None:
                    self._written[job.id] = job.attempt
        self._plans.note(batch)
        if self._job_numbers is not None:
            self._job_numbers.note_commit((self._lease.epoch, batch.number))

    def _write_batch(self, connection: Connection, batch: Batch) -> None:
        """Write all records of a batch in an open transaction, and delete acknowledged commands."""
        self._write_jobs(connection, batch.jobs.values(), batch.respecified)
        self._write_attempts(connection, batch.attempts)
        insert_rows(connection, tables.timeline, [entry_to_row(entry) for entry in batch.timeline])
        write_commands(connection, batch)
        if batch.acknowledged:
            statement = delete(tables.outbox).where(tables.outbox.c.id == bindparam("done"))
            connection.execute(statement, [{"done": ident} for ident in batch.acknowledged])
            remove_plans(connection, self._plans.unused_after(batch))
        # A key belongs to the first job that was stored with it.
        keys = [{"key": s.key, "job_id": s.job, "digest": s.digest, "at": batch.at} for s in batch.submitted]
        upsert(connection, tables.submissions, keys, replace=False)
        upsert(connection, tables.clusters, [cluster_to_row(record) for record in batch.clusters])
        scans = [{"priority": priority.value, "scans": scans} for priority, scans in batch.scans.items()]
        upsert(connection, tables.queues, scans)
        upsert(connection, tables.reservations, [asdict(reservation) for reservation in batch.reservations])
        write_audit(connection, batch.audit)
        write_notifications(connection, batch.notifications)
        write_advised(connection, batch.advised)
        complete_advised(connection, batch.jobs.values())
        add_batch(connection, batch)

    def _write_jobs(self, connection: Connection, jobs: Iterable[Job], respecified: Collection[JobId]) -> None:
        """Insert new jobs, update those stored before, and write their attempts that have changed.

        ``respecified``: the jobs with a changed specification.
        """
        new: list[Job] = []
        old: list[Job] = []
        for job in jobs:
            (old if job.id in self._known else new).append(job)
        insert_rows(connection, tables.jobs, [new_job_to_row(job) for job in new])
        if old:
            statement = update(tables.jobs).where(tables.jobs.c.id == bindparam("key"))
            connection.execute(statement, [job_to_row(job) | {"key": job.id} for job in old])
            if specs := [{"key": job.id, "spec": spec_to_json(job.spec)} for job in old if job.id in respecified]:
                connection.execute(statement, specs)
        changed = [
            (job.id, job.attempt)
            for job in (*new, *old)
            if job.attempt is not None and job.attempt is not self._written.get(job.id)
        ]
        self._write_attempts(connection, changed)

    def _write_attempts(self, connection: Connection, tried: Sequence[tuple[JobId, Attempt]]) -> None:
        """Insert or replace attempts, and those of their components that have changed since they were last stored."""
        upsert(connection, tables.attempts, [attempt_to_row(job, attempt) for job, attempt in tried])
        components = [
            component_to_row(job, attempt.generation, component)
            for job, attempt in tried
            for component in changed_components(attempt, self._written.get(job))
        ]
        upsert(connection, tables.components, components)

    # Reading

    def load(self) -> Saved:
        """Return unfinished jobs, unacknowledged commands, clusters and the next job id."""
        unfinished = tables.jobs.c.state.not_in([state.value for state in FINAL_STATES])
        with self.database.reading() as connection:
            jobs = jobs_of(connection, select(tables.jobs).where(unfinished))
            outbox = connection.execute(select(tables.outbox).order_by(tables.outbox.c.id)).mappings()
            clusters = connection.execute(select(tables.clusters)).mappings()
            last_job, last_removed = select(func.max(tables.jobs.c.id)), select(tables.lease.c.last_job)
            last_array = select(tables.jobs.c.id + tables.jobs.c.array_size).where(text("array_size > 0"))
            last_task = last_array.order_by(tables.jobs.c.id.desc()).limit(1)
            last = max(connection.execute(query).scalar() or 0 for query in (last_job, last_task, last_removed))
            queues = connection.execute(select(tables.queues)).mappings()
            commands = commands_of(connection, outbox)
            self._known = {job.id for job in jobs}
            self._written = {job.id: job.attempt for job in jobs if job.attempt is not None}
            self._plans = PlansInUse(commands)
            if self._job_numbers is not None:
                self._job_numbers.find_lost_changes(self._lease.last_commit, last)
                self._job_numbers.note_commit((self._lease.epoch, 0))
            last_given = last if self._job_numbers is None else self._job_numbers.last_given(last)
            scans = {Priority(row["priority"]): row["scans"] for row in queues}
            saved = Saved(tuple(jobs), commands, tuple(map(cluster_from_row, clusters)), last_given + 1, scans)
        if last_given > last:
            with self.database.writing() as connection:
                upsert(connection, tables.skipped_jobs, [{"first": last + 1, "last": last_given}])
        return saved

    def submitted(self, keys: Collection[str]) -> dict[str, Submitted]:
        """Return the used keys among these, with their jobs, by key."""
        submissions = tables.submissions.c
        query = select(submissions.key, submissions.job_id, submissions.digest)
        with self.database.reading() as connection:
            used = [
                row for chunk in chunks(keys) for row in connection.execute(query.where(submissions.key.in_(chunk)))
            ]
        return {row.key: Submitted(row.key, row.job_id, row.digest) for row in used}

    def job(self, job: JobId) -> Job | None:
        with self.database.reading() as connection:
            jobs = jobs_of(connection, select(tables.jobs).where(tables.jobs.c.id == job))
            return jobs[0] if jobs else None

    def array_of(self, task: JobId) -> Job | None:
        """Return the array with a task of this number, which may have no record; None if there is none."""
        jobs = tables.jobs.c
        arrays = select(tables.jobs).where(text("array_size > 0"), jobs.id < task)
        with self.database.reading() as connection:
            nearest = jobs_of(connection, arrays.order_by(jobs.id.desc()).limit(1))
        has_task = bool(nearest) and nearest[0].tasks is not None and task - nearest[0].id <= nearest[0].tasks.size
        return nearest[0] if has_task else None

    def page(self, job_filter: JobFilter) -> JobPage:
        """Return a page of the jobs that match a filter, newest first, limited in number and bytes."""
        with self.database.reading() as connection:
            ids, next_before = page_of_ids(connection, job_filter)
            fitting = within_page_bytes(connection, ids, self._max_page_bytes)
            if len(fitting) < len(ids):
                next_before = fitting[-1]
            query = select(tables.jobs).where(tables.jobs.c.id.in_(fitting)).order_by(tables.jobs.c.id.desc())
            return JobPage(jobs_of(connection, query) if fitting else [], next_before)

    def count(self, job_filter: JobFilter) -> tuple[int, bool]:
        """Return the number of jobs that match a filter, and whether that is all; else at least so many match."""
        with self.database.reading() as connection:
            return count_jobs(connection, job_filter)

    def timeline(self, job: JobId, after: int = 0, limit: int | None = None) -> list[TimelineEntry]:
        # Entries before the page are skipped through the index only.
        """Return timeline entries in order: all, or at most ``limit`` entries after the first ``after``."""
        ids = select(tables.timeline.c.id).where(tables.timeline.c.job_id == job).order_by(tables.timeline.c.id)
        page = ids.offset(after).limit(limit).subquery()
        query = select(tables.timeline).join(page, page.c.id == tables.timeline.c.id).order_by(page.c.id)
        return [entry_from_row(row) for row in self.database.rows(query)]

    def attempts(self, job: JobId, last: int | None = None) -> list[Attempt]:
        """Return the attempts of a job in order: all, or the last ``last``."""
        attempts, components = tables.attempts, tables.components
        query = select(attempts).where(attempts.c.job_id == job).order_by(attempts.c.generation.desc()).limit(last)
        by_generation: dict[int, list[Component]] = defaultdict(list)
        with self.database.reading() as connection:
            tried = connection.execute(query).mappings().all()[::-1]
            first = tried[0]["generation"] if tried else 0
            parts = select(components).where(components.c.job_id == job, components.c.generation >= first)
            for row in connection.execute(parts.order_by(components.c.index)).mappings():
                by_generation[row["generation"]].append(component_from_row(row))
        return [attempt_from_row(row, tuple(by_generation[row["generation"]])) for row in tried]


def changed_components(attempt: Attempt, written: Attempt | None) -> Iterator[Component]:
    """Yield the components that are not identical objects in the stored attempt."""
    same = written.components if written is not None and written.generation == attempt.generation else ()
    for place, component in enumerate(attempt.components):
        if place >= len(same) or component is not same[place]:
            yield component


Row = Mapping[str, Any] | RowMapping
"""A row by the names of its columns."""


def jobs_of(connection: Connection, query: Any) -> list[Job]:
    """Return the jobs that a query on ``jobs`` selects, in its order, each with its last attempt."""
    selected = _rows_of(connection.execute(query))
    attempts: dict[tuple[JobId, int], Attempt] = {}
    of_components, of_attempts = _last_attempt_queries()
    for ids in chunks(row["id"] for row in selected if row["generation"]):
        parts = _rows_of(connection.execute(of_components, {"ids": ids}))
        by_job = {
            key: tuple(component_from_row(row) for row in group)
            for key, group in groupby(parts, key=lambda row: (row["job_id"], row["generation"]))
        }
        for row in _rows_of(connection.execute(of_attempts, {"ids": ids})):
            key = row["job_id"], row["generation"]
            attempts[key] = attempt_from_row(row, by_job[key])
    return [job_from_row(row, attempts.get((row["id"], row["generation"]))) for row in selected]


def _rows_of(result: Result[Any]) -> list[dict[str, Any]]:
    """Return the rows as dictionaries, which are faster to read than SQLAlchemy's mappings."""
    names = list(result.keys())
    return [dict(zip(names, row, strict=True)) for row in result]


@cache
def _last_attempt_queries() -> tuple[Select[Any], Select[Any]]:
    """Return the queries for the components and the attempts that belong to the last attempts of jobs with ``ids``."""
    jobs, attempts, components = tables.jobs.c, tables.attempts.c, tables.components.c
    ids: BindParameter[Any] = bindparam("ids", expanding=True)
    of_component = (components.job_id == jobs.id) & (components.generation == jobs.generation)
    of_attempt = (attempts.job_id == jobs.id) & (attempts.generation == jobs.generation)
    parts = select(tables.components).join(tables.jobs, of_component).where(jobs.id.in_(ids))
    tried = select(tables.attempts).join(tables.jobs, of_attempt).where(jobs.id.in_(ids))
    return parts.order_by(components.job_id, components.index), tried


_SPEC, _JOB, _CLUSTER = TypeAdapter(JobSpec), TypeAdapter(Job), TypeAdapter(ClusterRecord)
_REFUSALS, _CLAUSES = TypeAdapter(tuple[ClusterRefusal, ...]), TypeAdapter(tuple[Clause, ...])
_TASKS, PLANNED = TypeAdapter(ArrayTasks), TypeAdapter(PlannedStart)
_NAMES = tuple(field.name for field in fields(JobSpec))
_DEFAULTS = tuple(field.default for field in fields(JobSpec))
_VALUES = attrgetter(*_NAMES)
_ATTEMPT, _COMPONENT, _ENTRY = TypeAdapter(Attempt), TypeAdapter(Component), TypeAdapter(Entry)


def spec_to_json(spec: JobSpec) -> dict[str, Any]:
    """Return a submission as JSON. It omits fields with default values, so that the rows of queued jobs are short."""
    changed = {name for name, value, default in zip(_NAMES, _VALUES(spec), _DEFAULTS, strict=True) if value != default}
    changed.add("command")
    data: dict[str, Any] = _SPEC.dump_python(spec, mode="json", include=changed)
    return data


def spec_from_json(data: Mapping[str, Any]) -> JobSpec:
    return _SPEC.validate_python(data)


def _to_row(table: Table, value: Any) -> dict[str, Any]:
    """Return the fields of a value that a table has columns for."""
    names, values_of = _columns_of(table, value.__class__)
    return dict(zip(names, values_of(value), strict=True))


@cache
def _columns_of(table: Table, kind: type[Any]) -> tuple[list[str], Callable[[Any], Any]]:
    """Return the fields that a table has columns for, and the function that reads all of them."""
    names = [column.name for column in table.columns if hasattr(kind, column.name) and column.name != "spec"]
    return names, attrgetter(*names)


def job_to_row(job: Job) -> dict[str, Any]:
    """Return the columns of a job that may change."""
    refusals = _REFUSALS.dump_python(job.refusals, mode="json") if job.refusals else None
    tasks = None if job.tasks is None else _TASKS.dump_python(job.tasks, mode="json")
    awaits = _CLAUSES.dump_python(job.awaits, mode="json") if job.awaits else None
    planned = None if job.planned_start is None else PLANNED.dump_python(job.planned_start, mode="json")
    lists = {"refusals": refusals, "tasks": tasks, "awaits": awaits, "planned_start": planned}
    return _to_row(tables.jobs, job) | {"priority": job.spec.priority, **lists}


def new_job_to_row(job: Job) -> dict[str, Any]:
    """Return all columns of a new job."""
    row = job_to_row(job) | _to_row(tables.jobs, job.spec)
    return row | {"application": application_of(job.spec), "spec": spec_to_json(job.spec)}


def job_from_row(row: Row, attempt: Attempt | None) -> Job:
    # The submission, with the priority, which may have changed since.
    spec = spec_from_json({**row["spec"], "priority": row["priority"]})
    lists = {"refusals": row["refusals"] or (), "awaits": row["awaits"] or ()}
    return _JOB.validate_python({**row, **lists, "spec": spec, "attempt": attempt})


def attempt_to_row(job: JobId, attempt: Attempt) -> dict[str, Any]:
    return _to_row(tables.attempts, attempt) | {"job_id": job}


def attempt_from_row(row: Row, components: tuple[Component, ...]) -> Attempt:
    return _ATTEMPT.validate_python({**row, "components": components})


def component_to_row(job: JobId, generation: int, component: Component) -> dict[str, Any]:
    return _to_row(tables.components, component) | {"job_id": job, "generation": generation}


def component_from_row(row: Row) -> Component:
    return _COMPONENT.validate_python(dict(row))


def entry_to_row(entry: Entry) -> dict[str, Any]:
    return _to_row(tables.timeline, entry) | {"job_id": entry.job}


def entry_from_row(row: Row) -> Entry:
    return _ENTRY.validate_python({**row, "job": row["job_id"]})


def cluster_to_row(record: ClusterRecord) -> dict[str, Any]:
    """Return the columns of a cluster that must survive a restart; its agent reports the others again."""
    drains = {
        "drained": asdict(record.drained) if record.drained else None,
        "planned_drains": [asdict(drain) for drain in record.planned_drains],
    }
    return _to_row(tables.clusters, record) | drains


def cluster_from_row(row: Row) -> ClusterRecord:
    unknown = {"idle": 0, "used": 0, "background": 0, "down": 0, "processes_per_node": 1, "speed": 1.0}
    return _CLUSTER.validate_python({**row, **unknown})
