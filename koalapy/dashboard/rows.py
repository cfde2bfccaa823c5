"""Rows of jobs, clusters and alerts, and the survey of all unfinished jobs that they show."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Any, Literal
from urllib.parse import quote, quote_plus

from koalapy.api.job_views import redact_job
from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.dashboard.charts import NodeCounts
from koalapy.model.alert import Alert, AlertKind
from koalapy.model.application import application_of
from koalapy.model.cluster import ClusterState
from koalapy.model.identity import Identity
from koalapy.model.job import ComponentState, Job, JobId, JobState
from koalapy.model.job_search import format_term
from koalapy.model.reports import LrmCalls, LrmOperation
from koalapy.model.request import ClusterName, FixedRequest
from koalapy.model.wording import shorten
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.grid import GridStatus
from koalapy.scheduler.queries import Queries
from koalapy.simulation.twin import Forecast
from koalapy.store.records import ClusterRecord
from koalapy.system.event_loop import iterate_in_slices
from koalapy.validation.permissions import may_see_all_of


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job in a table; times are seconds since the epoch."""

    id: JobId
    label: str
    """Its number, or ``7[3]`` for a task of an array."""
    redacted: bool
    """Whether the job belongs to another user, so that most fields are left out."""
    state: str
    name: str
    user: str
    priority: str
    nodes: int
    where: str
    """Clusters and nodes, such as ``north:4,south:2``; empty for a waiting job."""
    position: int | None
    """Position in its placement queue; 1 is the head."""
    submitted_at: float
    waits: bool
    waited: float | None
    """Seconds from submission to placement; None while the job waits."""
    started_at: float | None
    ran: float | None
    """Run time in seconds; None before the end of the job, and if it never ran."""
    ended_at: float | None
    reason: str
    application: str
    policy: str
    restarts: int
    home_site: str
    expected: float | None = None
    """Time of the start of a waiting job: as planned, else as forecast; None if neither is known."""


MAX_DARK = 5
"""Maximum number of clusters without an agent that are listed among the others."""
MAX_REASON_LENGTH = 500
"""Maximum length of a reason in a table, in characters. The page of the job shows the whole reason."""


def job_row(
    record: JobRecord,
    caller: Identity,
    position: int | None = None,
    forecast_start: float | None = None,
    *,
    whole_reason: bool = False,
) -> JobRow:
    """Return a job as the caller may see it in a table."""
    may_see_all = may_see_all_of(caller, record.job)
    visible = record if may_see_all else redact_job(record)
    job, spec = visible.job, visible.job.spec
    reason = "" if job.state in (JobState.RUNNING, JobState.SUCCEEDED) else visible.reason
    started_at = None if job.state.is_waiting or job.state in (JobState.PLACED, JobState.CLAIMING) else job.started_at
    if job.tasks is not None:
        reason = str(job.tasks) + (f"; {reason}" if reason and not job.tasks.live else "")
    return JobRow(
        id=job.id,
        label=job.display_name,
        redacted=not may_see_all,
        state=str(job.state),
        name=spec.name,
        user=spec.owner,
        priority=str(spec.priority),
        nodes=spec.request.total_size,
        where=""
        if job.state.is_waiting or not job.attempt
        else ",".join(f"{c.cluster}:{c.size}" for c in job.attempt.gang),
        position=position if may_see_all else None,
        submitted_at=job.submitted_at,
        waits=job.state.is_waiting,
        waited=None if job.state.is_waiting or job.placed_at is None else max(0.0, job.placed_at - job.submitted_at),
        started_at=started_at,
        ran=None if started_at is None or job.ended_at is None else max(0.0, job.ended_at - started_at),
        ended_at=job.ended_at,
        reason=reason if whole_reason else shorten(reason, MAX_REASON_LENGTH),
        application=application_of(spec) if may_see_all else "",
        policy=spec.policy,
        restarts=job.restarts,
        home_site=spec.home_site,
        expected=_expected_start(record.job, forecast_start) if may_see_all else None,
    )


def _expected_start(job: Job, forecast_start: float | None) -> float | None:
    """Return when a waiting job starts as planned, else as forecast; None in other states."""
    if not job.state.is_waiting:
        return None
    planned = job.planned_start
    return forecast_start if planned is None or planned.at is None else planned.at


ROWS_PER_SLICE = 20
"""Rows that are built before other tasks run."""


async def build_rows(
    found_jobs: Sequence[Job], caller: Identity, jobs: Jobs, queries: Queries, forecast: Forecast | None
) -> list[JobRow]:
    """Return the table rows of jobs, with their positions in the queues and expected starts."""
    positions = queries.queues.positions(found_jobs)
    expected = {} if forecast is None else {one.job: one.starts for one in forecast.jobs if one.starts is not None}
    at = 0.0 if forecast is None else forecast.at
    starts = {ident: at + start.middle for ident, start in expected.items()}
    rows: list[JobRow] = []
    async for some in iterate_in_slices(found_jobs, ROWS_PER_SLICE):
        rows += [job_row(jobs.make_record(job), caller, positions.get(job.id), starts.get(job.id)) for job in some]
    return rows


@dataclass(slots=True)
class SiteUse:
    """Jobs and nodes of a site's users, and nodes of other sites' users there; of jobs with home sites."""

    waiting: int = 0
    """Waiting jobs of the site's users."""
    at_home: int = 0
    """Nodes of their jobs on the site."""
    elsewhere: int = 0
    """Nodes of their jobs on other sites."""
    guests: int = 0
    """Nodes of other sites' users on the site."""


class Survey:
    """Counts of the unfinished jobs as stored, and of their nodes. ``update`` is called for each changed job."""

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self.running: Counter[ClusterName] = Counter()
        """Nodes of running components, by cluster."""
        self._requested: Counter[ClusterName] = Counter()
        """Waiting jobs that request the cluster."""
        self.listed = 0
        """Jobs that are no tasks of arrays: those that the page Jobs lists."""
        self._anywhere = 0
        """Waiting jobs that request no cluster."""
        self._site_use: defaultdict[ClusterName, SiteUse] = defaultdict(SiteUse)
        self._jobs: dict[JobId, Job] = {}
        """The counted jobs as they were counted."""
        self._by_age: list[tuple[float, JobId]] = []
        """Submission times of the queued jobs of users, as a heap. Entries of other jobs are dropped later."""
        for job in jobs:
            self.update(job)

    def count_waiting_for(self, cluster: ClusterName) -> int:
        """Return the number of waiting jobs with requests that allow the cluster."""
        return self._anywhere + self._requested[cluster]

    def site_use(self, site: ClusterName) -> SiteUse:
        """Return a site's use; zeros if no job has a home site."""
        return replace(self._site_use[site]) if site in self._site_use else SiteUse()

    @property
    def oldest(self) -> Job | None:
        """The oldest queued job of a user."""
        while self._by_age:
            job = self._jobs.get(self._by_age[0][1])
            if job is not None and job.state is JobState.QUEUED:
                return job
            heappop(self._by_age)
        return None

    def update(self, job: Job, _: JobState | None = None) -> None:
        """Count a job that has changed in place of its previous state. A final job is not counted."""
        previous = self._jobs.pop(job.id, None)
        if previous is not None:
            self._count(previous, -1)
        if job.state.is_final:
            return
        self._jobs[job.id] = job
        self._count(job, 1)
        was_queued = previous is not None and previous.state is JobState.QUEUED
        if job.state is JobState.QUEUED and not was_queued and not job.spec.internal:
            if len(self._by_age) > 2 * len(self._jobs):
                queued = (each for each in self._jobs.values() if each.state is JobState.QUEUED)
                self._by_age = [(each.submitted_at, each.id) for each in queued if not each.spec.internal]
                heapify(self._by_age)
            heappush(self._by_age, (job.submitted_at, job.id))

    def _count(self, job: Job, sign: int) -> None:
        """Add the counts of a job, or subtract them."""
        home = job.spec.home_site
        self.listed += sign * (job.array_job is None)
        if job.state is JobState.QUEUED:
            if home:
                self._site_use[home].waiting += sign
            request = job.spec.request
            if isinstance(request, FixedRequest):
                for cluster in {component.cluster or "" for component in request.components}:
                    self._requested[cluster] += sign
            else:
                self._anywhere += sign
        elif job.attempt is not None and job.state.is_active:
            for component in job.attempt.components:
                if component.state is ComponentState.RUNNING:
                    self.running[component.cluster] += sign * component.size
            for component in job.attempt.gang if home else ():
                if component.has_ended:
                    continue
                if component.cluster == home:
                    self._site_use[home].at_home += sign * component.size
                else:
                    self._site_use[home].elsewhere += sign * component.size
                    self._site_use[component.cluster].guests += sign * component.size


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """A cluster in a table."""

    cluster: str
    kind: str
    state: str
    reason: str
    """Problems of the cluster; empty if it is healthy."""
    nodes: NodeCounts
    total: int
    known_at: float | None = field(compare=False)
    """Time at which its nodes had these states; normally now."""
    stale: bool
    """Whether that time is in the past, or unknown."""
    connected: bool
    """Whether its agent is connected."""
    problem: str
    """The reason why its resource manager starts no jobs, as reported by its agent."""
    answers: LrmCalls | None
    """Calls that read the state of the resource manager; None if its agent does not report them."""
    waiting: int
    """Waiting jobs that could run on the cluster."""


def node_counts(cluster: ClusterStatus, survey: Survey) -> NodeCounts:
    """Return how many nodes of a cluster are in each state. Nodes of jobs that do not run yet are ``claimed``."""
    use = cluster.node_use
    running = min(survey.running[cluster.name], use.used)
    return NodeCounts(running, use.used - running, use.local, use.down, use.idle, use.withheld, use.unknown)


def sum_counts(rows: Iterable[ClusterRow]) -> NodeCounts:
    """Return the nodes of several clusters by state."""
    return NodeCounts(*map(sum, zip(*(row.nodes.by_state.values() for row in rows), strict=True)))


def cluster_row(cluster: ClusterStatus, record: ClusterRecord, survey: Survey, now: float) -> ClusterRow:
    """Return a cluster's row from its status and its record."""
    known_at = cluster.known_at(now)
    return ClusterRow(
        cluster=cluster.name,
        kind=record.kind,
        state=record.state,
        reason=shorten(record.reason, MAX_REASON_LENGTH),
        nodes=node_counts(cluster, survey),
        total=cluster.last_report.total,
        known_at=known_at,
        stale=known_at is None or known_at < now,
        connected=cluster.has_agent,
        problem=shorten(cluster.last_report.problem, MAX_REASON_LENGTH),
        answers=next((c for c in cluster.last_report.calls if c.operation == LrmOperation.SNAPSHOT), None),
        waiting=survey.count_waiting_for(cluster.name),
    )


def site_of(cluster: ClusterName) -> str:
    """Return the name of a cluster without its number: ``delft`` for ``delft-2``."""
    return re.sub(r"[-_.]?[0-9]+$", "", cluster) or cluster


def fold_clusters(rows: Sequence[ClusterRow], limit: int) -> tuple[list[ClusterRow], list[Mapping[str, Any]]]:
    """Return the clusters to list, and the others as folds, each with name, clusters and nodes; all in the same order.

    Clusters without an agent are a fold without a name if they are more than ``MAX_DARK``, though not all. If more than
    ``limit`` are left, those that need no attention are folded by site, and the first ``limit`` others are listed.
    """
    listed, parts = list(rows), defaultdict[str, list[ClusterRow]](list)
    dark = [row for row in listed if not row.connected]
    if MAX_DARK < len(dark) < len(listed):
        parts[""], listed = dark, [row for row in listed if row.connected]
    if len(listed) > limit:
        calm = [row for row in listed if severity(row) == 2]
        listed = [row for row in listed if severity(row) < 2]
        sizes = Counter(site_of(row.cluster) for row in calm)
        for row in sorted(calm, key=lambda row: site_of(row.cluster)):
            parts[site if sizes[site := site_of(row.cluster)] > 1 else "others"].append(row)
    return listed[:limit], [{"name": name, "clusters": some, "nodes": sum_counts(some)} for name, some in parts.items()]


@lru_cache(10_000)
def natural_key(name: str) -> str:
    """Return a sort key by which ``n2`` comes before ``n10``."""
    return re.sub(r"[0-9]+", lambda digits: digits[0].zfill(10), name)


def severity(row: ClusterRow) -> int:
    """Return how much attention a cluster needs: 0 for problems, 1 for drained, 2 for usable."""
    return {ClusterState.USABLE: 2, ClusterState.DRAINED: 1}.get(ClusterState(row.state), 0)


ClusterAction = Literal["", "drain", "clear"]
_PAGES = {
    AlertKind.DATABASE: ("/scheduler", "the scheduler"),
    AlertKind.DISK: ("/clusters", "the clusters"),
    AlertKind.SLOW_LINK: ("/network", "the network"),
    AlertKind.RELAY: ("/network", "the network"),
    AlertKind.REPLICAS_GONE: ("/files", "the files"),
}
"""Path and name of the page with details, for alerts that do not concern a cluster, job or user."""

_HELPED_BY_DRAINING = (AlertKind.RESOURCE_MANAGER, AlertKind.BLACK_HOLE, AlertKind.CLUSTER_FLAPPING)


@dataclass(frozen=True, slots=True)
class AlertRow:
    """An active alert in a list."""

    alert: Alert
    page: str
    """Path of the page with details; empty if there is none."""
    name: str
    """Subject of that page."""
    action: ClusterAction
    """The action on its cluster that resolves the alert."""


def alert_row(alert: Alert, grid: GridStatus) -> AlertRow:
    """Return an alert with the page of its details and the action that resolves it."""
    page, name = _details_page(alert)
    action: ClusterAction = ""
    if alert.cluster in grid and alert.kind in _HELPED_BY_DRAINING:
        cluster = grid[alert.cluster]
        if cluster.health.unusable and alert.kind is AlertKind.BLACK_HOLE:
            action = "clear"
        elif cluster.drained is None:
            action = "drain"
    return AlertRow(alert, page, name, action)


def _details_page(alert: Alert) -> tuple[str, str]:
    """Return the path and the name of the page about an alert's subject; empty if there is none."""
    if alert.kind in (AlertKind.SLOW_LINK, AlertKind.REPLICAS_GONE):
        return _PAGES[alert.kind]
    if alert.kind is AlertKind.QUEUE_FLOODED:
        words = quote_plus(f"{format_term('user', alert.user)} state:waiting")
        return f"/queue?q={words}", f"jobs of {alert.user} in the queue"
    if alert.job is not None:
        return f"/jobs/{alert.job}", f"job {alert.job}"
    if alert.cluster:
        return f"/clusters/{quote(alert.cluster, safe='')}", f"cluster {alert.cluster}"
    return _PAGES.get(alert.kind, ("", ""))
