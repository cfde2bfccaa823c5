"""The routes of the advisor: what it has learned, and what it predicted against what came."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from koalapy.api.access import Caller
from koalapy.api.derived import view_model
from koalapy.api.fields import Output, Text
from koalapy.api.routes import api_router
from koalapy.daemon.jobs.advisor import Advisor, ApplicationRecord
from koalapy.model.advice import Advised, Option
from koalapy.model.identity import Identity, Role
from koalapy.model.prediction import Coverage
from koalapy.policies.log_normal import LogNormal

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
_Advised = view_model("_Advised", Advised, without={"options"})


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
