"""Run the checks every two seconds, and begin and end alerts with a delay, so that they do not flap."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

import structlog

from koalapy.config.settings import Settings
from koalapy.daemon.agents.hub import Hub
from koalapy.daemon.agents.session import Sessions
from koalapy.daemon.alerts.cluster_checks import BlackHoleCheck, ClusterChecks, DiskCheck, FlappingCheck, VersionCheck
from koalapy.daemon.alerts.daemon_checks import DatabaseCheck, LinkCheck, ReplicaCheck
from koalapy.daemon.alerts.health import HealthMonitor
from koalapy.daemon.alerts.job_checks import JobChecks
from koalapy.daemon.engine.database import run_in_database
from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.network.network import Network
from koalapy.model.alert import Alert, AlertKey, AlertKind, AlertMark, AlertRules, MarkAction, urgency_key
from koalapy.model.errors import NotFoundError
from koalapy.model.identity import Identity
from koalapy.model.wording import format_list
from koalapy.ports import AlertMarkStore
from koalapy.scheduler.queries import Queries

log = structlog.get_logger()

LOOK_INTERVAL = 2.0
"""Seconds between two runs of the checks."""
MAX_ALERTS = 500
"""Maximum number of alerts that are reported, the most urgent first."""
SQLITE_REMEDY = (
    "see who else holds the file, and that it lies on a disk of this machine: fuser -v {file}; many users are served "
    "better by PostgreSQL"
)
SERVER_REMEDY = "see what it does: psql -c 'select pid, state, wait_event, query from pg_stat_activity'"
Check = Callable[[float], AsyncIterator[Alert]]
"""A check that yields the alerts as of a time; it lets other tasks run if it examines many items."""
Changed = Callable[[Alert, bool], None]
"""A function that is called with an alert that begins (True) or ends (False)."""


@dataclass(slots=True)
class Finding:
    """An alert found by a check, with the times of its first and last finding, and whether it has begun."""

    alert: Alert
    first: float
    last: float
    has_begun: bool = False


class Alerts:
    """The present alerts, kept from flapping: each begins and ends after the delays in ``rules``."""

    def __init__(
        self,
        checks: Sequence[Check],
        rules: AlertRules,
        clock: Callable[[], float],
        observers: Sequence[Changed] = (),
        mark_store: AlertMarkStore | None = None,
    ) -> None:
        """Call ``observers`` with each alert that begins or ends. ``mark_store`` None: alerts cannot be marked."""
        self._checks, self._rules, self._clock, self._observers = checks, rules, clock, observers
        self._findings: dict[AlertKey, Finding] = {}
        self._mark_store = mark_store
        self._marks = {mark.key: mark for mark in mark_store.alert_marks()} if mark_store is not None else {}
        self.looked_at: float | None = None
        """Time of the last run of the checks; None before the first."""

    def current_alerts(self) -> Sequence[Alert]:
        """Return the present alerts, the most urgent first."""
        begun = (self._with_mark(finding.alert) for finding in self._findings.values() if finding.has_begun)
        return sorted(begun, key=urgency_key)[:MAX_ALERTS]

    def _with_mark(self, alert: Alert) -> Alert:
        mark = self._marks.get(alert.key)
        return alert if mark is None or not mark.applies_to(alert, self._clock()) else replace(alert, mark=mark)

    def select(self, kind: AlertKind, targets: Collection[str]) -> Sequence[Alert]:
        """Return the current alerts of a kind, or of its ``targets`` only. Raise ``NotFoundError`` if there is none."""
        alerts = [a for a in self.current_alerts() if a.kind is kind and (not targets or a.target in targets)]
        if not alerts:
            raise NotFoundError(
                f"there is no alert {kind}{f' of {format_list(sorted(targets))}' if targets else ''} now",
                hint="koala alerts lists the current ones",
            )
        return alerts

    async def mark(
        self, alerts: Sequence[Alert], action: MarkAction, by: str, reason: str, duration: float
    ) -> Sequence[Alert]:
        """Acknowledge or silence alerts for ``duration`` seconds; return them with their marks."""
        now = self._clock()
        marks = [AlertMark(alert.kind, alert.target, action, by, now, now + duration, reason) for alert in alerts]
        await self._save_marks(marks, ())
        self._marks.update({mark.key: mark for mark in marks})
        return [replace(alert, mark=self._marks[alert.key]) for alert in alerts]

    async def unmark(self, alerts: Sequence[Alert]) -> Sequence[Alert]:
        """Remove the acknowledgements and silences of alerts; return them without marks."""
        keys = [alert.key for alert in alerts]
        await self._save_marks((), keys)
        for key in keys:
            self._marks.pop(key, None)
        return [replace(alert, mark=None) for alert in alerts]

    async def _save_marks(self, marks: Sequence[AlertMark], removed: Sequence[AlertKey]) -> None:
        if self._mark_store is not None:
            await run_in_database(self._mark_store.save_alert_marks, marks, removed, self._clock())

    def visible_to(self, identity: Identity) -> Sequence[Alert]:
        """Return the present alerts that a caller may see, with the details that the caller may see."""
        return [visible for alert in self.current_alerts() if (visible := alert.visible_to(identity)) is not None]

    async def run_checks(self) -> None:
        """Run all checks and update the alerts; other tasks run between two checks."""
        now, alerts = self._clock(), dict[AlertKey, Alert]()
        for check in self._checks:
            try:
                async for alert in check(now):
                    alerts.setdefault(alert.key, alert)
            except Exception as error:
                # A failing check must not hide the alerts of the others.
                log.error("a check for alerts failed", action="alert-check-failed", exc_info=error)
            await asyncio.sleep(0)
        self._update_findings(alerts.values(), now)
        self.looked_at = now

    def _update_findings(self, alerts: Iterable[Alert], now: float) -> None:
        """Begin alerts that were found for ``hold`` seconds, and end those not found for ``release`` seconds.

        ``alerts`` are what the checks have found at ``now``.
        """
        for alert in alerts:
            finding = self._findings.get(alert.key)
            if finding is None:
                finding = self._findings[alert.key] = Finding(alert, now, now)
            # A check may report a start before the first finding; the start never moves while the alert lasts.
            finding.alert = replace(alert, since=min(alert.since, finding.alert.since))
            finding.last = now
            if not finding.has_begun and now - finding.first >= self._rules.hold:
                finding.has_begun = True
                self._report_change(finding.alert, begins=True)
        for key, finding in list(self._findings.items()):
            if finding.last < now and (not finding.has_begun or now - finding.last >= self._rules.release):
                del self._findings[key]
                if finding.has_begun:
                    self._report_change(finding.alert, begins=False)

    def _report_change(self, alert: Alert, *, begins: bool) -> None:
        """Log that an alert begins or ends, and notify the observers."""
        fields = {"kind": str(alert.kind), "severity": str(alert.severity), "target": alert.target}
        if begins:
            log.warning(alert.summary, action="alert", cause=alert.cause, **fields)
        else:
            log.info("an alert is over", action="alert-over", **fields)
        alert = self._with_mark(alert)
        for observer in self._observers:
            observer(alert, begins)


def build_alerts(
    settings: Settings,
    engine: Engine,
    queries: Queries,
    hub: Hub,
    sessions: Sessions,
    health: HealthMonitor,
    network: Network,
    data_dir: Path,
    more_checks: Sequence[Check],
    changed: Changed,
    mark_store: AlertMarkStore,
) -> Alerts:
    """Return the alerts of a daemon with all its checks; ``changed`` is called with each that begins or ends."""
    rules = settings.alerts
    clusters = queries.grid.clusters
    embedded = [name for name, section in settings.clusters.items() if section.is_embedded]
    url = settings.database or f"sqlite:///{data_dir / 'koala.db'}"
    file = quote(url.partition(":///")[2].partition("?")[0])
    remedy = SQLITE_REMEDY.format(file=file) if url.startswith("sqlite") else SERVER_REMEDY
    engine.subscribe((black_holes := BlackHoleCheck(clusters, rules, engine.clock)).record_exit)
    checks: list[Check] = [
        ClusterChecks(clusters, embedded, hub.rejections),
        black_holes,
        FlappingCheck(clusters, rules),
        DiskCheck(lambda: health.disks, clusters, settings.disks),
        VersionCheck(sessions.agent_versions, lambda: hub.incompatible),
        DatabaseCheck(engine.database, engine.instruments.writes, remedy, rules),
        LinkCheck(network.list_links, rules),
        ReplicaCheck(engine.catalogue),
        JobChecks(queries, rules),
        *more_checks,
    ]

    def signal_change(alert: Alert, begins: bool) -> None:
        del alert, begins
        engine.changes.note_change("clusters")

    return Alerts(checks, rules, engine.clock, (changed, signal_change), mark_store)
