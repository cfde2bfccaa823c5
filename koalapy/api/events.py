"""What happens to a job as it happens, and that anything in the grid has changed: server-sent events."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header
from fastapi.sse import EventSourceResponse, ServerSentEvent

from koalapy.api import fields
from koalapy.api.access import Id
from koalapy.api.fields import Output, as_json
from koalapy.api.jobs import TimelineView, job_view
from koalapy.api.routes import api_router
from koalapy.daemon.jobs.changes import TOPICS, Changes, Topic
from koalapy.daemon.jobs.jobs import JobChange, Jobs
from koalapy.model.errors import NotFoundError, StoreUnavailable

LastVersion = Annotated[
    fields.Text, Header(alias="Last-Event-ID", max_length=100, description="the last event that was seen")
]
LastId = Annotated[int, Header(alias="Last-Event-ID", ge=0, description="the last event that was seen")]


class GridChange(Output):
    """What kinds of things have changed since the event before; what has become of them is to be looked at."""

    topics: list[Topic]
    """Empty where nothing has: for what only ages."""


def events_router(service: Jobs) -> APIRouter:
    """Streams, for those who do not want to ask again and again."""
    router = api_router("jobs", "/jobs")

    async def changes(job: Id, last: LastId = 0) -> AsyncIterator[JobChange]:
        """Of a job that there is: a stream that has begun cannot be refused any more."""
        await service.get(job)
        return service.changes(job, last)

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

    return router


def changes_router(changes: Changes) -> APIRouter:
    """The stream of the whole grid, for those who show how things stand."""
    router = api_router("clusters", "/events")

    @router.get("", response_class=EventSourceResponse, responses={200: {"description": "events `changed`"}})
    async def follow_grid(last: LastVersion = "") -> AsyncIterator[ServerSentEvent]:
        """An event `changed` whenever jobs or clusters have, at most once a second, and every ten seconds at least.

        The first comes at once, but for who goes on after a break (`Last-Event-ID`) in which nothing changed. What
        changes all the time is told of more seldom while looking at it costs much.
        """
        if not last:
            yield _changed(frozenset(TOPICS), changes.version)
        async for topics in changes.follow(last):
            yield _changed(topics, changes.version)

    return router


def _changed(topics: frozenset[Topic], version: str) -> ServerSentEvent:
    return ServerSentEvent(event="changed", data=as_json(GridChange(topics=sorted(topics))), id=version)
