"""Compare the placements and starts of one workload in a live grid and in a simulation."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.grid.agreement import CLUSTERS, LiveRun, create_workload, simulate_run, sort_jobs
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
"""Rules without effects of the time of day, of load, or of the time that stopping a program takes."""


def run_jobs(grid: EmbeddedGrid) -> int:
    """Submit the workload while a job occupies all nodes, wait for all jobs, and return their number."""
    gate = grid.make_gate()
    all_nodes = {"type": "fixed", "components": [{"cluster": name, "size": nodes} for name, nodes in CLUSTERS.items()]}
    first = grid.submit(all_nodes, *gate.hold)
    grid.wait_for_state(first, "running")
    bodies = create_workload(JOBS - 1, seed=1)
    for body in bodies:
        answer = grid.http.post("/api/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
    gate.open()
    wait_until(
        lambda: not grid.http.get("/api/v1/jobs", params={"active": True}).json()["jobs"], "all to be over", 300.0
    )
    return 1 + len(bodies)


def test_simulation_places_200_jobs_as_live_grid(make_grid: Callable[..., EmbeddedGrid], tmp_path: Path) -> None:
    """Compare the nodes of every job on each cluster, the order of placements and starts, and their times.

    The simulation uses the start-up and end durations of the live grid, since these are noise of this machine that
    decides which job ends first. With equal durations all times are equal. Preemption, regular scans, failures and the
    estimates of unmeasured durations are not compared.
    """
    clusters = json.dumps({name: {"nodes": nodes} for name, nodes in CLUSTERS.items()})
    grid = make_grid(
        KOALA_CLUSTERS=clusters, **{f"KOALA_RULES__{name.upper()}": value for name, value in RULES.items()}
    )
    assert run_jobs(grid) == JOBS
    file = tmp_path / "day.gz"
    assert grid.run_koala("export", "-o", str(file)).returncode == 0

    live = LiveRun.read(file)
    assert len(live.decided) == live.attempts == JOBS
    outcome = simulate_run(live)
    assert {job: decision.gang for job, decision in outcome.items()} == {
        job: decision.gang for job, decision in live.decided.items()
    }
    assert sort_jobs(outcome, "placed") == sort_jobs(live.decided, "placed")
    assert sort_jobs(outcome, "started") == sort_jobs(live.decided, "started")
    assert outcome == live.decided
    # Another queue policy must change the order, or else the comparison would prove nothing.
    assert sort_jobs(simulate_run(live, queue="fcfs"), "started") != sort_jobs(live.decided, "started")
    assert sum(len(decision.gang) > 1 for decision in outcome.values()) > JOBS / 10
    print(f"startup {min(live.startups):.3f} to {max(live.startups):.3f} s, {len(live.components)} components")
