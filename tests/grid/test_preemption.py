"""Preempt exactly as many low-priority jobs as needed, which run again later."""

from typing import Any

import pytest

from tests.grid.world import World

pytestmark = pytest.mark.processes


def on(cluster: str, size: int) -> dict[str, Any]:
    return {"type": "fixed", "components": [{"size": size, "cluster": cluster}]}


def events(grid: World, ident: int) -> list[str]:
    return [entry["event"] for entry in grid.job(ident)["timeline"]]


@pytest.mark.parametrize("cluster", ["north", "east"])
def test_a_high_priority_job_preempts_exactly_the_needed_low_ones(grid: World, cluster: str) -> None:
    cluster = cluster if cluster in grid.nodes else "south"
    nodes = grid.nodes[cluster]
    theirs, ours = grid.gate(), grid.gate()
    low = [grid.start_waiting(theirs, on(cluster, 1), 1) for _ in range(nodes)]
    first = min(p.pid for p in grid.programs(low[0]))
    high = grid.start_waiting(ours, on(cluster, nodes - 1), nodes - 1, priority="high")
    spared, *preempted = low
    assert [events(grid, ident).count("preempted") for ident in low] == [0, *[1] * (nodes - 1)]
    for ident in preempted:
        job = grid.wait_state(ident, "queued")
        assert f"job {high}" in str(job["timeline"]), "it is told for whom"
        assert not grid.programs(ident)
    assert grid.job(spared)["state"] == "running"
    assert min(p.pid for p in grid.programs(spared)) == first
    ours.open()
    assert grid.wait(high)["state"] == "succeeded"
    theirs.open()
    for ident in low:
        assert grid.wait(ident)["state"] == "succeeded"
        assert grid.logs(ident) == "done\n"
    assert grid.job(spared)["generation"] == 1
    assert {grid.job(ident)["restarts"] for ident in low} == {0}, "they did nothing wrong"
    assert grid.cluster(cluster)["errors"] == 0
    grid.settle()
