"""Run the checks every two seconds, and begin and end alerts with a delay, so that they do not flap."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import structlog

from koalapy.daemon.engine.database import run_in_database
from koalapy.model.alert import Alert, AlertKey, AlertKind, AlertMark, AlertRules, MarkAction, Severity, urgency_key
from koalapy.model.errors import NotFoundError
from koalapy.model.identity import Identity
from koalapy.model.wording import format_list
from koalapy.store.service_tables import AlertMarkStore

log = structlog.get_logger()

LOOK_INTERVAL = 2.0
"""Seconds between two runs of the checks."""
MAX_ALERTS = 500
"""Maximum number of alerts that are reported, the most urgent first."""
Check = Callable[[float], AsyncIterator[Alert]]
"""A check that yields the alerts as of a time; it lets other tasks run if it examines many items."""
Changed = Callable[[Alert, bool], None]
"""A function that is called with an alert that begins (True) or ends (False)."""


@dataclass(slots=True)
class Finding:
    """An alert found by a check, and the time of its last finding."""

    alert: Alert
    last: float
    begun_at: float | None = None
    """When it was first listed; None: not yet."""
    notified: Severity | None = None
    """The severity of its last notification; None: it had none."""


class Alerts:
    """The present alerts, kept from flapping: each begins and ends after the delays in ``rules``."""

    def __init__(
        self,
        checks: Sequence[Check],
        rules: AlertRules,
        clock: Callable[[], float],
        on_change: Changed = lambda alert, begins: None,
        notify: Changed = lambda alert, begins: None,
        mark_store: AlertMarkStore | None = None,
    ) -> None:
        """Call ``on_change`` with each alert that begins or ends, and ``notify`` with each that is listed for longer.

        ``notify`` is called again when an alert becomes critical. ``mark_store`` None: alerts cannot be marked.
        """
        self._checks, self._rules, self._clock = checks, rules, clock
        self._on_change, self._notify = on_change, notify
        self._findings: dict[AlertKey, Finding] = {}
        self._mark_store = mark_store
        self._marks = {mark.key: mark for mark in mark_store.alert_marks()} if mark_store is not None else {}
        self.looked_at: float | None = None
        """Time of the last run of the checks; None before the first."""

    def current_alerts(self) -> Sequence[Alert]:
        """Return the present alerts, the most urgent first."""
        begun = (self._with_mark(finding.alert) for finding in self._findings.values() if finding.begun_at is not None)
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
        self, alerts: Sequence[Alert], action: MarkAction, author: str, reason: str, duration: float
    ) -> Sequence[Alert]:
        """Acknowledge or silence alerts for ``duration`` seconds; return them with their marks."""
        now = self._clock()
        marks = [AlertMark(alert.kind, alert.target, action, author, now, now + duration, reason) for alert in alerts]
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
        """Begin alerts of problems that last for ``hold`` seconds, and end those not found for ``release`` seconds.

        ``alerts`` are what the checks have found at ``now``. Notify of alerts that are listed for ``hold`` seconds and
        not silenced, again when they become critical, and at their end.
        """
        hold = self._rules.hold
        for alert in alerts:
            finding = self._findings.setdefault(alert.key, Finding(replace(alert, since=min(alert.since, now)), now))
            # A check may report a start before the first finding; the start never moves while the alert lasts.
            finding.alert = replace(alert, since=min(alert.since, finding.alert.since))
            finding.last = now
            if finding.begun_at is None and now - finding.alert.since >= hold:
                finding.begun_at = now
                self._report_change(finding.alert, begins=True)
            if finding.begun_at is None or now - finding.begun_at < hold:
                continue
            marked = self._with_mark(finding.alert)
            if finding.notified not in (Severity.CRITICAL, marked.severity) and not marked.is_silenced:
                finding.notified = marked.severity
                self._notify(marked, True)
        for key, finding in list(self._findings.items()):
            if finding.last < now and (finding.begun_at is None or now - finding.last >= self._rules.release):
                del self._findings[key]
                if finding.begun_at is not None:
                    self._report_change(finding.alert, begins=False)
                if finding.notified is not None:
                    # By the severity that was notified, so that its recipients learn of the end.
                    self._notify(self._with_mark(replace(finding.alert, severity=finding.notified)), False)

    def _report_change(self, alert: Alert, *, begins: bool) -> None:
        """Log that an alert begins or ends, and report it."""
        fields = {"kind": str(alert.kind), "severity": str(alert.severity), "target": alert.target}
        if begins:
            log.warning(alert.summary, action="alert", cause=alert.cause, **fields)
        else:
            log.info("an alert is over", action="alert-over", **fields)
        self._on_change(alert, begins)
