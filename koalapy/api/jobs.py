"""The routes of jobs."""

from dataclasses import fields as fields_of
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from koalapy.api import fields
from koalapy.api.access import Caller, Id
from koalapy.api.derived import view_model
from koalapy.api.fields import Moment, Output
from koalapy.api.problems import declared
from koalapy.api.redaction import as_others_see
from koalapy.api.routes import api_router, json_list
from koalapy.api.submission import JobSubmission
from koalapy.daemon.jobs.jobs import JobRecord, Jobs
from koalapy.model.errors import ForbiddenError, NotFoundError, ProblemCode
from koalapy.model.identity import Identity, Role
from koalapy.model.job import FINAL_STATES, Attempt, ComponentState, Job, JobSpec, JobState
from koalapy.model.listing import listed_job
from koalapy.model.request import ComponentRequest, FlexibleRequest, InputFile
from koalapy.model.wording import listed
from koalapy.ports import JobFilter
from koalapy.validation.permissions import may_see_all_of

MAX_WAIT_SECONDS = 60.0
MAX_PAGE_SIZE = 1000

Key = Annotated[fields.Text | None, Header(alias="Idempotency-Key", max_length=200, min_length=1)]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, description="seconds to wait for the job to be over")]
States = Annotated[list[JobState], Query(description="only jobs in one of these states")]
Owner = Annotated[fields.Name, Query(description="only jobs of this owner")]
Mine = Annotated[bool, Query(description="only the caller's own jobs")]
Named = Annotated[fields.Name, Query(description="only jobs of this name")]
Home = Annotated[fields.Text, Query(max_length=100, description="only jobs of this home site")]
Where = Annotated[fields.Text, Query(max_length=100, description="only jobs whose last attempt was placed there")]
Before = Annotated[int | None, Query(ge=1, le=fields.MAX_ID, description="only jobs with smaller ids")]
Component = Annotated[int | None, Query(ge=0, lt=2**31, description="the output of this component only")]
Last = Annotated[int | None, Query(ge=1, lt=2**31, description="only the last so many attempts")]
LISTED = {"application", "home_site", "launcher", "name", "owner", "policy", "priority", "request", "walltime"}
"""Fields of a job's specification that lists show."""
LOCATION = {"Location": {"description": "where the job is", "schema": {"type": "string"}}}


JobInputView = view_model("JobInputView", InputFile, "An input of every component.", without={"part"})
ComponentInputView = view_model(
    "ComponentInputView",
    InputFile,
    "An input of one component; only what was given.",
    without={"distribution"},
    only_given=True,
)
RequestedComponentView = view_model(
    "RequestedComponentView",
    ComponentRequest,
    "A component as it was asked for; only what was given.",
    only_given=True,
    elements={"inputs": ComponentInputView},
)
FlexibleView = view_model("FlexibleView", FlexibleRequest, "A flexible request.")


class ComponentsView(Output):
    """A fixed or non-fixed request."""

    type: Literal["fixed", "nonfixed"]
    components: list[RequestedComponentView]  # type: ignore[valid-type]


class _PlacedView(Output):
    index: int
    cluster: str
    size: int
    node_class: str
    """Which of its cluster's nodes it gets, by the name of their class; empty: any."""
    state: str
    hosts: list[str]
    exit_code: int | None
    error: str


class _StageView(Output):
    """The files that are brought to a component."""

    sources: list[str]
    """Where each of its inputs comes from, in their order."""
    staging_since: Moment | None
    """When its files were ordered to its cluster; null when none must be brought before it can start."""
    stage_size: int
    """Bytes that must be brought, as far as known."""
    staged: int
    """Of these, bytes that are there."""
    staged_at: Moment | None


class ComponentView(_StageView, _PlacedView):
    lrm_job: str | None
    unknown_since: Moment | None
    """When its cluster was last heard of, while that is out of reach; it may run on."""
    lost_at: Moment | None
    """When it is certainly over, so that the job may be tried again, if its cluster stays out of reach; null: only when
    the cluster or an operator says so."""
    lease: float | None
    """Seconds of the daemon's silence after which it ends; null: silence does not end it."""


class AttemptComponentView(_StageView, _PlacedView):
    """A component of an attempt, with its own times.

    ``rank`` is its place in the placement. One whose claim failed is ``superseded`` by another of the same rank.
    """

    rank: int
    state: ComponentState
    infrastructure: bool
    submitted_at: Moment | None
    claimed_at: Moment | None
    warned_at: Moment | None
    """When its program was told by the signal of ``warning`` that it will be stopped."""
    ended_at: Moment | None
    file_site: str | None
    transfer_time: float
    superseded: bool


class TimelineView(Output):
    at: Moment
    actor: str
    """The user whose doing it was, if it was one's."""
    event: str
    state: JobState
    reason: str
    generation: int
    component: int | None
    cluster: str | None


class _Spans(Output):
    """In seconds, as semantics 12 has them."""

    queue_time: float | None
    wait_time: float | None
    startup_overhead: float | None
    response_time: float | None
    start_delay: float | None
    """How much later than first estimated the last attempt was to start."""


class _Head(Output):
    id: int
    redacted: bool
    """Whether it is somebody else's, so that most of it is left out."""
    state: JobState
    reason: str
    exit_code: int | None


class ListedComponentView(Output):
    """A component of the last attempt, as lists show it."""

    index: int
    cluster: str
    size: int
    node_class: str
    state: str
    exit_code: int | None


_requests: Any = Annotated[ComponentsView | FlexibleView, Field(discriminator="type")]
_Spec = view_model("JobView", JobSpec, "", elements={"inputs": JobInputView, "request": _requests}, base=_Head)


class _Standing(_Spans):
    """Where a job stands; times are ISO 8601 in UTC, spans are in seconds."""

    submitted_at: Moment
    placed_at: Moment | None
    started_at: Moment | None
    ended_at: Moment | None
    generation: int
    restarts: int
    retry_at: Moment | None
    """When a queued job whose attempts kept failing is tried again; null while it is in its placement queue."""
    placement_tries: int
    claiming_tries: int


class JobView(_Standing, _Spec):  # type: ignore[misc, valid-type]
    """A job and where it stands; times are ISO 8601 in UTC, spans are in seconds."""

    components: list[ComponentView]


_Listed = view_model(
    "ListedJob",
    JobSpec,
    "",
    without={each.name for each in fields_of(JobSpec)} - LISTED,
    elements={"request": _requests},
    base=_Head,
)


class ListedJobView(_Standing, _Listed):  # type: ignore[misc, valid-type]
    """A job as lists show it, without its commands, variables and files: ``GET /jobs/{job}`` shows those."""

    program: str
    """The beginning of the first word of its command."""
    components: list[ListedComponentView]


class JobWithTimeline(JobView):
    timeline: list[TimelineView]


class JobPage(Output):
    jobs: list[ListedJobView]
    """As many as asked for, or fewer where they are large or many had to be looked at for them."""
    next: str | None
    """Where the next page is; null on the last."""


class Timeline(Output):
    timeline: list[TimelineView]


class AttemptView(_Spans):
    """One try to run a job; spans are measured as those of the job."""

    generation: int
    placed_at: Moment
    start_estimate: Moment | None
    claim_at: Moment | None
    barrier_at: Moment | None
    launched_at: Moment | None
    ended_at: Moment | None
    end_reason: str
    exit_code: int | None
    components: list[AttemptComponentView]


class AttemptList(Output):
    attempts: list[AttemptView]
    """In order; ``generation`` counts them from 1."""


def job_view(record: JobRecord) -> JobView:
    """All of it, for those who may see that."""
    view: JobView = JobView.model_validate(_told_of(record))
    return view


def seen_by(caller: Identity, record: JobRecord) -> JobView:
    """As much of it as somebody may see."""
    told = _told_of(record) if may_see_all_of(caller, record.job) else _told_of_others(record)
    view: JobView = JobView.model_validate(told)
    return view


def listed_for(caller: Identity, record: JobRecord) -> ListedJobView:
    """Return a job as the caller may see it in a list."""
    is_theirs = may_see_all_of(caller, record.job)
    seen = record if is_theirs else as_others_see(record)
    job = listed_job(seen.job)
    told = _told_of(JobRecord(job, seen.reason), ListedJobView)
    view: ListedJobView = ListedJobView.model_validate(
        told | {"redacted": not is_theirs, "program": job.spec.command[0]}
    )
    return view


def _told_of_others(record: JobRecord) -> dict[str, Any]:
    return _told_of(as_others_see(record)) | {"redacted": True}


def _told_of(record: JobRecord, view: type[Output] = JobView) -> dict[str, Any]:
    job, attempt = record.job, record.job.attempt
    return (
        _attributes(view, job.spec)
        | _attributes(view, job)
        | {
            "redacted": False,
            "reason": record.reason,
            "components": attempt.gang if attempt else (),
            **_spans(job, job.placed_at, job.started_at, job.ended_at, attempt),
        }
    )


def attempt_view(job: Job, attempt: Attempt) -> AttemptView:
    """Its spans are what the job's would be had it been the last."""
    spans = _spans(job, attempt.placed_at, attempt.barrier_at, attempt.ended_at, attempt)
    return AttemptView.model_validate(_attributes(AttemptView, attempt) | spans)


def _attributes(view: type[Output], value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _names_in_both(view, value.__class__)}


@cache
def _names_in_both(view: type[Output], kind: type[Any]) -> tuple[str, ...]:
    return tuple(name for name in view.model_fields if hasattr(kind, name))


def _spans(
    job: Job, placed: float | None, ready: float | None, ended: float | None, attempt: Attempt | None
) -> dict[str, float | None]:
    return {
        "queue_time": _span(job.submitted_at, placed),
        "wait_time": _span(job.submitted_at, ready),
        "startup_overhead": _span(placed, ready),
        "response_time": _span(job.submitted_at, ended),
        "start_delay": _span(job.first_start_estimate, attempt.start_estimate) if attempt else None,
    }


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start), 6)


def jobs_router(service: Jobs) -> APIRouter:
    """Submit, look at, and act on jobs."""
    router = api_router("jobs", "/jobs")

    @router.post(
        "",
        status_code=201,
        response_model=JobView,
        responses={
            200: {"model": JobView, "description": "the first job of this Idempotency-Key"},
            201: {"description": "the new job", "headers": LOCATION},
            **declared(409),
        },
    )
    async def submit_job(submission: JobSubmission, caller: Caller, idempotency_key: Key = None) -> Response:
        """Submit a job, which is the caller's; operators may name another ``owner``. With an Idempotency-Key, which is
        the caller's own, a repeated submission returns the first job."""
        record, created = await service.submit(submission.to_model(), caller, idempotency_key)
        headers = {"Location": f"/api/v1/jobs/{record.job.id}"}
        body = job_view(record).model_dump_json(by_alias=True)
        return Response(body, 201 if created else 200, headers, "application/json")

    @router.get("", response_model=JobPage)
    async def list_jobs(
        caller: Caller,
        state: States = [],  # noqa: B006
        active: bool = False,
        mine: Mine = False,
        owner: Owner = "",
        name: Named = "",
        cluster: Where = "",
        home_site: Home = "",
        before: Before = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE)] = 100,
    ) -> Any:
        """Jobs, newest first, without what they run. ``active`` stands for every state that is not final.

        Of others' jobs users see what is large, where and since when (``redacted``), and no names: asked by name, they
        are told of their own.
        """
        owner = _whose(caller, mine=mine, owner=owner, name=name)
        states = {str(s) for s in state} | ({str(s) for s in JobState if s not in FINAL_STATES} if active else set())
        which = JobFilter(tuple(sorted(states)), owner, name, cluster, home_site, before, limit)
        records, following = await service.page(which)
        address = None if following is None else _next_page(replace(which, before=following), active, state)
        texts = (listed_for(caller, record).model_dump_json(by_alias=True) for record in records)
        return await json_list("jobs", texts, {"next": address})

    _add_views(router, service)
    return router


def _add_views(router: APIRouter, service: Jobs) -> None:
    @router.get("/{job}", response_model=JobWithTimeline)
    async def show_job(job: Id, caller: Caller, wait: Wait = 0.0) -> Any:
        """One job with its timeline; with ``wait``, as soon as it is over or the time has passed. Of others' jobs users
        see no timeline, and little else (``redacted``)."""
        record = await (service.wait(job, wait) if wait else service.get(job))
        if not may_see_all_of(caller, record.job):
            return JobWithTimeline.model_validate(_told_of_others(record) | {"timeline": []})
        return JobWithTimeline.model_validate(_told_of(record) | {"timeline": await service.timeline(job)})

    @router.get("/{job}/timeline", response_model=Timeline)
    async def show_timeline(job: Id) -> Any:
        """Everything that happened to a job, in order."""
        return {"timeline": await service.timeline(job)}

    @router.get("/{job}/attempts", response_model=AttemptList)
    async def list_attempts(job: Id, last: Last = None) -> Any:
        """Every try to run a job, or the ``last`` so many, with the times of its components."""
        record, tried = await service.attempts(job, last)
        return {"attempts": [attempt_view(record.job, attempt) for attempt in tried]}

    @router.get(
        "/{job}/logs",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/plain": {}}, "description": "the program's output"}},
    )
    async def read_logs(job: Id, follow: bool = False, component: Component = None) -> StreamingResponse:
        """The output of the job's last attempt; with ``follow`` as it comes, until the job is over.

        Of a component that wrote more than ``output_limit`` bytes the first and the last half of that are kept, with a
        line between that says how much is left out.
        """
        _check_component((await service.get(job)).job, component, follow=follow)
        return StreamingResponse(service.output(job, follow, component), media_type="text/plain; charset=utf-8")


def _check_component(job: Job, component: int | None, *, follow: bool) -> None:
    """``NotFoundError`` for a component that the last attempt does not have, and cannot get while it is followed."""
    if component is None or job.attempt is None or (follow and not job.state.is_final):
        return
    indices = sorted(each.index for each in job.attempt.components)
    if component not in indices:
        raise NotFoundError(
            f"job {job.id} has no component {component}",
            field="component",
            value=component,
            code=ProblemCode.COMPONENT_NOT_FOUND,
            hint=f"give one of {listed([str(index) for index in indices])}",
        )


def _whose(caller: Identity, *, mine: bool, owner: str, name: str) -> str:
    """Whose jobs are listed; everybody's when it is nobody's. Names of others tell users nothing, nor does a count."""
    if mine:
        owner = owner or caller.user
    if caller.may(Role.OPERATOR):
        return owner
    if owner not in ("", caller.user):
        raise ForbiddenError(
            f"owner is {owner}, and you are {caller.user}",
            field="owner",
            value=owner,
            hint="ask for your own (mine), or for all: others' are listed without their names",
        )
    return caller.user if name else owner


def _next_page(which: JobFilter, active: bool, states: list[JobState]) -> str:
    query: dict[str, Any] = {"before": which.before, "limit": which.limit}
    query |= {name: said for name in ("owner", "name", "cluster", "home_site") if (said := getattr(which, name))}
    if active:
        query["active"] = "true"
    if states:
        query["state"] = [str(state) for state in states]
    return f"/api/v1/jobs?{urlencode(query, doseq=True)}"
