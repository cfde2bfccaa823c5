"""Test the commands of ``python -m experiments``, their output and their errors."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import registry
from experiments.__main__ import main, progress_line
from experiments.runs import Progress
from tests.experiments.toys import Squares, Traced
from tests.experiments.traces import a_trace, swf_line
from tests.needs import MPI, needs


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    experiments = {experiment.name: experiment for experiment in (Squares(), Traced(fails=2))}
    monkeypatch.setattr(registry, "load_experiments", lambda: experiments)
    monkeypatch.setenv("KOALA_TRACES", str(tmp_path))
    monkeypatch.setenv("KOALA_RESULTS", str(tmp_path / "results"))


def test_list_shows_missing_traces(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["list"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "| huang-2007-squares | 2 | 6 | - |" in output
    assert "a-trace (1 missing)" in output
    a_trace(tmp_path, "a-trace", [swf_line(1)])
    main(["list"])
    assert "missing" not in capsys.readouterr().out


def test_run_and_report_of_paper_print_its_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "huang-2007", "--seeds", "3", "--jobs", "1"]) == 1
    out, err = capsys.readouterr()
    assert "| square of 2 |" in out
    assert "huang-2007-traced: it needs a-trace, not found in" in err
    assert main(["report", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["ours"] for row in report["rows"]] == pytest.approx([1.1, 4.1, 9.1])
    assert report["experiments"][0]["repetitions"] == 3
    assert main(["report", "-o", str(tmp_path / "docs")]) == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "docs" / "huang-2007.md").exists()


def test_run_with_failing_cell_names_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a_trace(tmp_path, "a-trace", [swf_line(1)])
    assert main(["run", "huang-2007-traced", "--seeds", "1", "--jobs", "1", "--json"]) == 1
    out, err = capsys.readouterr()
    assert 'cell {"number": 2, "seed": 0} failed: ArithmeticError: it is too large' in err
    assert json.loads(out)["rows"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "report"),
    [
        (("run",), 2, "no experiment is named"),
        (("run", "--all", "huang-2007"), 2, "--all is every experiment"),
        (("run", "nope"), 1, "there is no experiment 'nope'"),
        (("run", "huang-2007", "--results", "/dev/null/x"), 2, "cannot write to /dev/null/x"),
        (("report",), 1, "there are no results in"),
        (("traces", "--traces", "/nowhere"), 1, "there are no traces in /nowhere"),
    ],
)
def test_wrong_usage_prints_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, report: str
) -> None:
    assert main(arguments) == code
    [line] = capsys.readouterr().err.splitlines()
    assert report in line


def test_traces_lists_excluded_jobs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [swf_line(1), "1 2 3", swf_line(2, ran=0), swf_line(3, processors=0)]
    a_trace(tmp_path, "a-trace", lines)
    (tmp_path / "damaged.swf.xz").write_bytes(b"no packed file")
    assert main(["traces", "--malformed"]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "| a-trace | 3 | 128 | 1 | 1 of run time 0, 1 of no known size |" in output
    assert "a-trace.swf.xz line 3 has 3 fields, not 18" in output
    assert "it is damaged" in output


def test_run_with_many_failures_prints_three(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "load_experiments", lambda: {Squares.name: Squares([2], fails=2)})
    assert main(["run", "huang-2007", "--seeds", "9", "--jobs", "1"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert "and 6 more cells failed" in lines[-1]


def test_progress_line_shows_bar_and_remaining_time() -> None:
    line = progress_line(Progress(cells=400, completed=100, running="huang-2007-table-3"))
    assert line.startswith("[######------------------] 100 of 400 simulations, 0:00, huang-2007-table-3")
    assert "left" in progress_line(Progress(cells=400, completed=100, finished=1))


@pytest.mark.processes
@pytest.mark.mpi
@needs(MPI)
def test_run_as_mpi_job_gives_the_same_results(tmp_path: Path) -> None:
    lines = [swf_line(number, queue=number % 5 + 1, ran=number / 3, processors=number) for number in range(1, 20)]
    a_trace(tmp_path, "SDSC-SP2-1998-huang56490", lines)
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    assert mpirun is not None
    ranks = [mpirun, "--allow-run-as-root", "--oversubscribe", "-np", "3", sys.executable, "-m", "mpi4py.futures"]
    arguments = ["-m", "experiments", "run", "huang-2007-table-1", "--traces", str(tmp_path), "--json", "--results"]
    report = []
    for name, command in (("ranks", ranks), ("processes", [sys.executable])):
        completed = subprocess.run(
            [*command, *arguments, str(tmp_path / name)], capture_output=True, text=True, timeout=300, check=True
        )
        report.append(json.loads(completed.stdout)["rows"])
    assert report[0] == report[1]
    assert len(report[0]) == 25
