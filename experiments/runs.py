"""Run the cells of experiments in worker processes; store each result, so that an interrupted run can continue."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from experiments.experiment import Cell, Experiment, Result
from experiments.provenance import Provenance, build_provenance
from experiments.results import StoredResults, Unfinished, load_results, save_results, writing_to
from experiments.traces import Traces
from koalapy.model.errors import KoalaError

MAX_ERROR_LENGTH = 300
"""Maximal length of the error of a failed cell."""


@dataclass(slots=True)
class Progress:
    """The progress of a run."""

    cells: int = 0
    completed: int = 0
    finished: int = 0
    """Number of done cells that this run has simulated."""
    began: float = field(default_factory=time.monotonic)
    running: str = ""
    """The experiment of the last finished cell."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of an experiment, or the problems that prevent them."""

    experiment: Experiment
    stored: StoredResults | None
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class _Run:
    """The state of one experiment during a run."""

    experiment: Experiment
    made_by: Provenance
    """Provenance at the begin of the run; later changes of files do not count."""
    unfinished: Unfinished
    cells: Sequence[Cell]
    results: dict[str, Result]
    problems: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.key not in self.results]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a run. ``seeds`` None means each experiment's own number; ``again`` ignores stored results."""

    experiments: Sequence[Experiment]
    folder: Path
    traces: Traces
    seeds: int | None = None
    again: bool = False


OnProgress = Callable[[Progress], None]
"""Callback after each finished cell."""


def run_experiments(options: RunOptions, executor: Executor, on_progress: OnProgress | None = None) -> list[Outcome]:
    """Run all experiments concurrently and return their outcomes in the order of ``options``.

    An experiment with a missing trace or a failed cell has problems instead of results; the others continue. Raise
    ``KoalaError`` if a worker dies or results cannot be written; stored cells are kept.
    """
    try:
        return _run_locked(options, executor, on_progress)
    except OSError as error:
        message = f"cannot keep results in {options.folder}: {error.strerror or error}"
        raise KoalaError(message, hint="what was finished before is kept: make room, and run it again") from error


def _run_locked(options: RunOptions, executor: Executor, on_progress: OnProgress | None) -> list[Outcome]:
    progress = Progress()
    with writing_to(options.folder), ExitStack() as at_end:
        runs = {
            experiment.name: _begin_run(experiment, options)
            for experiment in options.experiments
            if not _find_missing_traces(experiment, options.traces)
        }
        progress.cells = sum(len(run.cells) for run in runs.values())
        progress.completed = progress.cells - sum(len(run.missing) for run in runs.values())
        begun: dict[tuple[object, str], Future[Result]] = {}
        waiting_runs: dict[Future[Result], list[tuple[_Run, Cell]]] = {}
        at_end.callback(lambda: [future.cancel() for future in waiting_runs])
        for run in runs.values():
            for cell in run.missing:
                key = run.experiment.simulation_key, cell.key
                if key not in begun:
                    begun[key] = executor.submit(run_cell, run.experiment, cell, options.traces)
                waiting_runs.setdefault(begun[key], []).append((run, cell))
        for future in as_completed(waiting_runs):
            for run, cell in waiting_runs[future]:
                _take_result(run, cell, future)
                progress.completed, progress.finished = progress.completed + 1, progress.finished + 1
                progress.running = run.experiment.name
                if not run.missing:
                    _finish_run(run, options)
            if on_progress is not None:
                on_progress(progress)
        return list(_collect_outcomes(options, runs))


def run_cell(experiment: Experiment, cell: Cell, traces: Traces) -> Result:
    """Simulate a cell in a worker and measure its processor time."""
    began = time.process_time()
    values = experiment.simulate_cell(cell, traces)
    return Result(cell, dict(values), round(time.process_time() - began, 3))


def _find_missing_traces(experiment: Experiment, traces: Traces) -> list[str]:
    return [name for name in experiment.traces if not traces.has(name)]


def _begin_run(experiment: Experiment, options: RunOptions) -> _Run:
    made_by = build_provenance(experiment, options.traces)
    unfinished = Unfinished(options.folder, made_by)
    cells = experiment.list_cells(experiment.seeds if options.seeds is None else options.seeds)
    results: dict[str, Result] = {}
    if not options.again:
        stored = load_results(options.folder, experiment.name)
        if stored is not None and stored.made_by == made_by:
            results |= {result.cell.key: result for result in stored.results}
            if list(results) == [cell.key for cell in cells]:
                return _Run(experiment, made_by, unfinished, cells, results)
        results |= unfinished.read()
    run = _Run(experiment, made_by, unfinished, cells, results)
    if run.missing:
        unfinished.begin(results.values())
    else:
        _finish_run(run, options)
    return run


def _take_result(run: _Run, cell: Cell, future: Future[Result]) -> None:
    error = future.exception()
    if error is None:
        result = future.result()
        run.results[cell.key] = result
        run.unfinished.add(result)
    elif isinstance(error, BrokenExecutor):
        hint = "it was killed, or memory ran out; what is finished is kept: run it again, perhaps with fewer --jobs"
        raise KoalaError(f"a worker process died: {error}", hint=hint) from error
    elif not isinstance(error, Exception):
        raise error
    else:
        message = f"{type(error).__name__}: {error}" if not isinstance(error, KoalaError) else error.message
        run.problems.append(f"cell {cell.key} failed: {message[:MAX_ERROR_LENGTH]}")


def _finish_run(run: _Run, options: RunOptions) -> None:
    results = tuple(run.results[cell.key] for cell in run.cells)
    save_results(options.folder, StoredResults(run.made_by, results))
    run.unfinished.remove()


def _collect_outcomes(options: RunOptions, runs: dict[str, _Run]) -> Iterator[Outcome]:
    for experiment in options.experiments:
        lacking = _find_missing_traces(experiment, options.traces)
        if lacking:
            names = ", ".join(lacking)
            yield Outcome(experiment, None, (f"it needs {names}, not found in {options.traces.folder}",))
        elif problems := runs[experiment.name].problems:
            yield Outcome(experiment, None, tuple(problems))
        else:
            yield Outcome(experiment, load_results(options.folder, experiment.name))
