"""Compare how long jobs wait with planned starts and without, on workload traces, beyond the papers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from statistics import fmean
from typing import ClassVar

from experiments.beyond_traces import RULES, OfTraces
from experiments.experiment import Value
from experiments.trace_windows import Window, WindowJob
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.simulation.jobs import Outcome, PlannedJob
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import SimulatedCluster, SimulatedGrid

LOAD = 0.9
WIDE = 0.1
SHORT = 10.0


class Waiting(OfTraces):
    name = "scheduling-with-time"
    measure = "wait"
    title = "how long jobs wait with a plan of starts"
    seeds = 5
    jobs = 500
    traces = (
        "KTH-SP2-1996-2.1-cln",
        "CTC-SP2-1996-3.1-cln",
        "SDSC-SP2-1998-4.2-cln",
        "SDSC-BLUE-2000-4.2-cln",
        "HPC2N-2002-2.2-cln",
    )
    ways = ("today", "scan", "plan")
    settings = ("exact walltimes", "users' walltimes")
    rules: ClassVar = {"plan": RULES, "scan": replace(RULES, plan_after=None)}
    how = ""

    def most_nodes(self, job: WindowJob, clusters: Mapping[str, int], setting: str) -> int:
        return sum(clusters.values())

    def simulate(self, of: Window, clusters: Mapping[str, int], setting: str, way: str, seed: int) -> Outcome:
        grid = SimulatedGrid({name: SimulatedCluster(nodes) for name, nodes in clusters.items()})
        offered = sum(job.nodes * job.ran for job in of.jobs) / (of.nodes * of.lasts)

        def jobs() -> Iterator[PlannedJob]:
            for job in of.jobs:
                walltime = float(ceil(job.ran) + 1)
                if setting == "users' walltimes":
                    walltime = max(walltime, job.requested)
                spec = JobSpec(
                    FlexibleRequest(job.nodes), ("program",), policy="cluster-minimization", walltime=walltime
                )
                yield PlannedJob(job.at * offered / LOAD, spec, max(1.0, job.ran))

        return Simulation(grid, self.rules[way]).run(jobs())

    def more(self, outcome: Outcome, clusters: Mapping[str, int]) -> Mapping[str, Value]:
        widest = sorted(outcome.jobs, key=lambda job: job.planned.spec.request.total_size)[
            -ceil(len(outcome.jobs) * WIDE) :
        ]
        return {
            "widest": fmean(job.waited for job in widest),
            "longest": max(job.waited for job in outcome.jobs),
            "slowdown": fmean(
                max(1.0, (job.waited + job.planned.lasts) / max(SHORT, job.planned.lasts)) for job in outcome.jobs
            ),
        }
