"""The routes of jobs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Header, Path, Query, Response
from fastapi.responses import JSONResponse, StreamingResponse

from koalapy.api import fields, schemas
from koalapy.api.conversion import acted_view, attempt_view, job_view, spec_of, timeline_view
from koalapy.api.problems import declared
from koalapy.api.queries import refuse_unknown
from koalapy.model.job import FINAL_STATES, JobState
from koalapy.ports import JobFilter
from koalapy.service.jobs import JobRecord, Jobs

LONGEST_WAIT = 60.0
LARGEST_PAGE = 1000

Key = Annotated[fields.Text | None, Header(alias="Idempotency-Key", max_length=200, min_length=1)]
Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT, description="seconds to wait for the job to be over")]
States = Annotated[list[JobState], Query(description="only jobs in one of these states")]
Owner = Annotated[fields.Name, Query(description="only jobs of this owner")]
Named = Annotated[fields.Name, Query(description="only jobs of this name")]
Where = Annotated[fields.Text, Query(max_length=100, description="only jobs whose last attempt was placed there")]
Id = Annotated[int, Path(ge=-fields.LARGEST_ID, le=fields.LARGEST_ID, description="the job's id")]
Before = Annotated[int | None, Query(ge=1, le=fields.LARGEST_ID, description="only jobs with smaller ids")]
Component = Annotated[int | None, Query(ge=0, lt=2**31, description="the output of this component only")]
Last = Annotated[int | None, Query(ge=1, lt=2**31, description="only the last so many attempts")]
LOCATION = {"Location": {"description": "where the job is", "schema": {"type": "string"}}}


def jobs_router(service: Jobs) -> APIRouter:
    """Submit, look at, and act on jobs."""
    router = APIRouter(prefix="/jobs", tags=["jobs"], dependencies=[Depends(refuse_unknown)])

    @router.post(
        "",
        status_code=201,
        response_model=schemas.JobView,
        operation_id="submit_job",
        responses={
            200: {"model": schemas.JobView, "description": "the first job of this Idempotency-Key"},
            201: {"description": "the new job", "headers": LOCATION},
            **declared(400, 401, 409, 413, 422, 429, 503),
        },
    )
    async def submit(submission: schemas.JobSubmission, idempotency_key: Key = None) -> Response:
        """Submit a job. With an Idempotency-Key a repeated submission returns the first job."""
        record, created = await service.submit(spec_of(submission), idempotency_key)
        headers = {"Location": f"/api/v1/jobs/{record.job.id}"}
        return JSONResponse(job_view(record), 201 if created else 200, headers)

    @router.get(
        "",
        response_model=schemas.JobPage,
        operation_id="list_jobs",
        response_model_exclude_unset=True,
        responses=declared(401, 422, 503),
    )
    async def page(
        state: States = [],  # noqa: B006
        active: bool = False,
        owner: Owner = "",
        name: Named = "",
        cluster: Where = "",
        before: Before = None,
        limit: Annotated[int, Query(ge=1, le=LARGEST_PAGE)] = 100,
    ) -> Any:
        """Jobs, newest first. ``active`` stands for every state that is not final."""
        states = {str(s) for s in state} | ({str(s) for s in JobState if s not in FINAL_STATES} if active else set())
        which = JobFilter(tuple(sorted(states)), owner, name, cluster, before, limit)
        # One more than asked for tells whether there is another page.
        records = await service.list(replace(which, limit=limit + 1))
        following = _next_page(which, active, state, records[:limit]) if len(records) > limit else None
        return {"jobs": [job_view(r) for r in records[:limit]], "next": following}

    @router.get(
        "/{job}",
        response_model=schemas.JobWithTimeline,
        operation_id="show_job",
        response_model_exclude_unset=True,
        responses=declared(401, 404, 422, 503),
    )
    async def show(job: Id, wait: Wait = 0.0) -> Any:
        """One job with its timeline; with ``wait``, as soon as it is over or the time has passed."""
        record = await (service.wait(job, wait) if wait else service.get(job))
        return await _with_timeline(service, record)

    @router.get(
        "/{job}/timeline",
        response_model=schemas.Timeline,
        operation_id="show_timeline",
        responses=declared(401, 404, 422, 503),
    )
    async def timeline(job: Id) -> Any:
        """Everything that happened to a job, in order."""
        return {"timeline": [timeline_view(entry) for entry in await service.timeline(job)]}

    @router.get(
        "/{job}/attempts",
        response_model=schemas.AttemptList,
        operation_id="list_attempts",
        responses=declared(401, 404, 422, 503),
    )
    async def attempts(job: Id, last: Last = None) -> Any:
        """Every try to run a job, or the ``last`` so many, with the times of its components."""
        record, tried = await service.attempts(job, last)
        return {"attempts": [attempt_view(record.job, attempt) for attempt in tried]}

    @router.get(
        "/{job}/logs",
        operation_id="read_logs",
        response_class=StreamingResponse,
        responses={
            200: {"content": {"text/plain": {}}, "description": "the program's output"},
            **declared(401, 404, 422, 503),
        },
    )
    async def logs(job: Id, follow: bool = False, component: Component = None) -> StreamingResponse:
        """The output of the job's last attempt; with ``follow`` as it comes, until the job is over.

        Of a component that wrote more than ``output_limit`` bytes the first and the last half of that are kept, with a
        line between that says how much is left out.
        """
        await service.get(job)
        return StreamingResponse(service.output(job, follow, component), media_type="text/plain; charset=utf-8")

    _add_actions(router, service)
    return router


def _add_actions(router: APIRouter, service: Jobs) -> None:
    acted = declared(400, 401, 404, 409, 413, 422, 503)

    @router.post(
        "/cancel",
        response_model=schemas.CancelledJobs,
        operation_id="cancel_jobs",
        response_model_exclude_unset=True,
        responses=declared(400, 401, 413, 422, 503),
    )
    async def cancel_all(order: schemas.CancelOrder) -> Any:
        """End many jobs at once, each by itself: one that cannot be ended keeps no other from it.

        One that is cancelled already is told as such, so that the same request may be sent again.
        """
        return {"jobs": [acted_view(done) for done in await service.cancel_all(order.jobs, order.reason)]}

    @router.post(
        "/{job}/cancel",
        response_model=schemas.JobView,
        operation_id="cancel_job",
        response_model_exclude_unset=True,
        responses=acted,
    )
    async def cancel(job: Id, why: schemas.Why | None = None) -> Any:
        """End a job; it is ``cancelled`` when all its nodes are given back."""
        return job_view(await service.cancel(job, why.reason if why else ""))

    @router.post(
        "/{job}/hold",
        response_model=schemas.JobView,
        operation_id="hold_job",
        response_model_exclude_unset=True,
        responses=acted,
    )
    async def hold(job: Id, why: schemas.Why | None = None) -> Any:
        """Keep a queued job from being placed."""
        return job_view(await service.hold(job, why.reason if why else ""))

    @router.post(
        "/{job}/release",
        response_model=schemas.JobView,
        operation_id="release_job",
        response_model_exclude_unset=True,
        responses=acted,
    )
    async def release(job: Id) -> Any:
        """Let a held job be placed again."""
        return job_view(await service.release(job))


async def _with_timeline(service: Jobs, record: JobRecord) -> dict[str, Any]:
    entries = await service.timeline(record.job.id)
    return job_view(record) | {"timeline": [timeline_view(entry) for entry in entries]}


def _next_page(which: JobFilter, active: bool, states: list[JobState], records: Sequence[JobRecord]) -> str:
    query: dict[str, Any] = {"before": records[-1].job.id, "limit": which.limit}
    query |= {n: v for n, v in (("owner", which.owner), ("name", which.name), ("cluster", which.cluster)) if v}
    if active:
        query["active"] = "true"
    if states:
        query["state"] = [str(state) for state in states]
    return f"/api/v1/jobs?{urlencode(query, doseq=True)}"
