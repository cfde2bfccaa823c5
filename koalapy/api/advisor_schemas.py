"""What goes over the wire of the advisor."""

from koalapy.api.fields import Output


class RunsView(Output):
    """Runs of an application of one size on one cluster, or on several together."""

    nodes: int
    processes_per_node: int | None
    """Null where the clusters' own number was taken."""
    clusters: int
    where: list[str]
    """The clusters, where they were several; empty for runs on any single one."""
    runs: int
    killed: int
    """Of the runs, at their walltime: they would have run for longer."""
    seconds: float
    """What they take, at speed 1: the mean of the middle half of their logarithms."""
    seconds_between: list[float]
    """Two bounds between which that lies with a probability of 80 %."""
    slowdown: float | None
    """How many times longer it is taken to run there than on one cluster; null on one."""
    slowdown_between: list[float] | None
    """Two bounds between which that lies with a probability of 80 %; null on one."""


class ApplicationView(Output):
    """What is known of an application, and what is decided for its jobs."""

    application: str
    clusters: int
    """The number of those that ``slowdown`` and ``verdict`` are for: on which it ran together most, else any 2."""
    slowdown: float
    slowdown_between: list[float]
    """Two bounds between which it lies with a probability of 80 %."""
    runs_on_several: int
    """Runs on several clusters that the slowdown was learned from."""
    killed_on_several: int
    """Of these, at their walltime."""
    verdict: str
    """Of a job for which several clusters have room now and one later: co-allocated, by the wait, one cluster, or not
    known yet."""
    runs: list[RunsView]


class AdvisorView(Output):
    applications: list[ApplicationView]


class OptionView(Output):
    """A way to run a job that was compared with others; seconds."""

    clusters: list[str]
    slowdown: float
    wait: float | None
    """Null when it was not known."""
    transfer: float
    run: float | None
    """Null when nothing was known of the application."""
    response: float | None


class AdvisedView(Output):
    """An advice that was followed; seconds."""

    job: int
    generation: int
    at: str
    application: str
    clusters: int
    options: list[OptionView]
    reason: str
    predicted: float | None
    actual: float | None
    """From the opened barrier to the end; null unless it has succeeded."""
    error: float | None
    """By what fraction of the actual time the prediction was too long; negative when it was too short."""


class AdvisorRecord(Output):
    record: list[AdvisedView]
