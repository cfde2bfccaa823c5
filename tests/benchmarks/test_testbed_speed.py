"""On the testbed: start-up of a co-allocated MPI job against a bare single-cluster one; what an idle agent costs."""

import os
import shlex
import statistics
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.benchmarks.test_speed import PAST_INIT, said
from tests.grid.containers import Container
from tests.grid.grid import wait_until
from tests.grid.testbed import Testbed

PAIRS = 10
IDLE_FOR = 60.0
PLACES = {"slurm + slurm": [("north", 2), ("south", 1)], "slurm + sge": [("north", 2), ("east", 1)]}


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    bed = Testbed()
    bed.start()
    yield bed
    bed.wait_until_idle()
    bed.close()


def bare(bed: Testbed) -> float:
    """Seconds from sbatch until all of 3 ranks are past MPI_Init, on north alone."""
    head = bed.heads["north"]
    home = "/shared/north/home/koala"
    mpirun = "mpirun -np 3 --map-by node --bind-to none"
    script = f"#!/bin/sh\nPATH=/opt/koala/bin:$PATH {mpirun} python -c {shlex.quote(PAST_INIT)}\n"
    head.run("sh", "-c", f'printf %s "$0" > {home}/bare.sh', script, user="koala")
    # The same network as ours, so that both speak alike.
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
    return said(head.run("cat", f"{home}/bare.out")) - started


def request_of(places: list[tuple[str, int]]) -> dict[str, Any]:
    return {"type": "fixed", "components": [{"cluster": cluster, "size": size} for cluster, size in places]}


def ours(bed: Testbed, places: list[tuple[str, int]]) -> float:
    """Seconds from submitted until all of 3 ranks are past MPI_Init, over two clusters."""
    job = bed.wait_for_end(bed.submit(request_of(places), "python", "-c", PAST_INIT, launcher="openmpi"))
    assert job["state"] == "succeeded", job
    submitted = datetime.fromisoformat(job["submitted_at"].replace("Z", "+00:00")).timestamp()
    return said(bed.read_output(job["id"])) - submitted


@pytest.mark.parametrize("name", PLACES)
def test_startup_overhead(bed: Testbed, name: str, benchmark: Any) -> None:
    """Pairs of a bare sbatch-ed mpirun and a co-allocated job of the same size, side by side."""
    pairs: list[tuple[float, float]] = []

    def pair() -> None:
        bed.wait_until_idle()
        first = bare(bed)
        bed.wait_until_idle()
        pairs.append((first, ours(bed, PLACES[name])))

    pair()
    pairs.clear()
    benchmark.pedantic(pair, rounds=PAIRS)
    benchmark.extra_info["bare_median_s"] = statistics.median(b for b, _ in pairs)
    benchmark.extra_info["ours_median_s"] = statistics.median(o for _, o in pairs)
    benchmark.extra_info["ratio_of_medians"] = (
        benchmark.extra_info["ours_median_s"] / benchmark.extra_info["bare_median_s"]
    )
    print(name, benchmark.extra_info)


def by_hand(bed: Testbed, cluster: str) -> tuple[float, float]:
    """Seconds from the resource manager's own command until its job's program has ended, and until the command has:
    an mpirun of 3 ranks on Slurm, and on Grid Engine, which has no Open MPI of its own here, ``qrsh`` to each node."""
    head, home = bed.heads[cluster], f"/shared/{cluster}/home/koala"
    if cluster == "east":
        program = (
            "while read -r host _; do qrsh -inherit -nostdin $host /bin/sleep 1 & done <$PE_HOSTFILE; wait; "
            f"date +%s.%N >{home}/by-hand.out"
        )
        command = ["qsub", "-sync", "y", "-o", "/dev/null", "-j", "y", "-pe", "koala", "6"]
    else:
        mpirun = "PATH=/opt/koala/bin:$PATH mpirun -np 3 --map-by node --bind-to none"
        program = f"{mpirun} python -c {shlex.quote(PAST_INIT)}; date +%s.%N"
        settings = ["env", "OMPI_MCA_btl_tcp_if_include=198.18.0.0/24", "PRTE_MCA_prte_if_include=198.18.0.0/24"]
        command = [*settings, "sbatch", "--wait", "-N3", "--exclusive", f"--output={home}/by-hand.out"]
    head.run("sh", "-c", f'printf %s "$0" > {home}/by-hand.sh', f"#!/bin/sh\n{program}\n", user="koala")
    began = time.time()
    head.run(*command, f"{home}/by-hand.sh", user="koala")
    returned = time.time() - began
    return float(head.run("cat", f"{home}/by-hand.out").split()[-1]) - began, returned


@pytest.mark.parametrize("cluster", ["north", "east"])
def test_a_job_on_one_cluster(bed: Testbed, cluster: str, benchmark: Any) -> None:
    """A job of 3 ranks from its submission until it is over, against one handed in by hand, by turns and back to back:
    so the agent learns of the nodes that the other has given back only by looking."""
    rounds: list[tuple[float, float, float, float]] = []

    def alternate() -> None:
        ended, returned = by_hand(bed, cluster)
        began = time.time()
        ident = bed.submit(request_of([(cluster, 3)]), "python", "-c", PAST_INIT, launcher="openmpi")
        job = bed.wait_for_end(ident)
        over = time.time() - began
        assert job["state"] == "succeeded", job
        program = datetime.fromisoformat(job["ended_at"].replace("Z", "+00:00")).timestamp() - began
        rounds.append((ended, returned, program, over))

    bed.wait_until_idle()
    alternate()
    rounds.clear()
    benchmark.pedantic(alternate, rounds=PAIRS)
    names = ("by_hand_program", "by_hand", "ours_program", "ours")
    medians = {
        f"{name}_median_s": statistics.median(each) for name, each in zip(names, zip(*rounds, strict=True), strict=True)
    }
    benchmark.extra_info |= medians
    # sbatch itself looks for the end after 2 s and then after 8 more: its program's end is the sterner measure.
    benchmark.extra_info["ratio_of_medians"] = medians["ours_median_s"] / medians["by_hand_median_s"]
    benchmark.extra_info["ratio_to_its_program"] = medians["ours_median_s"] / medians["by_hand_program_median_s"]
    print(cluster, benchmark.extra_info, rounds)


@pytest.mark.parametrize("cluster", ["north", "east"])
def test_an_idle_agent(bed: Testbed, cluster: str, benchmark: Any) -> None:
    """Processor time of an agent and of all that it starts, as a share of a core."""
    head = bed.heads[cluster]
    bed.wait_until_idle()
    agent = int(head.run("cat", "/run/kept/agent"))

    def idle() -> None:
        before = _spent(head, agent)
        time.sleep(IDLE_FOR)
        benchmark.extra_info["share_of_a_core"] = (_spent(head, agent) - before) / IDLE_FOR

    benchmark.pedantic(idle, rounds=1)
    print(cluster, benchmark.extra_info)


def _spent(head: Container, agent: int) -> float:
    """Seconds of processor time of a process, its living children and those it has waited for."""
    ticks = 0
    for pid, parent, _, _ in head.list_processes():
        if agent in (pid, parent):
            fields = head.run("cat", f"/proc/{pid}/stat", check=False).rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15])) if fields else 0
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("cluster", ["north", "east"])
def test_a_change_in_the_resource_manager_is_told(bed: Testbed, cluster: str, benchmark: Any) -> None:
    """Seconds from a drain until the daemon knows."""
    head, node = bed.heads[cluster], f"{cluster}-1"
    seconds: list[float] = []

    def change() -> None:
        if cluster == "east":
            head.run("qmod", "-d", f"all.q@{node}", user="sgeadmin")
        else:
            head.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=bench")
        changed = time.monotonic()
        wait_until(lambda: bed.get_cluster(cluster)["down"], "the drain to be told")
        seconds.append(time.monotonic() - changed)
        if cluster == "east":
            head.run("qmod", "-e", f"all.q@{node}", user="sgeadmin")
        else:
            head.run("scontrol", "update", f"nodename={node}", "state=resume")
        wait_until(lambda: not bed.get_cluster(cluster)["down"], "the node to be back")

    benchmark.pedantic(change, rounds=PAIRS)
    benchmark.extra_info |= {"median_s": statistics.median(seconds), "max_s": max(seconds)}
    print(cluster, benchmark.extra_info)
