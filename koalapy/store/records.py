"""The records of the stores: what a transaction writes, what a daemon loads, and filters and pages of queries."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from koalapy.model.advice import AdvisedPlacement
from koalapy.model.audit import AuditEntry
from koalapy.model.cluster import ClusterStanding
from koalapy.model.job import Attempt, Job, JobId, TimelineEntry, Token
from koalapy.model.job_spec import Priority
from koalapy.model.notification import Notification
from koalapy.model.request import ClusterName
from koalapy.model.reservation import Reservation


@dataclass(frozen=True, slots=True)
class ClusterRecord(ClusterStanding):
    """The stored state of a cluster; counts in nodes, times in seconds since the epoch."""

    kind: str
    """Kind of resource manager: local, slurm, sge, drmaa."""
    state: str
    total: int
    idle: int
    used: int
    """Nodes that jobs of this scheduler hold, or that are reserved for them."""
    background: int
    down: int
    errors: int
    reason: str
    last_heard: float | None
    processes_per_node: int
    speed: float
    withheld: int = 0
    """Nodes that the resource manager keeps for others or for reservations."""
    unknown: int = 0
    """Nodes of which nothing is known now; they count in no other number but ``total``."""
    details: dict[str, object] = field(default_factory=dict)
    """Values specific to the kind, such as the directory of a ``local`` cluster."""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """A query for jobs, newest first; empty fields match any job. ``before`` is the last id of the previous page."""

    states: tuple[str, ...] = ()
    owner: str = ""
    name: str = ""
    cluster: str = ""
    home_site: str = ""
    before: JobId | None = None
    limit: int = 100
    application: str = ""
    priority: str = ""
    min_restarts: int = 0
    max_restarts: int | None = None
    """None: any number."""
    min_size: int = 0
    max_size: int | None = None
    """Bounds of the number of nodes. Jobs that request components may be found with any number."""
    ids: tuple[JobId, ...] | None = None
    """Only jobs with these ids; None: any."""
    first: JobId = 1
    """Only jobs with this id or a larger one; ignored with ``ids`` or ``array``."""
    array: JobId | None = None
    """Only the tasks of this array; None: no tasks, unless by their ids."""
    since: float | None = None
    until: float | None = None
    """Only jobs submitted from ``since`` to before ``until``, in seconds since the epoch; None: at any time."""
    ended_since: float | None = None
    ended_until: float | None = None
    """Only jobs that ended from ``ended_since`` to before ``ended_until``; None: at any time, or not."""
    texts: tuple[tuple[str, tuple[str, ...], bool], ...] = ()
    """Terms of a search that all hold: kind, values and negation, as in ``JobSearch.stored_texts``. Jobs that never
    had an attempt may be found whatever their clusters."""


@dataclass(frozen=True, slots=True)
class JobPage:
    """A page of jobs, newest first. It may have fewer jobs than requested, or none, to bound its size and cost."""

    jobs: Sequence[Job]
    before: JobId | None
    """The value of ``before`` for the next page; None on the last page."""


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """A stored command that the cluster's agent has not acknowledged; ``payload`` is the message."""

    id: int
    cluster: ClusterName
    payload: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.payload["type"])

    @property
    def token(self) -> Token:
        return str(self.payload["token"])


@dataclass(frozen=True, slots=True)
class Submitted:
    """A used idempotency key, hashed by ``hash_key``, with its job and the digest of the submission."""

    key: str
    job: JobId
    digest: str


@dataclass(slots=True)
class Batch:
    """The changes of one transaction."""

    at: float
    epoch: int
    jobs: dict[JobId, Job] = field(default_factory=dict)
    respecified: set[JobId] = field(default_factory=set)
    """Those with a changed specification."""
    attempts: list[tuple[JobId, Attempt]] = field(default_factory=list)
    """Ended attempts of jobs that have a newer attempt."""
    timeline: list[TimelineEntry] = field(default_factory=list)
    outbox: list[OutboxEntry] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    submitted: list[Submitted] = field(default_factory=list)
    clusters: list[ClusterRecord] = field(default_factory=list)
    advised: list[AdvisedPlacement] = field(default_factory=list)
    """Placements by advice; the actual run times are stored when the jobs succeed."""
    scans: dict[Priority, int] = field(default_factory=dict)
    """Number of scans so far of each placement queue that was scanned."""
    reservations: list[Reservation] = field(default_factory=list)
    audit: list[AuditEntry] = field(default_factory=list)
    """Audit entries of the user actions that caused the changes."""
    notifications: list[Notification] = field(default_factory=list)
    """Notifications about the changes."""
    number: int = 0
    """Set by the store at the first try to write the batch, so that it recognizes a retry."""

    def __bool__(self) -> bool:
        return bool(
            self.jobs
            or self.timeline
            or self.outbox
            or self.acknowledged
            or self.submitted
            or self.clusters
            or self.scans
            or self.reservations
            or self.audit
            or self.notifications
        )


@dataclass(frozen=True, slots=True)
class Saved:
    """The state that a daemon loads at its start: unfinished jobs, unacknowledged commands, clusters, next job id."""

    jobs: tuple[Job, ...]
    outbox: tuple[OutboxEntry, ...]
    clusters: tuple[ClusterRecord, ...]
    next_job: JobId
    scans: dict[Priority, int] = field(default_factory=dict)
    """Number of scans so far of each placement queue."""


NOTHING_SAVED = Saved((), (), (), 1)


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """A piece of a component's output, ``offset`` bytes from its first; ``missing`` bytes before it are not there."""

    offset: int
    data: bytes
    missing: int = 0


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """An uploaded archive: bytes, number of files, and time of last use in seconds since the epoch."""

    id: str
    size: int
    files: int
    used_at: float
    owners: tuple[str, ...] = ()
    """Users that uploaded the archive, the first one first; other users have no access to it."""

    @property
    def owner(self) -> str:
        """Return the first user that uploaded it; empty for archives of earlier versions."""
        return self.owners[0] if self.owners else ""


@dataclass(frozen=True, slots=True)
class StoredResult:
    """The result archive of one component of an attempt; ``size`` in bytes is 0 once the archive is deleted."""

    job: JobId
    generation: int
    rank: int
    cluster: ClusterName
    size: int
    files: int
    at: float


@dataclass(frozen=True, slots=True)
class StoredToken:
    """An issued token, stored by its digest; times in seconds since the epoch."""

    id: int
    digest: str
    user: str
    role: str
    how: str
    """Method by which its owner was authenticated when it was issued, for display."""
    note: str
    created_at: float
    created_by: str
    expires_at: float | None = None
    last_used_at: float | None = None
    revoked_at: float | None = None
    made_by: int | None = None
    """Id of the token that authenticated its request, and with which it is revoked; None for one that cannot be
    revoked."""
