"""Why a job stands where it stands: what the scheduler answers to "why?" and everyone else only shows."""

from dataclasses import dataclass

from koalapy.model.cluster import ClusterState
from koalapy.model.job import JobId, JobSpec, JobState
from koalapy.model.placement import Placement
from koalapy.model.request import ClusterName

ChangeValue = str | int | float | None | dict[str, object] | list[object]


@dataclass(frozen=True, slots=True)
class ClusterFinding:
    """What one cluster means for a job; counts in nodes."""

    cluster: ClusterName
    state: ClusterState
    total: int
    idle: int
    """Nodes that this job could be given: those kept for another job are not among them."""
    used: int
    background: int
    down: int
    gives: int = 0
    """Nodes that the job has here, or would get now."""
    reason: str = ""
    """Why it is not used, or not enough."""
    missing: int | None = None
    """How many more idle nodes, here alone, would suffice; None when nothing on this cluster alone would."""


@dataclass(frozen=True, slots=True)
class PastReason:
    """A line of a job's history that says why; ``at`` in seconds since the epoch."""

    at: float
    event: str
    reason: str


@dataclass(frozen=True, slots=True)
class Change:
    """The smallest change of a request with which the job would be placed at once."""

    field: str
    """Of the submission; empty when submitting it again as it is would do."""
    value: ChangeValue
    text: str
    """What the user would do: ``allow 3 components``."""
    spec: JobSpec
    """The job as changed."""
    placement: Placement
    """Where it would go."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything that answers "why?" for a job, or for a submission that nobody has made yet."""

    job: JobId | None
    state: JobState
    """For a submission: ``placed`` when it would be placed at once, else ``queued``."""
    headline: str
    """The binding reason, in one line."""
    clusters: tuple[ClusterFinding, ...] = ()
    notes: tuple[str, ...] = ()
    """What else bears on it."""
    suffices: tuple[str, ...] = ()
    """What would have to happen, each by itself, for the job to be placed as it is: ``2 more idle nodes in south``."""
    position: int | None = None
    """Its place in its placement queue; 1 is the head."""
    ahead: int = 0
    """Jobs before it in its queue."""
    tries: int = 0
    """Placement tries so far, counting the scans that passed it over."""
    reasons: tuple[PastReason, ...] = ()
    """The history of reasons, oldest first."""
    smallest_change: Change | None = None
    placement: Placement | None = None
    """Where it is, or would go, and why there."""
