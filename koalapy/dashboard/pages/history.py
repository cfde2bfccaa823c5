"""The page History: use of nodes by the hour, and figures of ended jobs by day."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import Query

from koalapy.api.access import Caller
from koalapy.api.fields import Name
from koalapy.api.history import Steps, visible_to
from koalapy.daemon.jobs.history import History, UsageLine, day_number, to_date
from koalapy.daemon.observability.figures import MAX_SLOTS
from koalapy.daemon.services import Services
from koalapy.dashboard.charts import Chart, Curve, Unit
from koalapy.dashboard.dashboard import Dashboard, View
from koalapy.dashboard.time_range import Since, TimeRange, Until, parse_range
from koalapy.model.history import DAY, Kind, Step, UseSum, UseSums, day_of

FIGURES: dict[str, tuple[str, Unit]] = {
    "utilisation": ("Nodes used", "share"),
    "queue_time": ("Queue time", "seconds"),
    "response_time": ("Response time", "seconds"),
    "slowdown": ("Slowdown", "count"),
    "success": ("Success", "share"),
    "coallocated": ("Co-allocated", "share"),
    "jobs": ("Jobs that ended", "count"),
}
"""The charts by day: attributes of ``UsageLine`` with their titles and units."""
MAX_CURVES = 8
"""Maximum number of curves in a chart: those with the most node-seconds."""
Names = Annotated[list[Name], Query(max_length=MAX_CURVES, description="only these clusters, users, policies, ...")]


def largest_names(lines: Sequence[UsageLine]) -> list[str]:
    """Return the names in lines, those with the most node-seconds first."""
    node_seconds = Counter[str]()
    for line in lines:
        node_seconds[line.name] += line.node_seconds  # type: ignore[assignment]
    return sorted(node_seconds, key=lambda name: (-node_seconds[name], name))


def charts_by_day(lines: Sequence[UsageLine], names: Sequence[str]) -> list[Chart]:
    """Return the charts of the figures of these names."""
    days = sorted({line.start for line in lines})
    by_name = {name: {line.start: line for line in lines if line.name == name} for name in sorted(names)}
    times = [day_number(day) * DAY for day in days]

    def curves_of(figure: str) -> list[Curve]:
        """Return a curve for each name; a day without a line has no value."""
        return [Curve(name, [getattr(daily.get(day), figure, None) for day in days]) for name, daily in by_name.items()]

    return [Chart(title, times, DAY, curves_of(figure), unit) for figure, (title, unit) in FIGURES.items()]


def charts_of_clusters(sums: UseSums, names: Sequence[str]) -> list[Chart]:
    """Return the shares of the nodes of clusters that jobs and local users used; ``""`` for all clusters."""

    def share(use: str) -> list[Curve]:
        def of_known(sample: UseSum) -> float | None:
            return round(getattr(sample, use) / sample.known, 4) if sample.known else None

        return [Curve(name, sums.values(of_known, name)) for name in sorted(names)]

    titles = {"ours": "Nodes used", "local": "Used by local users"}
    return [Chart(title, sums.starts, sums.length, share(use), "share") for use, title in titles.items()]


async def charts_of_users(history: History, time_range: TimeRange, names: Sequence[str]) -> list[Chart]:
    """Return the nodes that the jobs of users used."""
    length = max(3600.0, time_range.seconds / MAX_SLOTS)
    node_seconds = await history.read_node_seconds(time_range.start, time_range.end, length, names) if names else {}
    count = len(next(iter(node_seconds.values()), ()))
    times = [time_range.start + length * slot for slot in range(count)]
    curves = [
        Curve(name, [round(seconds / length, 6) for seconds in node_seconds.get(name, [0.0] * count)])
        for name in sorted(names)
    ]
    return [Chart("Nodes used", times, length, curves)] if times else []


def is_complete(chart: Chart, lines: Sequence[UsageLine]) -> bool:
    """Return whether no period of the lines ended before the first value of a chart by the hour."""
    slots = zip(chart.at, *(curve.values for curve in chart.curves), strict=True)
    first = next((start for start, *values in slots if any(value is not None for value in values)), None)
    return first is not None and all(to_date(day_of(first)) <= line.end for line in lines)


def add_history(dashboard: Dashboard, services: Services) -> None:
    """Add the page that shows what jobs and local users used over time."""
    history = services.history

    # Daily values change slowly and are expensive to compute.
    @dashboard.page("/history", "history.html", operation="show_usage", title="History", key="h", pause=30.0)
    async def page(
        caller: Caller,
        by: Kind = Kind.CLUSTER,
        step: Steps = Step.DAY,
        since: Since = "",
        until: Until = "",
        name: Names = [],  # noqa: B006 -- FastAPI copies it
    ) -> View:
        """Return the use by cluster, user or another kind, as charts and as lines with the newest first."""
        time_range = parse_range(since, until, dashboard.engine.clock(), "30d")
        names = list(dict.fromkeys(filter(None, name)))
        visible = list(dict.fromkeys(visible_to(caller, by, chosen) for chosen in names or [""]))
        span = history.make_span(to_date(day_of(time_range.start)), to_date(day_of(time_range.end - 1)))
        table, totals = await history.read_table_and_totals(by, step, span, visible)
        largest = largest_names(table.lines)
        drawn_names = [""] if by is Kind.GRID else (names or largest)[:MAX_CURVES]
        charts, by_day = list[Chart](), charts_by_day(table.lines, drawn_names)
        are_kept = table.jobs_keep is None or time_range.start > dashboard.engine.clock() - table.jobs_keep
        if by is Kind.USER and are_kept and time_range.seconds < 8 * DAY:  # else daily sums, which cost less
            charts = await charts_of_users(history, time_range, drawn_names)
        elif by in (Kind.GRID, Kind.CLUSTER) and drawn_names:
            sums = await services.samples.read(time_range.start, time_range.end, drawn_names)
            charts = charts_of_clusters(sums, drawn_names)
        if charts:  # the first ones both are of the nodes used
            del (by_day if is_complete(charts[0], table.lines) else charts)[0]
        charts += by_day
        newest_first = sorted(table.lines, key=lambda line: (line.start, line.node_seconds), reverse=True)
        return {
            "range": time_range,
            "names": names,
            "table": replace(table, lines=newest_first),
            # All days of each chosen name, else of the whole grid; empty without jobs
            "totals": totals,
            "charts": [chart for chart in charts if chart.has_values],
            # Number of names that are not in the charts
            "more": 0 if names else max(0, len(largest) - MAX_CURVES),
        }
