"""The routes that answer "why?"."""

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BeforeValidator, Field

from koalapy.api.access import Caller, Id
from koalapy.api.fields import Moment, Output, as_json
from koalapy.api.jobs import job_view
from koalapy.api.problems import declared
from koalapy.api.routes import api_router
from koalapy.api.submission import JobSubmission
from koalapy.daemon.jobs.jobs import JobRecord, Jobs
from koalapy.model.cluster import ClusterState
from koalapy.model.job import Job, JobSpec, JobState
from koalapy.policies.registry import DEFAULTS


def _submission_of(spec: object) -> object:
    """A job as it would be submitted, without what has its default."""
    if not isinstance(spec, JobSpec):
        return spec
    if spec.policy == DEFAULTS[spec.request.type]:
        spec = replace(spec, policy="")
    view = as_json(job_view(JobRecord(Job(0, spec, 0.0), "")))
    submission = JobSubmission.model_validate({name: view[name] for name in JobSubmission.model_fields})
    return submission.model_dump(mode="json", exclude_defaults=True, by_alias=True)


class ClusterFindingView(Output):
    """What one cluster means for a job; counts in nodes."""

    cluster: str
    state: ClusterState
    total: int
    idle: int
    """Those that this job could be given."""
    used: int
    """Those that jobs of this scheduler have."""
    background: int
    down: int
    gives: int
    """Those that the job has here, or would get now."""
    reason: str
    missing: int | None
    """How many more idle nodes, here alone, would suffice; null when nothing on this cluster alone would."""


class PastReasonView(Output):
    at: Moment
    event: str
    reason: str


class PlacedComponentView(Output):
    size: int
    cluster: str
    node_class: str
    """Which of the cluster's nodes it gets, by the name of their class; empty: any."""
    request_index: int | None
    """Its place among the components of the request, if it has one there."""


class PlacementView(Output):
    """Where a job is, or would go, and why there."""

    components: list[PlacedComponentView]
    reason: str


class ChangeView(Output):
    """The smallest change with which the job would be placed at once."""

    field: str
    """Of the submission; empty when submitting it again as it is would do."""
    value: Any
    text: str
    submission: Annotated[JobSubmission, BeforeValidator(_submission_of)] = Field(validation_alias="spec")
    """The job as changed, for POST /api/v1/jobs; without the fields that have their defaults."""
    placement: PlacementView


class ExplanationView(Output):
    """Why a job is where it is; times are ISO 8601 in UTC."""

    job: int | None
    """Null for a submission that was not made."""
    state: JobState
    """Of a submission: placed when it would be placed at once, else queued."""
    headline: str
    """The binding reason."""
    clusters: list[ClusterFindingView]
    notes: list[str]
    suffices: list[str]
    """What would have to happen, each by itself, for the job to be placed as it is."""
    position: int | None
    """Its place in its placement queue; 1 is the head."""
    ahead: int
    tries: int
    """Placement tries so far, counting the scans that passed it over."""
    reasons: list[PastReasonView]
    """The history of reasons, oldest first."""
    smallest_change: ChangeView | None
    placement: PlacementView | None


def explain_router(service: Jobs) -> APIRouter:
    """Why a job waits, or is where it is, and what would become of a submission."""
    router = api_router("jobs")

    @router.get("/jobs/{job}/explain", response_model=ExplanationView, response_model_exclude_unset=True)
    async def explain_job(job: Id, caller: Caller) -> Any:
        """Why a job waits, and what would start it; why it is where it is; or how it ended."""
        return await service.explain(job, caller)

    @router.post("/explain", response_model=ExplanationView, response_model_exclude_unset=True, responses=declared(409))
    async def explain_submission(submission: JobSubmission, caller: Caller) -> Any:
        """Where a job would go if it were submitted now, and why not elsewhere. Nothing is stored."""
        return await service.explain_submission(submission.to_model(), caller)

    return router
