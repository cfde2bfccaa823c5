"""The form for a new job: where and when it would start, the equivalent command, and its submission."""

import json
import secrets
import shlex
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Query

from koalapy.api import fields
from koalapy.api.access import Caller
from koalapy.api.job_changes import submission_of
from koalapy.api.job_views import JobSubmission
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard, Form, FormAnswer, SentForm, View, parse_body
from koalapy.model.command_line import command_for, format_request, parse_request
from koalapy.model.errors import KoalaError, StoreUnavailable, UsageError, reject
from koalapy.model.identity import Identity
from koalapy.model.job import JobState
from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.model.wording import format_duration
from koalapy.validation.permissions import check_job_access

FORECAST_PATIENCE_S = 2.0
"""Time to wait for a forecast. The page asks again for a forecast that takes longer."""
DROPPED_FIELDS = frozenset({"owner", "after", "begin", "deadline", "interactive", "workdir_optional"})
"""Fields that "submit again" does not copy: they concern one submission, or need a client."""
KINDS = {
    "flexible": ("A total on any clusters", "8"),
    "nonfixed": ("Components of these sizes on any clusters", "4,2"),
    "fixed": ("These clusters", "north:4,south:2"),
}
"""The kinds of requests: description and example."""

Source = Annotated[int | None, Query(alias="from", ge=1, le=fields.MAX_ID, description="the job to submit again")]


JobFields = Mapping[str, str]
"""The fields of the form as typed. ``kept``: the other fields of the job that is submitted again, as JSON."""
TEXT_FIELDS = ("script", "name", "walltime", "priority", "policy", "launcher", "memory", "workdir")
"""Fields of the form that are fields of a submission with the same text."""
EMPTY_FIELDS: JobFields = {
    "kind": "flexible",
    **dict.fromkeys(("nodes", "command", *TEXT_FIELDS, "processes_per_node", "after", "kept"), ""),
}


def add_new_job(dashboard: Dashboard, services: Services) -> None:
    """Add the form for a new job, its check and its submission."""
    engine, jobs, forecasts = dashboard.engine, services.jobs, services.forecasts

    def make_view(job_fields: JobFields, caller: Identity, key: str = "", **result: object) -> View:
        """Return the form; ``result``: ``check`` or ``problem``, the error in it."""
        kept = _read_kept(job_fields)
        return {
            "fields": job_fields,
            "source": kept.get("source"),
            # Names of its fields that the form keeps and does not show
            "kept": sorted(kept.get("fields", ())),
            "kinds": KINDS,
            "policies": sorted(engine.queries.policies.names()),
            "launchers": [str(launcher) for launcher in Launcher],
            "high_priority_allowed": jobs.rules.high_priority.is_allowed_to(caller),
            # A key with which one form creates one job
            "key": key or secrets.token_urlsafe(12),
            "check": None,
            "problem": None,
        } | result

    @dashboard.page("/jobs/new", "new_job.html", operation="explain_submission", title="New job", live=False)
    async def new(caller: Caller, source: Source = None) -> View:
        """Return an empty form, or one with the fields of an earlier job."""
        if source is None:
            return make_view(EMPTY_FIELDS, caller)
        job = (await jobs.get(source)).job
        check_job_access(caller, job)
        return make_view(fields_of_job(source, job.spec), caller)

    async def check_submission(spec: JobSpec, body: dict[str, Any], caller: Identity) -> View:
        """Return what would happen to a job, which is checked like a real one, and how to submit it from a terminal."""
        explanation, forecast = await jobs.explain_submission(spec, caller), None
        if explanation.state is not JobState.PLACED:
            completed = await jobs.submissions.complete_spec(spec, caller)
            awaits = await jobs.submissions.find_unmet_dependencies(completed, caller)
            forecast = await forecasts.forecast_submission(completed, FORECAST_PATIENCE_S, awaits)
        command = command_for({**body, "workdir": body.get("workdir")}, "")
        return {
            "explanation": explanation,
            # None for a job that would start at once
            "forecast": forecast,
            "command": command,
            # The equivalent job file, if options cannot express the job
            "document": None if command else json.dumps(body, indent=1, ensure_ascii=False),
        }

    @dashboard.action("/jobs/new/check", "new_job.html", operation="explain_submission", title="New job")
    async def check(caller: Caller, form: SentForm) -> FormAnswer:
        """Return the form with what would happen to the job."""
        job_fields = read_fields(form)
        try:
            body = body_of(job_fields)
            checked = await check_submission(parse_body(JobSubmission, body).to_model(), body, caller)
        except KoalaError as error:
            return make_view(job_fields, caller, form.get("key"), problem=error), 200
        return make_view(job_fields, caller, form.get("key"), check=checked), 200

    @dashboard.action("/jobs/new", "new_job.html", operation="submit_job", title="New job")
    async def submit(caller: Caller, form: SentForm) -> FormAnswer:
        """Submit the job and show its page, or return the form with the reason why it was rejected."""
        job_fields, key = read_fields(form), form.get("key")
        try:
            if not key or len(key) > 100 or not key.isprintable():
                raise UsageError("the form is incomplete", field="key", hint="reload the page")
            spec = parse_body(JobSubmission, body_of(job_fields)).to_model()
            record, _ = await jobs.submit(spec, caller, key)
        except KoalaError as error:
            # A rejected form is another submission when it is corrected. Without an answer of the database, it is not.
            kept_key = key if isinstance(error, StoreUnavailable) else ""
            return make_view(job_fields, caller, kept_key, problem=error), error.code.status
        return f"/jobs/{record.job.id}"


def read_fields(form: Form) -> JobFields:
    """Return the fields of a form as typed."""
    return {name: form.fields.get(name, "").replace("\r\n", "\n") for name in EMPTY_FIELDS}


def fields_of_job(number: int, spec: JobSpec) -> JobFields:
    """Return the form of a job that is to be submitted again."""
    body = submission_of(spec)
    request, command = body.pop("request"), body.pop("command", [])
    texts = {name: str(body.pop(name)) for name in TEXT_FIELDS if isinstance(body.get(name), str)}
    if "memory" in body:
        texts["memory"] = f"{body.pop('memory')}B"
    if "walltime" in body:
        walltime = float(body.pop("walltime"))
        is_clock_time = walltime.is_integer() and walltime < 86400
        texts["walltime"] = format_duration(walltime) if is_clock_time else f"{walltime:g}s"
    if "processes_per_node" in body:
        texts["processes_per_node"] = str(body.pop("processes_per_node"))
    kind, nodes = request["type"], format_request(request)
    other_fields = {name: value for name, value in body.items() if name not in DROPPED_FIELDS}
    kept = {"source": number, "nodes": nodes, "request": request, "fields": other_fields}
    texts |= {"kind": kind, "nodes": nodes, "command": shlex.join(command), "kept": json.dumps(kept)}
    return {**EMPTY_FIELDS, **texts}


def _read_kept(job_fields: JobFields) -> dict[str, Any]:
    """Return the fields of the earlier job that the form does not show. Raise ``UsageError`` if they are invalid."""
    if not job_fields["kept"]:
        return {}
    try:
        kept = json.loads(job_fields["kept"])
        is_valid = isinstance(kept["source"], int) and isinstance(kept["fields"], dict) and "request" in kept
    except (ValueError, TypeError, KeyError, RecursionError):
        is_valid = False
    if not is_valid:
        raise UsageError("the form is invalid", field="kept", hint="open it again from the page of the job")
    return dict(kept)


def body_of(job_fields: JobFields) -> dict[str, Any]:
    """Return the body of the submission. Raise ``UsageError`` for a text that has no value."""
    kept = _read_kept(job_fields)
    body: dict[str, Any] = dict(kept.get("fields", {}))
    earlier = kept.get("request")
    is_same = isinstance(earlier, dict) and earlier.get("type") == job_fields["kind"]
    if is_same and kept.get("nodes") == job_fields["nodes"].strip():
        body["request"] = earlier
    else:
        body["request"] = parse_nodes(job_fields["kind"], job_fields["nodes"])
    try:
        body["command"] = shlex.split(job_fields["command"])
    except ValueError as error:
        hint = "close each quotation mark, and write a backslash before one that is meant literally"
        raise UsageError(f"the command is not complete: {error}", field="command", hint=hint) from error
    if job_fields["script"].strip():
        body["command"] = body["command"] or ["job.sh"]
    body |= {name: text for name in TEXT_FIELDS if (text := job_fields[name]).strip()}
    if ranks := job_fields["processes_per_node"].strip():
        body["processes_per_node"] = int(ranks) if ranks.isascii() and ranks.isdecimal() and len(ranks) < 9 else ranks
    if job_fields["after"].strip():
        body["after"] = [clause.strip() for clause in job_fields["after"].split(",")]
    return body


def parse_nodes(kind: str, text: str) -> dict[str, Any]:
    """Return the request that a text such as ``4,2`` means. Raise ``UsageError`` if it means none."""
    if kind not in KINDS:
        reject("kind", kind[:100], f"is {kind[:100]!r}", f"use {', '.join(KINDS)}")
    request = parse_request(kind, text)
    if request is None:
        reject("nodes", text[:100], f"is {text[:100]!r}", f"write it as {KINDS[kind][1]}")
    return request
