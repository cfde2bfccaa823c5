"""Measure on the testbed the start-up of co-allocated jobs, jobs on one cluster, and idle agents."""

import os
import shlex
import statistics
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.benchmarks.test_speed import INIT_PROGRAM, parse_init_time
from tests.grid.containers import Container
from tests.grid.grid import wait_until
from tests.grid.testbed import Testbed

PAIR_COUNT = 10
IDLE_S = 60.0
PLACES = {"slurm + slurm": [("north", 2), ("south", 1)], "slurm + sge": [("north", 2), ("east", 1)]}


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    bed = Testbed()
    bed.start()
    yield bed
    bed.wait_until_idle()
    bed.close()


def time_bare_job(bed: Testbed) -> float:
    """Return the seconds from sbatch until 3 ranks on north have passed MPI_Init."""
    head = bed.heads["north"]
    home = "/shared/north/home/koala"
    mpirun = "mpirun -np 3 --map-by node --bind-to none"
    script = f"#!/bin/sh\nPATH=/opt/koala/bin:$PATH {mpirun} python -c {shlex.quote(INIT_PROGRAM)}\n"
    head.run("sh", "-c", f'printf %s "$0" > {home}/bare.sh', script, user="koala")
    # Use the same network as koalapy's jobs.
    settings = ["env", "OMPI_MCA_btl_tcp_if_include=198.18.0.0/24", "PRTE_MCA_prte_if_include=198.18.0.0/24"]
    started = time.time()
    head.run(
        *settings,
        "sbatch",
        "--wait",
        "-N3",
        "--exclusive",
        f"--output={home}/bare.out",
        f"{home}/bare.sh",
        user="koala",
    )
    return parse_init_time(head.run("cat", f"{home}/bare.out")) - started


def fixed_request(places: list[tuple[str, int]]) -> dict[str, Any]:
    return {"type": "fixed", "components": [{"cluster": cluster, "size": size} for cluster, size in places]}


def time_koala_job(bed: Testbed, places: list[tuple[str, int]]) -> float:
    """Return the seconds from submission until 3 ranks on two clusters have passed MPI_Init."""
    job = bed.wait_for_end(bed.submit(fixed_request(places), "python", "-c", INIT_PROGRAM, launcher="openmpi"))
    assert job["state"] == "succeeded", job
    submitted = datetime.fromisoformat(job["submitted_at"].replace("Z", "+00:00")).timestamp()
    return parse_init_time(bed.read_output(job["id"])) - submitted


@pytest.mark.parametrize("name", PLACES)
def test_startup_overhead(bed: Testbed, name: str, benchmark: Any) -> None:
    """Alternate a bare mpirun under sbatch and a co-allocated job of the same size."""
    pairs: list[tuple[float, float]] = []

    def pair() -> None:
        bed.wait_until_idle()
        first = time_bare_job(bed)
        bed.wait_until_idle()
        pairs.append((first, time_koala_job(bed, PLACES[name])))

    pair()
    pairs.clear()
    benchmark.pedantic(pair, rounds=PAIR_COUNT)
    benchmark.extra_info["bare_median_s"] = statistics.median(b for b, _ in pairs)
    benchmark.extra_info["ours_median_s"] = statistics.median(o for _, o in pairs)
    benchmark.extra_info["ratio_of_medians"] = (
        benchmark.extra_info["ours_median_s"] / benchmark.extra_info["bare_median_s"]
    )
    print(name, benchmark.extra_info)


def time_direct_job(bed: Testbed, cluster: str) -> tuple[float, float]:
    """Return the seconds until the program and the command of a job have ended, without koalapy.

    The job is an mpirun of 3 ranks on Slurm. On Grid Engine, which has no Open MPI here, it is ``qrsh`` to each node.
    """
    head, home = bed.heads[cluster], f"/shared/{cluster}/home/koala"
    if cluster == "east":
        program = (
            "while read -r host _; do qrsh -inherit -nostdin $host /bin/sleep 1 & done <$PE_HOSTFILE; wait; "
            f"date +%s.%N >{home}/by-hand.out"
        )
        command = ["qsub", "-sync", "y", "-o", "/dev/null", "-j", "y", "-pe", "koala", "6"]
    else:
        mpirun = "PATH=/opt/koala/bin:$PATH mpirun -np 3 --map-by node --bind-to none"
        program = f"{mpirun} python -c {shlex.quote(INIT_PROGRAM)}; date +%s.%N"
        settings = ["env", "OMPI_MCA_btl_tcp_if_include=198.18.0.0/24", "PRTE_MCA_prte_if_include=198.18.0.0/24"]
        command = [*settings, "sbatch", "--wait", "-N3", "--exclusive", f"--output={home}/by-hand.out"]
    head.run("sh", "-c", f'printf %s "$0" > {home}/by-hand.sh', f"#!/bin/sh\n{program}\n", user="koala")
    began = time.time()
    head.run(*command, f"{home}/by-hand.sh", user="koala")
    returned = time.time() - began
    return float(head.run("cat", f"{home}/by-hand.out").split()[-1]) - began, returned


@pytest.mark.parametrize("cluster", ["north", "east"])
def test_time_of_job_on_one_cluster(bed: Testbed, cluster: str, benchmark: Any) -> None:
    """Alternate a job of 3 ranks and one submitted to the resource manager directly, without pauses.

    The agent learns of the nodes that the direct job frees only by polling.
    """
    rounds: list[tuple[float, float, float, float]] = []

    def alternate() -> None:
        ended, returned = time_direct_job(bed, cluster)
        began = time.time()
        ident = bed.submit(fixed_request([(cluster, 3)]), "python", "-c", INIT_PROGRAM, launcher="openmpi")
        job = bed.wait_for_end(ident)
        koala_s = time.time() - began
        assert job["state"] == "succeeded", job
        program = datetime.fromisoformat(job["ended_at"].replace("Z", "+00:00")).timestamp() - began
        rounds.append((ended, returned, program, koala_s))

    bed.wait_until_idle()
    alternate()
    rounds.clear()
    benchmark.pedantic(alternate, rounds=PAIR_COUNT)
    names = ("by_hand_program", "by_hand", "ours_program", "ours")
    medians = {
        f"{name}_median_s": statistics.median(column)
        for name, column in zip(names, zip(*rounds, strict=True), strict=True)
    }
    benchmark.extra_info |= medians
    # sbatch itself polls for the end after 2 s and then after 8 more: the end of its program is the stricter measure.
    benchmark.extra_info["ratio_of_medians"] = medians["ours_median_s"] / medians["by_hand_median_s"]
    benchmark.extra_info["ratio_to_its_program"] = medians["ours_median_s"] / medians["by_hand_program_median_s"]
    print(cluster, benchmark.extra_info, rounds)


@pytest.mark.parametrize("cluster", ["north", "east"])
def test_processor_time_of_idle_agent(bed: Testbed, cluster: str, benchmark: Any) -> None:
    """Measure the processor time of an agent and its children, as a share of a core."""
    head = bed.heads[cluster]
    bed.wait_until_idle()
    agent = int(head.run("cat", "/run/kept/agent"))

    def idle() -> None:
        seconds_before = _read_processor_time(head, agent)
        time.sleep(IDLE_S)
        benchmark.extra_info["share_of_a_core"] = (_read_processor_time(head, agent) - seconds_before) / IDLE_S

    benchmark.pedantic(idle, rounds=1)
    print(cluster, benchmark.extra_info)


def _read_processor_time(head: Container, agent: int) -> float:
    """Return the seconds of processor time of a process, its living children and those that it has waited for."""
    ticks = 0
    for pid, parent, _, _ in head.list_processes():
        if agent in (pid, parent):
            fields = head.run("cat", f"/proc/{pid}/stat", check=False).rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15])) if fields else 0
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("cluster", ["north", "east"])
def test_time_until_drain_is_reported(bed: Testbed, cluster: str, benchmark: Any) -> None:
    """Measure the seconds from the drain of a node until the daemon reports it."""
    head, node = bed.heads[cluster], f"{cluster}-1"
    seconds: list[float] = []

    def change() -> None:
        if cluster == "east":
            head.run("qmod", "-d", f"all.q@{node}", user="sgeadmin")
        else:
            head.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=bench")
        changed = time.monotonic()
        wait_until(lambda: bed.get_cluster(cluster)["down"], "the drain to be reported")
        seconds.append(time.monotonic() - changed)
        if cluster == "east":
            head.run("qmod", "-e", f"all.q@{node}", user="sgeadmin")
        else:
            head.run("scontrol", "update", f"nodename={node}", "state=resume")
        wait_until(lambda: not bed.get_cluster(cluster)["down"], "the node to be up")

    benchmark.pedantic(change, rounds=PAIR_COUNT)
    benchmark.extra_info |= {"median_s": statistics.median(seconds), "max_s": max(seconds)}
    print(cluster, benchmark.extra_info)
