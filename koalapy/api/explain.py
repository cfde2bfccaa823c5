"""The routes that answer "why?"."""

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends

from koalapy.api import schemas
from koalapy.api.conversion import job_view, moment, spec_of
from koalapy.api.explain_schemas import ExplanationView
from koalapy.api.jobs import Id
from koalapy.api.problems import declared
from koalapy.api.queries import refuse_unknown
from koalapy.model.explanation import Change, ClusterFinding, Explanation
from koalapy.model.job import Job, JobSpec
from koalapy.model.placement import Placement
from koalapy.placement.registry import DEFAULTS
from koalapy.service.jobs import JobRecord, Jobs


def explain_router(service: Jobs) -> APIRouter:
    """Why a job waits, or is where it is, and what would become of a submission."""
    router = APIRouter(tags=["jobs"], dependencies=[Depends(refuse_unknown)])

    @router.get(
        "/jobs/{job}/explain",
        response_model=ExplanationView,
        operation_id="explain_job",
        response_model_exclude_unset=True,
        responses=declared(401, 404, 422, 503),
    )
    async def explain(job: Id) -> Any:
        """Why a job waits, and what would start it; why it is where it is; or how it ended."""
        return explanation_view(await service.explain(job))

    @router.post(
        "/explain",
        response_model=ExplanationView,
        operation_id="explain_submission",
        response_model_exclude_unset=True,
        responses=declared(400, 401, 413, 422, 429, 503),
    )
    async def explain_submission(submission: schemas.JobSubmission) -> Any:
        """Where a job would go if it were submitted now, and why not elsewhere. Nothing is stored."""
        return explanation_view(await service.explain_submission(spec_of(submission)))

    return router


def explanation_view(found: Explanation) -> dict[str, Any]:
    return {
        "job": found.job,
        "state": found.state,
        "headline": found.headline,
        "clusters": [_finding_view(finding) for finding in found.clusters],
        "notes": list(found.notes),
        "suffices": list(found.suffices),
        "position": found.position,
        "ahead": found.ahead,
        "tries": found.tries,
        "reasons": [{"at": moment(r.at), "event": r.event, "reason": r.reason} for r in found.reasons],
        "smallest_change": _change_view(found.smallest_change) if found.smallest_change else None,
        "placement": _placement_view(found.placement) if found.placement else None,
    }


def _finding_view(finding: ClusterFinding) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in ClusterFinding.__slots__}


def _change_view(change: Change) -> dict[str, Any]:
    return {
        "field": change.field,
        "value": change.value,
        "text": change.text,
        "submission": submission_of(change.spec),
        "placement": _placement_view(change.placement),
    }


def _placement_view(placement: Placement) -> dict[str, Any]:
    components = [
        {"size": c.size, "cluster": c.cluster, "request_index": c.request_index} for c in placement.components
    ]
    return {"components": components, "reason": placement.reason}


def submission_of(spec: JobSpec) -> dict[str, Any]:
    """A job as it would be submitted, without what has its default."""
    if spec.policy == DEFAULTS[spec.request.type]:
        spec = replace(spec, policy="")
    view = job_view(JobRecord(Job(0, spec, 0.0), ""))
    fields = {name: view[name] for name in schemas.JobSubmission.model_fields}
    return schemas.JobSubmission.model_validate(fields).model_dump(mode="json", exclude_defaults=True, by_alias=True)
