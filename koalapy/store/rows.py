"""Jobs as rows and back."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import RowMapping

from koalapy.model.job import Attempt, Component, ComponentState, Job, JobSpec, JobState, Launcher, Priority
from koalapy.model.job import TimelineEntry as Entry
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest, Request

Row = RowMapping


def spec_to_json(spec: JobSpec) -> dict[str, Any]:
    """Only what differs from the defaults, so that a queued job is a short row."""
    data: dict[str, Any] = {"request": _request_to_json(spec.request), "command": list(spec.command)}
    for name in _PLAIN_FIELDS:
        value = getattr(spec, name)
        if value != _DEFAULTS[name]:
            data[name] = value
    if spec.environment:
        data["environment"] = [list(pair) for pair in spec.environment]
    return data


def spec_from_json(data: Mapping[str, Any]) -> JobSpec:
    values = dict(data)
    values["request"] = _request_from_json(values["request"])
    values["command"] = tuple(values["command"])
    values["environment"] = tuple((name, value) for name, value in values.get("environment", ()))
    values["priority"] = Priority(values.get("priority", Priority.LOW))
    values["launcher"] = Launcher(values.get("launcher", Launcher.OPENMPI))
    return JobSpec(**values)


_DEFAULTS = asdict(JobSpec(FlexibleRequest(1), ()))
_PLAIN_FIELDS = [name for name in _DEFAULTS if name not in ("request", "command", "environment")]


def _request_to_json(request: Request) -> dict[str, Any]:
    return {"type": request.type, **asdict(request)}


def _request_from_json(data: Mapping[str, Any]) -> Request:
    values = {name: value for name, value in data.items() if name != "type"}
    if data["type"] == "flexible":
        values["split_options"] = tuple(tuple(option) for option in values["split_options"])
        return FlexibleRequest(**values)
    components = tuple(_component_from_json(c) for c in values["components"])
    return FixedRequest(components) if data["type"] == "fixed" else NonFixedRequest(components)


def _component_from_json(data: Mapping[str, Any]) -> ComponentRequest:
    command = data["command"]
    return ComponentRequest(
        data["size"],
        data["cluster"],
        tuple(command) if command is not None else None,
        tuple((name, value) for name, value in data["environment"]),
        data["output"],
    )


_JOB_COLUMNS = (
    "id", "reason", "queue_seq", "generation", "restarts", "placement_tries", "claiming_tries",
    "submitted_at", "placed_at", "started_at", "ended_at", "exit_code",
)  # fmt: skip
_ATTEMPT_COLUMNS = ("generation", "placed_at", "barrier_at", "launched_at", "ended_at", "exit_code", "end_reason")
_COMPONENT_COLUMNS = (
    "index", "cluster", "size", "request_index", "lrm_job", "exit_code", "error", "infrastructure",
    "unknown_since", "claimed_at", "ended_at",
)  # fmt: skip


def job_to_row(job: Job) -> dict[str, Any]:
    row = {name: getattr(job, name) for name in _JOB_COLUMNS}
    row["state"] = job.state.value
    row["ending"] = job.ending.value if job.ending else None
    return row


def new_job_to_row(job: Job) -> dict[str, Any]:
    """The whole row, with what never changes."""
    spec = job.spec
    return job_to_row(job) | {
        "name": spec.name,
        "owner": spec.owner,
        "priority": spec.priority.value,
        "spec": spec_to_json(spec),
    }


def attempt_to_row(job: Job, attempt: Attempt) -> dict[str, Any]:
    return {"job_id": job.id} | {name: getattr(attempt, name) for name in _ATTEMPT_COLUMNS}


def component_to_row(job: Job, generation: int, component: Component) -> dict[str, Any]:
    row = {name: getattr(component, name) for name in _COMPONENT_COLUMNS}
    return row | {
        "job_id": job.id,
        "generation": generation,
        "state": component.state.value,
        "hosts": list(component.hosts),
    }


def component_from_row(row: Row) -> Component:
    values = {name: row[name] for name in _COMPONENT_COLUMNS}
    return Component(**values, state=ComponentState(row["state"]), hosts=tuple(row["hosts"]))


def attempt_from_row(row: Row, components: tuple[Component, ...]) -> Attempt:
    return Attempt(components=components, **{name: row[name] for name in _ATTEMPT_COLUMNS})


def job_from_row(row: Row, attempt: Attempt | None) -> Job:
    values = {name: row[name] for name in _JOB_COLUMNS}
    ending = JobState(row["ending"]) if row["ending"] else None
    return Job(spec=spec_from_json(row["spec"]), state=JobState(row["state"]), ending=ending, attempt=attempt, **values)


def entry_to_row(entry: Entry) -> dict[str, Any]:
    return {
        "job_id": entry.job,
        "at": entry.at,
        "event": entry.event,
        "state": entry.state.value,
        "reason": entry.reason,
        "generation": entry.generation,
        "component": entry.component,
        "cluster": entry.cluster,
    }


def entry_from_row(row: Row) -> Entry:
    return Entry(
        row["job_id"], row["at"], row["event"], JobState(row["state"]), row["reason"],
        row["generation"], row["component"], row["cluster"],
    )  # fmt: skip
