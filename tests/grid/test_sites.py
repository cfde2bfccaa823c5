"""Which sites are used: drained ones are not, and slow links are kept clear of by the policy that knows of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.grid.embedded import Embedded
from tests.grid.world import World, until

pytestmark = pytest.mark.processes

ONE = {"type": "flexible", "total_size": 1}
THREE_CLUSTERS = """
clusters: {a: {nodes: 4}, b: {nodes: 4}, c: {nodes: 4}}
links:
  - {between: [a, b], latency: 100ms, bandwidth: 1Mbit}
  - {between: [a, c], latency: 1ms, bandwidth: 1Gbit}
  - {between: [b, c], latency: 1ms, bandwidth: 1Gbit}
  - {between: [a, a], latency: 50us, bandwidth: 10Gbit}
  - {between: [b, b], latency: 50us, bandwidth: 10Gbit}
  - {between: [c, c], latency: 50us, bandwidth: 10Gbit}
"""


def used(grid: World, ident: int) -> set[str]:
    job = grid.wait(ident)
    assert job["state"] == "succeeded", job
    return {component["cluster"] for component in job["components"]}


def test_a_drained_cluster_gets_nothing_until_it_is_resumed(grid: World) -> None:
    gate = grid.gate()
    total = sum(grid.nodes.values())
    runs = grid.submit({"type": "fixed", "components": [{"size": 1, "cluster": "north"}]}, *gate.hold)
    grid.wait_state(runs, "running")
    try:
        drained = grid.run("clusters", "drain", "north", "--reason", "new disks")
        assert drained.returncode == 0, drained.stderr
        assert grid.cluster("north")["state"] == "drained"
        assert "new disks" in grid.cluster("north")["reason"]
        whole = grid.submit({"type": "flexible", "total_size": total}, "true")
        for _ in range(2 * grid.nodes["north"]):
            assert "north" not in used(grid, grid.submit(ONE, "true"))
        assert grid.job(whole)["state"] == "queued"
        assert grid.job(runs)["state"] == "running", "what runs goes on"
        gate.open()
        assert grid.wait(runs)["state"] == "succeeded"
        assert grid.job(whole)["state"] == "queued"
    finally:
        resumed = grid.run("clusters", "resume", "north")
    assert resumed.returncode == 0, resumed.stderr
    assert used(grid, whole) == set(grid.nodes)
    assert grid.cluster("north")["state"] == "usable"
    grid.settle()


def test_communication_aware_avoids_a_slow_link_and_cluster_minimization_does_not(
    make_grid: Callable[..., Embedded], tmp_path: Path
) -> None:
    config = tmp_path / "koala.yaml"
    config.write_text(THREE_CLUSTERS)
    grid = make_grid(KOALA_CONFIG=str(config))
    slow = {"a", "b"}
    six = {"type": "flexible", "total_size": 6}
    for metric in ("latency", "bandwidth"):
        options = {"policy": "communication-aware", "policy_options": {"metric": metric}}
        found = used(grid, grid.submit(six, "true", **options))
        assert len(found) == 2
        assert found != slow
        grid.settle()
    assert used(grid, grid.submit(six, "true", policy="cluster-minimization")) == slow
    until(lambda: all(cluster["idle"] == 4 for cluster in grid.clusters()), "every node to be idle")
