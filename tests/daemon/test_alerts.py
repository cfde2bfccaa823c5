"""Alerts: delays at begin and end, order, visibility, and failing checks."""

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import pytest

from koalapy.daemon.alerts.alerts import Alerts
from koalapy.daemon.alerts.cluster_checks import ClusterChecks
from koalapy.daemon.alerts.daemon_checks import WINDOW, check_database
from koalapy.daemon.engine.database import DatabaseMonitor
from koalapy.daemon.observability.timings import Timings
from koalapy.model.alert import OPERATORS_SEE_IT, Alert, AlertKind, AlertMark, AlertRules, MarkAction, Severity
from koalapy.model.identity import Identity, Role
from koalapy.model.reports import ClusterReport
from koalapy.scheduler.clusters import ClusterStatus

RULES = AlertRules(hold=5, release=15)
ADA, BOB = (Identity(name, Role.USER, "") for name in ("ada", "bob"))
OPERATOR = Identity("otto", Role.OPERATOR, "")
NOW = 1e9
"""The start of an alert that its check takes from the clock."""


def make_alert(kind: AlertKind = AlertKind.AGENT_AWAY, target: str = "cluster north", **fields: object) -> Alert:
    texts = {"severity": Severity.CRITICAL, "summary": "gone", "cause": "who knows", "remedy": "koala do", "since": NOW}
    return Alert(kind=kind, target=target, **{**texts, **fields})  # type: ignore[arg-type]


class Scene:
    """A clock, a check with the alerts in ``wrong``, and the recorded changes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.wrong: list[Alert] = []
        self.told: list[tuple[str, bool]] = []
        self.alerts = Alerts([self._yield_wrong], RULES, lambda: self.now, self._record_change, self._notify)
        self.notified: list[tuple[str, bool]] = []

    def _record_change(self, alert: Alert, begins: bool) -> None:
        self.told.append((alert.target, begins))

    def _notify(self, alert: Alert, begins: bool) -> None:
        self.notified.append((alert.target, begins))

    async def _yield_wrong(self, now: float) -> AsyncIterator[Alert]:
        for alert in self.wrong:
            yield alert

    async def run_checks(self, seconds: float, *wrong: Alert) -> list[str]:
        self.now += seconds
        self.wrong = [replace(alert, since=self.now) if alert.since == NOW else alert for alert in wrong]
        await self.alerts.run_checks()
        return [alert.target for alert in self.alerts.current_alerts()]


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_alerts_with_short_problem_stay_empty(scene: Scene) -> None:
    for _ in range(5):
        assert await scene.run_checks(2, make_alert()) == []
        assert await scene.run_checks(2, make_alert()) == []
        assert await scene.run_checks(2) == []
    assert scene.told == []


async def test_alert_begins_after_hold_and_ends_after_release(scene: Scene) -> None:
    assert await scene.run_checks(2, make_alert()) == []
    assert await scene.run_checks(5, make_alert()) == ["cluster north"]
    for _ in range(5):  # a fluctuating problem is reported once
        assert await scene.run_checks(14) == ["cluster north"]
        assert await scene.run_checks(2, make_alert()) == ["cluster north"]
    assert await scene.run_checks(14) == ["cluster north"]
    assert await scene.run_checks(1) == []
    assert scene.told == scene.notified == [("cluster north", True), ("cluster north", False)]


async def test_alert_of_earlier_problem_is_listed_at_once_and_notified_if_it_lasts(scene: Scene) -> None:
    assert await scene.run_checks(2, make_alert(since=scene.now - 3)) == ["cluster north"]
    assert await scene.run_checks(15) == []
    assert (scene.told, scene.notified) == ([("cluster north", True), ("cluster north", False)], [])


async def test_alert_that_becomes_critical_is_notified_again_once(scene: Scene) -> None:
    warning, severities = make_alert(severity=Severity.WARNING), list[tuple[str, bool]]()
    scene.alerts._notify = lambda alert, begins: severities.append((alert.severity, begins))
    for alert in (warning, warning, warning, warning, make_alert(), make_alert(), warning, make_alert(), warning):
        await scene.run_checks(5, alert)
    await scene.run_checks(15)
    assert severities == [("warning", True), ("critical", True), ("critical", False)]


async def test_alert_silenced_at_its_begin_is_notified_when_the_silence_has_expired(scene: Scene) -> None:
    await scene.alerts.mark([make_alert()], MarkAction.SILENCE, "olga", "", 30.0)
    for _ in range(5):
        await scene.run_checks(5, make_alert())
    await scene.run_checks(15)
    assert scene.told, "it was listed"
    assert scene.notified == [], "neither its begin nor its end"
    await scene.alerts.mark([make_alert()], MarkAction.SILENCE, "olga", "", 30.0)
    for _ in range(6):
        assert scene.notified == []
        await scene.run_checks(5, make_alert())
    assert scene.notified == [("cluster north", True)]


async def test_alert_has_newest_summary_and_earliest_time(scene: Scene) -> None:
    await scene.run_checks(0, make_alert(since=90.0, summary="first"))
    await scene.run_checks(6, make_alert(since=106.0, summary="then", severity=Severity.WARNING))
    (messages,) = scene.alerts.current_alerts()
    assert (messages.since, messages.summary, messages.severity) == (90.0, "then", Severity.WARNING)


async def test_alerts_are_sorted_by_severity_then_age(scene: Scene) -> None:
    wrong = [
        make_alert(target="late", since=9.0),
        make_alert(target="mild", since=1.0, severity=Severity.WARNING),
        make_alert(target="early", since=5.0),
    ]
    await scene.run_checks(0, *wrong)
    assert await scene.run_checks(6, *wrong) == ["early", "late", "mild"]


@pytest.mark.evidence("U13")
async def test_alerts_of_users_cover_clusters_and_own_jobs(scene: Scene) -> None:
    wrong = [
        make_alert(),
        make_alert(AlertKind.JOB_STARVES, "job 1", job=1, user="ada", remedy="koala hold 2"),
        make_alert(AlertKind.CLAIM_STUCK, "job 2", job=2, user="bob", cluster="north"),
        make_alert(AlertKind.DATABASE, "database"),
        make_alert(AlertKind.DISK, "disk spool of north", cluster="north"),
        make_alert(AlertKind.OLD_VERSION, "daemon"),
    ]
    await scene.run_checks(0, *wrong)
    await scene.run_checks(6, *wrong)
    assert len(scene.alerts.visible_to(OPERATOR)) == len(wrong)
    messages = {alert.target: alert.remedy for alert in scene.alerts.visible_to(ADA)}
    assert messages == {"cluster north": OPERATORS_SEE_IT, "job 1": "see what it waits for: koala explain 1"}
    assert {alert.target for alert in scene.alerts.visible_to(BOB)} == {"cluster north", "job 2"}


async def test_alerts_with_failing_check_run_other_checks(scene: Scene) -> None:
    async def broken(now: float) -> AsyncIterator[Alert]:
        yield make_alert(target=f"{1 / 0}")

    scene.alerts._checks = [broken, scene._yield_wrong]
    await scene.run_checks(0, make_alert())
    assert await scene.run_checks(6, make_alert()) == ["cluster north"]


async def test_database_check_counts_recent_successes_only() -> None:
    now = 0.0
    writes = Timings(clock=lambda: now)
    check = partial(check_database, DatabaseMonitor(), writes, "look at it", "free space", RULES)

    async def list_alerts() -> list[str]:
        return [f"{alert.severity} {alert.cause}" async for alert in check(now)]

    for seconds in (9.0, 9.0, 9.0):
        writes.note(seconds, failed=True)
    writes.note(RULES.database_slow / 2)
    assert await list_alerts() == []
    writes.note(RULES.database_slow)
    writes.note(2 * RULES.database_slow)
    assert await list_alerts() == ["warning the median transaction of the last minute took 0.5 s"]
    now = WINDOW + 1
    assert await list_alerts() == []


async def test_database_alert_of_full_disk_says_what_to_free() -> None:
    monitor = DatabaseMonitor()
    check = partial(check_database, monitor, Timings(), "look at it", "free space", RULES)
    for reason, remedy in (("database is locked", "look at it"), ("database or disk is full", "free space")):
        monitor.note_failure("engine", reason)
        monitor.note_failure("engine")  # the next try has not ended yet
        assert [(alert.cause, alert.remedy) async for alert in check(0.0)] == [(reason, remedy)]


async def test_cluster_check_alerts_until_lost_records_are_gone() -> None:
    cluster = ClusterStatus("north")
    cluster.contact.connected = True
    check = ClusterChecks(lambda: [cluster], [])
    cluster.report(ClusterReport(total=2, idle=2, lost_records=("7.1.0.ab", "8.1.0.cd")), 1.0)
    (lost_alert,) = [alert async for alert in check(2.0)]
    assert (lost_alert.kind, lost_alert.cluster) == (AlertKind.RECORDS_LOST, "north")
    assert "2 components" in lost_alert.summary
    assert "7.1.0.ab, 8.1.0.cd" in lost_alert.cause
    cluster.report(ClusterReport(total=2, idle=2), 3.0)
    assert [alert async for alert in check(4.0)] == []


def test_mark_from_the_future_is_not_valid() -> None:
    """A daemon that ran with a clock a year ahead must not silence alerts for a year."""
    alert = make_alert()
    mark = AlertMark(alert.kind, alert.target, MarkAction.SILENCE, "olga", NOW + 3e7, NOW + 3e7 + 3600)
    assert not mark.applies_to(alert, NOW)
    assert mark.applies_to(alert, NOW + 3e7)
    assert not mark.applies_to(alert, NOW + 3e7 + 3600)
