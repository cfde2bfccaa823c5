"""Recipes for workloads, and the presets of the papers."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from koalapy.model.errors import UsageError
from koalapy.model.field import Field
from koalapy.policies.registry import builtin_policies

SLEEP = "sleep"


@dataclass(frozen=True, slots=True)
class Program:
    """A program with its default arguments; ``estimate`` is its approximate run time in seconds on one cluster."""

    prefix: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    estimate: float = 5.0
    launcher: str = "openmpi"

    def command_line(self, arguments: tuple[str, ...] | None = None) -> list[str]:
        return [*self.prefix, *(self.arguments if arguments is None else arguments)]


def _mpi_program(name: str, estimate: float, *arguments: str) -> Program:
    return Program(("python", "-m", f"koalapy.apps.{name}"), ("--no-where", *arguments), estimate)


PROGRAMS: dict[str, Program] = {
    "prime": _mpi_program("prime", 5.0),
    "poisson": _mpi_program("poisson", 5.0),
    "wave": _mpi_program("wave", 5.0),
    "allgather": _mpi_program("allgather", 5.0),
    SLEEP: Program((SLEEP,), launcher="processes"),
}
"""The applications of sonmez-2010, a further MPI program, and ``sleep``."""


Form = Literal["nonfixed", "flexible"]
Weights = tuple[tuple[str, float], ...]
Span = tuple[float, float]

POLICIES = builtin_policies()


def form_for(policy: str, form: str) -> str:
    """Return a request type that the policy serves: ``form`` if it serves this type or is unknown here."""
    if policy not in POLICIES.names():
        return form
    serves = POLICIES.get(policy).serves
    return next((candidate for candidate in (form, "nonfixed", "flexible") if candidate in serves), form)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Parameters from which jobs are drawn, uniformly unless weights are given, and their help texts as options."""

    jobs: Annotated[int | None, Field("number of jobs")] = 100
    duration: Annotated[float | None, Field("seconds in which jobs arrive")] = None
    rate: Annotated[float | None, Field("mean number of jobs per second")] = None
    """Replaces the utilisation."""
    utilisation: Annotated[float, Field("fraction of the grid to use, instead of a rate")] = 0.4
    sizes: Annotated[tuple[int, ...], Field("nodes of a job, drawn from e.g. 8,16,32")] = (1, 2, 4)
    """Before scaling."""
    components: Annotated[tuple[int, ...], Field("nonfixed: number of components, drawn from e.g. 3,4,6")] = (1,)
    """The components have sizes as equal as possible."""
    least: Annotated[int, Field("nonfixed: minimum nodes of a component")] = 1
    """Before scaling."""
    request: Annotated[Form, Field("nonfixed or flexible; default: what the policy supports")] = "nonfixed"
    policy: Annotated[str, Field("placement policy of every job")] = ""
    priorities: Annotated[Weights, Field("priorities with weights, e.g. high:1,low:3")] = (("low", 1.0),)
    applications: Annotated[Weights, Field("applications with weights, e.g. prime:2,wave")] = ((SLEEP, 1.0),)
    arguments: Annotated[
        tuple[tuple[str, tuple[str, ...]], ...],
        Field("arguments of an application, e.g. wave='--steps 400'; repeatable"),
    ] = ()
    """They replace the program's defaults."""
    estimates: Annotated[
        Weights, Field("run time of an application in seconds, e.g. wave=6; repeatable", "--estimate")
    ] = ()
    """On one cluster. The arrival rate for a utilisation is computed from them."""
    run_times: Annotated[Span, Field("range of run times of sleep in seconds, e.g. 30-192")] = (5.0, 15.0)
    inputs: Annotated[tuple[str, ...], Field("logical files, of which each job reads one, e.g. a,b")] = ()
    scale: Annotated[float | None, Field("factor of sizes; default: the same fraction of the grid")] = None
    """None: chosen by ``scale_of``."""
    compress: Annotated[float, Field("factor by which everything runs faster")] = 1.0
    """It divides the run times of ``sleep`` and all times of a trace."""
    fields: Annotated[
        tuple[tuple[str, Any], ...],
        Field("field of every submission, e.g. claiming=incremental; repeatable", "--field"),
    ] = ()
    paper_nodes: int | None = None
    """Nodes of the paper's grid, relative to which sizes are scaled."""
    paper_smallest: int | None = None
    """Nodes of the paper's smallest cluster, if every job must fit on any cluster."""

    def check(self) -> None:
        """Raise ``UsageError`` for the first invalid parameter."""
        if not self.sizes or min(self.sizes) < 1:
            _reject_option("--sizes", self.sizes, "give whole numbers, 1 or more")
        if not self.components or min(self.components) < 1:
            _reject_option("--components", self.components, "give whole numbers, 1 or more")
        for option, value in (("--utilisation", self.utilisation), ("--compress", self.compress)):
            _check_positive(option, value)
        for option, number in (("--rate", self.rate), ("--scale", self.scale), ("--duration", self.duration)):
            if number is not None:
                _check_positive(option, number)
        if self.jobs is not None and self.jobs < 1:
            _reject_option("--jobs", self.jobs, "give 1 or more")
        low, high = self.run_times
        if not 0 < low <= high:
            _reject_option("--run-times", f"{low:g}-{high:g}", "give seconds as LOW-HIGH, above 0")
        for name, _ in self.applications:
            check_application("--applications", name)
        for option, pairs in (("--arguments", self.arguments), ("--estimate", self.estimates)):
            for name, _ in pairs:
                check_application(option, name)
        for name, seconds in self.estimates:
            _check_positive(f"--estimate {name}", seconds)
        for option, weighted in (("--applications", self.applications), ("--priorities", self.priorities)):
            if not weighted:
                _reject_option(option, "", "name one or more")
            for name, weight in weighted:
                _check_positive(f"{option} {name}", weight)
        for name, _ in self.priorities:
            if name not in ("high", "low"):
                _reject_option("--priorities", name, "use high and low")

    def seconds_of(self, application: str) -> float:
        """Return the expected run time of an application on one cluster in seconds."""
        if application == SLEEP:
            return sum(self.run_times) / 2 / self.compress
        return dict(self.estimates).get(application, PROGRAMS[application].estimate)


def check_application(option: str, name: str) -> None:
    if name not in PROGRAMS:
        _reject_option(option, name, f"known: {', '.join(sorted(PROGRAMS))}")


def _check_positive(option: str, value: float) -> None:
    if not 0 < value < float("inf"):
        _reject_option(option, value, "give a number above 0")


def _reject_option(option: str, value: object, hint: str) -> None:
    text = ",".join(str(part) for part in value) if isinstance(value, tuple) else value
    raise UsageError(f"{option} is {text!r}", field=option, value=value, hint=hint)


PRESETS: dict[str, Recipe] = {
    # mohamed-2005 4.2: 500 jobs of 36 or 72 processors in 3, 4, 6 or 8 components of more than 8; 310 processors
    "m05": Recipe(
        sizes=(36, 72),
        components=(3, 4, 6, 8),
        least=9,
        request="nonfixed",
        policy="close-to-files",
        priorities=(("high", 1.0), ("low", 1.0)),
        run_times=(30.0, 192.0),
        utilisation=0.6,
        jobs=500,
        fields=(("claiming", "incremental"),),
        paper_nodes=310,
    ),
    # sonmez-2010 VI-B.1: sizes that fit on any cluster; the smallest, Leiden's, has 32 nodes
    "s10-vi": Recipe(
        sizes=(8, 16, 32),
        request="flexible",
        policy="cluster-minimization",
        applications=(("prime", 1.0),),
        run_times=(200.0, 200.0),
        utilisation=0.4,
        jobs=None,
        duration=4 * 3600.0,
        paper_nodes=204,
        paper_smallest=32,
    ),
    # sonmez-2010 VII-A.1: jobs of 64 nodes of the Wave application
    "s10-vii": Recipe(
        sizes=(64,),
        request="flexible",
        policy="communication-aware",
        applications=(("wave", 1.0),),
        run_times=(200.0, 200.0),
        utilisation=0.4,
        jobs=None,
        duration=4 * 3600.0,
        paper_nodes=204,
    ),
}

DEFAULT = Recipe()


@dataclass(frozen=True, slots=True)
class GridSize:
    """Number of nodes of each cluster of the grid for which a workload is generated."""

    clusters: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.clusters.values())


def scale_of(recipe: Recipe, grid: GridSize) -> float:
    """Return the factor for sizes that makes the jobs as large a part of this grid as of the paper's."""
    if recipe.scale is not None:
        return recipe.scale
    if recipe.paper_smallest and grid.clusters:
        return min(grid.clusters.values()) / recipe.paper_smallest
    if recipe.paper_nodes and grid.total:
        return grid.total / recipe.paper_nodes
    return 1.0
