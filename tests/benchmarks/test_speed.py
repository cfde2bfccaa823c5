"""Measure the start-up overhead of a co-allocated MPI job."""

import os
import stat
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.grid.embedded import EmbeddedGrid, close_grid

pytestmark = pytest.mark.nightly

PAIR_COUNT = 10
INIT_PROGRAM = (
    "import time; from mpi4py import MPI; t = MPI.COMM_WORLD.allreduce(time.time(), op=MPI.MAX); "
    "MPI.COMM_WORLD.rank or print('past init', t, flush=True)"
)
ADDRESSES = ["127.0.1.1", "127.0.1.2", "127.0.1.3", "127.0.1.4", "127.0.2.1", "127.0.2.2"]
MPI_SETTINGS = {
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_coll": "^han,sm",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[EmbeddedGrid]:
    config = tmp_path / "koala.yaml"
    config.write_text("clusters: {north: {nodes: 4}, south: {nodes: 4}}\n")
    embedded = EmbeddedGrid(tmp_path / "data", KOALA_CONFIG=str(config)).start()
    yield embedded
    close_grid(embedded)


def parse_init_time(output: str) -> float:
    return float(next(line.split()[2] for line in output.splitlines() if line.startswith("past init")))


def time_bare_mpirun(agent: Path) -> float:
    """Return the seconds from the start of mpirun until all ranks have passed MPI_Init, without koalapy."""
    hosts = ",".join(f"{address}:1" for address in ADDRESSES)
    prte = ["--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "plm_ssh_no_tree_spawn", "1"]
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [str(mpirun), *prte, "--leave-session-attached", "--bind-to", "none", "--host", hosts, "-np", "6"]
    started = time.time()
    result = subprocess.run(
        [*command, sys.executable, "-c", INIT_PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | MPI_SETTINGS,
    )
    return parse_init_time(result.stdout) - started


def time_koala_job(grid: EmbeddedGrid) -> float:
    """Return the seconds from the placement of a job until all ranks have passed MPI_Init."""
    from datetime import datetime

    request = {"type": "flexible", "total_size": 6}
    job = grid.wait_for_end(grid.submit(request, sys.executable, "-c", INIT_PROGRAM, launcher="openmpi"))
    assert job["state"] == "succeeded", job
    return (
        parse_init_time(grid.read_output(job["id"]))
        - datetime.fromisoformat(job["placed_at"].replace("Z", "+00:00")).timestamp()
    )


def test_startup_overhead(grid: EmbeddedGrid, tmp_path: Path, benchmark: Any) -> None:
    """Alternate a bare mpirun and a co-allocated job on the same addresses."""
    agent = tmp_path / "agent.sh"
    agent.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    pairs: list[tuple[float, float]] = []
    time_bare_mpirun(agent), time_koala_job(grid)
    benchmark.pedantic(lambda: pairs.append((time_bare_mpirun(agent), time_koala_job(grid))), rounds=PAIR_COUNT)
    benchmark.extra_info["bare_median_s"] = statistics.median(b for b, _ in pairs)
    benchmark.extra_info["ours_median_s"] = statistics.median(o for _, o in pairs)
    benchmark.extra_info["ratio_median"] = statistics.median(o / b for b, o in pairs)
    print(benchmark.extra_info)
