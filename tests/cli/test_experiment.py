"""``koala experiment``: listed, run and told."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from koalapy.cli.experiment import line_of
from koalapy.cli.terminal.completion import OFFERS
from koalapy.simulation.experiments import registry
from koalapy.simulation.experiments.runs import Progress
from tests.cli.conftest import Koala
from tests.needs import MPI, needs
from tests.simulation.experiments.toys import Squares, Traced
from tests.simulation.experiments.traces import a_trace, swf_line


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "experiments", lambda: {one.name: one for one in (Squares(), Traced(fails=2))})
    monkeypatch.setenv("KOALA_TRACES", str(tmp_path))
    monkeypatch.setenv("KOALA_RESULTS", str(tmp_path / "results"))


@pytest.mark.usefixtures("toys")
def test_experiments_are_listed_with_what_they_need(koala: Koala, tmp_path: Path) -> None:
    shown = koala("experiment", "list").out
    assert "huang-2007-squares" in shown
    assert "a-trace (1 missing)" in shown
    a_trace(tmp_path, "a-trace", [swf_line(1)])
    told = {one["name"]: one for one in json.loads(koala("experiment", "list", "--json").out)["experiments"]}
    assert told["huang-2007-squares"]["cells"] == 6
    assert told["huang-2007-traced"]["traces"] == ["a-trace"]
    assert told["huang-2007-traced"]["missing"] == []


@pytest.mark.usefixtures("toys")
def test_experiments_are_run_and_reported(koala: Koala, tmp_path: Path) -> None:
    ran = koala("experiment", "run", "huang-2007", "--seeds", "3", "--jobs", "1")
    assert ran.code == 1
    assert "| square of 2 |" in ran.out
    assert "huang-2007-traced: it needs a-trace, not found in" in ran.err
    told = json.loads(koala("experiment", "report", "--json").out)
    assert [row["ours"] for row in told["rows"]] == pytest.approx([1.1, 4.1, 9.1])
    assert told["experiments"][0]["repetitions"] == 3
    written = koala("experiment", "report", "-o", str(tmp_path / "docs"))
    assert (written.code, written.out) == (0, "")
    assert (tmp_path / "docs" / "huang-2007.md").exists()


@pytest.mark.usefixtures("toys")
def test_a_failing_cell_is_told(koala: Koala, tmp_path: Path) -> None:
    a_trace(tmp_path, "a-trace", [swf_line(1)])
    ran = koala("experiment", "run", "huang-2007-traced", "--seeds", "1", "--jobs", "1", "--json")
    assert ran.code == 1
    assert 'cell {"number": 2, "seed": 0} failed: ArithmeticError: it is too large' in ran.err
    assert json.loads(ran.out)["rows"] == []


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("run",), 2, "which experiments?"),
        (("run", "--all", "huang-2007"), 2, "--all is every experiment"),
        (("run", "nope"), 3, "there is no experiment 'nope'"),
        (("run", "huang-2007", "--seeds", "0"), 2, "--seeds"),
        (("run", "huang-2007", "--results", "/dev/null/x"), 2, "cannot write to /dev/null/x"),
        (("report",), 3, "there are no results in"),
        (("traces", "--traces", "/nowhere"), 3, "there are no traces in /nowhere"),
        (("report", "nope"), 3, "there is no experiment 'nope'"),
    ],
)
def test_what_cannot_be_is_one_line(koala: Koala, words: tuple[str, ...], code: int, told: str) -> None:
    ended = koala("experiment", *words)
    assert ended.code == code
    assert told in ended.err
    assert len(ended.err.splitlines()) == 1


def test_what_is_left_out_of_traces_is_told(koala: Koala, tmp_path: Path) -> None:
    lines = [swf_line(1), "1 2 3", swf_line(2, ran=0), swf_line(3, processors=0)]
    a_trace(tmp_path, "a-trace", lines)
    (tmp_path / "damaged.swf.xz").write_bytes(b"no packed file")
    shown = koala("experiment", "traces", "--malformed", "--traces", str(tmp_path))
    assert shown.code == 1
    assert "1 of run time 0, 1 of no known size" in shown.out
    assert "a-trace.swf.xz line 3 has 3 fields, not 18" in shown.out
    assert "it is damaged" in shown.out
    told = koala("experiment", "traces", "--json", "--traces", str(tmp_path)).out
    found = {one["name"]: one for one in json.loads(told)["traces"]}
    assert (found["a-trace"]["jobs"], found["a-trace"]["processors"]) == (3, 128)
    assert found["damaged"]["jobs"] == 0


@pytest.mark.usefixtures("toys")
def test_many_problems_are_told_in_few_lines(koala: Koala, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "experiments", lambda: {Squares.name: Squares([2], fails=2)})
    ran = koala("experiment", "run", "huang-2007", "--seeds", "9", "--jobs", "1")
    assert ran.code == 1
    assert len(ran.err.splitlines()) == 4
    assert "and 6 more cells failed" in ran.err


def test_a_bar_says_how_far_it_is() -> None:
    assert line_of(Progress()) == ""
    line = line_of(Progress(cells=400, done=100, running="huang-2007-table-3"))
    assert line.startswith("[######------------------] 100 of 400 simulations, 0:00, huang-2007-table-3")
    assert "left" in line_of(Progress(cells=400, done=100, finished=1))


def test_a_shell_is_offered_their_names() -> None:
    offered = dict(OFFERS["experiments"](None, ""))  # type: ignore[arg-type]
    assert "huang-2007-table-1" in offered


@pytest.mark.processes
@pytest.mark.mpi
@needs(MPI)
def test_the_ranks_of_an_mpi_job_give_the_same(tmp_path: Path) -> None:
    lines = [swf_line(number, queue=number % 5 + 1, ran=number / 3, processors=number) for number in range(1, 20)]
    a_trace(tmp_path, "SDSC-SP2-1998-huang56490", lines)
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    assert mpirun is not None
    ranks = [mpirun, "--allow-run-as-root", "--oversubscribe", "-np", "3", sys.executable, "-m", "mpi4py.futures"]
    words = ["-m", "koalapy.simulation", "run", "huang-2007-table-1", "--traces", str(tmp_path), "--json", "--results"]
    told = []
    for name, command in (("ranks", ranks), ("processes", [sys.executable])):
        done = subprocess.run(
            [*command, *words, str(tmp_path / name)], capture_output=True, text=True, timeout=300, check=True
        )
        told.append(json.loads(done.stdout)["rows"])
    assert told[0] == told[1]
    assert len(told[0]) == 25
