"""Experiments that run their simulations as one job over all clusters of the testbed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.experiment import Result
from experiments.registry import find_experiment
from experiments.results import StoredResults, load_results
from experiments.runs import RunOptions, run_experiments
from experiments.traces import Traces
from experiments.workers import start_workers
from tests.grid.grid import NodeProcess, wait_until
from tests.grid.testbed import Testbed

NAME = "lerida-2008-fig-5"
SWEEP = [
    *["env", "PYTHONPATH=/opt/experiments", "python", "-m", "mpi4py.futures", "-m", "experiments"],
    *f"run {NAME} --seeds 1 --results results".split(),
]


@pytest.fixture
def bed(testbed: Testbed) -> Iterator[Testbed]:
    yield testbed
    testbed.cancel_all_jobs()
    testbed.wait_until_idle()


def test_sweep_over_clusters_equals_local_sweep_exactly(bed: Testbed, tmp_path: Path) -> None:
    nodes = {f"{cluster}-{number}" for cluster, size in bed.nodes.items() for number in range(1, size + 1)}
    everywhere = {"type": "flexible", "total_size": len(nodes)}
    ident = bed.submit(everywhere, *SWEEP, launcher="openmpi", collect=["results/*.parquet"])
    wait_until(
        lambda: {p.node for p in bed.list_workers(f"{ident}.") if _is_rank(p)} == nodes, "every node to simulate"
    )
    job = bed.wait_for_end(ident)
    assert job["state"] == "succeeded", bed.read_output(ident)
    assert {component["cluster"] for component in job["components"]} == set(bed.nodes)
    fetched = bed.run_koala("fetch", str(ident), "--to", str(tmp_path / "job"))
    assert fetched.returncode == 0, fetched.stderr
    [file] = (tmp_path / "job").glob("*/results/*.parquet")
    request = RunOptions([find_experiment(NAME)], tmp_path / "here", Traces(tmp_path), seeds=1)
    with start_workers(2) as pool:
        [here] = run_experiments(request, pool)
    assert here.stored is not None
    assert _list_exact_values(load_results(file.parent, NAME)) == _list_exact_values(here.stored)
    assert len(here.stored.results) > len(nodes)


def _is_rank(process: NodeProcess) -> bool:
    """Tell whether a process is a rank. ``mpirun`` has the same arguments but is not Python."""
    return "experiments" in process.command and "python" in process.command[0]


def _list_exact_values(stored: StoredResults | None) -> list[tuple[str, str]]:
    """Return drawn parameters and results with exact numbers, without run times."""
    assert stored is not None
    return [_describe_result(result) for result in stored.results]


def _describe_result(result: Result) -> tuple[str, str]:
    return result.cell.key, repr(dict(result.values))
