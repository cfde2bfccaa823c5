"""The page of a job: its timeline, scheduling, components, output and events, and the possible actions.

For other users' jobs it shows only the fields that the REST API shows.
"""

import re
from typing import Annotated

from fastapi import Query, Response
from fastapi.responses import PlainTextResponse

from koalapy.api import fields
from koalapy.api.access import Caller, Id
from koalapy.api.forecasts import ExplanationView
from koalapy.api.job_views import TimelineView, view_for
from koalapy.daemon.jobs.output import OutputTail
from koalapy.daemon.observability.audit import Audit
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard, View
from koalapy.dashboard.pages.audit import Before, read_changes
from koalapy.dashboard.pages.queue import WORDS, exclusion_reason
from koalapy.dashboard.pages.timeline import expected_start
from koalapy.dashboard.rows import job_row
from koalapy.dashboard.timeline import ExpectedStart, build_lanes, job_timeline
from koalapy.model.job import Job
from koalapy.model.node_requirement import describe_requirements
from koalapy.validation.permissions import may_see_all_of

TAIL_BYTES = 64 * 1024
"""Maximum size of the displayed output of all components, in bytes."""
MAX_LINES = 200
"""Maximum number of displayed timeline entries, the last ones."""

MAX_MATCHES = 500
"""Maximum number of displayed lines that match a search of the output, the last ones."""
MAX_TASKS = 50
"""Maximum number of displayed tasks of an array."""

Find = Annotated[fields.Text, Query(max_length=200, description="show only output lines with this text")]
Last = Annotated[int, Query(ge=1, le=1000, description="maximum number of attempts, newest first")]


def add_job(dashboard: Dashboard, services: Services, audit_log: Audit) -> None:
    """Add the page of one job and the forms that change it."""
    engine, jobs = dashboard.engine, services.jobs

    def expected_starts_of(job: Job, now: float) -> list[ExpectedStart]:
        """Return the expected start of a waiting job in a list, which is empty if it is unknown."""
        forecast = services.forecasts.latest_forecast
        expected = None if forecast is None or not job.state.is_waiting else forecast.of(job.id)
        start = expected_start(expected, job, forecast, now) if expected is not None and forecast is not None else None
        return [] if start is None else [start]

    @dashboard.page("/jobs/{job}", "job.html", operation="show_job", title="Job", shared=True)
    async def show(caller: Caller, job: Id, attempts: Last = 5, find: Find = "", changes_before: Before = 0) -> View:
        """Return a job with its last attempts and output; other users' jobs only in part."""
        record, last_attempts = await jobs.list_attempts(job, attempts)
        current, now = record.job, engine.clock()
        may_see_all = may_see_all_of(caller, current)
        position = engine.queries.position(job) if may_see_all else None
        view, row = view_for(caller, record), job_row(record, caller, position, whole_reason=True)
        if not may_see_all:
            return {"job": view, "row": row, "is_over": current.state.is_final}
        timeline = await jobs.read_timeline(job)
        lanes = build_lanes(current, last_attempts, timeline, now)
        return {
            "job": view,
            "row": row,
            "command": " ".join(current.spec.command),
            # What the job requires of its nodes; empty without any requirement
            "nodes": describe_requirements(current.spec, getattr(current.spec.request, "components", ())),
            # Names of the actions that the page offers
            "actions": [
                action
                for action in WORDS
                if not exclusion_reason(action, current, caller)
                and (action != "high" or jobs.rules.high_priority.is_allowed_to(caller))
            ],
            "is_over": current.state.is_final,
            "picture": job_timeline(lanes, now, expected_starts_of(current, now)),
            # Earlier attempts, which are not shown
            "more_attempts": last_attempts[0].generation - 1 if last_attempts else 0,
            "explanation": ExplanationView.model_validate(jobs.explain_read_job(current, timeline, caller)),
            "output": [_component_output(tail, find) for tail in await jobs.read_output_tails(current, TAIL_BYTES)],
            "find": find,
            "files": files_of(current),
            "has_results": bool(current.spec.collect) and current.state.is_final,
            "timeline": [TimelineView.model_validate(entry) for entry in timeline[-MAX_LINES:]],
            "earlier_lines": max(0, len(timeline) - MAX_LINES),
            # The first started and unfinished tasks of an array
            "tasks": [
                job_row(jobs.make_record(task), caller, engine.queries.position(task.id))
                for task in engine.queries.tasks_of(job)[:MAX_TASKS]
            ],
            # The jobs that it depends on, and those that depend on it
            "related": await jobs.list_related(current),
            "changes": await read_changes(audit_log, caller, changes_before, target=f"job {job}"),
        }

    @dashboard.router.get("/jobs/{job}/output/{component}", operation_id="read_logs", response_class=PlainTextResponse)
    async def output(job: Id, component: int, find: Find = "") -> Response:
        """Return the end of a component's output, as the page shows it."""
        tails = await jobs.read_output_tails((await jobs.get(job)).job, TAIL_BYTES)
        text = next((_component_output(tail, find)["text"] for tail in tails if tail.component == component), "")
        return PlainTextResponse(text, headers={"Cache-Control": "no-store"})


def _component_output(tail: OutputTail, find: str = "") -> View:
    """Return the end of a component's output, after ``before`` bytes that are not shown.

    With a search, ``text`` is the last lines with that text, and ``matches`` the number of all of them.
    """
    text, matches = decode_output(tail.data, is_cut=tail.skipped_bytes > 0), None
    if find:
        lines = find_lines(text, find)
        text, matches = "\n".join(f"{number:>6}  {line}" for number, line in lines[-MAX_MATCHES:]), len(lines)
    output = {"component": tail.component, "cluster": tail.cluster, "text": text}
    return output | {"before": tail.skipped_bytes, "matches": matches}


def find_lines(text: str, find: str) -> list[tuple[int, str]]:
    """Return the lines that contain a text in any case, with their numbers from 1."""
    searched = find.casefold()
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if searched in line.casefold()]


def files_of(job: Job) -> list[tuple[str, str, int | None, str]]:
    """Return the inputs of a job, its bundle, and the patterns of its results.

    Each has a kind, a name, its bytes if they are known, and the clusters with a replica or the job that makes it.
    """
    spec = job.spec
    files: list[tuple[str, str, int | None, str]] = [
        ("input", file.name, file.size or None, ", ".join(file.sites)) for file in spec.all_inputs
    ]
    files += [("result of a job", file.path, None, f"job {file.job}") for file in spec.result_inputs]
    if spec.bundle is not None:
        files.append(("uploaded bundle", spec.bundle.id, spec.bundle.size, "daemon"))
    return files + [("collected result", pattern, None, "") for pattern in spec.collect]


_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_BIDI_CONTROLS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
"""Invisible characters that change the order in which other text is shown."""
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that do not begin a character."""
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | dict.fromkeys(
    range(0x7F, 0xA0), "\N{SYMBOL FOR DELETE}"
)
MAX_CUT_LINE_BYTES = 4096
"""Length up to which an incomplete first line is omitted."""


def decode_output(data: bytes, *, is_cut: bool = False) -> str:
    """Return output as text without colours, with visible symbols for control characters and lines ending in ``\\n``.

    ``is_cut``: the first line or character may be incomplete.
    """
    if is_cut:
        end = data.find(b"\n", 0, MAX_CUT_LINE_BYTES)
        data = data[end + 1 :] if end >= 0 else data.lstrip(_CONTINUATION_BYTES)
    text = data.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    text = _BIDI_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", _COLOURS.sub("", text))
    return text.translate(_CONTROL_PICTURES)
