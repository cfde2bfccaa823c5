"""What happens to a job as it happens: server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header
from fastapi.responses import StreamingResponse

from koalapy.api.conversion import job_view, timeline_view
from koalapy.api.jobs import Id
from koalapy.api.problems import declared
from koalapy.api.queries import refuse_unknown
from koalapy.model.errors import NotFoundError, StoreUnavailable
from koalapy.service.jobs import JobChange, Jobs

EVENTS = "text/event-stream"
STILL_HERE = 15.0
"""Seconds of silence after which a comment tells that the connection stands."""
LastId = Annotated[int, Header(alias="Last-Event-ID", ge=0, description="the last event that was seen")]


def events_router(service: Jobs) -> APIRouter:
    """Streams, for those who do not want to ask again and again."""
    router = APIRouter(prefix="/jobs", tags=["jobs"], dependencies=[Depends(refuse_unknown)])

    @router.get(
        "/{job}/events",
        operation_id="follow_job",
        response_class=StreamingResponse,
        responses={
            200: {"content": {EVENTS: {}}, "description": "events `timeline` and `job`"},
            **declared(401, 404, 422, 503),
        },
    )
    async def follow(job: Id, last: LastId = 0) -> StreamingResponse:
        """A job's timeline, and the job itself whenever it changes, also by files that arrive, until it is over.

        An event `timeline` has a line of the timeline and its number as `id`, with which to go on after a break
        (`Last-Event-ID`); an event `job` is the job as it is then.
        """
        await service.get(job)
        return StreamingResponse(_stream(service.changes(job, last)), media_type=EVENTS)

    return router


async def _stream(changes: AsyncIterator[JobChange]) -> AsyncIterator[str]:
    """The changes, and comments while there are none."""
    following: asyncio.Future[JobChange] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(anext(changes))
            done, _ = await asyncio.wait({following}, timeout=STILL_HERE)
            if not done:
                yield ": still here\n\n"
                continue
            try:
                change = following.result()
            except (StopAsyncIteration, StoreUnavailable, NotFoundError):
                return  # Who follows a job that is not over comes again, and goes on where this ended; or it is gone.
            following = None
            for number, entry in change.timeline:
                yield _event("timeline", timeline_view(entry), number)
            yield _event("job", job_view(change.record))
    finally:
        if following is not None:
            following.cancel()


def _event(kind: str, data: Any, ident: int | None = None) -> str:
    name = "" if ident is None else f"id: {ident}\n"
    return f"{name}event: {kind}\ndata: {json.dumps(data)}\n\n"
