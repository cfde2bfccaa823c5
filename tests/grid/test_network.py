"""Measurements of the network by jobs, and their effect on policies."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.grid, pytest.mark.mpi]

SIX = {"request": {"type": "flexible", "total_size": 6}, "command": ["true"], "policy": "communication-aware"}


def list_links(grid: EmbeddedGrid) -> list[dict[str, Any]]:
    links: list[dict[str, Any]] = grid.http.get("/api/v1/network").json()["links"]
    return links


def test_measured_links_change_placement(make_grid: Callable[..., EmbeddedGrid]) -> None:
    grid = make_grid()
    unmeasured = grid.http.post("/api/v1/explain", json=SIX).json()
    assert "not measured is the link between north and south" in unmeasured["placement"]["reason"]
    result = grid.run_koala("network", "measure")
    # Standard error tells what a slow measurement waits for.
    assert (result.returncode, "no link" in result.stderr) == (0, False), result.stderr
    assert sorted(line.partition(":")[0] for line in result.stdout.splitlines()) == [
        "north - north",
        "north - south",
        "south - south",
    ]
    assert {link["state"] for link in list_links(grid)} == {"measured"}
    assert all(link["latency"] > 0 and link["bandwidth"] > 0 for link in list_links(grid))
    jobs = grid.http.get("/api/v1/jobs", params={"owner": "koala"}).json()["jobs"]
    assert [(job["name"], job["state"], job["priority"]) for job in jobs] == [
        (f"network {name}", "succeeded", "low") for name in ("south-south", "north-south", "north-north")
    ]
    measured = grid.http.post("/api/v1/explain", json=SIX).json()
    assert sorted(c["cluster"] for c in measured["placement"]["components"]) == ["north", "south"]
    assert "by lowest average latency" in measured["headline"] + measured["placement"]["reason"]
    assert "not measured" not in measured["placement"]["reason"]
    table = grid.run_koala("network").stdout
    grid.wait_until_idle()
    assert grid.stop_daemon() == 0
    grid.start()
    assert grid.run_koala("network").stdout == table, "it is known after a restart, too"


def test_measurement_survives_killed_daemon(make_grid: Callable[..., EmbeddedGrid], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"while [ ! -e {gate} ]; do sleep 0.05; done; exec python -m koalapy.apps.pingpong --json"
    grid = make_grid(KOALA_NETWORK__COMMAND=json.dumps(["sh", "-c", script]))
    assert grid.run_koala("network", "measure", "north", "--no-wait").returncode == 0
    job = int(
        wait_until(lambda: next((j["under_way"]["job"] for j in list_links(grid) if j["under_way"]), None), "a job")
        or 0
    )
    grid.wait_for_state(job, "running")
    grid.kill_daemon()
    grid.start()
    (under_way,) = [link for link in list_links(grid) if link["under_way"]]
    assert (under_way["one"], under_way["other"], under_way["under_way"]) == ("north", "north", {"job": job})
    gate.touch()
    wait_until(lambda: not list_links(grid)[0]["under_way"], "the measurement to be over, and written down")
    assert list_links(grid)[0]["state"] == "measured"
    history = grid.http.get("/api/v1/network/north/north/history").json()["measurements"]
    assert [(line["kind"], line["job"]) for line in history] == [("pingpong", job)]
    assert len(grid.http.get("/api/v1/jobs", params={"owner": "koala"}).json()["jobs"]) == 1
    grid.wait_until_idle()
