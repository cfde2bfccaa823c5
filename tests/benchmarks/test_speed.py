"""Start-up overhead of a co-allocated MPI job, and jobs per second through the whole of an embedded grid."""

import asyncio
import os
import stat
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.grid.embedded import EmbeddedGrid, close_grid

pytestmark = pytest.mark.nightly

PAIRS = 10
JOBS = 1000
PAST_INIT = (
    "import time; from mpi4py import MPI; t = MPI.COMM_WORLD.allreduce(time.time(), op=MPI.MAX); "
    "MPI.COMM_WORLD.rank or print('past init', t, flush=True)"
)
ADDRESSES = ["127.0.1.1", "127.0.1.2", "127.0.1.3", "127.0.1.4", "127.0.2.1", "127.0.2.2"]
EMBEDDED = {
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_coll": "^han,sm",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@pytest.fixture
def grid(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedGrid]:
    """A grid of 2 x N nodes."""
    config = tmp_path / "koala.yaml"
    nodes = request.param
    config.write_text(f"clusters: {{north: {{nodes: {nodes}}}, south: {{nodes: {nodes}}}}}\n")
    found = EmbeddedGrid(tmp_path / "data", KOALA_CONFIG=str(config)).start()
    yield found
    close_grid(found)


def said(output: str) -> float:
    return float(next(line.split()[2] for line in output.splitlines() if line.startswith("past init")))


def bare(agent: Path) -> float:
    """Seconds from the start of mpirun until all ranks are past MPI_Init, with nothing of ours in between."""
    hosts = ",".join(f"{address}:1" for address in ADDRESSES)
    prte = ["--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "plm_ssh_no_tree_spawn", "1"]
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [str(mpirun), *prte, "--leave-session-attached", "--bind-to", "none", "--host", hosts, "-np", "6"]
    started = time.time()
    done = subprocess.run(
        [*command, sys.executable, "-c", PAST_INIT],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | EMBEDDED,
    )
    return said(done.stdout) - started


def ours(grid: EmbeddedGrid) -> float:
    """Seconds from placed until all ranks are past MPI_Init."""
    from datetime import datetime

    request = {"type": "flexible", "total_size": 6}
    job = grid.wait_for_end(grid.submit(request, sys.executable, "-c", PAST_INIT, launcher="openmpi"))
    assert job["state"] == "succeeded", job
    return (
        said(grid.read_output(job["id"])) - datetime.fromisoformat(job["placed_at"].replace("Z", "+00:00")).timestamp()
    )


@pytest.mark.parametrize("grid", [4], indirect=True)
def test_startup_overhead(grid: EmbeddedGrid, tmp_path: Path, benchmark: Any) -> None:
    """Pairs of a bare mpirun and a co-allocated job, side by side on the same addresses."""
    agent = tmp_path / "agent.sh"
    agent.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    pairs: list[tuple[float, float]] = []
    bare(agent), ours(grid)
    benchmark.pedantic(lambda: pairs.append((bare(agent), ours(grid))), rounds=PAIRS)
    benchmark.extra_info["bare_median_s"] = statistics.median(b for b, _ in pairs)
    benchmark.extra_info["ours_median_s"] = statistics.median(o for _, o in pairs)
    benchmark.extra_info["ratio_median"] = statistics.median(o / b for b, o in pairs)
    print(benchmark.extra_info)


@pytest.mark.parametrize("grid", [32], indirect=True)
def test_throughput(grid: EmbeddedGrid, benchmark: Any) -> None:
    """Many one-node jobs through REST, until the last one is over."""
    benchmark.pedantic(lambda: asyncio.run(submit_all(grid)), rounds=1)
    assert grid.daemon is not None
    benchmark.extra_info["jobs_per_second"] = JOBS / benchmark.stats.stats.total
    benchmark.extra_info["daemon_rss_mb"] = psutil.Process(grid.daemon.pid).memory_info().rss / 1e6
    print(benchmark.extra_info)


async def submit_all(grid: EmbeddedGrid) -> None:
    body = {"request": {"type": "flexible", "total_size": 1}, "command": ["true"], "launcher": "processes"}
    at_once = asyncio.Semaphore(8)
    async with httpx2.AsyncClient(base_url=grid.url, headers=grid.http.headers, timeout=120) as http:

        async def one() -> int:
            async with at_once:
                answer = await http.post("/api/v1/jobs", json=body)
                return int(answer.json()["id"])

        idents = await asyncio.gather(*(one() for _ in range(JOBS)))
        while (health := (await http.get("/healthz")).json())["queued"] + health["active"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        page = (await http.get("/api/v1/jobs", params={"state": "succeeded", "limit": 1000})).json()["jobs"]
        assert {job["id"] for job in page} == set(idents)
