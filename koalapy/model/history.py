"""Daily statistics: counts of ended jobs, sums of their times, and node-seconds."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import NamedTuple

from koalapy.model.job import Attempt, Job, JobId, JobState
from koalapy.model.job_spec import Priority
from koalapy.model.request import ClusterName

DAY = 86400.0
"""Seconds of a day; days are numbered from the epoch, in UTC."""
MAX_DAYS = 400
"""Maximum duration of a component in days; a longer one comes from a wrong clock."""
MIN_SLOWDOWN_RUN_TIME = 10.0
"""Seconds; shorter jobs get the slowdown of this run time, so that they do not dominate the mean."""
QUEUE_TIME_LIMITS = {
    "within_1m": 60.0,
    "within_10m": 600.0,
    "within_1h": 3600.0,
    "within_6h": 21600.0,
    "within_1d": DAY,
}
"""Maximum queue time in seconds, by the count of jobs that were placed within it."""


class Kind(StrEnum):
    """The dimension by which figures are grouped; each group has a name."""

    GRID = "grid"
    """The whole grid; the name is empty."""
    CLUSTER = "cluster"
    USER = "user"
    POLICY = "policy"
    PRIORITY = "priority"
    SITE = "site"
    """The home site; jobs without a home site are not counted."""


class Step(StrEnum):
    """The time span of one line of figures."""

    DAY = "day"
    WEEK = "week"
    """A week from Monday."""
    ALL = "all"


class Key(NamedTuple):
    kind: Kind
    day: int
    name: str


@dataclass(frozen=True, slots=True)
class DayFilter:
    """A query for the figures of a range of days; ``name`` None matches all names."""

    kind: Kind
    first: int
    last: int
    name: str | None = None
    days: int = 1
    """Days per line; lines begin at days that are ``offset`` more than a multiple of ``days``."""
    offset: int = 0
    limit: int = 10_000

    def matches(self, key: "Key") -> bool:
        """Return whether a key is in the range of days and has the name."""
        return self.first <= key.day <= self.last and self.name in (None, key.name) and key.kind is self.kind

    def period_start(self, day: int) -> int:
        """Return the first day of the line that a day belongs to."""
        return day - (day - self.offset) % self.days


@dataclass(slots=True)
class Figures:
    """Figures of a time span. Times are sums in seconds over the jobs that ``ran``, that is, ended by themselves."""

    jobs: int = 0
    """Number of jobs that ended, in any state."""
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    restarts: int = 0
    ran: int = 0
    coallocated: int = 0
    """Jobs that ran on several clusters at once."""
    within_1m: int = 0
    """Jobs that ran and were placed within a minute of their submission."""
    within_10m: int = 0
    within_1h: int = 0
    within_6h: int = 0
    within_1d: int = 0
    start_delays: int = 0
    """Jobs that ran and have a known start delay."""
    queue_time: float = 0.0
    wait_time: float = 0.0
    startup_overhead: float = 0.0
    run_time: float = 0.0
    response_time: float = 0.0
    slowdown: float = 0.0
    start_delay: float = 0.0
    node_seconds: float = 0.0
    """Node-seconds of the components of all attempts."""
    coallocated_node_seconds: float = 0.0
    """Node-seconds of attempts on several clusters at once."""

    @property
    def success(self) -> float | None:
        """Share of succeeded jobs among those that succeeded or failed: without cancelled ones; None without any."""
        return self.succeeded / (self.succeeded + self.failed) if self.succeeded + self.failed else None

    def add(self, figures: "Figures") -> None:
        """Add other figures to these."""
        for name in NAMES:
            if value := getattr(figures, name):
                setattr(self, name, getattr(self, name) + value)


NAMES = tuple(figure.name for figure in fields(Figures))


class HistorySort(StrEnum):
    """The order of a list of ended jobs: largest first, unknown values last."""

    ENDED = "ended"
    WAIT = "wait"
    RUN = "run"
    NODES = "nodes"
    NODE_HOURS = "node-hours"
    CPU = "cpu"
    """Processor time."""
    EFFICIENCY = "efficiency"
    """Processor time divided by the available one, smallest first."""
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class HistoryPosition:
    """The end and id of the last job of a page."""

    ended_at: float
    job: JobId


@dataclass(frozen=True, slots=True)
class HistoryFilter:
    """A query for users' jobs that ended in a span; empty fields match any job. ``before`` is the position after which
    a page continues with jobs that ended earlier."""

    since: float
    until: float
    owner: str = ""
    name: str = ""
    """May contain ``*``, which matches any characters."""
    cluster: str = ""
    states: tuple[JobState, ...] = ()
    sort: HistorySort = HistorySort.ENDED
    before: HistoryPosition | None = None
    limit: int = 100
    with_sums: bool = False


@dataclass(frozen=True, slots=True)
class EndedJob:
    """An ended job with its use of nodes; times in seconds since the epoch.

    Processor time and memory are those of the last attempt's nodes that reported them, ``measured_nodes`` of ``nodes``;
    None if none did.
    """

    id: JobId
    array_job: JobId | None
    """The array that the job is a task of, and its index there; None for any other job."""
    array_index: int | None
    name: str
    owner: str
    application: str
    priority: Priority
    state: JobState
    reason: str
    exit_code: int | None
    restarts: int
    clusters: tuple[ClusterName, ...]
    nodes: int
    """Number of nodes of the last attempt."""
    submitted_at: float
    started_at: float | None
    ended_at: float
    wait_time: float | None
    run_time: float | None
    node_seconds: float
    """Node-seconds of all attempts."""
    measured_nodes: int
    cpu_time: float | None
    """Processor seconds of the program."""
    cpu_available: float | None
    """Processor seconds that the measured nodes had while the program ran."""
    peak_memory: int | None
    """Largest memory of the program on one node, in bytes."""
    memory: int | None
    """Requested bytes of memory of each node."""
    walltime: float | None
    """Requested seconds."""

    @property
    def efficiency(self) -> float | None:
        """Return the used share of the available processor time; None if it is not known."""
        return self.cpu_time / self.cpu_available if self.cpu_time is not None and self.cpu_available else None


@dataclass(slots=True)
class HistorySums:
    """Sums over ended jobs; times in seconds."""

    jobs: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    started: int = 0
    """Jobs with a program that started; ``wait_time`` and ``run_time`` are over these."""
    wait_time: float = 0.0
    run_time: float = 0.0
    node_seconds: float = 0.0
    cpu_time: float = 0.0
    cpu_available: float = 0.0
    unmeasured: int = 0
    """Jobs with a program that started, and with nodes that did not report processor time and memory."""
    peak_memory: int | None = None
    """Largest memory on one node of one job, in bytes; None if none is known."""


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """A page of ended jobs.

    A page ordered by the end continues at ``next``. A page in another order, and ``sums``, cover the newest matching
    jobs down to ``sums_next``; None: all of them.
    """

    jobs: Sequence[EndedJob]
    next: HistoryPosition | None
    sums: HistorySums | None = None
    sums_next: HistoryPosition | None = None


class Days(dict[Key, Figures]):
    """Figures by key; a missing key has zero figures."""

    def __missing__(self, key: Key) -> Figures:
        return self.setdefault(key, Figures())


def day_of(timestamp: float) -> int:
    """Return the day of a time in seconds since the epoch."""
    return int(timestamp // DAY)


def count_ended_jobs(ended_jobs: Iterable[Job], attempts: Iterable[tuple[Job, Attempt]]) -> Days:
    """Return the figures of ended jobs with their last attempts, and of ended attempts of other jobs.

    Each job and each attempt counts once, in the transaction that ends it.
    """
    days = Days()
    for job in ended_jobs:
        if not job.spec.internal:
            _add_job(days, job)
            if job.attempt is not None:
                _add_node_seconds(days, job, job.attempt, None)
    for job, attempt in attempts:
        if not job.spec.internal:
            _add_node_seconds(days, job, attempt, None)
    return days


def node_seconds_of(attempt: Attempt) -> float:
    """Return the node-seconds that the ended components of an attempt used."""
    return sum(
        component.size * min(MAX_DAYS * DAY, max(0.0, component.ended_at - component.claimed_at))
        for component in attempt.components
        if component.claimed_at is not None and component.ended_at is not None
    )


def count_running_jobs(jobs: Iterable[Job], now: float) -> Days:
    """Return the node-seconds that the current attempts of jobs have used until now."""
    days = Days()
    for job in jobs:
        if job.attempt is not None and job.generation and not job.spec.internal:
            _add_node_seconds(days, job, job.attempt, now if job.state.is_active else None)
    return days


def _add_job(days: Days, job: Job) -> None:
    """Count an ended job on the day of its end, for each group that it belongs to."""
    figures = figures_of(job)
    day = day_of(job.submitted_at if job.ended_at is None else job.ended_at)
    for kind, name in _series_of(job):
        days[Key(kind, day, name)].add(figures)
    for cluster in {component.cluster for component in job.attempt.gang} if job.attempt else ():
        days[Key(Kind.CLUSTER, day, cluster)].add(figures)


def figures_of(job: Job) -> Figures:
    """Return the figures of an ended job, without its node-seconds."""
    figures = Figures(jobs=1, restarts=job.restarts)
    setattr(figures, str(job.state), 1)
    attempt = job.attempt
    is_own_end = job.state in (JobState.SUCCEEDED, JobState.FAILED)
    if not is_own_end or attempt is None or attempt.barrier_at is None:
        return figures
    submitted, placed, started, ended = job.submitted_at, job.placed_at, job.started_at, job.ended_at
    if placed is None or started is None or ended is None:
        return figures
    figures.ran = 1
    figures.coallocated = int(_is_coallocated(attempt))
    figures.queue_time = max(0.0, placed - submitted)
    figures.wait_time = max(0.0, started - submitted)
    figures.startup_overhead = max(0.0, started - placed)
    figures.run_time = max(0.0, ended - started)
    figures.response_time = max(0.0, ended - submitted)
    figures.slowdown = max(1.0, figures.response_time / max(MIN_SLOWDOWN_RUN_TIME, figures.run_time))
    for name, seconds in QUEUE_TIME_LIMITS.items():
        setattr(figures, name, int(figures.queue_time <= seconds))
    if attempt.start_estimate is not None and job.first_start_estimate is not None:
        figures.start_delays, figures.start_delay = 1, attempt.start_estimate - job.first_start_estimate
    return figures


def _is_coallocated(attempt: Attempt) -> bool:
    return len({component.cluster for component in attempt.gang}) > 1


def _add_node_seconds(days: Days, job: Job, attempt: Attempt, until: float | None) -> None:
    """Add the node-seconds of an attempt. ``until`` is the end of its unended components; None: do not count them."""
    coallocated = _is_coallocated(attempt)
    names = _series_of(job)
    for component in attempt.components:
        ended = component.ended_at if component.ended_at is not None else until
        if component.claimed_at is None or ended is None:
            continue
        for day, seconds in _days_between(component.claimed_at, ended):
            node_seconds = component.size * seconds
            for kind, name in (*names, (Kind.CLUSTER, component.cluster)):
                figures = days[Key(kind, day, name)]
                figures.node_seconds += node_seconds
                if coallocated:
                    figures.coallocated_node_seconds += node_seconds


def _series_of(job: Job) -> tuple[tuple[Kind, str], ...]:
    """Return the groups that a job belongs to, as dimension and name; its clusters are not among them."""
    spec = job.spec
    return (
        (Kind.GRID, ""),
        (Kind.USER, spec.owner),
        (Kind.POLICY, spec.policy or ""),
        (Kind.PRIORITY, spec.priority.value),
        *([(Kind.SITE, spec.home_site)] if spec.home_site else []),
    )


def _days_between(start: float, end: float) -> Iterator[tuple[int, float]]:
    """Yield each day of a time span with the seconds of the span in that day."""
    start = max(start, end - MAX_DAYS * DAY)
    while start < end:
        day = day_of(start)
        until = min(end, (day + 1) * DAY)
        yield day, until - start
        start = until


@dataclass(frozen=True, slots=True)
class PastComponent:
    """A component that had nodes, with the times of its attempt; in seconds since the epoch, None if not reached."""

    job: JobId
    generation: int
    cluster: ClusterName
    size: int
    claimed_at: float | None
    barrier_at: float | None
    launched_at: float | None
    ended_at: float | None
    error: str
    """Why it ended early; empty if it did not."""
    is_shared: bool
    """Whether its attempt has components on other clusters too."""
    owner: str = ""
    """The user of its job; empty for a job of the daemon."""


SAMPLE_INTERVAL_S = 60.0
CLUSTER_SLOT_S = 600
"""Shortest slot of the sums of a single cluster, in seconds."""
SLOTS_KEPT_S = {60: DAY, CLUSTER_SLOT_S: 2 * DAY, 3600: 31 * DAY}
"""The lengths of the slots over which samples are summed, and the time for which their sums are stored, in seconds."""
USES = ("ours", "local", "idle", "down", "withheld", "unknown")
"""The uses of nodes in a ``UseSum``."""


@dataclass(frozen=True, slots=True)
class UseSum:
    """The sums of the samples in a slot: of the nodes by use, and of the jobs. ``SAMPLE_INTERVAL_S`` times the sum of a
    use are its node-seconds; divided by ``samples`` it is the mean number of nodes while the daemon ran."""

    start: int
    """Start of the slot in seconds since the epoch."""
    cluster: ClusterName
    """Empty for all clusters together; only these have sums of jobs."""
    samples: int
    ours: int = 0
    """Nodes that jobs of this scheduler have or are claiming."""
    local: int = 0
    """Nodes of local users."""
    idle: int = 0
    down: int = 0
    withheld: int = 0
    unknown: int = 0
    """Nodes of clusters without a current report."""
    queued: int = 0
    started: int = 0
    ended: int = 0
    """Jobs that ended, in any state."""
    startup: float = 0.0
    """Seconds from the placement to the start, over the jobs that started."""

    @property
    def known(self) -> int:
        """Return the sum of the nodes of clusters with a current report."""
        return self.ours + self.local + self.idle + self.down + self.withheld


@dataclass(frozen=True, slots=True)
class UseSums:
    """The sums of a time range in slots of equal length."""

    length: int
    """Length of a slot in seconds."""
    starts: Sequence[int]
    """The starts of all slots of the range, oldest first."""
    by_cluster: Mapping[ClusterName, Mapping[int, UseSum]]
    """By cluster and start; a slot without samples is missing."""

    def values(self, value: Callable[[UseSum], float | None], cluster: ClusterName = "") -> list[float | None]:
        """Return a value of each slot of a cluster, by default of all clusters together; None without samples."""
        sums = self.by_cluster.get(cluster, {})
        return [value(sums[start]) if start in sums else None for start in self.starts]

    def means(self, name: str, cluster: ClusterName = "") -> list[float | None]:
        """Return the mean number of nodes of a use, or of queued jobs, in each slot."""
        return self.values(lambda use: round(getattr(use, name) / use.samples, 3), cluster)
