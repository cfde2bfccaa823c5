"""The overview of grids of several sizes: groups of alerts, charts, order of tiles, acknowledgements."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import func, select

from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.daemon.observability.figures import MAX_SLOTS, Samples
from koalapy.dashboard.charts import NodeCounts, render_chart, use_chart
from koalapy.dashboard.pages.overview import starts_after_gaps
from koalapy.dashboard.pages.timeline import hide_details, join_sites
from koalapy.dashboard.rows import ClusterRow, fold_clusters, job_row
from koalapy.dashboard.time_range import parse_range
from koalapy.dashboard.timeline import Phase, Timeline, TimelineBar, TimelineLane
from koalapy.model.cluster import Drain
from koalapy.model.errors import StoreUnavailable, UsageError
from koalapy.model.history import DAY, PastComponent, UseSum, UseSums
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Job, JobState, PlannedStart
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.scheduler.clusters import NodeUse
from koalapy.store.database import Database
from koalapy.store.history import HistoryStore
from koalapy.store.service_tables import SampleStore
from koalapy.store.tables import use_sums
from tests.daemon_in_process import ServedDaemon
from tests.dashboard.pages import draw_jobs, draw_timeline
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
    view = scene.http.get("/now.json?since=7h").json()
    jobs = scene.http.get("/api/v1/jobs", params={"state": ["succeeded", "failed", "cancelled"], "limit": 500}).json()[
        "jobs"
    ]
    ends = Counter(job["state"] for job in jobs)
    assert sum(ends.values()) > 20
    for charts in (view["charts"].values(), view["hours"]):
        (outcomes,) = [chart for chart in charts if chart["title"] == "Ended jobs"]
        assert {curve["name"]: sum(curve["values"]) for curve in outcomes["curves"]} == {
            state: ends[state] for state in ("succeeded", "failed", "cancelled")
        }
    assert view["outcomes"] == {
        "ended": len(jobs),
        "failed": ends["failed"],
        "share": pytest.approx(100 * ends["failed"] / (ends["failed"] + ends["succeeded"])),
        "usual": None,
    }
    assert ends["cancelled"]
    (total,) = scene.http.get("/history.json?since=yesterday").json()["totals"]
    assert 100 * (1 - total["success"]) == pytest.approx(view["outcomes"]["share"], abs=1e-3), "History counts the same"
    early = scene.http.get("/now.json?since=6h&until=3h").json()["outcomes"]
    late = scene.http.get("/now.json?since=3h").json()["outcomes"]
    assert late["usual"] == pytest.approx(early["share"], abs=5)


def test_pages_show_no_share_of_more_than_all(scene: ServedDaemon) -> None:
    for path in ("/", "/history?since=7d", "/history?by=user&since=7d", "/timeline?since=7d&table=true", "/users"):
        text = scene.http.get(path, headers={"Accept": "text/html"}).text
        shares = [float(share.replace(",", "")) for share in re.findall(r"([\d.,]+) %", text)]
        assert shares or path == "/users", path
        assert max(shares, default=0) <= 100, path


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


def test_expected_start_in_the_past_is_due_now() -> None:
    row = job_row(JobRecord(Job(1, JobSpec(FlexibleRequest(1), owner="ada"), 1.0), ""), Identity("ada", Role.USER, ""))
    cells = [draw_jobs([replace(row, expected=at)], 90.0) for at in (89.0, 91.0)]
    assert ["due now" in cell for cell in cells] == [True, False]
    assert "≈ <time" in cells[1]


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
        (dark,) = view["folds"]
        assert (dark["name"], [tile["connected"] for tile in dark["clusters"]]) == ("", [False] * 6)
        return [tile["cluster"] for tile in view["tiles"]]

    states = {cluster["name"]: cluster["state"] for cluster in scene.http.get("/api/v1/clusters").json()["clusters"]}
    ranks = [states[name] == "usable" for name in names("trouble")]
    assert ranks == sorted(ranks)
    assert names("name") == sorted(names("name"))
    assert sorted(names("load")) == names("name")
    assert scene.http.get("/now.json?sort=colour").status_code == 422


def test_clusters_beyond_limit_are_folded_by_site_unless_they_need_attention() -> None:
    def fold(limit: int, *names: str, away: int = 0) -> tuple[list[str], dict[str, int]]:
        rows = [make_row(name, is_connected=number >= away) for number, name in enumerate(names)]
        listed, folds = fold_clusters(rows, limit)
        assert all(fold["nodes"].idle == 4 * len(fold["clusters"]) for fold in folds)
        return [row.cluster for row in listed], {fold["name"]: len(fold["clusters"]) for fold in folds}

    names = [f"{site}-{number}" for site in ("leiden", "delft") for number in range(6)]
    assert fold(12, *names) == (names, {})
    assert fold(11, *names, "hague", away=1) == (names[:1], {"delft": 6, "leiden": 5, "others": 1})
    assert fold(6, *names, away=6) == (names[6:], {"": 6})
    assert fold(5, *names, away=6) == ([], {"": 6, "delft": 6})
    assert fold(4, *names, away=5) == (names[:4], {"delft": 6, "others": 1}), "more need attention than are listed"
    assert fold(12, *names, away=12) == (names, {}), "all are away"


def make_row(name: str, is_connected: bool) -> ClusterRow:
    state = "usable" if is_connected else "unreachable"
    counts = NodeCounts(idle=4)
    return ClusterRow(name, "slurm", state, "", counts, 4, None, False, is_connected, "", None, 0)


def test_ended_jobs_are_sorted_by_their_ends(scene: ServedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(**query: Any) -> list[dict[str, Any]]:
        return list(scene.http.get("/queue.json", params={"q": "state:over"} | query).json()["jobs"])

    newest = rows(sort="-ended")
    ends = [row["ended_at"] for row in newest]
    assert ends == sorted(ends, reverse=True)
    assert [row["id"] for row in newest] != [row["id"] for row in rows()], "the order of ids is another one"
    assert [row["id"] for row in rows(sort="ended")] == [row["id"] for row in newest][::-1]
    first = scene.http.get("/queue.json?q=state:over&sort=-ended&limit=5").json()
    second = scene.http.get(first["table"]["next"].replace("/queue?", "/queue.json?")).json()["jobs"]
    assert [row["id"] for row in (*first["jobs"], *second)] == [row["id"] for row in newest[:10]]
    assert not {"id", "-id"} & set(first["table"]["sortable"]), "in the order of ids they are only the newest first"
    for name in ("FIRST_WINDOW", "WINDOW", "MAX_LOOKED_AT"):
        monkeypatch.setattr(f"koalapy.store.listing.{name}", 15)
    few = [row["id"] for row in newest if row["name"] == newest[-1]["name"]]
    named = f"state:over name:{newest[-1]['name']}* -name:x"
    assert [row["id"] for row in rows(q=named, sort="-ended")] == few, "it is searched on behind jobs that do not match"
    monkeypatch.setattr("koalapy.dashboard.pages.queue.MAX_SEARCHES", 1)
    view = scene.http.get("/queue.json", params={"q": named, "sort": "ended"}).json()
    assert view["problem"] == "too many ended jobs have to be examined to sort them by their ends"
    monkeypatch.setattr("koalapy.dashboard.pages.queue.MAX_SELECTED", 5)
    view = scene.http.get("/queue.json?q=state:over&sort=ended").json()
    assert (view["jobs"], view["problem"]) == ([], "too many ended jobs match to sort them by their ends")
    csv = scene.http.get("/queue.csv?q=state:over&sort=ended")
    assert (csv.status_code, "too many ended jobs match" in csv.text) == (422, True)


def test_charts_mark_starts_of_daemon(scene: ServedDaemon) -> None:
    charts = scene.http.get("/now.json").json()["charts"]
    marks = {text: at for at, text in charts["queue"]["marks"]}
    now = scene.engine.clock()
    after_gap = marks["nodes are counted again: the daemon or its database was away"]
    assert after_gap == pytest.approx(now - 200 * 60, abs=1200)
    assert now - 3600 < marks["the daemon started"] <= now
    for length, sampled, expected in ((60, (60, 120, 240, 420, 480), [420]), (600, (600, 1800, 2400), [1800])):
        slots = UseSums(length, range(0, 3000, length), {"": {start: UseSum(start, "", 1) for start in sampled}})
        assert starts_after_gaps(slots) == expected, "the first samples end no gap, neither does a single late one"
    assert starts_after_gaps(UseSums(60, (0, 60), {})) == []


def test_table_of_few_clusters_lists_all_of_them_also_without_agents(scene: ServedDaemon) -> None:
    view = scene.http.get("/clusters.json").json()
    assert (len(view["clusters"]), view["table"]["total"], view["folds"]) == (10, 10, [])
    assert "/clusters?sort=cluster" not in scene.http.get("/clusters").text.partition("<main")[2].partition("<table")[0]
    assert len(scene.http.get("/clusters.csv").text.splitlines()) == 11


def test_clusters_that_need_attention_are_listed_up_to_the_limit_of_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koalapy.dashboard.pages.overview.MAX_DETAILED", 50)
    with serve_scene(Scene(66, 0, away=6, troubles=False), tmp_path) as wide:
        clusters = wide.http.get("/api/v1/clusters").json()["clusters"]
        usable = [cluster["name"] for cluster in clusters if cluster["state"] == "usable"]
        for name in usable[:51]:
            assert wide.http.post(f"/api/v1/clusters/{name}/drain", json={"reason": "power"}).status_code == 200
        view = wide.http.get("/clusters.json").json()
        drained = {row["cluster"] for row in view["clusters"]}
        assert (len(drained), drained <= set(usable[:51]), view["table"]["total"]) == (50, True, 66)
        assert "drained" not in {row["state"] for fold in view["folds"][1:] for row in fold["clusters"]}
        page, overview = (" ".join(wide.http.get(path).text.split()) for path in ("/clusters", "/"))
        assert "50 of 66 clusters shown" in page
        assert '15 are folded below, and 1 more needs attention: <a href="/clusters?sort=cluster">' in page
        assert "6 clusters, 6 not usable, " in page
        assert (overview.count('<li class="tile drained'), "66 clusters" in overview) == (50, True)
        assert '1 more needs attention: <a href="/clusters?sort=cluster">' in overview


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


@dataclass
class FakeCluster:
    """A cluster with a use of its nodes."""

    name: str
    node_use: NodeUse


class Sampling:
    """Samples of two clusters, taken once a minute, with a database that outlives them."""

    def __init__(self, folder: Path, now: float) -> None:
        self.now, self.north, self.south = now, FakeCluster("north", NodeUse()), FakeCluster("south", NodeUse())
        self.database = Database(open_database(folder / "koala.db"))
        self.store = SampleStore(self.database)
        self.start()

    def start(self) -> None:
        """Start anew, as after a restart of the daemon."""
        grid = SimpleNamespace(clusters=lambda: [self.north, self.south])
        engine: Any = SimpleNamespace(queries=SimpleNamespace(grid=grid), stored_queued=3, subscribe=lambda _: None)
        self.samples = Samples(engine, self.store, lambda: self.now)

    async def take(self, minutes: int, north: NodeUse, south: NodeUse) -> None:
        self.north.node_use, self.south.node_use = north, south
        for _ in range(minutes):
            await self.samples.take()
            self.now += 60.0

    async def read(self, seconds: float, *clusters: str) -> UseSums:
        return await self.samples.read(self.now - seconds, self.now, clusters)


HOUR = 3600 * 500_000


async def test_sums_of_hour_with_restart_and_unknown_cluster_are_means_of_samples(tmp_path: Path) -> None:
    sampling = Sampling(tmp_path, float(HOUR))
    await sampling.take(30, NodeUse(idle=2, used=6), NodeUse(local=4))
    sampling.start()
    await sampling.take(15, NodeUse(idle=8), NodeUse(unknown=4))
    sums = await sampling.read(3600.0, "", "north", "south")
    assert (sums.length, sums.starts[-1]) == (600, HOUR + 2400)
    assert sums.means("ours", "north")[-5:] == [6.0, 6.0, 6.0, 0.0, 0.0]
    assert sums.means("unknown", "south")[-5:] == [0.0, 0.0, 0.0, 4.0, 4.0]
    day = await sampling.read(31 * DAY - 3600, "north", "")
    (hour,) = day.by_cluster["north"].values()
    assert (hour.samples, hour.ours, hour.idle) == (45, 180, 180)
    assert {one.queued for one in day.by_cluster[""].values()} == {135}


async def test_sums_after_clock_jumps_back_are_still_means(tmp_path: Path) -> None:
    sampling = Sampling(tmp_path, float(HOUR))
    await sampling.take(60, NodeUse(used=8), NodeUse())
    sampling.now = float(HOUR)
    await sampling.take(60, NodeUse(idle=8), NodeUse())
    sums = await sampling.read(3600.0, "north")
    assert set(sums.means("ours", "north")) == {4.0}
    assert "south" not in sums.by_cluster, "a cluster that never reported"


async def test_sums_are_kept_a_month_and_bounded(tmp_path: Path) -> None:
    sampling = Sampling(tmp_path, float(HOUR))
    for _ in range(33 * 24):
        await sampling.take(1, NodeUse(used=1), NodeUse(local=1))
        sampling.now += 3540.0
    with sampling.database.reading() as connection:
        counts = dict(connection.execute(select(use_sums.c.length, func.count()).group_by(use_sums.c.length)).all())
    assert counts == {60: 25, 600: 3 * 49, 3600: 3 * (31 * 24 + 1)}
    month = await sampling.read(30 * DAY, "north")
    assert None not in month.means("ours", "north")[1:-1]
    assert len(month.starts) <= MAX_SLOTS + 1


def test_chart_of_uses_has_marks_and_no_uses_without_nodes() -> None:
    sums = UseSums(60, [0, 60], {"north": {60: UseSum(60, "north", 2, ours=3, local=4)}})
    chart = use_chart("Nodes", sums, "north", [(30.0, "drained by <ada>")])
    assert {curve.name: curve.values for curve in chart.curves} == {
        "jobs": [None, 1.5],
        "local users": [None, 2.0],
        "idle": [None, 0.0],
    }
    assert json.loads(render_chart(chart))["marks"] == [[30.0, "drained by <ada>"]]
    assert "<" not in render_chart(chart)


def test_time_range_is_parsed_from_address() -> None:
    now = 1_795_996_800.0
    assert (parse_range("", "", now).name, parse_range("7d", "now", now).name) == ("6h", "7d")
    chosen = parse_range("2026-11-28", "2026-11-29T12:00", now)
    assert (chosen.name, chosen.seconds) == ("", 1.5 * DAY)
    for since, until in (("2026-11-29", "2026-11-28"), ("now", ""), ("x", ""), ("1h", "2h"), ("30s", "")):
        with pytest.raises(UsageError):
            parse_range(since, until, now)
    assert parse_range("0001-01-01T00:00+14:00", "", now).start == 0.0


def test_pages_with_time_have_the_same_ranges(scene: ServedDaemon) -> None:
    for path in ("/", "/timeline", "/history", "/clusters/delft-1"):
        page = scene.http.get(path, headers={"Accept": "text/html"}).text
        links = re.findall(r'since=(\w+)["&]', page[page.index('aria-label="Time"') :])
        assert links[:5] == ["1h", "6h", "24h", "7d", "30d"], path
        for query in ("since=7d", "since=2026-01-01&until=2026-01-02T03:04:05Z"):
            assert scene.http.get(f"{path}?{query}").status_code == 200
        assert scene.http.get(f"{path}?since=yesteryear").status_code == 422


def test_forecast_counts_no_nodes_of_clusters_that_take_no_jobs(scene: ServedDaemon) -> None:
    busiest = Counter[str]()
    for each in scene.http.get("/forecast.json").json()["coming"]:
        busiest.update(each["end"]["nodes"])
    (drained, _), *_ = busiest.most_common(1)
    assert scene.http.post(f"/api/v1/clusters/{drained}/drain", json={"reason": "disks"}).status_code == 200
    view = scene.http.get("/forecast.json").json()
    assert scene.http.post(f"/api/v1/clusters/{drained}/resume").status_code == 200
    idle = sum(row["nodes"]["idle"] for row in scene.http.get("/clusters.json").json()["clusters"] if row["connected"])
    assert view["coming"]
    assert view["coming"][0]["idle"] - view["coming"][0]["nodes"] <= idle
    for each in view["coming"]:
        assert each["nodes"] == sum(nodes for name, nodes in each["end"]["nodes"].items() if name != drained) > 0
    for before, after in pairwise(view["coming"]):
        assert after["idle"] == before["idle"] + after["nodes"]


def test_history_of_two_names_has_figures_and_csv_of_each(scene: ServedDaemon) -> None:
    page = scene.http.get("/history?name=delft-1&name=leiden-1", headers={"Accept": "text/html"}).text
    assert re.findall('<ul class="numbers" aria-label="([^"]*)"', page) == ["delft-1", "leiden-1"]
    view = scene.http.get("/history.json?name=delft-1&name=leiden-1&step=all").json()
    assert [line["name"] for line in view["totals"]] == ["delft-1", "leiden-1"]
    assert sorted(view["totals"], key=str) == sorted(view["table"]["lines"], key=str)
    links = [unescape(link) for link in re.findall('href="([^"]*format=csv[^"]*)"', page)]
    assert [re.findall("name=([^&]*)", link) for link in links] == [["delft-1"], ["leiden-1"]]
    assert [scene.http.get(link).status_code for link in links] == [200, 200]


def test_overview_without_database_has_empty_charts(scene: ServedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StoreUnavailable("the database does not answer: it is locked")

    monkeypatch.setattr(SampleStore, "read", refuse)
    monkeypatch.setattr(HistoryStore, "count_outcomes", refuse)
    view = scene.http.get("/now.json?since=5h").json()
    assert view["tiles"]
    assert view["outcomes"]["ended"] == 0


def test_timeline_has_bars_in_an_hour_and_sums_beyond(scene: ServedDaemon) -> None:
    hour, week = (scene.http.get(f"/timeline.json?since={since}").json() for since in ("1h", "7d"))
    assert any(lane["bars"] for lane in hour["timeline"]["lanes"])
    assert not any(lane["bars"] for lane in week["timeline"]["lanes"])
    assert {lane["label"] for lane in week["timeline"]["lanes"]}.isdisjoint(week["idle"])
    assert all(lane["uses"] for lane in week["timeline"]["lanes"])
    one = scene.http.get("/timeline.json?since=7d&cluster=delft").json()
    assert [lane["label"] for lane in one["timeline"]["lanes"]] == ["delft-1"]
    assert scene.http.get("/timeline.json?cluster=atlantis").status_code == 404


def test_timeline_of_past_time_has_only_its_jobs(scene: ServedDaemon) -> None:
    view = scene.http.get("/timeline.json?since=3h&until=130m").json()
    bars = [bar for lane in view["timeline"]["lanes"] for bar in lane["bars"]]
    assert bars
    assert max(bar["phases"][0]["start"] for bar in bars) < view["range"]["end"]


def test_timeline_says_how_many_lanes_are_missing(scene: ServedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    used = scene.http.get("/timeline.json?since=7d").json()["timeline"]["lanes"]
    monkeypatch.setattr("koalapy.dashboard.pages.timeline.MAX_LANES", 1)
    view = scene.http.get("/timeline.json?since=7d").json()
    assert (view["timeline"]["lanes"][0]["page"], view["more"]) == (
        "/timeline?cluster=amsterdam&since=7d",
        len(used) - 1,
    )
    page = scene.http.get("/timeline?since=7d", headers={"Accept": "text/html"}).text
    assert f"{len(used) - 1} more lanes are not shown" in page


def test_errors_of_others_are_hidden_from_users() -> None:
    part = PastComponent(7, 1, "north", 2, 10.0, 14.0, 15.0, 40.0, "/home/ada: no space", is_shared=True, owner="ada")
    for caller in (Identity("ada", Role.USER, "test"), Identity("bob", Role.OPERATOR, "test")):
        assert hide_details(part, caller) == part
    hidden = hide_details(part, Identity("bob", Role.USER, "test"))
    assert (hidden.owner, hidden.error) == ("", "ended early")
    assert hide_details(replace(part, error=""), Identity("bob", Role.USER, "test")).error == ""


def test_history_has_one_chart_of_nodes_used(scene: ServedDaemon) -> None:
    for by in ("grid", "cluster", "user", "policy"):
        for since in ("2h", "30d", "90d"):
            charts = scene.http.get(f"/history.json?by={by}&since={since}").json()["charts"]
            assert [chart["title"] for chart in charts].count("Nodes used") == 1, (by, since)


def test_history_until_midnight_ends_the_day_before(scene: ServedDaemon) -> None:
    table = scene.http.get("/history.json?since=yesterday&until=today").json()["table"]
    assert table["first"] == table["last"]


def test_timeline_draws_uses_with_gaps() -> None:
    uses = [
        UseSum(start, "", 1, ours=1, local=local, idle=4 - 1 - local) for start, local in ((0, 1), (600, 2), (1800, 3))
    ]
    lane = TimelineLane("<north>", 4, [], uses=uses)
    picture = draw_timeline(Timeline(300.0, 2600.0, 2400.0, [lane], slot_s=600, with_bars=False))
    assert '<path class="local" d="M0 0V25H10V50H20V0ZM30 0V75H40V0Z"/>' in picture
    assert '<path class="ours" d="M0 100V75H10V75H20V100ZM30 100V75H40V100Z"/>' in picture
    assert 'viewBox="5.00 0 35.00 100"' in picture, "the picture begins within the first slot"
    assert "&lt;north&gt;, mean: jobs 25 %, local users 50 %, idle 25 %" in picture
    assert 'class="ours"' not in draw_timeline(Timeline(300.0, 2600.0, 2400.0, [lane], slot_s=600))


def test_many_clusters_are_joined_to_sites() -> None:
    lanes = [
        TimelineLane(name, 4, [], uses=[UseSum(0, name, 2, ours=2, idle=6)]) for name in ("delft-1", "delft-2", "hague")
    ]
    sites = join_sites(lanes, since="1h", until="")
    assert [(lane.label, lane.nodes, lane.uses[0].ours, lane.page) for lane in sites] == [
        ("delft", 8, 4, "/timeline?cluster=delft&since=1h"),
        ("hague", 4, 2, "/timeline?cluster=hague&since=1h"),
    ]


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


def test_drains_are_marked_on_timeline() -> None:
    drains = [Drain(100.0, "ada", "disks"), Drain(0.0, "ada", "switch", begins_at=900.0, ends_at=950.0)]
    bars = [TimelineBar(7, 2, [Phase("running", 10.0, 50.0)])]
    picture = draw_timeline(Timeline(0.0, 200.0, 150.0, [TimelineLane("north", 4, bars, drains=drains)]))
    assert re.findall(
        r'aria-label="([^"]*)"><rect class="drain" x="([0-9.]+)%" y="22" width="([0-9.]+)%"', picture
    ) == [("north is drained by ada: disks", "50.0", "50.00")]
