"""The page What if."""

import re

import httpx2
import psutil
import pytest

from koalapy.dashboard.pages.forecast import lines_of, result_of
from koalapy.dashboard.rendering import render
from koalapy.model.job import JobState
from koalapy.simulation.twin import Answer, Expected, Forecast, Interval
from tests.daemon_in_process import ServedDaemon
from tests.dashboard.conftest import Visit
from tests.dashboard.people import create_token
from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import wait_until

PAGE = {"Accept": "text/html"}


def make_forecast(*starts: tuple[int, JobState, float | None]) -> Forecast:
    jobs = tuple(
        Expected(
            job,
            state,
            None if start is None else Interval(start, start + 1, start + 2),
            None,
            None,
            float(start is None),
            "nothing",
        )
        for job, state, start in starts
    )
    return Forecast(0.0, 3600.0, 3, jobs, None, None, None, 0.5)


def test_lines_of_answer_are_waiting_jobs_by_start() -> None:
    queued, running = JobState.QUEUED, JobState.RUNNING
    current = make_forecast((1, running, None), (2, queued, 50.0), (3, queued, None), (4, queued, 10.0))
    answer = Answer(current, make_forecast((1, running, None), (2, queued, None), (4, queued, 90.0)))
    lines = lines_of(answer)
    assert [line["job"] for line in lines] == [4, 2, 3]
    assert [line["is_changed_too"] for line in lines] == [True, True, False]
    assert [(name, never) for name, _, never in result_of(answer)["outcomes"]] == [("current", 1), ("changed", 1)]
    assert [name for name, _, _ in result_of(Answer(current, None))["outcomes"]] == ["current"]


@pytest.mark.parametrize("starts", [(0.0,), (0.0, 1e-9), (1.0, 1e9), (50.0, 70.0)])
def test_interval_pictures_stay_within_frame(starts: tuple[float, ...]) -> None:
    forecast = make_forecast(*((number, JobState.QUEUED, start) for number, start in enumerate(starts, 1)))
    page = render("what_if_result.html", {"result": result_of(Answer(forecast, None))})
    bars = re.findall(r'<rect class="(?:span|filled)" x="([^"]+)%" (?:y="2" )?width="([^"]+?)(%?)"', page)
    assert len(bars) == 2 * len(starts)
    for x_start, width, percent in bars:
        assert 0 <= float(x_start) <= float(x_start) + float(width) * (1 if percent else 100 / 160) <= 100


def test_what_if_page_simulates_changes(visit: Visit, grid: EmbeddedGrid) -> None:
    gate = grid.make_gate()
    first = grid.submit({"type": "fixed", "components": [{"size": 4, "cluster": "north"}]}, *gate.hold, walltime=600)
    grid.wait_for_state(first, "running")
    waits = grid.submit({"type": "fixed", "components": [{"size": 4, "cluster": "north"}]}, "true", walltime=600)
    page = visit().open("/forecast/what-if", live=False)
    assert page.locator("section").count() == 0, "no simulation before the first request"
    page.get_by_role("button", name="Simulate").click()
    row = page.locator("section[aria-label=Jobs] tbody tr")
    row.get_by_role("link", name=str(waits)).wait_for()
    assert "not started" in page.locator("section[aria-label='All jobs'] th").all_inner_texts()[4].lower()
    page.get_by_role("checkbox", name="north").check()
    page.get_by_label("Rules").fill("queue=fcfs")
    page.get_by_role("button", name="Simulate").click()
    page.get_by_role("columnheader", name="Changed", exact=True).wait_for()
    # A job that requests north cannot start elsewhere.
    assert "not in 30 days" in row.inner_text()
    assert page.get_by_role("checkbox", name="north").is_checked()
    assert page.get_by_label("Rules").input_value() == "queue=fcfs"
    assert "drain=north" in page.url
    page.get_by_label("Look ahead").select_option("7 days")
    page.get_by_role("button", name="Simulate").click()
    row.filter(has_text="not in 7 days").wait_for()
    assert page.get_by_label("Look ahead").input_value() == "604800s"
    gate.open()
    assert grid.wait_for_end(waits)["state"] == "succeeded"


def test_drain_page_shows_facts_at_once_and_then_delays(visit: Visit, grid: EmbeddedGrid) -> None:
    gate = grid.make_gate()
    on_north = {"type": "fixed", "components": [{"size": 4, "cluster": "north"}]}
    first = grid.submit(on_north, *gate.hold, walltime=600)
    grid.wait_for_state(first, "running")
    waits = grid.submit(on_north, "true", walltime=600)
    page = visit().page
    held = "data: <progress></progress>\n\n"
    page.route("**/drain/result", lambda route: route.fulfill(content_type="text/event-stream", body=held))
    page.goto("/clusters/north/drain")
    assert str(first) in page.locator("section[aria-label='Running jobs']").inner_text()
    assert str(waits) in page.locator("section[aria-label='Bound jobs']").inner_text()
    page.locator("progress").wait_for()
    page.unroute("**/drain/result")
    page.goto("/clusters/north/drain")
    row = page.locator("section[aria-label='Delayed jobs'] tbody tr")
    row.get_by_text("not within 8 hours").wait_for()
    assert page.locator("progress").count() == 0
    preview = grid.http.get("/api/v1/clusters/north/drain").json()
    assert [job["job"] for job in preview["delayed"]] == [waits]
    facts = grid.http.get("/api/v1/clusters/north/drain", params={"simulate": "false"}).json()
    assert facts == preview | {"delayed": None, "running": facts["running"]}
    assert "not within 8 hours" in grid.http.get("/clusters/north/drain?complete=true", headers=PAGE).text
    gate.open()
    assert grid.wait_for_end(waits)["state"] == "succeeded"


def test_simulation_of_left_page_is_killed(grid: EmbeddedGrid) -> None:
    assert grid.daemon is not None
    daemon = psutil.Process(grid.daemon.pid)

    def find_workers() -> list[psutil.Process]:
        return [child for child in daemon.children() if any("subprocess_worker" in word for word in child.cmdline())]

    with grid.http.stream("GET", "/clusters/north/drain/result") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        (worker,) = wait_until(find_workers, "the simulation", 60.0)
        worker.suspend()  # so that it does not end by itself
    wait_until(lambda: not worker.is_running(), "the end of the simulation", 60.0)
    assert "Jobs that would start later" in grid.http.get("/clusters/north/drain/result").text


def test_what_if_page_with_invalid_input_is_rejected(daemon: ServedDaemon) -> None:
    def ask(query: str) -> httpx2.Response:
        return daemon.http.get(f"/forecast/what-if?{query}", headers={"Accept": "text/html"})

    for query, text in {
        "drain=nowhere": "nowhere",
        "rules=queue": "NAME=VALUE",
        "rules=queue%3Dsideways": "queue",
        "add=west%3D0": "give a number from 1",
        "walltimes=1%3Dsoon": "walltime",
        "first=999999": "999999",
        "policy=none-such": "none-such",
        "add=" + "x" * 10_001: "10000",
        "first=-1": "first",
        "nothing=1": "nothing",
        "horizon=59": "horizon",
        "horizon=soon": "horizon",
    }.items():
        answer = ask(query)
        assert 400 <= answer.status_code < 500, query
        assert text in answer.text, query


def test_simulation_pages_need_operator_role(daemon: ServedDaemon) -> None:
    headers = {"Authorization": f"Bearer {create_token(daemon, 'somebody', 'user')}", "Accept": "text/html"}
    with httpx2.Client(base_url=daemon.url, headers=headers, timeout=60.0) as user:
        for path in ("/forecast/what-if", "/forecast/what-if.json?ask=true"):
            assert user.get(path).status_code == 403
        assert "/forecast/what-if" not in user.get("/forecast").text
