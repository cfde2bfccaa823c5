"""The embedded and the simulated world make the same of one workload: one scheduler, and clusters that behave alike."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.grid.agreement import CLUSTERS, Live, order, simulated, workload
from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.nightly]

JOBS = 200
RULES = {
    "preemption": "never",
    "scan_interval": "3600",
    "step_budget": "1000",
    "claim_grace": "600",
    "barrier_timeout": "600",
    "unreachable_after": "300",
}
"""What goes by the time of day, by how busy this machine is, or by how soon a program can be stopped is no matter of
this comparison."""


def play(grid: EmbeddedGrid) -> int:
    """Submit everything while a job has all nodes, so that the queue decides; and wait until all is over. How many."""
    gate = grid.make_gate()
    whole = {"type": "fixed", "components": [{"cluster": name, "size": nodes} for name, nodes in CLUSTERS.items()]}
    first = grid.submit(whole, *gate.hold)
    grid.wait_for_state(first, "running")
    bodies = workload(JOBS - 1, seed=1)
    for body in bodies:
        answer = grid.http.post("/api/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
    gate.open()
    wait_until(
        lambda: not grid.http.get("/api/v1/jobs", params={"active": True}).json()["jobs"], "all to be over", 300.0
    )
    return 1 + len(bodies)


def test_200_jobs_are_placed_alike_in_the_live_and_in_the_simulated_world(
    make_grid: Callable[..., EmbeddedGrid], tmp_path: Path
) -> None:
    """Compared are the clusters and nodes of every job, the order of placements and that of starts, and their times.

    How long a component takes to start up, and to end, the simulation is told: as long as it did in the live grid, for
    that is this machine's noise, by which jobs become free one before another. With the same durations the times are
    the very same. Not compared are preemption, regular scans, failures, and what the simulation makes of durations
    that nobody has measured.
    """
    clusters = json.dumps({name: {"nodes": nodes} for name, nodes in CLUSTERS.items()})
    grid = make_grid(
        KOALA_CLUSTERS=clusters, **{f"KOALA_RULES__{name.upper()}": value for name, value in RULES.items()}
    )
    assert play(grid) == JOBS
    file = tmp_path / "day.gz"
    assert grid.run_koala("export", "-o", str(file)).returncode == 0

    live = Live.of(file)
    assert len(live.decided) == live.attempts == JOBS
    found = simulated(live)
    assert {job: each.gang for job, each in found.items()} == {job: each.gang for job, each in live.decided.items()}
    assert order(found, "placed") == order(live.decided, "placed")
    assert order(found, "started") == order(live.decided, "started")
    assert found == live.decided
    # They agree for a reason: who is placed otherwise is seen.
    assert order(simulated(live, queue="fcfs"), "started") != order(live.decided, "started")
    assert sum(len(each.gang) > 1 for each in found.values()) > JOBS / 10
    print(f"startup {min(live.startups):.3f} to {max(live.startups):.3f} s, {len(live.components)} components")
