"""Convert jobs to rows and back. A column has the name of the field that it holds."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import RowMapping, Table

from koalapy.model.application import application_of
from koalapy.model.array import ArrayTasks
from koalapy.model.cluster import Drain
from koalapy.model.dependency import Clause
from koalapy.model.job import Attempt, ClusterRefusal, Component, Job, JobId
from koalapy.model.job import TimelineEntry as Entry
from koalapy.model.job_spec import JobSpec
from koalapy.ports import ClusterRecord
from koalapy.store import tables

Row = RowMapping
_SPEC, _JOB, _CLUSTER = TypeAdapter(JobSpec), TypeAdapter(Job), TypeAdapter(ClusterRecord)
_REFUSALS, _CLAUSES = TypeAdapter(tuple[ClusterRefusal, ...]), TypeAdapter(tuple[Clause, ...])
_TASKS = TypeAdapter(ArrayTasks)
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
    lists = {"refusals": refusals, "tasks": tasks, "awaits": awaits}
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
    """Return the columns of a cluster that must survive a restart; its agent reports the others after that."""
    drain = record.drained
    return _to_row(tables.clusters, record) | {
        "drained_at": drain.at if drain else None,
        "drained_by": drain.by if drain else None,
        "drained_reason": drain.reason if drain else None,
    }


def cluster_from_row(row: Row) -> ClusterRecord:
    drained_at = row["drained_at"]
    drained = None if drained_at is None else Drain(drained_at, row["drained_by"] or "", row["drained_reason"] or "")
    unknown = {"idle": 0, "used": 0, "background": 0, "down": 0, "processes_per_node": 1, "speed": 1.0}
    return _CLUSTER.validate_python({**row, **unknown, "drained": drained})
