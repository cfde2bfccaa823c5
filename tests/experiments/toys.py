"""Define experiments for tests in a module that worker processes can import."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.experiment import Cell, Experiment, Result, Row, Value, group_results
from experiments.traces import Traces


class Squares(Experiment):
    """Compute the square of a number plus the seed; a cell may fail, kill its process, or block."""

    name = "huang-2007-squares"
    title = "what the square of a number is"
    seeds = 2
    unit = "units"

    def __init__(
        self, numbers: Sequence[int] = (1, 2, 3), *, fails: int = -1, dies: int = -1, blocks: str = ""
    ) -> None:
        self._numbers, self._fails, self._dies, self._blocks = numbers, fails, dies, blocks

    def list_cells(self, seeds: int) -> Sequence[Cell]:
        return [Cell({"number": number}, seed) for number in self._numbers for seed in range(seeds)]

    def simulate_cell(self, cell: Cell, traces: Traces) -> Mapping[str, Value]:
        number = int(cell["number"])
        if number == self._fails:
            raise ArithmeticError("it is too large")
        if number == self._dies:
            os._exit(9)
        if self._blocks and number == self._numbers[-1]:
            Path(self._blocks).read_bytes()  # blocks: the pipe has no writer
        return {"square": number**2 + 0.1 * cell.seed, "curve": [0.5, number / 3]}

    def build_rows(self, results: Sequence[Result]) -> list[Row]:
        return [
            Row.from_values(f"square of {number}", [result.number("square") for result in of], float(int(number) ** 2))
            for (number,), of in group_results(results, "number").items()
        ]

    def draw_figure(self, results: Sequence[Result]) -> Figure:
        figure = Figure()
        figure.subplots().plot([result.number("square") for result in results])
        return figure

    def write_remarks(self, results: Sequence[Result]) -> str:
        return "The paper has no squares."


class Traced(Squares):
    name = "huang-2007-traced"
    traces = ("a-trace",)


class Halves(Squares):
    """Two figures that share the ``simulate_cell`` method, and so the results of equal cells."""

    name = "huang-2007-halves"

    @staticmethod
    def simulate_cell(cell: Cell, traces: Traces) -> Mapping[str, Value]:
        if cell["number"] == 7:
            raise ArithmeticError("it is odd")
        return {"half": int(cell["number"]) / 2}


class Quarters(Halves):
    name = "huang-2007-quarters"


class Here(Executor):
    """Run each call at once in the current process."""

    def __init__(self) -> None:
        self.ran: list[Cell] = []

    def submit(self, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.ran.append(next(arg for arg in args if isinstance(arg, Cell)))
        try:
            future.set_result(run(*args, **kwargs))
        except ArithmeticError as error:
            future.set_exception(error)
        return future


def main() -> None:
    """Run an experiment in a process that a test kills."""
    import sys

    from experiments.runs import RunOptions, run_experiments
    from experiments.workers import start_workers

    folder, pipe = sys.argv[1:]
    with start_workers(2) as executor:
        run_experiments(RunOptions([Squares(blocks=pipe)], Path(folder), Traces(Path(folder))), executor)


if __name__ == "__main__":
    main()
