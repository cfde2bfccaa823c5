"""The cells of docs/notebook.ipynb, in order on an embedded grid, print and show what the notebook has stored.

``WRITE_NOTEBOOK=1`` stores the outputs of the run.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT
from tests.docs.session import normalize_line
from tests.grid.conftest import embedded_grid
from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import MAX_WAIT_S
from tests.needs import MPI, needs

pytestmark = [needs(MPI), pytest.mark.mpi, pytest.mark.grid, pytest.mark.processes]

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
KERNEL = """
import ast, contextlib, io, json, sys
namespace = {"__name__": "__main__"}
sys.path.insert(0, "")
for source in json.load(sys.stdin):
    statements = ast.parse(source).body
    last = statements.pop() if isinstance(statements[-1], ast.Expr) else None
    printed, shown = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(statements, []), "cell", "exec"), namespace)
        shown = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace) if last else None
    data = {} if shown is None else {"text/plain": repr(shown)}
    if hasattr(shown, "_repr_html_"):
        data["text/html"] = shown._repr_html_()
    print(json.dumps([printed.getvalue(), data]))
"""
"""A program that runs cells in one namespace, and prints for each its output and the representations of its value."""


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[EmbeddedGrid]:
    yield from embedded_grid(tmp_path)


def make_outputs(printed: str, data: dict[str, str], number: int) -> list[dict[str, Any]]:
    """Return the outputs of a cell as a notebook stores them."""
    outputs: list[dict[str, Any]] = []
    if printed:
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
    if data:
        lines = {kind: text.splitlines(keepends=True) for kind, text in data.items()}
        outputs.append({"data": lines, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def comparable_text(outputs: list[dict[str, Any]]) -> list[str]:
    """Return the lines of outputs without what differs between runs: numbers, users, positions in pictures."""
    texts = [text for one in outputs for text in (one.get("text"), *one.get("data", {}).values()) if text]
    lines = [line for text in texts for line in "".join(text).splitlines()]
    return [normalize_line(re.sub(r"<svg.*</svg>", "<svg>", line)) for line in lines]


def test_notebook_shows_what_it_has_stored(grid: EmbeddedGrid, tmp_path: Path) -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    ran = subprocess.run(
        [sys.executable, "-c", KERNEL],
        input=json.dumps(["".join(cell["source"]) for cell in cells]),
        env=grid.environment | {"KOALA_URL": grid.url, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=MAX_WAIT_S,
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    shown = [json.loads(line) for line in ran.stdout.splitlines()]
    outputs = [make_outputs(printed, data, number) for number, (printed, data) in enumerate(shown, 1)]
    if "WRITE_NOTEBOOK" in os.environ:
        for number, (cell, new) in enumerate(zip(cells, outputs, strict=True), 1):
            cell["outputs"], cell["execution_count"] = new, number
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for cell, new in zip(cells, outputs, strict=True):
        assert comparable_text(new) == comparable_text(cell["outputs"]), "".join(cell["source"])
    representations = [data.get("text/html", "") for _, data in shown]
    assert sum("<table>" in text for text in representations) > 3
    assert sum("<svg" in text and "succeeded after" in text for text in representations) > 1
