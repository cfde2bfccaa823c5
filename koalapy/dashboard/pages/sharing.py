"""The page Sharing: whether every site is better off for taking part in the grid."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from koalapy.api.history import First, Last
from koalapy.daemon.engine.services import Services
from koalapy.dashboard.dashboard import Dashboard
from koalapy.model.identity import Role
from koalapy.model.request import ClusterName
from koalapy.simulation.sharing import SharingReport, Verdict


@dataclass(frozen=True, slots=True)
class SharingPageView:
    """Of jobs that were submitted in these days and are over."""

    first: date
    last: date
    report: SharingReport
    worse: Sequence[ClusterName]
    """Sites that would be better off by themselves."""
    most: float
    """Seconds: the longest mean response time of all."""
    mode: str
    """How the sites share now."""


def add_sharing(dashboard: Dashboard, services: Services) -> None:
    """At ``/sharing``."""
    engine = dashboard.engine

    @dashboard.page(
        "/sharing", "sharing.html", operation="show_sharing", title="Sharing", key="e", role=Role.OPERATOR, live=False
    )
    async def sharing(first: First = None, last: Last = None) -> SharingPageView:
        span = services.history.span(first, last)
        report = await services.sharing.report(span)
        return SharingPageView(
            first=span.first,
            last=span.last,
            report=report,
            worse=[site.site for site in report.sites if site.verdict is Verdict.WORSE],
            most=max((time for site in report.sites for time in (site.grid, site.alone) if time), default=0.0),
            mode=engine.queries.rules.sharing,
        )
