"""The interfaces of the stores (Protocols) and their data types. ``daemon.core`` supplies the adapters."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from koalapy.model.advice import AdvisedPlacement, Run
from koalapy.model.alert import AlertKey, AlertMark
from koalapy.model.audit import AuditCheck, AuditEntry, AuditFilter, AuditHead
from koalapy.model.cluster import Drain
from koalapy.model.history import (
    DayFilter,
    EndedJob,
    Figures,
    HistoryFilter,
    HistoryPage,
    Key,
    LocalLoad,
    PastComponent,
    PastComponents,
    Sample,
)
from koalapy.model.job import Attempt, Job, JobId, JobState, TimelineEntry, Token
from koalapy.model.job_spec import Priority
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
    unusable: bool = False
    """Whether consecutive errors made it unusable, regardless of ``state``."""
    note: str = ""
    """Reason why it is unusable."""
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
    """The output of components, up to a limit; of longer output head and tail, half each.

    Calls block and may raise ``OSError``.
    """

    @property
    def limit(self) -> int:
        """Return the maximum stored bytes of a component's output."""

    @property
    def head(self) -> int:
        """Return the number of stored bytes at the beginning of the output."""

    def append(self, token: Token, pieces: Sequence[OutputPiece]) -> int:
        """Store the new bytes of pieces durably, and return the offset up to which the output is known.

        A piece is stored unless earlier bytes, other than its ``missing`` ones, are not stored yet. Such a piece and
        those after it are left for a later call.
        """

    def read(self, token: Token, after: int, *, to_the_end: bool) -> list[OutputPiece]:
        """Return the next pieces after an offset, about 1 MiB; empty if there are none.

        ``to_the_end``: the output is complete, so bytes that are missing after the last piece are reported, too.
        """

    def size(self, token: Token) -> int:
        """Return the number of bytes that the component is known to have written."""

    def remove(self, jobs: Collection[JobId]) -> None:
        """Delete the output of jobs; ignore jobs without output."""


class Store(Protocol):
    """The store of jobs, the source of truth of the daemon.

    Calls block. Writing raises ``StoreUnavailable`` if a retry may succeed.
    """

    @property
    def instance(self) -> str:
        """Return the id of the stored data, the same for every daemon that opens it."""

    @property
    def epoch(self) -> int:
        """Return the epoch of the lease that this process holds."""

    def load(self) -> Saved: ...

    def write(self, batch: Batch) -> None:
        """Write a batch in one transaction. Raise ``LeaseLost`` if another daemon has taken over."""

    def renew_lease(self, now: float) -> None: ...

    def raise_epoch(self, epoch: int) -> None:
        """Continue with a higher epoch of the lease. Raise ``LeaseLost`` if another daemon has taken over."""

    def release_lease(self) -> None:
        """Release the lease, so that the next daemon starts at once."""

    def close(self) -> None: ...

    def submitted(self, keys: Collection[str]) -> dict[str, Submitted]:
        """Return the used keys among these, with their jobs, by key."""

    def job(self, job: JobId) -> Job | None: ...

    def array_of(self, task: JobId) -> Job | None:
        """Return the array with a task of this number, which may have no record; None if there is none."""
        ...

    def page(self, which: JobFilter) -> JobPage: ...

    def count(self, which: JobFilter) -> tuple[int, bool]:
        """Return the number of jobs that match a filter, and whether that is all; else at least so many match."""

    def timeline(self, job: JobId, after: int = 0, limit: int | None = None) -> list[TimelineEntry]:
        """Return timeline entries in order: all, or at most ``limit`` entries after the first ``after``."""

    def attempts(self, job: JobId, last: int | None = None) -> list[Attempt]:
        """Return the attempts of a job in order: all, or the last ``last``."""

    def usage(self, start: float, end: float) -> Usage:
        """Return the use of the grid between two times.

        A span of several days from the beginning of a day until now has the same cost for any length.
        """


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


class TokenStore(Protocol):
    """The store of token digests. Calls block and may raise ``StoreUnavailable``, like those of ``Store``."""

    def tokens(self) -> list[StoredToken]:
        """Return all tokens in order of their ids."""

    def save_tokens(self, tokens: Sequence[StoredToken]) -> None:
        """Insert or replace tokens in one transaction."""

    def remove_tokens(self, tokens: Collection[int]) -> None:
        """Delete tokens by id."""


class NotificationStore(Protocol):
    """The store of undelivered notifications. Calls block and may raise ``StoreUnavailable``, as in ``Store``."""

    def notifications(self) -> list[Notification]:
        """Return all undelivered notifications in order of their ids."""

    def save_notifications(self, notifications: Sequence[Notification]) -> None:
        """Insert or replace notifications."""

    def remove_notifications(self, notifications: Collection[int]) -> None: ...


class AuditStore(Protocol):
    """The append-only audit. Calls block and may raise ``StoreUnavailable``, like those of ``Store``."""

    def append_audit(self, entries: Sequence[AuditEntry]) -> None: ...

    def audit_entries(self, which: AuditFilter) -> list[AuditEntry]:
        """Return the entries that match a filter, oldest first unless it has ``newest_first``."""

    def forget_audit(self, before: float) -> int:
        """Delete the first entries, up to the first one since ``before``, and return their number."""

    def audit_head(self) -> AuditHead:
        """Return the id and hash of the last entry."""

    def audit_hash(self, entry: int) -> str | None:
        """Return the hash of an entry; None if it does not exist, empty if it was deleted by age."""

    def check_audit(self, after: AuditHead | None, limit: int) -> AuditCheck:
        """Check the hashes of at most ``limit`` entries after a checked one; None: from the first entry."""


class AdviceStore(Protocol):
    """The store of the advisor. Calls block and may raise ``StoreUnavailable``, like those of ``Store``."""

    def record(self, application: str, limit: int, owner: str | None = None) -> list[AdvisedPlacement]:
        """Return advised placements, newest first. An empty ``application`` matches all, ``owner=None`` all owners."""

    def applications_of(self, owner: str) -> set[str]:
        """Return the known applications of an owner's jobs."""

    def runs(self, limit: int) -> list[Run]:
        """Return the last runs with a known application, oldest first."""


class PredictionStore(Protocol):
    """The store of predictions. Calls block and may raise ``StoreUnavailable``, like those of ``Store``."""

    def add_predictions(self, made: Sequence[Prediction]) -> None:
        """Insert predictions in one transaction, except for deleted jobs.

        Existing ones of a job, kind and time are unchanged.
        """

    def predictions(
        self, since: float, limit: int, owner: str | None = None, application: str = ""
    ) -> list[tuple[Prediction, Course]]:
        """Return the newest predictions with the actual course of their jobs.

        An empty ``application`` matches all, ``owner=None`` all owners.
        """


class FileStore(Protocol):
    """The store of replicas, uploaded bundles and results. Calls block and may raise ``StoreUnavailable``."""

    def replicas(self) -> list[Replica]:
        """Return all replicas in order of name and cluster."""

    def save_replicas(self, replicas: Sequence[Replica]) -> None:
        """Insert or replace replicas, by name and cluster, in one transaction."""

    def remove_replicas(self, name: str, clusters: Sequence[ClusterName]) -> None:
        """Delete replicas of a logical file; ignore those that do not exist."""

    def bundles(self) -> list[StoredBundle]: ...

    def save_bundles(self, bundles: Sequence[StoredBundle]) -> None: ...

    def remove_bundle(self, bundle: str) -> None: ...

    def results(self, job: JobId, generation: int) -> list[StoredResult]:
        """Return the results of one attempt in order of rank."""

    def results_sizes(self) -> dict[str, int]:
        """Return the bytes of stored results, by owner."""

    def save_result(self, result: StoredResult) -> int:
        """Store a result, and return the bytes of the results that it replaces.

        It replaces the component's earlier result and those of all earlier attempts.
        """

    def old_results(self, before: float, owners: Collection[str] | None = None) -> dict[JobId, int]:
        """Return the bytes of stored results by job, for jobs that ended before a time, oldest end first.

        ``owners=None``: jobs of all owners. Raise ``LeaseLost`` like a writing call, since the caller deletes the
        files.
        """

    def clear_results(self, jobs: Collection[JobId]) -> int:
        """Set the size of these jobs' results to 0, and return the bytes that they had.

        The caller deletes the files.
        """

    def forget_results(self, jobs: Sequence[JobId]) -> int:
        """Delete the results of these jobs, and return the bytes that they had."""


class HistoryStore(Protocol):
    """The store of ended jobs and daily figures.

    Calls block and may raise ``StoreUnavailable``, like those of ``Store``.
    """

    def node_use(self, since: float) -> list[NodeUse]:
        """Return the node use of each component that ended since a time, in ended attempts of users' jobs."""

    def days(self, which: DayFilter) -> dict[Key, Figures]:
        """Return the daily figures that match a filter, including those of deleted jobs."""

    def first_day(self) -> int | None:
        """Return the first day with figures; None without any."""

    def first_submission(self) -> float | None:
        """Return the submission time of the oldest stored job; None without one."""

    def nodes_by_day(self, until: int) -> list[tuple[int, ClusterName, int]]:
        """Return (day, cluster, maximum nodes) in order of days up to ``until``, where clusters reported nodes."""

    def ended_jobs(self, after: tuple[float, JobId], until: float, limit: int) -> list[EndedJob]:
        """Return at most ``limit`` jobs of users that ended before ``until``, in order of end and id.

        ``after`` is the end and id of the last job of the previous call.
        """

    def ended_page(self, which: HistoryFilter) -> HistoryPage:
        """Return a page of users' ended jobs, the last end first unless the filter has another order.

        A page that is not the last may have fewer jobs than the limit, or none, to bound its cost.
        """

    def ended_components(self, since: float, limit: int, cluster: ClusterName = "") -> PastComponents:
        """Return the components with the most node-seconds since a time, at most ``limit``, in order of their end.

        Only the components that ended last are examined, or those of the newest jobs of one cluster.
        """

    def failed_components(self, cluster: ClusterName, limit: int) -> list[PastComponent]:
        """Return the components of a cluster that ended with an error, of the newest jobs, the last end first.

        Only the components of the newest jobs are examined.
        """

    def expired_jobs(self, before: float, limit: int, *, internal: bool) -> list[JobId]:
        """Return jobs that ended before a time, oldest end first: those of users, or the daemon's own."""

    def remove(self, jobs: Sequence[JobId]) -> None:
        """Delete jobs. Their ids are not reused, and their runs are retained for the advisor."""

    def size(self) -> int | None:
        """Return the size of the database in bytes; None if unknown."""

    def shrink(self) -> bool:
        """Return unused space to the disk in a bounded step. Return whether more is left."""


class SampleStore(Protocol):
    """The store of samples of the grid's use. Calls block and may raise ``StoreUnavailable``."""

    def add_sample(self, sample: Sample) -> None:
        """Store a sample, and delete those that are older by ``KEPT_S``."""

    def samples(self, since: float) -> list[Sample]:
        """Return the samples from a time on, oldest first."""

    def add_local_load(self, loads: Sequence[LocalLoad]) -> None:
        """Store the load of clusters in one slot, and delete that of slots older by ``LOAD_KEPT_S``."""

    def local_load(self, first_slot: int, joined_slots: int) -> list[LocalLoad]:
        """Return the means over so many slots each, from a slot on, by cluster and time.

        ``slot`` is then the number of such a longer slot.
        """


class AlertMarkStore(Protocol):
    """The store of acknowledgements and silences of alerts. Calls block and may raise ``StoreUnavailable``."""

    def alert_marks(self) -> list[AlertMark]:
        """Return all marks, including expired ones."""

    def save_alert_marks(self, marks: Sequence[AlertMark], removed: Collection[AlertKey], now: float) -> None:
        """Insert or replace marks, and remove others and expired ones, in one transaction."""


class MeasurementStore(Protocol):
    """The store of link measurements. Calls block and may raise ``StoreUnavailable``, like those of ``Store``."""

    def add(self, measurement: Measurement) -> None:
        """Store a measurement, and retain the last thousand of its pair and kind."""

    def latest(self) -> list[Measurement]:
        """Return the newest measurements in the order of insertion: one of each pair, kind and, for transfers,
        direction.

        For ping-pongs, return the newest failed one, and the newest ``MAX_PINGPONGS`` successful ones.
        """

    def history(self, one: ClusterName, other: ClusterName, limit: int) -> list[Measurement]:
        """Return the measurements between two clusters in both directions, newest first."""
