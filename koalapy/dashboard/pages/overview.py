"""The first page: use of the grid over the last hours, what needs attention, and all clusters as tiles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from koalapy.api.access import Caller
from koalapy.api.monitoring import DEFAULT_MARK_S, MAX_MARK_S, mark_alerts, send_test, unmark_alerts
from koalapy.daemon.observability.figures import SHOWN_S
from koalapy.daemon.services import Services
from koalapy.dashboard.attention import AlertGroup, group_alerts
from koalapy.dashboard.charts import Slot, make_slots
from koalapy.dashboard.dashboard import Dashboard, Form, FormAnswer, SentForm
from koalapy.dashboard.rows import AlertRow, ClusterRow, Survey, alert_row, cluster_row, natural_key, severity
from koalapy.model.alert import AlertKind, MarkAction
from koalapy.model.errors import UsageError
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Job
from koalapy.model.notification import CHANNELS, Channel
from koalapy.scheduler.queries import Queries
from koalapy.validation.permissions import may_see_all_of

RATE_SLOTS = 3
"""Number of the last slots over which the shown rates and start-up times are means."""
MAX_DETAILED = 120
"""Maximum number of clusters whose tiles show numbers; with more, only those in trouble do."""
TABLE_ROWS = 12


class TileSort(StrEnum):
    """The order of the clusters."""

    TROUBLE = "trouble"
    """Clusters with problems first, then by load."""
    LOAD = "load"
    """Largest share of used nodes first."""
    NAME = "name"


@dataclass(frozen=True, slots=True)
class OldestJob:
    """The oldest waiting job; owner and reason are empty if the caller may not see them."""

    job: int
    since: float
    nodes: int
    owner: str
    reason: str


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
    nodes: int
    idle: int
    """Idle nodes of usable clusters with a current state."""
    ours: int
    """Nodes that jobs of this scheduler have or are claiming."""
    local: int
    """Nodes of the clusters' local users."""
    stale: int
    """Number of clusters without a current state."""
    oldest: OldestJob | None
    slots: Sequence[Slot]
    """The last hours, oldest first."""
    hours: Sequence[Slot]
    """The same in longer parts, newest first."""
    start_rate: float | None
    """Starts per minute in the last quarter of an hour; None: not known."""
    end_rate: float | None
    startup: float | None
    """Mean start-up time in seconds in the last quarter of an hour with a start; None without one."""
    sort: TileSort
    tiles: Sequence[ClusterRow]
    detailed: bool
    """Whether all tiles show numbers."""


def oldest_job(job: Job | None, queries: Queries, caller: Identity) -> OldestJob | None:
    """Return a waiting job for display; None if there is none or it has ended.

    Owner and reason are empty for callers that may not see them.
    """
    job = None if job is None else queries.job(job.id)
    if job is None:
        return None
    may_see_all = may_see_all_of(caller, job)
    return OldestJob(
        job.id,
        job.submitted_at,
        job.spec.request.total_size,
        job.spec.owner if may_see_all else "",
        queries.waiting_reason(job) if may_see_all else "",
    )


def load_of(row: ClusterRow) -> float:
    """Return the share of a cluster's nodes that are in use."""
    return (row.nodes.running + row.nodes.claimed + row.nodes.local) / row.total if row.total else 0.0


def sort_tiles(rows: Sequence[ClusterRow], order: TileSort) -> list[ClusterRow]:
    """Return clusters in an order of tiles; ties by name."""
    if order is TileSort.NAME:
        return sorted(rows, key=lambda row: natural_key(row.cluster))
    by_load = sorted(rows, key=lambda row: (-load_of(row), natural_key(row.cluster)))
    if order is TileSort.LOAD:
        return by_load
    ranks = {row.cluster: rank for rank, row in enumerate(by_load)}
    return sorted(rows, key=lambda row: (severity(row), ranks[row.cluster]))


def _last_mean(slots: Sequence[Slot], name: str) -> float | None:
    """Return the mean of a value over the last slots that have one; None if none of them has."""
    values = [value for slot in slots[-RATE_SLOTS - 1 :] if (value := getattr(slot, name)) is not None]
    return sum(values) / len(values) if values else None


def add_overview(dashboard: Dashboard, services: Services, survey: Survey) -> None:
    """Add the first page, and the actions of operators on alerts."""
    engine, queries, alerts = dashboard.engine, dashboard.engine.queries, services.alerts

    @dashboard.page("/", "overview.html", operation="list_clusters", title="Overview", key="n", shared=True)
    async def overview(caller: Caller, sort: TileSort = TileSort.TROUBLE) -> Overview:
        """Return the current state of all clusters; idle nodes of stale reports do not count."""
        now = engine.clock()
        samples = await services.samples.read_recent()
        records = services.jobs.list_clusters()
        rows = [cluster_row(queries.grid[record.name], record, survey, now) for record in records]
        groups, silenced = group_alerts([alert_row(alert, queries.grid) for alert in alerts.visible_to(caller)])
        slots = make_slots(samples, now, SHOWN_S)
        return Overview(
            groups=groups,
            notified=services.notifications.count_recipients() if caller.has_role(Role.OPERATOR) else {},
            silenced=silenced,
            queued=engine.stored_queued,
            active=engine.stored_active,
            nodes=sum(row.total for row in rows),
            idle=sum(row.nodes.idle for row in rows if row.state == "usable" and not row.stale),
            ours=sum(row.nodes.running + row.nodes.claimed for row in rows),
            local=sum(row.nodes.local for row in rows),
            stale=sum(row.stale for row in rows),
            oldest=oldest_job(survey.oldest, queries, caller),
            slots=slots,
            hours=make_slots(samples, now, SHOWN_S, TABLE_ROWS)[::-1],
            start_rate=_last_mean(slots, "started"),
            end_rate=_last_mean(slots, "ended"),
            startup=_last_mean(slots, "startup"),
            sort=sort,
            tiles=sort_tiles(rows, sort),
            detailed=len(rows) <= MAX_DETAILED,
        )

    def selection(form: Form) -> tuple[AlertKind, list[str]]:
        """Return the kind and targets of a form; raise ``UsageError`` for an unknown kind, or without a target."""
        try:
            kind, targets = AlertKind(form.get("kind")), form.get("targets").splitlines()
        except ValueError as error:
            raise UsageError("there is no such kind of alert", field="kind", value=form.get("kind")) from error
        if not targets:
            raise UsageError("the form names no alert", field="targets")
        return kind, targets

    @dashboard.action("/alerts/mark", operation="mark_alert")
    async def mark(caller: Caller, form: SentForm) -> str:
        kind, targets = selection(form)
        try:
            action, hours = MarkAction(form.get("mark")), float(form.get("hours") or DEFAULT_MARK_S / 3600)
        except ValueError as error:
            raise UsageError("the action or the number of hours is not valid", field="hours") from error
        if not 0 < hours * 3600 <= MAX_MARK_S:
            raise UsageError(f"give from 0 to {MAX_MARK_S / 3600:g} hours", field="hours", value=hours)
        await mark_alerts(alerts, caller, kind, targets, action, form.reason, hours * 3600)
        return "/"

    @dashboard.form("/alerts/test", "tested.html", operation="test_notification", title="Test of notifications")
    async def test(caller: Caller, form: SentForm) -> FormAnswer:
        channel = next((channel for channel in CHANNELS if channel == form.get("channel")), None)
        if channel is None:
            raise UsageError("there is no such channel", field="channel", hint="give mail or webhook")
        return await send_test(services.notifications, caller, channel), 200

    @dashboard.action("/alerts/unmark", operation="unmark_alert")
    async def unmark(form: SentForm) -> str:
        await unmark_alerts(alerts, *selection(form))
        return "/"
