"""Rows of jobs and clusters, and the survey of all unfinished jobs that they show."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from koalapy.api.job_views import redact_job
from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.dashboard.charts import NodeCounts
from koalapy.model.application import application_of
from koalapy.model.cluster import ClusterState
from koalapy.model.identity import Identity
from koalapy.model.job import ComponentState, Job, JobId, JobState
from koalapy.model.reports import LrmCalls, LrmOperation
from koalapy.model.request import ClusterName, FixedRequest
from koalapy.model.wording import shorten
from koalapy.scheduler.clusters import ClusterStatus
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
    planned = record.job.planned_start
    expected = forecast_start if planned is None or planned.at is None else planned.at
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
        expected=expected if may_see_all and job.state.is_waiting else None,
    )


ROWS_PER_SLICE = 20
"""Rows that are built before other tasks run."""


async def build_rows(
    found_jobs: Sequence[Job], caller: Identity, jobs: Jobs, queries: Queries, forecast: Forecast | None
) -> list[JobRow]:
    """Return the table rows of jobs, with their positions in the queues and expected starts."""
    positions = queries.queues.positions(found_jobs)
    expected = {} if forecast is None else {run.job: run.starts for run in forecast.jobs if run.starts is not None}
    made_at = 0.0 if forecast is None else forecast.at
    starts = {ident: made_at + start.middle for ident, start in expected.items()}
    rows: list[JobRow] = []
    async for batch in iterate_in_slices(found_jobs, ROWS_PER_SLICE):
        rows += [job_row(jobs.make_record(job), caller, positions.get(job.id), starts.get(job.id)) for job in batch]
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
        self._oldest: Job | None = None
        """The oldest queued job of a user, or one that has left that state."""
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
        job = self._oldest and self._jobs.get(self._oldest.id)
        if job is None or job.state is not JobState.QUEUED:
            queued = (job for job in self._jobs.values() if job.state is JobState.QUEUED and not job.spec.internal)
            job = min(queued, key=lambda job: job.submitted_at, default=None)
        self._oldest = job
        return job

    def update(self, job: Job, _: JobState | None = None) -> None:
        """Count a job that has changed in place of its previous state. A final job is not counted."""
        previous = self._jobs.pop(job.id, None)
        if previous is not None:
            self._count(previous, -1)
        if job.state.is_final:
            return
        self._jobs[job.id] = job
        self._count(job, 1)
        is_older = self._oldest is None or job.submitted_at < self._oldest.submitted_at
        if is_older and job.state is JobState.QUEUED and not job.spec.internal:
            self._oldest = job

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
    return listed[:limit], [{"name": name, "clusters": rows, "nodes": sum_counts(rows)} for name, rows in parts.items()]


@lru_cache(10_000)
def natural_key(name: str) -> str:
    """Return a sort key by which ``n2`` comes before ``n10``."""
    return re.sub(r"[0-9]+", lambda digits: digits[0].zfill(10), name)


def severity(row: ClusterRow) -> int:
    """Return how much attention a cluster needs: 0 for problems, 1 for drained, 2 for usable."""
    return {ClusterState.USABLE: 2, ClusterState.DRAINED: 1}.get(ClusterState(row.state), 0)


TileSort = Literal["trouble", "load", "name"]
"""The order of the clusters: those with problems first, then by load; by the share of used nodes; by name."""


def sort_tiles(rows: Sequence[ClusterRow], order: TileSort) -> list[ClusterRow]:
    """Return clusters in an order of tiles; ties by name."""
    by_name = sorted(rows, key=lambda row: natural_key(row.cluster))
    if order == "name":
        return by_name
    by_load = sorted(by_name, key=lambda row: -(row.nodes.ours + row.nodes.local) / max(1, row.total))
    return by_load if order == "load" else sorted(by_load, key=severity)
