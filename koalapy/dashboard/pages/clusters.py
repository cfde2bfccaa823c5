"""The pages Now, Clusters and one cluster, with the actions drain, resume and clear."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from urllib.parse import quote

from koalapy.api.access import Caller
from koalapy.api.clusters import Name
from koalapy.daemon.observability.instruments import Instruments
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard, SentForm
from koalapy.dashboard.pictures import NodeCounts
from koalapy.dashboard.rows import (
    AlertRow,
    CallStatistics,
    ClusterRow,
    SiteUse,
    SurveyCache,
    alert_row,
    call_statistics,
    cluster_row,
    sort_by_problem,
)
from koalapy.model.cluster import Drain, NodeClass, Uplink
from koalapy.model.disk import Disk
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Job
from koalapy.model.profile import ClusterProfile
from koalapy.model.reports import LrmOperation, Versions
from koalapy.model.request import ClusterName
from koalapy.scheduler.cluster_conditions import HealthStatus
from koalapy.scheduler.clusters import ClusterStatus
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
    troubles: Sequence[AlertRow]
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
    lanes: Sequence[ClusterRow]


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


def add_now(dashboard: Dashboard, services: Services, surveyor: SurveyCache) -> None:
    engine, queries = dashboard.engine, dashboard.engine.queries

    @dashboard.page("/", "now.html", operation="list_clusters", title="Now", key="n")
    async def now(caller: Caller) -> NowView:
        survey = await surveyor.survey()
        moment = engine.clock()
        records = services.jobs.list_clusters()
        lanes = sort_by_problem([cluster_row(queries.grid[each.name], each, survey, moment) for each in records])
        fresh = [lane for lane in lanes if not lane.stale]
        return NowView(
            troubles=[alert_row(alert, queries.grid) for alert in services.alerts.visible_to(caller)],
            queued=engine.stored_queued,
            active=engine.stored_active,
            nodes=sum(lane.total for lane in lanes),
            idle=sum(lane.nodes.idle for lane in fresh if lane.state == "usable"),
            ours=sum(lane.nodes.running + lane.nodes.claimed for lane in lanes),
            stale=[lane.cluster for lane in lanes if lane.stale],
            oldest=oldest_of(survey.oldest, queries, caller),
            lanes=lanes,
        )


MAX_COMPONENTS_SHOWN = 100


OF_NO_JOB = frozenset({LrmOperation.OPEN, LrmOperation.SNAPSHOT, LrmOperation.VERSION})
"""Calls that are about no single job: errors of others may tell whose a job is and what it runs."""
PLACES = ("directory", "replica_directories")
"""Of what a kind of cluster has to tell, what has no place of its own on the page."""


@dataclass(frozen=True, slots=True)
class ClustersView:
    """All clusters, those that are not well first."""

    lanes: Sequence[ClusterRow]
    nodes: NodeCounts
    """Of all of them together."""


@dataclass(frozen=True, slots=True)
class ComponentThere:
    """A component that has nodes on a cluster, or was promised some."""

    job: int
    rank: int
    size: int
    state: str
    owner: str
    """Empty where that is not for who asks."""
    claimed_at: float | None


@dataclass(frozen=True, slots=True)
class Failures:
    """Claims and attempts since the daemon began, and what failed of them for which causes; causes that there were."""

    claims: int
    """Components all of whose nodes have reported."""
    claims_failed: Mapping[str, int]
    attempts_failed: Mapping[str, int]
    """By no fault of their programs."""


@dataclass(frozen=True, slots=True)
class ClusterPage:
    lane: ClusterRow
    homes: SiteUse
    """Who shares with whom there; nothing where jobs have no home sites."""
    troubles: Sequence[AlertRow]
    drained: Drain | None
    health: HealthStatus
    """Errors in a row, and probation."""
    threshold: int
    """From so many errors on it is given up."""
    limit: str
    doubt: str
    """Why nodes that are said to be idle are not believed to be."""
    failures: Failures
    notices: Sequence[str]
    """What its agent tells people."""
    lacks: Sequence[str]
    """Programs that are missing there."""
    versions: Versions | None
    calls: Sequence[CallStatistics]
    told_at: float | None
    """When its agent last told how its resource manager answers."""
    disks: Sequence[Disk]
    components: Sequence[ComponentThere]
    held: int
    """How many components there are in all."""
    profile: ClusterProfile
    speed: float
    node_classes: Sequence[NodeClass]
    """The nodes that may be placed on now, by what they are; none where they are not known to differ."""
    uplink: Uplink | None
    details: Mapping[str, object]


def failures_of(instruments: Instruments, cluster: ClusterName) -> Failures:
    claims, attempts = instruments.claims_failed.most_common(), instruments.attempts_failed.most_common()
    return Failures(
        instruments.claims[cluster],
        {str(cause): count for (where, cause), count in claims if where == cluster},
        {str(cause): count for (where, cause), count in attempts if where == cluster},
    )


def calls_seen(cluster: ClusterStatus, by: Identity) -> list[CallStatistics]:
    """How its resource manager answered; what it said of jobs, which may be anybody's, is for operators."""
    told = [call_statistics(each, cluster.reported_at) for each in cluster.calls]
    if by.has_role(Role.OPERATOR):
        return told
    return [each if each.operation in OF_NO_JOB else replace(each, last_error="") for each in told]


def components_on(cluster: ClusterStatus, queries: Queries, by: Identity) -> Iterator[ComponentThere]:
    for token, size in islice(cluster.live.items(), MAX_COMPONENTS_SHOWN):
        found = queries.find(token)
        if found is not None:
            job, component = found
            owner = job.spec.owner if may_see_all_of(by, job) else ""
            yield ComponentThere(job.id, component.rank, size, component.state, owner, component.claimed_at)


def add_clusters(dashboard: Dashboard, services: Services, surveyor: SurveyCache) -> None:
    engine, queries = dashboard.engine, dashboard.engine.queries

    @dashboard.page("/clusters", "clusters.html", operation="list_clusters", title="Clusters", key="c")
    async def clusters() -> ClustersView:
        survey, now = await surveyor.survey(), engine.clock()
        lanes = [cluster_row(queries.grid[each.name], each, survey, now) for each in services.jobs.list_clusters()]
        together: Counter[str] = Counter()
        for lane in lanes:
            together.update(asdict(lane.nodes))
        return ClustersView(sort_by_problem(lanes), NodeCounts(**together))

    @dashboard.page("/clusters/{name}", "cluster.html", operation="show_cluster", title="A cluster")
    async def cluster(name: Name, caller: Caller) -> ClusterPage:
        record, survey, now = services.jobs.get_cluster(name), await surveyor.survey(), engine.clock()
        known = queries.grid[name]
        return ClusterPage(
            lane=cluster_row(known, record, survey, now),
            homes=survey.homes.get(name, SiteUse()),
            troubles=[
                alert_row(alert, queries.grid) for alert in services.alerts.visible_to(caller) if alert.cluster == name
            ],
            drained=known.drained,
            health=replace(known.health),
            threshold=queries.rules.error_threshold,
            limit="" if known.limit is None else str(known.limit),
            doubt="" if known.doubt is None else str(known.doubt),
            failures=failures_of(engine.instruments, name),
            notices=known.notices,
            lacks=sorted(known.lacks),
            versions=known.versions,
            calls=calls_seen(known, caller),
            told_at=known.reported_at,
            disks=known.disks,
            components=list(components_on(known, queries, caller)),
            held=len(known.live),
            profile=known.profile,
            speed=known.speed,
            node_classes=known.node_classes,
            uplink=queries.grid.uplinks.get(name),
            details={name: told for name, told in record.details.items() if name in PLACES},
        )

    _add_actions(dashboard, services)


def _add_actions(dashboard: Dashboard, services: Services) -> None:
    def page_of(name: str) -> str:
        return f"/clusters/{quote(name, safe='')}"

    @dashboard.action("/clusters/{name}/drain", operation="drain_cluster")
    async def drain(name: Name, caller: Caller, form: SentForm) -> str:
        """Place nothing more on it."""
        await services.jobs.drain_cluster(name, caller, form.reason)
        return page_of(name)

    @dashboard.action("/clusters/{name}/resume", operation="resume_cluster")
    async def resume(name: Name, form: SentForm) -> str:
        """Use it again."""
        await services.jobs.resume_cluster(name)
        return page_of(name)

    @dashboard.action("/clusters/{name}/clear", operation="clear_cluster")
    async def clear(name: Name, form: SentForm) -> str:
        """Count its errors from zero again."""
        await services.jobs.clear_cluster(name)
        return page_of(name)
