"""Reproduce Lérida, Solsona, Giné, García and Hernández (2008): match jobs with nodes and links of several clusters."""

from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean
from time import process_time
from typing import TYPE_CHECKING, Any

from experiments.experiment import Cell, Experiment, Parameter, Result, Row, Value, group_results
from experiments.matching_by_highs import match_by_highs
from experiments.traces import Traces
from koalapy.model.cluster import ClusterView, GridView, NodeClass, Uplink
from koalapy.model.request import FlexibleRequest
from koalapy.policies.knowledge import Knowledge
from koalapy.policies.matching import Matching, Mode, Problem, find_matching
from koalapy.policies.resource_matching import ResourceMatching

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NODES = 8
"""Nodes of each cluster."""
NODE_LINK = 125e6
"""Bytes per second of a node's link; PNBW is a share of it."""
POWERS = (1.0, 0.8, 0.6)
LEFT_BY_LOCAL = 0.85
"""Availability of a node with local activity, which takes 15 % of the processor."""
LOCAL_TRAFFIC = 500.0
"""Bytes per second of a node with local activity."""
PNBW, ACTIVITY = (25, 50, 75), (0, 25, 50, 75)
"""Values in per cent."""
MODES = (Mode.OPTIMAL, Mode.NON_SATURATED)
USUAL: Mapping[str, Parameter] = {
    "clusters": 16,
    "tasks": 32,
    "uplink": 2.0,
    "communication": 0.5,
    "pnbw": 50,
    "activity": 50,
}
"""Default parameters; ``uplink`` is in links of a node, ``communication`` a share, and each task has its own node."""


def build_cell(seed: int, mode: Mode, **parameters: Parameter) -> Cell:
    return Cell({**USUAL, "mode": mode.value, **parameters}, seed)


def read_number(cell: Cell, name: str) -> float:
    value = cell[name]
    assert isinstance(value, int | float)
    return value


def draw_by_mode(results: Sequence[Result], value: str, label: str) -> "Figure":
    """Draw a value over PNBW, a panel for each mode and a line for each local activity."""
    figure, axes = create_panels(len(MODES), label)
    for axis, mode in zip(axes, MODES, strict=True):
        of_mode = [result for result in results if result.has_parameters(mode=mode.value)]
        draw_lines(axis, of_mode, "pnbw", value, "activity", "local activity {} %")
        axis.set(title=mode.value, xlabel="PNBW, % of a node's link")
    axes[0].legend()
    return figure


def grid_of(cell: Cell) -> GridView:
    """Draw the speed of each cluster and its nodes with local activity, for the seed of the cell.

    Each node is a separate class, as in the paper.
    """
    random = Random(f"lerida-2008/{cell.seed}/{cell['clusters']}")
    clusters, uplinks = [], {}
    for place in range(int(read_number(cell, "clusters"))):
        # Draw in the same order for each activity, so that higher activity adds busy nodes and removes none.
        power = random.choice(POWERS)
        used = [100 * random.random() < read_number(cell, "activity") for _ in range(NODES)]
        powers = [power * (LEFT_BY_LOCAL if is_used else 1.0) for is_used in used]
        name = f"c{place:02}"
        classes = [NodeClass(f"n{node}", 1, power) for node, power in enumerate(powers)]
        clusters.append(ClusterView(name, NODES, NODES, node_classes=tuple(classes)))
        uplinks[name] = Uplink(read_number(cell, "uplink") * NODE_LINK, LOCAL_TRAFFIC * sum(used))
    return GridView(tuple(clusters), uplinks=uplinks)


def problem_of(cell: Cell) -> Problem:
    """Build the problem that the production policy solves for the cell."""
    bandwidth = read_number(cell, "pnbw") / 100 * NODE_LINK
    knowledge = Knowledge(communication=read_number(cell, "communication"), bandwidth=bandwidth)
    request = FlexibleRequest(int(read_number(cell, "tasks")))
    return ResourceMatching(mode_of(cell), knowledge).matching_problem(request, grid_of(cell))


def mode_of(cell: Cell) -> Mode:
    return Mode(str(cell["mode"]))


def setting_label(cell: Cell) -> str:
    return f"{cell['mode']}, PNBW {cell['pnbw']} %, local activity {cell['activity']} %"


class Figure5(Experiment):
    name = "lerida-2008-fig-5"
    title = "communication slowdown by per-node bandwidth (PNBW) and local activity"
    seeds = 30

    def list_cells(self, seeds: int) -> Sequence[Cell]:
        varied = [
            build_cell(seed, mode, pnbw=pnbw, activity=activity)
            for mode in MODES
            for pnbw in PNBW
            for activity in ACTIVITY
            for seed in range(seeds)
        ]
        variations: list[tuple[str, Parameter]] = [("uplink", 1.0), ("uplink", 4.0), ("tasks", 16), ("tasks", 64)]
        variations += [("communication", 0.2), ("communication", 0.8)]
        return varied + [
            build_cell(seed, Mode.OPTIMAL, pnbw=pnbw, **{name: value})
            for name, value in variations
            for pnbw in PNBW
            for seed in range(seeds)
        ]

    def simulate_cell(self, cell: Cell, traces: Traces) -> Mapping[str, Value]:
        matching = find_matching(problem_of(cell), mode_of(cell))
        assert matching is not None, "all nodes are idle"
        return {"SP": matching.processing, "SC": matching.communication, "T": matching.time}

    def build_rows(self, results: Sequence[Result]) -> list[Row]:
        rows = []
        for repetitions in group_results(results, *USUAL, "mode").values():
            first = repetitions[0].cell
            varied = [
                f"{name} {first[name]}" for name in ("uplink", "tasks", "communication") if first[name] != USUAL[name]
            ]
            paper = 1.0 if mode_of(first) is Mode.NON_SATURATED else None
            rows.append(
                Row.from_values(
                    ", ".join([setting_label(first), *varied]), [result.number("SC") for result in repetitions], paper
                )
            )
        return rows

    def draw_figure(self, results: Sequence[Result]) -> "Figure | None":
        usual = [
            r
            for r in results
            if r.has_parameters(**{name: USUAL[name] for name in ("uplink", "tasks", "communication")})
        ]
        return draw_by_mode(usual, "SC", "communication slowdown")

    def write_remarks(self, results: Sequence[Result]) -> str:
        return (
            "The figure's values are not in the paper's text; what it says of them holds here, too: without saturated "
            "links the slowdown is 1, with them it grows with PNBW, and local activity has the smaller effect. The "
            f"paper leaves open what was matched. Here it is a job of {USUAL['tasks']} tasks with {USUAL['clusters']} "
            f"clusters of {NODES} nodes, each cluster of power {', '.join(map(str, POWERS[:-1]))} or {POWERS[-1]}, "
            "drawn anew for each repetition; an uplink has twice a node's link, of which PNBW is a share; half of the "
            f"job is communication; local activity leaves {100 * LEFT_BY_LOCAL:.0f} % of a processor, as the paper's "
            "local load does. The last rows vary what was left open, one thing at a time."
        )


class SolverTime(Experiment):
    """Measure the time of a matching with the exact algorithm and, node by node as in the paper, with HiGHS."""

    unit = "ms"
    seeds = 5
    is_timed = True

    def simulate_cell(self, cell: Cell, traces: Traces) -> Mapping[str, Value]:
        mode, problem = mode_of(cell), problem_of(cell)
        ours, seconds = measure_solver(find_matching, problem, mode)
        theirs, seconds_of_highs = measure_solver(match_by_highs, problem, mode)
        assert ours is not None, "all nodes are idle"
        assert theirs is not None, "there is a matching"
        if mode is not Mode.FIRST_NON_SATURATED:
            assert abs(ours.time - theirs.time) < 1e-6 * theirs.time, "both find the best"
        return {"exact": 1e3 * seconds, "HiGHS": 1e3 * seconds_of_highs}

    def build_rows(self, results: Sequence[Result]) -> list[Row]:
        return [
            Row.from_values(
                f"{self.cell_label(repetitions[0].cell)}: {solver}", [result.number(solver) for result in repetitions]
            )
            for repetitions in group_results(results, *USUAL, "mode").values()
            for solver in ("HiGHS", "exact")
        ]

    def cell_label(self, cell: Cell) -> str:
        return setting_label(cell)

    def write_remarks(self, results: Sequence[Result]) -> str:
        return (
            "Processor time of one matching on the machine that made this page: others differ, and so does the paper's "
            "CPLEX of 2007, whose times are not in its text. Both solvers are given the paper's model, node by node, "
            "and find matchings of the same value, or the run would have failed."
        )


def measure_solver(solve: Any, *arguments: Any) -> tuple[Matching | None, float]:
    """Return the matching of a solver and the seconds of processor time that it takes."""
    began = process_time()
    matching = solve(*arguments)
    return matching, process_time() - began


class Figure6(SolverTime):
    name = "lerida-2008-fig-6"
    title = "solver time by per-node bandwidth (PNBW) and local activity"

    def list_cells(self, seeds: int) -> Sequence[Cell]:
        return [
            build_cell(seed, mode, pnbw=pnbw, activity=activity)
            for mode in MODES
            for pnbw in PNBW
            for activity in ACTIVITY
            for seed in range(seeds)
        ]

    def draw_figure(self, results: Sequence[Result]) -> "Figure | None":
        return draw_by_mode(results, "HiGHS", "ms by HiGHS")

    def write_remarks(self, results: Sequence[Result]) -> str:
        return (
            f"{super().write_remarks(results)} In the paper the non-saturated model takes the longer the more "
            "bandwidth is wanted, because fewer matchings are left; HiGHS finds these few the sooner, and takes "
            "longest for the optimal model. To the exact algorithm they are alike."
        )


class Figure7(SolverTime):
    name = "lerida-2008-fig-7"
    title = "solver time of the optimal model by the number of nodes, PNBW and local activity"

    def list_cells(self, seeds: int) -> Sequence[Cell]:
        settings = [(pnbw, 50) for pnbw in PNBW] + [(50, activity) for activity in ACTIVITY if activity != 50]
        return [
            build_cell(seed, Mode.OPTIMAL, clusters=clusters, tasks=2 * clusters, pnbw=pnbw, activity=activity)
            for clusters in (2, 4, 8, 16)
            for pnbw, activity in settings
            for seed in range(seeds)
        ]

    def cell_label(self, cell: Cell) -> str:
        nodes = NODES * read_number(cell, "clusters")
        return f"{nodes:.0f} nodes, PNBW {cell['pnbw']} %, local activity {cell['activity']} %"

    def draw_figure(self, results: Sequence[Result]) -> "Figure | None":
        figure, axes = create_panels(2, "ms by HiGHS")
        for axis, line, fixed, label in zip(
            axes, ("pnbw", "activity"), ("activity", "pnbw"), ("PNBW {} %", "local activity {} %"), strict=True
        ):
            draw_lines(
                axis,
                [result for result in results if result.has_parameters(**{fixed: 50})],
                "clusters",
                "HiGHS",
                line,
                label,
            )
            axis.set(xlabel=f"clusters of {NODES} nodes")
            axis.legend()
        return figure


class Figure8(SolverTime):
    name = "lerida-2008-fig-8"
    title = "solver time by the number of inter-cluster links, for the three models"

    def list_cells(self, seeds: int) -> Sequence[Cell]:
        return [
            build_cell(seed, mode, clusters=clusters, tasks=2 * clusters)
            for mode in Mode
            for clusters in (2, 4, 8, 16, 32, 64)
            for seed in range(seeds)
        ]

    def cell_label(self, cell: Cell) -> str:
        return f"{cell['mode']}, {cell['clusters']} links"

    def draw_figure(self, results: Sequence[Result]) -> "Figure | None":
        figure, axes = create_panels(2, "ms")
        for axis, solver in zip(axes, ("HiGHS", "exact"), strict=True):
            draw_lines(axis, results, "clusters", solver, "mode", "{}")
            axis.set(title=solver, xlabel="inter-cluster links", yscale="log")
        axes[0].legend()
        return figure

    def write_remarks(self, results: Sequence[Result]) -> str:
        return (
            "The paper says of CPLEX that it took up to a minute for 16 links (128 nodes), and beyond that recommends "
            f"to take the first matching that is found. {super().write_remarks(results)} Its figure 9, of estimated "
            "and real run times, is made [live, on clusters whose links are held to a bandwidth]"
            "(live/lerida-2008-fig-9.md)."
        )


def create_panels(count: int, label: str) -> tuple["Figure", Sequence[Any]]:
    """Create plots in a row with a shared scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.subplots(1, count, sharey=True)
    axes[0].set_ylabel(label)
    return figure, axes


def draw_lines(axes: Any, results: Sequence[Result], x: str, value: str, line: str, label: str) -> None:
    """Draw the means of a value over the parameter ``x``, with a line for each value of the parameter ``line``."""
    for (line_value,), of_line in group_results(results, line).items():
        points = [
            (read_number(repetitions[0].cell, x), fmean(r.number(value) for r in repetitions))
            for repetitions in group_results(of_line, x).values()
        ]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label.format(line_value))


EXPERIMENTS: tuple[Experiment, ...] = (Figure5(), Figure6(), Figure7(), Figure8())
