"""Reproduce Figures 2 and 3 of Huang, Shih and Chung (2007): policies with each order of the sites' speeds."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import permutations
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

from experiments.experiment import Cell, Experiment, Parameter, Result, Row, Value
from experiments.huang_2007_grid import ENTIRE, TABLE_3_LOAD, TRACE, Setting, jobs_of, mean_responses
from experiments.huang_2007_plain import mean_response
from experiments.traces import Traces
from koalapy.workload.swf import TraceJob

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = 32
"""Number of equal parts of the trace; each order of speeds is simulated on one of them."""
SPEEDS = tuple(permutations((1, 3, 5, 7, 9)))
EQUAL = 1e-6
"""Relative difference below which mean response times count as equal."""
LOADS: Mapping[str, Sequence[float]] = {"1": (1,) * 5, "of Table 3": TABLE_3_LOAD, "12": (12,) * 5}
READINGS: Sequence[tuple[str, float]] = tuple((load, threshold) for load in LOADS for threshold in (0.0, 1.0))
"""Load and threshold, which the paper does not give."""
CROWDED = ("12", 1.0)
"""The reading in which each policy is sometimes not the best."""


class Orders(Experiment):
    """Compare policies over the orders of the sites' speeds, each order on a part of the trace."""

    traces = (TRACE,)
    unit = ""
    parts: ClassVar[int] = PARTS
    few: ClassVar[int]
    """Simulate every ``few``-th order with readings that are not in ``all_of``."""
    all_of: ClassVar[Sequence[tuple[str, float]]] = ()
    """Readings of which all orders are simulated."""
    paper_says: ClassVar[Mapping[str, float]] = {}
    """The paper's numbers, by the ends of row labels."""

    @property
    @abstractmethod
    def policies(self) -> Sequence[str]:
        """Return the compared policies; the adaptive one is last."""

    @abstractmethod
    def build_setting(self, policy: str, speed: Sequence[float], load: Sequence[float], threshold: float) -> Setting:
        """Return the setting to simulate."""

    def list_cells(self, seeds: int) -> Sequence[Cell]:
        return [
            Cell({"load": load, "threshold": threshold, "speeds": number, "policy": policy}, seed)
            for seed in range(seeds)
            for load, threshold in READINGS
            for number in range(0, len(SPEEDS), 1 if (load, threshold) in self.all_of else self.few)
            for policy in self.policies
        ]

    def simulate_cell(self, cell: Cell, traces: Traces) -> Mapping[str, Value]:
        jobs, number = jobs_of(traces), int(cell["speeds"])
        size, part = -(-len(jobs) // self.parts), (number + cell.seed) % self.parts
        load, threshold = LOADS[str(cell["load"])], float(cell["threshold"])
        setting = self.build_setting(str(cell["policy"]), SPEEDS[number], load, threshold)
        mine = jobs[part * size : (part + 1) * size]
        return {ENTIRE: self.simulate_jobs(mine, setting) if mine else 0.0}

    def simulate_jobs(self, jobs: Sequence[TraceJob], setting: Setting) -> float:
        """Return the mean response time."""
        return mean_responses(setting.simulate_jobs(jobs))[ENTIRE]

    def compute_ratios(self, results: Sequence[Result]) -> dict[str, list[float]]:
        """Return the response time of each policy over that of the best, for each order of speeds and seed."""
        times: dict[tuple[Parameter, int], dict[str, float]] = {}
        for result in results:
            order = result.cell["speeds"], result.cell.seed
            times.setdefault(order, {})[str(result.cell["policy"])] = result.number(ENTIRE)
        best = {order: min(of_order.values()) for order, of_order in times.items()}
        return {
            policy: [of_order[policy] / best[order] if best[order] else 1.0 for order, of_order in times.items()]
            for policy in self.policies
        }

    def compute_reading(self, results: Sequence[Result], reading: tuple[str, float]) -> dict[str, list[float]]:
        """Return ``compute_ratios`` of the results with one reading."""
        load, threshold = reading
        return self.compute_ratios(
            [result for result in results if result.has_parameters(load=load, threshold=threshold)]
        )

    def build_rows(self, results: Sequence[Result]) -> list[Row]:
        rows = []
        for reading in READINGS:
            ratios = self.compute_reading(results, reading)
            for policy, policy_ratios in ratios.items():
                if policy_ratios:
                    rows += self._build_policy_rows(
                        f"{_reading_label(reading)}: {policy}", policy_ratios, list(ratios.values())
                    )
        return rows

    def _build_policy_rows(
        self, label: str, policy_ratios: Sequence[float], all_ratios: Sequence[Sequence[float]]
    ) -> list[Row]:
        ends = {
            f"best in so many of {len(policy_ratios)}": [float(sum(ratio <= 1 + EQUAL for ratio in policy_ratios))],
            "last in so many": [float(_count_last(policy_ratios, all_ratios))],
            "time over that of the best, mean": policy_ratios,
            "time over that of the best, at most": [max(policy_ratios)],
        }
        policy = label.rpartition(": ")[2]
        return [
            Row.from_values(f"{label}: {end}", values, self.paper_says.get(f"{policy}: {end.split(' so many')[0]}"))
            for end, values in ends.items()
        ]

    def draw_figure(self, results: Sequence[Result]) -> "Figure | None":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3.6), layout="constrained")
        both = figure.subplots(1, 2)
        for axes, reading in zip(both, (READINGS[0], CROWDED), strict=True):
            for policy, ratios in self.compute_reading(results, reading).items():
                axes.plot(range(1, len(ratios) + 1), sorted(ratios), label=policy)
            axes.set(xlabel="orders of the sites' speeds, from the best on", title=_reading_label(reading))
        both[0].set_ylabel("response time over that of the best")
        both[0].legend()
        return figure

    def count_best(self, results: Sequence[Result], policy: str) -> str:
        """Describe for each reading in how many orders a policy is the best."""
        counts = []
        for reading in READINGS:
            policy_ratios = self.compute_reading(results, reading)[policy]
            best = sum(ratio <= 1 + EQUAL for ratio in policy_ratios)
            counts.append(f"{best} of {len(policy_ratios)} with {_reading_label(reading)}")
        return "; ".join(counts)


def _format_parts(parts: int) -> str:
    return (
        f"Each order of speeds is simulated with one of {parts} equal parts of the trace, the next one for the next "
        f"order and for the next seed: `--seeds {parts}` simulates all of it."
    )


def _reading_label(reading: tuple[str, float]) -> str:
    load, threshold = reading
    return f"load {load}, threshold {threshold:g}"


def _count_last(policy_ratios: Sequence[float], all_ratios: Sequence[Sequence[float]]) -> int:
    """Count the orders in which a policy takes longest and longer than the best."""
    worst = [max(ratios) for ratios in zip(*all_ratios, strict=True)]
    return sum(
        ratio > 1 + EQUAL and ratio >= longest * (1 - EQUAL)
        for ratio, longest in zip(policy_ratios, worst, strict=True)
    )


class Figure2(Orders):
    """Compare policies with one queue for all sites and each job on one site."""

    name = "huang-2007-fig-2"
    title = "best-fit, fastest-one and the adaptive policy, with all orders of the speeds 1, 3, 5, 7, 9"
    policies = ("best-fit", "fastest-one", "adaptive")
    few = 20
    all_of: ClassVar[Sequence[tuple[str, float]]] = (CROWDED,)
    paper_says: ClassVar[Mapping[str, float]] = {"adaptive: last in": 0}

    def build_setting(self, policy: str, speed: Sequence[float], load: Sequence[float], threshold: float) -> Setting:
        return Setting(speed, load, policy, threshold=threshold)

    def write_remarks(self, results: Sequence[Result]) -> str:
        return (
            f"{_format_parts(self.parts)} With load and threshold of which it does not matter much, six of the orders "
            "are. What the paper says, what it leaves open, and the same with the whole trace: "
            "huang-2007-fig-2-whole. The parts have the order of the policies and about their distances, not how often "
            "each is the best: what queues up for months is not in them, and in a short stretch two policies do more "
            f"often the very same. The adaptive policy is the best in {self.count_best(results, 'adaptive')}."
        )


class Figure2Whole(Figure2):
    """Repeat Figure 2 on the whole trace without the scheduler, which would take hours."""

    name = "huang-2007-fig-2-whole"
    title = "Figure 2 with the whole trace and each of the loads and thresholds, by a plain loop"
    parts = 1
    few = 10
    all_of: ClassVar[Sequence[tuple[str, float]]] = (READINGS[0], ("of Table 3", 1.0), CROWDED)

    def simulate_jobs(self, jobs: Sequence[TraceJob], setting: Setting) -> float:
        return mean_response(jobs, setting)

    def write_remarks(self, results: Sequence[Result]) -> str:
        crowded = self.compute_reading(results, CROWDED)
        means = ", ".join(f"{policy} {fmean(policy_ratios or [1.0]):.3f}" for policy, policy_ratios in crowded.items())
        return (
            "Not by the scheduler, but by its rules as a plain loop, which gives the same for the same jobs and takes "
            "a hundredth of the time.\n\n"
            "The paper shows some of the orders in a plot without numbers, and says that each of best-fit and "
            "fastest-one is poor with some, and that the adaptive policy is never the last and always near to the "
            "best. It tells neither load nor threshold, so that both are varied here. The adaptive policy is the best "
            f"in {self.count_best(results, 'adaptive')}; fastest-one in {self.count_best(results, 'fastest-one')}."
            "\n\n"
            "**With the loads that the paper has elsewhere its picture does not come out.** The sites have five times "
            "the trace's speed on average and 3.5 times its processors, so that at load 1 some 5 % of them are used: "
            "hardly ever does a job wait, nothing is better than the fastest site, and the adaptive policy takes it "
            "unless another choice lets more of those who wait start. **It comes out in part where the sites are "
            "crowded**, at about twelve times the trace's load, and only with threshold 1: there each of the three is "
            f"poor with some orders, the adaptive policy as well ({means} times as long as the best on average). Which "
            "waiting jobs it counts matters there: here those that could start anywhere; counted only where the "
            "threshold lets them, the tightest site first, it had 1.033 and fastest-one 1.044 in a trial apart from "
            "this, and was the last with 10 of the 120 orders.\n\n"
            "Looked at as well with some of the orders, and no nearer to the paper: one queue for each site in place "
            "of one for all, who comes first in place of the narrowest first, a threshold of one half, the fastest of "
            "those sites that best-fit finds equal, and an adaptive policy that takes best-fit's site where neither "
            "lets more jobs start, which is best-fit in all but name."
        )


class Figure3(Orders):
    """Split jobs that fit on no site; each split job takes 1 + p times as long."""

    name = "huang-2007-fig-3"
    title = "jobs split over sites at the price p = 2: larger-first, faster-first and the adaptive policy"
    single = "one site, adaptive"
    policies = (single, "larger-first", "faster-first", "adaptive")
    parts = 2 * PARTS
    few = 20
    all_of: ClassVar[Sequence[tuple[str, float]]] = (CROWDED,)

    def build_setting(self, policy: str, speed: Sequence[float], load: Sequence[float], threshold: float) -> Setting:
        if policy == self.single:
            return Setting(speed, load, "adaptive", threshold=threshold)
        return Setting(speed, load, policy, threshold=threshold, p=2.0)

    def write_remarks(self, results: Sequence[Result]) -> str:
        return (
            f"{_format_parts(self.parts)} With load and threshold of which it does not matter much, six of the orders "
            "are. The paper says that to split jobs is better than not to, and that the adaptive policy is better than "
            "the other two for each of the orders. Here it is the best of all in "
            f"{self.count_best(results, 'adaptive')}. A split job runs as fast as the slowest of its sites, which the "
            "paper does not say; nor does it tell load and threshold: see huang-2007-fig-2."
        )
