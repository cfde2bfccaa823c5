"""The cluster `west` of the testbed: Slurm 24.11 with accounts, QOS limits, and 1,000 held jobs of another user."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from uuid import uuid4

import pytest

from tests.grid.test_testbed import fixed_request
from tests.grid.testbed import WEST, Testbed

PORT_SUITE = "tests/agent/lrm/test_port.py -o asyncio_mode=auto -o addopts="


@pytest.fixture
def bed(testbed: Testbed) -> Iterator[Testbed]:
    with testbed.open_west():
        yield testbed


def test_one_mpi_job_spans_slurm_22_and_24_and_grid_engine(bed: Testbed) -> None:
    head = bed.west_head
    assert head.run("sinfo", "--version").startswith("slurm-wlm 24.11")
    assert bed.heads["north"].run("sinfo", "--version").startswith("slurm-wlm 22.05")
    assert len(head.run("squeue", "-h", "-u", "carol", "-o", "%i").split()) == 1000
    job = bed.wait_for_end(
        bed.submit(
            bed.request_on_managers(), "python", "-m", "koalapy.apps.poisson", "--grid", "64", launcher="openmpi"
        )
    )
    output = bed.read_output(job["id"])
    assert (job["state"], job["exit_code"], job["restarts"]) == ("succeeded", 0, 0), output
    assert "passed" in output
    hosts = {line.split(" on ")[1].split()[0] for line in output.splitlines() if line.startswith("rank ")}
    assert Counter(host.split("/")[0] for host in hosts) == {"north": 2, "east": 2, WEST: 2}
    assert bed.get_cluster(WEST)["errors"] == 0


def test_relayed_links_carry_one_job_over_slurm_22_and_24_and_grid_engine(bed: Testbed) -> None:
    """Its nodes reach each other directly as well, and their networks overlap."""
    command = "python", "-m", "koalapy.apps.poisson", "--grid", "64"
    job = bed.wait_for_end(bed.submit(bed.request_on_managers(), *command, launcher="openmpi", links="relayed"))
    output = bed.read_output(job["id"])
    assert (job["state"], job["exit_code"], job["restarts"]) == ("succeeded", 0, 0), (job["reason"], output)
    assert "max error 2.2e-05" in output
    timeline = bed.http.get(f"/api/v1/jobs/{job['id']}/timeline").json()["timeline"]
    assert "relayed" in [entry["event"] for entry in timeline]


def test_exit_code_behind_a_full_queue_is_the_programs(bed: Testbed) -> None:
    job = bed.wait_for_end(bed.submit(fixed_request(WEST, 2), "sh", "-c", "exit 7", launcher="processes"))
    assert (job["state"], job["exit_code"]) == ("failed", 7)


def test_job_of_fewer_nodes_than_the_partition_takes_runs_elsewhere(bed: Testbed) -> None:
    job = bed.wait_for_end(
        bed.submit({"type": "nonfixed", "components": [{"size": 1}] * 6}, "true", launcher="processes"), 120
    )
    assert job["state"] == "succeeded", job["reason"]
    assert WEST not in {component["cluster"] for component in job["components"]}
    assert bed.get_cluster(WEST)["errors"] == 0


@pytest.mark.timeout(600)
def test_port_suite_passes_on_slurm_22_and_24_and_grid_engine(bed: Testbed) -> None:
    bed.drain(WEST)
    runs = (("north", "slurm", "batch"), ("east", "sge", "batch"), (WEST, "slurm", "single"))
    with ThreadPoolExecutor() as pool:
        for output in pool.map(partial(run_port_suite, bed), *zip(*runs, strict=True)):
            assert output.endswith("ended with 0\n"), output
            assert "skipped" not in output


def run_port_suite(bed: Testbed, cluster: str, kind: str, partition: str) -> str:
    folder = f"/shared/{cluster}/home/koala/port-{uuid4().hex[:8]}"
    pytest_there = ["/opt/koala/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=300"]
    environment = f"KOALA_PORT_KIND={kind} KOALA_PORT_PARTITION={partition}"
    script = f"cd /src && {environment} {' '.join(pytest_there)} --basetemp={folder} {PORT_SUITE}"
    return bed.containers[f"{cluster}-head"].shell(script + " 2>&1; echo ended with $?", user="koala")
