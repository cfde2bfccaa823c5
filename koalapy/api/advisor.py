"""The routes of the advisor: what it has learned, and what it predicted against what came."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from koalapy.api.advisor_schemas import AdvisorRecord, AdvisorView
from koalapy.api.conversion import moment
from koalapy.api.fields import Text
from koalapy.api.problems import declared
from koalapy.api.queries import refuse_unknown
from koalapy.model.advice import Advised, Option
from koalapy.placement.belief import Belief
from koalapy.service.advisor import Advisor, ApplicationRecord

Limit = Annotated[int, Query(ge=1, le=1000, description="how many lines at most")]
Application = Annotated[Text, Query(max_length=200, description="of this application only")]


def advisor_router(advisor: Advisor) -> APIRouter:
    """What ``policy = auto`` goes by."""
    router = APIRouter(prefix="/api/v1/advisor", tags=["advisor"], dependencies=[Depends(refuse_unknown)])

    @router.get("", response_model=AdvisorView, operation_id="show_advisor", responses=declared(401, 422))
    async def show() -> Any:
        """Every application of which runs are known: how long they took, and what is decided for its jobs."""
        return {"applications": [_application_view(found) for found in advisor.applications()]}

    @router.get(
        "/record", response_model=AdvisorRecord, operation_id="show_advisor_record", responses=declared(401, 422, 503)
    )
    async def record(application: Application = "", limit: Limit = 100) -> Any:
        """Jobs that were placed by advice, newest first: what was compared, predicted, and what came."""
        return {"record": [_advised_view(given) for given in await advisor.record(application, limit)]}

    return router


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


def _slowdown(belief: Belief) -> list[float]:
    """What it is taken to be, and the bounds between which it likely is; several clusters are not faster than one."""
    return [max(1.0, each) for each in (belief.value, belief.low, belief.high)]


def _advised_view(given: Advised) -> dict[str, Any]:
    known = given.predicted is not None and given.actual
    return {
        "job": given.job,
        "generation": given.generation,
        "at": moment(given.at),
        "application": given.application,
        "clusters": given.clusters,
        "options": [_option_view(option) for option in given.options],
        "reason": given.reason,
        "predicted": given.predicted,
        "actual": given.actual,
        "error": (given.predicted or 0.0) / given.actual - 1.0 if known and given.actual else None,
    }


def _option_view(option: Option) -> dict[str, Any]:
    return {
        "clusters": list(option.clusters),
        "slowdown": option.slowdown,
        "wait": option.wait,
        "transfer": option.transfer,
        "run": option.run,
        "response": option.response,
    }
