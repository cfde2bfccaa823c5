"""Recipes for distributed frameworks over two clusters, each where the framework is installed."""

import re
from pathlib import Path

import pytest

from tests.grid.grid import Grid

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
RECIPES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
TWO_CLUSTERS = {"type": "fixed", "components": [{"size": 1, "cluster": "north"}, {"size": 2, "cluster": "south"}]}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("multiprocessing", "sum of 3 processes on north,south: 3"),
        pytest.param("distributed", "sum of squares: 328350", marks=pytest.mark.nightly),
        pytest.param("jax", "[3.]", marks=pytest.mark.nightly),
    ],
)
def test_recipe_of_page_runs_over_two_clusters(grid: Grid, module: str, expected: str) -> None:
    pytest.importorskip(module)
    (recipe,) = (program for program in RECIPES if re.search(rf"^(?:import|from) {module}\b", program, re.MULTILINE))
    ident = grid.submit(TWO_CLUSTERS, grid.python, "-c", recipe, launcher="processes")
    assert grid.wait_for_end(ident)["state"] == "succeeded", grid.read_output(ident)
    assert expected in grid.read_output(ident)
