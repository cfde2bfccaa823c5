"""The overview and the pages of clusters, with actions of operators."""

import re
from contextlib import closing

import httpx2
import pytest

from tests.daemon_in_process import ServedDaemon
from tests.dashboard.conftest import Visit
from tests.dashboard.people import Person, create_token
from tests.grid.embedded import EmbeddedGrid


@pytest.fixture(scope="module")
def user_token(grid: EmbeddedGrid) -> str:
    """The token of a user."""
    return create_token(grid, "alice")


@pytest.fixture(scope="module")
def operator_token(grid: EmbeddedGrid) -> str:
    """The token of an operator."""
    return create_token(grid, "olga", "operator")


def test_overview_shows_nodes_and_oldest_job(visit: Visit, grid: EmbeddedGrid) -> None:
    page = visit().open("/")
    gate = grid.make_gate()
    first = grid.submit({"type": "fixed", "components": [{"size": 3, "cluster": "north"}]}, *gate.hold)
    grid.wait_for_state(first, "running")
    waiting_job = grid.submit({"type": "fixed", "components": [{"size": 4, "cluster": "north"}]}, "true")
    page.get_by_text(f"job {waiting_job}").wait_for()
    north = page.locator("#cluster-north a[title*='3 running, 1 idle of 4']")
    north.wait_for()
    assert "1 idle of 4" in north.inner_text()
    assert north.locator("svg rect.running").get_attribute("width") == "75.0"
    assert grid.get_job(waiting_job)["reason"] in page.locator(".oldest").inner_text()
    assert "stale" not in page.locator("main").inner_text()
    gate.open()
    page.get_by_text(f"job {waiting_job}").wait_for(state="detached")
    grid.wait_for_end(waiting_job)


def test_cluster_page_drains_and_resumes_cluster(visit: Visit, grid: EmbeddedGrid, operator_token: str) -> None:
    page = visit(operator_token).open("/clusters/south")
    page.get_by_label("Reason to drain south").fill("new <b>switch</b>")
    page.get_by_role("button", name="Drain south").click()
    page.get_by_text("by olga: new <b>switch</b>").first.wait_for()
    assert grid.get_cluster("south")["drained"]["reason"] == "new <b>switch</b>"
    page.get_by_role("button", name="Resume south").click()
    page.get_by_role("button", name="Drain south").wait_for()
    assert grid.get_cluster("south")["state"] == "usable"


def test_cluster_page_update_keeps_typed_text(visit: Visit, grid: EmbeddedGrid) -> None:
    page = visit().open("/clusters/south")
    field = page.get_by_label("Reason to drain south")
    field.fill("half a sen")
    field.blur()
    gate = grid.make_gate()
    grid.submit({"type": "fixed", "components": [{"size": 1, "cluster": "south"}]}, *gate.hold)
    page.locator("section[aria-label=Nodes] svg.use-bar rect.running[width='25.0']").wait_for(state="attached")
    assert field.input_value() == "half a sen"
    gate.open()


def test_cluster_page_without_scripts_drains_cluster(visit: Visit, grid: EmbeddedGrid, operator_token: str) -> None:
    visitor = visit(operator_token, java_script_enabled=False)
    page = visitor.open("/clusters/south", live=False)
    page.get_by_label("Reason to drain south").fill("by hand")
    page.get_by_role("button", name="Drain south").click()
    page.get_by_text("by olga: by hand").first.wait_for()
    page.get_by_role("button", name="Resume south").click()
    page.get_by_role("button", name="Drain south").wait_for()
    visitor.open("/", live=False).locator("#cluster-south").get_by_text("idle of 4").wait_for()


def test_cluster_pages_of_user_hide_actions_and_reasons(
    grid: EmbeddedGrid, user_token: str, operator_token: str
) -> None:
    gate = grid.make_gate()
    running_job = grid.submit({"type": "fixed", "components": [{"size": 4, "cluster": "north"}]}, *gate.hold)
    grid.wait_for_state(running_job, "running")
    waiting_job = grid.submit({"type": "fixed", "components": [{"size": 4, "cluster": "north"}]}, "true")
    with httpx2.Client(base_url=grid.url, headers={"Accept": "text/html"}, timeout=60.0) as client:
        for token, is_operator in ((operator_token, True), (user_token, False)):
            headers = {"Authorization": f"Bearer {token}"}
            now = client.get("/now.json", headers=headers).json()
            assert now["oldest"]["id"] == waiting_job
            assert bool(now["oldest"]["reason"]) is is_operator
            nodes = client.get("/clusters/north/nodes.json?sort=node", headers=headers).json()["nodes"]
            assert [(node["name"].startswith("127."), node["state"], node["job"]) for node in nodes] == [
                (is_operator, "running", running_job)
            ] * 4
            listed = client.get("/api/v1/clusters/north/nodes", headers=headers).json()
            assert sorted(node["name"] for node in listed["nodes"]) == sorted(node["name"] for node in nodes)
            assert bool(listed["known_at"]) is bool(listed["nodes"][0]["owner"]) is is_operator
            for path in ("/", "/clusters", "/clusters/north"):
                page = client.get(path, headers=headers)
                assert page.status_code == 200
                assert is_operator or "127.0." not in page.text, "names of other users' nodes are not shown"
                actions = page.text.count('action="/clusters/')
                assert actions == (1 if is_operator and path == "/clusters/north" else 0)
    gate.open()
    grid.wait_for_end(waiting_job)


@pytest.mark.parametrize("action", ["drain", "resume", "clear"])
def test_cluster_action_of_user_is_rejected(daemon: ServedDaemon, action: str) -> None:
    alice = Person(daemon, create_token(daemon, "alice"))
    csrf = re.search(r'name="csrf" value="(\w+)"', alice.get_page("/clusters/north"))
    assert csrf is not None
    sent = {"csrf": csrf[1], "reason": "x"}
    answer = alice.http.post(f"/clusters/north/{action}", data=sent, headers=alice.origin)
    assert answer.status_code == 403
    assert "this needs the role operator" in answer.text
    assert daemon.http.get("/api/v1/clusters/north").json()["drained"] is None
    alice.close()


def test_drain_is_planned_and_withdrawn_by_forms(daemon: ServedDaemon) -> None:
    with closing(Person(daemon, create_token(daemon, "olga", "operator"))) as olga:
        times = {"begin": "now+20h", "end": "now+24h"}
        path = "/clusters/north"
        refused = olga.send_form(path, f"{path}/drain", reason="new disks", **times | {"end": "now"})
        assert (refused.status_code, "end is" in refused.text) == (422, True)
        assert olga.send_form(path, f"{path}/drain", reason="new disks", **times).status_code == 303
        assert re.search(r"To be drained from .*\sto .* by olga: new disks", olga.get_page(path), re.DOTALL)
        assert olga.send_form(path, f"{path}/drain", reason="air", begin="now+50h").status_code == 303
        begins = re.findall(r'name="begin" value="([^"]+)"', olga.get_page(path))
        assert olga.send_form(path, f"{path}/resume", begin=begins[0]).status_code == 303
        page = olga.get_page(path)
        assert ("by olga: new disks" in page, "by olga: air" in page) == (False, True)
        assert olga.send_form(path, f"{path}/resume", planned="true").status_code == 303
        assert "To be drained" not in olga.get_page(path)
        sent = {"cluster": "south", "reason": "new switch", **times}
        assert olga.send_form("/maintenance", "/maintenance", **sent).status_code == 303
        (row,) = olga.get_json("/maintenance.json")["drains"]
        assert (row["cluster"], row["is_planned"], row["drain"]["reason"]) == ("south", True, "new switch")
        entries = daemon.http.get("/api/v1/audit", params={"user": "olga", "action": "drain_cluster"}).json()["entries"]
        assert {entry["target"] for entry in entries} == {"cluster north", "cluster south"}
        assert olga.send_form("/maintenance", "/clusters/south/resume").status_code == 303
        assert olga.get_json("/maintenance.json")["drains"] == []


def test_page_shows_changes_without_reload(visit: Visit, grid: EmbeddedGrid) -> None:
    page = visit().open("/")
    page.evaluate("window.loaded = 'once'")
    grid.http.post("/api/v1/clusters/north/drain", json={"reason": "new disks"}).raise_for_status()
    tile = page.locator("li.tile.drained", has_text="north")
    tile.wait_for()
    assert "new disks" in (tile.locator("a").get_attribute("title") or "")
    grid.http.post("/api/v1/clusters/north/resume", json={}).raise_for_status()
    tile.wait_for(state="detached")
    assert page.evaluate("window.loaded") == "once"


def test_overview_says_when_job_of_given_size_would_start(visit: Visit, grid: EmbeddedGrid) -> None:
    page = visit().open("/")
    page.get_by_label("A job of").fill("3")
    page.get_by_role("button", name="would start").click()
    page.locator(".starts output").get_by_text("now", exact=True).wait_for()


def test_overview_shows_silent_cluster_first_and_stale(visit: Visit, grid: EmbeddedGrid) -> None:
    page = visit().open("/")
    resume = grid.suspend_agent("south")
    page.locator("#cluster-south").get_by_text("unreachable").wait_for()
    assert page.locator("li.tile").first.get_attribute("id") == "cluster-south"
    assert "stale" not in page.locator("#cluster-north").inner_text()
    trouble = page.locator("#alert-agent-away-cluster-south")
    trouble.wait_for()
    assert trouble.locator(".severity").inner_text().lower() == "critical"
    assert "agent south --embedded" in trouble.locator(".remedy").inner_text()
    assert trouble.get_by_role("button", name="Drain").count() == 0, "a silent cluster needs no draining"
    resume()
    page.locator("#cluster-south").get_by_text("idle of 4").wait_for()
    trouble.wait_for(state="detached")
