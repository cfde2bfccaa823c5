"""Embedded clusters with node classes: their report, and placement by class."""

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
            "fast": {"nodes": 1, "power": 2.0, "memory": "64GB", "cores": 32, "gpus": {"a100": 2}},
        },
    },
    "south": {
        "network": "127.0.2",
        "nodes": 2,
        "speed": 2.0,
        "node_classes": {"big": {"nodes": 2, "memory": "1TB", "features": ["big"]}},
    },
}
SLEEPING = ("sh", "-c", "echo started; exec sleep 600")


def read_idle_classes(grid: EmbeddedGrid, cluster: str) -> dict[str, int]:
    classes = grid.http.get(f"/api/v1/clusters/{cluster}").json()["details"]["node_classes"]
    return {node_class["name"]: node_class["idle"] for node_class in classes}


def read_placement(grid: EmbeddedGrid, job: int) -> list[tuple[str, int, str, list[str]]]:
    components = grid.get_job(job)["components"]
    return sorted((c["cluster"], c["size"], c["node_class"], c["hosts"]) for c in components)


def submit_matched_job(grid: EmbeddedGrid, nodes: int, **fields: object) -> int:
    """Submit a job that runs until it is cancelled."""
    request = {"type": "flexible", "total_size": nodes}
    return grid.submit(request, *SLEEPING, launcher="processes", policy="resource-matching", **fields)


def wait_until_running(grid: EmbeddedGrid, job: int) -> None:
    wait_until(lambda: grid.get_job(job)["state"] == "running", f"job {job} runs")


def test_matching_policy_takes_fast_nodes_and_counts_uplinks(make_grid: Callable[..., EmbeddedGrid]) -> None:
    grid = make_grid(KOALA_CLUSTERS=json.dumps(CLUSTERS))
    assert read_idle_classes(grid, "north") == {"slow": 3, "fast": 1}
    assert read_idle_classes(grid, "south") == {"big": 2}
    first = submit_matched_job(grid, 3, per_node_bandwidth=10_000_000)
    wait_until_running(grid, first)
    assert read_placement(grid, first) == [
        ("north", 1, "fast", ["127.0.1.4"]),
        ("south", 2, "big", ["127.0.2.1", "127.0.2.2"]),
    ], "all of power 2, wherever they are"
    assert read_idle_classes(grid, "north") == {"slow": 3, "fast": 0}
    uplinks = {
        name: grid.http.get(f"/api/v1/clusters/{name}").json()["details"]["uplink"] for name in ("north", "south")
    }
    assert uplinks["north"] == {"capacity": 125e6, "consumed": 10e6}
    assert uplinks["south"]["consumed"] == 10e6
    listing = grid.run_koala("clusters", "show", "north").stdout
    assert "fast" in listing
    assert "uplink: 10 MB/s used of 125 MB/s" in listing
    page = grid.http.get("/clusters/north.json").json()
    assert [(node_class["name"], node_class["idle"], node_class["power"]) for node_class in page["node_classes"]] == [
        ("slow", 3, 0.5),
        ("fast", 0, 2.0),
    ]
    assert page["uplink"] == uplinks["north"]
    text = grid.http.get("/clusters/north").text
    assert "Node classes" in text
    assert "10 MB/s used of 125 MB/s" in text
    assert "1 fast" in grid.run_koala("show", str(first)).stdout
    second = submit_matched_job(grid, 1, memory=32_000_000_000)
    assert grid.get_job(second)["state"] == "queued", "no idle node has the memory"
    third = grid.submit({"type": "flexible", "total_size": 1}, *SLEEPING, launcher="processes")
    wait_until_running(grid, third)
    assert read_placement(grid, third)[0][2:] == ("", ["127.0.1.1"]), (
        "a request without a class gets the first free node"
    )
    grid.run_koala("cancel", str(first))
    wait_until_running(grid, second)
    assert read_placement(grid, second)[0][2] in ("fast", "big")
    wait_until(lambda: "uplink" not in grid.http.get("/api/v1/clusters/south").json()["details"], "nothing is used")


def test_required_nodes_are_used_under_several_policies(make_grid: Callable[..., EmbeddedGrid]) -> None:
    grid = make_grid(KOALA_CLUSTERS=json.dumps(CLUSTERS))
    wait_until(lambda: read_idle_classes(grid, "north") == {"slow": 3, "fast": 1}, "north reports its nodes")
    wait_until(lambda: read_idle_classes(grid, "south") == {"big": 2}, "south reports its nodes")
    listing = grid.run_koala("clusters", "show", "north").stdout
    assert "a100:2" in listing
    for policy in ("cluster-minimization", "resource-matching"):
        request = {"type": "flexible", "total_size": 1}
        job = grid.submit(request, *SLEEPING, launcher="processes", policy=policy, gpus="a100:1")
        wait_until_running(grid, job)
        assert read_placement(grid, job)[0][3] == ["127.0.1.4"]
        waiting = grid.submit(request, *SLEEPING, launcher="processes", policy=policy, cores=8, gpus=1)
        assert "only nodes with 8 cores and 1 GPU count" in grid.run_koala("explain", str(waiting)).stdout
        grid.run_koala("cancel", str(job), str(waiting))
        wait_until(lambda: read_idle_classes(grid, "north") == {"slow": 3, "fast": 1}, "the node is free")
    components = [{"size": 1, "features": ["big"]}, {"size": 1, "gpus": 2}, {"size": 3, "exclude": ["south"]}]
    job = grid.submit({"type": "nonfixed", "components": components}, *SLEEPING, launcher="processes")
    wait_until_running(grid, job)
    assert [(c["cluster"], c["hosts"]) for c in grid.get_job(job)["components"]] == [
        ("south", ["127.0.2.1"]),
        ("north", ["127.0.1.4"]),
        ("north", ["127.0.1.1", "127.0.1.2", "127.0.1.3"]),
    ]
    page = grid.http.get(f"/jobs/{job}").text
    assert "component 0: feature big; component 1: 2 GPUs; component 2: not on south" in page
    assert "component 1: 2 GPUs" in grid.run_koala("show", str(job)).stdout
    grid.run_koala("cancel", str(job))
    job = grid.submit({"type": "flexible", "total_size": 1}, *SLEEPING, exclude=["south", "north-[1-2]", "127.0.1.3"])
    wait_until_running(grid, job)
    assert read_placement(grid, job)[0][3] == ["127.0.1.4"]
    refused = grid.run_koala("submit", "--flexible", "1", "--gpus", "a100:4", "--", "true")
    assert "nearest: north has 2 GPUs a100 on 1 node" in refused.stderr


def test_jobs_that_share_run_at_once_on_one_node(make_grid: Callable[..., EmbeddedGrid]) -> None:
    classes = {"small": {"nodes": 1, "cores": 4, "memory": "8GB"}}
    north = {"network": "127.0.1", "nodes": 1, "share": True, "node_classes": classes}
    grid = make_grid(KOALA_CLUSTERS=json.dumps({"north": north}))

    def submit(*options: str) -> int:
        command = ("--flexible", "1", "--launcher", "processes", *options, "--", *SLEEPING)
        return int(json.loads(grid.run_koala("submit", "--json", *command).stdout)["id"])

    first, second = submit("--share", "--cores", "2"), submit("--share", "--cpus-per-rank", "1")
    wait_until_running(grid, first)
    wait_until_running(grid, second)
    assert [read_placement(grid, job)[0][3] for job in (first, second)] == [["127.0.1.1"]] * 2
    assert "small, partly used" in grid.run_koala("clusters", "show", "north").stdout
    assert "small, partly used" in grid.http.get("/clusters/north").text
    assert "shares nodes" in grid.run_koala("show", str(first)).stdout
    third, whole = submit("--share", "--cores", "3"), submit("--cores", "1")
    explanation = grid.run_koala("explain", str(third)).stdout
    assert "1 partly used node can be shared" in explanation, explanation
    assert {grid.get_job(job)["state"] for job in (third, whole)} == {"queued"}
    grid.run_koala("cancel", str(first))
    wait_until_running(grid, third)
    assert grid.get_job(second)["state"] == "running"
    assert grid.get_job(whole)["state"] == "queued", "a part of the node is in use"
    for job in (second, third):
        grid.run_koala("cancel", str(job))
    wait_until_running(grid, whole)
