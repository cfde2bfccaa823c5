"""The page Timeline: the jobs on each cluster over time, and the expected starts of waiting jobs."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Annotated

from fastapi import Query

from koalapy.api.access import Caller
from koalapy.api.fields import Text
from koalapy.daemon.services import Services
from koalapy.dashboard.cluster_table import cluster_path
from koalapy.dashboard.dashboard import Dashboard, View
from koalapy.dashboard.rendering import with_query
from koalapy.dashboard.rows import natural_key, site_of
from koalapy.dashboard.time_range import Since, Until, parse_range
from koalapy.dashboard.timeline import ExpectedStart, Timeline, TimelineBar, TimelineLane, component_phases
from koalapy.model.cluster import Drain, check_cluster
from koalapy.model.history import USES, PastComponent, UseSum
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Job
from koalapy.model.request import ClusterName
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.queries import Queries
from koalapy.simulation.twin import Expected, Forecast
from koalapy.validation.permissions import may_see_all_of

MAX_BARS_S = 3660.0
"""Length of a time range up to which the picture has bars; beyond, it has sums of the nodes by use."""
MAX_BARS = 200
"""Maximum number of bars of ended components, and of those of active jobs: the largest ones."""
MAX_LANES = 20
"""Maximum number of clusters with a lane each; more are drawn by site."""
MAX_SLOTS = 60
MAX_EXPECTED = 10
MAX_FUTURE = 0.5
"""The part of the range that the picture has for the future at most."""
MIN_FUTURE = 0.03

Focus = Annotated[Text, Query(max_length=200, description="only clusters with this name, or of this site; empty: all")]


def join_sites(lanes: Sequence[TimelineLane], **times: str) -> list[TimelineLane]:
    """Return a lane for each site in place of those of its clusters, with the sums of their nodes; ``times``: since and
    until of the links."""
    by_site: defaultdict[str, list[TimelineLane]] = defaultdict(list)
    for lane in lanes:
        by_site[site_of(lane.label)].append(lane)
    return [
        TimelineLane(
            site,
            sum(lane.nodes for lane in members),
            [bar for lane in members for bar in lane.bars],
            with_query("/timeline", cluster=site, **times),
            sum_uses(members),
            [drain for lane in members for drain in lane.drains],
        )
        for site, members in sorted(by_site.items())
    ]


def sum_uses(lanes: Sequence[TimelineLane]) -> list[UseSum]:
    """Return the sums of the nodes of several lanes by use and slot."""
    by_start, counts_of = defaultdict[int, list[Sequence[int]]](list), attrgetter(*USES)
    for use in (use for lane in lanes for use in lane.uses):
        by_start[use.start].append(counts_of(use))
    sums = ((start, map(sum, zip(*counts, strict=True))) for start, counts in sorted(by_start.items()))
    return [UseSum(start, "", 1, **dict(zip(USES, counts, strict=True))) for start, counts in sums]


def active_components(jobs: Iterable[Job], until: float) -> Iterator[PastComponent]:
    """Yield the components of active jobs that have nodes now, and had them before ``until``."""
    for job in jobs:
        attempt = job.attempt
        if attempt is None:
            continue
        is_shared = len({component.cluster for component in attempt.gang}) > 1
        for member in attempt.gang:
            if member.claimed_at is not None and member.claimed_at < until and member.ended_at is None:
                times = (member.claimed_at, attempt.barrier_at, attempt.launched_at, None)
                user = "" if job.spec.internal else job.spec.owner
                yield PastComponent(
                    job.id, attempt.generation, member.cluster, member.size, *times, member.error, is_shared, user
                )


def hide_details(component: PastComponent, caller: Identity) -> PastComponent:
    """Return a component without its user and error, unless the caller is an operator or that user."""
    if caller.has_role(Role.OPERATOR) or component.owner == caller.user:
        return component
    return replace(component, owner="", error=component.error and "ended early")


def drains_of(cluster: ClusterStatus) -> list[Drain]:
    """Return the drain in force and the planned ones."""
    return [*filter(None, (cluster.drained,)), *cluster.planned_drains]


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
    engine, queries = dashboard.engine, dashboard.engine.queries
    history, forecasts = services.history, services.forecasts

    @dashboard.page("/timeline", "timeline.html", operation="list_clusters", title="Timeline", key="t", shared=True)
    async def show(
        caller: Caller, since: Since = "", until: Until = "", cluster: Focus = "", table: bool = False
    ) -> View:
        """Return the use of each cluster: its jobs in a range of up to an hour, else its nodes by use."""
        now = engine.clock()
        time_range = parse_range(since, until, now, "1h")
        names = sorted((record.name for record in services.jobs.list_clusters()), key=natural_key)
        if cluster:
            check_cluster(cluster, [*names, *map(site_of, names)])
            names = [name for name in names if cluster in (name, site_of(name))]
        sums = await services.samples.read(time_range.start, time_range.end, (), MAX_SLOTS)
        with_bars, is_current = time_range.seconds <= MAX_BARS_S, not time_range.until
        ended, active, is_cut = list[PastComponent](), list[PastComponent](), False
        if with_bars:
            only = names[0] if len(names) == 1 else ""
            ended, is_cut = await history.list_components(time_range.start, time_range.end, MAX_BARS, only)
            active = [one for one in active_components(queries.active_jobs(), time_range.end) if one.cluster in names]
            active.sort(key=lambda one: (-one.size, one.job))
        bars = defaultdict[ClusterName, list[TimelineBar]](list)
        for one in (hide_details(one, caller) for one in (*ended, *active[:MAX_BARS])):
            if phases := component_phases(one, now):
                bar = TimelineBar(one.job, one.size, phases, one.generation, is_shared=one.is_shared, error=one.error)
                bars[one.cluster].append(bar)
        lanes = [
            TimelineLane(
                name,
                max(1, queries.grid[name].last_report.total),
                bars[name],
                cluster_path(name),
                list(sums.by_cluster.get(name, {}).values()),
                drains_of(queries.grid[name]),
            )
            for name in names
        ]
        used, idle = [lane for lane in lanes if lane.is_used], [lane.label for lane in lanes if not lane.is_used]
        joined = used
        if len(used) > MAX_LANES and not cluster:
            joined = join_sites(used, since=time_range.since, until=time_range.until)
        starts = expected_starts(queries, forecasts.latest_forecast, caller, now) if is_current else []
        first = starts[:MAX_EXPECTED] if with_bars and not cluster else []
        future = min(max([start.high - now for start in first], default=0.0) * 1.05, time_range.seconds * MAX_FUTURE)
        return {
            "timeline": Timeline(
                time_range.start,
                now + max(future, time_range.seconds * MIN_FUTURE) if is_current else time_range.end,
                now,
                joined[:MAX_LANES],
                first,
                slot_s=sums.length,
                with_bars=with_bars,
            ),
            "range": time_range,
            # Whether the values are shown as a table in place of the picture
            "table": table,
            # The only cluster or site; empty for all
            "cluster": cluster,
            "idle": idle,
            "is_cut": is_cut or len(active) > MAX_BARS,
            # Number of lanes that are not shown
            "more": max(0, len(joined) - MAX_LANES),
            # Waiting jobs with an expected start, of the caller or visible to them
            "waiting": len(starts),
        }
