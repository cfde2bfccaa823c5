"""Compare policies on the workload traces of eight machines, beyond the experiments of the papers."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import exp, log
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

from experiments.experiment import Cell, Experiment, Result, Row, Value, group_results
from experiments.intervals import mean_interval
from experiments.local_users import generate_local_users
from experiments.run_times import by_number_of_clusters
from experiments.trace_windows import DAS_3, MACHINES, Window, WindowJob, cut_machine, draw_window, shorten_name
from experiments.traces import Traces
from koalapy.model.cluster import Link
from koalapy.model.job_spec import ClaimingMode, JobSpec
from koalapy.model.request import ComponentRequest, FlexibleRequest, InputFile, NonFixedRequest
from koalapy.model.users import SharingMode
from koalapy.scheduler.rules import Rules
from koalapy.simulation.jobs import LocalUser, Outcome, PlannedJob
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import SimulatedCluster, SimulatedGrid
from koalapy.workload.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDING = 1e-9
ALL = "all"
"""Label of a row over all traces."""
RULES = Rules(placement_queue_limit=1_000_000, max_restarts=None)
HUANG_2007 = replace(
    RULES, queue="head", queue_order="narrowest-first", plan_after=None, keeps_for_restart=False, restart_pause=0
)


class OfTraces(Experiment):
    """Compare the variants in ``ways`` on the same windows of each trace, in each of the ``settings``.

    Values are ratios to the result of the first variant.
    """

    seeds = 8
    traces = MACHINES
    jobs: ClassVar[int]
    """Number of jobs of a window."""
    measure: ClassVar[str] = "response time"
    """The compared quantity: ``response time`` or ``wait``."""
    ways: ClassVar[tuple[str, ...]]
    settings: ClassVar[tuple[str, ...]]

    def list_cells(self, seeds: int) -> Sequence[Cell]:
        return [
            Cell({"trace": trace, "setting": setting, "way": variant}, seed)
            for trace in self.traces
            for seed in range(seeds)
            for setting in self.settings
            for variant in self.ways
        ]

    def simulate_cell(self, cell: Cell, traces: Traces) -> Mapping[str, Value]:
        window = self.draw_window(traces, str(cell["trace"]), cell.seed)
        clusters = cut_machine(window.nodes)
        setting = str(cell["setting"])
        fitting = tuple(job for job in window.jobs if job.nodes <= self.most_nodes(job, clusters, setting))
        outcome = self.simulate_window(
            Window(fitting, window.nodes), clusters, setting, str(cell["way"]), cell.seed
        ).require_complete()
        return {
            "response time": outcome.mean_response(),
            "wait": sum(job.waited for job in outcome.jobs) / len(outcome.jobs),
            "coallocated": sum(len(job.gang) > 1 for job in outcome.jobs) / len(outcome.jobs),
            "utilisation": outcome.utilisation,
            "restarts": sum(job.attempts - 1 for job in outcome.jobs),
            "done": len(outcome.succeeded_jobs()),
            "wide": len(window.jobs) - len(fitting),
            **self.measure_more(outcome, clusters),
        }

    def draw_window(self, traces: Traces, source: str, seed: int) -> Window:
        """Return the window of a source that depends on the seed."""
        return draw_window(traces, source, seed, self.jobs)

    def most_nodes(self, job: WindowJob, clusters: Mapping[str, int], setting: str) -> int:
        """Return the largest size of jobs that every variant can run; larger jobs are left out."""
        return max(clusters.values())

    def measure_more(self, outcome: Outcome, clusters: Mapping[str, int]) -> Mapping[str, Value]:
        """Return additional values of a simulation."""
        return {}

    @abstractmethod
    def simulate_window(
        self, window: Window, clusters: Mapping[str, int], setting: str, variant: str, seed: int
    ) -> Outcome:
        """Simulate a window with one of the variants."""

    def build_rows(self, results: Sequence[Result]) -> list[Row]:
        return [
            Row(
                f"{shorten_name(trace)}, {setting}: {variant}",
                None,
                *self._mean_ratio(results, trace, setting, variant),
            )
            for trace in (*self.traces, ALL)
            for setting in self.settings
            for variant in self.ways[1:]
        ]

    def write_remarks(self, results: Sequence[Result]) -> str:
        lines = [
            [shorten_name(trace), *(self._find_winner(results, trace, setting) for setting in self.settings)]
            for trace in (*self.traces, ALL)
        ]
        wide = sum(result.number("wide") for result in results) / len(results) / self.jobs
        return "\n\n".join(
            [
                f"Which is best where (the mean is the lowest, and its interval against {self.ways[0]} holds no 1; "
                "in brackets what is the lowest but not surely so):",
                markdown_table(["trace", *self.settings], lines),
                f"Each repetition is a stretch of {self.jobs} jobs from a place in the trace that the seed draws, from "
                "an empty grid on; all ways get the same stretches. The machine of the trace is cut into four clusters "
                f"as those of DAS-3. Jobs for which there is not always room are left out for all ways: {wide:.1%}.",
                self.how,
            ]
        )

    how: ClassVar[str]
    """The assumptions of the simulations, for the page."""

    @property
    def unit(self) -> str:  # type: ignore[override]
        return f"mean {self.measure}, × {self.ways[0]}"

    def _mean_ratio(
        self, results: Iterable[Result], trace: str, setting: str, variant: str
    ) -> tuple[float, float, float]:
        """Return the geometric mean and its interval of the ratios to the first variant, window by window.

        ``ALL`` selects the windows of every trace.
        """
        groups = group_results(
            (
                result
                for result in results
                if result.has_parameters(setting=setting) and trace in (ALL, result.cell["trace"])
            ),
            "way",
        )
        pairs = zip(groups[variant,], groups[self.ways[0],], strict=True)
        logarithms = [log(result.number(self.measure) / reference.number(self.measure)) for result, reference in pairs]
        mean, low, high = mean_interval(logarithms)
        return exp(mean), exp(low), exp(high)

    def _find_winner(self, results: Sequence[Result], trace: str, setting: str) -> str:
        ratios = {variant: self._mean_ratio(results, trace, setting, variant) for variant in self.ways}
        if all(low == high == 1 for _, low, high in ratios.values()):
            return "equal"
        best = min(ratios, key=lambda variant: ratios[variant][0])
        if best == self.ways[0]:
            sure = all(low > 1 for variant, (_, low, _) in ratios.items() if variant != best)
        else:
            sure = ratios[best][2] < 1
        return best if sure else f"({best})"

    def draw_figure(self, results: Sequence[Result]) -> "Figure":
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator

        from experiments.plots import LINES

        width = max(9.0, 2.4 * len(self.settings))
        figure = Figure(figsize=(width, 1.2 + 0.42 * len(self.traces)), layout="constrained")
        panels = figure.subplots(1, len(self.settings), squeeze=False, sharey=True)[0]
        for ax, setting in zip(panels, self.settings, strict=True):
            for index, variant in enumerate(self.ways[1:]):
                ratios = [self._mean_ratio(results, trace, setting, variant) for trace in self.traces]
                heights = [
                    place + min(0.25, 0.7 / (len(self.ways) - 1)) * (index - (len(self.ways) - 2) / 2)
                    for place in range(len(self.traces))
                ]
                means = [mean for mean, _, _ in ratios]
                errors = [[mean - low for mean, low, _ in ratios], [high - mean for mean, _, high in ratios]]
                ax.errorbar(
                    means, heights, xerr=errors, fmt="o", color=LINES[index][0], label=variant, capsize=2, markersize=4
                )
            ax.axvline(1.0, color="#444444", linewidth=0.8)
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.xaxis.set_major_formatter("{x:g}")
            ax.minorticks_off()
            ax.set_title(setting, loc="left")
            ax.set_xlabel(f"{self.measure}, × {self.ways[0]}")
            ax.set_yticks(range(len(self.traces)), [shorten_name(source) for source in self.traces])
        panels[0].invert_yaxis()
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(self.ways) - 1)
        return figure


class Placement(OfTraces):
    """Compare longer run times by co-allocation with longer waits for a single cluster."""

    name = "beyond-traces-placement"
    title = "placing in one cluster, over as many as it takes, or as the advisor predicts, on eight traces"
    jobs = 500
    ways = ("worst-fit", "cluster-minimization", "auto")
    slowdowns: ClassVar[Mapping[str, Sequence[float]]] = {
        "little communication": (1.0, 1.1, 1.2, 1.3),
        "much communication": (1.0, 1.5, 2.5, 3.75),
    }
    """Factors on the run time over one to four clusters: 3.75 is that of Wave in sonmez-2010, the others are estimates.
    """
    settings = tuple(slowdowns)
    how = (
        "Run times are the trace's on one cluster, and over two, three and four clusters 1.1, 1.2, 1.3 times as long "
        "with little communication, and 1.5, 2.5, 3.75 times with much. The advisor (`auto`) is told none of this: it "
        "begins each stretch without experience, and takes a user's jobs for one application."
    )

    def simulate_window(
        self, window: Window, clusters: Mapping[str, int], setting: str, variant: str, seed: int
    ) -> Outcome:
        grid = SimulatedGrid({name: SimulatedCluster(nodes) for name, nodes in clusters.items()})
        specs: dict[tuple[int, int], JobSpec] = {}

        def plan_jobs() -> Iterator[PlannedJob]:
            for job in window.jobs:
                key = job.nodes, job.user
                if key not in specs:
                    components = (ComponentRequest(job.nodes),)
                    request = NonFixedRequest(components) if variant == "worst-fit" else FlexibleRequest(job.nodes)
                    specs[key] = JobSpec(request, ("program",), policy=variant, application=f"user-{job.user}")
                yield PlannedJob(job.arrives_at, specs[key], job.ran)

        return Simulation(grid, RULES, run_time=by_number_of_clusters(self.slowdowns[setting])).run(plan_jobs())


class Claiming(OfTraces):
    """Compare claiming modes when local users take nodes between two polls, so that only some claims succeed."""

    name = "beyond-traces-claiming"
    measure = "wait"
    title = "claiming all components at once, or those that can be had, on eight traces"
    jobs = 200
    ways = tuple(str(mode) for mode in ClaimingMode)
    busy: ClassVar[Mapping[str, float]] = {"few local users": 0.1, "many local users": 0.3}
    settings = tuple(busy)
    how = (
        "Jobs of four nodes and more are in four components, which worst-fit places where it will. Each component "
        "needs a file of 3 GB, which is at one cluster for each user and comes from there at 10 MB/s: so a job has a "
        "start ahead of it, five minutes later, and claims come before it. Agents look at their clusters "
        "once in five minutes, so that claims find nodes taken. Local users have 10 % or 30 % of the nodes: "
        "their jobs come at random, have a sixteenth to a quarter of a cluster, and run for ten minutes on average. "
        "Starting takes 30 s, and one start in twenty fails."
    )

    def simulate_window(
        self, window: Window, clusters: Mapping[str, int], setting: str, variant: str, seed: int
    ) -> Outcome:
        grid = SimulatedGrid(
            {name: SimulatedCluster(nodes) for name, nodes in clusters.items()},
            startup=30.0,
            failures=0.05,
            look_every=300.0,
            links={pair: Link(bandwidth=10e6) for pair in combinations(sorted(clusters), 2)},
        )
        files = [(InputFile(f"data-{name}", 3_000_000_000, (name,)),) for name in clusters]
        specs: dict[tuple[int, int], JobSpec] = {}

        def plan_jobs() -> Iterator[PlannedJob]:
            for job in window.jobs:
                key = job.nodes, job.user % len(files)
                if key not in specs:
                    parts = 4 if job.nodes >= 4 else 1
                    sizes = [job.nodes // parts + (index < job.nodes % parts) for index in range(parts)]
                    request = NonFixedRequest(tuple(ComponentRequest(size, inputs=files[key[1]]) for size in sizes))
                    specs[key] = JobSpec(request, ("program",), policy="worst-fit", claiming=ClaimingMode(variant))
                yield PlannedJob(job.arrives_at, specs[key], job.ran)

        local_users = generate_users(clusters, self.busy[setting], window.lasts, 600.0, seed)
        return Simulation(grid, RULES, local_users=local_users, seed=seed).run(plan_jobs())


class Sharing(OfTraces):
    """Compare ways in which sites share their clusters, by the response times of their own users."""

    name = "beyond-traces-sharing"
    title = "each site for itself, one queue for all, or what is its own taken back, on eight traces"
    jobs = 500
    modes: ClassVar[Mapping[str, SharingMode]] = {
        "independent": "independent",
        "ordinary": "ordinary",
        "feasible": "feasible",
    }
    ways = tuple(modes)
    settings = ("even", "uneven")
    how = (
        "Each user has one of the four clusters as home: each by turns (even), or the smallest for half of all users "
        "(uneven). Jobs wider than their user's home are left out, for alone it could never run them. Queues are "
        "served narrowest first, up to the first job that does not fit, and jobs run on the fastest cluster that has "
        "room for all of them, as in huang-2007; all clusters are equally fast."
    )

    def most_nodes(self, job: WindowJob, clusters: Mapping[str, int], setting: str) -> int:
        return clusters[home_of(job, clusters, setting)]

    def simulate_window(
        self, window: Window, clusters: Mapping[str, int], setting: str, variant: str, seed: int
    ) -> Outcome:
        grid = SimulatedGrid({name: SimulatedCluster(nodes) for name, nodes in clusters.items()})
        rules = replace(HUANG_2007, sharing=self.modes[variant])
        specs: dict[tuple[int, str], JobSpec] = {}

        def plan_jobs() -> Iterator[PlannedJob]:
            for job in window.jobs:
                key = job.nodes, home_of(job, clusters, setting)
                if key not in specs:
                    request = NonFixedRequest((ComponentRequest(job.nodes),))
                    specs[key] = JobSpec(request, ("program",), policy="fastest-one", home_site=key[1])
                yield PlannedJob(job.arrives_at, specs[key], job.ran)

        return Simulation(grid, rules).run(plan_jobs())

    def measure_more(self, outcome: Outcome, clusters: Mapping[str, int]) -> Mapping[str, Value]:
        """Return the mean response time of each site's users; 0 for a site without users."""
        responses = {
            name: [job.response for job in outcome.jobs if job.planned.spec.home_site == name] for name in clusters
        }
        return {name: fmean(times) if times else 0.0 for name, times in responses.items()}

    def write_remarks(self, results: Sequence[Result]) -> str:
        lines = []
        for variant in self.ways[1:]:
            ratios = list(self._site_ratios(results, variant))
            worse = sum(ratio > 1 + ROUNDING for ratio in ratios)
            lines.append([variant, len(ratios), f"{worse / len(ratios):.1%}", f"{max(ratios):.2f}"])
        header = ["sharing", "sites", "worse off than alone", "the worst, × alone"]
        question = "Whether every site is better off for taking part, over all stretches:"
        return "\n\n".join([super().write_remarks(results), question, markdown_table(header, lines)])

    def _site_ratios(self, results: Sequence[Result], variant: str) -> Iterator[float]:
        """Yield the ratio of each site's response time to that without sharing."""
        groups = group_results(results, "way")
        for result, alone in zip(groups[variant,], groups[self.ways[0],], strict=True):
            for site in cut_machine(sum(DAS_3)):
                if alone_response := alone.number(site):
                    yield result.number(site) / alone_response


def generate_users(
    clusters: Mapping[str, int], busy: float, duration: float, lasts: float, seed: int
) -> list[LocalUser]:
    """Generate local users with jobs of a sixteenth to a quarter of their cluster."""
    users = [
        user
        for name, nodes in clusters.items()
        for user in generate_local_users(
            {name: nodes},
            busy,
            duration=duration,
            sizes=[max(1, nodes // part) for part in (16, 8, 4)],
            lasts=lasts,
            seed=seed,
        )
    ]
    return sorted(users, key=lambda user: (user.at, user.cluster))


def home_of(job: WindowJob, clusters: Mapping[str, int], setting: str) -> str:
    """Return the home cluster of a job's user."""
    names = list(clusters)
    if setting == "uneven" and job.user % 2 == 0:
        return names[-1]
    return names[job.user // 2 % len(names)]


EXPERIMENTS: tuple[Experiment, ...] = (Placement(), Claiming(), Sharing())
