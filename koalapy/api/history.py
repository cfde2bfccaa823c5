"""The routes of history: outcomes of jobs by day, gains of sites by load sharing, and the scheduler's recording."""

import csv
import io
from asyncio import to_thread
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import date
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter

from koalapy.api import fields as of_api
from koalapy.api.access import Caller
from koalapy.api.fields import Output, Timestamp
from koalapy.api.problems import problem_responses
from koalapy.api.routes import api_router, cancel_on_disconnect, render_json_list
from koalapy.daemon.forecast.sharing import Sharing
from koalapy.daemon.jobs.history import History, HistoryLine
from koalapy.daemon.jobs.record import Record
from koalapy.model.errors import ForbiddenError, NotFoundError, ProblemCode
from koalapy.model.history import Kind, Step
from koalapy.model.identity import Identity, Role
from koalapy.model.job import MAX_DURATION
from koalapy.simulation.sharing import Exclusion, SiteShare, Verdict


class Format(StrEnum):
    """``json`` and ``csv`` contain the same lines; ``swf`` contains the jobs themselves."""

    JSON = "json"
    CSV = "csv"
    SWF = "swf"


By = Annotated[Kind, Query(description="group by cluster, user, policy, priority or home site, or not at all (grid)")]
Steps = Annotated[Step, Query(description="a line for each day, for each week from Monday on, or for the whole span")]
First = Annotated[date | None, Query(description="the first day, as 2026-11-01; if left out, 29 days before the last")]
Last = Annotated[date | None, Query(description="the last day; if left out, today (UTC)")]
Named = Annotated[of_api.Name, Query(description="only this cluster, user, policy, priority or home site")]
OutputFormat = Annotated[Format, Query(description="csv: the same lines; swf: the jobs that ended, as a trace")]


_LINE = TypeAdapter(HistoryLine)


class HistoryView(Output):
    by: Kind
    step: Step
    first: date
    last: date
    since: date | None
    """The first day with data; the history of days is never deleted."""
    jobs_keep: float | None
    """Seconds after their end for which the jobs themselves are kept; null: they are never deleted."""
    lines: list[HistoryLine]
    """In order of days and names; days without jobs have no line."""


def history_router(service: History) -> APIRouter:
    """Return the route that shows what jobs used each day, as JSON or CSV."""
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
        format: OutputFormat = Format.JSON,
    ) -> Any:
        """Show the use of clusters, and the waiting times, run times and outcomes of jobs, by day or week. Only
        operators see other users, and other users' jobs in a trace."""
        span = service.make_span(first, last)
        if format is Format.SWF:
            user = None if caller.has_role(Role.OPERATOR) else caller.user
            return StreamingResponse(service.export_trace(span, user), media_type="text/plain; charset=utf-8")
        table = await service.read_table(by, step, span, visible_to(caller, by, name))
        if format is Format.CSV:
            return Response(await to_thread(as_csv, table.lines), media_type="text/csv; charset=utf-8")
        lines = (_LINE.dump_json(line).decode() for line in table.lines)
        return await render_json_list(
            "lines",
            lines,
            {
                "by": by,
                "step": step,
                "first": span.first.isoformat(),
                "last": span.last.isoformat(),
                "since": table.since.isoformat() if table.since else None,
                "jobs_keep": table.jobs_keep,
            },
        )

    return router


def visible_to(caller: Identity, by: Kind, name: str) -> str | None:
    """Return the name that a history is restricted to, None for all; raise ``ForbiddenError`` for another user."""
    if by is not Kind.USER or caller.has_role(Role.OPERATOR):
        return name or None
    if name not in ("", caller.user):
        raise ForbiddenError(
            f"only operators may see the history of {name}",
            field="name",
            value=name,
            hint="leave name out to see your own",
        )
    return caller.user


def as_csv(lines: Sequence[HistoryLine]) -> str:
    """Return the lines as CSV with a header; a text that spreadsheets would run as a formula is quoted."""

    def escape(value: object) -> object:
        return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value

    names = [field.name for field in fields(HistoryLine)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([escape(getattr(line, name)) for name in names] for line in lines)
    return text.getvalue()


class SharingView(Output):
    first: date
    last: date
    start: Timestamp
    end: Timestamp
    every_site: Verdict
    """``better``: no site is worse off, and at least one is better off; ``unclear``: some sites have too few jobs."""
    sites: list[SiteShare]
    exclusions: list[Exclusion]


def sharing_router(service: Sharing, history: History) -> APIRouter:
    """Return the route that shows whether each site gains from running jobs together with the others."""
    router = api_router("history", "/sharing")

    @router.get("", response_model=SharingView)
    async def show_sharing(request: Request, first: First = None, last: Last = None) -> Any:
        """Compare, for each site, the response times of its users' jobs in the grid with those on the site by itself,
        which are simulated. Covers finished jobs submitted in these days; takes some seconds."""
        span = history.make_span(first, last)
        report = await cancel_on_disconnect(request, service.make_report(span))
        results = {name: getattr(report, name) for name in ("start", "end", "every_site", "sites", "exclusions")}
        return SharingView.model_validate({"first": span.first, "last": span.last, **results})

    return router


LINES = "application/x-ndjson"
RecordSince = Annotated[
    float,
    Query(gt=0, le=MAX_DURATION, allow_inf_nan=False, description="start of the recording, in seconds before now"),
]
RecordUntil = Annotated[
    float, Query(ge=0, le=MAX_DURATION, allow_inf_nan=False, description="end of the recording, in seconds before now")
]


def record_router(record: Record | None, clock: Callable[[], float]) -> APIRouter:
    """Return the route that exports the recording; ``record`` is None if the daemon does not record."""
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
        """Export the scheduler's inputs and decisions for `koala replay`, each daemon run from its beginning.

        The recording contains the commands of jobs and the accounts of users, but no environment variables.
        """
        if record is None:
            raise NotFoundError(
                "this daemon records nothing",
                field="record.enabled",
                hint="set record.enabled: true in its configuration",
                code=ProblemCode.RECORD_DISABLED,
            )
        now = clock()
        return StreamingResponse(await record.export_recordings(now - since, now - until), media_type=LINES)

    return router
