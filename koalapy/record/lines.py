"""Convert a record to JSON lines and back: its initial state, its steps and its end.

Numbers are exact, infinity included. Fields that affect no decision are omitted: environment variables, which may be
secret, recipients of notifications, and an agent's disks, versions and call statistics. Of a script only its presence
is recorded.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields, replace
from functools import cache
from operator import attrgetter
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
FOR_PEOPLE = ("environment", "account", "qos", "each_line", "mail_type", "mail_user", "webhook")
"""Fields of a job that are omitted."""
OF_AGENTS = ("calls", "disks", "versions")
"""Fields of a report that are omitted."""


def encode_line(content: Json) -> bytes:
    return _encode_json(content).encode() + b"\n"


_encode_json = json.JSONEncoder(separators=(",", ":")).encode


# Initial state


def beginning_to_json(beginning: Beginning) -> Json:
    recorded = replace(
        beginning, clusters=tuple(cluster.without_configuration() for cluster in beginning.clusters), jobs=()
    )
    data: Json = _adapter_for(Beginning).dump_python(recorded, mode="json")
    return data | {"jobs": [job_to_json(job) for job in beginning.jobs]}


def beginning_from_json(data: Json) -> Beginning:
    """Return an initial state from JSON. Raise one of ``reading.NOT_READ`` for invalid data."""
    other_values = {name: value for name, value in data.items() if name != "jobs"}
    begun: Beginning = _adapter_for(Beginning).validate_python(other_values)
    return replace(begun, jobs=tuple(job_from_json(job) for job in data.get("jobs", ())))


def job_to_json(job: Job) -> Json:
    # Clusters accept scripts or not, whatever their text.
    spec = job.spec if not job.spec.script else replace(job.spec, script="#!")
    return _fields_to_json(job, "spec") | {"spec": _fields_to_json(spec, *FOR_PEOPLE)}


def job_from_json(data: Json) -> Job:
    job: Job = _adapter_for(Job).validate_python(data)
    return job


# Steps


def step_to_json(step: Step) -> Json:
    """Return the content of a step's line, without empty fields."""
    content: Json = {"n": step.number, "at": step.at}
    if step.events:
        content["events"] = [_event_to_json(event) for event in step.events]
    for name in ("refused", "nonces", "looks"):
        if items := getattr(step, name):
            content[name] = items
    if step.done:
        content["done"] = step.done
    return content


def step_from_json(data: Json) -> Step:
    """Return a step from JSON. Raise one of ``reading.NOT_READ`` for invalid data."""
    events = tuple(_event_from_json(*event) for event in data.get("events", ()))
    other_values = {name: value for name, value in data.items() if name not in ("n", "events")}
    step: Step = _adapter_for(Step).validate_python(other_values | {"number": data["n"], "events": events})
    return step


def _event_to_json(event: ev.Event) -> Sequence[Any]:
    """Return an event as a sequence: the name of its type, then its content without fields that affect no decision."""
    kind = type(event).__name__
    if isinstance(event, ev.Reported):
        report = event.report
        return kind, event.cluster, type(report).__name__, _fields_to_json(report, *OF_AGENTS)
    if isinstance(event, ev.JobSubmitted):
        return kind, job_to_json(event.job), event.by
    return kind, _fields_to_json(event)


def _event_from_json(kind: str, *values: Any) -> ev.Event:
    """Return an event from the name of its type and its content. Raise one of ``reading.NOT_READ`` for invalid data."""
    if kind == ev.Reported.__name__:
        cluster, report_kind, report = values
        return ev.Reported(cluster, _adapter_for(REPORTS[report_kind]).validate_python(report))
    if kind == ev.JobSubmitted.__name__:
        job, user = values
        return ev.JobSubmitted(job_from_json(job), user)
    event: ev.Event = _adapter_for(EVENTS[kind]).validate_python(values[0])
    return event


@cache
def _adapter_for(kind: Kind) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _fields_to_json(value: Any, *leave_out: str) -> Json:
    """Return the fields of a value as JSON, without those that have their default values."""
    names, defaults, values_of = _fields_of(value.__class__)
    given = zip(names, values_of(value), defaults, strict=True)
    changed = {name for name, field_value, default in given if field_value != default}
    data: Json = _adapter_for(value.__class__).dump_python(value, mode="json", include=changed.difference(leave_out))
    return data


@cache
def _fields_of(kind: Kind) -> tuple[tuple[str, ...], tuple[Any, ...], Callable[[Any], Any]]:
    """Return the names of a dataclass's fields, their defaults, and the function that reads all of them."""
    names = tuple(field.name for field in fields(kind))
    values_of = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),) if names else ()
    return names, tuple(_default_of(field) for field in fields(kind)), values_of


def _default_of(value_field: Field[Any]) -> Any:
    return value_field.default if value_field.default_factory is MISSING else value_field.default_factory()
