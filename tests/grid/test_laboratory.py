"""Jobs over two clusters behind firewalls, with daemon, agents and runners in network namespaces."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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


def run_exchange(grid: LaboratoryGrid, series: int, *clusters: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """Pass messages between two nodes of each cluster, and return the ended job and its output."""
    request = {"type": "fixed", "components": [{"cluster": cluster, "size": 2} for cluster in clusters]}
    command = ["/usr/bin/python3", EXCHANGE, LIBRARIES[series]]
    ident = grid.submit(request, *command, launcher="openmpi", max_restarts=0, **fields)
    job = grid.wait_for_end(ident)
    return job, grid.read_output(ident)


@pytest.fixture(scope="module", params=[(5, False), (4, True)], ids=["5", "4-same-addresses"])
def series_and_grid(request: pytest.FixtureRequest) -> Iterator[tuple[int, LaboratoryGrid]]:
    series, same_addresses = request.param
    with laboratory_grid(MPI_SECTIONS[series], same_addresses=same_addresses) as grid:
        yield series, grid


def test_job_within_a_firewalled_cluster_passes_messages(series_and_grid: tuple[int, LaboratoryGrid]) -> None:
    series, grid = series_and_grid
    for cluster in ("north", "south"):
        job, output = run_exchange(grid, series, cluster)
        assert (job["state"], output) == ("succeeded", "ring equal\nend\n"), job


def test_job_over_firewalled_clusters_fails_in_preflight(series_and_grid: tuple[int, LaboratoryGrid]) -> None:
    series, grid = series_and_grid
    job, _ = run_exchange(grid, series, "north", "south")
    assert job["state"] == "failed"
    assert "cannot reach node" in job["reason"], job["reason"]
