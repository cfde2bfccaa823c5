"""High-priority jobs take the nodes of low ones: of exactly as many as needed, which run again later."""

import time
from typing import Any

import pytest

from tests.grid.world import Gate, World, until

pytestmark = pytest.mark.processes


def on(cluster: str, size: int) -> dict[str, Any]:
    return {"type": "fixed", "components": [{"size": size, "cluster": cluster}]}


def start(grid: World, gate: Gate, cluster: str, size: int, **more: Any) -> int:
    """A job that runs until the gate is opened; answers when its programs run."""
    ident = grid.submit(on(cluster, size), *gate.hold, **more)
    grid.wait_state(ident, "running")
    until(lambda: len({p.node for p in grid.programs(ident)}) == size, "every program to run")
    return ident


def events(grid: World, ident: int) -> list[str]:
    return [entry["event"] for entry in grid.job(ident)["timeline"]]


@pytest.mark.parametrize("cluster", ["north", "east"])
def test_a_high_priority_job_preempts_exactly_the_needed_low_ones(grid: World, cluster: str) -> None:
    cluster = cluster if cluster in grid.nodes else "south"
    nodes = grid.nodes[cluster]
    theirs, ours = grid.gate(), grid.gate()
    low = [start(grid, theirs, cluster, 1) for _ in range(nodes)]
    first = min(p.pid for p in grid.programs(low[0]))
    high = start(grid, ours, cluster, nodes - 1, priority="high")
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


def test_no_more_is_preempted_than_the_nodes_that_lack(grid: World) -> None:
    """One node is idle and two are wanted: of the two jobs the one that has done less goes, in all of its clusters."""
    theirs, ours = grid.gate(), grid.gate()
    nodes = grid.nodes["north"]
    first = start(grid, theirs, "north", nodes - 2)
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 1.5, "more of its work to be lost than of the other's")
    both = {"type": "fixed", "components": [{"size": 1, "cluster": name} for name in ("north", "south")]}
    last = grid.submit(both, *theirs.hold)
    grid.wait_state(last, "running")
    until(lambda: grid.cluster("north")["idle"] == 1, "the nodes to be seen as taken")
    high = start(grid, ours, "north", 2, priority="high")
    assert [events(grid, ident).count("preempted") for ident in (first, last)] == [0, 1]
    until(lambda: not [p for p in grid.workers(f"{last}.1.") if p.node.startswith("south")], "south to be left")
    ours.open()
    theirs.open()
    assert {grid.wait(ident)["state"] for ident in (first, last, high)} == {"succeeded"}
    grid.settle()
