"""Huang, Shih and Chung (2007): load sharing among the sites of a heterogeneous grid."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import permutations
from math import trunc
from typing import TYPE_CHECKING, ClassVar

from koalapy.model.sharing import SharingMode
from koalapy.scheduling.rules import ReclaimedPosition
from koalapy.simulation.experiments.experiment import Cell, Experiment, Parameter, Result, Row, Value, by
from koalapy.simulation.experiments.huang_2007_grid import ENTIRE, SITES, TRACE, Setting, jobs_of, responses, site_name
from koalapy.simulation.experiments.traces import Traces

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Table1(Experiment):
    """Counts only, nothing is simulated."""

    name = "huang-2007-table-1"
    title = "the jobs of SDSC-SP2 by the site that they come from"
    traces = (TRACE,)

    paper_says: ClassVar[Mapping[str, Sequence[float]]] = {
        "jobs": (4053, 6795, 26067, 19398, 177),
        "longest (s)": (21922, 64411, 118561, 64817, 42262),
        "mean run time (s)": (267.13, 6746.27, 5657.81, 5935.92, 462.46),
        "most processors": (8, 128, 128, 128, 50),
        "mean processors": (3, 16, 12, 6, 4),
    }

    def cells(self, seeds: int) -> Sequence[Cell]:
        return [Cell({"site": site}) for site in SITES]

    def run(self, cell: Cell, traces: Traces) -> Mapping[str, Value]:
        jobs = [job for job in jobs_of(traces) if job.queue == cell["site"]]
        return {
            "jobs": len(jobs),
            "longest (s)": max(job.ran for job in jobs),
            "mean run time (s)": sum(job.ran for job in jobs) / len(jobs),
            "most processors": max(job.processors for job in jobs),
            "mean processors": sum(job.processors for job in jobs) / len(jobs),
        }

    def rows(self, results: Sequence[Result]) -> list[Row]:
        return [
            Row.of(f"site {result.cell['site']}: {name}", [_cut(name, result.number(name))], said)
            for name, all_said in self.paper_says.items()
            for result, said in zip(results, all_said, strict=True)
        ]

    def remarks(self, results: Sequence[Result]) -> str:
        return (
            "The paper cuts numbers off and does not round them: 267.138 is 267.13 there, 16.12 is 16; so does this "
            "table. The uncleaned log that it was made from is lost; 13,373 jobs of queues 3 and 4 were put back from "
            "a listing of it, which explains why their mean run times differ by 0.008 % and 0.021 %."
        )


def _cut(name: str, value: float) -> float:
    return trunc(value * 100) / 100 if name == "mean run time (s)" else trunc(value)


class Table3(Experiment):
    """No random numbers; the fourth way is the paper's text taken at its word."""

    name = "huang-2007-table-3"
    title = "mean response times of each site's own jobs: alone, sharing, and sharing that takes back nodes"
    traces = (TRACE,)
    unit = "s"

    speed = (1, 3, 4, 4, 8)
    load = (5, 4, 5, 4, 1)
    paper_says: ClassVar[Mapping[str, Sequence[float]]] = {
        "independent": (9260, 14216, 10964, 10199, 6448, 57),
        "ordinary": (4135, 191, 4758, 4799, 3881, 559),
        "feasible": (4152, 193, 4750, 4798, 3939, 57),
    }

    def cells(self, seeds: int) -> Sequence[Cell]:
        modes = [Cell({"sharing": sharing, "reclaimed": "place"}) for sharing in self.paper_says]
        return [*modes, Cell({"sharing": "feasible", "reclaimed": "front"})]

    def run(self, cell: Cell, traces: Traces) -> Mapping[str, Value]:
        sharing: SharingMode = cell["sharing"]  # type: ignore[assignment]
        reclaimed: ReclaimedPosition = cell["reclaimed"]  # type: ignore[assignment]
        setting = Setting(self.speed, self.load, sharing=sharing, threshold=1.0, reclaimed=reclaimed)
        outcome = setting.simulate(jobs_of(traces))
        stopped = sum(job.attempts - 1 for job in outcome.jobs)
        away = sum(job.gang[0][0] != job.planned.spec.home_site for job in outcome.jobs)
        return {**responses(outcome), "stopped": stopped, "away": away}

    def rows(self, results: Sequence[Result]) -> list[Row]:
        found = []
        for result in results:
            sharing, is_literal = str(result.cell["sharing"]), result.has(reclaimed="front")
            label = f"{sharing}, stopped jobs to the front" if is_literal else sharing
            for name, said in zip([ENTIRE, *map(site_name, SITES)], self.paper_says[sharing], strict=True):
                if name in result.values:
                    found.append(Row.of(f"{label}: {name}", [result.number(name)], said))
        return found

    def figure(self, results: Sequence[Result]) -> "Figure | None":
        shown = [result for result in results if result.has(reclaimed="place")]
        groups = {str(result.cell["sharing"]): [result.number(n) for n in _names(result)] for result in shown}
        return _bars(_names(shown[0]), groups, "mean response time (s)", log=True) if shown else None

    def remarks(self, results: Sequence[Result]) -> str:
        feasible = next(result for result in results if result.has(sharing="feasible", reclaimed="place"))
        front = next(result for result in results if result.has(reclaimed="front"))
        alone = next(result for result in results if result.has(sharing="independent"))
        off = {name: feasible.number(name) for name in _names(feasible)}
        worse = [name for name, value in off.items() if value > alone.number(name) * (1 + 1e-9)]
        better = "no site is worse off than alone" if not worse else f"worse off than alone: {', '.join(worse)}"
        return (
            "The paper cuts numbers off; ours are rounded. Alone and with ordinary sharing nothing of theirs is open, "
            "and what is left is due to the 13,373 jobs of the trace that were put back. With feasible sharing "
            f"{feasible.number('stopped'):.0f} times a job was stopped so that a site had its nodes back, and "
            f"{feasible.number('away'):.0f} jobs ran away from home; {better}. "
            "Left open by the paper: which jobs are stopped (here those that started last), where they wait then "
            "(their text says at the front, their numbers are nearer to a job's own place: the last rows, with "
            f"{front.number('stopped'):.0f} stops), and what follows at the same moment: here the queues are gone "
            "through again until nobody can start, which is 0.2 % away from one round for site 2. Jobs that are "
            "stopped lose all their work. Nothing is promised or kept for anybody, as in the paper: with the defaults "
            "of a live daemon jobs that have waited for four hours are not stopped."
        )


class Figure1(Experiment):
    """The paper gives the plot only."""

    name = "huang-2007-fig-1"
    title = "best-fit where sites' speeds differ much: of use only if slower sites are left out"
    traces = (TRACE,)
    unit = "s"

    speed = (0.6, 0.7, 2.4, 9.5, 4.3)
    ways: ClassVar[Mapping[str, tuple[SharingMode, float]]] = {
        "independent sites": ("independent", 0.0),
        "best-fit, threshold 0": ("ordinary", 0.0),
        "best-fit, threshold 1": ("ordinary", 1.0),
    }

    def cells(self, seeds: int) -> Sequence[Cell]:
        return [Cell({"way": way}) for way in self.ways]

    def run(self, cell: Cell, traces: Traces) -> Mapping[str, Value]:
        sharing, threshold = self.ways[str(cell["way"])]
        setting = Setting(self.speed, policy="best-fit", sharing=sharing, threshold=threshold)
        return responses(setting.simulate(jobs_of(traces)))

    def rows(self, results: Sequence[Result]) -> list[Row]:
        return [Row.of(str(result.cell["way"]), [result.number(ENTIRE)]) for result in results]

    def figure(self, results: Sequence[Result]) -> "Figure | None":
        groups = {"entire grid": [result.number(ENTIRE) for result in results]}
        return _bars([str(result.cell["way"]) for result in results], groups, "mean response time (s)")

    def remarks(self, results: Sequence[Result]) -> str:
        alone, none, one = (result.number(ENTIRE) for result in results)
        holds = "So it is here" if none > alone > one else "That is not so here"
        return (
            "The paper says in words that sharing by best-fit is worse than not to share with the threshold 0, and "
            f"better with 1. {holds}. It does not say which load this figure has; with the one of Table 3 threshold 0 "
            "would be better than not to share, so that it must be 1 everywhere, as here. Nor does it say which of the "
            "sites is taken that would be left with equally few processors, and three of the five are alike: here the "
            "first by name, which is a slow one. Were it the fastest of them, sharing would take 3181 s with threshold "
            "0 and 988 s with 1 (worked out apart from the scheduler), so that the order is the same."
        )


PARTS = 16
"""Of the trace, equally many jobs in each: one for each simulation of the many orders of speeds."""
SPEEDS = tuple(permutations((1, 3, 5, 7, 9)))
SOME = 12
"""One of so many orders is simulated for the other loads and thresholds."""
EQUAL = 1e-6
"""Mean response times that differ by less than this fraction are one."""


class Permutations(Experiment):
    """Policies held against each other with each order of the sites' speeds."""

    traces = (TRACE,)
    unit = ""
    loads: ClassVar[Mapping[str, Sequence[float]]] = {"1": (1, 1, 1, 1, 1), "of Table 3": Table3.load}
    variants: ClassVar[Sequence[tuple[str, float]]] = (("1", 1.0), ("of Table 3", 0.0), ("of Table 3", 1.0))
    """Load and threshold, which the paper does not tell: beside load 1 and threshold 0, with some of the orders."""
    said_to_be_last: ClassVar[Mapping[str, float]] = {}

    def cells(self, seeds: int) -> Sequence[Cell]:
        return [
            Cell({"speeds": number, "policy": policy, "load": load, "threshold": threshold}, seed)
            for seed in range(seeds)
            for load, threshold in [("1", 0.0), *self.variants]
            for number in range(0, len(SPEEDS), 1 if (load, threshold) == ("1", 0.0) else SOME)
            for policy in self.policies
        ]

    @property
    @abstractmethod
    def policies(self) -> Sequence[str]:
        """What is compared; the last is the adaptive one."""

    @abstractmethod
    def setting(self, policy: str, speed: Sequence[float], load: Sequence[float], threshold: float) -> Setting:
        """What is simulated."""

    def is_variant(self, cell: Cell) -> bool:
        return (cell["load"], cell["threshold"]) != ("1", 0.0)

    def run(self, cell: Cell, traces: Traces) -> Mapping[str, Value]:
        number, load = int(cell["speeds"]), self.loads[str(cell["load"])]
        jobs, part = jobs_of(traces), (number + cell.seed) % PARTS
        size = -(-len(jobs) // PARTS)
        setting = self.setting(str(cell["policy"]), SPEEDS[number], load, float(cell["threshold"]))
        outcome = setting.simulate(jobs[part * size : (part + 1) * size])
        return {ENTIRE: responses(outcome)[ENTIRE] if outcome.jobs else 0.0}

    def _ratios(self, results: Sequence[Result]) -> dict[str, list[float]]:
        """Of each policy, for each order of speeds and seed, its response time over that of the best."""
        times: dict[tuple[Parameter, int], dict[str, float]] = {}
        for result in results:
            which = result.cell["speeds"], result.cell.seed
            times.setdefault(which, {})[str(result.cell["policy"])] = result.number(ENTIRE)
        best = {which: min(some.values()) for which, some in times.items()}
        return {
            policy: [some[policy] / best[which] if best[which] else 1.0 for which, some in times.items()]
            for policy in self.policies
        }

    def _most(self, results: Sequence[Result], policy: str) -> float:
        """How far a policy is behind the best at most, whatever load and threshold."""
        parts = by(results, "load", "threshold").values()
        return max(ratio for some in parts for ratio in self._ratios(some)[policy])

    def rows(self, results: Sequence[Result]) -> list[Row]:
        ratios = self._ratios([result for result in results if not self.is_variant(result.cell)])
        found = []
        for policy, own in ratios.items():
            best = sum(ratio <= 1 + EQUAL for ratio in own)
            last = sum(
                ratio > 1 + EQUAL and all(ratio >= other * (1 - EQUAL) for other in others)
                for ratio, *others in zip(own, *ratios.values(), strict=True)
            )
            found.append(Row.of(f"{policy}: best in so many of {len(own)}", [best]))
            found.append(Row.of(f"{policy}: last in so many", [last], self.said_to_be_last.get(policy)))
            found.append(Row.of(f"{policy}: response time over that of the best, mean", own))
            found.append(Row.of(f"{policy}: response time over that of the best, at most", [max(own)]))
        for load, threshold in self.variants:
            some = self._ratios([each for each in results if each.has(load=load, threshold=threshold)])
            for policy, own in some.items():
                if own:
                    label = f"load {load}, threshold {threshold:g}: {policy}: response time over that of the best, mean"
                    found.append(Row.of(label, own))
        return found

    def figure(self, results: Sequence[Result]) -> "Figure | None":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 3.5), layout="constrained")
        axes = figure.subplots()
        shown = self._ratios([result for result in results if not self.is_variant(result.cell)])
        for policy, ratios in shown.items():
            axes.plot(range(1, len(ratios) + 1), sorted(ratios), label=policy)
        axes.set(xlabel="orders of the sites' speeds, from the best on", ylabel="response time over that of the best")
        axes.legend()
        return figure


class Figure2(Permutations):
    """One queue for all, each job on one site."""

    name = "huang-2007-fig-2"
    title = "best-fit, fastest-one and the adaptive policy, with all orders of the speeds 1, 3, 5, 7, 9"
    policies = ("best-fit", "fastest-one", "adaptive")
    said_to_be_last: ClassVar[Mapping[str, float]] = {"adaptive": 0}

    def setting(self, policy: str, speed: Sequence[float], load: Sequence[float], threshold: float) -> Setting:
        return Setting(speed, load, policy, threshold=threshold)

    def remarks(self, results: Sequence[Result]) -> str:
        return (
            f"{_PARTS_TOLD} The paper shows some of the permutations in a plot without numbers, and says that the "
            "adaptive policy is never the last and always near to the best. It does not say which load and which "
            "threshold they had: here load 1 and threshold 0, and below with some of the orders others. In none of all "
            f"these simulations does fastest-one take more than {self._most(results, 'fastest-one'):.3f} times as long "
            f"as the best, and the adaptive policy {self._most(results, 'adaptive'):.3f} times: it takes the fastest "
            "site unless another choice lets more of those who wait start. So it is never poor here, either, but there "
            "is no case in which fastest-one is, as the paper has them."
        )


class Figure3(Permutations):
    """Jobs that no site has room for are split; each then takes 1 + p times as long."""

    name = "huang-2007-fig-3"
    title = "jobs split over sites at the price p = 2: larger-first, faster-first and the adaptive policy"
    single = "one site, adaptive"
    policies = (single, "larger-first", "faster-first", "adaptive")

    def setting(self, policy: str, speed: Sequence[float], load: Sequence[float], threshold: float) -> Setting:
        if policy == self.single:
            return Setting(speed, load, "adaptive", threshold=threshold)
        return Setting(speed, load, policy, threshold=threshold, p=2.0)

    def remarks(self, results: Sequence[Result]) -> str:
        return (
            f"{_PARTS_TOLD} The paper says that to split jobs is better than not to, and that the adaptive policy is "
            "better than the other two for each of the 120 orders. A split job runs as fast as the slowest of its "
            "sites, which the paper does not say; nor does it tell load and threshold: here load 1 and threshold 0, "
            "and below with some of the orders others."
        )


_PARTS_TOLD = (
    f"Each order of speeds is simulated with one of {PARTS} equal parts of the trace, the next one for the next order "
    f"and for the next seed: `--seeds {PARTS}` simulates all of it."
)


def _names(result: Result) -> list[str]:
    return [name for name in (ENTIRE, *map(site_name, SITES)) if name in result.values]


def _bars(labels: Sequence[str], groups: Mapping[str, Sequence[float]], says: str, *, log: bool = False) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(groups)
    for number, (name, values) in enumerate(groups.items()):
        places = [place + width * (number - (len(groups) - 1) / 2) for place in range(len(labels))]
        axes.bar(places, values, width, label=name)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel(says)
    if log:
        axes.set_yscale("log")
    if len(groups) > 1:
        axes.legend()
    return figure


EXPERIMENTS: tuple[Experiment, ...] = (Table1(), Figure1(), Figure2(), Table3(), Figure3())
