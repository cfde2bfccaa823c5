"""Between the wire's JSON and the model."""

from dataclasses import asdict
from typing import Any

from koalapy.api import schemas
from koalapy.api.fields import moment
from koalapy.api.problems import problem_of
from koalapy.model.job import Attempt, Component, Job, JobSpec, TimelineEntry
from koalapy.model.request import (
    Bundle,
    ComponentRequest,
    Distribution,
    Environment,
    FixedRequest,
    FlexibleRequest,
    InputFile,
    NonFixedRequest,
    Request,
)
from koalapy.service.jobs import ActionResult, JobRecord


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
        policy_options=_pairs(submission.policy_options),
        coallocation=submission.coallocation,
        speed_ratio_min=submission.speed_ratio_min,
        claiming=submission.claiming,
        claim_threshold=submission.claim_threshold,
        launcher=submission.launcher,
        processes_per_node=submission.processes_per_node,
        workdir=submission.workdir,
        workdir_optional=submission.workdir_optional,
        output=submission.output,
        walltime=submission.walltime,
        max_restarts=submission.max_restarts,
        max_placement_tries=submission.max_placement_tries,
        max_claiming_tries=submission.max_claiming_tries,
        retry_on_exit=tuple(submission.retry_on_exit),
        inputs=tuple(InputFile(i.file, distribution=i.distribution, target=i.as_) for i in submission.inputs),
        bundle=Bundle(submission.bundle, 0, 0) if submission.bundle is not None else None,
        collect=tuple(submission.collect),
        application=submission.application,
        communication=submission.communication,
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
        inputs=tuple(_own_input(file) for file in component.inputs),
    )


def _own_input(file: schemas.ComponentInput) -> InputFile:
    distribution: Distribution = "whole" if file.part is None else "partitioned"
    return InputFile(file.file, distribution=distribution, part=file.part, target=file.as_)


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
        view["inputs"] = [_own_input_view(file) for file in component.inputs] or None
        components.append({name: value for name, value in view.items() if value is not None})
    return {"type": request.type, "components": components}


def _own_input_view(file: InputFile) -> dict[str, Any]:
    view = {"file": file.name, "part": file.part, "as": file.target or None}
    return {name: value for name, value in view.items() if value is not None}


def job_view(record: JobRecord) -> dict[str, Any]:
    """A job as ``schemas.JobView``; spans follow semantics 12."""
    job, spec = record.job, record.job.spec
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
        "policy_options": dict(spec.policy_options),
        "coallocation": {None: "allowed", 1: "never"}.get(spec.coallocation, spec.coallocation),
        "speed_ratio_min": spec.speed_ratio_min,
        "claiming": spec.claiming,
        "claim_threshold": spec.claim_threshold,
        "launcher": spec.launcher,
        "processes_per_node": spec.processes_per_node,
        "workdir": spec.workdir,
        "workdir_optional": spec.workdir_optional,
        "output": spec.output,
        "walltime": spec.walltime,
        "max_restarts": spec.max_restarts,
        "max_placement_tries": spec.max_placement_tries,
        "max_claiming_tries": spec.max_claiming_tries,
        "retry_on_exit": list(spec.retry_on_exit),
        "inputs": [{"file": f.name, "distribution": f.distribution, "as": f.target} for f in spec.inputs],
        "bundle": spec.bundle.id if spec.bundle else None,
        "collect": list(spec.collect),
        "application": spec.application,
        "communication": spec.communication,
        "submitted_at": moment(job.submitted_at),
        "placed_at": moment(job.placed_at),
        "started_at": moment(job.started_at),
        "ended_at": moment(job.ended_at),
        "queue_time": _span(job.submitted_at, job.placed_at),
        "wait_time": _span(job.submitted_at, job.started_at),
        "startup_overhead": _span(job.placed_at, job.started_at),
        "response_time": _span(job.submitted_at, job.ended_at),
        "start_delay": start_delay(job, job.attempt),
        "generation": job.generation,
        "restarts": job.restarts,
        "retry_at": moment(job.retry_at),
        "placement_tries": job.placement_tries,
        "claiming_tries": job.claiming_tries,
        "components": [_component_view(c) for c in _components(job)],
    }


def acted_view(acted: ActionResult) -> dict[str, Any]:
    """What became of one of several jobs as ``schemas.CancelledJob``."""
    state = acted.record.job.state if acted.record else None
    return {"job": acted.job, "state": state, "problem": problem_of(acted.error) if acted.error else None}


def _components(job: Job) -> tuple[Component, ...]:
    return job.attempt.gang if job.attempt else ()


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
        **_stage_view(component),
    }


def _stage_view(component: Component) -> dict[str, Any]:
    """The files that are brought to a component."""
    return {
        "sources": list(component.sources),
        "staging_since": moment(component.staging_since),
        "stage_size": component.stage_size,
        "staged": component.staged,
        "staged_at": moment(component.staged_at),
    }


def attempt_view(job: Job, attempt: Attempt) -> dict[str, Any]:
    """An attempt as ``schemas.AttemptView``; its spans are what the job's would be had it been the last."""
    return {
        "generation": attempt.generation,
        "placed_at": moment(attempt.placed_at),
        "start_estimate": moment(attempt.start_estimate),
        "claim_at": moment(attempt.claim_at),
        "barrier_at": moment(attempt.barrier_at),
        "launched_at": moment(attempt.launched_at),
        "ended_at": moment(attempt.ended_at),
        "end_reason": attempt.end_reason,
        "exit_code": attempt.exit_code,
        "queue_time": _span(job.submitted_at, attempt.placed_at),
        "wait_time": _span(job.submitted_at, attempt.barrier_at),
        "startup_overhead": _span(attempt.placed_at, attempt.barrier_at),
        "response_time": _span(job.submitted_at, attempt.ended_at),
        "start_delay": start_delay(job, attempt),
        "components": [_attempt_component_view(component) for component in attempt.components],
    }


def _attempt_component_view(component: Component) -> dict[str, Any]:
    return {
        "index": component.index,
        "rank": component.rank,
        "cluster": component.cluster,
        "size": component.size,
        "state": component.state,
        "hosts": list(component.hosts),
        "exit_code": component.exit_code,
        "error": component.error,
        "infrastructure": component.infrastructure,
        "submitted_at": moment(component.submitted_at),
        "claimed_at": moment(component.claimed_at),
        "ended_at": moment(component.ended_at),
        "file_site": component.file_site,
        "transfer_time": component.transfer_time,
        **_stage_view(component),
        "superseded": component.superseded,
    }


def start_delay(job: Job, attempt: Attempt | None) -> float | None:
    """How much later an attempt was estimated to start than the first."""
    if attempt is None:
        return None
    return _span(job.first_start_estimate, attempt.start_estimate)


def timeline_view(entry: TimelineEntry) -> dict[str, Any]:
    view = asdict(entry) | {"at": moment(entry.at)}
    del view["job"]
    return view


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start), 6)
