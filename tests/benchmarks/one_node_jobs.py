"""Measure the processor time of an embedded one-node job end to end: ``python -m tests.benchmarks.one_node_jobs``.

The figures are milliseconds for a job, by process: daemon, agents, resource managers, and runners with their programs.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.benchmarks.submissions import environment_of, job_body, send_all
from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import wait_until

JOBS = 600
WARM_UP_JOBS = 60
CONFIG = "clusters: {north: {nodes: 32}, south: {nodes: 32}}\n"


def processor_times(grid: EmbeddedGrid) -> dict[str, float]:
    """Return the processor seconds of the grid's processes so far, by kind."""
    assert grid.daemon is not None
    times = {"daemon": 0.0, "agents": 0.0, "managers": 0.0, "runners": 0.0}
    own = psutil.Process(grid.daemon.pid).cpu_times()
    times["daemon"] = own.user + own.system
    for cluster in ("north", "south"):
        agent = psutil.Process(grid.find_agent(cluster).pid).cpu_times()
        times["agents"] += agent.user + agent.system
        manager = psutil.Process(grid.find_resource_manager(cluster).pid).cpu_times()
        times["managers"] += manager.user + manager.system
        times["runners"] += manager.children_user + manager.children_system
    return times


def run_jobs(grid: EmbeddedGrid, count: int) -> float:
    """Submit jobs of one node, and return the seconds until all have ended.

    Wait until their runners are reaped, too: only then are their processor times known.
    """
    began = time.monotonic()
    body = job_body(0) | {"request": {"type": "flexible", "total_size": 1}, "command": ["true"]}
    send_all(grid, "/api/v1/jobs", [json.dumps(body).encode()] * count)

    def is_over() -> bool:
        health = grid.http.get("/healthz").json()
        time.sleep(0.1)
        return not health["queued"] + health["active"]

    wait_until(is_over, "all jobs to end", 600)
    seconds = time.monotonic() - began
    wait_until(lambda: not grid.list_all_runners(), "all runners to be reaped", 60)
    return seconds


def measure(source: str) -> dict[str, float]:
    """Start a grid with the code of a checkout, and return the milliseconds for a job by kind of process."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "koala.yaml")
        config.write_text(CONFIG)
        grid = EmbeddedGrid(Path(folder, "data"), KOALA_CONFIG=str(config), **environment_of(source)).start()
        try:
            run_jobs(grid, WARM_UP_JOBS)
            before = processor_times(grid)
            seconds = run_jobs(grid, JOBS)
            after = processor_times(grid)
        finally:
            grid.stop_daemon()
    figures = {kind: (after[kind] - before[kind]) / JOBS * 1000 for kind in after}
    return figures | {"total": sum(figures.values()), "jobs_per_s": JOBS / seconds}


def main() -> None:
    """Measure checkouts in turns, and print one line of JSON for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="*", default=[""], help="checkouts to compare; default: this one")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    for _ in range(options.rounds):
        for source in options.sources:
            figures = {name: round(value, 2) for name, value in measure(source).items()}
            json.dump({"source": source, **figures, "load": psutil.getloadavg()[0]}, sys.stdout)
            print(flush=True)


if __name__ == "__main__":
    main()
