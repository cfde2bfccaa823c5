"""A workload: jobs with arrival times, and its file format."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from koalapy.model.errors import UsageError

Json = dict[str, Any]
VERSION = 1
MAX_SECONDS = 1e12
"""Latest arrival in a file."""
HINT = "make one with koala workload generate"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job: its arrival in seconds from the beginning, and its submission as the body of ``POST /jobs``."""

    arrives_at: float
    application: str
    """Application name, by which reports group jobs."""
    job: Json


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload. ``header`` describes its generation; the jobs are in the order of their arrival."""

    header: Json
    jobs: tuple[Arrival, ...]

    @property
    def lasts(self) -> float:
        """Return the seconds until the last arrival."""
        return self.jobs[-1].arrives_at if self.jobs else 0.0


def nodes_of(job: Json) -> int:
    """Return the total number of nodes that a submission requests."""
    request = job["request"]
    if request["type"] == "flexible":
        return int(request["total_size"])
    return sum(int(component["size"]) for component in request["components"])


def components_of(job: Json) -> int | None:
    """Return the number of components of a submission; None if the scheduler splits the request."""
    request = job["request"]
    return None if request["type"] == "flexible" else len(request["components"])


def workload_lines(workload: Workload) -> Iterator[str]:
    """Yield the lines of the file: JSON, one line for the header and one for each job."""
    yield json.dumps({"koala_workload": VERSION, **workload.header})
    for arrival in workload.jobs:
        yield json.dumps({"at": round(arrival.arrives_at, 3), "application": arrival.application, "job": arrival.job})


def parse_workload(text: Iterable[str], name: str) -> Workload:
    """Return the workload in a file called ``name``; raise ``UsageError`` that names the invalid line."""
    header: Json | None = None
    jobs: list[Arrival] = []
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        location = f"{name} line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{location} is not JSON: {error}", field="FILE", hint=HINT) from None
        if header is None:
            header = _parse_header(value, location)
        else:
            jobs.append(_parse_arrival(value, location))
    if header is None:
        raise UsageError(f"{name} is empty", field="FILE", hint=HINT)
    if not jobs:
        raise UsageError(f"{name} contains no jobs", field="FILE", hint=HINT)
    return Workload(header, tuple(sorted(jobs, key=lambda arrival: arrival.arrives_at)))


def _parse_header(value: object, location: str) -> Json:
    """Return the header of a workload without its version. Raise ``UsageError`` if it is not one of this version."""
    if not isinstance(value, dict) or "koala_workload" not in value:
        raise UsageError(f"{location} is not a header of a workload", field="FILE", hint=HINT)
    version = value.pop("koala_workload")
    if version != VERSION:
        raise UsageError(f"{location}: its version is {version!r}, not {VERSION}", field="FILE", hint=HINT)
    return value


def _parse_arrival(value: object, location: str) -> Arrival:
    """Return a job with its arrival. Raise ``UsageError``, which names the location, for an invalid field."""
    if not isinstance(value, dict):
        _reject_value(location, "it", value, "write an object with at and job")
    arrives_at, job, application = value.get("at"), value.get("job"), value.get("application", "")
    if isinstance(arrives_at, bool) or not isinstance(arrives_at, int | float) or not 0 <= arrives_at <= MAX_SECONDS:
        _reject_value(location, "at", arrives_at, f"give seconds from the beginning, from 0 to {MAX_SECONDS:g}")
    if not isinstance(application, str):
        _reject_value(location, "application", application, "write a text")
    request = job.get("request") if isinstance(job, dict) else None
    if not isinstance(request, dict) or not isinstance(job, dict):
        _reject_value(location, "job", job, "write a submission as POST /jobs takes it, with its request")
    try:
        nodes_of(job)
    except (KeyError, TypeError, ValueError, OverflowError):
        _reject_value(location, "job.request", request, "give a type, and components with sizes or a total_size")
    return Arrival(float(arrives_at), application or str(job.get("name") or "job"), job)


def _reject_value(location: str, field: str, value: object, hint: str) -> NoReturn:
    """Raise ``UsageError`` for a field of a line, with the beginning of its value."""
    text = json.dumps(value)
    text = text if len(text) <= 60 else f"{text[:60]}…"
    raise UsageError(f"{location}: {field} is {text}", field=f"FILE: {field}", hint=hint)
