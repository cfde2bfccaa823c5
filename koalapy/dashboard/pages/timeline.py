"""The page Timeline: the jobs on each cluster over time, and the expected starts of waiting jobs."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Query

from koalapy.api.access import Caller
from koalapy.api.clusters import Name
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard
from koalapy.dashboard.timeline import ExpectedStart, Timeline, TimelineBar, TimelineLane, component_phases
from koalapy.model.cluster import Drain, check_cluster
from koalapy.model.history import PastComponent
from koalapy.model.identity import Identity
from koalapy.model.job import Job
from koalapy.model.request import ClusterName
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.queries import Queries
from koalapy.simulation.twin import Expected, Forecast
from koalapy.validation.permissions import may_see_all_of

SPANS = {900: "15 minutes", 3600: "1 hour", 21_600: "6 hours", 86_400: "1 day", 604_800: "1 week", 2_419_200: "4 weeks"}
"""The spans to choose from, in seconds."""
MAX_BARS = 200
"""Maximum number of bars of ended components, and of those of active jobs: the largest ones."""
MAX_LANES = 60
MAX_EXPECTED = 10
MAX_FUTURE = 0.5
"""The part of the span that the picture has for the future at most."""
MIN_FUTURE = 0.03

Span = Annotated[
    Literal["900", "3600", "21600", "86400", "604800", "2419200"], Query(description="seconds before now to show")
]
Focus = Annotated[Name | Literal[""], Query(description="only this cluster; empty: all")]


@dataclass(frozen=True, slots=True)
class TimelineView:
    """The timeline, and the same values as a table."""

    timeline: Timeline
    span: int
    spans: dict[int, str]
    table: bool
    """Whether the values are shown as a table in place of the picture."""
    cluster: ClusterName
    """The only cluster; empty for all."""
    hidden_lanes: int
    """Clusters without a lane, since they have the fewest jobs."""
    is_cut: bool
    """Whether smaller components may be missing."""
    waiting: int
    """Waiting jobs with an expected start, of the caller or visible to them."""


def active_components(jobs: Iterable[Job]) -> Iterator[PastComponent]:
    """Yield the components of active jobs that have nodes now."""
    for job in jobs:
        attempt = job.attempt
        if attempt is None:
            continue
        is_shared = len({component.cluster for component in attempt.gang}) > 1
        for one in attempt.gang:
            if one.claimed_at is not None and one.ended_at is None:
                times = (one.claimed_at, attempt.barrier_at, attempt.launched_at, None)
                yield PastComponent(job.id, attempt.generation, one.cluster, one.size, *times, one.error, is_shared)


def drains_of(cluster: ClusterStatus) -> list[Drain]:
    """Return the drain in force and the planned ones."""
    return [*filter(None, (cluster.drained,)), *cluster.planned_drains]


def make_bars(components: Sequence[PastComponent], now: float) -> dict[ClusterName, list[TimelineBar]]:
    """Return the bars of components by cluster."""
    bars = defaultdict(list)
    for one in components:
        if phases := component_phases(one, now):
            bar = TimelineBar(one.job, one.size, phases, one.generation, is_shared=one.is_shared, error=one.error)
            bars[one.cluster].append(bar)
    return bars


def expected_start(expected: Expected, job: Job, forecast: Forecast, now: float) -> ExpectedStart | None:
    """Return the expected start of a waiting job; None if it is unknown, or past."""
    starts = expected.starts
    if starts is None or starts.low >= forecast.horizon:
        return None
    low, middle, high = (max(now, forecast.at + seconds) for seconds in (starts.low, starts.middle, starts.high))
    return ExpectedStart(job.id, job.spec.request.total_size, low, middle, high)


def expected_starts(queries: Queries, forecast: Forecast | None, caller: Identity, now: float) -> list[ExpectedStart]:
    """Return the expected starts of the waiting jobs that the caller may see, the earliest first."""
    if forecast is None:
        return []
    starts = []
    for expected in forecast.jobs:
        job = queries.job(expected.job)
        if job is not None and job.state.is_waiting and may_see_all_of(caller, job):
            start = expected_start(expected, job, forecast, now)
            if start is not None:
                starts.append(start)
    return sorted(starts, key=lambda start: (start.middle, start.job))


def add_timeline(dashboard: Dashboard, services: Services) -> None:
    """Add the page with the timeline of the grid."""
    engine, queries, history, forecasts = (
        dashboard.engine,
        dashboard.engine.queries,
        services.history,
        services.forecasts,
    )

    @dashboard.page("/timeline", "timeline.html", operation="list_clusters", title="Timeline", key="t", shared=True)
    async def show(caller: Caller, span: Span = "3600", cluster: Focus = "", table: bool = False) -> TimelineView:
        """Return the components of the last seconds by cluster, those clusters with the most jobs first."""
        now, seconds = engine.clock(), int(span)
        names = sorted(record.name for record in services.jobs.list_clusters())
        if cluster:
            check_cluster(cluster, names)
            names = [cluster]
        ended = await history.list_components(now - seconds, MAX_BARS, cluster)
        active = [one for one in active_components(queries.active_jobs()) if not cluster or one.cluster == cluster]
        active.sort(key=lambda one: (-one.size, one.job))
        bars = make_bars([*ended.components, *active[:MAX_BARS]], now)
        shown = sorted(sorted(names, key=lambda name: -len(bars[name]))[:MAX_LANES])
        starts = expected_starts(queries, forecasts.latest_forecast, caller, now)
        first = starts[:MAX_EXPECTED] if not cluster else []
        future = min(max([start.high - now for start in first], default=0.0) * 1.05, seconds * MAX_FUTURE)
        loads = await services.samples.read_local_load(seconds)
        lanes = [
            TimelineLane(
                name,
                max(1, queries.grid[name].last_report.total),
                bars[name],
                name,
                loads.get(name, ()),
                drains_of(queries.grid[name]),
            )
            for name in shown
        ]
        return TimelineView(
            timeline=Timeline(
                now - seconds,
                now + max(future, seconds * MIN_FUTURE),
                now,
                lanes,
                first,
                complete_since=max(0.0, ended.complete_since),
            ),
            span=seconds,
            spans=SPANS,
            table=table,
            cluster=cluster,
            hidden_lanes=len(names) - len(shown),
            is_cut=len(ended.components) == MAX_BARS or len(active) > MAX_BARS,
            waiting=len(starts),
        )
