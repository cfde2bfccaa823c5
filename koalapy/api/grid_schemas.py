"""What goes over the wire of the grid: clusters, how they were used, policies, the daemon's health."""

from typing import Any, Literal

from koalapy.api.fields import Output
from koalapy.model.job import Priority


class ClusterUsage(Output):
    """How a cluster was used in a span of time, and its nodes now."""

    name: str
    total: int
    used: int
    background: int
    idle: int
    node_seconds: float
    """What components of this scheduler had in that span."""
    utilisation: float | None
    """The same as a fraction of all its nodes; null where these are not known."""


class MeanTimes(Output):
    """Means in seconds over the jobs that ran to an end of their own, succeeded or failed, in that span."""

    jobs: int
    queue_time: float | None
    wait_time: float | None
    startup_overhead: float | None
    response_time: float | None
    start_delay: float | None


class Metrics(Output):
    """The grid over a span of time; ``queued``, ``active`` and the clusters' nodes are those of now."""

    start: str
    end: str
    clusters: list[ClusterUsage]
    priorities: dict[Priority, MeanTimes]
    ended: dict[str, int]
    """Jobs that ended in that span, by state."""
    restarts: int
    """How often these were tried again after failures of the infrastructure."""
    queued: int
    active: int


class DrainView(Output):
    """An operator's order that nothing more is placed on a cluster."""

    at: str
    by: str
    reason: str


class ClusterView(Output):
    name: str
    kind: str
    state: str
    total: int
    idle: int
    used: int
    background: int
    down: int
    errors: int
    reason: str
    last_heard: str | None
    processes_per_node: int
    speed: float
    unusable: bool
    """Whether it was given up after errors in a row, whatever else its state says."""
    trials: int
    """Probations that failed since."""
    drained: DrainView | None
    details: dict[str, Any]


class ClusterList(Output):
    clusters: list[ClusterView]


class PolicyView(Output):
    name: str
    serves: list[str]
    summary: str


class PolicyList(Output):
    policies: list[PolicyView]


class DiskView(Output):
    """Room on a disk in bytes, and how many files more may be made there, where that has a limit."""

    what: str
    path: str
    free: int
    size: int
    files: int | None


class Health(Output):
    """Jobs are counted as they are stored: whoever looks at one after that sees nothing older."""

    status: Literal["ok", "degraded"]
    ready: bool
    """Whether jobs and actions are taken: not while the database takes nothing."""
    problems: list[str]
    """What is wrong with the daemon itself."""
    disks: list[DiskView]
    """Where the daemon writes."""
    version: str
    epoch: int
    queued: int
    active: int
    clusters: dict[str, str]
