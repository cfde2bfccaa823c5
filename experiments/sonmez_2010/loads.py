"""Simulate the workloads of VI-C: one application under one policy at a net utilisation of the grid."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

from experiments.experiment import Cell, Experiment, Value
from experiments.run_times import by_number_of_clusters
from experiments.sonmez_2010.das3 import DELFT, build_grid, build_synthetic, run_times_of
from experiments.sonmez_2010.workloads import (
    DAY,
    SIZES,
    generate_stream,
    paper_rules,
    request_few_clusters,
    request_one_cluster,
    summarise_outcome,
)
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


def build_series(application: str, spec: Callable[[int], JobSpec]) -> Series:
    curve = run_times_of(application)
    return Series(curve[0], by_number_of_clusters(curve), spec)


def build_synthetic_series(ratio: float, spec: Callable[[int], JobSpec]) -> Series:
    """Return the synthetic application with a communication-to-computation ratio."""
    return Series(*build_synthetic(ratio), spec)


WF, PRIME, POISSON, WAVE, WAVE_2 = "WF", "FCM W-Prime", "FCM W-Poisson", "FCM W-Wave", "FCM W-Wave, limit 2"
SYNTHETIC_WF = "WF, synthetic"
RATIOS = (0.1, 0.25, 0.5, 1.0, 4.0)
SERIES: Mapping[str, Series] = {
    WF: build_series("prime", request_one_cluster),  # the three applications take the same time on one cluster
    PRIME: build_series("prime", request_few_clusters),
    POISSON: build_series("poisson", request_few_clusters),
    WAVE: build_series("wave", request_few_clusters),
    WAVE_2: build_series("wave", partial(request_few_clusters, limit=2)),
    SYNTHETIC_WF: build_synthetic_series(0.0, request_one_cluster),
    **{f"CCR {ratio:g}": build_synthetic_series(ratio, request_few_clusters) for ratio in RATIOS},
}


def build_cell(series: str, percent: int, seed: int, queue: str = "head", startup: float = 0.0) -> Cell:
    """Return a cell. ``percent`` is the net utilisation: the used share of nodes if each job ran on one cluster."""
    return Cell({"series": series, "percent": percent, "queue": queue, "startup": startup}, seed)


class OfLoads(Experiment):
    """Run the workloads of section VI, which several figures and tables share."""

    @staticmethod
    def simulate_cell(cell: Cell, traces: Traces) -> Mapping[str, Value]:
        """Simulate 24 hours of arrivals on the grid without Delft, initially empty, until the last job has ended."""
        series, grid = SERIES[str(cell["series"])], build_grid(DELFT, float(cell["startup"]))
        specs = {size: series.spec(size) for size in SIZES}
        jobs = generate_stream(specs, series.lasts, int(cell["percent"]) / 100, grid.nodes, DAY, cell.seed)
        simulation = Simulation(grid, paper_rules(cast(QueueMode, cell["queue"])), run_time=series.run_time)
        return summarise_outcome(simulation.run(jobs), DAY)
