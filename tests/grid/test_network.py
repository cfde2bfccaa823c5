"""The network between real clusters is measured by the grid's own jobs, and policies go by what was found."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.grid, pytest.mark.mpi]

SIX = {"request": {"type": "flexible", "total_size": 6}, "command": ["true"], "policy": "communication-aware"}


def links(grid: EmbeddedGrid) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = grid.http.get("/api/v1/network").json()["links"]
    return found


def test_measuring_fills_the_matrix_and_policies_go_by_it(make_grid: Callable[..., EmbeddedGrid]) -> None:
    grid = make_grid()
    before = grid.http.post("/api/v1/explain", json=SIX).json()
    assert "not measured is the link between north and south" in before["placement"]["reason"]
    done = grid.run_koala("network", "measure")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert sorted(line.partition(":")[0] for line in done.stdout.splitlines()) == [
        "north - north",
        "north - south",
        "south - south",
    ]
    assert {link["state"] for link in links(grid)} == {"measured"}
    assert all(link["latency"] > 0 and link["bandwidth"] > 0 for link in links(grid))
    jobs = grid.http.get("/api/v1/jobs", params={"owner": "koala"}).json()["jobs"]
    assert [(job["name"], job["state"], job["priority"]) for job in jobs] == [
        (f"network {name}", "succeeded", "low") for name in ("south-south", "north-south", "north-north")
    ]
    after = grid.http.post("/api/v1/explain", json=SIX).json()
    assert sorted(c["cluster"] for c in after["placement"]["components"]) == ["north", "south"]
    assert "by lowest average latency" in after["headline"] + after["placement"]["reason"]
    assert "not measured" not in after["placement"]["reason"]
    table = grid.run_koala("network").stdout
    grid.wait_until_idle()
    assert grid.stop_daemon() == 0
    grid.start()
    assert grid.run_koala("network").stdout == table, "it is known after a restart, too"


def test_a_daemon_killed_during_a_measurement_goes_on_with_it(
    make_grid: Callable[..., EmbeddedGrid], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    script = f"while [ ! -e {gate} ]; do sleep 0.05; done; exec python -m koalapy.apps.pingpong --json"
    grid = make_grid(KOALA_NETWORK__COMMAND=json.dumps(["sh", "-c", script]))
    assert grid.run_koala("network", "measure", "north", "--no-wait").returncode == 0
    job = int(
        wait_until(lambda: next((j["under_way"]["job"] for j in links(grid) if j["under_way"]), None), "a job") or 0
    )
    grid.wait_for_state(job, "running")
    grid.kill_daemon()
    grid.start()
    (under_way,) = [link for link in links(grid) if link["under_way"]]
    assert (under_way["one"], under_way["other"], under_way["under_way"]) == ("north", "north", {"job": job})
    gate.touch()
    wait_until(lambda: not links(grid)[0]["under_way"], "the measurement to be over, and written down")
    assert links(grid)[0]["state"] == "measured"
    history = grid.http.get("/api/v1/network/north/north/history").json()["measurements"]
    assert [(line["kind"], line["job"]) for line in history] == [("pingpong", job)]
    assert len(grid.http.get("/api/v1/jobs", params={"owner": "koala"}).json()["jobs"]) == 1
    grid.wait_until_idle()
