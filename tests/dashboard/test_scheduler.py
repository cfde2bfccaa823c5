"""The page Scheduler: timings, decisions and rules."""

import re
from typing import Any

import httpx2
import pytest

from koalapy.daemon.observability.timings import BUCKETS, MAX_RECENT, RECENT_SPAN, Timings
from koalapy.dashboard.pages.scheduler import parameters_of, spans_of
from koalapy.model.placement import RefusalKind
from koalapy.scheduler.rules import Rules
from tests.daemon_in_process import ServedDaemon
from tests.dashboard.conftest import Visit
from tests.grid.embedded import EmbeddedGrid

# Without a browser


def test_spans_count_each_duration_once() -> None:
    timings = Timings()
    for duration in (0.0005, 0.001, 0.0011, 0.3, 100.0):
        timings.note(duration)
    spans = spans_of(timings)
    assert [(index, count) for index, (_, count) in enumerate(spans) if count] == [(0, 2), (1, 1), (8, 1), (13, 1)]
    assert len(spans) == len(BUCKETS) + 1
    assert sum(count for _, count in spans) == timings.count


def test_timings_recent_forgets_old_entries() -> None:
    now = 1000.0
    timings = Timings(clock=lambda: now)
    assert timings.summarize_recent().count == 0
    timings.note(5.0)
    now += RECENT_SPAN - 1
    timings.note(1.0, failed=True)
    assert (timings.summarize_recent().count, timings.summarize_recent().largest, timings.failures) == (2, 5.0, 1)
    now += 2
    recent = timings.summarize_recent()
    assert (recent.count, recent.mean, recent.percentile_95, recent.largest) == (1, 1.0, 1.0, 1.0)
    assert (timings.count, timings.seconds, timings.largest) == (2, 6.0, 5.0)


def test_timings_limit_recent_entries_but_count_all() -> None:
    timings = Timings(clock=lambda: 0.0)
    for _ in range(3 * MAX_RECENT):
        timings.note(0.01)
    assert (timings.count, timings.summarize_recent().count) == (3 * MAX_RECENT, MAX_RECENT)


def test_parameters_show_each_rule_and_its_default() -> None:
    parameters = {parameter["name"]: parameter for parameter in parameters_of(Rules(claim_grace=7.5, plan_after=None))}
    assert parameters.keys() == Rules.__dataclass_fields__.keys()
    assert {name for name, parameter in parameters.items() if parameter["is_set"]} == {"claim_grace", "plan_after"}
    assert parameters["claim_grace"]["value"] == "7.5"
    assert (parameters["plan_after"]["value"], parameters["plan_after"]["default"]) == ("none", "3,600")
    assert parameters["max_placement_tries"]["value"] == "none"


# In a browser


@pytest.fixture(scope="module")
def grid(new_grid: EmbeddedGrid) -> EmbeddedGrid:
    return new_grid


def read_rows(page: Any, section: str) -> dict[str, list[str]]:
    """Return the rows of a table by their first cell."""
    cells_of_rows = [row.locator("td").all_inner_texts() for row in page.locator(f"#{section} tbody tr").all()]
    return {cells[0].split("\n")[0]: cells for cells in cells_of_rows}


def test_scheduler_page_shows_decisions_live(visit: Visit, grid: EmbeddedGrid) -> None:
    page = visit().open("/scheduler")
    first_count = int(read_rows(page, "claims").get("north", ["", "0"])[1])
    gate = grid.make_gate()
    running_job = grid.submit({"type": "fixed", "components": [{"size": 4, "cluster": "north"}]}, *gate.hold)
    grid.wait_for_state(running_job, "running")
    waiting_job = grid.submit({"type": "fixed", "components": [{"size": 4, "cluster": "north"}]}, "true")
    page.locator("#refusals tr", has_text=RefusalKind.NODES).locator("td.number").filter(
        has_not_text=re.compile("^0$")
    ).wait_for()
    page.locator("#claims").get_by_text(str(first_count + 1), exact=True).wait_for()
    gate.open()
    grid.wait_for_end(waiting_job)
    grid.wait_for_end(grid.submit(grid.six_nodes, "true"))
    page.locator("#placements tr", has_text="worst-fit").or_(page.locator("#placements tbody tr")).first.wait_for()
    content = grid.http.get("/scheduler.json").json()
    assert sum(several for _, several in content["placements"].values()) >= 1
    assert {row["what"] for row in content["timed"]} == {"Cycles", "Steps", "Transactions", "Queries"}
    assert all(sum(count for _, count in row["spans"]) == row["count"] for row in content["timed"])
    for row in content["timed"]:
        used = sum(count > 0 for _, count in row["spans"])
        assert page.locator(f"section#{row['what']} tbody svg.bar").count() >= min(used, 1)
    assert page.locator("#parameters tbody tr").count() == len(Rules.__dataclass_fields__)
    assert page.locator("#parameters").get_by_text("configured").count() == 0


def test_scheduler_page_numbers_link_to_sections(visit: Visit, grid: EmbeddedGrid) -> None:
    page = visit().open("/scheduler")
    links = [link.get_attribute("href") for link in page.locator(".numbers a").all()]
    assert page.locator(".numbers li").count() == len(links) == 7
    pages = {link.get_attribute("href") for link in page.locator("main a:not([href^='#'])").all()}
    assert [path for path in pages if grid.http.get(path).status_code != 200] == []
    here = [link for link in links if link.startswith("#")]
    assert [link for link in here if page.locator(link).count() != 1] == []


def test_scheduler_page_on_phone_without_scripts_is_readable(visit: Visit) -> None:
    page = visit(java_script_enabled=False, viewport={"width": 390, "height": 800}).open("/scheduler", live=False)
    page.get_by_role("heading", name="Rules").wait_for()
    assert page.locator("#parameters tbody tr").count() == len(Rules.__dataclass_fields__)


def test_scheduler_page_needs_login(daemon: ServedDaemon) -> None:
    response = daemon.http.post("/api/v1/tokens", json={"user": "alice", "role": "user"}).raise_for_status()
    headers = {"Authorization": f"Bearer {response.json()['token']}"}
    for path in ("/scheduler", "/scheduler.json"):
        assert httpx2.get(f"{daemon.url}{path}", headers=headers, timeout=60.0).status_code == 200
        assert httpx2.get(f"{daemon.url}{path}", timeout=60.0).status_code == 401
