"""Convert a record to JSON lines and back: its initial state, its steps and its end.

Numbers are exact, infinity included. Fields that affect no decision are omitted: environment variables, which may be
secret, recipients of notifications, and an agent's disks, versions and call statistics.
"""

import json
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, replace
from functools import cache
from typing import Any, get_args

from pydantic import TypeAdapter

from koalapy.model.job import Job
from koalapy.model.reports import ClusterReport, ComponentStatus, StageStatus
from koalapy.record.beginning import Beginning
from koalapy.record.step import Step
from koalapy.scheduler import events as ev

Json = dict[str, Any]
Kind = type[Any]
FORMAT = 1
"""Version of the format; incremented with every change that an older reader would misread."""
EVENTS = {kind.__name__: kind for kind in get_args(ev.Event)}
REPORTS = {kind.__name__: kind for kind in (ComponentStatus, ClusterReport, StageStatus)}
FOR_PEOPLE = ("environment", "mail_type", "mail_user", "webhook")
"""Fields of a job that are omitted."""
OF_AGENTS = ("calls", "disks", "versions")
"""Fields of a report that are omitted."""


def line(content: Json) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


# Initial state


def beginning_to_json(beginning: Beginning) -> Json:
    told = replace(beginning, clusters=tuple(cluster.alone() for cluster in beginning.clusters), jobs=())
    data: Json = _adapter(Beginning).dump_python(told, mode="json")
    return data | {"jobs": [job_to_json(job) for job in beginning.jobs]}


def beginning_from_json(data: Json) -> Beginning:
    """Return an initial state from JSON. Raise one of ``reading.NOT_READ`` for invalid data."""
    rest = {name: value for name, value in data.items() if name != "jobs"}
    begun: Beginning = _adapter(Beginning).validate_python(rest)
    return replace(begun, jobs=tuple(job_from_json(job) for job in data.get("jobs", ())))


def job_to_json(job: Job) -> Json:
    return _plain(job, "spec") | {"spec": _plain(job.spec, *FOR_PEOPLE)}


def job_from_json(data: Json) -> Job:
    job: Job = _adapter(Job).validate_python(data)
    return job


# Steps


def step_to_json(step: Step) -> Json:
    told: Json = {"n": step.number, "at": step.at}
    if step.events:
        told["events"] = [_event_to_json(event) for event in step.events]
    for name in ("refused", "nonces", "looks"):
        if some := getattr(step, name):
            told[name] = some
    if step.done:
        told["done"] = step.done
    return told


def step_from_json(data: Json) -> Step:
    """Return a step from JSON. Raise one of ``reading.NOT_READ`` for invalid data."""
    events = tuple(_event_from_json(*event) for event in data.get("events", ()))
    rest = {name: value for name, value in data.items() if name not in ("n", "events")}
    step: Step = _adapter(Step).validate_python(rest | {"number": data["n"], "events": events})
    return step


def _event_to_json(event: ev.Event) -> Sequence[Any]:
    kind = type(event).__name__
    if isinstance(event, ev.Reported):
        report = event.report
        return kind, event.cluster, type(report).__name__, _plain(report, *OF_AGENTS)
    if isinstance(event, ev.JobSubmitted):
        return kind, job_to_json(event.job), event.by
    return kind, _plain(event)


def _event_from_json(kind: str, *rest: Any) -> ev.Event:
    if kind == ev.Reported.__name__:
        cluster, report_kind, report = rest
        return ev.Reported(cluster, _adapter(REPORTS[report_kind]).validate_python(report))
    if kind == ev.JobSubmitted.__name__:
        job, by = rest
        return ev.JobSubmitted(job_from_json(job), by)
    event: ev.Event = _adapter(EVENTS[kind]).validate_python(rest[0])
    return event


@cache
def _adapter(kind: Kind) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _plain(value: Any, *leave_out: str) -> Json:
    """Return the fields of a value as JSON, without those that have their default values."""
    told = {each.name for each in fields(value) if getattr(value, each.name) != _default(each)}
    data: Json = _adapter(value.__class__).dump_python(value, mode="json", include=told - set(leave_out))
    return data


def _default(of: Field[Any]) -> Any:
    return of.default if of.default_factory is MISSING else of.default_factory()
