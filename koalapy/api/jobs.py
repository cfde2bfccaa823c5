"""The routes of jobs: submit them, look at them, follow them, and act on them."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import Field

from koalapy.api import fields
from koalapy.api.access import Caller, Id
from koalapy.api.fields import Input, Output, Problem, as_json
from koalapy.api.job_views import (
    AttemptList,
    JobPage,
    JobSubmission,
    JobView,
    JobWithTimeline,
    Timeline,
    TimelineView,
    attempt_view,
    job_view,
    job_with_timeline,
    summary_for,
)
from koalapy.api.problems import describe_error, problem_responses
from koalapy.api.routes import api_router, render_json_list
from koalapy.daemon.jobs.changes import TOPICS, Changes, Topic
from koalapy.daemon.jobs.jobs import ActionResult, JobChange, Jobs
from koalapy.model.errors import ForbiddenError, NotFoundError, ProblemCode, StoreUnavailable
from koalapy.model.identity import Identity, Role
from koalapy.model.job import FINAL_STATES, Job, JobState, Priority
from koalapy.model.wording import format_list
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
LOCATION = {"Location": {"description": "where the job is", "schema": {"type": "string"}}}


def jobs_router(service: Jobs) -> APIRouter:
    router = api_router("jobs", "/jobs")

    @router.post(
        "",
        status_code=201,
        response_model=JobView,
        responses={
            200: {"model": JobView, "description": "the first job of this Idempotency-Key"},
            201: {"description": "the new job", "headers": LOCATION},
            **problem_responses(409),
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
        records, following = await service.list_page(which)
        address = None if following is None else _next_page(replace(which, before=following), active, state)
        texts = (summary_for(caller, record).model_dump_json(by_alias=True) for record in records)
        return await render_json_list("jobs", texts, {"next": address})

    _add_views(router, service)
    _add_actions(router, service)
    _add_events(router, service)
    return router


def _add_views(router: APIRouter, service: Jobs) -> None:
    @router.get("/{job}", response_model=JobWithTimeline)
    async def show_job(job: Id, caller: Caller, wait: Wait = 0.0) -> Any:
        """One job with its timeline; with ``wait``, as soon as it is over or the time has passed. Of others' jobs users
        see no timeline, and little else (``redacted``)."""
        record = await (service.wait_until_final(job, wait) if wait else service.get(job))
        is_theirs = may_see_all_of(caller, record.job)
        return job_with_timeline(record, await service.read_timeline(job) if is_theirs else None)

    @router.get("/{job}/timeline", response_model=Timeline)
    async def show_timeline(job: Id) -> Any:
        """Everything that happened to a job, in order."""
        return {"timeline": await service.read_timeline(job)}

    @router.get("/{job}/attempts", response_model=AttemptList)
    async def list_attempts(job: Id, last: Last = None) -> Any:
        """Every try to run a job, or the ``last`` so many, with the times of its components."""
        record, tried = await service.list_attempts(job, last)
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
        return StreamingResponse(service.follow_output(job, follow, component), media_type="text/plain; charset=utf-8")


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
            hint=f"give one of {format_list([str(index) for index in indices])}",
        )


def _whose(caller: Identity, *, mine: bool, owner: str, name: str) -> str:
    """Whose jobs are listed; everybody's when it is nobody's. Names of others tell users nothing, nor does a count."""
    if mine:
        owner = owner or caller.user
    if caller.has_role(Role.OPERATOR):
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


MAX_JOBS = 1000
"""Jobs that may be acted on at once."""
Chosen = Annotated[list[fields.JobId], Field(min_length=1, max_length=MAX_JOBS)]


class ActionReason(Input):
    """Why somebody acts on a job."""

    reason: fields.Reason = ""


class CancelReason(ActionReason):
    """Why a job is to end, and whether its program has the grace before that which it asked for."""

    warn: bool = False


class CancelOrder(CancelReason):
    """Which jobs are to end, and why."""

    jobs: Chosen


class HoldOrder(ActionReason):
    """Which jobs are not to be placed for now, and why."""

    jobs: Chosen


class ReleaseOrder(Input):
    """Which jobs may be placed again."""

    jobs: Chosen


class PriorityOrder(ActionReason):
    """Which jobs are to have another priority, and why."""

    jobs: Chosen
    priority: Priority


class CancelledJob(Output):
    """What became of one job: its state now, or what stood against it."""

    job: int
    state: JobState | None
    """``cancelled``, or what it is until all its nodes are given back; null where there is a problem."""
    problem: Problem | None


class CancelledJobs(Output):
    jobs: list[CancelledJob]
    """Each job once, in the order that they were given in."""


class ChangedJob(CancelledJob):
    """What became of one job: how it is now, or what stood against it."""

    priority: Priority | None
    """Null where there is a problem."""


class ChangedJobs(Output):
    jobs: list[ChangedJob]
    """Each job once, in the order that they were given in."""


def _add_actions(router: APIRouter, service: Jobs) -> None:
    acted = problem_responses(409)
    bulk = service.bulk

    @router.post("/cancel", response_model=CancelledJobs)
    async def cancel_jobs(order: CancelOrder, caller: Caller) -> Any:
        """End many jobs at once, each by itself: one that cannot be ended keeps no other from it.

        One that is cancelled already is told as such, so that the same request may be sent again.
        """
        done = await bulk.cancel(order.jobs, caller, order.reason, warn=order.warn)
        return {"jobs": [_cancelled(each) for each in done]}

    @router.post("/hold", response_model=ChangedJobs)
    async def hold_jobs(order: HoldOrder, caller: Caller) -> Any:
        """Keep many queued jobs from being placed, each by itself; one that is held already is told as such."""
        return {"jobs": [_changed(done) for done in await bulk.hold(order.jobs, caller, order.reason)]}

    @router.post("/release", response_model=ChangedJobs)
    async def release_jobs(order: ReleaseOrder, caller: Caller) -> Any:
        """Let many held jobs be placed again, each by itself; one that is queued is told as such."""
        return {"jobs": [_changed(done) for done in await bulk.release(order.jobs, caller)]}

    @router.post("/priority", response_model=ChangedJobs)
    async def set_priority(order: PriorityOrder, caller: Caller) -> Any:
        """Give many jobs that wait another priority, each by itself. Each keeps its place by when it came: in the other
        queue it stands where it would had it been submitted so."""
        done = await bulk.set_priority(order.jobs, order.priority, caller, order.reason)
        return {"jobs": [_changed(each) for each in done]}

    @router.post("/{job}/cancel", response_model=JobView, responses=acted)
    async def cancel_job(job: Id, caller: Caller, why: CancelReason | None = None) -> Any:
        """End a job, at once or with a warning; it is ``cancelled`` when all its nodes are given back."""
        given = why or CancelReason()
        return job_view(await service.cancel(job, caller, given.reason, warn=given.warn))

    @router.post("/{job}/hold", response_model=JobView, responses=acted)
    async def hold_job(job: Id, caller: Caller, why: ActionReason | None = None) -> Any:
        """Keep a queued job from being placed."""
        return job_view(await service.hold(job, caller, why.reason if why else ""))

    @router.post("/{job}/release", response_model=JobView, responses=acted)
    async def release_job(job: Id, caller: Caller) -> Any:
        """Let a held job be placed again."""
        return job_view(await service.release(job, caller))


def _cancelled(done: ActionResult) -> dict[str, Any]:
    state = done.record.job.state if done.record else None
    return {"job": done.job, "state": state, "problem": describe_error(done.error) if done.error else None}


def _changed(done: ActionResult) -> dict[str, Any]:
    return _cancelled(done) | {"priority": done.record.job.spec.priority if done.record else None}


LastVersion = Annotated[
    fields.Text, Header(alias="Last-Event-ID", max_length=100, description="the last event that was seen")
]
LastId = Annotated[int, Header(alias="Last-Event-ID", ge=0, description="the last event that was seen")]


class GridChange(Output):
    """What kinds of things have changed since the event before; what has become of them is to be looked at."""

    topics: list[Topic]
    """Empty where nothing has: for what only ages."""


def _add_events(router: APIRouter, service: Jobs) -> None:
    async def changes(job: Id, last: LastId = 0) -> AsyncIterator[JobChange]:
        """Of a job that there is: a stream that has begun cannot be refused any more."""
        await service.get(job)
        return service.follow(job, last)

    @router.get(
        "/{job}/events",
        response_class=EventSourceResponse,
        responses={200: {"description": "events `timeline` and `job`"}},
    )
    async def follow_job(
        changes: Annotated[AsyncIterator[JobChange], Depends(changes)],
    ) -> AsyncIterator[ServerSentEvent]:
        """A job's timeline, and the job itself whenever it changes, also by files that arrive, until it is over.

        An event `timeline` has a line of the timeline and its number as `id`, with which to go on after a break
        (`Last-Event-ID`); an event `job` is the job as it is then.
        """
        try:
            async for change in changes:
                for number, entry in change.timeline:
                    yield ServerSentEvent(
                        event="timeline", data=as_json(TimelineView.model_validate(entry)), id=str(number)
                    )
                yield ServerSentEvent(event="job", data=as_json(job_view(change.record)))
        except (StoreUnavailable, NotFoundError):
            return  # Who follows a job that is not over comes again, and goes on where this ended; or it is gone.


def changes_router(changes: Changes) -> APIRouter:
    router = api_router("clusters", "/events")

    @router.get("", response_class=EventSourceResponse, responses={200: {"description": "events `changed`"}})
    async def follow_grid(last: LastVersion = "") -> AsyncIterator[ServerSentEvent]:
        """An event `changed` whenever jobs or clusters have, at most once a second, and every ten seconds at least.

        The first comes at once, but for who goes on after a break (`Last-Event-ID`) in which nothing changed. What
        changes all the time is told of more seldom while looking at it costs much.
        """
        if not last:
            yield _grid_change(frozenset(TOPICS), changes.version)
        async for topics in changes.follow(last):
            yield _grid_change(topics, changes.version)

    return router


def _grid_change(topics: frozenset[Topic], version: str) -> ServerSentEvent:
    return ServerSentEvent(event="changed", data=as_json(GridChange(topics=sorted(topics))), id=version)
