"""Test the simulations and reports for the live runs of sonmez-2010; the runs themselves need the testbed."""

import json
from itertools import pairwise
from typing import Any

import pytest

from koalapy.workload.plan import parse_workload, workload_lines
from tests.experiments import sonmez_2010_live
from tests.experiments.sonmez_2010_live import FIGURE_6, FIGURE_9, NEEDS, PAGE, SMALL, WIDE, Twin, alone, page

pytestmark = pytest.mark.nightly

RUNS = (*FIGURE_6, *FIGURE_9)


def found(factor: float = 3.0) -> dict[str, Any]:
    """Return measurements in which only wave slows down, by ``factor``, on limited links."""

    def first(name: str, links: str, placement: dict[str, int]) -> dict[str, Any]:
        slow = name == "wave" and len(placement) > 1
        slow &= links == "held" or (links == "to east held" and "east" in placement)
        lasted = alone() * (factor if slow else 1.0)
        return {"application": name, "links": links, "placement": placement, "lasted": lasted, "startup": 1.0}

    alone_runs = [first(name, links, entry) for links in ("free", "held") for name in NEEDS for entry in SMALL]
    alone_runs += [first("wave", "to east held", entry) for entry in WIDE]
    live = {"wait": 1.0, "execution": 5.0, "response": 6.0, "coallocated": 0.5, "startup": 1.0, "ran": 40, "local": 0.2}
    links = [
        {"one": first, "other": second, "latency": 1e-4, "bandwidth": bandwidth, "bandwidth_back": None}
        for first, second, bandwidth in (
            ("east", "east", 1e9),
            ("north", "north", 1e9),
            ("south", "south", 1e9),
            ("north", "south", 1e9),
            ("east", "north", 1e6),
            ("east", "south", 1e6),
        )
    ]
    return {"processors": 2, "load": 1.0, "alone": alone_runs, "runs": {run.name: live for run in RUNS}, "links": links}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_live_workloads_parse_as_workload_files(run: Any) -> None:
    workload = run.workload()
    again = parse_workload(workload_lines(workload), "workload")
    assert [(round(entry.arrives_at, 3), entry.job) for entry in workload.jobs] == [
        (entry.arrives_at, entry.job) for entry in again.jobs
    ]
    assert len(again.jobs) == run.jobs


def test_live_runs_of_a_figure_have_equal_arrivals() -> None:
    for figure in (FIGURE_6, FIGURE_9):
        for first, second in pairwise(run.workload() for run in figure):
            assert [entry.arrives_at for entry in first.jobs] == [entry.arrives_at for entry in second.jobs]


def test_live_simulation_uses_measured_run_times() -> None:
    twin = Twin(found())
    never, prime, _, wave = (twin.simulate(run, 1) for run in FIGURE_6)
    assert never["coallocated"] == 0.0
    assert never["execution"] == prime["execution"] == pytest.approx(alone())
    assert wave["execution"] == pytest.approx(alone() * (1 + 2 * wave["coallocated"]))
    by_number, by_links = (twin.simulate(run, 1) for run in FIGURE_9)
    assert by_number["coallocated"] == by_links["coallocated"] == 1.0
    assert by_links["execution"] < by_number["execution"], "it keeps away from east"


def test_live_published_page_matches_its_results() -> None:
    assert PAGE.read_text() == page(json.loads(PAGE.with_suffix(".json").read_text()))


def test_live_page_contains_the_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sonmez_2010_live, "SEEDS", 2)
    text = page(found(2.5))
    (row,) = (line for line in text.splitlines() if line.startswith("| wave") and "| held" in line)
    assert [cell.strip() for cell in row.split("|")[3:6]] == ["5.0 (5.0 – 5.0)", "12.5 (12.5 – 12.5)", "12.5"]
    assert "wave 2.50" in text
