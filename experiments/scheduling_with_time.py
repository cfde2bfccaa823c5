"""Compare how long jobs wait with planned starts and without, on workload traces, beyond the papers."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import ceil, exp, log
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from experiments.beyond_traces import ALL, RULES, OfTraces
from experiments.experiment import Cell, Experiment, Result, Row, Value, group_results
from experiments.intervals import mean_interval
from experiments.trace_windows import Window, WindowJob, shorten_name
from experiments.traces import Traces
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.scheduler.rules import Rules
from koalapy.simulation.jobs import Outcome, PlannedJob
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import SimulatedCluster, SimulatedGrid
from koalapy.workload.tables import markdown_table

LOAD = 0.9
"""The offered load, to which the arrivals of a window are stretched."""
WIDE = 0.1
"""The part of all jobs that counts as the widest."""
SHORT_S = 10.0
"""Run times below count as so long in a bounded slowdown."""
A_MINUTE = 60.0
"""Added to each wait, so that windows in which hardly any job waits count little."""
MISSED = (
    "With exact walltimes all requirements for the means over the traces are met but the last. With users' "
    "walltimes the first two are missed narrowly, and on HPC2N also the widest tenth of a single trace (0.92, "
    "required 0.90). Where half of the jobs have no walltime the first two are missed clearly; which part the "
    "learned run times have in it was not examined. The mean wait against `scan` is missed in all settings, since "
    "nodes stay idle for the planned job, which `scan` gives to any job; for this its widest jobs and its longest "
    "waits are worse. A plan after 12 hours meets it with walltimes, but not the requirement for the widest jobs. "
    "Not measured: more than five windows of a trace, local users, and the mixes of GrenchMark. The figures are "
    "those of commit 6553eed3; since then estimates are renewed every ten minutes, not in each scan."
)
"""Which requirements are missed, and why."""
DEFAULT = "plan after 1 h"
TODAY = Path(__file__).with_name("scheduling_with_time.json")
"""Results of the scheduler with aging and starvation guarantee, which did not look at walltimes, and its commit."""


class Waiting(OfTraces):
    """Compare the plan with the scheduler before it, which kept nodes without a time, and with no plan."""

    name = "beyond-traces-waiting"
    title = "waits with planned starts, without, and with nodes kept without a time, on five traces"
    measure = "wait"
    measures: ClassVar[Mapping[str, str]] = {"wait": "all", "widest": "widest tenth", "longest": "longest"}
    seeds = 5
    jobs = 500
    traces = (  # type: ignore[assignment]
        "KTH-SP2-1996-2.1-cln",
        "CTC-SP2-1996-3.1-cln",
        "SDSC-SP2-1998-4.2-cln",
        "SDSC-BLUE-2000-4.2-cln",
        "HPC2N-2002-2.2-cln",
    )
    rules: ClassVar[Mapping[str, Rules]] = {
        "scan": replace(RULES, plan_after=None),
        "plan at once": replace(RULES, plan_after=0.0),
        "plan after 10 min": replace(RULES, plan_after=600.0),
        "plan after 1 h": replace(RULES, plan_after=3600.0),
        "plan after 12 h": replace(RULES, plan_after=43_200.0),
    }
    ways = ("today", *rules)
    settings = ("exact walltimes", "users' walltimes", "half without walltime")
    how = (
        "Arrivals are stretched to an offered load of 0.9. Jobs go to as few clusters as it takes. `today` is the "
        "scheduler with aging and starvation guarantee, as measured on its last commit; `scan` keeps no nodes. Users' "
        "walltimes are those of the trace; half without walltime: every second job has none, the others are exact."
    )

    def simulate_cell(self, cell: Cell, traces: Traces) -> Mapping[str, Value]:
        if cell["way"] == "today":
            stored = _today()["results"].get(f"{cell['trace']}/{cell.seed}")
            assert stored is not None, f"no result of seed {cell.seed} was stored: use {self.seeds} seeds at most"
            return dict(stored)
        return super().simulate_cell(cell, traces)

    def most_nodes(self, job: WindowJob, clusters: Mapping[str, int], setting: str) -> int:
        return sum(clusters.values())

    def simulate_window(
        self, window: Window, clusters: Mapping[str, int], setting: str, variant: str, seed: int
    ) -> Outcome:
        grid = SimulatedGrid({name: SimulatedCluster(nodes) for name, nodes in clusters.items()})
        offered = sum(job.nodes * job.ran for job in window.jobs) / (window.nodes * window.lasts)

        def plan_jobs() -> Iterator[PlannedJob]:
            for number, job in enumerate(window.jobs):
                spec = JobSpec(
                    FlexibleRequest(job.nodes),
                    ("program",),
                    policy="cluster-minimization",
                    application=f"user-{job.user}",
                    walltime=_walltime(job, setting, number),
                )
                yield PlannedJob(job.arrives_at * offered / LOAD, spec, max(1.0, job.ran))

        return Simulation(grid, self.rules[variant]).run(plan_jobs())

    def measure_more(self, outcome: Outcome, clusters: Mapping[str, int]) -> Mapping[str, Value]:
        """Return the waits of the widest jobs, the longest wait, and the mean bounded slowdown."""
        by_width = sorted(outcome.jobs, key=lambda job: job.planned.spec.request.total_size)
        return {
            "widest": fmean(job.waited for job in by_width[-ceil(len(by_width) * WIDE) :]),
            "longest": max(job.waited for job in outcome.jobs),
            "slowdown": fmean(
                max(1.0, (job.waited + job.planned.lasts) / max(SHORT_S, job.planned.lasts)) for job in outcome.jobs
            ),
        }

    def build_rows(self, results: Sequence[Result]) -> list[Row]:
        return [
            Row(
                f"{shorten_name(trace)}, {setting}: {way}, {of}",
                None,
                *self._ratio(results, trace, setting, way, measure),
            )
            for trace in (*self.traces, ALL)
            for setting in self.settings
            for way in (self.ways[1:] if trace == ALL else [DEFAULT])
            for measure, of in self.measures.items()
        ]

    def write_remarks(self, results: Sequence[Result]) -> str:
        lines = []
        for setting in self.settings:
            mean, widest, longest = (
                self._ratio(results, ALL, setting, DEFAULT, measure)[0] for measure in self.measures
            )
            scan = mean / self._ratio(results, ALL, setting, "scan")[0]
            lines.append([setting, *(f"{ratio:.2f}" for ratio in (mean, widest, longest, scan))])
        required = ["required at most", "0.60", "0.60", "1.00", "1.15"]
        header = ["walltimes", "mean wait", "wait of the widest tenth", "longest wait", "mean wait, × scan"]
        table = markdown_table(header, [*lines, required])
        return f"{super().write_remarks(results)}\n\nThe default ({DEFAULT}) over all traces:\n\n{table}\n\n{MISSED}"

    def _ratio(
        self, results: Iterable[Result], trace: str, setting: str, way: str, measure: str = "wait"
    ) -> tuple[float, float, float]:
        of = group_results(
            (one for one in results if one.has_parameters(setting=setting) and trace in (ALL, one.cell["trace"])), "way"
        )
        pairs = zip(of[way,], of[self.ways[0],], strict=True)
        mean, low, high = mean_interval(
            [log((one.number(measure) + A_MINUTE) / (other.number(measure) + A_MINUTE)) for one, other in pairs]
        )
        return exp(mean), exp(low), exp(high)


def _walltime(job: WindowJob, setting: str, number: int) -> float | None:
    exact = float(ceil(job.ran) + 1)
    if setting == "half without walltime":
        return exact if number % 2 else None
    return max(exact, job.requested) if setting == "users' walltimes" else exact


@cache
def _today() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(TODAY.read_text())
    return stored


EXPERIMENTS: tuple[Experiment, ...] = (Waiting(),)
