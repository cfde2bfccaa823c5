"""What "why?" is answered with over the wire."""

from typing import Any

from koalapy.api.fields import Output
from koalapy.api.schemas import JobSubmission
from koalapy.model.cluster import ClusterState
from koalapy.model.job import JobState


class ClusterFindingView(Output):
    """What one cluster means for a job; counts in nodes."""

    cluster: str
    state: ClusterState
    total: int
    idle: int
    """Those that this job could be given."""
    used: int
    """Those that jobs of this scheduler have."""
    background: int
    down: int
    gives: int
    """Those that the job has here, or would get now."""
    reason: str
    missing: int | None
    """How many more idle nodes, here alone, would suffice; null when nothing on this cluster alone would."""


class PastReasonView(Output):
    at: str
    event: str
    reason: str


class PlacedComponentView(Output):
    size: int
    cluster: str
    request_index: int | None
    """Its place among the components of the request, if it has one there."""


class PlacementView(Output):
    """Where a job is, or would go, and why there."""

    components: list[PlacedComponentView]
    reason: str


class ChangeView(Output):
    """The smallest change with which the job would be placed at once."""

    field: str
    """Of the submission; empty when submitting it again as it is would do."""
    value: Any
    text: str
    submission: JobSubmission
    """The job as changed, for POST /api/v1/jobs; without the fields that have their defaults."""
    placement: PlacementView


class ExplanationView(Output):
    """Why a job is where it is; times are ISO 8601 in UTC."""

    job: int | None
    """Null for a submission that was not made."""
    state: JobState
    """Of a submission: placed when it would be placed at once, else queued."""
    headline: str
    """The binding reason."""
    clusters: list[ClusterFindingView]
    notes: list[str]
    suffices: list[str]
    """What would have to happen, each by itself, for the job to be placed as it is."""
    position: int | None
    """Its place in its placement queue; 1 is the head."""
    ahead: int
    tries: int
    """Placement tries so far, counting the scans that passed it over."""
    reasons: list[PastReasonView]
    """The history of reasons, oldest first."""
    smallest_change: ChangeView | None
    placement: PlacementView | None
