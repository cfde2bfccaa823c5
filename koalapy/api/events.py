"""What happens to a job as it happens: server-sent events."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header
from fastapi.sse import EventSourceResponse, ServerSentEvent

from koalapy.api.access import Id
from koalapy.api.fields import as_json
from koalapy.api.jobs import TimelineView, job_view
from koalapy.api.problems import declared
from koalapy.api.queries import refuse_unknown
from koalapy.model.errors import NotFoundError, StoreUnavailable
from koalapy.service.jobs import JobChange, Jobs

LastId = Annotated[int, Header(alias="Last-Event-ID", ge=0, description="the last event that was seen")]


def events_router(service: Jobs) -> APIRouter:
    """Streams, for those who do not want to ask again and again."""
    router = APIRouter(prefix="/jobs", tags=["jobs"], dependencies=[Depends(refuse_unknown)])

    async def changes(job: Id, last: LastId = 0) -> AsyncIterator[JobChange]:
        """Of a job that there is: a stream that has begun cannot be refused any more."""
        await service.get(job)
        return service.changes(job, last)

    @router.get(
        "/{job}/events",
        operation_id="follow_job",
        response_class=EventSourceResponse,
        responses={200: {"description": "events `timeline` and `job`"}, **declared(401, 404, 422, 503)},
    )
    async def follow(changes: Annotated[AsyncIterator[JobChange], Depends(changes)]) -> AsyncIterator[ServerSentEvent]:
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
