"""The effects of a scheduling cycle: changed records, and commands to clusters."""

from dataclasses import dataclass, field
from enum import StrEnum

from koalapy.model.advice import AdvisedPlacement
from koalapy.model.job import Attempt, Job, JobId, TimelineEntry, Token
from koalapy.model.job_spec import Priority
from koalapy.model.placement import RefusalKind
from koalapy.model.request import ClusterName, StopWarning

MAX_STRAYS = 10_000
"""Maximum number of stray components of one cluster that are being stopped. It bounds the memory that a faulty agent
can use."""


@dataclass(frozen=True, slots=True)
class SubmitComponent:
    """Hand the component's runner to the cluster's resource manager."""

    cluster: ClusterName
    token: Token


@dataclass(frozen=True, slots=True)
class OpenBarrier:
    """Start the program: all nodes of all components of the job have reported."""

    cluster: ClusterName
    token: Token


@dataclass(frozen=True, slots=True)
class StopComponent:
    """Stop the component in whatever state it is."""

    cluster: ClusterName
    token: Token
    reason: str
    stray: bool = False
    """Whether the component belongs to no live attempt. If there are very many, the command is resent when the
    component is reported again."""
    warning: StopWarning | None = None
    """The signal sent to the program before it is stopped, and its grace."""


@dataclass(frozen=True, slots=True)
class ForgetComponent:
    """Remove the records of an ended component."""

    cluster: ClusterName
    token: Token


@dataclass(frozen=True, slots=True)
class StageComponent:
    """Transfer a component's files to its cluster; ``token`` is that of the stage (``Job.stage_token``)."""

    cluster: ClusterName
    token: Token


@dataclass(frozen=True, slots=True)
class UnstageComponent:
    """Cancel the transfers of a component's input files and remove the files.

    ``stray``: whether the component belongs to no live attempt.
    """

    cluster: ClusterName
    token: Token
    stray: bool = False


class ClaimFailure(StrEnum):
    """The reason for which a component did not get the nodes claimed for it."""

    NO_ROOM = "no-room"
    """The nodes were taken before it could be submitted."""
    LOCAL_USERS = "local-users"
    """The resource manager gave them to local users."""
    NOT_STARTED = "not-started"
    """The resource manager did not start it, and reported a reason."""
    KEPT = "kept"
    """The previous components did not release them."""
    RESOURCE_MANAGER = "resource-manager"
    """The resource manager has a problem."""
    LIMIT = "limit"
    """A limit of the resource manager was reached."""


class AttemptFailure(StrEnum):
    """The reason for which an attempt failed without a fault of its program."""

    CLUSTER = "cluster"
    """The agent reported a failed submission or failed nodes."""
    LOST = "lost"
    """The cluster does not know a component any more, or was out of reach for too long."""
    ENDED_EARLY = "ended-early"
    """The nodes were released before the program had ended."""
    NOT_REPORTED = "not-reported"
    """Allocated nodes never reported."""
    NOT_LAUNCHED = "not-launched"
    """The program was never launched."""
    FILES = "files"
    """The inputs could not be transferred."""
    RESULTS = "results"
    """The result files of a successful program were lost before they were sent."""
    REFUSED = "refused"
    """A resource manager rejected it, for neither a limit nor a known fault of the cluster."""


Command = SubmitComponent | OpenBarrier | StopComponent | ForgetComponent | StageComponent | UnstageComponent


@dataclass(slots=True)
class Effects:
    """The changes of one cycle. They are stored in one transaction before any command is sent."""

    jobs: dict[JobId, Job] = field(default_factory=dict)
    """The jobs as they are after the cycle."""
    respecified: set[JobId] = field(default_factory=set)
    """Those with a changed specification."""
    attempts: list[tuple[JobId, Attempt]] = field(default_factory=list)
    """The ended attempts of jobs that have begun a newer one since."""
    timeline: list[TimelineEntry] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    clusters: set[ClusterName] = field(default_factory=set)
    """Clusters with a changed error count or state."""
    confirm: set[ClusterName] = field(default_factory=set)
    """Clusters that are to report everything they know and confirm that: see ``events.ClusterConfirmed``."""
    advised: list[AdvisedPlacement] = field(default_factory=list)
    """The records of jobs placed by advice."""
    scans: dict[Priority, int] = field(default_factory=dict)
    """The number of periodic scans so far, of the queues that were scanned."""
    refusals: dict[RefusalKind, int] = field(default_factory=dict)
    """The number of rejected placement tries by the kind of obstacle; a job group counts once."""
    claims_failed: dict[tuple[ClusterName, ClaimFailure], int] = field(default_factory=dict)
    """The number of failed claims by cluster and reason, counted like ``refusals``."""
    attempts_failed: dict[tuple[ClusterName, AttemptFailure], int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    """Messages to the operator, for the log only."""

    def __bool__(self) -> bool:
        return bool(self.jobs or self.timeline or self.commands or self.clusters or self.scans)
