"""The page What if: simulated starts of waiting jobs, in the current state and with hypothetical changes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends, Query
from pydantic import Field

from koalapy.api.fields import MAX_ID, Name, Text
from koalapy.api.forecasts import MAX_CHANGES, Horizon, WhatIf
from koalapy.daemon.forecast.forecasts import Forecasts
from koalapy.dashboard.dashboard import Dashboard, Simulate, parse_body
from koalapy.dashboard.rendering import with_query
from koalapy.model.identity import Role
from koalapy.model.job import JobId, JobState
from koalapy.model.request import ClusterName
from koalapy.simulation.twin import HORIZON, Answer, Forecast, Interval, Report, ignore_progress

MAX_LINES = 200
"""Maximum number of displayed jobs; the REST API returns all."""
Names = Annotated[list[Name], Query(max_length=MAX_CHANGES)]
HORIZONS_S = 3600.0, 86_400.0, 7 * 86_400.0, HORIZON
"""Horizons that the form offers; a link may contain any other."""
Pairs = Annotated[
    list[Annotated[Text, Field(max_length=10_000)]],
    Query(max_length=MAX_CHANGES, description="NAME=VALUE, separated by blanks"),
]


@dataclass(frozen=True, slots=True)
class SimulatedOutcome:
    """The simulated outcome for all jobs, without the single jobs."""

    name: str
    forecast: Forecast
    never: int
    """Waiting jobs that start in no simulation before the horizon."""


@dataclass(frozen=True, slots=True)
class Line:
    """A waiting job; seconds from now, None if it starts in no simulation before the horizon."""

    job: JobId
    starts: Interval | None
    changed: Interval | None
    is_changed_too: bool
    """Whether the simulation of the changes has the job."""
    basis: str


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The results of the simulations."""

    outcomes: Sequence[SimulatedOutcome]
    """Outcomes of the current and the changed state."""
    lines: Sequence[Line]
    more: int
    """Number of jobs that are not shown."""
    most: float
    """Latest bound of all shown intervals, in seconds."""


@dataclass(frozen=True, slots=True)
class WhatIfView:
    """The form, and the results of the simulations."""

    asked: WhatIf
    policies: Sequence[str]
    horizons: Sequence[float]
    drained: Sequence[ClusterName]
    open: Sequence[ClusterName]
    """Clusters that are not drained."""
    waiting: int
    """Waiting jobs now."""
    simulation: str
    """The path from which the page gets the results; empty if none were requested, or if they are in ``result``."""
    result: SimulationResult | None


def outcomes_of(answer: Answer) -> list[SimulatedOutcome]:
    """Return the mean times, utilisation and jobs that never start, for the current and the changed state."""
    outcomes = []
    for name, forecast in (("current", answer.as_it_is), ("changed", answer.changed)):
        if forecast is not None:
            never = sum(job.state is JobState.QUEUED and job.starts is None for job in forecast.jobs)
            outcomes.append(SimulatedOutcome(name, replace(forecast, jobs=()), never))
    return outcomes


def lines_of(answer: Answer) -> list[Line]:
    """Return the waiting jobs in the order of their expected starts."""
    changed_jobs = {} if answer.changed is None else {job.job: job for job in answer.changed.jobs}
    lines = []
    for job in answer.as_it_is.jobs:
        if job.state is JobState.QUEUED:
            changed = changed_jobs.get(job.job)
            starts = None if changed is None else changed.starts
            lines.append(Line(job.job, job.starts, starts, changed is not None, job.basis))
    return sorted(lines, key=lambda line: (line.starts is None, line.starts.middle if line.starts else 0.0, line.job))


def result_of(answer: Answer) -> SimulationResult:
    """Return what the page shows of an answer."""
    lines = lines_of(answer)
    intervals = [interval for line in lines[:MAX_LINES] for interval in (line.starts, line.changed) if interval]
    most = max((interval.high for interval in intervals), default=0.0)
    return SimulationResult(outcomes_of(answer), lines[:MAX_LINES], max(0, len(lines) - MAX_LINES), most)


async def read_form(
    policy: Name = "",
    rules: Pairs = [],  # noqa: B006 -- FastAPI copies it
    drain: Names = [],  # noqa: B006
    resume: Names = [],  # noqa: B006
    add: Pairs = [],  # noqa: B006
    first: Annotated[str, Query(max_length=len(str(MAX_ID)), pattern="^[0-9]*$")] = "",
    walltimes: Pairs = [],  # noqa: B006
    horizon: Horizon = HORIZON,
) -> WhatIf:
    """Return the hypothetical changes in the query of a request, in which a field has pairs separated by blanks."""
    pairs = {
        name: " ".join(texts).split() for name, texts in (("rules", rules), ("add", add), ("walltimes", walltimes))
    }
    values = {"policy": policy, "drain": drain, "resume": resume, "first": int(first) if first else None, **pairs}
    return parse_body(WhatIf, values | {"horizon": horizon})


Asked = Annotated[WhatIf, Depends(read_form)]


def add_what_if(dashboard: Dashboard, forecasts: Forecasts) -> None:
    """Add the page that simulates waiting jobs in the current and in a changed state."""
    engine = dashboard.engine

    @dashboard.simulation("/what-if/result", "what_if_result.html", operation="ask_what_if")
    async def prepare(asked: Asked) -> Simulate:
        """Return the simulation of the changes. Raise ``UsageError`` or ``NotFoundError`` if they are invalid."""
        change = asked.to_change()
        forecasts.check_change(change)

        async def simulate(report: Report) -> SimulationResult:
            return result_of(await forecasts.what_if(change, asked.horizon, report))

        return simulate

    @dashboard.page(
        "/what-if", "what_if.html", operation="ask_what_if", title="What if", key="i", role=Role.OPERATOR, live=False
    )
    async def what_if(asked: Asked, ask: bool = False, complete: bool = False) -> WhatIfView:
        """Return the form, and the path of the results if there are changes or the form was sent.

        ``complete``: wait for the results, for browsers without scripts.
        """
        is_asked = ask or asked.model_copy(update={"horizon": HORIZON}) != WhatIf()
        simulate = await prepare(asked) if is_asked else None
        values = asked.model_dump() | {"horizon": f"{asked.horizon:.15g}s"}
        clusters = engine.queries.grid.clusters()
        return WhatIfView(
            asked=asked,
            policies=engine.queries.policies.names(),
            horizons=sorted({*HORIZONS_S, asked.horizon}),
            drained=[cluster.name for cluster in clusters if cluster.drained is not None],
            open=[cluster.name for cluster in clusters if cluster.drained is None],
            waiting=sum(job.state is JobState.QUEUED for job in engine.queries.jobs()),
            simulation=with_query("/what-if/result", **values) if simulate and not complete else "",
            result=await simulate(ignore_progress) if simulate and complete else None,
        )
