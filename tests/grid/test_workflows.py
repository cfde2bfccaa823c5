"""The recipes of docs/workflows.md on embedded clusters, where the tools are installed.

``WORKFLOW_PYTHON`` names the interpreter of an environment with the tools; by default it is that of the tests.
"""

import os
import re
import shutil
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
(MPI_RULE,) = re.findall(r"```text\n(rule solve:.*?)```", PAGE, re.DOTALL)
(PARALLEL,) = re.findall(r"```text\n(parallel .*?)```", PAGE, re.DOTALL)
(TORCHRUN,) = re.findall(
    r"```text\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8"), re.DOTALL
)
(PARALLEL_SCRIPT,) = re.findall(r"```text\n(#!/bin/bash\n#SBATCH .*?)```", PAGE, re.DOTALL)
PYTHON = os.environ.get("WORKFLOW_PYTHON", sys.executable)
RULES = """
rule all:
    input: "out/solution.txt"

rule simulate:
    output: "out/{case}.txt"
    shell: "echo {wildcards.case} on $KOALA_CLUSTER > {output}"

""" + MPI_RULE.replace("./solve", f"{sys.executable} -m koalapy.apps.prime")
FAILING_RULE = """
rule fail:
    shell: "exit 3"
"""
TRAINING = """
import os
import torch
from torch import distributed

distributed.init_process_group("gloo")
ranks = torch.tensor([distributed.get_rank()])
distributed.all_reduce(ranks)
print(f"sum {ranks.item()} on {os.environ['KOALA_CLUSTER']}")
distributed.destroy_process_group()
"""
SUMS = "sum of squares: 328350\n"
PRINTED = {"dask_jobqueue": SUMS, "parsl": SUMS, "psij": "COMPLETED 0\nFAILED 3\nCANCELED None\n"}
"""By module: what the program of the page prints."""
TIMEOUT_S = 240


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


@pytest.mark.mpi
@pytest.mark.parametrize("cases", [2, pytest.param(28, marks=pytest.mark.nightly)])
def test_snakemake_runs_rules_as_jobs_and_one_over_two_clusters(
    embedded: EmbeddedGrid, tmp_path: Path, cases: int
) -> None:
    ran = run_snakemake(embedded, tmp_path, RULES.replace("range(28)", f"range({cases})"))
    assert ran.returncode == 0, ran.stderr
    assert f"{cases + 2} of {cases + 2} steps (100%) done" in ran.stderr
    texts = [(tmp_path / "out" / f"{case}.txt").read_text() for case in range(cases)]
    assert [re.sub("north|south", "CLUSTER", text) for text in texts] == [f"{n} on CLUSTER\n" for n in range(cases)]
    clusters = re.findall(r"^rank \d+ on (\w+)/", (tmp_path / "out" / "solution.txt").read_text(), re.MULTILINE)
    assert len(clusters) == 6
    assert set(clusters) == {"north", "south"}


def test_snakemake_fails_with_a_failed_job(embedded: EmbeddedGrid, tmp_path: Path) -> None:
    assert run_snakemake(embedded, tmp_path, FAILING_RULE).returncode == 1


def run_snakemake(embedded: EmbeddedGrid, folder: Path, rules: str) -> "subprocess.CompletedProcess[str]":
    require("snakemake_executor_plugin_cluster_generic")
    (folder / "Snakefile").write_text(rules)
    (folder / "koala-status").write_text(STATUS_SCRIPT)
    (folder / "koala-status").chmod(0o755)
    return run(embedded, folder, "sh", "-c", SNAKEMAKE)


def test_parallel_runs_a_job_for_each_argument(embedded: EmbeddedGrid, tmp_path: Path) -> None:
    require_parallel(tmp_path, '[ "$1" != 3 ] || exit 4; echo "case $1"')
    ran = run(embedded, tmp_path, "sh", "-c", PARALLEL)
    assert (ran.returncode, sorted(ran.stdout.splitlines())) == (1, [f"case {n}" for n in (1, 2, 4, 5)]), ran.stderr
    codes = [line.split("\t")[6] for line in (tmp_path / "runs.log").read_text().splitlines()[1:]]
    assert sorted(codes) == ["0", "0", "0", "0", "4"]


@pytest.mark.mpi
def test_parallel_in_a_translated_script_fills_all_nodes(embedded: EmbeddedGrid, tmp_path: Path) -> None:
    require_parallel(tmp_path, "sleep 2; echo case $1 on $KOALA_HOST")
    (tmp_path / "job.sh").write_text(PARALLEL_SCRIPT)
    ran = run(embedded, tmp_path, "koala", "submit", "--translate", "--wait", "--stage", "sim", "job.sh")
    assert ran.returncode == 0, ran.stderr
    places = dict(re.findall(r"^case (\d) on (\S+)$", ran.stdout, re.MULTILINE))
    assert sorted(places) == ["1", "2", "3", "4", "5", "6"]
    assert len(set(places.values())) == 6


def require_parallel(folder: Path, program: str) -> None:
    """Write the program ``sim``. Skip the test without GNU parallel."""
    if shutil.which("parallel") is None:
        pytest.skip("GNU parallel is not installed")
    (folder / "sim").write_text(f"#!/bin/sh\n{program}\n")
    (folder / "sim").chmod(0o755)


@pytest.mark.parametrize("module", PRINTED)
def test_program_of_page_computes_on_the_grid(embedded: EmbeddedGrid, tmp_path: Path, module: str) -> None:
    require(module)
    (program,) = (text for text in PROGRAMS if f"from {module}" in text)
    (tmp_path / "program.py").write_text(program)
    ran = run(embedded, tmp_path, PYTHON, "program.py")
    assert (ran.returncode, ran.stdout) == (0, PRINTED[module]), ran.stderr


@pytest.mark.nightly
@pytest.mark.mpi
def test_torchrun_in_a_translated_script_spans_clusters(embedded: EmbeddedGrid, tmp_path: Path) -> None:
    require("torch")
    (tmp_path / "job.sh").write_text(TORCHRUN)
    (tmp_path / "train.py").write_text(TRAINING)
    options = [
        "--fixed",
        "north:1,south:1",
        "--export",
        "PATH",
        "--env",
        "GLOO_SOCKET_IFNAME=lo",
        "--stage",
        "train.py",
    ]
    ran = run(embedded, tmp_path, "koala", "submit", "--translate", "--wait", *options, "job.sh")
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert sorted(re.findall(r"sum \d+ on \w+", ran.stdout)) == ["sum 6 on north"] * 2 + ["sum 6 on south"] * 2
