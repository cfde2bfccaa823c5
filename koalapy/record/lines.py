"""A record as lines of JSON, and back: what begins it, its steps, and its end.

Numbers are exact, infinity included. What bears on no decision is left out: variables of programs, which may be secret,
and who is told of a job; and of agents, what runs there, how it answers and where it writes.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, replace
from functools import cache, partial
from typing import Any, TypeVar, get_args

from pydantic import TypeAdapter

from koalapy.model.job import Job
from koalapy.model.reports import ClusterReport, ComponentStatus, StageStatus
from koalapy.record.beginning import Beginning
from koalapy.record.step import Done, JobNow, Ordered, Placed, Step, Told
from koalapy.scheduler import events as ev

Json = dict[str, Any]
Kind = type[Any]
T = TypeVar("T")
FORMAT = 1
"""Rises with every change that an older reader would misread."""
EVENTS = {kind.__name__: kind for kind in get_args(ev.Event)}
REPORTS = {kind.__name__: kind for kind in (ComponentStatus, ClusterReport, StageStatus)}
LAST_MOMENT = 253_402_300_799.0
"""The last second of the year 9999."""
MAX_COUNT = 2**53
FOR_PEOPLE = ("environment", "mail_type", "mail_user", "webhook")
"""What of a job is not written down."""
OF_AGENTS = ("calls", "disks", "versions")
"""The same of a report."""


def line(content: Json) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


# What begins it


def beginning_to_json(beginning: Beginning) -> Json:
    told = replace(beginning, clusters=tuple(cluster.alone() for cluster in beginning.clusters), jobs=())
    data: Json = _adapter(Beginning).dump_python(told, mode="json")
    return data | {"jobs": [job_to_json(job) for job in beginning.jobs]}


def beginning_from_json(data: Json) -> Beginning:
    """``ValueError`` or its like for what is none."""
    rest = {name: value for name, value in data.items() if name != "jobs"}
    begun: Beginning = _adapter(Beginning).validate_python(rest)
    _moment(begun.now)
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
        told["done"] = [step.done.jobs, step.done.timeline, step.done.commands]
    return told


def step_from_json(data: Json) -> Step:
    """``ValueError`` or its like for what is none."""
    jobs, timeline, commands = data.get("done", ((), (), ()))
    return Step(
        _whole(data["n"]),
        _moment(data["at"]),
        tuple(_event_from_json(*event) for event in data.get("events", ())),
        tuple(map(_whole, data.get("refused", ()))),
        tuple(map(_text, data.get("nonces", ()))),
        tuple((_whole(count), _whole(ticks)) for count, ticks in data.get("looks", ())),
        Done(
            tuple(JobNow(job, state, generation, tuple(Placed(*p) for p in g)) for job, state, generation, g in jobs),
            tuple(Told(*each) for each in timeline),
            tuple(Ordered(*each) for each in commands),
        ),
    )


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


# Values


def _moment(value: Any) -> float:
    """Seconds since the epoch, of which there is a date."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LAST_MOMENT:
        raise ValueError(f"{value!r:.30} is no moment")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{value!r:.30} is no number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.30} is no text")
    return value


@cache
def _adapter(kind: Kind) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _plain(value: Any, *leave_out: str) -> Json:
    """A value's fields, but those that have their defaults."""
    told = {name for name, default in _defaults(value.__class__) if getattr(value, name) != default()} - set(leave_out)
    data: Json = _adapter(value.__class__).dump_python(value, mode="json", include=told)
    return data


@cache
def _defaults(kind: Kind) -> Sequence[tuple[str, Callable[[], Any]]]:
    """What makes the default of each field; where there is none, what nothing is equal to."""
    return [
        (each.name, each.default_factory if each.default_factory is not MISSING else partial(_same, each.default))
        for each in fields(kind)
    ]


def _same(value: T) -> T:
    return value
