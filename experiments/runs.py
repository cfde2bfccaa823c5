"""Run the cells of experiments in worker processes; store each result, so that an interrupted run can continue."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from experiments.experiment import Cell, Experiment, Result
from experiments.provenance import Provenance, provenance
from experiments.results import Kept, Unfinished, load, save, writing_to
from experiments.traces import Traces
from koalapy.model.errors import KoalaError

MAX_TOLD = 300
"""Maximal length of the error of a failed cell."""


@dataclass(slots=True)
class Progress:
    """The progress of a run."""

    cells: int = 0
    done: int = 0
    finished: int = 0
    """Number of done cells that this run has simulated."""
    began: float = field(default_factory=time.monotonic)
    running: str = ""
    """The experiment of the last finished cell."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of an experiment, or the problems that prevent them."""

    experiment: Experiment
    kept: Kept | None
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class _Run:
    """The state of one experiment during a run."""

    experiment: Experiment
    made_by: Provenance
    """Provenance at the begin of the run; later changes of files do not count."""
    unfinished: Unfinished
    cells: Sequence[Cell]
    found: dict[str, Result]
    problems: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.key not in self.found]


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a run. ``seeds`` None means each experiment's own number; ``again`` ignores stored results."""

    experiments: Sequence[Experiment]
    folder: Path
    traces: Traces
    seeds: int | None = None
    again: bool = False


OnProgress = Callable[[Progress], None]
"""Callback after each finished cell."""


def run(asked: Asked, executor: Executor, on_progress: OnProgress | None = None) -> list[Outcome]:
    """Run all experiments concurrently and return their outcomes in the order of ``asked``.

    An experiment with a missing trace or a failed cell has problems instead of results; the others continue. Raise
    ``KoalaError`` if a worker dies or results cannot be written; stored cells are kept.
    """
    try:
        return _run(asked, executor, on_progress)
    except OSError as error:
        told = f"cannot keep results in {asked.folder}: {error.strerror or error}"
        raise KoalaError(told, hint="what was finished before is kept: make room, and run it again") from error


def _run(asked: Asked, executor: Executor, on_progress: OnProgress | None) -> list[Outcome]:
    progress = Progress()
    with writing_to(asked.folder), ExitStack() as at_end:
        runs = {
            experiment.name: _begin(experiment, asked)
            for experiment in asked.experiments
            if not _lacking(experiment, asked.traces)
        }
        progress.cells = sum(len(one.cells) for one in runs.values())
        progress.done = progress.cells - sum(len(one.missing) for one in runs.values())
        begun: dict[tuple[object, str], Future[Result]] = {}
        wanted: dict[Future[Result], list[tuple[_Run, Cell]]] = {}
        at_end.callback(lambda: [future.cancel() for future in wanted])
        for one in runs.values():
            for cell in one.missing:
                which = one.experiment.simulation, cell.key
                if which not in begun:
                    begun[which] = executor.submit(run_cell, one.experiment, cell, asked.traces)
                wanted.setdefault(begun[which], []).append((one, cell))
        for future in as_completed(wanted):
            for one, cell in wanted[future]:
                _take(one, cell, future)
                progress.done, progress.finished = progress.done + 1, progress.finished + 1
                progress.running = one.experiment.name
                if not one.missing:
                    _finish(one, asked)
            if on_progress is not None:
                on_progress(progress)
        return list(_outcomes(asked, runs))


def run_cell(experiment: Experiment, cell: Cell, traces: Traces) -> Result:
    """Simulate a cell in a worker and measure its processor time."""
    began = time.process_time()
    values = experiment.run(cell, traces)
    return Result(cell, dict(values), round(time.process_time() - began, 3))


def _lacking(experiment: Experiment, traces: Traces) -> list[str]:
    return [name for name in experiment.traces if not traces.has(name)]


def _begin(experiment: Experiment, asked: Asked) -> _Run:
    made_by = provenance(experiment, asked.traces)
    unfinished = Unfinished(asked.folder, made_by)
    cells = experiment.cells(experiment.seeds if asked.seeds is None else asked.seeds)
    found: dict[str, Result] = {}
    if not asked.again:
        kept = load(asked.folder, experiment.name)
        if kept is not None and kept.made_by == made_by:
            found |= {result.cell.key: result for result in kept.results}
            if list(found) == [cell.key for cell in cells]:
                return _Run(experiment, made_by, unfinished, cells, found)
        found |= unfinished.read()
    one = _Run(experiment, made_by, unfinished, cells, found)
    if one.missing:
        unfinished.begin(found.values())
    else:
        _finish(one, asked)
    return one


def _take(one: _Run, cell: Cell, future: Future[Result]) -> None:
    error = future.exception()
    if error is None:
        result = future.result()
        one.found[cell.key] = result
        one.unfinished.add(result)
    elif isinstance(error, BrokenExecutor):
        hint = "it was killed, or memory ran out; what is finished is kept: run it again, perhaps with fewer --jobs"
        raise KoalaError(f"a worker process died: {error}", hint=hint) from error
    elif not isinstance(error, Exception):
        raise error
    else:
        told = f"{type(error).__name__}: {error}" if not isinstance(error, KoalaError) else error.message
        one.problems.append(f"cell {cell.key} failed: {told[:MAX_TOLD]}")


def _finish(one: _Run, asked: Asked) -> None:
    results = tuple(one.found[cell.key] for cell in one.cells)
    save(asked.folder, Kept(one.made_by, results))
    one.unfinished.remove()


def _outcomes(asked: Asked, runs: dict[str, _Run]) -> Iterator[Outcome]:
    for experiment in asked.experiments:
        lacking = _lacking(experiment, asked.traces)
        if lacking:
            names = ", ".join(lacking)
            yield Outcome(experiment, None, (f"it needs {names}, not found in {asked.traces.folder}",))
        elif problems := runs[experiment.name].problems:
            yield Outcome(experiment, None, tuple(problems))
        else:
            yield Outcome(experiment, load(asked.folder, experiment.name))
