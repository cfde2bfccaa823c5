"""The first page: use of the grid over the last hours, what needs attention, and all clusters as tiles."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Annotated, TypeVar

from fastapi import Query

from koalapy.api.access import Caller
from koalapy.api.monitoring import (
    DEFAULT_MARK_S,
    AlertSelection,
    MarkOrder,
    NotificationTest,
    mark_alerts,
    send_test,
    unmark_alerts,
)
from koalapy.daemon.forecast.forecasts import IfSubmitted
from koalapy.daemon.observability.figures import SHOWN_S
from koalapy.daemon.services import Services
from koalapy.dashboard.attention import AlertGroup, group_alerts
from koalapy.dashboard.charts import Mark, Slot, make_slots
from koalapy.dashboard.dashboard import Dashboard, Form, FormAnswer, SentForm, parse_body
from koalapy.dashboard.pictures import NodeCounts
from koalapy.dashboard.rows import (
    AlertRow,
    ClusterRow,
    JobRow,
    Survey,
    alert_row,
    cluster_row,
    job_row,
    natural_key,
    severity,
    sum_counts,
)
from koalapy.model.errors import UsageError
from koalapy.model.identity import Role
from koalapy.model.job import JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.notification import Channel
from koalapy.model.request import FlexibleRequest

S = TypeVar("S", bound=AlertSelection)
RATE_SLOTS = 3
"""Number of the last slots over which the shown rates and start-up times are means."""
MAX_DETAILED = 120
"""Maximum number of clusters whose tiles show numbers; with more, only those in trouble do."""
MAX_DARK_TILES = 5
"""Maximum number of clusters without an agent among the others; more are listed apart."""
TABLE_ROWS = 12
PATIENCE_S = 2.0
"""Time to wait for a forecast of a submission."""
Nodes = Annotated[int, Query(ge=1, le=1_000_000, description="estimate the start of a job of so many nodes")]
OUTCOMES = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
OUTCOMES_LIFETIME_S = 15.0
"""Age after which the ended jobs are counted again."""


class TileSort(StrEnum):
    """The order of the clusters."""

    TROUBLE = "trouble"
    """Clusters with problems first, then by load."""
    LOAD = "load"
    """Largest share of used nodes first."""
    NAME = "name"


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The jobs that ended in the last hour, and the usual share of failures."""

    ended: int
    failed: int
    share: float
    """Percentage that failed in the last hour."""
    usual: float
    """The same in the last hours."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The current state of all clusters together."""

    groups: Sequence[AlertGroup]
    """Active alerts by cause, most urgent first, acknowledged ones last."""
    silenced: Sequence[AlertRow]
    notified: Mapping[Channel, int]
    """Number of operators' recipients of alerts by channel, for operators."""
    queued: int
    active: int
    nodes: NodeCounts
    stale: int
    """Number of clusters without a current state."""
    oldest: JobRow | None
    """The user's job that has waited longest."""
    slots: Sequence[Slot]
    """The last hours, oldest first."""
    marks: Sequence[Mark]
    """The begins of the drains in force, with a description."""
    hours: Sequence[Slot]
    """The same in longer parts, newest first, with the number of jobs that succeeded, failed and were cancelled."""
    outcomes: Outcomes
    start_rate: float | None
    """Starts per minute in the last quarter of an hour; None: not known."""
    end_rate: float | None
    startup: float | None
    """Mean start-up time in seconds in the last quarter of an hour with a start; None without one."""
    sort: TileSort
    tiles: Sequence[ClusterRow]
    dark: Sequence[ClusterRow]
    """Clusters without an agent that are listed apart, since there are many; empty if ``tiles`` has all."""
    detailed: bool
    """Whether all tiles show numbers."""
    start_nodes: int | None = None
    """The number of nodes of a job in the address."""
    start: IfSubmitted | None = None
    """When that job would start."""


def load_of(row: ClusterRow) -> float:
    """Return the share of a cluster's nodes that are in use."""
    return (row.nodes.ours + row.nodes.local) / row.total if row.total else 0.0


def sort_tiles(rows: Sequence[ClusterRow], order: TileSort) -> list[ClusterRow]:
    """Return clusters in an order of tiles; ties by name."""
    if order is TileSort.NAME:
        return sorted(rows, key=lambda row: natural_key(row.cluster))
    by_load = sorted(rows, key=lambda row: (-load_of(row), natural_key(row.cluster)))
    if order is TileSort.LOAD:
        return by_load
    ranks = {row.cluster: rank for rank, row in enumerate(by_load)}
    return sorted(rows, key=lambda row: (severity(row), ranks[row.cluster]))


def add_outcomes(slots: Sequence[Slot], counts: Iterable[tuple[int, str, int]]) -> list[Slot]:
    """Return slots with the number of jobs that ended in each final state, as counted by slot."""
    by_slot: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(OUTCOMES, 0.0))
    for index, state, count in counts:
        by_slot[min(index, len(slots) - 1)][state] += count
    return [replace(slot, means={**slot.means, **by_slot[index]}) for index, slot in enumerate(slots)]


def sum_outcomes(slots: Sequence[Slot]) -> Outcomes:
    """Return the outcomes of the last two slots, of half an hour each, and the usual share of failures over all."""

    def share(of: Sequence[Slot]) -> tuple[int, int, float]:
        ended, failed = (
            int(sum(slot.means[name] for slot in of for name in names)) for names in (OUTCOMES, ["failed"])
        )
        return ended, failed, 100 * failed / ended if ended else 0.0

    return Outcomes(*share(slots[-2:]), share(slots)[2])


def _last_mean(slots: Sequence[Slot], name: str) -> float | None:
    """Return the mean of a value over the last slots that have one; None if none of them has."""
    values = [value for slot in slots[-RATE_SLOTS - 1 :] if (value := slot.means.get(name)) is not None]
    return sum(values) / len(values) if values else None


async def estimate_start(services: Services, nodes: int, owner: str) -> IfSubmitted:
    """Return when a job with the defaults would start, by the forecast that the form of a new job shows."""
    total = sum(record.total for record in services.jobs.list_clusters())
    if nodes > total:
        return IfSubmitted(False, reason=f"the clusters have {total:,} nodes")
    spec = JobSpec(FlexibleRequest(nodes), ("true",), owner=owner)
    return await services.forecasts.forecast_submission(spec, PATIENCE_S)


def add_overview(dashboard: Dashboard, services: Services, survey: Survey) -> None:
    """Add the first page, and the actions of operators on alerts."""
    engine, queries, alerts = dashboard.engine, dashboard.engine.queries, services.alerts
    counted: tuple[float, list[tuple[int, str, int]]] = (-inf, [])

    @dashboard.page("/", "overview.html", operation="list_clusters", title="Overview", key="n", shared=True)
    async def overview(caller: Caller, sort: TileSort = TileSort.TROUBLE) -> Overview:
        """Return the current state of all clusters; nodes of stale reports are unknown."""
        nonlocal counted
        now = engine.clock()
        if not 0 <= now - counted[0] < OUTCOMES_LIFETIME_S:
            counted = now, await services.history.count_outcomes(now - SHOWN_S, SHOWN_S / TABLE_ROWS)
        samples = await services.samples.read_recent()
        records = services.jobs.list_clusters()
        rows = [cluster_row(queries.grid[record.name], record, survey, now) for record in records]
        groups, silenced = group_alerts([alert_row(alert, queries.grid) for alert in alerts.visible_to(caller)])
        tiles = sort_tiles(rows, sort)
        dark = [row for row in tiles if not row.connected]
        if len(dark) <= MAX_DARK_TILES or len(dark) == len(tiles):
            dark = []
        slots, clusters = make_slots(samples, now, SHOWN_S), queries.grid.clusters()
        hours = add_outcomes(make_slots(samples, now, SHOWN_S, TABLE_ROWS), counted[1])
        oldest = None if survey.oldest is None else queries.job(survey.oldest.id)
        return Overview(
            groups=groups,
            notified=services.notifications.count_recipients() if caller.has_role(Role.OPERATOR) else {},
            silenced=silenced,
            queued=engine.stored_queued,
            active=engine.stored_active,
            nodes=sum_counts(rows),
            stale=sum(row.stale for row in rows),
            oldest=None if oldest is None else job_row(services.jobs.make_record(oldest), caller),
            slots=slots,
            marks=[(drain.since, f"{c.name} drained {drain.author}") for c in clusters if (drain := c.drained)],
            hours=hours[::-1],
            outcomes=sum_outcomes(hours),
            start_rate=_last_mean(slots, "started"),
            end_rate=_last_mean(slots, "ended"),
            startup=_last_mean(slots, "startup"),
            sort=sort,
            tiles=[row for row in tiles if row not in dark] if dark else tiles,
            dark=dark,
            detailed=len(rows) <= MAX_DETAILED,
        )

    # Its estimate is a simulation for one user: it is not made again with each change of the grid.
    @dashboard.page("/start", "overview.html", operation="explain_submission", title="Overview", live=False)
    async def start(caller: Caller, nodes: Nodes, sort: TileSort = TileSort.TROUBLE) -> Overview:
        """Return the overview with the start of a job of so many nodes."""
        view: Overview = await overview(caller, sort)
        return replace(view, start_nodes=nodes, start=await estimate_start(services, nodes, caller.user))

    def parse_selection(model: type[S], form: Form, **others: str) -> S:
        """Return the alerts that a form selects; raise ``UsageError`` for an unknown kind, or without a target."""
        if not (targets := form.get("targets").splitlines()):
            raise UsageError("the form names no alert", field="targets")
        return parse_body(model, {"kind": form.get("kind"), "targets": targets, **others})

    @dashboard.action("/alerts/mark", operation="mark_alert")
    async def mark(caller: Caller, form: SentForm) -> str:
        duration = f"{form.get('hours')}h" if form.get("hours") else f"{DEFAULT_MARK_S:.0f}s"
        order = parse_selection(MarkOrder, form, action=form.get("mark"), reason=form.reason, duration=duration)
        await mark_alerts(alerts, caller, order)
        return "/"

    @dashboard.form("/alerts/test", "tested.html", operation="test_notification", title="Test of notifications")
    async def test(caller: Caller, form: SentForm) -> FormAnswer:
        channel = parse_body(NotificationTest, {"channel": form.get("channel")}).channel
        return await send_test(services.notifications, caller, channel), 200

    @dashboard.action("/alerts/unmark", operation="unmark_alert")
    async def unmark(form: SentForm) -> str:
        await unmark_alerts(alerts, parse_selection(AlertSelection, form))
        return "/"
