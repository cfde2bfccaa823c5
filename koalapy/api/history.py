"""The routes of history: ended jobs, use of clusters by day, the scheduler's recording."""

import csv
import io
from asyncio import to_thread
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from datetime import date
from enum import StrEnum
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import Field, TypeAdapter

from koalapy.api import fields as of_api
from koalapy.api.access import Caller
from koalapy.api.derived import view_model
from koalapy.api.fields import Output
from koalapy.api.problems import problem_responses
from koalapy.api.routes import api_router, render_json_list
from koalapy.daemon.jobs.history import History, UsageLine, UsageTable
from koalapy.daemon.jobs.record import Record
from koalapy.model.errors import ForbiddenError, NotFoundError, ProblemCode
from koalapy.model.history import EndedJob, HistoryFilter, HistoryPosition, HistorySort, HistorySums, Kind, Step
from koalapy.model.identity import Identity, Role
from koalapy.model.job import JobState
from koalapy.model.job_spec import MAX_DURATION
from koalapy.model.times import PAST_TIME_EXAMPLES
from koalapy.model.wording import escape_formula


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


_LINE, _TABLE = TypeAdapter(UsageLine), TypeAdapter(UsageTable)


class HistoryQuery(of_api.JobSelection):
    """The ended jobs to list, and their order. In ``name``, * matches any characters."""

    since: of_api.PastTime = Field("7d", description=f"jobs that ended at or after this time: {PAST_TIME_EXAMPLES}")
    until: of_api.PastTime = Field("now", description="jobs that ended before this time")
    state: list[Literal["succeeded", "failed", "cancelled"]] = Field([], description="only jobs in one of these states")
    sort: HistorySort = Field(
        HistorySort.ENDED, description="order: largest first, efficiency smallest first; ended: the last end first"
    )
    before: str = Field(
        "", pattern=r"^(\d{1,12}(\.\d{1,9})?:\d{1,18})?$", description="position of the page, from next"
    )
    sums: bool = Field(False, description="also return sums over the matching jobs")


_EndedJobView = view_model("_EndedJobView", EndedJob)


class EndedJobView(_EndedJobView):  # type: ignore[misc, valid-type]
    """An ended job with its use of nodes; durations are in seconds, memory in bytes.

    Processor time and memory are those of the last attempt on the `measured_nodes` of its `nodes`; null if unknown.
    """

    efficiency: float | None
    """Used share of the processor time that these nodes had while the program ran; null if unknown."""


HistorySumsView = view_model("HistorySumsView", HistorySums)


class HistoryView(Output):
    jobs: list[EndedJobView]
    """At most ``limit`` jobs; fewer if the search examined many jobs."""
    sums: HistorySumsView | None  # type: ignore[valid-type]
    """Null unless requested."""
    next: str | None
    """Path of the next page; null on the last page."""
    sums_next: str | None
    """Path of a page with the sums over earlier jobs; null if the sums cover all matching jobs."""


UsageView = view_model("UsageView", UsageTable, elements={"lines": list[UsageLine]})


def history_router(service: History) -> APIRouter:
    """Return the routes that list ended jobs, and that show what jobs used each day."""
    router = api_router("history")
    _add_ended_jobs(router, service)

    @router.get(
        "/usage",
        response_model=UsageView,
        responses={200: {"model": UsageView, "content": {"text/csv": {}, "text/plain": {}}}},
    )
    async def show_usage(
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
        fields = _TABLE.dump_python(replace(table, lines=()), mode="json")
        del fields["lines"]
        return await render_json_list("lines", (_LINE.dump_json(line).decode() for line in table.lines), fields)

    return router


def _add_ended_jobs(router: APIRouter, service: History) -> None:
    """Add the route that lists ended jobs."""

    @router.get("/history", response_model=HistoryView)
    async def list_history(caller: Caller, query: Annotated[HistoryQuery, Query()]) -> Any:
        """List jobs that ended in a span, the last end first, with their times, node-seconds, processor time and
        memory. Users see their own jobs. In `name`, * matches any characters.

        Another order, and the sums, cover the 10,000 jobs that ended last; `next` and `sums_next` continue with earlier
        ones.
        """
        owner = visible_to(caller, Kind.USER, query.choose_owner(caller.user), "owner") or ""
        start, end = service.parse_times(query.since, query.until)
        states, position = tuple(map(JobState, query.state)), _parse_position(query.before)
        history_filter = HistoryFilter(
            start, end, owner, query.name, query.cluster, states, query.sort, position, query.limit, query.sums
        )
        page = await service.list_ended(history_filter)

        def path_of(position: HistoryPosition | None) -> str | None:
            """Return the path of the page that continues at a position."""
            if position is None:
                return None
            cursor = f"{position.ended_at!r}:{position.job}"
            return of_api.next_path(
                "/api/v1/history", query, owner=owner, mine=False, since=start, until=end, before=cursor
            )

        texts = (EndedJobView.model_validate(job).model_dump_json(by_alias=True) for job in page.jobs)
        totals = None if page.sums is None else asdict(page.sums)
        paths = {"next": path_of(page.next), "sums_next": path_of(page.sums_next) if query.sums else None}
        return await render_json_list("jobs", texts, {"sums": totals, **paths})


def _parse_position(text: str) -> HistoryPosition | None:
    if not text:
        return None
    ended, _, job = text.partition(":")
    return HistoryPosition(float(ended), int(job))


def visible_to(caller: Identity, kind: Kind, name: str, field: str = "name") -> str | None:
    """Return the name that a history is restricted to, None for all; raise ``ForbiddenError`` for another user."""
    if kind is not Kind.USER or caller.has_role(Role.OPERATOR):
        return name or None
    if name not in ("", caller.user):
        raise ForbiddenError(
            f"only operators may see the history of {name}",
            field=field,
            value=name,
            hint=f"leave {field} out to see your own",
        )
    return caller.user


def as_csv(lines: Sequence[UsageLine]) -> str:
    """Return the lines as CSV with a header; a text that spreadsheets would run as a formula is quoted."""
    names = [field.name for field in fields(UsageLine)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([escape_formula(getattr(line, name)) for name in names] for line in lines)
    return text.getvalue()


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
