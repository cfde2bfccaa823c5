"""The page History, in a browser: what is drawn, the same as tables, and what is asked for by its form."""

from dataclasses import asdict

import httpx2
import pytest
from sqlalchemy import insert

from koalapy.daemon.jobs.history import History
from koalapy.dashboard.pages.history import MAX_CURVES, pictures_of
from koalapy.model.history import DAY, Figures, Kind, Step
from koalapy.model.identity import Role
from koalapy.store.tables import days
from tests.dashboard.conftest import Visit
from tests.grid.embedded import EmbeddedGrid
from tests.memory_stores import memory_stores


async def test_those_that_had_the_most_nodes_are_drawn() -> None:
    stores = memory_stores()
    figures = [
        (100, f"user{number}", Figures(jobs=1, ran=1, node_seconds=10.0 + number)) for number in range(MAX_CURVES + 2)
    ]
    figures.append((102, "user9", Figures(jobs=1, failed=1)))
    with stores.jobs.database.writing() as connection:
        rows = [{"kind": Kind.USER, "day": day, "name": name, **asdict(of)} for day, name, of in figures]
        connection.execute(insert(days), rows)
    history = History(stores.history, lambda: 103 * DAY, list)
    lines = (await history.read_table(Kind.USER, Step.DAY, history.make_span(None, None))).lines
    pictures, more = pictures_of(lines)
    assert more == 2
    jobs = next(picture for picture in pictures if picture.figure == "jobs")
    assert [curve.name for curve in jobs.curves] == [f"user{number}" for number in range(2, 10)]
    assert jobs.at == [100 * 86400, 102 * 86400]
    assert [curve.values for curve in jobs.curves][-2:] == [[1, None], [1, 1]]
    assert {picture.unit for picture in pictures} == {"share", "seconds", "count"}


@pytest.fixture(scope="module")
def past(grid: EmbeddedGrid) -> EmbeddedGrid:
    """Two jobs of alice's and one of bob's that ended, one of them on both clusters."""
    for owner, nodes in (("alice", 2), ("alice", 6), ("bob", 1)):
        job = grid.submit({"type": "flexible", "total_size": nodes}, "true", launcher="processes", owner=owner)
        assert grid.wait_for_end(job)["state"] == "succeeded"
    return grid


def test_figures_are_drawn_and_stand_in_tables(visit: Visit, past: EmbeddedGrid) -> None:
    visitor = visit()
    page = visitor.open("/history")
    page.locator("#utilisation canvas").wait_for()
    assert page.locator(".plot canvas").count() == page.locator("[data-picture]").count() == 7
    assert page.locator("#jobs .u-legend .u-label").all_inner_texts()[1:] == ["north", "south"]
    page.locator("#jobs summary").click()
    assert page.locator("#jobs thead th").all_inner_texts() == ["From", "north", "south"]
    page.locator("select[name=by]").select_option("user")
    page.get_by_role("button", name="Show").click()
    page.locator("#jobs canvas").wait_for()
    assert "by=user" in page.url
    told = page.get_by_role("group", name="All figures").locator("tbody tr")
    assert [row.locator("td").nth(1).inner_text() for row in told.all()] == ["bob", "alice"]
    assert visitor.complaints == []


def test_a_page_that_is_made_anew_keeps_its_pictures(visit: Visit, past: EmbeddedGrid) -> None:
    page = visit().open("/history")
    page.locator("#jobs canvas").wait_for()
    page.evaluate("htmx.ajax('GET', '/history', {target: '#main', swap: 'innerMorph'})")
    page.locator(".plot canvas").nth(6).wait_for()
    assert page.locator(".plot canvas").count() == 7


def test_without_javascript_all_of_it_reads(visit: Visit, past: EmbeddedGrid) -> None:
    page = visit(token="", java_script_enabled=False)
    page.log_in(past.admin_token, where="/history")
    text = page.page.locator("main").inner_text()
    assert "north" in text
    assert "jobs ended" in text


def test_its_twin_tells_the_same(past: EmbeddedGrid) -> None:
    found = past.http.get("/history.json", params={"by": "user", "step": "all"}).raise_for_status().json()
    assert {line["name"]: line["jobs"] for line in found["lines"]} == {"alice": 2, "bob": 1}
    api = past.http.get("/api/v1/history", params={"by": "user", "step": "all"}).raise_for_status().json()
    assert [line["queue_time"] for line in api["lines"]] == [line["queue_time"] for line in reversed(found["lines"])]
    assert found["total"]["coallocated"] == pytest.approx(1 / 3, abs=1e-4)


def test_users_see_no_others(past: EmbeddedGrid) -> None:
    made = past.http.post("/api/v1/tokens", json={"user": "bob", "role": str(Role.USER)}).json()
    with httpx2.Client(base_url=past.url, headers={"Authorization": f"Bearer {made['token']}"}, timeout=60.0) as bob:
        page = bob.get("/history", params={"by": "user"}, headers={"Accept": "text/html"})
        assert page.status_code == 200
        assert "bob" in page.text
        assert "alice" not in page.text
        assert bob.get("/history", params={"by": "user", "name": "alice"}).status_code == 403
