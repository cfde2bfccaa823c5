"""The page Now: how the grid stands at this moment, what is wrong first."""

from collections.abc import Sequence
from dataclasses import dataclass

from koalapy.api.access import Caller
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard
from koalapy.dashboard.lanes import Lane, Trouble, lane_of, problems_first, trouble_of
from koalapy.dashboard.survey import Surveyor
from koalapy.model.identity import Identity
from koalapy.model.job import Job
from koalapy.scheduler.queries import Queries
from koalapy.validation.permissions import may_see_all_of


@dataclass(frozen=True, slots=True)
class OldestJob:
    job: int
    since: float
    nodes: int
    owner: str
    """Empty where that is not for who asks, as is the reason."""
    reason: str


@dataclass(frozen=True, slots=True)
class NowView:
    troubles: Sequence[Trouble]
    """What is wrong, the most urgent first."""
    queued: int
    active: int
    nodes: int
    idle: int
    """Of the clusters of which it is known how they are now, and which may be used."""
    ours: int
    """Nodes that jobs of this scheduler have, or were promised."""
    stale: Sequence[str]
    """The clusters of which that is not known."""
    oldest: OldestJob | None
    lanes: Sequence[Lane]


def oldest_of(job: Job | None, queries: Queries, by: Identity) -> OldestJob | None:
    job = None if job is None else queries.job(job.id)
    if job is None:
        return None
    sees = may_see_all_of(by, job)
    return OldestJob(
        job.id,
        job.submitted_at,
        job.spec.request.total_size,
        job.spec.owner if sees else "",
        queries.waiting_reason(job) if sees else "",
    )


def add_now(dashboard: Dashboard, services: Services, surveyor: Surveyor) -> None:
    engine, queries = dashboard.engine, dashboard.engine.queries

    @dashboard.page("/", "now.html", operation="list_clusters", title="Now", key="n")
    async def now(caller: Caller) -> NowView:
        survey = await surveyor.survey()
        moment = engine.clock()
        records = services.jobs.clusters()
        lanes = problems_first([lane_of(queries.grid[each.name], each, survey, moment) for each in records])
        fresh = [lane for lane in lanes if not lane.stale]
        return NowView(
            troubles=[trouble_of(alert, queries.grid) for alert in services.alerts.visible_to(caller)],
            queued=engine.stored_queued,
            active=engine.stored_active,
            nodes=sum(lane.total for lane in lanes),
            idle=sum(lane.nodes.idle for lane in fresh if lane.state == "usable"),
            ours=sum(lane.nodes.running + lane.nodes.claimed for lane in lanes),
            stale=[lane.cluster for lane in lanes if lane.stale],
            oldest=oldest_of(survey.oldest, queries, caller),
            lanes=lanes,
        )
