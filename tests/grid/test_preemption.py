"""Preempt exactly as many low-priority jobs as needed, which run again later."""

from typing import Any

import pytest

from tests.grid.grid import Grid

pytestmark = pytest.mark.processes


def fixed_request(cluster: str, size: int) -> dict[str, Any]:
    return {"type": "fixed", "components": [{"size": size, "cluster": cluster}]}


def list_events(grid: Grid, ident: int) -> list[str]:
    return [entry["event"] for entry in grid.get_job(ident)["timeline"]]


@pytest.mark.parametrize("cluster", ["north", "east"])
def test_high_priority_job_preempts_only_needed_jobs(grid: Grid, cluster: str) -> None:
    cluster = cluster if cluster in grid.nodes else "south"
    nodes = grid.nodes[cluster]
    theirs, ours = grid.make_gate(), grid.make_gate()
    low = [grid.start_gated_job(theirs, fixed_request(cluster, 1), 1) for _ in range(nodes)]
    first = min(p.pid for p in grid.list_programs(low[0]))
    high = grid.start_gated_job(ours, fixed_request(cluster, nodes - 1), nodes - 1, priority="high")
    spared, *preempted = low
    assert [list_events(grid, ident).count("preempted") for ident in low] == [0, *[1] * (nodes - 1)]
    for ident in preempted:
        job = grid.wait_for_state(ident, "queued")
        assert f"job {high}" in str(job["timeline"]), "the timeline names the preempting job"
        assert not grid.list_programs(ident)
    assert grid.get_job(spared)["state"] == "running"
    assert min(p.pid for p in grid.list_programs(spared)) == first
    ours.open()
    assert grid.wait_for_end(high)["state"] == "succeeded"
    theirs.open()
    for ident in low:
        assert grid.wait_for_end(ident)["state"] == "succeeded"
        assert grid.read_output(ident) == "done\n"
    assert grid.get_job(spared)["generation"] == 1
    assert {grid.get_job(ident)["restarts"] for ident in low} == {0}, "they did nothing wrong"
    assert grid.get_cluster(cluster)["errors"] == 0
    grid.wait_until_idle()
