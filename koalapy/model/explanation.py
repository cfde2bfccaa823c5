"""Explanations of why a job waits or was placed where it is."""

from dataclasses import dataclass

from koalapy.model.cluster import ClusterState
from koalapy.model.job import JobId, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.placement import Placement
from koalapy.model.request import ClusterName

ChangeValue = str | int | float | None | dict[str, object] | list[object]


@dataclass(frozen=True, slots=True)
class ClusterFinding:
    """One cluster in the explanation of a job; counts in nodes."""

    cluster: ClusterName
    state: ClusterState
    total: int
    idle: int
    """Nodes available to this job, without those reserved for another job."""
    used: int
    background: int
    down: int
    gives: int = 0
    """Nodes that the job has or would get on the cluster."""
    reason: str = ""
    """Why the cluster is not used, or does not suffice."""
    missing: int | None = None
    """Number of additional idle nodes on this cluster that would suffice; None if this cluster alone cannot."""


@dataclass(frozen=True, slots=True)
class PastReason:
    """An entry of a job's timeline with a reason; ``at`` in seconds since the epoch."""

    at: float
    event: str
    reason: str


@dataclass(frozen=True, slots=True)
class Change:
    """The smallest change of a request with which the job would be placed at once."""

    field: str
    """The field of the submission; empty if submitting the job again unchanged suffices."""
    value: ChangeValue
    text: str
    """The change as an instruction: ``allow 3 components``."""
    spec: JobSpec
    """The changed job."""
    placement: Placement
    """The placement of the changed job."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """An explanation of the state of a job, or of what would happen to a submission."""

    job: JobId | None
    state: JobState
    """For a submission: ``placed`` if it would be placed at once, else ``queued``."""
    headline: str
    """The decisive reason in one line."""
    clusters: tuple[ClusterFinding, ...] = ()
    notes: tuple[str, ...] = ()
    """Further facts that affect the job."""
    suffices: tuple[str, ...] = ()
    """Events of which any one would let the job be placed unchanged: ``2 more idle nodes in south``."""
    position: int | None = None
    """Position in the placement queue, from 1; None for a job that is not in it."""
    ahead: int = 0
    """Number of jobs ahead in the queue."""
    tries: int = 0
    """Number of placement tries, including the scans that skipped the job."""
    reasons: tuple[PastReason, ...] = ()
    """Earlier reasons, oldest first."""
    smallest_change: Change | None = None
    placement: Placement | None = None
    """The current placement, or the one that the job would get."""
