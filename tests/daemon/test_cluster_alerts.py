"""Alerts, health checks, metrics and dashboard distinguish a disconnected agent from a silent resource manager."""

import time
from math import inf
from pathlib import Path

import pytest

from koalapy.daemon.agents.hub import Rejection
from koalapy.daemon.alerts.cluster_checks import (
    CONNECT_GRACE,
    MAX_LOW_DISKS,
    REJECTION_WINDOW,
    ClusterChecks,
    check_clocks,
    check_disks,
)
from koalapy.daemon.alerts.daemon_checks import check_certificate
from koalapy.daemon.alerts.health import HealthMonitor
from koalapy.daemon.listener.certificate import EXPIRY_WARNING, Certificate
from koalapy.dashboard.rows import ClusterRow, Survey, cluster_row
from koalapy.model.alert import Alert, AlertKind, Severity
from koalapy.model.disk import Disk, DiskLimits
from koalapy.model.identity import Identity, Role
from koalapy.model.job import format_token
from koalapy.model.reports import ClusterReport
from koalapy.protocol.messages import Confirmed
from koalapy.scheduler.cluster_conditions import HealthStatus
from koalapy.scheduler.clusters import NO_REPORT_YET, ClusterStatus
from tests.certificates import CertificateAuthority
from tests.daemon.test_hub import Daemon, connect_agent, report_nodes, running_daemon, wait_for_state
from tests.signals import until

NO_SINFO = "cannot run sinfo: No such file or directory"
NOT_YET = "its agent has not connected yet"


async def alerts_of(daemon: Daemon, seconds: float = CONNECT_GRACE + 1) -> list[Alert]:
    """Return the alerts about north after ``seconds`` in its present state."""
    checks = ClusterChecks(daemon.scheduler.queries.grid.clusters, (), daemon.hub.rejections)
    now = daemon.engine.clock()
    _ = [alert async for alert in checks(now)]
    return [alert async for alert in checks(now + seconds) if alert.cluster == "north"]


def health_of(daemon: Daemon) -> dict[str, str]:
    """Return the reason of each failed check of north, by check."""
    checks = HealthMonitor(daemon.engine, daemon.queries, {}, DiskLimits()).check_readiness().checks
    return {check.name: check.reason for check in checks if check.cluster == "north" and not check.ok}


def cluster_lane(daemon: Daemon) -> ClusterRow:
    cluster, now = daemon.scheduler.queries.grid["north"], daemon.engine.clock()
    return cluster_row(cluster, daemon.describe("north"), Survey(), now)


async def test_cluster_check_without_any_agent_alerts_agent_away(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        (alert,) = await alerts_of(daemon)
        assert (alert.kind, alert.cause) == (AlertKind.AGENT_AWAY, NOT_YET)
        assert health_of(daemon)["agent"] == NOT_YET
        assert not cluster_lane(daemon).connected


async def test_cluster_check_without_lrm_answer_is_no_agent_away(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        async with daemon.agent_of("north") as north:
            north.say_to_daemon(report_nodes(0, NO_SINFO))
            await wait_for_state(daemon, "north", ("unreachable", 0, NO_SINFO))
            (alert,) = await alerts_of(daemon)
            assert (alert.kind, alert.cause) == (AlertKind.RESOURCE_MANAGER, NO_SINFO)
            assert "agent" not in alert.summary
            assert health_of(daemon) == {"resource manager": NO_SINFO}
            assert (cluster_lane(daemon).connected, cluster_lane(daemon).problem) == (True, NO_SINFO)
        await wait_for_state(daemon, "north", ("unreachable", 0, "its agent is not connected"))
        (alert,) = await alerts_of(daemon)
        assert (alert.kind, alert.cause) == (AlertKind.AGENT_AWAY, "its agent is not connected")
        assert health_of(daemon)["agent"] == "its agent is not connected"


async def test_cluster_check_before_first_report_is_no_disconnect(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        async with daemon.agent_of("north") as north:
            await wait_for_state(daemon, "north", ("unreachable", 0, NO_REPORT_YET))
            (alert,) = await alerts_of(daemon)
            assert (alert.kind, alert.cause) == (AlertKind.AGENT_AWAY, NO_REPORT_YET)
            assert alert.summary == "the agent of north has not reported yet: no jobs are placed there"
            assert health_of(daemon) == {"resource manager": NO_REPORT_YET}
            assert cluster_lane(daemon).connected
            assert await alerts_of(daemon, seconds=CONNECT_GRACE - 1) == [], "it has time to tell"
            await connect_agent(daemon, "north", north)
            assert await alerts_of(daemon) == []
            assert health_of(daemon) == {}
        await wait_for_state(daemon, "north", ("unreachable", 4, "its agent is not connected"))
        async with daemon.agent_of("north"):
            await wait_for_state(daemon, "north", ("unreachable", 4, NO_REPORT_YET))
        await wait_for_state(daemon, "north", ("unreachable", 4, "its agent is not connected"))


async def test_agent_away_alert_names_rejected_connection_and_remedy(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        daemon.hub.note_rejection("north", "the token is not that of cluster north", "set KOALA_AGENT_TOKEN")
        (alert,) = await alerts_of(daemon)
        assert alert.cause == (
            f"{NOT_YET}; a connection in its name was rejected: the token is not that of cluster north"
        )
        assert alert.summary == "the agent of north is rejected: no jobs are placed there"
        assert alert.remedy.startswith("set KOALA_AGENT_TOKEN; then restart it")
        (alert,) = await alerts_of(daemon, seconds=REJECTION_WINDOW + 1)
        assert alert.cause == NOT_YET
        async with daemon.agent_of("north"):
            await wait_for_state(daemon, "north", ("unreachable", 0, NO_REPORT_YET))
            daemon.hub.note_rejection("north", "the token is not that of cluster north", "")
            assert not daemon.hub.rejections


async def test_agent_away_alert_of_rejected_connection_needs_no_grace(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        assert await alerts_of(daemon, seconds=CONNECT_GRACE - 1) == [], "it has time to connect"
        daemon.hub.note_rejection("north", "the token is not that of cluster north", "set KOALA_AGENT_TOKEN")
        assert len(await alerts_of(daemon, seconds=CONNECT_GRACE - 1)) == 1


async def test_agent_away_alert_of_restarted_daemon_waits_for_agent() -> None:
    cluster = ClusterStatus("north")
    cluster.contact.last_heard = 90.0
    check = ClusterChecks(lambda: [cluster], [])
    assert [alert async for alert in check(100.0)] == []
    assert [alert async for alert in check(100.0 + CONNECT_GRACE - 1)] == []
    assert [alert.since async for alert in check(100.0 + CONNECT_GRACE)] == [90.0]


async def test_agent_away_alert_of_lost_agent_needs_no_grace() -> None:
    cluster = ClusterStatus("north")
    check = ClusterChecks(lambda: [cluster], [])
    assert [alert async for alert in check(100.0)] == []
    cluster.contact.last_heard = 102.0
    assert [alert.since async for alert in check(105.0)] == [102.0]


def lost_clusters(*names: str, at: float = 100.0, apart: float = 1.0) -> list[ClusterStatus]:
    """Return clusters of which the agents were lost one after the other."""
    clusters = [ClusterStatus(name) for name in names]
    for index, cluster in enumerate(clusters):
        cluster.contact.last_heard, cluster.contact.losses = at + index * apart, 1
    return clusters


def connected_clusters(*names: str) -> list[ClusterStatus]:
    clusters = [ClusterStatus(name) for name in names]
    for cluster in clusters:
        cluster.contact.connected = cluster.contact.has_agent = True
    return clusters


async def absence_causes(clusters: list[ClusterStatus], **rejections: Rejection) -> dict[str, str]:
    checks = ClusterChecks(lambda: clusters, ["embedded-1"], rejections, started_at=0.0)
    return {alert.cluster: alert.cause async for alert in checks(200.0) if alert.kind is AlertKind.AGENT_AWAY}


async def test_most_agents_lost_together_have_network_of_daemon_as_cause() -> None:
    lost = lost_clusters("delft-1", "leiden-1", "leiden-2", "twente-1")
    for number, cluster in enumerate(lost[:2]):
        cluster.nodes.live[format_token(7, 1, number, "aa")] = 3
        cluster.contact.lost_by = 3600.0 + number
    causes = await absence_causes([*lost, *connected_clusters("delft-2")])
    assert set(causes) == {cluster.name for cluster in lost}
    assert set(causes.values()) == {
        "4 of 5 agents were lost within 3 s: the daemon's network is the likely cause; 1 job holds 6 nodes "
        "there; all restart by 01:00 UTC, when their leases and walltimes are over"
    }
    lost[2].contact.lost_by = inf
    assert all(cause.endswith("6 nodes there") for cause in (await absence_causes(lost)).values())


async def test_agents_that_never_connected_to_this_daemon_have_no_common_cause() -> None:
    clusters = lost_clusters("delft-1", "leiden-1", "twente-1")
    for cluster in clusters:
        cluster.contact.losses = 0
    assert set((await absence_causes(clusters)).values()) == {NOT_YET}


async def test_agents_lost_together_that_are_at_most_half_have_what_they_share_as_cause() -> None:
    """Names of clusters do not say where they are."""
    lost = lost_clusters("delft-1", "delft-2", "leiden-1")
    causes = await absence_causes([*lost, *connected_clusters("twente-1", "breda-1", "gent-1")])
    assert set(causes.values()) == {
        "3 of 6 agents were lost within 2 s: a network or a power supply that they share is the likely cause; no jobs "
        "have nodes there"
    }


async def test_agents_lost_one_by_one_or_by_own_causes_have_no_common_cause() -> None:
    rejected = lost_clusters("rejected-1")
    away = lost_clusters("delft-1", "leiden-1") + lost_clusters("twente-1", "hague-1", at=400.0)
    clusters = [*away, *rejected, *lost_clusters("embedded-1")]
    causes = await absence_causes(clusters, **{"rejected-1": Rejection("its token is wrong", "set it", 190.0)})
    assert len(causes) == len(clusters)
    assert not any("likely" in cause for cause in causes.values())


async def test_resource_manager_alert_starts_with_silence() -> None:
    cluster = ClusterStatus("north")
    cluster.contact.connected = cluster.contact.has_agent = True
    check = ClusterChecks(lambda: [cluster], [])
    cluster.report(ClusterReport(total=2, idle=2, problem="not answering since 14:02:07", silent_for=7.0), 20.0)
    (alert,) = [alert async for alert in check(21.0)]
    assert (alert.since, alert.cause) == (13.0, "not answering since 14:02:07")
    assert alert.summary == "no jobs can start on north: its resource manager does not answer"
    cluster.report(ClusterReport(total=2, idle=2, problem="node table is locked"), 22.0)
    (alert,) = [alert async for alert in check(23.0)]
    assert (alert.since, alert.cause) == (23.0, "node table is locked")
    assert alert.summary.endswith("accepts no jobs")


async def test_full_disk_of_agent_is_no_fault_of_resource_manager() -> None:
    cluster = ClusterStatus("north")
    cluster.contact.connected = cluster.contact.has_agent = True
    disk = Disk("spool", "/spool", free=0, size=10**12)
    cluster.report(ClusterReport(total=2, idle=2, problem=str(disk), disks=(disk,)), 20.0)
    assert [alert async for alert in ClusterChecks(lambda: [cluster], [])(21.0)] == []
    (alert,) = [alert async for alert in check_disks(tuple, lambda: [cluster], DiskLimits(low=0, least=0), 21.0)]
    assert (alert.kind, alert.cluster) == (AlertKind.DISK, "north")
    assert alert.remedy == "find what fills it, on the head node of north: du -xh /spool | sort -h | tail"


@pytest.mark.evidence("G10")
async def test_cluster_with_many_full_disks_has_few_alerts() -> None:
    cluster = ClusterStatus("north")
    disks = tuple(Disk(f"spool {number}", "/spool", free=0, size=10**12) for number in range(100))
    cluster.report(ClusterReport(total=2, idle=2, disks=disks), 20.0)
    alerts = check_disks(tuple, lambda: [cluster], DiskLimits(), 21.0)
    assert len([alert async for alert in alerts]) == MAX_LOW_DISKS


@pytest.mark.evidence("U14")
async def test_unusable_cluster_alert_shows_last_error_to_operators_only() -> None:
    cluster = ClusterStatus("north", health=HealthStatus(3, unusable=True, note="3 errors in a row, the last: alice's"))
    cluster.contact.connected = cluster.contact.has_agent = True
    (alert,) = [alert async for alert in ClusterChecks(lambda: [cluster], [])(21.0)]
    assert "(the last: alice's)" in alert.remedy
    seen = alert.visible_to(Identity("bob", Role.USER, "a test"))
    assert seen is not None
    assert seen.cause == "3 errors in a row"
    assert "alice" not in str(seen)


@pytest.mark.parametrize(
    ("offsets", "step", "expected"),
    [
        ({"north": -7200.0, "south": 1.0, "here": 0.0}, 0.0, {"cluster north": "2:00:00 behind the daemon's"}),
        ({"north": 7200.0}, 0.0, {"cluster north": "2:00:00 ahead of the daemon's"}),
        ({"north": -7200.0, "south": 7200.0}, 0.0, {"cluster north": "behind", "cluster south": "ahead of"}),
        ({"north": 1.0, "south": -29.0, "here": 7200.0}, 0.0, {}),
        ({"north": 1e11, "south": -1e10}, 0.0, {"cluster north": "ahead of", "cluster south": "behind"}),
        ({"here": 0.0}, 7200.0, {"daemon": "was set"}),
        ({"north": -7200.0, "south": -7200.0}, 7200.0, {"daemon": "was set"}),
        ({"north": -7200.0, "south": -3600.0}, 7200.0, {"daemon": "was set", "cluster south": "1:00:00 behind"}),
    ],
)
async def test_clock_check_names_the_wrong_clock(
    offsets: dict[str, float], step: float, expected: dict[str, str]
) -> None:
    found = check_clocks(lambda: offsets, ["here"], lambda: 1000.0, 5.0, lambda: 1000.0 + step)
    alerts = {alert.target: alert async for alert in found}
    assert alerts.keys() == expected.keys()
    assert all(text in alerts[target].summary for target, text in expected.items()), alerts
    assert all("timedatectl" in alert.remedy for alert in alerts.values())
    assert "daemon" not in alerts or "ends jobs" in alerts["daemon"].remedy


async def test_clock_of_agent_is_known_from_its_answers_to_probes(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        async with daemon.agent_of("north") as north:
            north.say_to_daemon(Confirmed(sequence=1))
            north.say_to_daemon(Confirmed(sequence=2, clock=time.time() - 7200))
            await until(lambda: bool(daemon.sessions.clock_offsets()))
            assert daemon.sessions.clock_offsets()["north"] == pytest.approx(-7200, abs=60)
        assert daemon.sessions.clock_offsets() == {}


@pytest.mark.parametrize(
    ("seconds_left", "expected"),
    [
        (EXPIRY_WARNING + 60, None),
        (EXPIRY_WARNING - 60, (Severity.WARNING, "the daemon's certificate expires soon")),
        (-60.0, (Severity.CRITICAL, "the daemon's certificate has expired")),
    ],
)
async def test_certificate_check_near_expiry_raises_alert(
    seconds_left: float, expected: tuple[Severity, str] | None, tmp_path: Path
) -> None:
    pair = CertificateAuthority(tmp_path / "authority").issue(days=90.0)
    certificate = Certificate(pair.certificate, pair.key, tmp_path)
    found = check_certificate(certificate, 5.0, lambda: certificate.expires_at - seconds_left)
    alerts = [(alert.severity, alert.summary.partition(":")[0]) async for alert in found]
    assert alerts == ([] if expected is None else [expected])


async def test_certificate_check_alerts_until_files_are_corrected(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path / "authority")
    pair, other_pair = authority.issue(days=90.0), authority.issue(days=90.0)
    certificate, own = Certificate(pair.certificate, pair.key, tmp_path), pair.certificate.read_text()
    pair.certificate.write_text(other_pair.certificate.read_text())
    certificate.reload_if_changed()
    (alert,) = [alert async for alert in check_certificate(certificate, 5.0)]
    assert (alert.kind, alert.severity) == (AlertKind.CERTIFICATE, Severity.WARNING)
    assert "does not belong to" in alert.cause
    pair.certificate.write_text(own)
    certificate.reload_if_changed()
    assert [alert async for alert in check_certificate(certificate, 5.0)] == []
