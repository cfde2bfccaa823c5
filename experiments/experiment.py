"""What an experiment is: cells that are simulated each by itself, and rows with the paper's numbers beside ours."""

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
    """One simulation: what is varied, and the seed; cells of the same parameters and other seeds are repetitions."""

    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    seed: int = 0

    @cached_property
    def key(self) -> str:
        """The same of equal cells, in every process and on every machine."""
        return json.dumps({**self.parameters, "seed": self.seed}, sort_keys=True)

    def __getitem__(self, name: str) -> Parameter:
        return self.parameters[name]


@dataclass(frozen=True, slots=True)
class Result:
    """What a cell gave; a value may be a list of numbers, as a curve."""

    cell: Cell
    values: Mapping[str, Value]
    seconds: float = 0.0
    """How long it took."""

    def number(self, name: str) -> float:
        """A value that is a number."""
        value = self.values[name]
        assert isinstance(value, int | float), f"{name} is not a number"
        return value

    def has(self, **parameters: Parameter) -> bool:
        """Whether its cell has these parameters."""
        return all(self.cell.parameters.get(name) == value for name, value in parameters.items())


@dataclass(frozen=True, slots=True)
class Row:
    """A number of the paper beside ours; between ``low`` and ``high`` the mean over all seeds lies at 95 %."""

    label: str
    paper: float | None
    ours: float
    low: float
    high: float

    @classmethod
    def of(cls, label: str, values: Iterable[float], paper: float | None = None) -> "Row":
        """Of one value for each repetition; a single one has no interval."""
        ours, low, high = mean_interval(list(values))
        return cls(label, paper, ours, low, high)


class Experiment(ABC):
    """A table or figure of a paper. A module of this package has its experiments as ``EXPERIMENTS``."""

    name: ClassVar[str]
    """As ``huang-2007-table-3``: the paper's comes first."""
    title: ClassVar[str]
    """What is found out, in a line."""
    seeds: ClassVar[int] = 1
    """How many repetitions there are if nothing else is asked for; 1 where nothing is drawn."""
    traces: ClassVar[tuple[str, ...]] = ()
    """Names of the traces that it needs, without ``.swf.xz``."""
    unit: ClassVar[str] = ""
    """Of the numbers in the rows."""
    is_timed: ClassVar[bool] = False
    """Whether its values are times that were measured, of which no run has the same."""

    @property
    def paper(self) -> str:
        """As ``huang-2007``."""
        return "-".join(self.name.split("-")[:2])

    @abstractmethod
    def cells(self, seeds: int) -> Sequence[Cell]:
        """All that is to be simulated, each by itself in a process of its own; seeds count from 0."""

    @abstractmethod
    def run(self, cell: Cell, traces: "Traces") -> Mapping[str, Value]:
        """Simulate a cell; equal cells give equal values, whenever and wherever they are run, but what is timed.

        A static method where several figures show the same simulations: equal cells of theirs are run once for all.
        """

    @property
    def simulation(self) -> object:
        """The same of experiments whose equal cells are one simulation."""
        run = inspect.getattr_static(self, "run")
        return run if isinstance(run, staticmethod) else self.name

    @abstractmethod
    def rows(self, results: Sequence[Result]) -> list[Row]:
        """The table, from the results of all cells in their order."""

    def figure(self, results: Sequence[Result]) -> "Figure | None":
        """The plot, if there is one."""
        return None

    def remarks(self, results: Sequence[Result]) -> str:
        """Markdown for the page: where we differ from the paper and why, and what was left open there."""
        return ""


def by(results: Iterable[Result], *names: str) -> dict[tuple[Parameter, ...], list[Result]]:
    """Results by those parameters of their cells, in the order in which they come."""
    found: dict[tuple[Parameter, ...], list[Result]] = {}
    for result in results:
        found.setdefault(tuple(result.cell[name] for name in names), []).append(result)
    return found
