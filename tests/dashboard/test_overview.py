"""The overview of grids of several sizes: groups of alerts, charts, order of tiles, acknowledgements."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.daemon.observability.figures import LOAD_PERIODS, Samples
from koalapy.dashboard.charts import Slot, describe_range, line_chart, make_slots, stacked_chart
from koalapy.dashboard.rows import job_row
from koalapy.dashboard.timeline import Phase, Timeline, TimelineBar, TimelineLane, draw_timeline
from koalapy.model.cluster import Drain
from koalapy.model.history import LOAD_KEPT_S, LOAD_SLOT_S, LoadPeriod, Sample
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Job, JobState, PlannedStart
from koalapy.model.job_spec import JobSpec
from koalapy.model.reports import ClusterReport
from koalapy.model.request import FlexibleRequest
from koalapy.scheduler.clusters import NodeUse
from koalapy.store.database import Database
from koalapy.store.service_tables import SampleStore
from tests.daemon_in_process import ServedDaemon
from tests.dashboard.people import Person, create_token
from tests.dashboard.scenes import SCENES, Scene, serve_scene
from tests.databases import open_database


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedDaemon]:
    """A grid of ten clusters of which six are away."""
    SCENES["test"] = Scene(10, 60, away=6)
    with serve_scene("test", tmp_path_factory.mktemp("scene")) as daemon:
        yield daemon
    del SCENES["test"]


def test_alerts_with_one_cause_are_one_group(scene: ServedDaemon) -> None:
    view = scene.http.get("/now.json").json()
    (group,) = [group for group in view["groups"] if group["alert"]["kind"] == "agent-away"]
    assert group["alert"]["summary"] == "6 clusters are unreachable: their agents are not connected"
    assert len(group["alerts"]) == 6
    assert group["alert"]["cause"].startswith("6 of 10 agents were lost within 4 s: the daemon's network is the likely")
    assert group["alert"]["since"] == min(row["alert"]["since"] for row in group["alerts"])


def test_outcomes_by_slot_are_those_of_ended_jobs(scene: ServedDaemon) -> None:
    view = scene.http.get("/now.json").json()
    jobs = scene.http.get("/api/v1/jobs", params={"state": ["succeeded", "failed", "cancelled"], "limit": 500}).json()[
        "jobs"
    ]
    ends = Counter(job["state"] for job in jobs)
    assert sum(ends.values()) > 20
    for state in ("succeeded", "failed", "cancelled"):
        assert sum(slot["means"][state] for slot in view["hours"]) == ends[state]
    last_hour = [slot["means"] for slot in view["hours"][:2]]
    assert view["outcomes"]["ended"] == sum(s["succeeded"] + s["failed"] + s["cancelled"] for s in last_hour)
    assert view["outcomes"]["failed"] == sum(slot["failed"] for slot in last_hour)
    assert view["outcomes"]["usual"] == 100 * ends["failed"] / sum(ends.values())


@pytest.mark.parametrize(
    ("state", "planned_at", "forecast", "expected"),
    [
        ("queued", 90.0, 70.0, 90.0),
        ("queued", None, 70.0, 70.0),
        ("queued", None, None, None),
        ("running", 90.0, 70.0, None),
    ],
)
def test_expected_start_is_planned_else_forecast(
    state: str, planned_at: float | None, forecast: float | None, expected: float | None
) -> None:
    planned = PlannedStart(1.0, 80.0, planned_at, ("north",), is_certain=True, delay=0.0)
    spec = JobSpec(FlexibleRequest(1), ("true",), owner="ada")
    job = Job(1, spec, 1.0, JobState(state), planned_start=planned)
    row = job_row(JobRecord(job, ""), Identity("ada", Role.USER, ""), 1, forecast)
    assert row.expected == expected
    assert job_row(JobRecord(job, ""), Identity("eve", Role.USER, ""), 1, forecast).expected is None


@pytest.mark.processes
def test_start_of_a_job_by_size_is_estimated_once_and_not_with_each_change(scene: ServedDaemon) -> None:
    view = scene.http.get("/start.json?nodes=1&sort=name").json()
    assert (view["start_nodes"], view["sort"]) == (1, "name")
    assert view["start"]["at_once"] or view["start"]["expected"] or view["start"]["reason"]
    page = scene.http.get("/start?nodes=1").text
    assert ".events" not in page
    assert "/start?nodes=1&amp;sort=name" in page
    assert [scene.http.get(f"/start?nodes={number}").status_code for number in ("0", "-1", "nan", "1000001", "")] == [
        422
    ] * 5


def test_tiles_without_dark_ones_are_sorted_by_problem_load_or_name(scene: ServedDaemon) -> None:
    def names(order: str) -> list[str]:
        view = scene.http.get(f"/now.json?sort={order}").json()
        assert not any(tile["connected"] for tile in view["dark"])
        assert len(view["dark"]) == 6
        return [tile["cluster"] for tile in view["tiles"]]

    states = {cluster["name"]: cluster["state"] for cluster in scene.http.get("/api/v1/clusters").json()["clusters"]}
    ranks = [states[name] == "usable" for name in names("trouble")]
    assert ranks == sorted(ranks)
    assert names("name") == sorted(names("name"))
    assert sorted(names("load")) == names("name")
    assert scene.http.get("/now.json?sort=colour").status_code == 422


def test_acknowledged_and_silenced_alerts_name_operator_and_are_audited(scene: ServedDaemon) -> None:
    with closing(Person(scene, create_token(scene, "olga", "operator"))) as operator:
        fields = {"kind": "agent-away", "reason": "power cut <b>", "mark": "acknowledge", "hours": "1"}
        alerts = scene.http.get("/api/v1/alerts").json()["alerts"]
        away = [alert["target"] for alert in alerts if alert["kind"] == "agent-away"]
        assert operator.send_form("/", "/alerts/mark", **fields, targets="\r\n".join(away[:2])).status_code == 303
        alerts = scene.http.get("/api/v1/alerts").json()["alerts"]
        assert sorted(alert["target"] for alert in alerts if alert["mark"]) == sorted(away[:2])
        assert operator.send_form("/", "/alerts/mark", **fields, targets="").status_code == 422
        page = operator.get_page("/")
        assert "acknowledged by olga" in page
        assert "power cut &lt;b&gt;" in page
    order = {"kind": "agent-away", "action": "silence", "duration": 60}
    answer = scene.http.post("/api/v1/alerts/mark", json=order)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["alerts"]) == 6
    view = scene.http.get("/now.json").json()
    assert len(view["silenced"]) == 6
    assert "agent-away" not in {group["alert"]["kind"] for group in view["groups"]}
    assert scene.http.post("/api/v1/alerts/unmark", json={"kind": "agent-away"}).status_code == 200
    assert scene.http.get("/now.json").json()["silenced"] == []
    assert scene.http.post("/api/v1/alerts/unmark", json={"kind": "database"}).status_code == 404
    for wrong in ({"duration": 0}, {"duration": 1e9}, {"targets": ["a\0"]}, {"kind": "x"}, {"reason": "a\nb"}):
        assert scene.http.post("/api/v1/alerts/mark", json=order | wrong).status_code == 422
    entries = scene.http.get("/api/v1/audit").json()["entries"]
    assert {("olga", "mark_alert"), ("ada", "unmark_alert")} <= {(e["actor"], e["action"]) for e in entries}


def test_operator_tests_configured_notifications_only(scene: ServedDaemon) -> None:
    with closing(Person(scene, create_token(scene, "otto", "operator"))) as operator:
        assert "1 mail address" in operator.get_page("/")
        assert operator.send_form("/", "/alerts/test", channel="mail", csrf="x").status_code == 403
        for wrong in ("", "pager", "http://169.254.169.254/"):
            assert operator.send_form("/", "/alerts/test", channel=wrong).status_code == 422
        assert operator.send_form("/", "/alerts/test", channel="webhook").status_code == 409
        answer = operator.send_form("/", "/alerts/test", channel="mail", to="eve@example.com")
        assert answer.status_code == 200
        assert "SMTP 550 &lt;x-injected&gt; ops@example.org" in answer.text
        assert "eve@example.com" not in answer.text
        answer = operator.send_form("/", "/alerts/test", channel="mail")
        assert (answer.status_code, int(answer.headers["retry-after"]) > 0) == (429, True)
    entries = scene.http.get("/api/v1/audit", params={"user": "otto", "action": "test_notification"}).json()["entries"]
    assert ("done", "mail", "delivered to 0 of 1 recipients") in [
        (entry["outcome"], entry["target"], entry["detail"]) for entry in entries
    ]
    body = {"channel": "mail", "to": "eve@example.com"}
    assert scene.http.post("/api/v1/alerts/test", json=body).status_code == 422
    with closing(Person(scene, create_token(scene, "uma"))) as user:
        assert "/alerts/test" not in user.get_page("/")
        assert user.get_json("/now.json")["notified"] == {}


def test_user_cannot_acknowledge_and_sees_no_forms(scene: ServedDaemon) -> None:
    token = create_token(scene, "ursula")
    with closing(Person(scene, token)) as user:
        assert "/alerts/mark" not in user.get_page("/")
    order = {"kind": "agent-away", "action": "silence"}
    answer = scene.http.post("/api/v1/alerts/mark", json=order, headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 403


def test_charts_average_samples_and_leave_gaps() -> None:
    samples = [Sample(at, 4, 2, 2, 10, 1, 3, 2.0) for at in (1.0, 5.0)]
    samples += [Sample(25.0, 8, 0, 0, 0, 3, 0, 4.0), Sample(26.0, 0, 8, 0, 0, 0, 0, None)]
    slots = make_slots(samples, until=40.0, period=40.0, count=4)
    assert [(slot.means.get("ours"), slot.means.get("startup")) for slot in slots] == [
        (4.0, 2.0),
        (None, None),
        (4.0, 4.0),
        (None, None),
    ]
    assert line_chart(slots, ("queued",), "queue").count("<polyline") == 2
    assert stacked_chart(slots, ("ours", "local"), "<nodes>").count("<polygon") == 4
    assert "&lt;nodes&gt;" in stacked_chart(slots, ("ours",), "<nodes>")
    assert describe_range(slots, "queued", "{:.0f}".format) == "0 to 10"
    assert not line_chart([Slot(0.0, {})], ("queued",), "queue")
    uneven = [Slot(at, {"latency": 1.0}) for at in (0.0, 10.0, 20.0, 90.0)]
    assert 'points="0.0,1.0 20.0,1.0 40.0,1.0 180.0,1.0 240.0,1.0"' in line_chart(uneven, ("latency",), "latency")
    assert not stacked_chart([], ("ours",), "nodes")


@dataclass
class FakeCluster:
    """A cluster with a current report, or without."""

    name: str
    last_report: ClusterReport
    is_current: bool = True

    def known_at(self, now: float) -> float:
        return now if self.is_current else now - 1


async def test_local_load_has_gap_while_agent_is_away(tmp_path: Path) -> None:
    north, south, now = (
        FakeCluster("north", ClusterReport(8, 6, 2)),
        FakeCluster("south", ClusterReport(6, 0, 9)),
        [600 * 4800.0],
    )
    grid = SimpleNamespace(clusters=lambda: [north, south], used=0)
    for cluster in grid.clusters():
        cluster.node_use = NodeUse()
    engine: Any = SimpleNamespace(queries=SimpleNamespace(grid=grid), stored_queued=0, subscribe=lambda _: None)
    store = SampleStore(Database(open_database(tmp_path / "koala.db")))
    samples = Samples(engine, store, lambda: now[0])
    for minute in range(60):
        south.is_current = not 20 <= minute < 40
        north.last_report = ClusterReport(8, 4, 4 if minute >= 50 else 2)
        await samples.take()
        now[0] += 60.0
    loads = await samples.read_local_load(3600.0)
    start = now[0] - 3600.0
    assert loads["north"] == tuple(
        LoadPeriod(start + 600 * slot, start + 600 * slot + 600, 0.25 if slot < 5 else 0.5) for slot in range(6)
    )
    assert [(period.start - start, period.share) for period in loads["south"]] == [
        (0.0, 1.0), (600.0, 1.0), (2400.0, 1.0), (3000.0, 1.0),
    ]  # fmt: skip
    again = await Samples(engine, store, lambda: now[0]).read_local_load(3600.0)
    assert again["north"] == loads["north"][:5], "after a restart, the slot that had not ended is missing"
    for _ in range(int(LOAD_KEPT_S // LOAD_SLOT_S) + 3):
        now[0] += LOAD_SLOT_S
        await samples.take()
    assert len(store.local_load(0, 1)) == 2 * (LOAD_KEPT_S // LOAD_SLOT_S + 1)
    weeks = await samples.read_local_load(4 * LOAD_KEPT_S)
    assert 8 < len(weeks["south"]) <= LOAD_PERIODS + 2


def test_timeline_draws_load_with_gaps() -> None:
    load = (LoadPeriod(0.0, 600.0, 0.25), LoadPeriod(600.0, 1200.0, 0.5), LoadPeriod(1800.0, 2400.0, 1.0))
    bar = TimelineBar(7, 1, [Phase("running", 0.0, 600.0)])
    picture = draw_timeline(Timeline(300.0, 2600.0, 2400.0, [TimelineLane("<north>", 4, [bar], load=load)]))
    assert 'd="M0 0V25H10V50H20V0ZM30 0V100H40V0Z"' in picture
    assert 'viewBox="5.00 0 35.00 100"' in picture, "the picture begins within the first period"
    assert "local users on &lt;north&gt;: 25 to 100 %, last known 100 %" in picture


def test_overview_estimates_start_of_job_of_given_size(scene: ServedDaemon) -> None:
    assert scene.http.get("/now.json").json()["start"] is None
    many = scene.http.get("/start.json?nodes=1000000").json()["start"]
    assert (many["at_once"], many["expected"]) == (False, None)
    assert many["reason"].startswith("the clusters have")


def test_users_have_node_hours_and_shares_of_day_and_month(scene: ServedDaemon) -> None:
    users = scene.http.get("/users.json").json()["users"]
    for span in ("day", "month"):
        assert sum(user[f"{span}_hours"] for user in users) > 0
        assert sum(user[f"{span}_share"] for user in users) == pytest.approx(100)


def test_drains_are_marked_on_charts_and_timeline() -> None:
    slots = [Slot(60.0 * number, {"ours": 1.0}) for number in range(4)]
    chart = stacked_chart(slots, ["ours"], "nodes", [(120.0, "north drained by ada: <disks>"), (500.0, "later")])
    assert re.findall(r'class="event" d="M([0-9.]+) .*?<title>(.*?)</title>', chart) == [
        ("120.0", "north drained by ada: &lt;disks&gt;")
    ]
    drains = [Drain(100.0, "ada", "disks"), Drain(0.0, "ada", "switch", begins_at=900.0, ends_at=950.0)]
    bars = [TimelineBar(7, 2, [Phase("running", 10.0, 50.0)])]
    picture = draw_timeline(Timeline(0.0, 200.0, 150.0, [TimelineLane("north", 4, bars, drains=drains)]))
    assert re.findall(
        r'aria-label="([^"]*)"><rect class="drain" x="([0-9.]+)%" y="22" width="([0-9.]+)%"', picture
    ) == [("north is drained by ada: disks", "50.0", "50.00")]
