"""Alerts neither flap nor are forgotten, and are told to whom they concern."""

from collections.abc import AsyncIterator

import pytest

from koalapy.daemon.alerts.alerts import Alerts
from koalapy.daemon.alerts.cluster_checks import ClusterChecks
from koalapy.daemon.alerts.daemon_checks import WINDOW, DatabaseCheck
from koalapy.daemon.engine.database import DatabaseMonitor
from koalapy.daemon.observability.timings import Timings
from koalapy.model.alert import LET_OTHERS_GO, OPERATORS_SEE_IT, Alert, AlertKind, AlertRules, Severity
from koalapy.model.identity import Identity, Role
from koalapy.model.reports import ClusterReport
from koalapy.scheduler.clusters import ClusterStatus

RULES = AlertRules(hold=5, release=15)
ADA, BOB = (Identity(name, Role.USER, "") for name in ("ada", "bob"))
OPERATOR = Identity("otto", Role.OPERATOR, "")


def alert(kind: AlertKind = AlertKind.AGENT_AWAY, target: str = "cluster north", **more: object) -> Alert:
    texts = {"severity": Severity.CRITICAL, "summary": "gone", "cause": "who knows", "remedy": "koala do", "since": 0.0}
    return Alert(kind=kind, target=target, **{**texts, **more})  # type: ignore[arg-type]


class Scene:
    """Time, and what is wrong at it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.wrong: list[Alert] = []
        self.told: list[tuple[str, bool]] = []
        self.alerts = Alerts([self._check], RULES, lambda: self.now, [self._changed])

    def _changed(self, alert: Alert, begins: bool) -> None:
        self.told.append((alert.target, begins))

    async def _check(self, now: float) -> AsyncIterator[Alert]:
        for each in self.wrong:
            yield each

    async def look(self, after: float, *wrong: Alert) -> list[str]:
        self.now += after
        self.wrong = list(wrong)
        await self.alerts.run_checks()
        return [each.target for each in self.alerts.current_alerts()]


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_what_is_wrong_for_a_moment_only_is_no_alert(scene: Scene) -> None:
    for _ in range(5):
        assert await scene.look(2, alert()) == []
        assert await scene.look(2, alert()) == []
        assert await scene.look(2) == []
    assert scene.told == []


async def test_it_begins_after_it_has_held_and_ends_after_it_is_over_for_a_moment(scene: Scene) -> None:
    assert await scene.look(2, alert()) == []
    assert await scene.look(5, alert()) == ["cluster north"]
    for _ in range(5):  # it comes and goes: told once all the same
        assert await scene.look(14) == ["cluster north"]
        assert await scene.look(2, alert()) == ["cluster north"]
    assert await scene.look(14) == ["cluster north"]
    assert await scene.look(1) == []
    assert scene.told == [("cluster north", True), ("cluster north", False)]


async def test_it_is_told_with_the_newest_words_and_the_oldest_time(scene: Scene) -> None:
    await scene.look(0, alert(since=90.0, summary="first"))
    await scene.look(6, alert(since=106.0, summary="then", severity=Severity.WARNING))
    (told,) = scene.alerts.current_alerts()
    assert (told.since, told.summary, told.severity) == (90.0, "then", Severity.WARNING)


async def test_the_critical_come_first_and_then_the_oldest(scene: Scene) -> None:
    wrong = [
        alert(target="late", since=9.0),
        alert(target="mild", since=1.0, severity=Severity.WARNING),
        alert(target="early", since=5.0),
    ]
    await scene.look(0, *wrong)
    assert await scene.look(6, *wrong) == ["early", "late", "mild"]


@pytest.mark.evidence("U13")
async def test_users_are_told_what_concerns_clusters_and_their_own_jobs(scene: Scene) -> None:
    wrong = [
        alert(),
        alert(AlertKind.JOB_STARVES, "job 1", job=1, user="ada", remedy="koala hold 2"),
        alert(AlertKind.CLAIM_STUCK, "job 2", job=2, user="bob", cluster="north"),
        alert(
            AlertKind.QUEUE_FLOODED,
            "user bob",
            user="bob",
            cause="other users have queued jobs as well: ada",
            remedy="limits.users.bob",
        ),
        alert(AlertKind.DATABASE, "database"),
        alert(AlertKind.DISK, "disk spool of north", cluster="north"),
        alert(AlertKind.OLD_VERSION, "daemon"),
    ]
    await scene.look(0, *wrong)
    await scene.look(6, *wrong)
    assert len(scene.alerts.visible_to(OPERATOR)) == len(wrong)
    told = {each.target: each.remedy for each in scene.alerts.visible_to(ADA)}
    assert told == {"cluster north": OPERATORS_SEE_IT, "job 1": "see what it waits for: koala explain 1"}
    assert {each.target for each in scene.alerts.visible_to(BOB)} == {"cluster north", "job 2", "user bob"}
    (flood,) = (each for each in scene.alerts.visible_to(BOB) if each.kind is AlertKind.QUEUE_FLOODED)
    assert (flood.cause, flood.remedy) == ("others wait as well", LET_OTHERS_GO), "nobody is told whose jobs wait"


async def test_a_check_that_breaks_keeps_no_other_from_being_told(scene: Scene) -> None:
    async def broken(now: float) -> AsyncIterator[Alert]:
        yield alert(target=f"{1 / 0}")

    scene.alerts._checks = [broken, scene._check]
    await scene.look(0, alert())
    assert await scene.look(6, alert()) == ["cluster north"]


async def test_a_database_is_slow_by_what_went_well_lately() -> None:
    now = 0.0
    writes = Timings(clock=lambda: now)
    check = DatabaseCheck(DatabaseMonitor(), writes, "look at it", RULES)

    async def told() -> list[str]:
        return [f"{alert.severity} {alert.cause}" async for alert in check(now)]

    for seconds in (9.0, 9.0, 9.0):
        writes.note(seconds, failed=True)
    writes.note(RULES.database_slow / 2)
    assert await told() == []
    writes.note(RULES.database_slow)
    writes.note(2 * RULES.database_slow)
    assert await told() == ["warning the median transaction of the last minute took 0.5 s"]
    now = WINDOW + 1
    assert await told() == []


async def test_cluster_check_with_lost_records_raises_alert_until_they_are_reported_no_more() -> None:
    cluster = ClusterStatus("north")
    cluster.contact.connected = True
    check = ClusterChecks(lambda: [cluster], [])
    cluster.report(ClusterReport(total=2, idle=2, lost_records=("7.1.0.ab", "8.1.0.cd")), 1.0)
    (found,) = [each async for each in check(2.0)]
    assert (found.kind, found.cluster) == (AlertKind.RECORDS_LOST, "north")
    assert "2 components" in found.summary
    assert "7.1.0.ab, 8.1.0.cd" in found.cause
    cluster.report(ClusterReport(total=2, idle=2), 3.0)
    assert [each async for each in check(4.0)] == []
