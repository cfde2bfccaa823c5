"""The page History: pictures, tables and form."""

import re
from dataclasses import asdict

import httpx2
import pytest
from sqlalchemy import insert

from koalapy.daemon.jobs.history import History
from koalapy.dashboard.charts import Chart, Curve
from koalapy.dashboard.pages.history import MAX_CURVES, charts_by_day, is_complete, largest_names
from koalapy.model.history import DAY, Figures, Kind, Step
from koalapy.model.identity import Role
from koalapy.store.tables import days
from tests.dashboard.conftest import Visit
from tests.grid.embedded import EmbeddedGrid
from tests.memory_stores import memory_stores


async def test_pictures_show_users_with_most_nodes() -> None:
    stores = memory_stores()
    figures = [
        (100, f"user{number}", Figures(jobs=1, ran=1, node_seconds=10.0 + number)) for number in range(MAX_CURVES + 2)
    ]
    figures.append((102, "user9", Figures(jobs=1, failed=1)))
    with stores.jobs.database.writing() as connection:
        rows = [
            {"kind": Kind.USER, "day": day, "name": name, **asdict(day_figures)} for day, name, day_figures in figures
        ]
        connection.execute(insert(days), rows)
    history = History(stores.history, lambda: 103 * DAY, list)
    lines = (await history.read_table(Kind.USER, Step.DAY, history.make_span(None, None))).lines
    names = largest_names(lines)[:MAX_CURVES]
    assert len(largest_names(lines)) == MAX_CURVES + 2
    charts = charts_by_day(lines, names)
    jobs = next(chart for chart in charts if chart.title == "Jobs that ended")
    assert [curve.name for curve in jobs.curves] == [f"user{number}" for number in range(2, 10)]
    assert jobs.at == [100 * 86400, 102 * 86400]
    assert [curve.values for curve in jobs.curves][-2:] == [[1, None], [1, 1]]
    assert {chart.unit for chart in charts} == {"share", "seconds", "count"}
    for first, expected in ((0, True), (12, True), (36, False), (48, False)):
        values = [0.5 if hour >= first else None for hour in range(48)]
        hourly = Chart("Nodes used", [100 * DAY + hour * 3600 for hour in range(48)], 3600, [Curve("x", values)])
        assert is_complete(hourly, lines) is expected, first


@pytest.fixture(scope="module")
def grid(new_grid: EmbeddedGrid) -> EmbeddedGrid:
    return new_grid


@pytest.fixture(scope="module")
def grid_with_ended_jobs(grid: EmbeddedGrid) -> EmbeddedGrid:
    """A grid with ended jobs: two of alice, one of them on both clusters, and one of bob."""
    for owner, nodes in (("alice", 2), ("alice", 6), ("bob", 1)):
        job = grid.submit({"type": "flexible", "total_size": nodes}, "true", launcher="processes", owner=owner)
        assert grid.wait_for_end(job)["state"] == "succeeded"
    return grid


def test_history_page_shows_pictures_and_tables(visit: Visit, grid_with_ended_jobs: EmbeddedGrid) -> None:
    visitor = visit()
    page = visitor.open("/history")
    page.locator("#queue-time canvas").wait_for()
    assert page.locator(".plot canvas").count() == page.locator("[data-chart]").count() >= 6
    assert page.locator("#jobs-that-ended .u-legend .u-label").all_inner_texts()[1:] == ["north", "south"]
    page.locator("#jobs-that-ended summary").click()
    assert page.locator("#jobs-that-ended thead th").all_inner_texts() == ["From", "north", "south"]
    page.locator("select[name=by]").select_option("user")
    page.get_by_role("button", name="Show").click()
    page.locator("#jobs-that-ended canvas").wait_for()
    assert "by=user" in page.url
    rows = page.get_by_role("group", name="All figures").locator("tbody tr")
    assert {row.locator("td").nth(1).inner_text() for row in rows.all()} == {"alice", "bob"}
    assert visitor.complaints == []


def test_history_page_after_update_keeps_pictures(visit: Visit, grid_with_ended_jobs: EmbeddedGrid) -> None:
    page = visit().open("/history")
    page.locator("#jobs-that-ended canvas").wait_for()
    page.evaluate("htmx.ajax('GET', '/history', {target: '#main', swap: 'innerMorph', select: '#main > *'})")
    page.locator(".plot canvas").nth(5).wait_for()
    assert page.locator(".plot canvas").count() == page.locator("[data-chart]").count()


def test_history_page_without_scripts_is_readable(visit: Visit, grid_with_ended_jobs: EmbeddedGrid) -> None:
    page = visit(token="", java_script_enabled=False)
    page.log_in(grid_with_ended_jobs.admin_token, path="/history")
    text = page.page.locator("main").inner_text()
    assert "north" in text
    assert "jobs ended" in text


def test_history_json_equals_api(grid_with_ended_jobs: EmbeddedGrid) -> None:
    history = (
        grid_with_ended_jobs.http.get("/history.json", params={"by": "user", "step": "all"}).raise_for_status().json()
    )
    assert {line["name"]: line["jobs"] for line in history["table"]["lines"]} == {"alice": 2, "bob": 1}
    api = grid_with_ended_jobs.http.get("/api/v1/usage", params={"by": "user", "step": "all"}).raise_for_status().json()
    assert [line["queue_time"] for line in api["lines"]] == [
        line["queue_time"] for line in reversed(history["table"]["lines"])
    ]
    (total,) = history["totals"]
    assert total["coallocated"] == pytest.approx(1 / 3, abs=1e-4)


def test_history_page_of_user_hides_others(grid_with_ended_jobs: EmbeddedGrid) -> None:
    response = grid_with_ended_jobs.http.post("/api/v1/tokens", json={"user": "bob", "role": str(Role.USER)}).json()
    with httpx2.Client(
        base_url=grid_with_ended_jobs.url, headers={"Authorization": f"Bearer {response['token']}"}, timeout=60.0
    ) as bob:
        page = bob.get("/history", params={"by": "user"}, headers={"Accept": "text/html"})
        assert page.status_code == 200
        assert "bob" in page.text
        assert "alice" not in page.text
        assert bob.get("/history", params={"by": "user", "name": "alice"}).status_code == 403


def test_history_page_compares_two_users_by_the_hour(grid_with_ended_jobs: EmbeddedGrid) -> None:
    query = {"by": "user", "since": "2h", "name": ["alice", "bob"]}
    view = grid_with_ended_jobs.http.get("/history.json", params=query).raise_for_status().json()
    used = view["charts"][0]
    assert (used["title"], used["length"], len(used["at"])) == ("Nodes used", 3600.0, 2)
    assert [curve["name"] for curve in used["curves"]] == ["alice", "bob"]
    assert all(sum(curve["values"]) > 0 for curve in used["curves"])
    assert {line["name"] for line in view["table"]["lines"]} == {"alice", "bob"}


def test_drag_over_chart_or_timeline_shows_selected_time(visit: Visit, grid_with_ended_jobs: EmbeddedGrid) -> None:
    visitor = visit()
    for path, drawn in (("/history?by=user&since=7d", "#nodes-used .u-over"), ("/timeline", "svg.timeline")):
        page = visitor.open(path)
        box = page.locator(drawn).bounding_box()
        assert box is not None
        x, y = box["x"], box["y"] + box["height"] / 2
        page.mouse.move(x + 0.4 * box["width"], y)
        page.mouse.down()
        page.mouse.move(x + 0.6 * box["width"], y, steps=5)
        page.mouse.up()
        page.wait_for_url(re.compile(r"since=20\d\d-.*until=20\d\d-"))
        assert page.locator("nav[aria-label=Time] details[open]").count() == 1
    assert visitor.complaints == []
