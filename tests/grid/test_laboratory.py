"""Jobs over two clusters behind firewalls, with daemon, agents and runners in network namespaces."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.grid.grid import wait_until
from tests.grid.laboratory import LaboratoryGrid, laboratory_grid
from tests.grid.namespaces import LABORATORY
from tests.needs import LIBMPI_5, MPI, MPIRUN_5, OPEN_MPI_4, OPEN_MPI_4_PREFIX, needs

pytestmark = [pytest.mark.processes, needs(LABORATORY), needs(MPI), needs(OPEN_MPI_4)]

MPI_SECTIONS = {
    4: {"series": 4, "prefix": str(OPEN_MPI_4_PREFIX)},
    5: {"series": 5, "prefix": str(Path(MPIRUN_5).parents[1])},
}
LIBRARIES = {4: "libmpi.so.40", 5: str(LIBMPI_5)}
EXCHANGE = str(Path(__file__).parents[1] / "relay" / "exchange.py")


def submit_exchange(
    grid: LaboratoryGrid, series: int, *clusters: str, options: tuple[str, ...] = (), **fields: str
) -> int:
    """Submit a program that passes messages between two nodes of each cluster."""
    request = {"type": "fixed", "components": [{"cluster": cluster, "size": 2} for cluster in clusters]}
    command = ["/usr/bin/python3", EXCHANGE, LIBRARIES[series], *options]
    return grid.submit(request, *command, launcher="openmpi", max_restarts=0, **fields)


def count_streams(grid: LaboratoryGrid, ident: int) -> int:
    """Return the number of streams of an ended job that went through the hub."""
    pattern = re.compile(rf"ended at the hub'.* attempt='{ident}\.1\.\w+' streams=(\d+)")
    return int(wait_until(lambda: pattern.search(grid.read_log("daemon")), "the hub to report its streams")[1])


COMBINATIONS = [pytest.param((5, False), id="5"), pytest.param((4, True), id="4-same-addresses")]
"""Series of Open MPI, and whether both clusters have the same addresses."""
NIGHTLY_COMBINATIONS = [
    pytest.param((5, True), id="5-same-addresses", marks=pytest.mark.nightly),
    pytest.param((4, False), id="4", marks=pytest.mark.nightly),
]


@pytest.fixture(scope="module", params=[*COMBINATIONS, *NIGHTLY_COMBINATIONS])
def series_and_grid(request: pytest.FixtureRequest) -> Iterator[tuple[int, LaboratoryGrid]]:
    series, same_addresses = request.param
    with laboratory_grid(MPI_SECTIONS[series], relays=True, same_addresses=same_addresses) as grid:
        yield series, grid


def test_job_within_a_firewalled_cluster_uses_no_relay(series_and_grid: tuple[int, LaboratoryGrid]) -> None:
    series, grid = series_and_grid
    ident = submit_exchange(grid, series, "south")
    job = grid.wait_for_end(ident)
    assert (job["state"], grid.read_output(ident)) == ("succeeded", "ring equal\nend\n"), job
    assert f"attempt='{ident}." not in grid.read_log("daemon")


def test_job_with_direct_links_over_firewalled_clusters_fails_in_preflight(
    series_and_grid: tuple[int, LaboratoryGrid],
) -> None:
    series, grid = series_and_grid
    ident = submit_exchange(grid, series, "north", "south", links="direct")
    job = grid.wait_for_end(ident)
    assert job["state"] == "failed"
    assert "cannot reach node" in job["reason"], job["reason"]


def test_job_over_firewalled_clusters_passes_messages_by_relays(series_and_grid: tuple[int, LaboratoryGrid]) -> None:
    series, grid = series_and_grid
    ident = submit_exchange(grid, series, "north", "south")
    job = grid.wait_for_end(ident)
    assert (job["state"], grid.read_output(ident)) == ("succeeded", "ring equal\nend\n"), job
    assert count_streams(grid, ident) >= 4
    wait_until(lambda: not grid.list_node_processes(), "every process on the nodes to be gone")


@pytest.mark.parametrize("series_and_grid", [COMBINATIONS[0], *NIGHTLY_COMBINATIONS], indirect=True)
@pytest.mark.parametrize(
    ("relay", "words"),
    [
        ("relay-hub", "the hub at 198.51.100.1"),
        ("relay-head-south", r"(south|the head at 10\.\d\.0\.1:8644) is lost"),
        ("node-2", ""),
    ],
)
def test_job_with_a_killed_relay_fails_for_that_reason(
    series_and_grid: tuple[int, LaboratoryGrid], relay: str, words: str
) -> None:
    series, grid = series_and_grid
    ident = submit_exchange(grid, series, "north", "south", options=("--endless",))
    wait_until(lambda: "ring equal" in grid.read_output(ident), "the program to have passed messages")
    grid.kill_relay(relay)
    job = grid.wait_for_end(ident)
    assert job["state"] == "failed"
    assert "infrastructure" in job["reason"], job
    assert re.search(words, job["reason"]), job
    grid.wait_for_relays()
    wait_until(lambda: not grid.list_node_processes(), "every process on the nodes to be gone")
