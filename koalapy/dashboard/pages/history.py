"""The page History: use of clusters and waiting times by day."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

from koalapy.api.access import Caller
from koalapy.api.history import First, Last, Named, Steps, visible_to
from koalapy.daemon.jobs.history import History, UsageLine, UsageTable
from koalapy.dashboard.dashboard import Dashboard
from koalapy.model.history import Kind, Step

FIGURES = {
    "utilisation": "Nodes used",
    "queue_time": "Queue time",
    "response_time": "Response time",
    "slowdown": "Slowdown",
    "success": "Success",
    "coallocated": "Co-allocated",
    "jobs": "Jobs that ended",
}
"""The charts: attributes of ``UsageLine`` and their titles."""
SHARES = frozenset({"utilisation", "success", "coallocated"})
TIMES = frozenset({"queue_time", "response_time"})
MAX_CURVES = 8
"""Maximum number of curves in a chart: those with the most node-seconds."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A figure of one cluster, user, policy, priority or site over the days; None for days without a value."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Picture:
    """The chart of a figure; ``at`` are the beginnings of the days in seconds since the epoch."""

    figure: str
    title: str
    unit: str
    """``share``, ``seconds`` or ``count``."""
    at: Sequence[int]
    days: Sequence[date]
    curves: Sequence[Curve]


@dataclass(frozen=True, slots=True)
class HistoryView:
    """The selected history, with its charts from the oldest to the newest day."""

    name: str
    table: UsageTable
    """The lines are from the newest to the oldest."""
    total: UsageLine | None
    """The whole grid over all days; None without jobs."""
    pictures: Sequence[Picture]
    more: int
    """Number of curves that are not in the charts."""


def pictures_of(lines: Sequence[UsageLine]) -> tuple[list[Picture], int]:
    """Return the charts of the names with the most node-seconds, and the number of other names."""
    days = sorted({line.start for line in lines})
    node_seconds: dict[str, float] = {}
    for line in lines:
        node_seconds[line.name] = node_seconds.get(line.name, 0.0) + line.node_seconds
    names = sorted(node_seconds, key=lambda name: (-node_seconds[name], name))
    by_name = {name: {line.start: line for line in lines if line.name == name} for name in names[:MAX_CURVES]}
    times = [(day - date(1970, 1, 1)).days * 86400 for day in days]
    pictures = []
    for figure, title in FIGURES.items():
        curves = [
            Curve(name, [getattr(lines_by_day[day], figure) if day in lines_by_day else None for day in days])
            for name, lines_by_day in sorted(by_name.items())
        ]
        unit = "share" if figure in SHARES else "seconds" if figure in TIMES else "count"
        pictures.append(Picture(figure, title, unit, times, days, curves))
    return pictures, max(0, len(names) - MAX_CURVES)


def add_history(dashboard: Dashboard, history: History) -> None:
    """Add the page that shows what jobs used over time."""

    # Daily values change slowly and are expensive to compute.
    @dashboard.page("/history", "history.html", operation="show_usage", title="History", key="h", pause=30.0)
    async def page(
        caller: Caller,
        by: Kind = Kind.CLUSTER,
        step: Steps = Step.DAY,
        first: First = None,
        last: Last = None,
        name: Named = "",
    ) -> HistoryView:
        """Return the use by cluster, user or another kind, as charts and as lines with the newest first."""
        span = history.make_span(first, last)
        table, total = await history.read_table_and_total(by, step, span, visible_to(caller, by, name))
        pictures, omitted = pictures_of(table.lines)
        newest_first = sorted(table.lines, key=lambda line: (line.start, line.node_seconds), reverse=True)
        return HistoryView(name, replace(table, lines=newest_first), total, pictures, omitted)
