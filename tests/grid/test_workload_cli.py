"""Workloads generated and run by the command line on a live grid."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.grid.embedded import EmbeddedGrid

pytestmark = [pytest.mark.processes, pytest.mark.grid]

JOBS = 15
RUN = ("--background", "0.2", "--background-seconds", "3")
NAMES = {
    "queue_time": "queue_time",
    "wait_time": "wait_time",
    "response_time": "response_time",
    "startup_overhead": "startup_overhead",
    "start_delay": "start_delay",
    "placement_tries": "placement_tries",
    "claiming_tries": "claiming_tries",
    "restarts": "restarts",
    "state": "state",
    "priority": "priority",
}


def generate_workload(grid: EmbeddedGrid, file: Path, *options: str) -> str:
    result = grid.run_koala(
        "workload",
        "generate",
        "--sizes",
        "1,2,4",
        "--components",
        "1,2",
        "--run-times",
        "0.5-2",
        "--rate",
        "0.5",
        "--policy",
        "worst-fit",
        "--priorities",
        "high,low",
        "-o",
        str(file),
        *options,
    )
    assert result.returncode == 0, result.stderr
    return str(file)


def test_workload_run_with_background_load_succeeds(make_grid: Callable[..., EmbeddedGrid], tmp_path: Path) -> None:
    grid = make_grid(KOALA_BACKGROUND_LOAD="true")
    file = generate_workload(grid, tmp_path / "w.jsonl", "--jobs", str(JOBS))
    result = grid.run_koala("workload", "run", file, *RUN, timeout=110)
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "w.jsonl.report"
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert report["summary"]["states"] == {"succeeded": JOBS}
    jobs = {job["id"]: job for job in grid.http.get("/api/v1/jobs", params={"limit": 100}).json()["jobs"]}
    assert sorted(jobs) == sorted(job["id"] for job in report["jobs"])
    for job in report["jobs"]:
        daemon = jobs[job["id"]]
        assert {name: job[name] for name in NAMES} == {name: daemon[field] for name, field in NAMES.items()}
        places: dict[str, int] = {}
        for component in daemon["components"]:
            places[component["cluster"]] = places.get(component["cluster"], 0) + component["size"]
        assert (job["clusters"], job["coallocated"]) == (places, len(places) > 1)
        assert job["execution_time"] == pytest.approx(daemon["response_time"] - daemon["wait_time"])
    mean = sum(job["response_time"] for job in jobs.values()) / JOBS
    assert report["summary"]["response_time"] == pytest.approx(mean)
    used = report["utilisation"]
    assert set(used["clusters"]) == {"north", "south"}
    assert 0.05 < used["all"]["background"] < 0.35
    assert 0 < used["all"]["ours"] < 1
    grid.wait_until_idle()
