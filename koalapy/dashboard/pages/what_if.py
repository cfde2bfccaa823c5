"""The page What if: when those who wait will start, as it is and if something was otherwise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Query

from koalapy.api.fields import MAX_ID, Name, Text
from koalapy.api.forecasts import MAX_CHANGES, Horizon, parse_change
from koalapy.daemon.forecast.forecasts import Forecasts
from koalapy.dashboard.dashboard import Dashboard
from koalapy.model.identity import Role
from koalapy.model.job import JobId, JobState
from koalapy.model.request import ClusterName
from koalapy.simulation.twin import HORIZON, Answer, Change, Forecast, Interval

MAX_LINES = 200
"""Jobs that are shown; the JSON of the REST API has all."""
Names = Annotated[list[Name], Query(max_length=MAX_CHANGES)]
HORIZONS = 3600.0, 86_400.0, 7 * 86_400.0, HORIZON
"""To choose from; another may stand in the address."""
Words = Annotated[Text, Query(max_length=10_000, description="NAME=VALUE, with blanks between them")]


@dataclass(frozen=True, slots=True)
class Asked:
    policy: str
    rules: str
    drain: Sequence[ClusterName]
    resume: Sequence[ClusterName]
    add: str
    first: str
    walltimes: str
    horizon: float


@dataclass(frozen=True, slots=True)
class Way:
    """What comes of all jobs; seconds from now."""

    name: str
    mean_wait: Interval | None
    mean_response: Interval | None
    utilisation: float
    draws: int
    never: int
    """Jobs that wait and start in no simulation before the horizon."""


@dataclass(frozen=True, slots=True)
class Line:
    """A job that waits; seconds from now, None where it starts in no simulation before the horizon."""

    job: JobId
    starts: Interval | None
    changed: Interval | None
    is_there: bool
    """With the change, too."""
    basis: str


@dataclass(frozen=True, slots=True)
class WhatIfView:
    asked: Asked
    policies: Sequence[str]
    horizons: Sequence[float]
    drained: Sequence[ClusterName]
    open: Sequence[ClusterName]
    """Clusters that are not drained."""
    waiting: int
    """Jobs, now."""
    ways: Sequence[Way]
    """As it is, and changed; none before anything is asked."""
    lines: Sequence[Line]
    more: int
    """Jobs that have no line."""
    most: float
    """Seconds: the latest bound of all lines."""


def ways_of(answer: Answer) -> list[Way]:
    def way(name: str, forecast: Forecast) -> Way:
        never = sum(job.state is JobState.QUEUED and job.starts is None for job in forecast.jobs)
        means = forecast.mean_wait, forecast.mean_response
        return Way(name, *means, forecast.utilisation, forecast.draws, never)

    return [way("as it is", answer.as_it_is), *([] if answer.changed is None else [way("changed", answer.changed)])]


def lines_of(answer: Answer) -> list[Line]:
    """A line for each job that waits, in the order in which they are expected to start."""
    later = {} if answer.changed is None else {job.job: job for job in answer.changed.jobs}
    lines = []
    for job in answer.as_it_is.jobs:
        if job.state is JobState.QUEUED:
            changed = later.get(job.job)
            starts = None if changed is None else changed.starts
            lines.append(Line(job.job, job.starts, starts, changed is not None, job.basis))
    return sorted(lines, key=lambda line: (line.starts is None, line.starts.middle if line.starts else 0.0, line.job))


def most_of(lines: Sequence[Line]) -> float:
    return max((each.high for line in lines for each in (line.starts, line.changed) if each is not None), default=0.0)


def add_what_if(dashboard: Dashboard, forecasts: Forecasts) -> None:
    engine = dashboard.engine

    @dashboard.page(
        "/what-if", "what_if.html", operation="ask_what_if", title="What if", key="i", role=Role.OPERATOR, live=False
    )
    async def what_if(
        ask: bool = False,
        policy: Name = "",
        rules: Words = "",
        drain: Names = [],  # noqa: B006 -- FastAPI copies it
        resume: Names = [],  # noqa: B006
        add: Words = "",
        first: Annotated[str, Query(max_length=len(str(MAX_ID)), pattern="^[0-9]*$")] = "",
        walltimes: Words = "",
        horizon: Horizon = HORIZON,
    ) -> WhatIfView:
        given = (rules.split(), drain, resume, add.split(), int(first) if first else None, walltimes.split())
        change = parse_change(policy, *given)
        answer = await forecasts.what_if(change, horizon) if ask or change != Change() else None
        lines = [] if answer is None else lines_of(answer)
        clusters = engine.queries.grid.clusters()
        return WhatIfView(
            asked=Asked(policy, rules, drain, resume, add, first, walltimes, horizon),
            policies=engine.queries.policies.names(),
            horizons=sorted({*HORIZONS, horizon}),
            drained=[each.name for each in clusters if each.drained is not None],
            open=[each.name for each in clusters if each.drained is None],
            waiting=sum(job.state is JobState.QUEUED for job in engine.queries.jobs()),
            ways=[] if answer is None else ways_of(answer),
            lines=lines[:MAX_LINES],
            more=max(0, len(lines) - MAX_LINES),
            most=most_of(lines[:MAX_LINES]),
        )
