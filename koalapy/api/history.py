"""The routes of history: what has become of jobs, who gains by sharing, and the record of the scheduler."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import date
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter

from koalapy.api import fields as of_api
from koalapy.api.access import Caller
from koalapy.api.fields import Output, Timestamp
from koalapy.api.problems import problem_responses
from koalapy.api.routes import api_router, cancel_on_disconnect, render_json_list, text_of
from koalapy.daemon.forecast.sharing import Sharing
from koalapy.daemon.jobs.history import History, HistoryLine
from koalapy.daemon.jobs.record import Record
from koalapy.model.errors import ForbiddenError, NotFoundError, ProblemCode
from koalapy.model.history import Kind, Step
from koalapy.model.identity import Identity, Role
from koalapy.model.job import MAX_DURATION
from koalapy.simulation.sharing import LeftOut, SiteShare, Verdict


class Format(StrEnum):
    """``csv`` tells the lines of JSON, ``swf`` the jobs themselves."""

    JSON = "json"
    CSV = "csv"
    SWF = "swf"


By = Annotated[Kind, Query(description="of what: the whole grid, or each cluster, user, policy, priority or home site")]
Steps = Annotated[Step, Query(description="a line for each day, for each week from Monday on, or for all of it")]
First = Annotated[date | None, Query(description="the first day, as 2026-11-01; if left out, 29 days before the last")]
Last = Annotated[date | None, Query(description="the last day; if left out, today (UTC)")]
Named = Annotated[of_api.Name, Query(description="only this cluster, user, policy, priority or home site")]
As = Annotated[Format, Query(description="csv: the same lines; swf: the jobs that ended, as a trace")]


_LINE = TypeAdapter(HistoryLine)


class HistoryView(Output):
    by: Kind
    step: Step
    first: date
    last: date
    since: date | None
    """The first day of which anything is known. Days are kept for good."""
    jobs_keep: float | None
    """Seconds for which jobs themselves are kept after their end; null: for good."""
    lines: list[HistoryLine]
    """In order of days and names; none of days without jobs."""


def history_router(service: History) -> APIRouter:
    router = api_router("history", "/history")

    @router.get(
        "",
        response_model=HistoryView,
        responses={200: {"model": HistoryView, "content": {"text/csv": {}, "text/plain": {}}}},
    )
    async def show_history(
        caller: Caller,
        by: By = Kind.GRID,
        step: Steps = Step.DAY,
        first: First = None,
        last: Last = None,
        name: Named = "",
        format: As = Format.JSON,
    ) -> Any:
        """How clusters were used, how long jobs waited and ran, and what became of them, by days or weeks. Others than
        operators see no other users, and their own jobs only by name."""
        span = service.span(first, last)
        if format is Format.SWF:
            user = None if caller.has_role(Role.OPERATOR) else caller.user
            return StreamingResponse(service.trace(span, user), media_type="text/plain; charset=utf-8")
        table = await service.table(by, step, span, visible_to(caller, by, name))
        if format is Format.CSV:
            return await text_of(as_csv, table.lines, "text/csv; charset=utf-8")
        rest = {"by": by, "step": step, "first": span.first.isoformat(), "last": span.last.isoformat()}
        since = table.since.isoformat() if table.since else None
        lines = (_LINE.dump_json(line).decode() for line in table.lines)
        return await render_json_list("lines", lines, rest | {"since": since, "jobs_keep": table.jobs_keep})

    return router


def visible_to(caller: Identity, by: Kind, name: str) -> str | None:
    """Of whom or what somebody is told; None for all. ``ForbiddenError`` for other users."""
    if by is not Kind.USER or caller.has_role(Role.OPERATOR):
        return name or None
    if name not in ("", caller.user):
        raise ForbiddenError(
            f"name is {name}, and you are {caller.user}",
            field="name",
            value=name,
            hint="ask for your own, by leaving it out; operators are told of everybody's",
        )
    return caller.user


def as_csv(lines: Sequence[HistoryLine]) -> str:
    """With a line of names."""
    names = [each.name for each in fields(HistoryLine)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_cell(getattr(line, name)) for name in names] for line in lines)
    return text.getvalue()


def _cell(value: object) -> object:
    """What spreadsheets would take for a formula is none."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


class SharingView(Output):
    first: date
    last: date
    start: Timestamp
    end: Timestamp
    every_site: Verdict
    """``better`` where no site is worse off and one is better; ``unclear`` where that cannot be told of all."""
    sites: list[SiteShare]
    left_out: list[LeftOut]


def sharing_router(service: Sharing, history: History) -> APIRouter:
    router = api_router("history", "/sharing")

    @router.get("", response_model=SharingView)
    async def show_sharing(request: Request, first: First = None, last: Last = None) -> Any:
        """Whether every site is better off for taking part: the response times of its own users' jobs as they were, and
        as they would have been on that site by itself, which is simulated. Of jobs that were submitted in these days
        and are over; it takes some seconds."""
        span = history.span(first, last)
        report = await cancel_on_disconnect(request, service.report(span))
        told = {name: getattr(report, name) for name in ("start", "end", "every_site", "sites", "left_out")}
        return SharingView.model_validate({"first": span.first, "last": span.last, **told})

    return router


LINES = "application/x-ndjson"
RecordSince = Annotated[
    float,
    Query(
        gt=0, le=MAX_DURATION, allow_inf_nan=False, description="daemons that lived within so many seconds until now"
    ),
]
RecordUntil = Annotated[
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
            **problem_responses(404),
        },
    )
    async def export_record(since: RecordSince = 86400.0, until: RecordUntil = 0.0) -> Any:
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
