"""The overview of grids of several sizes: groups of alerts, charts, order of tiles, acknowledgements."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from koalapy.dashboard.charts import Slot, describe_range, line_chart, make_slots, stacked_chart
from koalapy.model.history import Sample
from tests.daemon_in_process import ServedDaemon
from tests.dashboard.people import Person, create_token
from tests.dashboard.scenes import SCENES, Scene, serve_scene


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedDaemon]:
    """A grid of ten clusters of which six are away."""
    SCENES["test"] = Scene(10, 60, away=6)
    with serve_scene("test", tmp_path_factory.mktemp("scene")) as daemon:
        yield daemon
    del SCENES["test"]


def test_alerts_with_one_cause_are_one_group(scene: ServedDaemon) -> None:
    view = scene.http.get("/now.json").json()
    (group,) = [group for group in view["groups"] if group["kind"] == "agent-away"]
    assert group["summary"] == "6 clusters are unreachable: their agents are not connected"
    assert len(group["alerts"]) == 6
    assert "koala-agent@NAME" in group["remedy"]
    assert group["since"] == min(row["alert"]["since"] for row in group["alerts"])


def test_tiles_are_sorted_by_problem_load_or_name(scene: ServedDaemon) -> None:
    def names(order: str) -> list[str]:
        return [tile["cluster"] for tile in scene.http.get(f"/now.json?sort={order}").json()["tiles"]]

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
    assert "agent-away" not in {group["kind"] for group in view["groups"]}
    assert scene.http.post("/api/v1/alerts/unmark", json={"kind": "agent-away"}).status_code == 200
    assert scene.http.get("/now.json").json()["silenced"] == []
    assert scene.http.post("/api/v1/alerts/unmark", json={"kind": "database"}).status_code == 404
    for wrong in ({"duration": 0}, {"duration": 1e9}, {"targets": ["a\0"]}, {"kind": "x"}, {"reason": "a\nb"}):
        assert scene.http.post("/api/v1/alerts/mark", json=order | wrong).status_code == 422
    entries = scene.http.get("/api/v1/audit").json()["entries"]
    assert {("olga", "mark_alert"), ("ada", "unmark_alert")} <= {(e["actor"], e["action"]) for e in entries}


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
    assert [(slot.ours, slot.startup) for slot in slots] == [(4.0, 2.0), (None, None), (4.0, 4.0), (None, None)]
    assert line_chart(slots, ("queued",), "queue").count("<polyline") == 2
    assert stacked_chart(slots, ("ours", "local"), "<nodes>").count("<polygon") == 4
    assert "&lt;nodes&gt;" in stacked_chart(slots, ("ours",), "<nodes>")
    assert describe_range(slots, "queued", "{:.0f}".format) == "0 to 10"
    assert not line_chart([Slot(0.0)], ("queued",), "queue")
    assert not stacked_chart([], ("ours",), "nodes")
