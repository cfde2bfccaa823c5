import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import provenance as provenance_module
from experiments.experiment import Cell, Experiment, Result
from experiments.provenance import Provenance, source_hash
from experiments.results import StoredResults, Unfinished, load_results, path_of, save_results, writing_to
from experiments.runs import Progress, RunOptions, run_experiments
from experiments.traces import Traces
from experiments.workers import start_workers
from koalapy.model.errors import ConflictError, KoalaError, UsageError
from tests.experiments.toys import Halves, Here, Quarters, Squares, Traced
from tests.experiments.traces import a_trace, swf_line

SQUARES = Squares()


def asked(folder: Path, *experiments: Experiment, seeds: int | None = None, again: bool = False) -> RunOptions:
    return RunOptions(experiments or (SQUARES,), folder, Traces(folder), seeds, again)


def interrupted(what: RunOptions, count: int) -> None:
    """Run the experiments and interrupt them after ``count`` stored cells."""
    results: list[Result] = []

    def add(self: Unfinished, result: Result) -> None:
        if len(results) == count:
            raise KeyboardInterrupt
        results.append(result)
        keep(self, result)

    keep = Unfinished.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unfinished, "add", add)
        with pytest.raises(KeyboardInterrupt):
            run_experiments(what, Here())


def test_run_saves_all_cells_in_order(tmp_path: Path) -> None:
    here = Here()
    (outcome,) = run_experiments(asked(tmp_path), here)
    assert not outcome.problems
    assert outcome.stored is not None
    assert [result.cell for result in outcome.stored.results] == list(SQUARES.list_cells(2)) == here.ran
    assert [row.ours for row in SQUARES.build_rows(outcome.stored.results)] == pytest.approx([1.05, 4.05, 9.05])
    assert load_results(tmp_path, SQUARES.name) == outcome.stored
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", f"{SQUARES.name}.parquet"]


def test_run_of_shared_simulations_runs_them_once(tmp_path: Path) -> None:
    here, states = Here(), list[Progress]()
    every = asked(tmp_path, Halves(), Quarters((2, 3, 4)), SQUARES, seeds=1)
    halves, quarters, squares = run_experiments(every, here, states.append)
    assert [cell["number"] for cell in here.ran] == [1, 2, 3, 4, 1, 2, 3]
    assert [(state.cells, state.completed) for state in states[-1:]] == [(9, 9)]
    for outcome, numbers in ((halves, (1, 2, 3)), (quarters, (2, 3, 4))):
        assert outcome.stored
        assert outcome.stored == load_results(tmp_path, outcome.experiment.name)
        assert [result.values["half"] for result in outcome.stored.results] == [number / 2 for number in numbers]
    assert squares.stored
    assert "square" in squares.stored.results[0].values


def test_run_with_failing_simulation_names_each_experiment(tmp_path: Path) -> None:
    for outcome in run_experiments(asked(tmp_path, Halves((7,)), Quarters((7,)), seeds=1), Here()):
        assert outcome.stored is None
        assert "it is odd" in outcome.problems[0]


def test_run_repeats_saved_cells_only_if_requested(tmp_path: Path) -> None:
    earlier = run_experiments(asked(tmp_path), Here())
    assert run_experiments(asked(tmp_path), idle := Here()) == earlier
    assert not idle.ran
    run_experiments(asked(tmp_path, again=True), here := Here())
    assert len(here.ran) == 6


def test_run_with_more_seeds_keeps_earlier_results(tmp_path: Path) -> None:
    run_experiments(asked(tmp_path, seeds=1), Here())
    (outcome,) = run_experiments(asked(tmp_path, seeds=3), here := Here())
    assert {cell.seed for cell in here.ran} == {1, 2}
    assert outcome.stored is not None
    assert [result.cell for result in outcome.stored.results] == list(SQUARES.list_cells(3))


@pytest.mark.parametrize(
    "appended", ["", '{"parameters":1,"seed":1,"values":{},"seconds":1}\n', "[" * 100_000 + "\n", "null\n", "{"]
)
def test_run_after_interrupt_continues_and_skips_invalid_lines(tmp_path: Path, appended: str) -> None:
    interrupted(asked(tmp_path), count=4)
    with (tmp_path / f"{SQUARES.name}.cells.jsonl").open("a") as file:
        file.write(appended)
    states = list[Progress]()
    (outcome,) = run_experiments(asked(tmp_path), here := Here(), states.append)
    assert len(here.ran) == 2
    assert [(state.cells, state.completed, state.finished) for state in states[-1:]] == [(6, 6, 2)]
    assert outcome.stored is not None
    assert [result.cell for result in outcome.stored.results] == list(SQUARES.list_cells(2))


def test_interrupted_run_cancels_its_cells(tmp_path: Path) -> None:
    class Slow(Here):
        futures: ClassVar[list[Future[Any]]] = []

        def submit(self, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.futures.append(Future() if self.futures else super().submit(run, *args, **kwargs))
            return self.futures[-1]

    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiments(asked(tmp_path), executor := Slow(), interrupt)
    assert [future.cancelled() for future in executor.futures] == [False, *[True] * 5]


def test_run_with_damaged_file_starts_again(tmp_path: Path) -> None:
    (tmp_path / f"{SQUARES.name}.cells.jsonl").write_bytes(b"\xff\xfe{{{\n[]\n")
    run_experiments(asked(tmp_path), here := Here())
    assert len(here.ran) == 6


def test_run_repeats_results_of_other_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_experiments(asked(tmp_path), Here())
    interrupted(asked(tmp_path, seeds=3), count=1)
    monkeypatch.setattr("experiments.provenance.source_hash", lambda module: "another")
    run_experiments(asked(tmp_path), here := Here())
    assert len(here.ran) == 6


def test_provenance_includes_the_traces(tmp_path: Path) -> None:
    a_trace(tmp_path, "a-trace", [swf_line(1)])
    (outcome,) = run_experiments(asked(tmp_path, Traced()), Here())
    assert outcome.stored is not None
    assert list(outcome.stored.made_by.traces) == ["a-trace"]
    a_trace(tmp_path, "a-trace", [swf_line(1), swf_line(2)])
    run_experiments(asked(tmp_path, Traced()), here := Here())
    assert len(here.ran) == 6


def test_run_without_trace_names_experiment_and_continues(tmp_path: Path) -> None:
    first, second = run_experiments(asked(tmp_path, Traced(), SQUARES), Here())
    assert first.stored is None
    assert first.problems == (f"it needs a-trace, not found in {tmp_path}",)
    assert second.stored is not None


def test_run_with_failing_cell_keeps_the_others(tmp_path: Path) -> None:
    (outcome,) = run_experiments(asked(tmp_path, Squares(fails=2), seeds=1), Here())
    assert outcome.stored is None
    assert outcome.problems == ('cell {"number": 2, "seed": 0} failed: ArithmeticError: it is too large',)
    run_experiments(asked(tmp_path, SQUARES, seeds=1), here := Here())
    assert [cell["number"] for cell in here.ran] == [2]


@pytest.mark.processes
def test_run_in_processes_gives_the_same_results(tmp_path: Path) -> None:
    (here,) = run_experiments(asked(tmp_path / "here"), Here())
    with start_workers(2) as executor:
        (parallel,) = run_experiments(asked(tmp_path / "there"), executor)
    assert here.stored is not None
    assert parallel.stored is not None
    assert [(r.cell.key, r.values) for r in here.stored.results] == [
        (r.cell.key, r.values) for r in parallel.stored.results
    ]


def test_run_with_killed_worker_fails_and_can_continue(tmp_path: Path) -> None:
    numbers = (1, 2, 3)
    with pytest.raises(KoalaError, match="a worker process died") as refusal, start_workers(1) as executor:
        run_experiments(asked(tmp_path, Squares(numbers, dies=3), seeds=1), executor)
    assert "run it again" in refusal.value.hint
    (outcome,) = run_experiments(asked(tmp_path, Squares(numbers), seeds=1), here := Here())
    assert outcome.stored is not None
    assert [cell["number"] for cell in here.ran] == [3]


@pytest.mark.processes
def test_run_killed_ends_its_workers_and_can_continue(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    cells = tmp_path / f"{SQUARES.name}.cells.jsonl"
    command = [sys.executable, "-m", "tests.experiments.toys", str(tmp_path), str(pipe)]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 60
        while not cells.exists() or len(cells.read_text().splitlines()) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    ended, alive = psutil.wait_procs(below, timeout=60)
    assert len(ended) >= 2
    assert not alive
    (outcome,) = run_experiments(asked(tmp_path), here := Here())
    assert [cell["number"] for cell in here.ran] == [3, 3]
    assert outcome.stored is not None


def test_run_locks_its_folder(tmp_path: Path) -> None:
    with writing_to(tmp_path), pytest.raises(ConflictError, match="another run writes to"):
        run_experiments(asked(tmp_path), Here())
    assert run_experiments(asked(tmp_path), Here())[0].stored is not None


def test_run_with_full_disk_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Unfinished, result: Result) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Unfinished, "add", full)
    with pytest.raises(KoalaError, match=r"cannot keep results in .*: No space left on device"):
        run_experiments(asked(tmp_path), Here())


def test_load_of_damaged_parquet_file_is_rejected(tmp_path: Path) -> None:
    path_of(tmp_path, SQUARES.name).write_bytes(b"PAR1 and no more")
    with pytest.raises(UsageError, match="holds no results of an experiment") as refusal:
        load_results(tmp_path, SQUARES.name)
    assert "run the experiment again" in refusal.value.hint


MADE_BY = Provenance("huang-2007-squares", "1.0", "3.11", "source", {"trace": "sha"})
NUMBERS = st.floats(allow_nan=False) | st.integers(-(2**53), 2**53)
PARAMETERS = st.fixed_dictionaries(
    {"policy": st.text()},
    optional={"load": st.floats(allow_nan=False), "wide": st.booleans(), "size": st.integers(0, 99)},
)
VALUES = st.fixed_dictionaries({"mean": NUMBERS | st.none()}, optional={"curve": st.lists(st.floats(allow_nan=False))})


@given(
    st.lists(st.builds(Result, st.builds(Cell, PARAMETERS, st.integers(0, 99)), VALUES, st.floats(0, 9)), min_size=1)
)
def test_load_returns_saved_results(tmp_path_factory: pytest.TempPathFactory, results: list[Result]) -> None:
    folder = tmp_path_factory.mktemp("results")
    save_results(folder, StoredResults(MADE_BY, tuple(results)))
    kept = load_results(folder, MADE_BY.experiment)
    assert kept is not None
    assert kept.made_by == MADE_BY
    assert [result.cell for result in kept.results] == [result.cell for result in results]
    for loaded, saved in zip(kept.results, results, strict=True):
        assert {name: value for name, value in loaded.values.items() if value is not None} == {
            name: value for name, value in saved.values.items() if value is not None
        }


def test_save_of_value_named_like_parameter_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has two columns \['load'\]"):
        save_results(tmp_path, StoredResults(MADE_BY, (Result(Cell({"load": 1.0}), {"load": 2.0}),)))


def test_provenance_differs_by_source_and_traces_only() -> None:
    assert replace(MADE_BY, python="3.12", koalapy="2") == MADE_BY
    for changed in (replace(MADE_BY, source="x"), replace(MADE_BY, traces={}), replace(MADE_BY, experiment="x")):
        assert changed != MADE_BY


def test_source_hash_covers_all_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "koalapy"
    for name, text in {
        "paper.py": "from koalapy.rooms import rule\n",
        "rooms/__init__.py": "",
        "rooms/rule.py": "def rule():\n    import koalapy.deep\n",
        "deep.py": "",
        "other.py": "",
        "../experiments/curve.json": "[1]",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    data = tmp_path / "experiments"
    monkeypatch.setattr(provenance_module, "PACKAGES", {"koalapy": package, "experiments": data})

    def now() -> str:
        source_hash.cache_clear()
        provenance_module._find_imports.cache_clear()
        return source_hash("koalapy.paper")

    try:
        source = now()
        (package / "other.py").write_text("changed = True\n")
        assert now() == source
        for name in ("paper.py", "rooms/rule.py", "rooms/__init__.py", "deep.py", "../experiments/curve.json"):
            text = (package / name).read_text()
            (package / name).write_text(text + "\n")
            assert now() != source, name
            (package / name).write_text(text)
    finally:
        source_hash.cache_clear()
        provenance_module._find_imports.cache_clear()
