"""Reproduce Mohamed and Epema (2005): KOALA with files, priorities and incremental claiming on an unreliable DAS-2."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from experiments.experiment import Cell, Experiment, Result, Row, Value
from experiments.local_users import generate_local_users
from experiments.traces import Traces
from koalapy.model.cluster import Link, pair_of
from koalapy.model.job_spec import ClaimingMode, JobSpec, Priority
from koalapy.model.request import ComponentRequest, InputFile, NonFixedRequest
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.rules import Rules
from koalapy.simulation.jobs import JobOutcome, PlannedJob, mean_of_jobs
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import SimulatedCluster, SimulatedGrid
from koalapy.workload.generate import generate_workload
from koalapy.workload.recipe import PRESETS, GridSize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROCESSORS = {"delft": 60, "leiden": 60, "utrecht": 60, "vrije": 130}
"""310 processors on four clusters, of which 250 remain without one of the small ones (5.1)."""
UNRELIABLE = "utrecht"
"""The cluster that KOALA stopped using."""
BANDWIDTH = 100e6 / 8
"""Bytes per second between any two clusters (2.1)."""
JOBS, FILES = 500, 100
EVERY = 150.0
"""Mean seconds between two jobs. The paper gives no value; this one reproduces its utilisation and its orders."""
OTHERS = (75.0, 250.0)
"""Other values of ``EVERY`` that are compared."""
FAILURES, BROKEN = 0.1, 0.95
"""Probability that the start of a component fails, on reliable clusters and on the unreliable one."""
LOCAL = 0.3
"""Mean fraction of processors used by local users; the paper shows it in Figure 2 only."""
SEEDS_OF_OTHERS = 12
SLOT = 600.0
"""Seconds over which the utilisation is averaged."""

RULES = Rules(
    scan_interval=240.0,
    event_driven=False,
    high_scans_per_low=2,
    placement_queue_limit=100,
    claiming=ClaimingMode.INCREMENTAL,
    claim_threshold=0.0,
    claim_factor=0.75,
    claim_factor_step=0.125,
    claim_factor_min=0.25,
    preemption="claiming",
    preemption_order="jst",
    assumed_bandwidth=BANDWIDTH,
    plan_after=None,
    keeps_for_restart=False,
    max_restarts=None,
    restart_pause=0.0,
    error_threshold=8,
    probation=False,
    barrier_timeout=3600.0,
)
"""The rules of section 4, or the literal ones of section 3 where section 4 is silent."""


def build_grid(failures: float) -> SimulatedGrid:
    """Build the grid. Starts fail with probability ``failures``, and almost always on the unreliable cluster."""
    clusters = {
        name: SimulatedCluster(nodes, failures=BROKEN if failures and name == UNRELIABLE else None)
        for name, nodes in PROCESSORS.items()
    }
    links = {pair_of(*pair): Link(bandwidth=BANDWIDTH) for pair in combinations(clusters, 2)}
    return SimulatedGrid(clusters, links, startup=10.0, failures=failures, look_every=30.0)


def generate_jobs(seed: int, jobs: int, every: float = EVERY) -> Iterator[PlannedJob]:
    """Generate the workload of section 4.2: the preset ``m05``, each job with a file of 4 or 8 GB on two clusters."""
    draws = Random(f"mohamed-2005/{seed}")
    names = tuple(f"file-{number}" for number in range(FILES))
    files = {}
    for name in names:
        size, sites = draws.choice((4, 8)) * 10**9, tuple(sorted(draws.sample(list(PROCESSORS), 2)))
        files[name] = InputFile(name, size, sites)
    recipe = replace(PRESETS["m05"], jobs=jobs, rate=1 / every, scale=1.0, inputs=names)
    for arrival in generate_workload(recipe, GridSize(PROCESSORS), seed).jobs:
        yield PlannedJob(arrival.arrives_at, _build_spec(arrival.job, files), float(arrival.job["command"][1]))


def _build_spec(job: Mapping[str, Any], files: Mapping[str, InputFile]) -> JobSpec:
    file = files[job["inputs"][0]["file"]]
    components = tuple(
        ComponentRequest(component["size"], inputs=(file,)) for component in job["request"]["components"]
    )
    return JobSpec(NonFixedRequest(components), ("program",), policy=job["policy"], priority=Priority(job["priority"]))


class Utilisation:
    """The used fraction of the processors of the reliable clusters, averaged over time slots."""

    def __init__(self) -> None:
        self.slots: list[float] = []
        self.simulation: Simulation | None = None
        self._at, self._used = 0.0, 0.0

    def record_use(self, now: float, effects: Effects) -> None:
        """Add the use since the previous step of the scheduler, which has not changed in between."""
        while self._at < now:
            slot = int(self._at / SLOT)
            until = min(now, (slot + 1) * SLOT)
            if slot == len(self.slots):
                self.slots.append(0.0)
            self.slots[slot] += self._used * (until - self._at) / SLOT
            self._at = until
        assert self.simulation is not None
        used = [nodes for name, nodes in self.simulation.used.items() if name != UNRELIABLE]
        self._used = sum(used) / (sum(PROCESSORS.values()) - PROCESSORS[UNRELIABLE])


KINDS = tuple((size, parts) for size in (36, 72) for parts in PRESETS["m05"].components if size / parts > 8)
"""Sizes of jobs, each with the number of components."""


def simulate_workload(cell: Cell, jobs: int = JOBS) -> dict[str, Value]:
    """Simulate the workload; return means for each kind of job and priority that has jobs."""
    grid, load = build_grid(float(cell["failures"])), Utilisation()
    planned = list(generate_jobs(cell.seed, jobs, float(cell.parameters.get("every", EVERY))))
    users = generate_local_users(
        PROCESSORS, LOCAL, duration=planned[-1].arrives_at, sizes=(1, 2, 4, 8), lasts=900.0, seed=cell.seed
    )
    simulation = Simulation(grid, RULES, local_users=users, seed=cell.seed, watch=load.record_use)
    load.simulation = simulation
    outcome = simulation.run(planned).require_complete()
    values: dict[str, Value] = {
        "succeeded": len(outcome.succeeded_jobs()) / jobs,
        "used": max(load.slots),
        "utilisation": load.slots,
    }
    for size, parts in KINDS:
        for priority in Priority:
            jobs_of_kind = [job for job in outcome.succeeded_jobs() if _is_kind(job, size, parts, priority)]
            if jobs_of_kind:
                values |= {
                    _value_name(quantity, size, parts, priority): value
                    for quantity, value in _measure_jobs(jobs_of_kind).items()
                }
    return values


def _is_kind(job: JobOutcome, size: int, parts: int, priority: Priority) -> bool:
    spec = job.planned.spec
    assert isinstance(spec.request, NonFixedRequest)
    request = spec.request
    return request.total_size == size and len(request.components) == parts and spec.priority is priority


def _measure_jobs(jobs: Sequence[JobOutcome]) -> dict[str, float]:
    failures = sum(job.restarts for job in jobs)
    return {
        "failures": 100 * failures / sum(job.attempts for job in jobs),
        "failures of runs to an end": 100 * failures / (failures + len(jobs)),
        "co-allocated": 100 * mean_of_jobs([float(len(job.gang) > 1) for job in jobs]),
        "placement": mean_of_jobs([(job.placed or 0.0) - job.planned.arrives_at for job in jobs]),
        "delay": mean_of_jobs([job.start_delay for job in jobs]),
    }


class OfTheWorkload(Experiment):
    """An experiment that evaluates the simulations of the workload."""

    @staticmethod
    def simulate_cell(cell: Cell, traces: Traces) -> Mapping[str, Value]:
        return simulate_workload(cell)


class OfEachKind(OfTheWorkload):
    """Report one quantity of the runs for each kind of job and priority."""

    seeds = 30
    quantity: ClassVar[str]
    paper_result: ClassVar[str]
    """The result that the paper reports."""
    more_quantities: ClassVar[Sequence[str]] = ()
    """Other quantities for which the differences are reported."""
    other_intervals: ClassVar[Sequence[float]] = ()
    """Other values of ``EVERY`` for which the differences are reported."""

    def list_cells(self, seeds: int) -> Sequence[Cell]:
        return [
            Cell({"failures": FAILURES, "every": every}, seed)
            for every in (EVERY, *self.other_intervals)
            for seed in range(seeds if every == EVERY else min(seeds, SEEDS_OF_OTHERS))
        ]

    def build_rows(self, results: Sequence[Result]) -> list[Row]:
        """Return the rows, with the differences that the paper discusses, each taken within a seed."""
        usual = _select_interval(results, EVERY)
        rows = [
            Row.from_values(f"{size} in {parts}, {priority}", [value for value in values if value is not None])
            for size, parts in KINDS
            for priority in Priority
            if (values := self._read_kind(usual, (size, parts), priority))
        ]
        rows += self._build_difference_rows(usual, self.quantity, "")
        for quantity in self.more_quantities:
            rows += self._build_difference_rows(usual, quantity, f"{quantity}: ")
        for every in self.other_intervals:
            rows += self._build_difference_rows(
                _select_interval(results, every), self.quantity, f"a job every {every:g} s: "
            )
        return rows

    def _build_difference_rows(self, results: Sequence[Result], quantity: str, label: str) -> list[Row]:
        values = {
            (kind, priority): _read_values(results, quantity, kind, priority) for kind in KINDS for priority in Priority
        }
        in_8, in_3 = ([values[(72, parts), priority] for priority in Priority] for parts in (8, 3))
        high, low = ([values[kind, priority] for kind in KINDS] for priority in (Priority.HIGH, Priority.LOW))
        return [
            Row.from_values(f"{label}72 in 8 less 72 in 3", _subtract_means(in_8, in_3)),
            Row.from_values(f"{label}high priority less low", _subtract_means(high, low)),
        ]

    def _read_kind(self, results: Sequence[Result], kind: tuple[int, int], priority: Priority) -> list[float | None]:
        return _read_values(results, self.quantity, kind, priority)

    def draw_figure(self, results: Sequence[Result]) -> "Figure":
        from matplotlib.figure import Figure

        from experiments.plots import BLUE, ORANGE

        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        ax = figure.subplots()
        for shift, color, priority in ((-0.2, BLUE, Priority.HIGH), (0.2, ORANGE, Priority.LOW)):
            usual = _select_interval(results, EVERY)
            values = [[v for v in self._read_kind(usual, kind, priority) if v is not None] for kind in KINDS]
            positions = [place + shift for place in range(len(KINDS))]
            ax.bar(
                positions,
                [mean_of_jobs(load) if load else 0.0 for load in values],
                0.4,
                color=color,
                label=f"{priority} priority",
            )
        ax.set_xticks(range(len(KINDS)), [f"{size} in {parts}" for size, parts in KINDS])
        ax.set_ylabel(f"{self.quantity}, {self.unit}")
        ax.legend()
        return figure

    def write_remarks(self, results: Sequence[Result]) -> str:
        return f"{self.paper_result} Its plot has no numbers in the text. What is assumed here: see mohamed-2005-fig-2."


def _select_interval(results: Sequence[Result], every: float) -> list[Result]:
    return [result for result in results if result.has_parameters(every=every)]


def _read_values(
    results: Sequence[Result], quantity: str, kind: tuple[int, int], priority: Priority
) -> list[float | None]:
    """Return the value for each seed; None where a seed has no such jobs."""
    name = _value_name(quantity, *kind, priority)
    return [None if result.values.get(name) is None else result.number(name) for result in results]


def _value_name(quantity: str, size: int, parts: int, priority: Priority) -> str:
    return f"{quantity} {size} in {parts} {priority}"


def _subtract_means(
    minuends: Sequence[Sequence[float | None]], subtrahends: Sequence[Sequence[float | None]]
) -> list[float]:
    """Return the difference of the means of two groups for each seed that has values of both."""
    differences = []
    for minuend, subtrahend in zip(zip(*minuends, strict=True), zip(*subtrahends, strict=True), strict=True):
        ours, theirs = ([value for value in side if value is not None] for side in (minuend, subtrahend))
        if ours and theirs:
            differences.append(mean_of_jobs(ours) - mean_of_jobs(theirs))
    return differences


class Figure2(OfTheWorkload):
    name = "mohamed-2005-fig-2"
    title = "how much of the grid was used while 500 jobs with files came, and starts failed"
    unit = "%"
    seeds = 30

    def list_cells(self, seeds: int) -> Sequence[Cell]:
        return [Cell({"failures": FAILURES, "every": EVERY}, seed) for seed in range(seeds)]

    def build_rows(self, results: Sequence[Result]) -> list[Row]:
        return [
            Row.from_values(
                "jobs that succeeded in the end", [100 * result.number("succeeded") for result in results], 100
            ),
            Row.from_values(
                f"most used in {SLOT / 60:g} minutes", [100 * result.number("used") for result in results], 85
            ),
        ]

    def draw_figure(self, results: Sequence[Result]) -> "Figure":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        ax = figure.subplots()
        loads = [100 * load for load in _read_curve(results[0].values["utilisation"])]
        ax.step([slot * SLOT / 3600 for slot in range(len(loads))], loads, where="post")
        ax.set_xlabel("hours, of the first repetition")
        ax.set_ylabel("processors in use, %")
        ax.set_ylim(0, 100)
        return figure

    def write_remarks(self, results: Sequence[Result]) -> str:
        return (
            "The paper says that up to 80 to 90 % were used, and that all jobs succeeded in the end; its live run had "
            "250 reliable processors after a cluster was given up, and so has this one. Processors are simulated as "
            "nodes.\n\nOf these the paper tells nothing, and they are assumed here: a job comes every "
            f"{EVERY:g} s on average, the rate of those tried with which the orders of figures 3 and 5 come out (see "
            f"there for others), local users have {LOCAL:.0%} of the processors, {FAILURES:.0%} of the "
            f"components' starts fail, and {BROKEN:.0%} on the cluster that is given up, after {RULES.error_threshold} "
            f"errors in a row. Files come at {BANDWIDTH / 1e6:g} MB/s between any two clusters, each component's as if "
            "it were alone: transfers do not slow each other down. The same kind of workload goes over a real daemon "
            "with embedded clusters by `make experiment`, which transfers nothing."
        )


def _read_curve(value: Value) -> Sequence[float]:
    assert isinstance(value, Sequence), "it is a curve"
    assert not isinstance(value, str), "it is a curve"
    return value


class Figure3(OfEachKind):
    name = "mohamed-2005-fig-3"
    title = "which part of the runs of jobs failed, by size, components and priority"
    unit = "%"
    quantity = "failures"
    more_quantities = ("failures of runs to an end",)
    other_intervals = OTHERS
    paper_result = (
        "The paper finds more failures of jobs with more components, and of high priority because they are tried "
        "more often. It does not say of what its percentages are: here of all attempts, also those that ended "
        "because nodes could not be claimed, or were taken for jobs of high priority. Jobs of low priority have far "
        "more of these, in which nothing fails. **So counted, both of the paper's orders come out. Of the attempts "
        "alone that came to an end of their own** (failed, or succeeded: *runs to an end*), low priority fails more "
        "often, for each of its successes takes more starts, each with the same chance to fail; the paper's "
        "mis-configured nodes, which more starts at a time meet more often, are not simulated. A job that fails more "
        "than once counts as often. How much of it hangs on how often jobs come, the last lines tell."
    )


class Figure4(OfEachKind):
    name = "mohamed-2005-fig-4"
    title = "how many jobs ran on more than one cluster, by size, components and priority"
    unit = "%"
    quantity = "co-allocated"
    paper_result = "The paper finds that many do, the more the more components they have, and also small ones."


class Figure5a(OfEachKind):
    name = "mohamed-2005-fig-5a"
    title = "how long it took until jobs were placed for good, by size, components and priority"
    unit = "s"
    quantity = "placement"
    other_intervals = OTHERS
    paper_result = (
        "The paper finds that it takes considerably longer with more components, and less with high priority, and "
        "that only small jobs of high priority are placed in reasonable time. It explains the first by "
        "re-placements: each failure costs another scan. **That depends on how often jobs come, which it does not "
        "tell.** The more often, the more of the time is that in the queue, in which small components rather help: "
        "with a job every 75 s, when the placement queues are full for hours, it hardly grows with the components "
        "any more.\n\n"
        "Live, by `make experiment` on embedded clusters with times of a sixtieth and three of ten starts failing, "
        "one run of 100 jobs each had mean response times for high and low priority of 3.4 and 31.5 s with atomic "
        "claiming, and 2.8 and 20.7 s with incremental: high priority does better there, too."
    )


class Figure5b(OfEachKind):
    name = "mohamed-2005-fig-5b"
    title = "how much later than first estimated jobs started, by size, components and priority"
    unit = "s"
    quantity = "delay"
    paper_result = "The paper finds that it grows with the components, and that high priority does better."


EXPERIMENTS: tuple[Experiment, ...] = (Figure2(), Figure3(), Figure4(), Figure5a(), Figure5b())
