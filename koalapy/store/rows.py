"""Jobs as rows and back."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import RowMapping

from koalapy.model.application import application_of
from koalapy.model.cluster import Drain
from koalapy.model.job import (
    Attempt,
    ClaimingMode,
    Component,
    ComponentState,
    Job,
    JobId,
    JobSpec,
    JobState,
    Launcher,
    Priority,
)
from koalapy.model.job import TimelineEntry as Entry
from koalapy.model.request import (
    Bundle,
    ComponentRequest,
    FixedRequest,
    FlexibleRequest,
    InputFile,
    NonFixedRequest,
    Request,
)
from koalapy.ports import ClusterRecord

Row = RowMapping


def spec_to_json(spec: JobSpec) -> dict[str, Any]:
    """Only what differs from the defaults, so that a queued job is a short row."""
    data: dict[str, Any] = {"request": _request_to_json(spec.request), "command": list(spec.command)}
    for name in _PLAIN_FIELDS:
        value = getattr(spec, name)
        if value != _DEFAULTS[name]:
            data[name] = value
    for name, pairs in (("environment", spec.environment), ("policy_options", spec.policy_options)):
        if pairs:
            data[name] = [list(pair) for pair in pairs]
    for name in ("retry_on_exit", "collect"):
        if value := getattr(spec, name):
            data[name] = list(value)
    if spec.inputs:
        data["inputs"] = [asdict(file) for file in spec.inputs]
    if spec.bundle:
        data["bundle"] = asdict(spec.bundle)
    return data


def spec_from_json(data: Mapping[str, Any]) -> JobSpec:
    values = dict(data)
    values["request"] = _request_from_json(values["request"])
    values["command"] = tuple(values["command"])
    for field in ("environment", "policy_options"):
        values[field] = tuple((name, value) for name, value in values.get(field, ()))
    for field in ("retry_on_exit", "collect"):
        values[field] = tuple(values.get(field, ()))
    values["inputs"] = tuple(_input_from_json(file) for file in values.get("inputs", ()))
    if "bundle" in values:
        values["bundle"] = Bundle(**values["bundle"])
    values["priority"] = Priority(values.get("priority", Priority.LOW))
    values["launcher"] = Launcher(values.get("launcher", Launcher.OPENMPI))
    if "claiming" in values:
        values["claiming"] = ClaimingMode(values["claiming"])
    return JobSpec(**values)


_DEFAULTS = asdict(JobSpec(FlexibleRequest(1), ()))
_OTHERS = ("request", "command", "environment", "policy_options", "retry_on_exit", "inputs", "bundle", "collect")
_PLAIN_FIELDS = [name for name in _DEFAULTS if name not in _OTHERS]


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
    command, earlier = data["command"], data.get("input")
    files = data.get("inputs", [earlier] if earlier else [])
    return ComponentRequest(
        data["size"],
        data["cluster"],
        tuple(command) if command is not None else None,
        tuple((name, value) for name, value in data["environment"]),
        data["output"],
        tuple(_input_from_json(file) for file in files),
    )


def _input_from_json(data: Mapping[str, Any]) -> InputFile:
    return InputFile(**{**data, "sites": tuple(data["sites"])})


_JOB_COLUMNS = (
    "id",
    "reason",
    "queue_seq",
    "generation",
    "restarts",
    "placement_tries",
    "claiming_tries",
    "counted_scan",
    "submitted_at",
    "placed_at",
    "started_at",
    "ended_at",
    "exit_code",
    "claim_factor",
    "first_start_estimate",
    "retry_at",
)
_ATTEMPT_COLUMNS = (
    "generation",
    "placed_at",
    "start_estimate",
    "claim_at",
    "barrier_at",
    "launched_at",
    "ended_at",
    "exit_code",
    "end_reason",
    "nonce",
)
_COMPONENT_COLUMNS = (
    "index",
    "cluster",
    "size",
    "request_index",
    "lrm_job",
    "exit_code",
    "error",
    "infrastructure",
    "unknown_since",
    "submitted_at",
    "claimed_at",
    "ended_at",
    "transfer_time",
    "replaces",
    "superseded",
    "staging_since",
    "stage_size",
    "staged",
    "staged_at",
)


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
        "application": application_of(spec),
        "internal": spec.internal,
        "spec": spec_to_json(spec),
    }


def attempt_to_row(job: JobId, attempt: Attempt) -> dict[str, Any]:
    return {"job_id": job} | {name: getattr(attempt, name) for name in _ATTEMPT_COLUMNS}


def component_to_row(job: JobId, generation: int, component: Component) -> dict[str, Any]:
    row = {name: getattr(component, name) for name in _COMPONENT_COLUMNS}
    return row | {
        "job_id": job,
        "generation": generation,
        "state": component.state.value,
        "hosts": list(component.hosts),
        "sources": list(component.sources),
        "file_site": component.file_site,
    }


def component_from_row(row: Row) -> Component:
    values = {name: row[name] for name in _COMPONENT_COLUMNS}
    values |= {name: tuple(row[name]) for name in ("hosts", "sources")}
    return Component(**values, state=ComponentState(row["state"]))


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
        row["job_id"],
        row["at"],
        row["event"],
        JobState(row["state"]),
        row["reason"],
        row["generation"],
        row["component"],
        row["cluster"],
    )


_CLUSTER_COLUMNS = ("name", "kind", "state", "reason", "total", "errors", "last_heard", "unusable", "note", "trials")


def cluster_to_row(record: ClusterRecord) -> dict[str, Any]:
    """What must survive a restart; everything else is reported anew."""
    drain = record.drained
    return {name: getattr(record, name) for name in _CLUSTER_COLUMNS} | {
        "drained_at": drain.at if drain else None,
        "drained_by": drain.by if drain else None,
        "drained_reason": drain.reason if drain else None,
    }


def cluster_from_row(row: Row) -> ClusterRecord:
    at = row["drained_at"]
    return ClusterRecord(
        **{name: row[name] for name in _CLUSTER_COLUMNS},
        idle=0,
        used=0,
        background=0,
        down=0,
        processes_per_node=1,
        speed=1.0,
        drained=None if at is None else Drain(at, row["drained_by"] or "", row["drained_reason"] or ""),
    )
