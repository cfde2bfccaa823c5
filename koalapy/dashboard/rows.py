"""Rows of jobs, clusters and alerts, and the survey of all unfinished jobs that they show."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

from koalapy.api.job_views import redact_job
from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.jobs.jobs import JobRecord
from koalapy.dashboard.pictures import NodeCounts
from koalapy.dashboard.rendering import with_query
from koalapy.model.alert import Alert, AlertKind
from koalapy.model.cluster import ClusterState
from koalapy.model.identity import Identity
from koalapy.model.job import Attempt, ComponentState, Job, JobId, JobState
from koalapy.model.job_search import format_term
from koalapy.model.reports import LrmCalls, LrmOperation
from koalapy.model.request import ClusterName, FixedRequest
from koalapy.model.wording import shorten
from koalapy.ports import ClusterRecord
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.grid import GridStatus
from koalapy.system.event_loop import iterate_in_slices
from koalapy.validation.permissions import may_see_all_of


@dataclass(frozen=True, slots=True)
class JobRow:
    """Times are seconds since the epoch."""

    id: JobId
    redacted: bool
    """Whether it is somebody else's, so that most of it is left out."""
    state: str
    name: str
    user: str
    priority: str
    nodes: int
    where: str
    """``north:4,south:2``; empty of a job that waits."""
    position: int | None
    """In its placement queue; 1 is the head."""
    submitted_at: float
    waits: bool
    waited: float | None
    """Seconds from its submission until it was placed; None while it waits."""
    started_at: float | None
    ran: float | None
    """Seconds; None while it runs, or when it has not."""
    reason: str


MAX_REASON_LENGTH = 500
"""Characters of a reason in a table; the job's page shows all."""


def job_row(record: JobRecord, by: Identity, position: int | None = None, *, whole_reason: bool = False) -> JobRow:
    """Return the line of a job; ``position`` is left out of others' jobs, as by the REST API."""
    is_theirs = may_see_all_of(by, record.job)
    seen = record if is_theirs else redact_job(record)
    job, spec = seen.job, seen.job.spec
    reason = "" if job.state in (JobState.RUNNING, JobState.SUCCEEDED) else seen.reason
    began = None if job.state.is_waiting or job.state in (JobState.PLACED, JobState.CLAIMING) else job.started_at
    return JobRow(
        id=job.id,
        redacted=not is_theirs,
        state=str(job.state),
        name=spec.name,
        user=spec.owner,
        priority=str(spec.priority),
        nodes=spec.request.total_size,
        where=""
        if job.state.is_waiting or not job.attempt
        else ",".join(f"{c.cluster}:{c.size}" for c in job.attempt.gang),
        position=position if is_theirs else None,
        submitted_at=job.submitted_at,
        waits=job.state.is_waiting,
        waited=None if job.state.is_waiting or job.placed_at is None else max(0.0, job.placed_at - job.submitted_at),
        started_at=began,
        ran=None if began is None or job.ended_at is None else max(0.0, job.ended_at - began),
        reason=reason if whole_reason else shorten(reason, MAX_REASON_LENGTH),
    )


REST = 20.0
"""So many times as long as a look took, it is told again though something has changed since, until that is told."""


@dataclass(slots=True)
class SiteUse:
    """What a site's users have, and who else is there, of jobs that have home sites."""

    waiting: int = 0
    """Jobs of its users."""
    at_home: int = 0
    """Nodes of its users' jobs there."""
    elsewhere: int = 0
    """Nodes that they have on other sites."""
    guests: int = 0
    """Nodes that other sites' users' jobs have there."""


@dataclass(slots=True)
class Survey:
    """Nodes and jobs by cluster, as they were at one moment or a few milliseconds later."""

    running: Counter[ClusterName] = field(default_factory=Counter)
    """Nodes of components whose program runs."""
    named: Counter[ClusterName] = field(default_factory=Counter)
    """Waiting jobs that name the cluster."""
    anywhere: int = 0
    """Waiting jobs that name none."""
    waiting: int = 0
    """Jobs in the placement queues, and those that come back to them after a pause."""
    oldest: Job | None = None
    """Of those that wait."""
    homes: defaultdict[ClusterName, SiteUse] = field(default_factory=lambda: defaultdict(SiteUse))
    """By site."""

    def may_run_on(self, cluster: ClusterName) -> int:
        """How many jobs wait that might be placed there, as far as their requests say."""
        return self.anywhere + self.named[cluster]

    def note(self, job: Job) -> None:
        """Count one job that is not over."""
        if job.state is JobState.QUEUED:
            self._note_waiting(job)
        elif job.attempt is not None and job.state.is_active:
            for component in job.attempt.components:
                if component.state is ComponentState.RUNNING:
                    self.running[component.cluster] += component.size
            if job.spec.home_site:
                self._note_places(job.spec.home_site, job.attempt)

    def _note_places(self, home: ClusterName, attempt: Attempt) -> None:
        for component in attempt.gang:
            if component.has_ended:
                continue
            if component.cluster == home:
                self.homes[home].at_home += component.size
            else:
                self.homes[home].elsewhere += component.size
                self.homes[component.cluster].guests += component.size

    def _note_waiting(self, job: Job) -> None:
        self.waiting += 1
        if job.spec.home_site:
            self.homes[job.spec.home_site].waiting += 1
        request = job.spec.request
        if isinstance(request, FixedRequest):
            self.named.update({component.cluster or "" for component in request.components})
        else:
            self.anywhere += 1
        if not job.spec.internal and (self.oldest is None or job.submitted_at < self.oldest.submitted_at):
            self.oldest = job


class SurveyCache:
    """Looks when somebody asks, and with many jobs not each time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._looking: asyncio.Task[Survey] | None = None
        self._version, self._at, self._took = "", 0.0, 0.0

    async def survey(self) -> Survey:
        """As it is now, or was a moment ago."""
        now, looking = asyncio.get_running_loop().time(), self._looking
        failed = looking is not None and looking.done() and (looking.cancelled() or looking.exception() is not None)
        if looking is None or failed or not self._is_good(now):
            looking = self._looking = asyncio.ensure_future(self._look())
            self._version, self._at = self._engine.changes.version, now
        return await asyncio.shield(looking)

    def _is_good(self, now: float) -> bool:
        changes = self._engine.changes
        return self._version == changes.version or changes.told_at < self._at > now - REST * self._took

    async def _look(self) -> Survey:
        survey, began = Survey(), time.thread_time()
        async for some in iterate_in_slices(self._engine.queries.jobs()):
            for job in some:
                survey.note(job)
        self._took = time.thread_time() - began
        return survey


@dataclass(frozen=True, slots=True)
class CallStatistics:
    """How a resource manager answered its agent in one way, since the agent began; seconds."""

    operation: str
    count: int
    failures: int
    mean: float | None
    largest: float
    """Of the last minutes."""
    last_error: str
    failed_at: float | None
    """When it last failed."""


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """One cluster."""

    cluster: str
    kind: str
    state: str
    reason: str
    """Everything that an operator should know of it; empty when all is well."""
    nodes: NodeCounts
    total: int
    known_at: float | None
    """The moment of which its nodes are known: now, as a rule."""
    stale: bool
    """Whether that is past, so that what is shown may not be so any more."""
    connected: bool
    """Whether its agent is connected."""
    heard_at: float | None
    """When its agent was last heard of, where it is not connected."""
    away_because: str
    """Why its agent is not connected."""
    problem: str
    """Why nothing can be started there, by what its agent knows of its resource manager."""
    answers: CallStatistics | None
    """How its resource manager answers when it is looked at; None of an agent that does not tell."""
    waiting: int
    """Jobs that wait and might run there."""
    drained: bool
    given_up: bool
    """Whether it was given up after errors in a row, so that it may be cleared."""


def node_counts(cluster: ClusterStatus, survey: Survey) -> NodeCounts:
    running = min(survey.running[cluster.name], cluster.used)
    return NodeCounts(
        running=running,
        claimed=cluster.used - running,
        local=cluster.background,
        down=cluster.down,
        idle=max(0, cluster.total - cluster.used - cluster.background - cluster.down),
    )


def call_statistics(told: LrmCalls, reported_at: float | None) -> CallStatistics:
    ago = told.failed_ago
    return CallStatistics(
        operation=told.operation,
        count=told.count,
        failures=told.failures,
        mean=told.seconds / told.count if told.count else None,
        largest=told.largest,
        last_error=told.last_error,
        failed_at=None if ago is None or reported_at is None else reported_at - ago,
    )


def cluster_row(cluster: ClusterStatus, record: ClusterRecord, survey: Survey, now: float) -> ClusterRow:
    """``record`` is of the same cluster."""
    known_at = cluster.known_at(now)
    looks = [told for told in cluster.calls if told.operation == LrmOperation.SNAPSHOT]
    return ClusterRow(
        cluster=cluster.name,
        kind=record.kind,
        state=record.state,
        reason=shorten(record.reason, MAX_REASON_LENGTH),
        nodes=node_counts(cluster, survey),
        total=cluster.total,
        known_at=known_at,
        stale=known_at is None or known_at < now,
        connected=cluster.has_agent,
        heard_at=None if cluster.has_agent else cluster.contact.last_heard,
        away_because=cluster.absence,
        problem=shorten(cluster.problem, MAX_REASON_LENGTH),
        answers=call_statistics(looks[0], cluster.reported_at) if looks else None,
        waiting=survey.may_run_on(cluster.name),
        drained=cluster.drained is not None,
        given_up=cluster.health.unusable,
    )


def sort_by_problem(lanes: Sequence[ClusterRow]) -> list[ClusterRow]:
    """What is not well before what is, then by name."""
    well = (ClusterState.USABLE, ClusterState.DRAINED)
    return sorted(lanes, key=lambda lane: (lane.state in well, lane.state == ClusterState.USABLE, lane.cluster))


ClusterAction = Literal["", "drain", "clear"]
_WHERE = {
    AlertKind.DATABASE: ("/scheduler", "the scheduler"),
    AlertKind.DISK: ("/clusters", "the clusters"),
    AlertKind.SLOW_LINK: ("/network", "the network"),
    AlertKind.REPLICAS_GONE: ("/files", "the files"),
}
"""The page that says more, and its name, of kinds that are about no cluster, job or user."""

_HELPED_BY_DRAINING = (AlertKind.RESOURCE_MANAGER, AlertKind.BLACK_HOLE, AlertKind.CLUSTER_FLAPPING)


@dataclass(frozen=True, slots=True)
class AlertRow:
    """One thing that is wrong now."""

    alert: Alert
    where: str
    """The page that says more; empty where none does."""
    name: str
    """What that page is about."""
    action: ClusterAction
    """What an operator may do to its cluster that helps."""


def alert_row(alert: Alert, grid: GridStatus) -> AlertRow:
    """With where to look, and what may be done."""
    where, name = _where(alert)
    return AlertRow(alert, where, name, _action(alert, grid))


def _where(alert: Alert) -> tuple[str, str]:
    if alert.kind in (AlertKind.SLOW_LINK, AlertKind.REPLICAS_GONE):
        return _WHERE[alert.kind]
    if alert.kind is AlertKind.QUEUE_FLOODED:
        return with_query(
            "/queue", q=f"{format_term('user', alert.user)} state:waiting"
        ), f"what {alert.user} has in the queue"
    if alert.job is not None:
        return f"/jobs/{alert.job}", f"job {alert.job}"
    if alert.cluster:
        return f"/clusters/{quote(alert.cluster, safe='')}", f"cluster {alert.cluster}"
    return _WHERE.get(alert.kind, ("", ""))


def _action(alert: Alert, grid: GridStatus) -> ClusterAction:
    if alert.cluster not in grid or alert.kind not in _HELPED_BY_DRAINING:
        return ""
    cluster = grid[alert.cluster]
    if cluster.health.unusable and alert.kind is AlertKind.BLACK_HOLE:
        return "clear"
    return "" if cluster.drained is not None else "drain"
