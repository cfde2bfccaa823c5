"""The routes that act on jobs: on one, or on many at once."""

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from koalapy.api import fields
from koalapy.api.access import Caller, Id
from koalapy.api.fields import Input, Output, Problem
from koalapy.api.jobs import JobView, job_view
from koalapy.api.problems import declared, problem_of
from koalapy.api.routes import api_router
from koalapy.daemon.jobs.bulk_actions import ActionResult
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.model.job import JobState, Priority

MAX_JOBS = 1000
"""Jobs that may be acted on at once."""
Chosen = Annotated[list[fields.JobId], Field(min_length=1, max_length=MAX_JOBS)]


class Why(Input):
    """Why somebody acts on a job."""

    reason: fields.Reason = ""


class CancelWhy(Why):
    """Why a job is to end, and whether its program has the grace before that which it asked for."""

    warn: bool = False


class CancelOrder(CancelWhy):
    """Which jobs are to end, and why."""

    jobs: Chosen


class HoldOrder(Why):
    """Which jobs are not to be placed for now, and why."""

    jobs: Chosen


class ReleaseOrder(Input):
    """Which jobs may be placed again."""

    jobs: Chosen


class PriorityOrder(Why):
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


def job_actions_router(service: Jobs) -> APIRouter:
    """Act on one job, or on many at once."""
    router = api_router("jobs", "/jobs")
    acted = declared(409)
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
    async def cancel_job(job: Id, caller: Caller, why: CancelWhy | None = None) -> Any:
        """End a job, at once or with a warning; it is ``cancelled`` when all its nodes are given back."""
        given = why or CancelWhy()
        return job_view(await service.cancel(job, caller, given.reason, warn=given.warn))

    @router.post("/{job}/hold", response_model=JobView, responses=acted)
    async def hold_job(job: Id, caller: Caller, why: Why | None = None) -> Any:
        """Keep a queued job from being placed."""
        return job_view(await service.hold(job, caller, why.reason if why else ""))

    @router.post("/{job}/release", response_model=JobView, responses=acted)
    async def release_job(job: Id, caller: Caller) -> Any:
        """Let a held job be placed again."""
        return job_view(await service.release(job, caller))

    return router


def _cancelled(done: ActionResult) -> dict[str, Any]:
    state = done.record.job.state if done.record else None
    return {"job": done.job, "state": state, "problem": problem_of(done.error) if done.error else None}


def _changed(done: ActionResult) -> dict[str, Any]:
    return _cancelled(done) | {"priority": done.record.job.spec.priority if done.record else None}
