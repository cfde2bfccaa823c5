"""The recipes of docs/workflows.md on embedded clusters, where the tools are installed.

``WORKFLOW_PYTHON`` names the interpreter of an environment with the tools; by default it is that of the tests.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.grid.conftest import embedded_grid
from tests.grid.embedded import EmbeddedGrid

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "workflows.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(STATUS_SCRIPT,) = re.findall(r"```text\n(#!/bin/sh.*?)```", PAGE, re.DOTALL)
(SNAKEMAKE,) = re.findall(r"```text\n(snakemake .*?)```", PAGE, re.DOTALL)
PYTHON = os.environ.get("WORKFLOW_PYTHON", sys.executable)
RULES = """
rule all:
    input: expand("out/{name}.txt", name=["a", "b"])

rule count:
    output: "out/{name}.txt"
    shell: "echo {wildcards.name} on $KOALA_CLUSTER > {output}"
"""
FAILING_RULE = """
rule fail:
    shell: "exit 3"
"""
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedGrid]:
    yield from embedded_grid(tmp_path_factory.mktemp("workflows"))


def run(embedded: EmbeddedGrid, folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a folder, in the environment of the tools. Skip the test without the tool."""
    folders = [str(Path(PYTHON).parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = embedded.environment | {"KOALA_URL": embedded.url, "PATH": ":".join(folders), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


def require(module: str) -> None:
    if subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True).returncode:
        pytest.skip(f"{module} is not installed")


@pytest.mark.parametrize(("rules", "code"), [(RULES, 0), (FAILING_RULE, 1)])
def test_snakemake_runs_rules_as_jobs(embedded: EmbeddedGrid, tmp_path: Path, rules: str, code: int) -> None:
    require("snakemake_executor_plugin_cluster_generic")
    (tmp_path / "Snakefile").write_text(rules)
    (tmp_path / "koala-status").write_text(STATUS_SCRIPT)
    (tmp_path / "koala-status").chmod(0o755)
    ran = run(embedded, tmp_path, "sh", "-c", SNAKEMAKE)
    assert ran.returncode == code, ran.stderr
    text = "".join(path.read_text() for path in sorted(tmp_path.glob("out/*")))
    assert re.sub("north|south", "CLUSTER", text) == ("" if code else "a on CLUSTER\nb on CLUSTER\n")


@pytest.mark.parametrize("module", ["dask_jobqueue", "parsl"])
def test_program_of_page_computes_on_workers_of_the_grid(embedded: EmbeddedGrid, tmp_path: Path, module: str) -> None:
    require(module)
    (program,) = (text for text in PROGRAMS if f"from {module}" in text)
    (tmp_path / "program.py").write_text(program)
    ran = run(embedded, tmp_path, PYTHON, "program.py")
    assert (ran.returncode, ran.stdout) == (0, "sum of squares: 328350\n"), ran.stderr
