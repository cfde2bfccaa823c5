"""What was in days of the past: counts of jobs that ended, sums of their times, and node-seconds."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import NamedTuple

from koalapy.model.job import Attempt, Job, JobId, JobState, Priority
from koalapy.model.request import ClusterName

DAY = 86400.0
"""Seconds; days are counted from the epoch on, in UTC."""
MAX_DAYS = 400
"""That one component can have lasted; more says that a clock was wrong."""
MIN_SLOWDOWN_RUN_TIME = 10.0
"""Seconds that a job counts for at least in its slowdown, so that those that end at once do not stand for all."""
QUEUE_TIME_LIMITS = {
    "within_1m": 60.0,
    "within_10m": 600.0,
    "within_1h": 3600.0,
    "within_6h": 21600.0,
    "within_1d": DAY,
}
"""How long jobs waited for their placement at most, in seconds, by the names of their counts."""


class Kind(StrEnum):
    """By what days are told: each is of one of these, of the name that it has there."""

    GRID = "grid"
    """All of it; its name is empty."""
    CLUSTER = "cluster"
    USER = "user"
    POLICY = "policy"
    PRIORITY = "priority"
    SITE = "site"
    """By home site; jobs without one are in none."""


class Step(StrEnum):
    """How many days a line stands for."""

    DAY = "day"
    WEEK = "week"
    """From Monday on."""
    ALL = "all"


class Key(NamedTuple):
    kind: Kind
    day: int
    name: str


@dataclass(frozen=True, slots=True)
class DayFilter:
    """Which days to tell, from the first to the last, by what; of one name, or of all."""

    kind: Kind
    first: int
    last: int
    name: str | None = None
    days: int = 1
    """So many together; spans begin at days that are ``offset`` more than a multiple of that."""
    offset: int = 0
    limit: int = 10_000

    def matches(self, key: "Key") -> bool:
        """Whether it is of these days, and of that name."""
        return self.first <= key.day <= self.last and self.name in (None, key.name) and key.kind is self.kind

    def period_start(self, day: int) -> int:
        """The first of the days that are told together with one."""
        return day - (day - self.offset) % self.days


@dataclass(slots=True)
class Figures:
    """Of any span; times are sums in seconds over those that ``ran``, which is to an end of their own."""

    jobs: int = 0
    """That ended; of these so many with success, and so on."""
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    restarts: int = 0
    ran: int = 0
    coallocated: int = 0
    """Of those that ran: on several clusters at once."""
    within_1m: int = 0
    """Of those that ran: placed so soon after their submission."""
    within_10m: int = 0
    within_1h: int = 0
    within_6h: int = 0
    within_1d: int = 0
    start_delays: int = 0
    """Of those that ran: of which a start delay is known."""
    queue_time: float = 0.0
    wait_time: float = 0.0
    startup_overhead: float = 0.0
    run_time: float = 0.0
    response_time: float = 0.0
    slowdown: float = 0.0
    start_delay: float = 0.0
    node_seconds: float = 0.0
    """That components had, of whatever attempts, in that span."""
    coallocated_node_seconds: float = 0.0
    """Of these, those of attempts on several clusters at once."""

    def add(self, other: "Figures") -> None:
        for name in NAMES:
            if value := getattr(other, name):
                setattr(self, name, getattr(self, name) + value)


NAMES = tuple(each.name for each in fields(Figures))


@dataclass(frozen=True, slots=True)
class EndedJob:
    """As much of a job that is over as a trace tells; times in seconds since the epoch, None where it never came so
    far."""

    id: JobId
    submitted_at: float
    started_at: float | None
    ended_at: float
    state: JobState
    owner: str
    application: str
    priority: Priority
    walltime: float | None
    nodes: int
    """Of its last attempt."""
    clusters: tuple[ClusterName, ...]
    """Of its last attempt, in order of their names."""
    placed_at: float | None = None
    home_site: ClusterName = ""


class Days(dict[Key, Figures]):
    """Figures by what they are of; what is not there is nothing."""

    def __missing__(self, key: Key) -> Figures:
        return self.setdefault(key, Figures())


def day_of(at: float) -> int:
    """The day that a moment is in."""
    return int(at // DAY)


def count_ended_jobs(over: Iterable[Job], attempts: Iterable[tuple[Job, Attempt]]) -> Days:
    """What jobs that are over, with their last attempts, and attempts of others add to their days.

    Each job and each attempt counts once: with the transaction that ends it.
    """
    days = Days()
    for job in over:
        if not job.spec.internal:
            _count(days, job)
            if job.attempt is not None:
                _hold(days, job, job.attempt, None)
    for job, attempt in attempts:
        if not job.spec.internal:
            _hold(days, job, attempt, None)
    return days


def count_running_jobs(jobs: Iterable[Job], now: float) -> Days:
    """The node-seconds that attempts have had until now that are not over."""
    days = Days()
    for job in jobs:
        if job.attempt is not None and job.generation and not job.spec.internal:
            _hold(days, job, job.attempt, now if job.state.is_active else None)
    return days


def _count(days: Days, job: Job) -> None:
    figures = figures_of(job)
    day = day_of(job.submitted_at if job.ended_at is None else job.ended_at)
    for kind, name in _names(job):
        days[Key(kind, day, name)].add(figures)
    for cluster in {component.cluster for component in job.attempt.gang} if job.attempt else ():
        days[Key(Kind.CLUSTER, day, cluster)].add(figures)


def figures_of(job: Job) -> Figures:
    """Those of one job that is over, but for the nodes that it had."""
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


def _hold(days: Days, job: Job, attempt: Attempt, until: float | None) -> None:
    """``until`` is the end of components that have not ended; None where nobody knows it any more."""
    coallocated = _is_coallocated(attempt)
    names = _names(job)
    for component in attempt.components:
        ended = component.ended_at if component.ended_at is not None else until
        if component.claimed_at is None or ended is None:
            continue
        for day, seconds in _days_between(component.claimed_at, ended):
            held = component.size * seconds
            for kind, name in (*names, (Kind.CLUSTER, component.cluster)):
                figures = days[Key(kind, day, name)]
                figures.node_seconds += held
                if coallocated:
                    figures.coallocated_node_seconds += held


def _names(job: Job) -> tuple[tuple[Kind, str], ...]:
    spec = job.spec
    return (
        (Kind.GRID, ""),
        (Kind.USER, spec.owner),
        (Kind.POLICY, spec.policy or ""),
        (Kind.PRIORITY, spec.priority.value),
        *([(Kind.SITE, spec.home_site)] if spec.home_site else []),
    )


def _days_between(start: float, end: float) -> Iterator[tuple[int, float]]:
    """The days of a span, each with the seconds of it in that day."""
    start = max(start, end - MAX_DAYS * DAY)
    while start < end:
        day = day_of(start)
        until = min(end, (day + 1) * DAY)
        yield day, until - start
        start = until


def pair_with_jobs(attempts: Iterable[tuple[JobId, Attempt]], jobs: Mapping[JobId, Job]) -> list[tuple[Job, Attempt]]:
    """Attempts with the jobs that they are of, as far as these are known."""
    return [(jobs[job], attempt) for job, attempt in attempts if job in jobs]
