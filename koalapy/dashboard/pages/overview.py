"""The first page: use of the grid over the last hours, what needs attention, and all clusters as tiles."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Annotated, TypeVar

from fastapi import Query

from koalapy.api import monitoring
from koalapy.api.access import Caller
from koalapy.daemon.forecast.forecasts import IfSubmitted
from koalapy.daemon.services import Services
from koalapy.dashboard.attention import group_alerts
from koalapy.dashboard.charts import Chart, Curve, Mark, Unit, use_chart
from koalapy.dashboard.dashboard import Dashboard, Form, FormAnswer, SentForm, View, parse_body
from koalapy.dashboard.pages.new_job import FORECAST_PATIENCE_S
from koalapy.dashboard.rows import Survey, TileSort, cluster_row, fold_clusters, job_row, sort_tiles, sum_counts
from koalapy.dashboard.time_range import Since, Until, parse_range
from koalapy.model.errors import StoreUnavailable, UsageError
from koalapy.model.history import SAMPLE_INTERVAL_S, Figures, UseSums
from koalapy.model.identity import Role
from koalapy.model.job import JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest

S = TypeVar("S", bound=monitoring.AlertSelection)
MAX_DETAILED = 120
"""Maximum number of clusters with numbers on their tiles; with more, those in trouble do, and the others are folded."""
TABLE_ROWS = 12
"""Number of rows of the table below the charts."""
Nodes = Annotated[int, Query(ge=1, le=1_000_000, description="estimate the start of a job of so many nodes")]
OUTCOMES = {JobState.SUCCEEDED: "series-3", JobState.FAILED: "bad", JobState.CANCELLED: "quiet"}
"""The final states of jobs, and their colours."""
OUTCOMES_LIFETIME_S = 15.0
"""Age after which the ended jobs are counted again."""
MAX_CACHED_OUTCOMES = 20


def make_charts(sums: UseSums, outcomes: Iterable[tuple[int, str, int]], marks: Sequence[Mark]) -> dict[str, Chart]:
    """Return the charts of the page; ``outcomes``: jobs that ended, by slot of ``sums`` and final state."""
    counts = {(slot, state): count for slot, state, count in outcomes}
    by_state = [
        Curve(state, [counts.get((slot, state), 0) for slot in range(len(sums.starts))], colour)
        for state, colour in OUTCOMES.items()
    ]

    def chart(title: str, curves: Sequence[Curve], unit: Unit = "count", *, stacked: bool = False) -> Chart:
        return Chart(title, sums.starts, sums.length, curves, unit, stacked, marks if unit == "count" else ())

    startup = sums.values(lambda use: use.startup / use.started if use.started else None)
    return {
        "nodes": use_chart("Nodes by use", sums, marks=marks),
        "queue": chart("Queued jobs", [Curve("waiting", sums.means("queued"))]),
        "starts": chart("Starts and ends", [Curve(f"{name}/min", sums.means(name)) for name in ("started", "ended")]),
        "outcomes": chart("Ended jobs", by_state, stacked=True),
        "startup": chart("Start-up time", [Curve("start-up", startup)], "seconds"),
    }


def starts_after_gaps(sums: UseSums) -> list[int]:
    """Return the slots from which on there are samples again, after some without. A single late sample is no gap."""
    slots = pairwise(sorted(sums.by_cluster.get("", {})))
    return [start for previous, start in slots if start - previous > sums.length + SAMPLE_INTERVAL_S]


def sum_outcomes(outcomes: Iterable[tuple[int, str, int]]) -> View:
    """Return the jobs that ended in a range, the percentage of failures among those that were not cancelled, and the
    usual one: that of the range before: its outcomes have negative numbers of slots."""
    earlier, now = Figures(), Figures()
    for slot, state, count in outcomes:
        figures = earlier if slot < 0 else now
        setattr(figures, state, getattr(figures, state) + count)
    share, usual = (None if period.success is None else 100 * (1 - period.success) for period in (now, earlier))
    return {"ended": now.succeeded + now.failed + now.cancelled, "failed": now.failed, "share": share, "usual": usual}


def add_overview(dashboard: Dashboard, services: Services, survey: Survey) -> None:
    """Add the first page, and the actions of operators on alerts."""
    engine, queries, alerts = dashboard.engine, dashboard.engine.queries, services.alerts
    started_at = engine.clock()
    counted: dict[tuple[float, ...], tuple[float, list[tuple[int, str, int]]]] = {}

    async def count_outcomes(sums: UseSums, end: float) -> list[tuple[int, str, int]]:
        """Return the ended jobs by slot and state, also those of as many slots before; some seconds old."""
        now, count, first = engine.clock(), len(sums.starts), sums.starts[0]
        key = (first, sums.length, end) if end < now - OUTCOMES_LIFETIME_S else (first, sums.length)
        cached = counted.get(key)
        if cached is None or not 0 <= now - cached[0] < OUTCOMES_LIFETIME_S:
            if len(counted) >= MAX_CACHED_OUTCOMES:
                counted.clear()
            since = first - count * sums.length
            try:
                rows = await services.history.count_outcomes(since, end, sums.length)
            except StoreUnavailable:  # the page has the alert, and its charts are empty
                return []
            cached = counted[key] = now, [(slot - count, state, number) for slot, state, number in rows]
        return cached[1]

    @dashboard.page("/", "overview.html", operation="list_clusters", title="Overview", key="n", shared=True)
    async def overview(caller: Caller, sort: TileSort = "trouble", since: Since = "", until: Until = "") -> View:
        """Return the current state of all clusters; nodes of stale reports are unknown."""
        now = engine.clock()
        time_range, read = parse_range(since, until, now), services.samples.read
        sums = await read(time_range.start, time_range.end)
        rough = await read(time_range.start, time_range.end, max_slots=TABLE_ROWS)
        outcomes = await count_outcomes(sums, time_range.end)
        rows = [cluster_row(queries.grid[record.name], record, survey, now) for record in services.jobs.list_clusters()]
        groups, silenced = group_alerts(alerts.visible_to(caller), queries.grid)
        tiles, folds = fold_clusters(sort_tiles(rows, sort), MAX_DETAILED)
        marks = [
            (drain.since, f"{c.name} drained {drain.author}") for c in queries.grid.clusters() if (drain := c.drained)
        ]
        marks += [(group.alert.since, group.alert.summary) for group in groups]
        marks.append((started_at, "the daemon started"))
        gaps = (start for start in starts_after_gaps(sums) if not start <= started_at < start + sums.length)
        marks += [(start, "nodes are counted again: the daemon or its database was away") for start in gaps]
        oldest = None if survey.oldest is None else queries.job(survey.oldest.id)
        return {
            "groups": groups,
            "silenced": silenced,
            "notified": services.notifications.count_recipients() if caller.has_role(Role.OPERATOR) else {},
            "queued": engine.stored_queued,
            "active": engine.stored_active,
            "nodes": sum_counts(rows),
            "stale": sum(row.stale for row in rows),
            "oldest": None if oldest is None else job_row(services.jobs.make_record(oldest), caller),
            "range": time_range,
            "charts": make_charts(sums, outcomes, marks),
            "hours": [*make_charts(rough, await count_outcomes(rough, time_range.end), ()).values()],  # for the table
            "outcomes": sum_outcomes(outcomes),
            "sort": sort,
            "tiles": tiles,
            "folds": folds,
            "count": len(rows),
            # Whether all tiles show numbers
            "detailed": len(rows) <= MAX_DETAILED,
            "start_nodes": None,
            "start": None,
        }

    # Its estimate is a simulation for one user: it is not made again with each change of the grid.
    @dashboard.page("/start", "overview.html", operation="explain_submission", title="Overview", live=False)
    async def start(
        caller: Caller, nodes: Nodes, sort: TileSort = "trouble", since: Since = "", until: Until = ""
    ) -> View:
        """Return the overview with the start of a job of so many nodes and with the defaults of the other fields."""
        view: View = await overview(caller, sort, since, until)
        if nodes > (total := view["nodes"].total):
            start = IfSubmitted(False, reason=f"the clusters have {total:,} nodes")
        else:
            spec = JobSpec(FlexibleRequest(nodes), ("true",), owner=caller.user)
            start = await services.forecasts.forecast_submission(spec, FORECAST_PATIENCE_S)
        return view | {"start_nodes": nodes, "start": start}

    def parse_selection(model: type[S], form: Form, **fields: str) -> S:
        """Return the alerts that a form selects; raise ``UsageError`` for an unknown kind, or without a target."""
        if not (targets := form.get("targets").splitlines()):
            raise UsageError("the form names no alert", field="targets")
        return parse_body(model, {"kind": form.get("kind"), "targets": targets, **fields})

    @dashboard.action("/alerts/mark", operation="mark_alert")
    async def mark(caller: Caller, form: SentForm) -> str:
        duration = f"{form.get('hours')}h" if form.get("hours") else f"{monitoring.DEFAULT_MARK_S:.0f}s"
        order = parse_selection(
            monitoring.MarkOrder, form, action=form.get("mark"), reason=form.reason, duration=duration
        )
        await monitoring.mark_alerts(alerts, caller, order)
        return "/"

    @dashboard.action("/alerts/test", "tested.html", operation="test_notification", title="Test of notifications")
    async def test(caller: Caller, form: SentForm) -> FormAnswer:
        channel = parse_body(monitoring.NotificationTest, {"channel": form.get("channel")}).channel
        return await monitoring.send_test(services.notifications, caller, channel), 200

    @dashboard.action("/alerts/unmark", operation="unmark_alert")
    async def unmark(form: SentForm) -> str:
        await monitoring.unmark_alerts(alerts, parse_selection(monitoring.AlertSelection, form))
        return "/"
