"""Reproduce Figures 2, 6, 9 and 10: how policies combine clusters, and the effect on response times."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from experiments.experiment import Cell, Experiment, Result, Row, Value, by
from experiments.local_users import poisson
from experiments.sonmez_2010.das3 import DELFT, LEIDEN, by_latency, grid, seconds
from experiments.sonmez_2010.gains import curves
from experiments.sonmez_2010.loads import POISSON, PRIME, SERIES, WAVE, WF
from experiments.sonmez_2010.workloads import DAY, HOUR, SIZES, measured, rules, split, stream
from experiments.traces import Traces
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ComponentRequest, FlexibleRequest, NonFixedRequest
from koalapy.simulation.jobs import LocalUser, PlannedJob, RunTime
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import SimulatedCluster, SimulatedGrid

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Figure2(Experiment):
    name = "sonmez-2010-fig-2"
    title = "how WF and FCM place 24 nodes where three clusters have 16 idle ones each"
    unit = "nodes"
    paper_says: ClassVar[Mapping[str, Sequence[float]]] = {"WF": (8, 8, 8), "FCM": (16, 8, 0)}
    specs: ClassVar[Mapping[str, JobSpec]] = {
        "WF": JobSpec(NonFixedRequest((ComponentRequest(8),) * 3), ("program",), policy="worst-fit"),
        "FCM": JobSpec(FlexibleRequest(24), ("program",), policy="cluster-minimization"),
    }

    def cells(self, seeds: int) -> Sequence[Cell]:
        return [Cell({"policy": policy}) for policy in self.paper_says]

    def run(self, cell: Cell, traces: Traces) -> Mapping[str, Value]:
        where = SimulatedGrid({f"C{number}": SimulatedCluster(16) for number in (1, 2, 3)})
        (job,) = Simulation(where, rules()).run([PlannedJob(0.0, self.specs[str(cell["policy"])], 1.0)]).jobs
        placed = dict(job.gang)
        return {name: placed.get(name, 0) for name in where.clusters}

    def rows(self, results: Sequence[Result]) -> list[Row]:
        return [
            Row.of(f"{policy} on {name}", [result.number(name)], said)
            for result, (policy, all_said) in zip(results, self.paper_says.items(), strict=True)
            for name, said in zip(("C1", "C2", "C3"), all_said, strict=True)
        ]


def background(where: SimulatedGrid, utilisation: float, duration: float, seed: int) -> Iterator[LocalUser]:
    """Generate local users on each cluster, as in the paper's real experiments, with assumed sizes and run times."""
    nodes = {name: each.nodes for name, each in where.clusters.items()}
    return poisson(nodes, utilisation, duration=2 * duration, sizes=(4, 8, 16), lasts=600.0, seed=seed)


FCM, CA, GROUPS = "FCM", "CA", "CA in groups"
BACKGROUND = 0.2
"""Mean fraction of nodes used by local users in Figure 9."""
GRIDS = {"without Delft": DELFT, "with Delft": LEIDEN}
"""The cluster that each grid leaves out."""


def aware(size: int, options: tuple[tuple[str, str], ...] = ()) -> JobSpec:
    return JobSpec(FlexibleRequest(size), ("program",), policy="communication-aware", policy_options=options)


POLICIES: Mapping[str, Callable[[int], JobSpec]] = {
    FCM: split,
    CA: aware,
    GROUPS: partial(aware, options=(("group_latency", "500us"),)),
}


def run(
    cell: Cell, sizes: Sequence[int], duration: float, local: float = 0.0, run_time: RunTime | None = None
) -> Mapping[str, Value]:
    """Simulate jobs of Wave.

    By default the latencies between clusters determine run times; ``run_time`` overrides this.
    """
    where, curve = grid(GRIDS[str(cell["grid"])]), seconds("wave")
    specs = {size: POLICIES[str(cell["policy"])](size) for size in sizes}
    jobs = stream(specs, curve[0], int(cell["percent"]) / 100, where.nodes, duration, cell.seed)
    users = background(where, local, duration, cell.seed)
    simulation = Simulation(where, rules(), run_time=run_time or by_latency(curve), local_users=users)
    return measured(simulation.run(jobs), duration)


class Figure10(Experiment):
    name = "sonmez-2010-fig-10"
    title = "how long Wave takes by FCM, by CA, and by CA within groups of near clusters"
    unit = "mean response time, s"
    seeds = 4
    sizes: ClassVar[Sequence[int]] = (32, 48, 64)
    percents: ClassVar[Sequence[int]] = range(20, 81, 5)

    def cells(self, seeds: int) -> Sequence[Cell]:
        return [
            Cell({"grid": where, "policy": policy, "percent": percent}, seed)
            for where in GRIDS
            for policy in POLICIES
            for percent in self.percents
            for seed in range(seeds)
        ]

    def run(self, cell: Cell, traces: Traces) -> Mapping[str, Value]:
        return run(cell, self.sizes, DAY)

    def rows(self, results: Sequence[Result]) -> list[Row]:
        return [
            Row.of(f"{where}, {policy} at {percent} %", [result.number("response") for result in of])
            for (where, policy, percent), of in by(results, "grid", "policy", "percent").items()
            if int(percent) % 10 == 0
        ]

    def figure(self, results: Sequence[Result]) -> "Figure":
        lines: dict[str, dict[int, list[float]]] = {}
        for (where, policy, percent), of in by(results, "grid", "policy", "percent").items():
            lines.setdefault(f"{where}, {policy}", {})[int(percent)] = [result.number("response") for result in of]
        return curves(lines, "mean response time, s", top=3000.0, bottom=0.0)

    def remarks(self, results: Sequence[Result]) -> str:
        return (
            "The paper has CA below FCM at almost every load, saturation at 75 to 80 % without Delft and at 60 to 70 % "
            "with it. **Here it is so only in part.** CA gains at low load, and beyond it loses: it begins with the "
            "clusters of the lowest average latency, Amsterdam and MultimediaN, whatever little is idle there, and so "
            "combines more clusters than FCM does. Held within groups of clusters that are at most 0.5 ms from each "
            "other, which the paper recommends at its end, it is the best throughout. With Delft all but the groups "
            "saturate earlier than without, as in the paper, and all 10 to 15 % of utilisation earlier than there.\n\n"
            "CA does here what the paper's text says, to the letter. How long Wave takes on which combination the "
            "paper measured and does not tell. Here each cluster more adds in proportion to the longest latency "
            "between those combined, so that four without Delft take the 750 s of the text: two then take 292 s and "
            "three 475 s on average, which is what Table IV asks for. **That is what the result hangs on**: where the "
            "number of clusters adds nothing of its own, and only the mean latency between them counts, CA is the "
            "better one (sonmez-2010-fig-10-times). The plot ends at 3000 s."
        )


class Figure9(Experiment):
    name = "sonmez-2010-fig-9"
    title = "how CA fares against FCM with Wave on 64 nodes, local users beside it"
    unit = "change of the mean response time, s"
    seeds = 12
    paper_says: ClassVar[Mapping[str, float]] = {"without Delft": -50, "with Delft": -230}

    def cells(self, seeds: int) -> Sequence[Cell]:
        return [
            Cell({"grid": where, "policy": policy, "percent": 40}, seed)
            for where in GRIDS
            for policy in POLICIES
            for seed in range(seeds)
        ]

    def run(self, cell: Cell, traces: Traces) -> Mapping[str, Value]:
        return run(cell, (64,), 4 * HOUR, BACKGROUND)

    def rows(self, results: Sequence[Result]) -> list[Row]:
        of = {key: [r.number("response") for r in found] for key, found in by(results, "grid", "policy").items()}
        return [
            Row.of(
                f"{where}, {policy}",
                [ours - fcm for ours, fcm in zip(of[where, policy], of[where, FCM], strict=True)],
                said if policy == CA else None,
            )
            for where, said in self.paper_says.items()
            for policy in (CA, GROUPS)
        ]

    def remarks(self, results: Sequence[Result]) -> str:
        return (
            f"The paper's is one real run of four hours, some 90 jobs, with 10 to 30 % of local load; here it is "
            f"{BACKGROUND:.0%} on average. In the paper CA gains in both. **Here CA by itself loses**, for the reason "
            "told at sonmez-2010-fig-10; held within groups of near clusters it gains, without Delft about as much as "
            "there. What it hangs on: sonmez-2010-fig-9-times. What it is like "
            "[live, on a small grid](live/sonmez-2010.md)."
        )


class Figure6(Experiment):
    """Simulate the real experiment of Figure 6."""

    name = "sonmez-2010-fig-6"
    title = "how FCM changes response times against WF at 40 % with local users beside it, as in the real experiments"
    unit = "%"
    seeds = 8
    loads: ClassVar[Sequence[int]] = (10, 20, 30)
    """Mean percentage of nodes used by local users; the paper kept it between 10 and 30."""
    paper_says: ClassVar[Mapping[str, float]] = {PRIME: -16, POISSON: -5, WAVE: 50}
    startup: ClassVar[float] = 10.0

    def cells(self, seeds: int) -> Sequence[Cell]:
        return [
            Cell({"series": series, "local": local}, seed)
            for local in self.loads
            for series in (WF, *self.paper_says)
            for seed in range(seeds)
        ]

    def run(self, cell: Cell, traces: Traces) -> Mapping[str, Value]:
        series, where = SERIES[str(cell["series"])], grid(DELFT, self.startup)
        specs = {size: series.spec(size) for size in SIZES}
        jobs = stream(specs, series.lasts, 0.4, where.nodes, 4 * HOUR, cell.seed)
        users = background(where, int(cell["local"]) / 100, 4 * HOUR, cell.seed)
        outcome = Simulation(where, rules(), run_time=series.run_time, local_users=users).run(jobs)
        return measured(outcome, 4 * HOUR)

    def rows(self, results: Sequence[Result]) -> list[Row]:
        rows = []
        for (local,), of in by(results, "local").items():
            for series, said in self.paper_says.items():
                responses = {name: [r.number("response") for r in of if r.has(series=name)] for name in (WF, series)}
                changes = [100 * (one / other - 1) for one, other in zip(responses[series], responses[WF], strict=True)]
                label = f"{series}, local users {local} %"
                rows.append(Row.of(f"{label}: change", changes, said))
                split = [100 * r.number("co-allocated") for r in of if r.has(series=series)]
                rows.append(Row.of(f"{label}: co-allocated", split))
        return rows

    def remarks(self, results: Sequence[Result]) -> str:
        return (
            "The changes are those of Table V, which come from this figure. A run is four hours on the grid without "
            "Delft, with 10 s of start-up. Of the local load the paper tells only that it was held between 10 and 30 "
            "%; here local jobs take 4, 8 or 16 nodes for ten minutes on average, and wait in their cluster's own "
            "queue. What it is like [live, on a small grid, and simulated beside it](live/sonmez-2010.md)."
        )
