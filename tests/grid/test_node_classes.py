"""Embedded clusters whose nodes differ: what is told of them, and who gets which."""

import json
from collections.abc import Callable

import pytest

from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import wait_until

pytestmark = pytest.mark.processes

CLUSTERS = {
    "north": {
        "network": "127.0.1",
        "nodes": 4,
        "uplink_bandwidth": "1Gbit",
        "node_classes": {
            "slow": {"nodes": 3, "power": 0.5, "memory": "8GB"},
            "fast": {"nodes": 1, "power": 2.0, "memory": "64GB"},
        },
    },
    "south": {"network": "127.0.2", "nodes": 2, "speed": 2.0, "node_classes": {"big": {"nodes": 2, "memory": "1TB"}}},
}
SLEEPING = ("sh", "-c", "echo started; exec sleep 600")


def classes(grid: EmbeddedGrid, cluster: str) -> dict[str, int]:
    found = grid.http.get(f"/api/v1/clusters/{cluster}").json()["details"]["node_classes"]
    return {each["name"]: each["idle"] for each in found}


def placed(grid: EmbeddedGrid, job: int) -> list[tuple[str, int, str, list[str]]]:
    components = grid.get_job(job)["components"]
    return sorted((c["cluster"], c["size"], c["node_class"], c["hosts"]) for c in components)


def matched(grid: EmbeddedGrid, nodes: int, **more: object) -> int:
    """A job that runs until it is cancelled."""
    request = {"type": "flexible", "total_size": nodes}
    return grid.submit(request, *SLEEPING, launcher="processes", policy="resource-matching", **more)


def runs(grid: EmbeddedGrid, job: int) -> None:
    wait_until(lambda: grid.get_job(job)["state"] == "running", f"job {job} runs")


def test_a_matched_job_runs_on_the_fast_nodes_and_uses_uplinks_until_it_ends(
    make_grid: Callable[..., EmbeddedGrid],
) -> None:
    grid = make_grid(KOALA_CLUSTERS=json.dumps(CLUSTERS))
    assert classes(grid, "north") == {"slow": 3, "fast": 1}
    assert classes(grid, "south") == {"big": 2}
    first = matched(grid, 3, per_node_bandwidth=10_000_000)
    runs(grid, first)
    assert placed(grid, first) == [
        ("north", 1, "fast", ["127.0.1.4"]),
        ("south", 2, "big", ["127.0.2.1", "127.0.2.2"]),
    ], "all of power 2, wherever they are"
    assert classes(grid, "north") == {"slow": 3, "fast": 0}
    uplinks = {
        name: grid.http.get(f"/api/v1/clusters/{name}").json()["details"]["uplink"] for name in ("north", "south")
    }
    assert uplinks["north"] == {"capacity": 125e6, "consumed": 10e6}
    assert uplinks["south"]["consumed"] == 10e6
    shown = grid.run_koala("clusters", "show", "north").stdout
    assert "fast" in shown
    assert "uplink: 10 MB/s used of 125 MB/s" in shown
    page = grid.http.get("/clusters/north.json").json()
    assert [(each["name"], each["idle"], each["power"]) for each in page["node_classes"]] == [
        ("slow", 3, 0.5),
        ("fast", 0, 2.0),
    ]
    assert page["uplink"] == uplinks["north"]
    text = grid.http.get("/clusters/north").text
    assert "Node classes" in text
    assert "10 MB/s used of 125 MB/s" in text
    assert "1 fast" in grid.run_koala("show", str(first)).stdout
    second = matched(grid, 1, memory=32_000_000_000)
    assert grid.get_job(second)["state"] == "queued", "no idle node has the memory"
    third = grid.submit({"type": "flexible", "total_size": 1}, *SLEEPING, launcher="processes")
    runs(grid, third)
    assert placed(grid, third)[0][2:] == ("", ["127.0.1.1"]), "who asks for none gets what is given first"
    grid.run_koala("cancel", str(first))
    runs(grid, second)
    assert placed(grid, second)[0][2] in ("fast", "big")
    wait_until(lambda: "uplink" not in grid.http.get("/api/v1/clusters/south").json()["details"], "nothing is used")
