"""Running experiments: cells over processes, each finished one kept at once, so that a run goes on where it ended."""

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
"""Characters of why a cell failed."""


@dataclass(slots=True)
class Progress:
    """How far a run has come."""

    cells: int = 0
    done: int = 0
    finished: int = 0
    """Of those done the ones that were not known before."""
    began: float = field(default_factory=time.monotonic)
    running: str = ""
    """The experiment of which a cell was finished last."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one experiment: its results, or why there are none."""

    experiment: Experiment
    kept: Kept | None
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class _Run:
    """One experiment that is under way."""

    experiment: Experiment
    made_by: Provenance
    """As it was when the run began, whatever becomes of the files meanwhile."""
    unfinished: Unfinished
    cells: Sequence[Cell]
    found: dict[str, Result]
    problems: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.key not in self.found]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be run: ``seeds`` None is as many as each experiment has; ``again`` keeps nothing of what is there."""

    experiments: Sequence[Experiment]
    folder: Path
    traces: Traces
    seeds: int | None = None
    again: bool = False


OnProgress = Callable[[Progress], None]
"""Is called after each finished cell."""


def run(asked: Asked, executor: Executor, on_progress: OnProgress | None = None) -> list[Outcome]:
    """Run all at once, so that no process waits for the last cell of one; return outcomes in the order of ``asked``.

    An experiment whose trace is not there, or a cell of which failed, has problems in place of results; the others
    go on. ``KoalaError`` where a worker died, or results cannot be written: what was finished until then is kept.
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
    """What a worker does."""
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
