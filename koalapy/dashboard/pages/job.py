"""The page of a job: its way, why it stands where it stands, its files and output, who did what, and what may be done.

Of others' jobs it shows what the REST API shows of them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Query, Response
from fastapi.responses import PlainTextResponse

from koalapy.api.access import Caller, Id
from koalapy.api.forecasts import ExplanationView
from koalapy.api.job_views import AttemptView, JobView, TimelineView, attempt_view, view_for
from koalapy.daemon.jobs.output import OutputTail
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard
from koalapy.dashboard.pictures import JobLane, lanes_of
from koalapy.dashboard.rows import JobRow, job_row
from koalapy.model.job import Job, JobState, Priority
from koalapy.validation.permissions import may_see_all_of

TAIL = 64 * 1024
"""Bytes of all components' output that are shown."""
MAX_LINES = 200
"""Of a timeline, the last ones."""

Last = Annotated[int, Query(ge=1, le=1000, description="only the last so many attempts")]


@dataclass(frozen=True, slots=True)
class ComponentOutput:
    """The end of what a component wrote; ``before`` bytes of it came before that."""

    component: int
    cluster: str
    text: str
    before: int


@dataclass(frozen=True, slots=True)
class JobPageView:
    """One job; of somebody else's there is only ``job`` and ``row``."""

    job: JobView
    row: JobRow
    command: str
    actions: Sequence[str]
    """What may be done to it now."""
    is_over: bool
    lanes: Sequence[JobLane]
    attempts: Sequence[AttemptView]
    more_attempts: int
    """Earlier ones, which are not shown."""
    explanation: ExplanationView | None  # type: ignore[valid-type]
    output: Sequence[ComponentOutput]
    has_results: bool
    timeline: Sequence[TimelineView]  # type: ignore[valid-type]
    earlier_lines: int


def add_job(dashboard: Dashboard, services: Services) -> None:
    engine, jobs = dashboard.engine, services.jobs

    @dashboard.page("/jobs/{job}", "job.html", operation="show_job", title="Job")
    async def show(caller: Caller, job: Id, attempts: Last = 5) -> JobPageView:
        record = await jobs.get(job)
        is_theirs = may_see_all_of(caller, record.job)
        position = engine.queries.position(job) if is_theirs else None
        view, row = view_for(caller, record), job_row(record, caller, position, whole_reason=True)
        if not is_theirs:
            return JobPageView(view, row, "", (), record.job.state.is_final, (), (), 0, None, (), False, (), 0)
        record, tried = await jobs.list_attempts(job, attempts)
        timeline = await jobs.read_timeline(job)
        known = record.job
        return JobPageView(
            job=view_for(caller, record),
            row=job_row(record, caller, position, whole_reason=True),
            command=" ".join(known.spec.command),
            actions=_actions(known, high_priority_allowed=jobs.rules.high_priority.is_allowed_to(caller)),
            is_over=known.state.is_final,
            lanes=lanes_of(known, tried, timeline, engine.clock()),
            attempts=[attempt_view(known, attempt) for attempt in tried],
            more_attempts=tried[0].generation - 1 if tried else 0,
            explanation=ExplanationView.model_validate(await jobs.explain(job, caller)),
            output=[_output(tail) for tail in await jobs.read_output_tails(job, TAIL)],
            has_results=bool(known.spec.collect) and known.state.is_final,
            timeline=[TimelineView.model_validate(entry) for entry in timeline[-MAX_LINES:]],
            earlier_lines=max(0, len(timeline) - MAX_LINES),
        )

    @dashboard.router.get("/jobs/{job}/output/{component}", operation_id="read_logs", response_class=PlainTextResponse)
    async def output(job: Id, component: int) -> Response:
        """The end of what one component wrote, as the page shows it."""
        tails = await jobs.read_output_tails(job, TAIL)
        text = next((_output(tail).text for tail in tails if tail.component == component), "")
        return PlainTextResponse(text, headers={"Cache-Control": "no-store"})


def _output(tail: OutputTail) -> ComponentOutput:
    text = text_of(tail.data, begun_before=tail.before > 0)
    return ComponentOutput(tail.component, tail.cluster, text, tail.before)


def _actions(job: Job, *, high_priority_allowed: bool) -> list[str]:
    if job.state.is_final:
        return []
    if not job.state.is_waiting:
        return ["cancel"]
    actions = ["cancel", "release" if job.state is JobState.HELD else "hold"]
    if job.spec.priority is Priority.HIGH:
        return [*actions, "low"]
    return [*actions, "high"] if high_priority_allowed else actions


_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_ORDERS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
"""Invisible, they have other text shown in another order."""
_CONTINUES = range(0x80, 0xC0)
MAX_CUT_LINE = 4096
"""Bytes of a line that began before: it is left out if it is no longer."""


def text_of(data: bytes, *, begun_before: bool = False) -> str:
    """Colours are left out, other control characters are shown as signs; lines end with ``\\n``.

    ``begun_before``: there were more bytes, so that the first line, or letter, may not be whole.
    """
    if begun_before:
        end = data.find(b"\n", 0, MAX_CUT_LINE)
        data = data[end + 1 :] if end >= 0 else data.lstrip(bytes(_CONTINUES))
    text = data.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    text = _ORDERS.sub("\N{REPLACEMENT CHARACTER}", _COLOURS.sub("", text))
    return "".join(_sign(letter) if letter < " " or "\x7f" <= letter <= "\x9f" else letter for letter in text)


def _sign(letter: str) -> str:
    if letter in "\n\t":
        return letter
    return chr(0x2400 + ord(letter)) if letter < " " else "\N{SYMBOL FOR DELETE}"
