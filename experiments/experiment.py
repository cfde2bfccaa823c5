"""Define an experiment: cells that are simulated independently, and rows that compare results with the paper."""

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from experiments.intervals import mean_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from experiments.traces import Traces

Parameter = str | int | float | bool
Value = str | int | float | bool | None | Sequence[float]


@dataclass(frozen=True)
class Cell:
    """The parameters and the seed of one simulation; cells that differ in their seeds only are repetitions."""

    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    seed: int = 0

    @cached_property
    def key(self) -> str:
        """Return a key that is the same for equal cells in every process and on every machine."""
        return json.dumps({**self.parameters, "seed": self.seed}, sort_keys=True)

    def __getitem__(self, name: str) -> Parameter:
        return self.parameters[name]


@dataclass(frozen=True, slots=True)
class Result:
    """The values of a simulated cell; a list of numbers is a curve."""

    cell: Cell
    values: Mapping[str, Value]
    seconds: float = 0.0
    """Processor time of the simulation."""

    def number(self, name: str) -> float:
        """Return a value that must be a number."""
        value = self.values[name]
        assert isinstance(value, int | float), f"{name} is not a number"
        return value

    def has_parameters(self, **parameters: Parameter) -> bool:
        """Return whether the cell has these parameters."""
        return all(self.cell.parameters.get(name) == value for name, value in parameters.items())


@dataclass(frozen=True, slots=True)
class Row:
    """A mean value and the paper's number; the mean over all seeds lies from ``low`` to ``high`` at 95 %."""

    label: str
    paper: float | None
    ours: float
    low: float
    high: float

    @classmethod
    def from_values(cls, label: str, values: Iterable[float], paper: float | None = None) -> "Row":
        """Build a row from one value per repetition; a single value has no interval."""
        ours, low, high = mean_interval(list(values))
        return cls(label, paper, ours, low, high)


class Experiment(ABC):
    """A table or figure of a paper. Each module lists its experiments in ``EXPERIMENTS``."""

    name: ClassVar[str]
    """For example ``huang-2007-table-3``; it begins with the name of the paper."""
    title: ClassVar[str]
    """The question of the experiment, in one line."""
    seeds: ClassVar[int] = 1
    """Default number of repetitions; 1 if nothing is random."""
    traces: ClassVar[tuple[str, ...]] = ()
    """Names of the required traces, without ``.swf.xz``."""
    unit: ClassVar[str] = ""
    """Unit of the numbers in the rows."""
    is_timed: ClassVar[bool] = False
    """Whether values are measured times, which differ between runs."""

    @property
    def paper(self) -> str:
        """Return the name of the paper, for example ``huang-2007``."""
        return "-".join(self.name.split("-")[:2])

    @abstractmethod
    def list_cells(self, seeds: int) -> Sequence[Cell]:
        """Return all cells to simulate, each in a separate process; seeds count from 0."""

    @abstractmethod
    def simulate_cell(self, cell: Cell, traces: "Traces") -> Mapping[str, Value]:
        """Simulate a cell. Equal cells give equal values in every process, except for measured times.

        This is a static method if several figures use the same simulations: their equal cells run once.
        """

    @property
    def simulation_key(self) -> object:
        """Return an object that is equal for experiments that simulate equal cells alike."""
        method = inspect.getattr_static(self, "simulate_cell")
        return method if isinstance(method, staticmethod) else self.name

    @abstractmethod
    def build_rows(self, results: Sequence[Result]) -> list[Row]:
        """Return the table for the results of all cells, in the order of the cells."""

    def draw_figure(self, results: Sequence[Result]) -> "Figure | None":
        """Return the plot, or None if there is none."""
        return None

    def write_remarks(self, results: Sequence[Result]) -> str:
        """Return Markdown for the page: differences from the paper, their reasons, and assumptions."""
        return ""


def group_results(results: Iterable[Result], *names: str) -> dict[tuple[Parameter, ...], list[Result]]:
    """Group results by the named parameters of their cells, in the order of their first results."""
    groups: dict[tuple[Parameter, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(tuple(result.cell[name] for name in names), []).append(result)
    return groups
