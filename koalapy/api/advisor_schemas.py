"""What goes over the wire of the advisor."""

from koalapy.api.schemas import Output


class RunsView(Output):
    """Runs of an application of one size on one number of clusters."""

    nodes: int
    processes_per_node: int | None
    """Null where the clusters' own number was taken."""
    clusters: int
    runs: int
    seconds: float
    """Their median, at speed 1."""
    slowdown: float | None
    """How many times longer it is taken to run there than on one cluster; null on one."""


class ApplicationView(Output):
    """What is known of an application, and what is decided for its jobs."""

    application: str
    clusters: int
    """The number of clusters that ``slowdown`` and ``verdict`` are for: where it ran most, else 2."""
    slowdown: float
    runs_on_several: int
    """Runs on several clusters that the slowdown was learned from."""
    verdict: str
    """Of a job for which several clusters have room now and one later: co-allocated, by the wait, one cluster."""
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
