"""Simulate the workloads of VI-C: one application under one policy at a net utilisation of the grid."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

from experiments.experiment import Cell, Experiment, Value
from experiments.run_times import by_number_of_clusters
from experiments.sonmez_2010.das3 import DELFT, grid, seconds, synthetic
from experiments.sonmez_2010.workloads import DAY, SIZES, measured, rules, split, stream, whole
from experiments.traces import Traces
from koalapy.model.job_spec import JobSpec
from koalapy.scheduler.rules import QueueMode
from koalapy.simulation.jobs import RunTime
from koalapy.simulation.simulation import Simulation


@dataclass(frozen=True)
class Series:
    """An application under a policy."""

    lasts: float
    """Run time on one cluster, in seconds."""
    run_time: RunTime
    spec: Callable[[int], JobSpec]


def of(application: str, spec: Callable[[int], JobSpec]) -> Series:
    curve = seconds(application)
    return Series(curve[0], by_number_of_clusters(curve), spec)


def ccr(ratio: float, spec: Callable[[int], JobSpec]) -> Series:
    """Return the synthetic application with a communication-to-computation ratio."""
    return Series(*synthetic(ratio), spec)


WF, PRIME, POISSON, WAVE, WAVE_2 = "WF", "FCM W-Prime", "FCM W-Poisson", "FCM W-Wave", "FCM W-Wave, limit 2"
SYNTHETIC_WF = "WF, synthetic"
RATIOS = (0.1, 0.25, 0.5, 1.0, 4.0)
SERIES: Mapping[str, Series] = {
    WF: of("prime", whole),  # the three applications take the same time on one cluster
    PRIME: of("prime", split),
    POISSON: of("poisson", split),
    WAVE: of("wave", split),
    WAVE_2: of("wave", partial(split, limit=2)),
    SYNTHETIC_WF: ccr(0.0, whole),
    **{f"CCR {ratio:g}": ccr(ratio, split) for ratio in RATIOS},
}


def cell(series: str, percent: int, seed: int, queue: str = "head", startup: float = 0.0) -> Cell:
    """Return a cell. ``percent`` is the net utilisation: the used share of nodes if each job ran on one cluster."""
    return Cell({"series": series, "percent": percent, "queue": queue, "startup": startup}, seed)


class OfLoads(Experiment):
    """Run the workloads of section VI, which several figures and tables share."""

    @staticmethod
    def run(cell: Cell, traces: Traces) -> Mapping[str, Value]:
        """Simulate 24 hours of arrivals on the grid without Delft, initially empty, until the last job has ended."""
        series, where = SERIES[str(cell["series"])], grid(DELFT, float(cell["startup"]))
        specs = {size: series.spec(size) for size in SIZES}
        jobs = stream(specs, series.lasts, int(cell["percent"]) / 100, where.nodes, DAY, cell.seed)
        simulation = Simulation(where, rules(cast(QueueMode, cell["queue"])), run_time=series.run_time)
        return measured(simulation.run(jobs), DAY)
