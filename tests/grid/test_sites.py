"""Policies on a live grid with a slow configured link."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import Grid, wait_until

pytestmark = pytest.mark.processes
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


def wait_for_clusters(grid: Grid, ident: int) -> set[str]:
    job = grid.wait_for_end(ident)
    assert job["state"] == "succeeded", job
    return {component["cluster"] for component in job["components"]}


def test_communication_aware_policy_avoids_slow_link(make_grid: Callable[..., EmbeddedGrid], tmp_path: Path) -> None:
    config = tmp_path / "koala.yaml"
    config.write_text(THREE_CLUSTERS)
    grid = make_grid(KOALA_CONFIG=str(config))
    slow = {"a", "b"}
    six = {"type": "flexible", "total_size": 6}
    for metric in ("latency", "bandwidth"):
        options = {"policy": "communication-aware", "policy_options": {"metric": metric}}
        clusters = wait_for_clusters(grid, grid.submit(six, "true", **options))
        assert len(clusters) == 2
        assert clusters != slow
        grid.wait_until_idle()
    assert wait_for_clusters(grid, grid.submit(six, "true", policy="cluster-minimization")) == slow
    wait_until(lambda: all(cluster["idle"] == 4 for cluster in grid.list_clusters()), "every node to be idle")
