"""The routes of jobs: submit, read, follow, cancel, hold, release and prioritize them."""

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import Field

from koalapy.api import fields
from koalapy.api.access import Caller, Id
from koalapy.api.fields import Input, Output, Problem, as_json
from koalapy.api.job_changes import JobPatch
from koalapy.api.job_output import add_output
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
from koalapy.api.routes import api_router, ignore_disconnect, render_json_list
from koalapy.daemon.jobs.changes import TOPICS, Changes, Topic
from koalapy.daemon.jobs.job_records import ActionResult, JobChange, JobRecord, no_job_error
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.model.errors import ForbiddenError, NotFoundError, StoreUnavailable, reject
from koalapy.model.identity import Identity, Role
from koalapy.model.job import FINAL_STATES, JobId, JobState
from koalapy.model.job_search import JobSort
from koalapy.model.job_spec import Priority
from koalapy.model.times import PAST_TIME_EXAMPLES
from koalapy.store.records import JobFilter
from koalapy.validation.permissions import may_see_all_of

MAX_WAIT_S = 60.0

Key = Annotated[fields.Text | None, Header(alias="Idempotency-Key", max_length=200, min_length=1)]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="seconds to wait for the end of the job")]
Last = Annotated[int | None, Query(ge=1, lt=2**31, description="maximum number of attempts, newest first")]
LOCATION = {"Location": {"description": "path of the job", "schema": {"type": "string"}}}


MAX_JOBS = 1000
"""Maximum number of jobs in one batch or bulk action."""
MAX_IDS = 500
"""Maximum number of ids that a list selects."""


class JobQuery(fields.JobSelection):
    """The jobs to list, and their order."""

    state: list[JobState] = Field([], description="only jobs in one of these states")
    active: bool = False
    home_site: fields.Text = Field("", max_length=100, description="only jobs of this home site")
    array: int | None = Field(
        None, ge=1, le=fields.MAX_ID, description="only tasks of this array; other lists have no tasks"
    )
    ids: list[Annotated[int, Field(ge=1, le=fields.MAX_ID)]] = Field(
        [], max_length=MAX_IDS, description="only these jobs and started tasks, newest first"
    )
    since: fields.PastTime = Field("", description=f"only jobs submitted at or after this time: {PAST_TIME_EXAMPLES}")
    until: fields.PastTime = Field("", description="only jobs submitted before this time")
    sort: JobSort = Field(
        JobSort.NEWEST, description="order; queue: running jobs, then waiting jobs by their positions"
    )
    before: int | None = Field(None, ge=1, le=fields.MAX_ID, description="only jobs with smaller ids")
    offset: int = Field(0, ge=0, le=2**31, description="number of jobs to omit, for orders other than newest; see next")
    count: bool = Field(False, description="also return the number of matching jobs, unless ids are given")


class JobBatch(Input):
    """Jobs to submit together."""

    jobs: Annotated[list[JobSubmission], Field(min_length=1, max_length=MAX_JOBS)]


class SubmittedJobs(Output):
    """The ids of submitted jobs, in the order of the request."""

    jobs: list[int]


MAX_STATES = 10_000
"""Maximum number of jobs in one request for states."""


class StatesOrder(Input):
    """The jobs whose states to return."""

    jobs: Annotated[list[fields.JobId], Field(min_length=1, max_length=MAX_STATES)]


def jobs_router(service: Jobs, clock: Callable[[], float] = time.time) -> APIRouter:
    """Return the routes that submit, list, show, follow and change jobs."""
    router = api_router("jobs", "/jobs")

    @router.post(
        "",
        status_code=201,
        response_model=JobView,
        responses={
            200: {"model": JobView, "description": "the job that this Idempotency-Key created before"},
            201: {"description": "the new job", "headers": LOCATION},
            **problem_responses(409),
        },
    )
    async def submit_job(submission: JobSubmission, caller: Caller, idempotency_key: Key = None) -> Response:
        """Submit a job as the caller; operators may set another ``owner``. A submission that repeats the caller's
        Idempotency-Key returns the first job."""
        return submission_response(*await service.submit(submission.to_model(), caller, idempotency_key))

    @router.post(
        ":batch",
        status_code=201,
        response_model=SubmittedJobs,
        responses={
            200: {"model": SubmittedJobs, "description": "the jobs that this Idempotency-Key created before"},
            201: {"description": "the new jobs"},
            **problem_responses(409),
        },
    )
    async def submit_jobs(batch: JobBatch, caller: Caller, idempotency_key: Key = None) -> Response:
        """Submit up to 1,000 jobs in one transaction: all of them or none. An error names the job, such as
        `jobs[3].command`. In `after`, `#0` is the first job of the batch; only earlier ones may be named. A batch that
        repeats the caller's Idempotency-Key returns the first jobs."""
        specs = [submission.to_model() for submission in batch.jobs]
        numbers, created = await service.submissions.submit(specs, caller, idempotency_key)
        return JSONResponse({"jobs": list(numbers)}, 201 if created else 200)

    _add_list(router, service, clock)
    _add_views(router, service)
    add_output(router, service)
    _add_actions(router, service)
    _add_events(router, service)
    return router


def _add_list(router: APIRouter, service: Jobs, clock: Callable[[], float]) -> None:
    """Add the route that lists jobs."""

    @router.get("", response_model=JobPage)
    async def list_jobs(caller: Caller, query: Annotated[JobQuery, Query()]) -> Any:
        """List jobs, newest first, without their commands. ``active`` selects all states that are not final.

        Other orders need ``active`` or states that are not final. Users see only size, clusters and times of other
        users' jobs (``redacted``). A filter by name finds only their own jobs. An array is one job here; ``array``
        lists its started tasks.
        """
        owner = _visible_owner(caller, query.choose_owner(caller.user), query.name)
        states = set(query.state) | (set(JobState) - FINAL_STATES if query.active else set())
        since, until = fields.parse_span(query, clock())
        job_filter = JobFilter(
            tuple(sorted(map(str, states))),
            owner,
            query.name,
            query.cluster,
            query.home_site,
            query.before,
            query.limit,
            array=query.array,
            ids=tuple(query.ids) or None,
            since=since,
            until=until,
        )
        total: int | None = None
        is_whole, position = True, None
        if query.sort is JobSort.NEWEST or query.ids:
            records, cursor = await service.list_page(job_filter)
            position = cursor and {"before": cursor}
            if query.count and not query.ids:
                total, is_whole = await service.count(replace(job_filter, before=None))
        else:
            _check_unfinished(states, query.sort)
            records, total = await service.list_unfinished(job_filter, query.sort, query.offset)
            position = {"offset": query.offset + query.limit} if query.offset + query.limit < total else None
        next_page = position and fields.next_path(
            "/api/v1/jobs", query, owner=owner, mine=False, count=False, since=since, until=until, **position
        )
        texts = (summary_for(caller, record).model_dump_json(by_alias=True) for record in records)
        return await render_json_list("jobs", texts, {"next": next_page, "count": total, "count_is_whole": is_whole})


def _check_unfinished(states: set[JobState], sort: JobSort) -> None:
    """Raise ``UsageError`` if ended jobs are to be listed in an order that only unfinished jobs have."""
    if not states or any(state.is_final for state in states):
        hint = "set active=true, or list ended jobs with /api/v1/history"
        reject("sort", str(sort), f"is {sort}, which is an order of unfinished jobs only", hint)


def submission_response(record: JobRecord, created: bool) -> Response:
    """Return the response to a submission: the job, which may be an earlier one with the same key."""
    headers = {"Location": f"/api/v1/jobs/{record.job.id}"}
    body = job_view(record).model_dump_json(by_alias=True)
    return Response(body, 201 if created else 200, headers, "application/json")


def _add_views(router: APIRouter, service: Jobs) -> None:
    """Add the routes that show a job, its timeline and its attempts."""

    @router.get("/{job}", response_model=JobWithTimeline)
    async def show_job(job: Id, caller: Caller, wait: Wait = 0.0) -> Any:
        """Show a job with its timeline; with ``wait``, as soon as it has ended or the time is over. Users see only
        size, clusters and times of other users' jobs (``redacted``)."""
        record = await (service.wait_until_final(job, wait) if wait else service.get(job))
        if not may_see_all_of(caller, record.job):
            return job_with_timeline(record, None)
        return job_with_timeline(record, await service.read_timeline(job), await service.list_related(record.job))

    @router.get("/{job}/timeline", response_model=Timeline)
    async def show_timeline(job: Id) -> Any:
        """List the events of a job, in order."""
        await service.get(job)
        return {"timeline": await service.read_timeline(job)}

    @router.get("/{job}/attempts", response_model=AttemptList)
    async def list_attempts(job: Id, last: Last = None) -> Any:
        """List the attempts to run a job, or the ``last`` ones, with the times of their components."""
        record, attempts = await service.list_attempts(job, last)
        return {"attempts": [attempt_view(record.job, attempt) for attempt in attempts]}


def _visible_owner(caller: Identity, owner: str, name: str) -> str:
    """Return the owner of the jobs to list, empty for all. Users may not search other users' jobs by name."""
    if caller.has_role(Role.OPERATOR):
        return owner
    if owner not in ("", caller.user):
        raise ForbiddenError(
            f"only operators may list the jobs of {owner}",
            field="owner",
            value=owner,
            hint="leave owner out to list all jobs, or set mine to list your own",
        )
    return caller.user if name else owner


JobIds = Annotated[list[fields.JobId], Field(min_length=1, max_length=MAX_JOBS)]


class ActionReason(Input):
    """The reason for an action on a job, which its owner sees."""

    reason: fields.Reason = ""
    """Required to cancel or hold the job of another user."""


class CancelReason(ActionReason):
    """The reason for a cancellation, and whether the program gets its warning first."""

    warn: bool = False


class CancelTasks(CancelReason):
    """The reason for a cancellation, and the tasks of an array that it concerns."""

    tasks: fields.Indices | None = None
    """Indices and ranges, such as ``3-9``; by default the whole job."""


class CancelOrder(CancelReason):
    """The jobs to cancel, with the reason."""

    jobs: JobIds


class HoldOrder(ActionReason):
    """The jobs to hold, with the reason."""

    jobs: JobIds


class ReleaseOrder(Input):
    """The held jobs to release."""

    jobs: JobIds


class PriorityOrder(ActionReason):
    """The jobs whose priority to change, with the reason."""

    jobs: JobIds
    priority: Priority


class CancelledJob(Output):
    """The result of an action for one job: its current state, or a problem."""

    job: int
    state: JobState | None
    """``cancelled``, or another state until all its nodes are returned; null if there is a problem."""
    problem: Problem | None


class CancelledJobs(Output):
    jobs: list[CancelledJob]
    """Each job once, in the order of the request."""


class ChangedJob(CancelledJob):
    """The result of an action for one job: its current state and priority, or a problem."""

    priority: Priority | None
    """Null if there is a problem."""


class ChangedJobs(Output):
    jobs: list[ChangedJob]
    """Each job once, in the order of the request."""


def _add_actions(router: APIRouter, service: Jobs) -> None:
    """Add the routes that cancel, hold and release jobs and change their priority, one or many at a time."""
    conflict = problem_responses(409)
    bulk = service.bulk

    @router.post("/cancel", response_model=CancelledJobs)
    async def cancel_jobs(order: CancelOrder, caller: Caller) -> Any:
        """Cancel many jobs, each independently of the others.

        A job that is cancelled already counts as a success, so that the request may be repeated.
        """
        results = await bulk.cancel_jobs(order.jobs, caller, order.reason, warn=order.warn)
        return {"jobs": [changed_job(result) for result in results]}

    @router.post("/hold", response_model=ChangedJobs)
    async def hold_jobs(order: HoldOrder, caller: Caller) -> Any:
        """Hold many queued jobs, each independently of the others. A job that is held already counts as a success."""
        return {"jobs": [changed_job(result) for result in await bulk.hold_jobs(order.jobs, caller, order.reason)]}

    @router.post("/release", response_model=ChangedJobs)
    async def release_jobs(order: ReleaseOrder, caller: Caller) -> Any:
        """Release many held jobs, each independently of the others. A job that is queued already counts as a
        success."""
        return {"jobs": [changed_job(result) for result in await bulk.release_jobs(order.jobs, caller)]}

    @router.post("/priority", response_model=ChangedJobs)
    async def set_priority(order: PriorityOrder, caller: Caller) -> Any:
        """Change the priority of many waiting jobs, each independently of the others. A job takes the position in its
        new queue that its submission time gives it."""
        results = await bulk.set_priority(order.jobs, order.priority, caller, order.reason)
        return {"jobs": [changed_job(result) for result in results]}

    @router.post("/states", response_model=ChangedJobs)
    async def list_states(order: StatesOrder) -> Any:
        """Return the current states of up to 10,000 jobs and tasks of arrays, in the form of results of actions."""
        jobs = await service.get_many(order.jobs)

        def render_state(ident: JobId) -> str:
            record = JobRecord(jobs[ident], "") if ident in jobs else None
            return changed_job(ActionResult(ident, record, None if record else no_job_error(ident))).model_dump_json()

        return await render_json_list("jobs", map(render_state, dict.fromkeys(order.jobs)), {})

    @router.patch("/{job}", response_model=JobView, responses=conflict)
    async def change_job(job: Id, change: JobPatch, caller: Caller) -> Any:
        """Change the request, the policy or the priority of a waiting job, which is then tried at once.

        It keeps its number, its submission time and the jobs that wait for it. Of an array, the tasks that were not
        started change. The body is checked like a submission, and answers 409 once the job is placed.
        """
        return job_view(await service.change(job, caller, change.apply_to, change.reason))

    @router.post("/{job}/cancel", response_model=JobView, responses=conflict)
    async def cancel_job(job: Id, caller: Caller, order: CancelTasks | None = None) -> Any:
        """Cancel a job, or some tasks of an array, at once or with a warning; its state is ``cancelled`` when all its
        nodes are returned."""
        order = order or CancelTasks()
        tasks: Any = order.tasks
        return job_view(await service.cancel(job, caller, order.reason, warn=order.warn, tasks=tasks))

    @router.post("/{job}/hold", response_model=JobView, responses=conflict)
    async def hold_job(job: Id, caller: Caller, order: ActionReason | None = None) -> Any:
        """Hold a queued job, so that it is not placed."""
        return job_view(await service.hold(job, caller, order.reason if order else ""))

    @router.post("/{job}/release", response_model=JobView, responses=conflict)
    async def release_job(job: Id, caller: Caller) -> Any:
        """Release a held job, so that it may be placed."""
        return job_view(await service.release(job, caller))


def changed_job(result: ActionResult) -> ChangedJob:
    """Return the result of an action on one of many jobs."""
    job = result.record.job if result.record else None
    problem = Problem(**describe_error(result.error)) if result.error else None
    return ChangedJob(job=result.job, state=job and job.state, problem=problem, priority=job and job.spec.priority)


LastVersion = Annotated[
    fields.Text, Header(alias="Last-Event-ID", max_length=100, description="id of the last received event")
]
LastId = Annotated[int, Header(alias="Last-Event-ID", ge=0, description="id of the last received event")]


class GridChange(Output):
    """The topics that have changed since the last event; clients then read what they need."""

    topics: list[Topic]
    """Empty if nothing has changed: clients then only update ages."""


def _add_events(router: APIRouter, service: Jobs) -> None:
    """Add the route that streams the changes of a job."""

    async def changes(job: Id, last: LastId = 0) -> AsyncIterator[JobChange]:
        """Return the changes of a job; raise ``NotFoundError`` here, before the response begins."""
        await service.get(job)
        return service.follow_job(job, last)

    @router.get(
        "/{job}/events",
        response_class=EventSourceResponse,
        dependencies=[Depends(ignore_disconnect)],
        responses={200: {"description": "events `timeline` and `job`"}},
    )
    async def follow_job(
        changes: Annotated[AsyncIterator[JobChange], Depends(changes)],
    ) -> AsyncIterator[ServerSentEvent]:
        """Stream a job's timeline and every change of the job, until it ends.

        An event `timeline` contains an entry of the timeline; its `id` resumes an interrupted stream
        (`Last-Event-ID`). An event `job` contains the current job, without the lines of an array.
        """
        try:
            async for change in changes:
                for number, entry in change.timeline:
                    yield ServerSentEvent(
                        event="timeline", data=as_json(TimelineView.model_validate(entry)), id=str(number)
                    )
                yield ServerSentEvent(event="job", data=as_json(job_view(change.record)) | {"each_line": []})
        except (StoreUnavailable, NotFoundError):
            return  # The job was deleted, or the client reconnects and resumes.


def changes_router(changes: Changes) -> APIRouter:
    """Return the route that streams an event whenever jobs or clusters change."""
    router = api_router("clusters", "/events")

    @router.get(
        "",
        response_class=EventSourceResponse,
        dependencies=[Depends(ignore_disconnect)],
        responses={200: {"description": "events `changed`"}},
    )
    async def follow_grid(last: LastVersion = "") -> AsyncIterator[ServerSentEvent]:
        """Stream an event `changed` when jobs or clusters change: at most once a second, at least every ten seconds.

        The first event comes at once, unless the client resumes a stream (`Last-Event-ID`) and nothing has changed.
        """
        if not last:
            yield _grid_change(frozenset(TOPICS), changes.version)
        async for topics in changes.follow_changes(last):
            yield _grid_change(topics, changes.version)

    return router


def _grid_change(topics: frozenset[Topic], version: str) -> ServerSentEvent:
    return ServerSentEvent(event="changed", data=as_json(GridChange(topics=sorted(topics))), id=version)
