"""The page Network, pictures and formats."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from koalapy.dashboard.grid_map import worse_direction
from koalapy.dashboard.pages.network import STEPS, choose_shade, coallocated_jobs
from koalapy.dashboard.rendering import format_rate, format_seconds
from koalapy.model.cluster import Link
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from tests.dashboard.conftest import Visit
from tests.grid.embedded import EmbeddedGrid


def test_map_has_jobs_on_several_clusters_and_the_worse_direction_of_links() -> None:
    def job(ident: int, *clusters: str) -> Job:
        components = tuple(Component(i, name, i + 1, ComponentState.RUNNING) for i, name in enumerate(clusters))
        attempt = Attempt(1, components, 0.0)
        return Job(ident, JobSpec(FlexibleRequest(1)), 0.0, state=JobState.RUNNING, attempt=attempt)

    jobs = [job(1, "north"), job(2, "north", "south"), job(3, "north", "south", "west")]
    queries: Any = SimpleNamespace(active_jobs=lambda: iter(jobs))
    assert [(one.id, one.nodes) for one in coallocated_jobs(queries)] == [
        (3, {"west": 3, "south": 2, "north": 1}),
        (2, {"south": 2, "north": 1}),
    ]
    back = SimpleNamespace(link_back=Link(bandwidth=1.0, latency=0.3))
    record: Any = SimpleNamespace(link=Link(bandwidth=2.0, latency=0.1), measurements=back)
    assert worse_direction(record) == Link(0.3, 1.0)


def test_link_page_measures_link_and_shows_result(visit: Visit, grid: EmbeddedGrid) -> None:
    visitor = visit()
    page = visitor.open("/network/north/south")
    page.get_by_text("No measurements yet.").wait_for()
    page.get_by_role("button", name="Measure it now").click()
    page.locator("section[aria-label=History] tbody tr").first.wait_for()
    assert "pingpong" in page.locator("section[aria-label=History] tbody tr").first.inner_text()
    page.locator("section[aria-label=Bandwidth] .plot canvas").wait_for()
    cell = visitor.open("/network").locator("#from-north td").nth(1)
    assert re.search(r"MB/s[\s\S]*ms", cell.inner_text())
    assert re.search(r"\bstep[1-5]\b", cell.get_attribute("class") or "")
    assert "not measured" in page.locator("#from-south td").nth(1).inner_text()


@pytest.mark.parametrize(("bandwidth", "step"), [(None, 0), (1e6, 1), (9e6, 3), (1e7, 3), (9.9e7, STEPS), (1e8, STEPS)])
def test_choose_shade_uses_equal_ratios(bandwidth: float | None, step: int) -> None:
    assert choose_shade(bandwidth, 1e6, 1e8) == step


def test_choose_shade_of_similar_links_is_equal() -> None:
    assert [choose_shade(bandwidth, 9e5, 1e6) for bandwidth in (9e5, 1e6)] == [STEPS, STEPS]


@pytest.mark.parametrize("low", [5e-324, 1.0, 1e308])
def test_choose_shade_of_extreme_bandwidths_is_valid(low: float) -> None:
    shades = {choose_shade(bandwidth, low, 1e308) for bandwidth in (low, 1e308)}
    assert shades <= set(range(1, STEPS + 1))
    assert choose_shade(5e-324, 5e-324, 5e-324) == STEPS


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.00012, "0.12 ms"), (0.12, "120 ms"), (2.5, "2.5 s"), (59.9, "59.9 s"), (91, "1:31")],
)
def test_format_seconds_chooses_the_unit(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(None, "–"), (117e6, "117 MB/s"), (1.25e9, "1,250 MB/s"), (5e5, "0.500 MB/s")]
)
def test_format_rate_has_three_digits(rate: float | None, text: str) -> None:
    assert format_rate(rate) == text
