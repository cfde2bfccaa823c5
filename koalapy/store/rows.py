"""Jobs as rows and back."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import RowMapping

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
    if spec.retry_on_exit:
        data["retry_on_exit"] = list(spec.retry_on_exit)
    return data


def spec_from_json(data: Mapping[str, Any]) -> JobSpec:
    values = dict(data)
    values["request"] = _request_from_json(values["request"])
    values["command"] = tuple(values["command"])
    for field in ("environment", "policy_options"):
        values[field] = tuple((name, value) for name, value in values.get(field, ()))
    values["retry_on_exit"] = tuple(values.get("retry_on_exit", ()))
    values["priority"] = Priority(values.get("priority", Priority.LOW))
    values["launcher"] = Launcher(values.get("launcher", Launcher.OPENMPI))
    if "claiming" in values:
        values["claiming"] = ClaimingMode(values["claiming"])
    return JobSpec(**values)


_DEFAULTS = asdict(JobSpec(FlexibleRequest(1), ()))
_LISTS = ("command", "environment", "policy_options", "retry_on_exit")
_PLAIN_FIELDS = [name for name in _DEFAULTS if name != "request" and name not in _LISTS]


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
    command, file = data["command"], data.get("input")
    return ComponentRequest(
        data["size"],
        data["cluster"],
        tuple(command) if command is not None else None,
        tuple((name, value) for name, value in data["environment"]),
        data["output"],
        InputFile(file["name"], file["size"], tuple(file["sites"])) if file is not None else None,
    )


_JOB_COLUMNS = (
    "id", "reason", "queue_seq", "generation", "restarts", "placement_tries", "claiming_tries",
    "submitted_at", "placed_at", "started_at", "ended_at", "exit_code", "claim_factor", "first_start_estimate",
)  # fmt: skip
_ATTEMPT_COLUMNS = (
    "generation", "placed_at", "start_estimate", "claim_at", "barrier_at", "launched_at", "ended_at", "exit_code",
    "end_reason",
)  # fmt: skip
_COMPONENT_COLUMNS = (
    "index", "cluster", "size", "request_index", "lrm_job", "exit_code", "error", "infrastructure",
    "unknown_since", "submitted_at", "claimed_at", "ended_at", "file_site", "transfer_time", "replaces", "superseded",
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


def attempt_to_row(job: JobId, attempt: Attempt) -> dict[str, Any]:
    return {"job_id": job} | {name: getattr(attempt, name) for name in _ATTEMPT_COLUMNS}


def component_to_row(job: JobId, generation: int, component: Component) -> dict[str, Any]:
    row = {name: getattr(component, name) for name in _COMPONENT_COLUMNS}
    return row | {
        "job_id": job,
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
        idle=0, used=0, background=0, down=0, processes_per_node=1, speed=1.0,
        drained=None if at is None else Drain(at, row["drained_by"] or "", row["drained_reason"] or ""),
    )  # fmt: skip
