"""Generation of workloads from a recipe, with Poisson arrivals or those of a trace.

The same seed gives the same workload. Each aspect has its own random numbers, so that a change of one aspect leaves the
others unchanged: two policies receive the same jobs at the same times.
"""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from random import Random
from statistics import fmean
from typing import Any

from koalapy.model.errors import UsageError, reject
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ComponentRequest, FlexibleRequest, NonFixedRequest, Request
from koalapy.validation.fitting import check_combination, check_fits
from koalapy.validation.limits import ClusterLimits, Limits
from koalapy.workload.plan import Arrival, Json, Workload, nodes_of
from koalapy.workload.recipe import POLICIES, PROGRAMS, SLEEP, GridSize, Recipe, scale_of
from koalapy.workload.swf import Trace, select_jobs

MAX_JOBS = 1_000_000
"""Maximum number of jobs in a workload."""
DRAWN = ("sizes", "run_times", "utilisation")
"""Parameters of a recipe that a trace replaces."""


def generate_workload(recipe: Recipe, grid: GridSize, seed: int) -> Workload:
    """Return a workload with Poisson arrivals at the recipe's rate, or at the rate that gives its utilisation.

    Raise ``UsageError`` for an invalid recipe.
    """
    recipe.check()
    maker = _JobGenerator(recipe, grid, seed)
    rate = recipe.rate or _arrival_rate(recipe, grid, maker)
    draws = Random(f"{seed}/arrivals")
    jobs: list[Arrival] = []
    arrival = 0.0
    for index in _job_numbers(recipe):
        arrival += draws.expovariate(rate)
        if recipe.duration is not None and arrival > recipe.duration:
            break
        jobs.append(maker.create_job(index, arrival))
    if not jobs:
        raise UsageError(
            f"no job arrives within {recipe.duration:g} s",
            field="--duration",
            hint="give a longer --duration or a higher --rate",
        )
    expected = {"rate": round(rate, 6), "mean_nodes": round(maker.mean_nodes, 3), "scale": round(maker.scale, 6)}
    return _create_workload(recipe, grid, seed, jobs, {"arrivals": "poisson", **expected})


def from_trace(
    recipe: Recipe,
    trace: Trace,
    grid: GridSize,
    seed: int,
    *,
    status: int | None = None,
    keep_zero: bool = False,
    name: str = "",
) -> Workload:
    """Return a workload with the arrivals, sizes and run times of a trace.

    Sizes are scaled by the ratio of this grid to the machine of the trace. The header contains the numbers of jobs that
    are left out, by reason. Raise ``UsageError`` if no job is usable.
    """
    recipe.check()
    maker = _JobGenerator(recipe, grid, seed)
    scale = recipe.scale or (grid.total / trace.processors if grid.total else 1.0)
    sorted_jobs = select_jobs(trace.jobs, status, keep_zero=keep_zero)
    if not sorted_jobs.usable:
        excluded = ", ".join(f"{number} {reason}" for reason, number in sorted_jobs.left_out.items())
        hint = "see --status and --keep-zero"
        raise UsageError(f"{name or 'the trace'} has no job that ran ({excluded})", field="--swf", hint=hint)
    first = sorted_jobs.usable[0].submitted
    jobs: list[Arrival] = []
    for old, index in zip(sorted_jobs.usable, _job_numbers(recipe), strict=False):
        arrival = (old.submitted - first) / recipe.compress
        if recipe.duration is not None and arrival > recipe.duration:
            break
        size = max(1, round(old.processors * scale))
        jobs.append(maker.create_job(index, arrival, min(size, grid.total or size), old.ran / recipe.compress))
    trace_facts = {
        "file": name,
        "jobs": len(trace.jobs),
        "used": len(jobs),
        "processors": trace.processors,
        "left_out": sorted_jobs.left_out,
    }
    return _create_workload(
        recipe, grid, seed, jobs, {"arrivals": "trace", "trace": trace_facts, "scale": round(scale, 6)}
    )


def _job_numbers(recipe: Recipe) -> Iterator[int]:
    """Yield the job numbers from 1 on; raise ``UsageError`` after ``MAX_JOBS``."""
    for number in count(1) if recipe.jobs is None else range(1, recipe.jobs + 1):
        if number > MAX_JOBS:
            hint = "give --jobs or --duration, or a smaller --rate"
            raise UsageError(f"the workload would have more than {MAX_JOBS} jobs", field="--jobs", hint=hint)
        yield number


def _arrival_rate(recipe: Recipe, grid: GridSize, maker: "_JobGenerator") -> float:
    """Return the jobs per second that give the recipe's utilisation. Raise ``UsageError`` if the grid is unknown."""
    if not grid.total:
        hint = "give --clusters north:4,south:4, or --rate; with a daemon at --url it is asked"
        reject("--utilisation", None, "needs the sizes of the clusters, which are unknown", hint)
    weights = sum(weight for _, weight in recipe.applications)
    seconds = sum(recipe.seconds_of(name) * weight for name, weight in recipe.applications) / weights
    return recipe.utilisation * grid.total / (maker.mean_nodes * seconds)


def _create_workload(recipe: Recipe, grid: GridSize, seed: int, jobs: list[Arrival], arrivals: Json) -> Workload:
    """Return the workload with its header. Raise ``UsageError`` if a job could never run on the grid.

    ``arrivals``: the fields of the header that say where the arrivals come from.
    """
    _check_all(jobs, grid)
    unused = DRAWN if arrivals["arrivals"] == "trace" else ()
    parameters = {
        name: value for name, value in asdict(recipe).items() if value not in (None, (), "") and name not in unused
    }
    header = {
        "seed": seed,
        "jobs": len(jobs),
        "lasts": round(jobs[-1].arrives_at, 3),
        "policy": recipe.policy,
        "request": recipe.request,
        "grid": grid.clusters,
        **arrivals,
        "recipe": parameters,
    }
    return Workload(header, tuple(jobs))


class _JobGenerator:
    """Generator of jobs; each aspect is drawn from separate random numbers."""

    def __init__(self, recipe: Recipe, grid: GridSize, seed: int) -> None:
        self._recipe, self._grid = recipe, grid
        self.scale = scale_of(recipe, grid)
        aspects = ("sizes", "components", "priorities", "applications", "run times", "inputs")
        self._draws = {aspect: Random(f"{seed}/{aspect}") for aspect in aspects}

    @property
    def mean_nodes(self) -> float:
        return fmean(self._scale_size(size) for size in self._recipe.sizes)

    def create_job(self, index: int, arrival: float, nodes: int | None = None, seconds: float | None = None) -> Arrival:
        """Return a job. ``nodes`` and ``seconds`` come from a trace; they are drawn if None."""
        recipe, draws = self._recipe, self._draws
        drawn = draws["sizes"].choice(recipe.sizes)
        parts = draws["components"].random()
        run_time = draws["run times"].uniform(*recipe.run_times) / recipe.compress
        application = _draw_weighted(draws["applications"], recipe.applications)
        priority = _draw_weighted(draws["priorities"], recipe.priorities)
        file = draws["inputs"].choice(recipe.inputs) if recipe.inputs else None
        request = self._create_request(nodes or drawn, nodes or self._scale_size(drawn), parts)
        program = PROGRAMS[application]
        arguments = dict(recipe.arguments).get(application)
        if application == SLEEP and arguments is None:
            arguments = (f"{run_time if seconds is None else seconds:.3f}",)
        job: Json = {
            "request": request,
            "command": program.command_line(arguments),
            "launcher": program.launcher,
            "name": f"{application}-{index}",
            "priority": priority,
        }
        if recipe.policy:
            job["policy"] = recipe.policy
        if file is not None:
            job["inputs"] = [{"file": file}]
        job |= dict(recipe.fields)
        if job["launcher"] == "processes":
            job.pop("processes_per_node", None)  # This field is for MPI programs only.
        return Arrival(round(arrival, 3), application, job)

    def _scale_size(self, size: int) -> int:
        scaled = max(1, round(size * self.scale))
        return min(scaled, self._grid.total or scaled)

    def _create_request(self, drawn: int, nodes: int, draw: float) -> Json:
        """Return a request of ``nodes`` nodes.

        ``drawn`` is the size before scaling, which limits the number of components; ``draw`` in [0, 1) selects it.
        """
        recipe = self._recipe
        if recipe.request == "flexible":
            return {"type": "flexible", "total_size": nodes}
        able = [c for c in recipe.components if drawn // c >= recipe.least and c <= nodes]
        able = able or [max((c for c in recipe.components if c <= nodes), default=1)]
        parts = able[int(draw * len(able))]
        sizes = [nodes // parts + (part < nodes % parts) for part in range(parts)]
        return {"type": "nonfixed", "components": [{"size": size} for size in sizes]}


def _draw_weighted(draws: Random, choices: tuple[tuple[str, float], ...]) -> str:
    """Draw one of the (name, weight) pairs by weight; return its name."""
    names, weights = zip(*choices, strict=True)
    return str(draws.choices(names, weights)[0])


def _check_all(jobs: list[Arrival], grid: GridSize) -> None:
    """Raise ``UsageError`` for the first job that could never run on the grid; do nothing if the grid is unknown."""
    if not grid.clusters:
        return
    limits = Limits([ClusterLimits(name, nodes) for name, nodes in grid.clusters.items()], POLICIES)
    checked: set[str] = set()
    for arrival in jobs:
        request, policy = arrival.job["request"], arrival.job.get("policy", "")
        if (shape := f"{policy} {request}") in checked:
            continue
        checked.add(shape)
        try:
            spec = JobSpec(request_of(request), ("true",), policy=policy)
            check_fits(spec, limits)
            check_combination(spec, limits)
        except UsageError as error:
            hint = "give other --sizes, --components or --scale"
            problem = f"a job of {nodes_of(arrival.job)} nodes could never run: {error.message}"
            raise UsageError(problem, field="--sizes", value=request, hint=hint) from error


def request_of(request: dict[str, Any]) -> Request:
    """Return the request of a generated submission, without its input files."""
    if request["type"] == "flexible":
        return FlexibleRequest(request["total_size"])
    return NonFixedRequest(tuple(ComponentRequest(component["size"]) for component in request["components"]))
