"""The route of load sharing: whether every site is better off for taking part."""

from datetime import date
from typing import Any

from fastapi import APIRouter, Request

from koalapy.api.fields import Moment, Output
from koalapy.api.history import First, Last
from koalapy.api.routes import api_router, cancel_on_disconnect
from koalapy.daemon.forecast.sharing import Sharing
from koalapy.daemon.jobs.history import History
from koalapy.simulation.sharing import Verdict, WhyLeftOut


class SiteShareView(Output):
    """A site's own users' jobs; times are means in seconds from submission to end, null where there are none."""

    site: str
    nodes: int
    """The most that it had in these days."""
    speed: float
    jobs: int
    """That count: they ran to an end of their own, and could have at home."""
    elsewhere: int
    """Of these, those that ran at least in part on other sites."""
    too_wide: int
    """Beside these: jobs that nobody but the grid could run."""
    grid: float | None
    """As it was."""
    alone: float | None
    """As it would have been on that site by itself: the same jobs, simulated."""
    gain: float | None
    """What the grid saves of each job on average."""
    low: float | None
    """With ``high`` the bounds between which the gain lies in 95 of 100 cases; null for fewer than 10 jobs."""
    high: float | None
    verdict: Verdict


class LeftOutView(Output):
    """Jobs that are in no mean."""

    why: WhyLeftOut
    count: int
    jobs: list[int]
    """The first 100."""


class SharingView(Output):
    first: date
    last: date
    start: Moment
    end: Moment
    every_site: Verdict
    """``better`` where no site is worse off and one is better; ``unclear`` where that cannot be told of all."""
    sites: list[SiteShareView]
    left_out: list[LeftOutView]


def sharing_router(service: Sharing, history: History) -> APIRouter:
    """Who gains by sharing."""
    router = api_router("history", "/sharing")

    @router.get("", response_model=SharingView)
    async def show_sharing(request: Request, first: First = None, last: Last = None) -> Any:
        """Whether every site is better off for taking part: the response times of its own users' jobs as they were, and
        as they would have been on that site by itself, which is simulated. Of jobs that were submitted in these days
        and are over; it takes some seconds."""
        span = history.span(first, last)
        report = await cancel_on_disconnect(request, service.report(span))
        told = {name: getattr(report, name) for name in ("start", "end", "every_site", "sites", "left_out")}
        return SharingView.model_validate({"first": span.first, "last": span.last, **told})

    return router
