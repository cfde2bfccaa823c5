"""Recipes for distributed frameworks over two clusters, each where the framework is installed."""

import re
from pathlib import Path

import pytest

from tests.grid.grid import Grid

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
RECIPES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
VARIABLES = (
    *("KOALA_RANK", "KOALA_SIZE", "KOALA_LOCAL_RANK", "KOALA_LOCAL_SIZE", "KOALA_NODE_INDEX", "KOALA_NODES"),
    *("KOALA_HOST", "KOALA_HOSTS", "KOALA_HEAD_HOST", "KOALA_HEAD_PORT"),
    *("KOALA_CLUSTER", "KOALA_CLUSTER_INDEX", "KOALA_CLUSTER_LIST"),
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("multiprocessing", "sum of {size} processes on {clusters}: {sum}"),
        pytest.param("distributed", "sum of squares: 328350", marks=pytest.mark.nightly),
        pytest.param("jax", "[{size}.]", marks=pytest.mark.nightly),
    ],
)
def test_recipe_of_page_runs_on_every_resource_manager(wide_grid: Grid, module: str, expected: str) -> None:
    pytest.importorskip(module)
    (recipe,) = (program for program in RECIPES if re.search(rf"^(?:import|from) {module}\b", program, re.MULTILINE))
    ident = wide_grid.submit(wide_grid.request_on_managers(), wide_grid.python, "-c", recipe, launcher="processes")
    assert wide_grid.wait_for_end(ident)["state"] == "succeeded", wide_grid.read_output(ident)
    size = 2 * len(wide_grid.managers)
    values = {"size": size, "clusters": ",".join(wide_grid.managers), "sum": sum(range(size))}
    assert expected.format(**values) in wide_grid.read_output(ident)


def test_processes_learn_the_same_of_each_other_on_every_resource_manager(wide_grid: Grid) -> None:
    program = f"import os; print('|'.join(os.environ[name] for name in {VARIABLES}) + chr(10), end='', flush=True)"
    ident = wide_grid.submit(wide_grid.request_on_managers(), wide_grid.python, "-c", program, launcher="processes")
    assert wide_grid.wait_for_end(ident)["state"] == "succeeded", wide_grid.read_output(ident)
    lines = wide_grid.read_output(ident).splitlines()
    processes = sorted((dict(zip(VARIABLES, line.split("|"), strict=True)) for line in lines), key=lambda p: p["RANK"])
    hosts, clusters = [process["KOALA_HOST"] for process in processes], list(wide_grid.managers)
    size, port = 2 * len(clusters), processes[0]["KOALA_HEAD_PORT"]
    assert len(set(hosts)) == size
    assert 0 < int(port) < 65536
    for rank, process in enumerate(processes):
        common = {"KOALA_SIZE": size, "WORLD_SIZE": size, "KOALA_NODES": size, "KOALA_HOSTS": ",".join(hosts)}
        head = {"KOALA_HEAD_HOST": hosts[0], "MASTER_ADDR": hosts[0], "KOALA_HEAD_PORT": port, "MASTER_PORT": port}
        cluster = {"KOALA_CLUSTER_LIST": ",".join(clusters), "KOALA_CLUSTER_INDEX": rank // 2}
        of_rank = {"KOALA_RANK": rank, "RANK": rank, "KOALA_NODE_INDEX": rank, "KOALA_CLUSTER": clusters[rank // 2]}
        local = {"KOALA_LOCAL_RANK": 0, "LOCAL_RANK": 0, "KOALA_LOCAL_SIZE": 1, "KOALA_HOST": hosts[rank]}
        expected = common | head | cluster | of_rank | local
        assert process == {name: str(value) for name, value in expected.items()}
