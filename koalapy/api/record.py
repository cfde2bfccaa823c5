"""The route of the record: all that the scheduler was told, to be replayed."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from koalapy.api.problems import declared
from koalapy.api.routes import api_router
from koalapy.daemon.jobs.record import Record
from koalapy.model.errors import NotFoundError, ProblemCode
from koalapy.model.job import MAX_DURATION

LINES = "application/x-ndjson"
Since = Annotated[
    float,
    Query(
        gt=0, le=MAX_DURATION, allow_inf_nan=False, description="daemons that lived within so many seconds until now"
    ),
]
Until = Annotated[
    float, Query(ge=0, le=MAX_DURATION, allow_inf_nan=False, description="up to so many seconds before now")
]


def record_router(record: Record | None, clock: Callable[[], float]) -> APIRouter:
    """For operators; None where nothing is recorded."""
    router = api_router("record", "/record")

    @router.get(
        "",
        response_class=StreamingResponse,
        responses={
            200: {"content": {LINES: {"schema": {"type": "string"}}}, "description": "lines of JSON"},
            **declared(404),
        },
    )
    async def export_record(since: Since = 86400.0, until: Until = 0.0) -> Any:
        """What the scheduler was told and did, for `koala replay`: each daemon's life from its beginning.

        Commands of jobs are in it, and who has which accounts; variables of programs are not.
        """
        if record is None:
            raise NotFoundError(
                "nothing is recorded here",
                field="record.enabled",
                hint="set record.enabled: true",
                code=ProblemCode.RECORD_DISABLED,
            )
        now = clock()
        return StreamingResponse(await record.export(now - since, now - until), media_type=LINES)

    return router
