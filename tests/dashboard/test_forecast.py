"""The page Forecast, in a browser and as pure functions."""

import re

from koalapy.dashboard.pages.forecast import overdue_end
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from tests.dashboard.conftest import Visit
from tests.grid.embedded import EmbeddedGrid


def test_overdue_end_is_that_of_a_passed_walltime() -> None:
    attempt = Attempt(1, (Component(0, "north", 3, ComponentState.RUNNING),), 0.0, barrier_at=100.0)
    job = Job(1, JobSpec(FlexibleRequest(3), walltime=600.0), 0.0, state=JobState.RUNNING, attempt=attempt)
    end = overdue_end(job, 701.0)
    assert end is not None
    assert (end.at, end.nodes) == (700.0, {"north": 3})
    assert overdue_end(job, 700.0) is None


def test_capacity_page_shows_largest_start_and_next_end(visit: Visit, grid: EmbeddedGrid) -> None:
    page = visit().open("/forecast")
    gate = grid.make_gate()
    job = grid.submit({"type": "fixed", "components": [{"size": 3, "cluster": "north"}]}, *gate.hold, walltime=600)
    grid.wait_for_state(job, "running")
    row = page.locator("tr[id^=policy-]").filter(has_text="worst-fit")
    row.filter(has_text="north 1, south 4").or_(row.filter(has_text="south 4, north 1")).wait_for()
    assert row.locator("td.number").all_inner_texts() == ["4", "5"]
    assert page.locator("section[aria-label='Expected ends'] tbody tr").count() == 1
    assert row.get_by_text(re.compile(rf"more after job {job}")).count() == 1
    page.get_by_role("link", name="high").click()
    page.wait_for_url("**/forecast?priority=high")
    page.get_by_text("8 of 8 nodes are offered").wait_for()
    assert grid.wait_for_end(grid.submit({"type": "flexible", "total_size": 5}, "true"))["state"] == "succeeded"
    assert grid.get_job(job)["state"] == "running"
    gate.open()
