"""The daemon in figures at a moment: jobs by state, nodes by what they do, and what it says of its clusters."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from koalapy.daemon.alerts.alerts import Alerts
from koalapy.daemon.alerts.health import Check, HealthMonitor
from koalapy.daemon.engine.engine import Engine
from koalapy.model.alert import AlertKind, Severity
from koalapy.model.cluster import ClusterState
from koalapy.model.disk import Disk
from koalapy.model.job import Job, JobState, Priority
from koalapy.model.reports import LrmCalls, LrmOperation, Versions
from koalapy.model.request import ClusterName
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.system.event_loop import iterate_in_slices

OPERATIONS = frozenset(str(operation) for operation in LrmOperation)


@dataclass(frozen=True, slots=True)
class JobFigures:
    """Users' jobs that are not over, and the daemon's own."""

    counts: Mapping[tuple[JobState, Priority], int]
    oldest: Mapping[JobState, float]
    """Seconds for which the oldest of a state has waited to be placed, been placed, or been started."""
    internal: int
    staging: int
    """Components for which files are being brought."""
    missing: int
    """Bytes of these that have not come."""
    by_site: Mapping[tuple[ClusterName, JobState], int]
    """Of jobs with a home site."""


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """One cluster; nodes, and ages in seconds, None where it was never heard of."""

    name: ClusterName
    state: ClusterState
    is_connected: bool
    has_problem: bool
    """Whether its agent says that nothing can be started there."""
    total: int
    idle: int
    used: int
    """By our jobs, or promised to them."""
    background: int
    down: int
    doubted: int
    """Said to be idle, and not believed to be."""
    errors: int
    """In a row."""
    reported_ago: float | None
    """What is known of its nodes is as old as that."""
    outbox: int
    """Commands that its agent has not acknowledged."""
    components: int
    """Of our jobs that may hold nodes there."""
    versions: Versions | None
    calls: Sequence[LrmCalls]
    """Of the operations that we know."""


@dataclass(frozen=True, slots=True)
class Figures:
    """All of it."""

    jobs: JobFigures
    clusters: Sequence[ClusterFigures]
    disks: Sequence[Disk]
    checks: Sequence[Check]
    """Whether the daemon is ready, one by one."""
    version: str
    epoch: int
    is_well: bool
    is_ready: bool
    alerts: Mapping[tuple[AlertKind, Severity], int]
    """How many there are now."""
    waiting_events: int
    """That the engine's next round will take in."""


async def figures_of(engine: Engine, health: HealthMonitor, alerts: Alerts) -> Figures:
    """As of now, or of the few milliseconds in which many jobs are looked at; in the engine's loop."""
    jobs = await _jobs(engine.queries.jobs(), engine.clock())
    report, now = health.report(), engine.clock()
    return Figures(
        jobs=jobs,
        clusters=[_cluster(cluster, engine, now) for cluster in engine.queries.grid.clusters()],
        disks=report.disks,
        checks=health.readiness().checks,
        version=report.version,
        epoch=report.epoch,
        is_well=report.status == "ok",
        is_ready=report.ready,
        alerts=Counter((alert.kind, alert.severity) for alert in alerts.current()),
        waiting_events=engine.pending_items,
    )


async def _jobs(jobs: Sequence[Job], now: float) -> JobFigures:
    counts: Counter[tuple[JobState, Priority]] = Counter()
    by_site: Counter[tuple[ClusterName, JobState]] = Counter()
    since: dict[JobState, float] = {}
    internal = staging = missing = 0
    async for some in iterate_in_slices(jobs):
        for job in some:
            state = job.state
            if job.spec.internal:
                internal += 1
                continue
            counts[state, job.spec.priority] += 1
            if job.spec.home_site:
                by_site[job.spec.home_site, state] += 1
            at = _since(job)
            if at < since.get(state, now):
                since[state] = at
            if job.attempt is not None and state.is_active:
                for component in job.attempt.components:
                    if component.awaits_files and not component.superseded:
                        staging += 1
                        missing += max(0, component.stage_size - component.staged)
    oldest = {state: now - at for state, at in since.items()}
    return JobFigures(counts, oldest, internal, staging, missing, by_site)


def _since(job: Job) -> float:
    """From when on it has been where it is, as far as that is kept of it."""
    if job.state.is_active:
        return job.started_at or job.placed_at or job.submitted_at
    return job.submitted_at


def _cluster(cluster: ClusterStatus, engine: Engine, now: float) -> ClusterFigures:
    return ClusterFigures(
        name=cluster.name,
        state=cluster.state,
        is_connected=cluster.has_agent,
        has_problem=bool(cluster.problem),
        total=cluster.total,
        idle=cluster.idle,
        used=cluster.used,
        background=cluster.background,
        down=cluster.down,
        doubted=cluster.doubted,
        errors=cluster.health.errors,
        reported_ago=None if cluster.reported_at is None else max(0.0, now - cluster.reported_at),
        outbox=engine.outbox.count_open(cluster.name),
        components=len(cluster.live),
        versions=cluster.versions,
        calls=[calls for calls in cluster.calls if calls.operation in OPERATIONS],
    )
