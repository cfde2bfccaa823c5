"""The routes that explain and predict: why a job waits, when it will start, and what the advisor has learned."""

from dataclasses import replace
from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Query, Request
from pydantic import BeforeValidator, Field

from koalapy.api.access import Caller, Id
from koalapy.api.derived import view_model
from koalapy.api.fields import MAX_ID, Input, Name, Output, Seconds, Text, as_json, seconds
from koalapy.api.job_views import JobSubmission, job_view
from koalapy.api.problems import problem_responses
from koalapy.api.routes import api_router, cancel_on_disconnect
from koalapy.config.strict_yaml import DuplicateKey, load_yaml
from koalapy.daemon.forecast.forecasts import Forecasts, IfSubmitted
from koalapy.daemon.jobs.advisor import Advisor, ApplicationRecord
from koalapy.daemon.jobs.jobs import JobRecord, Jobs
from koalapy.model.advice import AdvisedPlacement, Option
from koalapy.model.bounds import MAX_NODES
from koalapy.model.errors import UsageError
from koalapy.model.explanation import Explanation, PastReason
from koalapy.model.identity import Identity, Role
from koalapy.model.job import MAX_DURATION, Job, JobSpec
from koalapy.model.placement import PlacedComponent, Placement
from koalapy.model.prediction import Coverage
from koalapy.model.request import MAX_NAME_LENGTH
from koalapy.model.wording import format_days
from koalapy.policies.log_normal import LogNormal
from koalapy.policies.registry import DEFAULTS
from koalapy.simulation.twin import HORIZON, Change, Expected, Forecast, Interval


def _submission_of(spec: object) -> object:
    """A job as it would be submitted, without what has its default."""
    if not isinstance(spec, JobSpec):
        return spec
    if spec.policy == DEFAULTS[spec.request.type]:
        spec = replace(spec, policy="")
    view = as_json(job_view(JobRecord(Job(0, spec, 0.0), "")))
    submission = JobSubmission.model_validate({name: view[name] for name in JobSubmission.model_fields})
    return submission.model_dump(mode="json", exclude_defaults=True, by_alias=True)


PlacedComponentView = view_model("PlacedComponentView", PlacedComponent, without={"sources", "transfer_time"})
PlacementView = view_model("PlacementView", Placement, without={"advice"}, elements={"components": PlacedComponentView})


class ChangeView(Output):
    """The smallest change with which the job would be placed at once."""

    field: str
    """Of the submission; empty when submitting it again as it is would do."""
    value: Any
    text: str
    submission: Annotated[JobSubmission, BeforeValidator(_submission_of)] = Field(validation_alias="spec")
    """The job as changed, for POST /api/v1/jobs; without the fields that have their defaults."""
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
    router = api_router("jobs")

    @router.get("/jobs/{job}/explain", response_model=ExplanationView, response_model_exclude_unset=True)
    async def explain_job(job: Id, caller: Caller) -> Any:
        """Why a job waits, and what would start it; why it is where it is; or how it ended."""
        return await service.explain(job, caller)

    @router.post(
        "/explain", response_model=ExplanationView, response_model_exclude_unset=True, responses=problem_responses(409)
    )
    async def explain_submission(submission: JobSubmission, caller: Caller) -> Any:
        """Where a job would go if it were submitted now, and why not elsewhere. Nothing is stored."""
        return await service.explain_submission(submission.to_model(), caller)

    return router


Pair = Annotated[Text, Field(max_length=2 * MAX_NAME_LENGTH)]
"""NAME=VALUE."""
MAX_CHANGES = 1000
Wait = Annotated[float, Query(ge=0, le=60, allow_inf_nan=False, description="seconds to wait for it at most")]


MIN_HORIZON = 60.0
Horizon = Annotated[Seconds, Field(ge=MIN_HORIZON, le=HORIZON, description="seconds, or as `24h`")]


class WhatIf(Input):
    """What is to be otherwise; nothing, to hear what comes as it is."""

    policy: Name = ""
    """Of all jobs that wait, where it serves what they ask for."""
    rules: list[Pair] = Field([], max_length=MAX_CHANGES, examples=[["queue=fcfs"]])
    """As in the configuration."""
    drain: list[Name] = Field([], max_length=MAX_CHANGES)
    """Clusters on which nothing more is placed."""
    resume: list[Name] = Field([], max_length=MAX_CHANGES)
    add: list[Pair] = Field([], max_length=MAX_CHANGES, examples=[["west=64"]])
    """Clusters that there are not yet, and their nodes."""
    first: int | None = Field(None, ge=1, le=MAX_ID)
    """A job that waits and comes before all others of its priority."""
    walltimes: list[Pair] = Field([], max_length=MAX_CHANGES, examples=[["17=90m"]])
    """Of jobs that wait."""
    horizon: Horizon = HORIZON
    """How far to look ahead."""

    def change(self) -> Change:
        """``UsageError`` for what cannot be read."""
        return change_of(self.policy, self.rules, self.drain, self.resume, self.add, self.first, self.walltimes)


def change_of(
    policy: str,
    rules: list[str],
    drain: list[str],
    resume: list[str],
    add: list[str],
    first: int | None,
    walltimes: list[str],
) -> Change:
    """What people write; ``UsageError`` for what cannot be read, or contradicts itself."""
    if both := sorted(set(drain) & set(resume)):
        hint = "leave out one of the two"
        raise UsageError(f"{both[0]} cannot be both drained and resumed", field="resume", value=both[0], hint=hint)
    return Change(
        policy,
        {name: _value(name, value) for name, value in _pairs("rules", rules)},
        tuple(drain),
        tuple(resume),
        {name: _number("add", value, MAX_NODES) for name, value in _pairs("add", add)},
        first,
        {_number("walltimes", name, MAX_ID): _seconds(value) for name, value in _pairs("walltimes", walltimes)},
    )


def _pairs(field: str, texts: list[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if name in (known for known, _ in pairs):
            raise UsageError(f"{name} is named twice", field=field, value=text, hint="give it once")
        if not (name and equals and value):
            raise UsageError(f"{text!r} is no NAME=VALUE", field=field, value=text, hint="write it as name=value")
        pairs.append((name, value))
    return pairs


def _value(name: str, text: str) -> object:
    try:
        value = load_yaml(text)
    except DuplicateKey as error:
        raise UsageError(f"{text!r} is no value of {name}: {error}", field="rules", value=text) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{text!r} is no value of {name}", field="rules", value=text, hint="write it as in the configuration"
        ) from error
    return value


def _number(field: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= len(text) <= len(str(most)) and 1 <= int(text) <= most):
        raise UsageError(f"{text!r} is no number", field=field, value=text, hint=f"give a number from 1 to {most}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(str(seconds(text)))
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_DURATION:
        raise UsageError(f"{text!r} is no walltime", field="walltimes", value=text, hint="give seconds, 90m or 1:30:00")
    return value


ForecastView = view_model("ForecastView", Forecast)


class WhatIfView(Output):
    as_it_is: ForecastView  # type: ignore[valid-type]
    changed: ForecastView | None  # type: ignore[valid-type]
    """Null when no change was asked for."""


class JobForecastView(Output):
    ready: bool
    """False when it takes longer than one was to wait: it will be known a little later."""
    expected: Expected | None
    """Null of a job that is held or over, and of one that came within the last minute."""


class IfSubmittedView(Output):
    """When a job would start and end if it was submitted now."""

    at_once: bool
    """Whether it would be placed at once."""
    starts: Interval | None
    """Of zeros where it would start at once; null where it is not known, and where it starts in no simulation."""
    ends: Interval | None
    """Null where it is not known, and where the job would start at once."""
    not_run: float | None
    """The fraction of the simulations in which it did not come to its end; null where nothing was simulated."""
    basis: str
    """What its run time is estimated by; empty where nothing was simulated."""
    why: str
    """Why it is not known when it would start, in words; empty where it is."""


def _if_submitted(told: IfSubmitted) -> dict[str, Any]:
    expected = told.expected
    if expected is None:
        starts = Interval(0.0, 0.0, 0.0) if told.at_once else None
        return {"starts": starts, "ends": None, "not_run": None, "basis": "", "at_once": told.at_once, "why": told.why}
    why = "" if expected.starts else f"it started in no simulation of the next {format_days(HORIZON)}"
    told_too = {name: getattr(expected, name) for name in ("starts", "ends", "not_run", "basis")}
    return {"at_once": False, "why": why, **told_too}


def forecasts_router(service: Forecasts, jobs: Jobs) -> APIRouter:
    router = api_router("jobs")

    @router.post("/what-if", response_model=WhatIfView, responses=problem_responses(404))
    async def ask_what_if(question: WhatIf, request: Request) -> Any:
        """When those who wait will start and end, as it is, and if something was otherwise: simulated from this moment
        on, again and again with other run times. It takes some seconds; nothing is changed."""
        return await cancel_on_disconnect(request, service.what_if(question.change(), question.horizon))

    @router.post("/forecast", response_model=IfSubmittedView, responses=problem_responses(409))
    async def foretell_submission(submission: JobSubmission, caller: Caller, wait: Wait = 10.0) -> Any:
        """When a job would start if it was submitted now: at once, or as it is simulated, where that is known in time.
        Nothing is stored."""
        spec = await jobs.as_submitted(submission.to_model(), caller)
        return _if_submitted(await service.if_submitted(spec, wait))

    @router.get("/jobs/{job}/forecast", response_model=JobForecastView)
    async def foretell_job(job: Id, wait: Wait = 10.0) -> Any:
        """When a job is expected to start and to end, as of a minute ago at most."""
        ready, expected = await service.expected(job, wait)
        return {"ready": ready, "expected": expected}

    return router


Limit = Annotated[int, Query(ge=1, le=1000, description="how many lines at most")]
Application = Annotated[Text, Query(max_length=200, description="of this application only")]


class RunsView(Output):
    """Runs of an application of one size on one cluster, or on several together."""

    nodes: int
    processes_per_node: int | None
    """Null where the clusters' own number was taken."""
    clusters: int
    where: list[str]
    """The clusters, where they were several; empty for runs on any single one."""
    runs: int
    killed: int
    """Of the runs, at their walltime: they would have run for longer."""
    seconds: float
    """What they take, at speed 1: the mean of the middle half of their logarithms."""
    seconds_between: list[float]
    """Two bounds between which that lies with a probability of 80 %."""
    slowdown: float | None
    """How many times longer it is taken to run there than on one cluster; null on one."""
    slowdown_between: list[float] | None
    """Two bounds between which that lies with a probability of 80 %; null on one."""


class ApplicationView(Output):
    """What is known of an application, and what is decided for its jobs."""

    application: str
    clusters: int
    """The number of those that ``slowdown`` and ``verdict`` are for: on which it ran together most, else any 2."""
    slowdown: float
    slowdown_between: list[float]
    """Two bounds between which it lies with a probability of 80 %."""
    runs_on_several: int
    """Runs on several clusters that the slowdown was learned from."""
    killed_on_several: int
    """Of these, at their walltime."""
    verdict: str
    """Of a job for which several clusters have room now and one later: co-allocated, by the wait, one cluster, or not
    known yet."""
    runs: list[RunsView]


class AdvisorView(Output):
    applications: list[ApplicationView]


_Option = view_model("_Option", Option)
_Advised = view_model("_Advised", AdvisedPlacement, without={"options"})


class OptionView(_Option):  # type: ignore[misc, valid-type]
    """A way to run a job that was compared with others; seconds, null where they are not known."""

    response: float | None


class AdvisedView(_Advised):  # type: ignore[misc, valid-type]
    """An advice that was followed; seconds. ``actual``: from the opened barrier to the end, of jobs that succeeded."""

    options: list[OptionView]
    error: float | None
    """By what fraction of the actual time the prediction was too long; negative when it was too short."""


class AdvisorRecord(Output):
    record: list[AdvisedView]
    coverage: list[Coverage]
    """By kind and period, of the newest 20,000 predictions of a year; empty where there are none."""


def advisor_router(advisor: Advisor) -> APIRouter:
    router = api_router("advisor", "/advisor")

    @router.get("", response_model=AdvisorView)
    async def show_advisor(caller: Caller) -> Any:
        """Every application of which runs are known: how long they took, and what is decided for its jobs. Users see
        those that jobs of theirs have run."""
        return {"applications": [_application_view(found) for found in await advisor.applications(_only(caller))]}

    @router.get("/record", response_model=AdvisorRecord)
    async def show_advisor_record(caller: Caller, application: Application = "", limit: Limit = 100) -> Any:
        """Jobs that were placed by advice, newest first: what was compared, predicted, and what came; and how right all
        predictions were, by kind and period. Users are told of their jobs."""
        own = _only(caller)
        return {
            "record": await advisor.record(application, limit, own),
            "coverage": await advisor.coverage(application, own),
        }

    return router


def _only(caller: Identity) -> str | None:
    return None if caller.has_role(Role.OPERATOR) else caller.user


def _application_view(found: ApplicationRecord) -> dict[str, Any]:
    runs = [
        {
            "nodes": seen.size.nodes,
            "processes_per_node": seen.size.per_node or None,
            "clusters": len(seen.where) or 1,
            "where": list(seen.where),
            "runs": seen.runs,
            "killed": seen.killed,
            "seconds": seen.seconds.value,
            "seconds_between": [seen.seconds.low, seen.seconds.high],
            "slowdown": _slowdown(found.slowdowns[seen.where])[0] if seen.where else None,
            "slowdown_between": _slowdown(found.slowdowns[seen.where])[1:] if seen.where else None,
        }
        for seen in found.seen
    ]
    return {
        "application": found.application,
        "clusters": len(found.where) or 2,
        "slowdown": _slowdown(found.slowdown)[0],
        "slowdown_between": _slowdown(found.slowdown)[1:],
        "runs_on_several": found.runs_on_several,
        "killed_on_several": found.killed_on_several,
        "verdict": found.verdict,
        "runs": runs,
    }


def _slowdown(belief: LogNormal) -> list[float]:
    """What it is taken to be, and the bounds between which it likely is; several clusters are not faster than one."""
    return [max(1.0, each) for each in (belief.value, belief.low, belief.high)]
