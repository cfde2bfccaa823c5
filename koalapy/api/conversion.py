"""Between the wire's JSON and the model."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from koalapy.api import schemas
from koalapy.model.job import Component, Job, JobSpec, TimelineEntry
from koalapy.model.request import (
    ComponentRequest,
    Environment,
    FixedRequest,
    FlexibleRequest,
    NonFixedRequest,
    Request,
)
from koalapy.ports import ClusterRecord, JobRecord


def spec_of(submission: schemas.JobSubmission) -> JobSpec:
    """What a submission asks for; its sense is not checked here."""
    return JobSpec(
        request=_request_of(submission.request),
        command=tuple(submission.command),
        name=submission.name,
        owner=submission.owner,
        environment=_pairs(submission.environment),
        priority=submission.priority,
        policy=submission.policy,
        launcher=submission.launcher,
        processes_per_node=submission.processes_per_node,
        workdir=submission.workdir,
        output=submission.output,
        walltime=submission.walltime,
        max_restarts=submission.max_restarts,
        max_placement_tries=submission.max_placement_tries,
    )


def _request_of(request: schemas.Fixed | schemas.NonFixed | schemas.Flexible) -> Request:
    if isinstance(request, schemas.Flexible):
        options = tuple(tuple(option) for option in request.split_options)
        return FlexibleRequest(request.total_size, request.min_component_size, request.max_components, options)
    components = tuple(_component_of(component) for component in request.components)
    return FixedRequest(components) if isinstance(request, schemas.Fixed) else NonFixedRequest(components)


def _component_of(component: schemas.FixedComponent | schemas.NonFixedComponent) -> ComponentRequest:
    return ComponentRequest(
        size=component.size,
        cluster=component.cluster if isinstance(component, schemas.FixedComponent) else None,
        command=tuple(component.command) if component.command is not None else None,
        environment=_pairs(component.environment),
        output=component.output,
    )


def _pairs(environment: dict[str, str]) -> Environment:
    return tuple(sorted(environment.items()))


def request_view(request: Request) -> dict[str, Any]:
    """A request as it was submitted, with its defaults."""
    if isinstance(request, FlexibleRequest):
        view = asdict(request) | {"split_options": [list(option) for option in request.split_options]}
        return {"type": request.type, **view}
    components = []
    for component in request.components:
        view = {"size": component.size, "cluster": component.cluster, "output": component.output}
        view["command"] = list(component.command) if component.command is not None else None
        view["environment"] = dict(component.environment) or None
        components.append({name: value for name, value in view.items() if value is not None})
    return {"type": request.type, "components": components}


def job_view(record: JobRecord) -> dict[str, Any]:
    """A job as ``schemas.JobView``; spans follow semantics 12."""
    job, spec = record.job, record.job.spec
    launched = job.attempt.launched_at if job.attempt else None
    return {
        "id": job.id,
        "name": spec.name,
        "owner": spec.owner,
        "state": job.state,
        "reason": record.reason,
        "exit_code": job.exit_code,
        "request": request_view(spec.request),
        "command": list(spec.command),
        "environment": dict(spec.environment),
        "priority": spec.priority,
        "policy": spec.policy,
        "launcher": spec.launcher,
        "processes_per_node": spec.processes_per_node,
        "workdir": spec.workdir,
        "output": spec.output,
        "walltime": spec.walltime,
        "max_restarts": spec.max_restarts,
        "max_placement_tries": spec.max_placement_tries,
        "submitted_at": moment(job.submitted_at),
        "placed_at": moment(job.placed_at),
        "started_at": moment(job.started_at),
        "ended_at": moment(job.ended_at),
        "queue_time": _span(job.submitted_at, job.placed_at),
        "wait_time": _span(job.submitted_at, job.started_at),
        "startup_overhead": _span(job.placed_at, launched or job.started_at),
        "response_time": _span(job.submitted_at, job.ended_at),
        "generation": job.generation,
        "restarts": job.restarts,
        "placement_tries": job.placement_tries,
        "claiming_tries": job.claiming_tries,
        "components": [_component_view(c) for c in _components(job)],
    }


def _components(job: Job) -> tuple[Component, ...]:
    return job.attempt.components if job.attempt else ()


def _component_view(component: Component) -> dict[str, Any]:
    return {
        "index": component.index,
        "cluster": component.cluster,
        "size": component.size,
        "state": component.state,
        "hosts": list(component.hosts),
        "lrm_job": component.lrm_job,
        "exit_code": component.exit_code,
        "error": component.error,
        "unknown_since": moment(component.unknown_since),
    }


def timeline_view(entry: TimelineEntry) -> dict[str, Any]:
    view = asdict(entry) | {"at": moment(entry.at)}
    del view["job"]
    return view


def cluster_view(record: ClusterRecord) -> dict[str, Any]:
    return asdict(record) | {"last_heard": moment(record.last_heard)}


def moment(at: float | None) -> str | None:
    """Seconds since the epoch as ISO 8601 in UTC with milliseconds."""
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start), 6)
