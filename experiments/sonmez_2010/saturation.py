"""Reproduce Table IV: the net utilisation at which jobs pile up in the queue."""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import ClassVar

from experiments.experiment import Cell, Result, Row, group_results
from experiments.intervals import NORMAL
from experiments.sonmez_2010.loads import POISSON, PRIME, SERIES, WAVE, WAVE_2, WF, OfLoads, build_cell

STEP = 5
"""Percent between two utilisations of the paper."""
PAPER = {WF: 90, PRIME: 95, POISSON: 85, WAVE: 75, WAVE_2: 80}
"""Upper end of the paper's interval in percent: the grid is saturated there, and not a step below it."""
SATURATED = 0.5
"""Share of seeds from which a utilisation counts as saturating; the paper has one workload for each."""


def is_saturated(result: Result) -> bool:
    """Return whether the last quarter of the jobs waited clearly longer than the second, and longer than a job runs."""
    early, late = result.number("queued early"), result.number("queued late")
    return late > 1.3 * early and late > 2 * SERIES[str(result.cell["series"])].lasts


def estimate_share(flags: Sequence[bool]) -> tuple[float, float, float]:
    """Return the share of true flags and its 95 % interval (Wilson)."""
    n, z = len(flags), NORMAL
    fraction = sum(flags) / n
    middle = (fraction + z * z / (2 * n)) / (1 + z * z / n)
    half = z * sqrt(fraction * (1 - fraction) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return fraction, max(0.0, middle - half), min(1.0, middle + half)


def saturates_at(shares: Mapping[int, float]) -> float:
    """Return the first percentage with a sufficient share, or a step beyond the last one if there is none."""
    return next((percent for percent in sorted(shares) if shares[percent] >= SATURATED), max(shares) + STEP)


class Table4(OfLoads):
    name = "sonmez-2010-table-4"
    title = "from which net utilisation on jobs pile up, without and with co-allocation"
    unit = "net utilisation, %; of the lines with *at*: seeds of which the queue grows, %"
    seeds = 40
    steps: ClassVar[Sequence[int]] = (-1, 0)
    """Utilisations to simulate, in steps from the upper end of the paper's interval."""
    queues: ClassVar[Mapping[str, tuple[str, float, Sequence[int]]]] = {"": ("head", 0.0, steps)}
    """Queue mode, start-up time in seconds and steps, by label."""

    def list_cells(self, seeds: int) -> Sequence[Cell]:
        return [
            build_cell(series, percent, seed, queue, startup)
            for queue, startup, steps in self.queues.values()
            for series, paper in PAPER.items()
            for percent in dict.fromkeys(min(paper + STEP * step, 100) for step in steps)
            for seed in range(seeds)
        ]

    def build_rows(self, results: Sequence[Result]) -> list[Row]:
        rows = []
        for label, (queue, startup, _) in self.queues.items():
            mine = [result for result in results if result.has_parameters(queue=queue, startup=startup)]
            for series, paper in PAPER.items():
                by_percent = {
                    int(p): r
                    for (p,), r in group_results(
                        [r for r in mine if r.has_parameters(series=series)], "percent"
                    ).items()
                }
                shares = {
                    percent: estimate_share([is_saturated(result) for result in group])
                    for percent, group in by_percent.items()
                }
                ends = [saturates_at({percent: s[bound] for percent, s in shares.items()}) for bound in (0, 2, 1)]
                rows.append(Row(f"{label}{series}: saturated at", paper, *ends))
                rows += self._build_share_rows(f"{label}{series}", shares)
        return rows

    def _build_share_rows(self, label: str, shares: Mapping[int, tuple[float, float, float]]) -> list[Row]:
        return [
            Row(f"– {label} at {percent} %", None, *(100 * value for value in shares[percent]))
            for percent in sorted(shares)
        ]

    def write_remarks(self, results: Sequence[Result]) -> str:
        return (
            "The paper gives the interval in which saturation sets in; here stands its upper end, the first step of 5 "
            f"% that saturates. A workload counts as saturating where jobs of the last six hours wait 1.3 times as "
            "long as those of the second six, and longer than two jobs last; a utilisation does where at least "
            f"{SATURATED:.0%} of the seeds are. The interval is by Wilson's bounds of that share. Single workloads "
            "scatter: with one for each utilisation, as the paper has it, every interval may come out a step off.\n\n"
            "Run times on two and three clusters, and those of Poisson, are estimates (`das3.toml`): Wave's are fitted "
            "to this table. The queue is `head`, the reading of the paper's text with which all five intervals come "
            "out: a job is tried once when it is submitted, then waits, and a scan ends at the first job that does not "
            "fit. What the other readings give: sonmez-2010-table-4-queue."
        )


class Table4ByQueue(Table4):
    """Repeat Table IV with each queue mode, which the paper does not specify."""

    name = "sonmez-2010-table-4-queue"
    title = "what Table IV is with other readings of how the queue is scanned"
    unit = "net utilisation, %"
    seeds = 3
    queues: ClassVar[Mapping[str, tuple[str, float, Sequence[int]]]] = {
        "fcfs, ": ("fcfs", 0.0, (-2, -1, 0)),
        "scan, ": ("scan", 0.0, (0, 1, 2)),
        "scan and 10 s of start-up, ": ("scan", 10.0, (-1, 0, 1)),
    }

    def _build_share_rows(self, label: str, shares: Mapping[int, tuple[float, float, float]]) -> list[Row]:
        return []

    def write_remarks(self, results: Sequence[Result]) -> str:
        return (
            "`fcfs` tries nobody out of turn, `scan` goes on past jobs that do not fit, as the paper's text has it "
            'literally ("scans the queue from head to tail to see whether it is able to place any job"): small jobs '
            "then overtake wide ones, the grid stays fuller, and it saturates later. The start-up of 10 s, in which "
            "nodes are held, is what the paper measured in its real experiments. Each line tries three utilisations: "
            "one that is beyond the last of them stands a step above it, one before the first at it."
        )
