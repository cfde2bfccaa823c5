"""The routes for explanations of waiting jobs, predictions of their starts, and the advisor's statistics."""

from dataclasses import fields as dataclass_fields
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BeforeValidator, Field, model_validator

from koalapy.api.access import Caller, Id
from koalapy.api.clusters import Name as ClusterPath
from koalapy.api.derived import view_model
from koalapy.api.fields import MAX_ID, Input, Name, Output, PointInTime, Seconds, Text, is_bare_number, parse_duration
from koalapy.api.job_changes import JobPatch, change_between, submission_of
from koalapy.api.job_views import JobSubmission
from koalapy.api.problems import problem_responses
from koalapy.api.routes import api_router, cancel_on_disconnect
from koalapy.config.strict_yaml import DuplicateKey, load_yaml
from koalapy.daemon.forecast.advisor import Advisor, ApplicationRecord
from koalapy.daemon.forecast.forecasts import DrainPreview, Forecasts, IfSubmitted
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.model.advice import AdvisedPlacement, Option
from koalapy.model.bounds import MAX_NODES
from koalapy.model.command_line import change_command
from koalapy.model.errors import UsageError, reject
from koalapy.model.identity import Identity, Role
from koalapy.model.job_spec import MAX_DURATION, JobSpec
from koalapy.model.placement import Change as SmallestChange
from koalapy.model.placement import Explanation, PastReason, PlacedComponent, Placement
from koalapy.model.request import MAX_NAME_LENGTH
from koalapy.policies.knowledge import LogNormal
from koalapy.simulation.twin import HORIZON, Change, Expected, Forecast, Interval

PlacedComponentView = view_model("PlacedComponentView", PlacedComponent, without={"sources", "transfer_time"})
PlacementView = view_model("PlacementView", Placement, without={"advice"}, elements={"components": PlacedComponentView})


class ChangeView(Output):
    """The smallest change of the submission with which the job would be placed at once."""

    @model_validator(mode="before")
    @classmethod
    def _add_change(cls, offer: Any) -> Any:
        """Add the body and the command that make an offered change of a waiting job."""
        if not isinstance(offer, SmallestChange):
            return offer
        body = None if offer.job is None else change_between(offer.job.spec, offer.spec)
        values = {field.name: getattr(offer, field.name) for field in dataclass_fields(offer) if field.name != "job"}
        command = "" if offer.job is None or body is None else change_command(offer.job.id, body)
        return values | {"change": body, "command": command}

    field: str
    """The changed field of the submission; empty if trying it again unchanged suffices."""
    value: Any
    text: str
    submission: Annotated[
        JobSubmission, BeforeValidator(lambda spec: submission_of(spec) if isinstance(spec, JobSpec) else spec)
    ] = Field(validation_alias="spec")
    """The changed submission for POST /api/v1/jobs, without fields that have their defaults."""
    change: dict[str, Any] | None
    """The body for PATCH /api/v1/jobs/{job}; null if the job is not submitted yet."""
    command: str
    """The same as a command line; empty if the job is not submitted yet."""
    placement: PlacementView  # type: ignore[valid-type]


ExplanationView = view_model(
    "ExplanationView",
    Explanation,
    elements={
        "reasons": view_model("PastReasonView", PastReason),
        "smallest_change": ChangeView,
        "placement": PlacementView,
    },
)


def explain_router(service: Jobs) -> APIRouter:
    """Return the routes that explain the state of a job, or the placement of a job to submit."""
    router = api_router("jobs")

    @router.get("/jobs/{job}/explain", response_model=ExplanationView, response_model_exclude_unset=True)
    async def explain_job(job: Id, caller: Caller) -> Any:
        """Explain why a job waits and what would start it, why it was placed where it is, or how it ended."""
        return await service.explain_job(job, caller)

    @router.post(
        "/explain", response_model=ExplanationView, response_model_exclude_unset=True, responses=problem_responses(409)
    )
    async def explain_submission(submission: JobSubmission, caller: Caller) -> Any:
        """Explain where a job would be placed if it were submitted now, and why not elsewhere. Nothing is stored."""
        return await service.explain_submission(submission.to_model(), caller)

    @router.post(
        "/jobs/{job}/explain",
        response_model=ExplanationView,
        response_model_exclude_unset=True,
        responses=problem_responses(409),
    )
    async def explain_change(job: Id, change: JobPatch, caller: Caller) -> Any:
        """Explain where a waiting job would be placed if it were changed now, and why not elsewhere. Nothing is
        stored."""
        return await service.explain_change(job, caller, change.apply_to, change.reason)

    return router


Pair = Annotated[Text, Field(max_length=2 * MAX_NAME_LENGTH)]
"""NAME=VALUE."""
MAX_CHANGES = 1000
Wait = Annotated[float, Query(ge=0, le=60, allow_inf_nan=False, description="maximum seconds to wait for the forecast")]


Simulate = Annotated[bool, Query(description="false: answer at once, without the jobs that would start later")]
MIN_HORIZON_S = 60.0
Horizon = Annotated[Seconds, Field(ge=MIN_HORIZON_S, le=HORIZON, description="seconds, or a duration such as `24h`")]


class WhatIf(Input):
    """The hypothetical changes to simulate; without any, only the current state is simulated."""

    policy: Name = ""
    """A policy for all waiting jobs that it can serve."""
    rules: list[Pair] = Field([], max_length=MAX_CHANGES, examples=[["queue=fcfs"]])
    """Scheduling rules, written as in the configuration."""
    drain: list[Name] = Field([], max_length=MAX_CHANGES)
    """Clusters to drain."""
    resume: list[Name] = Field([], max_length=MAX_CHANGES)
    """Drained clusters to resume."""
    add: list[Pair] = Field([], max_length=MAX_CHANGES, examples=[["west=64"]])
    """Clusters to add, with their numbers of nodes."""
    first: int | None = Field(None, ge=1, le=MAX_ID)
    """A waiting job to put at the head of its queue."""
    walltimes: list[Pair] = Field([], max_length=MAX_CHANGES, examples=[["17=90m"]])
    """Walltimes of waiting jobs, by job id."""
    horizon: Horizon = HORIZON
    """How far ahead to simulate."""

    def to_change(self) -> Change:
        """Return the changes; raise ``UsageError`` for invalid or contradicting ones."""
        if both := sorted(set(self.drain) & set(self.resume)):
            hint = "leave it out of drain or resume"
            raise UsageError(f"{both[0]} cannot be both drained and resumed", field="resume", value=both[0], hint=hint)
        return Change(
            self.policy,
            {name: _parse_rule(name, text) for name, text in _split_pairs("rules", self.rules)},
            tuple(self.drain),
            tuple(self.resume),
            {name: _parse_number("add", text, MAX_NODES) for name, text in _split_pairs("add", self.add)},
            self.first,
            {
                _parse_number("walltimes", job, MAX_ID): _parse_walltime(text)
                for job, text in _split_pairs("walltimes", self.walltimes)
            },
        )


def _split_pairs(field: str, texts: list[str]) -> list[tuple[str, str]]:
    """Split texts at their first ``=``; raise ``UsageError`` for a repeated name or an empty part."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name in pairs:
            raise UsageError(f"{name} is given twice", field=field, value=text, hint="give it once")
        if not (name and equals and value):
            reject(field, text, f"has {text!r}, which is not NAME=VALUE", "write it as name=value")
        pairs[name] = value
    return list(pairs.items())


def _parse_rule(name: str, text: str) -> object:
    """Parse the value of a rule as YAML; raise ``UsageError`` if it is invalid."""
    try:
        return load_yaml(text, aliases=False)  # a short text with nested aliases may expand to a huge value
    except ValueError as error:
        detail = f": {error}" if isinstance(error, DuplicateKey) else ""
        raise UsageError(
            f"{text!r} is not a value of {name}{detail}",
            field="rules",
            value=text,
            hint="write it as in the configuration",
        ) from error


def _parse_number(field: str, text: str, maximum: int) -> int:
    """Parse a number from 1 to ``maximum``; raise ``UsageError`` about ``field`` for any other text."""
    is_short_number = text.isascii() and text.isdecimal() and len(text) <= len(str(maximum))
    if not (is_short_number and 1 <= int(text) <= maximum):
        numbers = f"a number from 1 to {maximum}"
        reject(field, text, f"is {text!r}, which is not {numbers}", f"give {numbers}")
    return int(text)


def _parse_walltime(text: str) -> float:
    """Return a walltime in seconds; raise ``UsageError`` if it is not a duration or out of range."""
    if is_bare_number(text):
        number = f"{float(text):.15g}"
        hint = f"give {number}s or {number}m"
        raise UsageError(f"{text!r} may mean seconds or minutes", field="walltimes", value=text, hint=hint)
    try:
        walltime = parse_duration(text)
    except ValueError:
        walltime = 0.0
    if not 0 < walltime <= MAX_DURATION:
        raise UsageError(
            f"{text!r} is not a walltime of more than 0 s and at most {MAX_DURATION:g} s",
            field="walltimes",
            value=text,
            hint="give 90s, 90m or 1:30:00",
        )
    return walltime


ForecastView = view_model("ForecastView", Forecast)


class WhatIfView(Output):
    as_it_is: ForecastView  # type: ignore[valid-type]
    changed: ForecastView | None  # type: ignore[valid-type]
    """Null if no change was requested."""


DrainPreviewView = view_model("DrainPreviewView", DrainPreview)


class JobForecastView(Output):
    ready: bool
    """False if the forecast was not computed within the waiting time; ask again later."""
    expected: Expected | None
    """Null for a job that is held or has ended, and for one submitted within the last minute."""


class IfSubmittedView(Output):
    """The expected start and end of a job if it were submitted now; in seconds from now."""

    at_once: bool
    """Whether it would be placed at once."""
    starts: Interval | None
    """Zeros if it would start at once; null if unknown, or if it starts in no simulation."""
    ends: Interval | None
    """Null if unknown, or if the job would start at once."""
    not_run: float | None
    """Fraction of the simulations in which the job did not end; null if nothing was simulated."""
    basis: str
    """The basis of its estimated run time; empty if nothing was simulated."""
    why: str
    """The reason for which its start is unknown; empty if it is known."""


def _if_submitted_view(forecast: IfSubmitted) -> dict[str, Any]:
    """Return the fields of the answer for a job that would start at once, later, or not within the horizon."""
    starts = Interval(0.0, 0.0, 0.0) if forecast.at_once else None
    nothing = {"starts": starts, "ends": None, "not_run": None, "basis": ""}
    fields = {name: getattr(forecast.expected, name, value) for name, value in nothing.items()}
    return fields | {"at_once": forecast.at_once and forecast.expected is None, "why": forecast.reason}


def forecasts_router(service: Forecasts, jobs: Jobs) -> APIRouter:
    """Return the routes that predict starts and ends of jobs by simulation."""
    router = api_router("jobs")

    @router.post("/what-if", response_model=WhatIfView, responses=problem_responses(404))
    async def ask_what_if(question: WhatIf, request: Request) -> Any:
        """Simulate when waiting jobs would start and end, in the current state and with hypothetical changes. Each
        simulation draws other run times. This takes some seconds and changes nothing."""
        return await cancel_on_disconnect(request, service.what_if(question.to_change(), question.horizon))

    @router.get("/clusters/{name}/drain", response_model=DrainPreviewView)
    async def preview_drain(
        name: ClusterPath,
        request: Request,
        simulate: Simulate = True,
        begin: PointInTime | None = None,
        end: PointInTime | None = None,
    ) -> Any:
        """Show what a drain of a cluster would do, now or from a time on: the jobs that run there, those that wait for
        it by name, and by simulation the waiting jobs that would start later. It takes some seconds and changes
        nothing."""
        if not simulate:
            return service.describe_drain(name, begin, end)
        return await cancel_on_disconnect(request, service.preview_drain(name, begin=begin, end=end))

    @router.post("/forecast", response_model=IfSubmittedView, responses=problem_responses(409))
    async def foretell_submission(submission: JobSubmission, caller: Caller, wait: Wait = 10.0) -> Any:
        """Predict when a job would start if it were submitted now: at once, or as simulated within the waiting time.
        Nothing is stored."""
        spec = await jobs.submissions.complete_spec(submission.to_model(), caller)
        awaits = await jobs.submissions.find_unmet_dependencies(spec, caller)
        return _if_submitted_view(await service.forecast_submission(spec, wait, awaits))

    @router.get("/jobs/{job}/forecast", response_model=JobForecastView)
    async def foretell_job(job: Id, wait: Wait = 10.0) -> Any:
        """Predict when a job will start and end, from a simulation of at most a minute ago."""
        ready, expected = await service.forecast_job(job, wait)
        return {"ready": ready, "expected": expected}

    return router


Limit = Annotated[int, Query(ge=1, le=1000, description="maximum number of entries")]
Application = Annotated[Text, Query(max_length=200, description="only jobs of this application")]


class RunsView(Output):
    """Runs of an application of one size on one cluster, or on several together."""

    nodes: int
    processes_per_node: int | None
    """Null if each cluster's default was used."""
    clusters: int
    where: list[str]
    """The clusters of co-allocated runs; empty for runs on one cluster, whichever it was."""
    runs: int
    killed: int
    """Runs that were stopped at their walltime, and would have taken longer."""
    seconds: float
    """Typical run time at speed 1: the mean of the middle half of the logarithms of run times."""
    seconds_between: list[float]
    """Bounds of the typical run time, with a probability of 80 %."""
    slowdown: float | None
    """Run time relative to one cluster; null for runs on one cluster."""
    slowdown_between: list[float] | None
    """Bounds of the slowdown, with a probability of 80 %; null for runs on one cluster."""


LEARNED = {"application", "runs_on_several", "killed_on_several", "verdict"}
_Application = view_model("_Application", ApplicationRecord, "", only=LEARNED, elements={"verdict": str})


class ApplicationView(_Application):  # type: ignore[misc, valid-type]
    """What the advisor has learned of an application, and its decision for the application's jobs: the ``verdict``."""

    clusters: int
    """Number of clusters that ``slowdown`` and ``verdict`` apply to: the most frequent combination, else any 2."""
    slowdown: float
    slowdown_between: list[float]
    """Bounds of the slowdown, with a probability of 80 %."""
    runs: list[RunsView]


class AdvisorView(Output):
    applications: list[ApplicationView]


_Option = view_model("_Option", Option)
_Advised = view_model("_Advised", AdvisedPlacement, without={"options"})


class OptionView(_Option):  # type: ignore[misc, valid-type]
    """A placement that was compared with others; times in seconds, null if unknown."""

    response: float | None


class AdvisedView(_Advised):  # type: ignore[misc, valid-type]
    """An advice that was followed; times in seconds. ``actual``: from the barrier to the end, if the job succeeded."""

    options: list[OptionView]
    error: float | None
    """Relative error of the prediction; positive if it was too long, negative if it was too short."""


class AdvisorRecord(Output):
    record: list[AdvisedView]


def advisor_router(advisor: Advisor) -> APIRouter:
    """Return the routes of the advisor, which learns from runs whether an application should span clusters."""
    router = api_router("advisor", "/advisor")

    @router.get("", response_model=AdvisorView)
    async def show_advisor(caller: Caller) -> Any:
        """List applications with their learned run times and the advisor's decision. Users see the applications of
        their own jobs."""
        records = await advisor.list_applications(_visible_user(caller))
        return {"applications": [_application_view(record) for record in records]}

    @router.get("/record", response_model=AdvisorRecord)
    async def show_advisor_record(caller: Caller, application: Application = "", limit: Limit = 100) -> Any:
        """List jobs that were placed by advice, newest first, with predicted and actual times. Users see their
        own jobs."""
        return {"record": await advisor.read_advice(application, limit, _visible_user(caller))}

    return router


def _visible_user(caller: Identity) -> str | None:
    """Return the only user with jobs that the caller may see in full; None for operators, since they see all."""
    return None if caller.has_role(Role.OPERATOR) else caller.user


def _application_view(record: ApplicationRecord) -> dict[str, Any]:
    """Return the fields of an application: its runs by size and clusters, its slowdown and its verdict."""
    runs = [
        {
            "nodes": group.size.nodes,
            "processes_per_node": group.size.per_node or None,
            "clusters": len(group.where) or 1,
            "where": list(group.where),
            "runs": group.runs,
            "killed": group.killed,
            "seconds": group.seconds.value,
            "seconds_between": [group.seconds.low, group.seconds.high],
            "slowdown": _slowdown_and_bounds(record.slowdowns[group.where])[0] if group.where else None,
            "slowdown_between": _slowdown_and_bounds(record.slowdowns[group.where])[1:] if group.where else None,
        }
        for group in record.runs
    ]
    slowdown, *between = _slowdown_and_bounds(record.slowdown)
    return {
        **{name: getattr(record, name) for name in LEARNED},
        "clusters": len(record.clusters) or 2,
        "slowdown": slowdown,
        "slowdown_between": between,
        "runs": runs,
    }


def _slowdown_and_bounds(estimate: LogNormal) -> list[float]:
    """Return the estimate and its bounds, at least 1, since co-allocated runs are not faster than others."""
    return [max(1.0, slowdown) for slowdown in (estimate.value, estimate.low, estimate.high)]
