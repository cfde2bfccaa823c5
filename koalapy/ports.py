"""What the stores keep, and how services ask for it: the Protocols that ``daemon.core`` fills with adapters."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from koalapy.model.advice import AdvisedPlacement, Run
from koalapy.model.audit import AuditCheck, AuditEntry, AuditFilter, AuditHead
from koalapy.model.cluster import Drain
from koalapy.model.history import DayFilter, EndedJob, Figures, Key
from koalapy.model.job import Attempt, Job, JobId, JobState, Priority, TimelineEntry, Token
from koalapy.model.limits import NodeUse
from koalapy.model.measurement import Measurement
from koalapy.model.notification import Notification
from koalapy.model.prediction import Course, Prediction
from koalapy.model.replica import Replica
from koalapy.model.request import ClusterName


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """The stored state of a cluster; counts in nodes, times in seconds since the epoch."""

    name: ClusterName
    kind: str
    """The kind of resource manager: local, slurm, sge, drmaa."""
    state: str
    total: int
    idle: int
    used: int
    """Nodes that jobs of this scheduler have, or that are reserved for them."""
    background: int
    down: int
    errors: int
    reason: str
    last_heard: float | None
    processes_per_node: int
    speed: float
    unusable: bool = False
    """Whether consecutive errors made it unusable, regardless of ``state``."""
    note: str = ""
    """Why it is unusable."""
    trials: int = 0
    """Number of failed probations since."""
    drained: Drain | None = None
    """The drain order of an operator, until it is withdrawn."""
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
    ids: tuple[JobId, ...] | None = None
    """Only jobs with these ids; None: any."""


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


@dataclass(frozen=True, slots=True)
class MeanTimes:
    """Mean times in seconds over jobs that ended by themselves; None without such jobs."""

    jobs: int = 0
    queue_time: float | None = None
    wait_time: float | None = None
    startup_overhead: float | None = None
    response_time: float | None = None
    start_delay: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of the grid in a time span: node-seconds by cluster, and counts of ended jobs."""

    node_seconds: dict[ClusterName, float]
    mean_times: dict[Priority, MeanTimes]
    ended: dict[JobState, int]
    restarts: int


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """A piece of a component's output, ``offset`` bytes from its first; ``missing`` bytes before it are not there."""

    offset: int
    data: bytes
    missing: int = 0


class OutputStore(Protocol):
    """Components' output up to a limit: of what is longer head and tail, half each. Calls block; ``OSError``."""

    @property
    def limit(self) -> int:
        """Bytes of a component's output that are kept at most."""

    @property
    def head(self) -> int:
        """Of these, bytes that are kept from the first on."""

    def append(self, token: Token, pieces: Sequence[OutputPiece]) -> int:
        """Keep what is new of these, on the disk when this returns; how far the component's output is known now.

        A piece is kept where the output ends, or where it would end were it not for the bytes that are missing before
        the piece; others are left for later, with those that follow.
        """

    def read(self, token: Token, after: int, *, to_the_end: bool) -> list[OutputPiece]:
        """The next pieces beyond an offset, about 1 MiB of them; none when there are no more.

        ``to_the_end``: nothing more will come, so that bytes that are missing after the last piece are told as well.
        """

    def size(self, token: Token) -> int:
        """Bytes that the component is known to have written."""

    def remove(self, jobs: Collection[JobId]) -> None:
        """All that is kept of these jobs; no error where there is nothing."""


class Store(Protocol):
    """The truth. Calls block; those that write raise ``StoreUnavailable`` when trying again may help."""

    @property
    def instance(self) -> str:
        """The name of what is stored here, the same for every daemon that opens it."""

    @property
    def epoch(self) -> int:
        """Of the lease that is held."""

    def load(self) -> Saved: ...

    def write(self, batch: Batch) -> None:
        """All of the batch or nothing; ``LeaseLost`` when another daemon has taken over since."""

    def renew_lease(self, now: float) -> None: ...

    def raise_epoch(self, epoch: int) -> None:
        """Go on with a higher epoch than the lease was taken with; ``LeaseLost`` as ``write``."""

    def release_lease(self) -> None:
        """Let the next daemon start at once."""

    def close(self) -> None: ...

    def submitted(self, keys: Collection[str]) -> dict[str, Submitted]:
        """Those of the keys that were used, and for what."""

    def job(self, job: JobId) -> Job | None: ...

    def page(self, which: JobFilter) -> JobPage: ...

    def timeline(self, job: JobId, after: int = 0, limit: int | None = None) -> list[TimelineEntry]:
        """In order: all of it, or so many lines after the first ``after``."""

    def attempts(self, job: JobId, last: int | None = None) -> list[Attempt]:
        """In order: all of them, or the last so many."""

    def usage(self, start: float, end: float) -> Usage:
        """From the beginning of a day on, over more than one, until now: however long it is, at the same cost."""


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """A submitter's own files as they are kept: bytes of the archive, files in it, and when it was last wanted."""

    id: str
    size: int
    files: int
    used_at: float
    owners: tuple[str, ...] = ()
    """The users who have sent it, the first one first; to others it is not there."""

    @property
    def owner(self) -> str:
        """Who sent it first; empty of those that an earlier version took."""
        return self.owners[0] if self.owners else ""


@dataclass(frozen=True, slots=True)
class StoredResult:
    """What one component of one attempt has brought: files in the archive, and its bytes, 0 when it is not kept now."""

    job: JobId
    generation: int
    rank: int
    cluster: ClusterName
    size: int
    files: int
    at: float


@dataclass(frozen=True, slots=True)
class StoredToken:
    """A token that was asked for, by its digest; times in seconds since the epoch."""

    id: int
    digest: str
    user: str
    role: str
    how: str
    """For people: by what its owner was known when it was made."""
    note: str
    created_at: float
    created_by: str
    expires_at: float | None = None
    last_used_at: float | None = None
    revoked_at: float | None = None
    made_by: int | None = None
    """The token that was shown when it was asked for, with which it ends; None of one that cannot be revoked."""


class TokenStore(Protocol):
    """Tokens by their digests. Calls block; ``StoreUnavailable`` as those of ``Store``."""

    def tokens(self) -> list[StoredToken]:
        """In order of their numbers."""

    def save_tokens(self, tokens: Sequence[StoredToken]) -> None:
        """All or none; each replaces that of the same number."""

    def remove_tokens(self, tokens: Collection[int]) -> None:
        """Nothing is known of these any more."""


class NotificationStore(Protocol):
    """What is on its way to somebody. Calls block; ``StoreUnavailable`` as those of ``Store``."""

    def notifications(self) -> list[Notification]:
        """In order of their numbers."""

    def save_notifications(self, notifications: Sequence[Notification]) -> None:
        """Each replaces that of the same number."""

    def remove_notifications(self, notifications: Collection[int]) -> None: ...


class AuditStore(Protocol):
    """The audit, to which is only added. Calls block; ``StoreUnavailable`` as those of ``Store``."""

    def append_audit(self, entries: Sequence[AuditEntry]) -> None: ...

    def audit_entries(self, which: AuditFilter) -> list[AuditEntry]:
        """The oldest first."""

    def forget_audit(self, before: float) -> int:
        """Remove the first entries, up to one that is not from before a moment; return how many these were."""

    def audit_head(self) -> AuditHead:
        """Return the last entry."""

    def audit_hash(self, entry: int) -> str | None:
        """Return the hash of an entry; None if the entry is not there, empty if it was removed for its age."""

    def check_audit(self, after: AuditHead | None, limit: int) -> AuditCheck:
        """Check so many entries after one that was checked; None: from the first on."""


class AdviceStore(Protocol):
    """What is kept of the advisor. Calls block; ``StoreUnavailable`` as those of ``Store``."""

    def record(self, application: str, limit: int, owner: str | None = None) -> list[AdvisedPlacement]:
        """What was advised, newest first: of all applications when none is named, and of everybody's jobs."""

    def applications_of(self, owner: str) -> set[str]:
        """The known ones among those of somebody's jobs."""

    def runs(self, limit: int) -> list[Run]:
        """The last jobs that succeeded and whose application is known, from the oldest to the newest."""


class PredictionStore(Protocol):
    """What was foretold of jobs. Calls block; ``StoreUnavailable`` as those of ``Store``."""

    def add_predictions(self, made: Sequence[Prediction]) -> None:
        """All or none, but of jobs that there are; what is there of a job, kind and moment stays."""

    def predictions(
        self, since: float, limit: int, owner: str | None = None, application: str = ""
    ) -> list[tuple[Prediction, Course]]:
        """The newest, of everybody's jobs and all applications where none is named, and what has come since."""


class FileStore(Protocol):
    """What is kept of files outside the jobs themselves. Calls block; ``StoreUnavailable`` as those of ``Store``."""

    def replicas(self) -> list[Replica]:
        """In order of name and cluster."""

    def save_replicas(self, replicas: Sequence[Replica]) -> None:
        """All or none; each replaces that of the same name and cluster."""

    def remove_replicas(self, name: str, clusters: Sequence[ClusterName]) -> None:
        """No error for those that are not there."""

    def bundles(self) -> list[StoredBundle]: ...

    def save_bundles(self, bundles: Sequence[StoredBundle]) -> None: ...

    def remove_bundle(self, bundle: str) -> None: ...

    def results(self, job: JobId, generation: int) -> list[StoredResult]:
        """Of one attempt, in order of rank."""

    def results_sizes(self) -> dict[str, int]:
        """Bytes of all that are kept, by the owners of their jobs."""

    def save_result(self, result: StoredResult) -> int:
        """In place of what the component brought before, and of all earlier attempts; how many bytes these were."""

    def old_results(self, before: float, owners: Collection[str] | None = None) -> dict[JobId, int]:
        """The jobs (of these owners) that ended before a moment and of which something is kept, those first that ended
        first, and how many bytes theirs are; ``LeaseLost`` as what writes, for files are removed by it."""

    def clear_results(self, jobs: Collection[JobId]) -> int:
        """What these jobs brought is not kept any more; how many bytes that was. It is known that there was some."""

    def forget_results(self, jobs: Sequence[JobId]) -> int:
        """Nothing is known of what these jobs brought any more; how many bytes that was."""


class HistoryStore(Protocol):
    """The books of jobs that are over. Calls block; ``StoreUnavailable`` as those of ``Store``."""

    def node_use(self, since: float) -> list[NodeUse]:
        """Nodes that users' jobs had in attempts that are over and ended since a moment, component by component."""

    def days(self, which: DayFilter) -> dict[Key, Figures]:
        """What has become of jobs, by their days; of those that are gone, too."""

    def first_day(self) -> int | None:
        """Of which anything is known."""

    def first_submission(self) -> float | None:
        """Return when the oldest job that is kept was submitted; None without one."""

    def nodes_by_day(self, until: int) -> list[tuple[int, ClusterName, int]]:
        """Days up to one, in order, in which clusters told how many nodes they have, and how many at most."""

    def ended(self, after: tuple[float, JobId], until: float, limit: int) -> list[EndedJob]:
        """Users' jobs in order of their ends and numbers, beyond one of these, that ended before a moment."""

    def over(self, before: float, limit: int, *, internal: bool) -> list[JobId]:
        """Jobs that ended before a moment, those that ended first: users', or the daemon's own."""

    def remove(self, jobs: Sequence[JobId]) -> None:
        """All there is of these jobs; their numbers are not given again, and what they taught the advisor is kept."""

    def size(self) -> int | None:
        """Bytes that the database takes up; None where that cannot be said."""

    def shrink(self) -> bool:
        """Give some of the room back that is not used any more; whether there is more of it to give."""


class MeasurementStore(Protocol):
    """The history of links. Calls block; ``StoreUnavailable`` as those of ``Store``."""

    def add(self, measurement: Measurement) -> None:
        """Keep it, and the last thousand of its pair and kind."""

    def latest(self) -> list[Measurement]:
        """Of each pair the newest of each kind, of transfers each way; of ping-pongs the newest that failed, and the
        newest ``MAX_PINGPONGS`` that went well. In the order in which they were added."""

    def history(self, one: ClusterName, other: ClusterName, limit: int) -> list[Measurement]:
        """Of one pair, both ways, newest first."""
