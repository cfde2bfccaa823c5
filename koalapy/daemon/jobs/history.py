"""The history of jobs by days or weeks: of the grid, by cluster, user, policy and priority; also as a trace.

Figures are read from the daily sums that the store keeps, so a query costs the same however many jobs ended. The sums
remain when the jobs are removed.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from math import ceil
from typing import Any

from koalapy import __version__
from koalapy.daemon.engine.database import query
from koalapy.model.errors import UsageError, reject
from koalapy.model.history import (
    DAY,
    QUEUE_TIME_LIMITS,
    DayFilter,
    Days,
    EndedJob,
    Figures,
    HistoryFilter,
    HistoryPage,
    Key,
    Kind,
    PastComponent,
    Step,
    count_running_jobs,
    day_of,
)
from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import Priority
from koalapy.model.limits import NodeUse
from koalapy.model.request import ClusterName
from koalapy.model.times import parse_moment
from koalapy.store.history import HistoryStore

MAX_LINES = 5000
"""Lines of one table."""
TRACE_PAGE_SIZE = 1000
"""Jobs that one query of a trace reads."""
EPOCH = date(1970, 1, 1)
COUNTS = ("jobs", "succeeded", "failed", "cancelled", "restarts", "ran")
MEANS = ("queue_time", "wait_time", "startup_overhead", "run_time", "response_time", "slowdown")
FIRST_MONDAY = 4
"""The first Monday after the epoch, as a day number."""


@dataclass(frozen=True, slots=True)
class UsageLine:
    """The figures of one period of one cluster, user, policy or priority.

    Times are means in seconds over the jobs that ``ran``, i.e. succeeded or failed by themselves; null if none did.
    """

    start: date
    end: date
    """The last day of the period."""
    name: str
    """Empty for the whole grid."""
    jobs: int
    """Jobs that ended in the period."""
    succeeded: int
    failed: int
    cancelled: int
    success: float | None
    """See ``Figures.success``."""
    restarts: int
    ran: int
    queue_time: float | None
    wait_time: float | None
    startup_overhead: float | None
    run_time: float | None
    response_time: float | None
    slowdown: float | None
    """Response time divided by run time, at least 1. Run times under 10 s count as 10 s."""
    within_1m: float | None
    """Share of the jobs that ran that were placed within a minute of submission; likewise below."""
    within_10m: float | None
    within_1h: float | None
    within_6h: float | None
    within_1d: float | None
    coallocated: float | None
    """Share of the jobs that ran that ran on several clusters at once."""
    node_seconds: float
    """Node-seconds of all attempts."""
    coallocated_node_seconds: float
    utilisation: float | None
    """Node-seconds divided by those available, on the cluster or on all clusters."""


@dataclass(frozen=True, slots=True)
class UsageTable:
    """Lines ordered by period and name."""

    by: Kind
    step: Step
    first: date
    last: date
    since: date | None
    """The first recorded day. Daily sums are never deleted."""
    jobs_keep: float | None
    """Seconds for which jobs are kept after their end; null: without limit."""
    lines: Sequence[UsageLine]


@dataclass(frozen=True, slots=True)
class Span:
    """The days from ``first`` to ``last``, both included."""

    first: date
    last: date

    @property
    def days(self) -> tuple[int, int]:
        """The first and the last day as days since the start of 1970."""
        return day_number(self.first), day_number(self.last)

    @property
    def seconds(self) -> tuple[float, float]:
        """Start and end of the span in seconds since the start of 1970."""
        first, last = self.days
        return first * DAY, (last + 1) * DAY


class History:
    """Tables and traces of ended jobs; tables also count what running jobs have used today."""

    def __init__(
        self,
        store: HistoryStore,
        clock: Callable[[], float],
        jobs: Callable[[], Iterable[Job]],
        jobs_keep: float | None = None,
    ) -> None:
        self._store, self._clock, self._jobs, self._jobs_keep = store, clock, jobs, jobs_keep

    def make_span(self, first: date | None, last: date | None, days: int = 30) -> Span:
        """Return the span; ``last`` defaults to today, ``first`` to ``days`` days up to then. Raise ``UsageError`` if
        it ends before it begins."""
        last = last or to_date(day_of(self._clock()))
        first = first or last - min(timedelta(days=days - 1), last - date.min)
        if first > last:
            reject("first", str(first), f"is {first}, which is after last, {last}", "give the earlier day as first")
        return Span(first, last)

    def parse_times(self, since: str, until: str) -> tuple[float, float]:
        """Return the times that a user gave, in seconds since the epoch. Raise ``UsageError`` for invalid ones."""
        now = self._clock()
        start, end = parse_moment(since, now, "since"), parse_moment(until, now, "until")
        if start > end:
            reject("since", since, f"is {since}, which is after until, {until}", "give the earlier time as since")
        return start, end

    async def list_ended(self, history_filter: HistoryFilter) -> HistoryPage:
        """Return a page of ended jobs of users."""
        return await query(self._store.ended_page, history_filter)

    async def count_outcomes(self, since: float, until: float, slot_s: float) -> list[tuple[int, str, int]]:
        """Return the number of ended jobs by slot and final state; see ``HistoryStore.count_outcomes``."""
        return await query(self._store.count_outcomes, since, until, slot_s)

    async def read_node_hours(self, seconds: float) -> dict[str, float]:
        """Return the node-hours of each user in the last seconds, with those of active jobs."""
        now = self._clock()
        used = await self.read_node_seconds(now - seconds, now, seconds)
        return {user: node_seconds[0] / 3600 for user, node_seconds in used.items()}

    async def read_node_seconds(
        self, since: float, until: float, slot_s: float, owners: Collection[str] = ()
    ) -> dict[str, list[float]]:
        """Return the node-seconds of each user in each slot of a time range, with those of active jobs. ``owners``:
        only of these users."""
        now, slots = self._clock(), ceil((until - since) / slot_s - 1e-6)
        active = [job for job in self._jobs() if job.state.is_active and job.attempt and not job.spec.internal]
        uses = [
            NodeUse(job.spec.owner, component.size, component.claimed_at, component.ended_at or now)
            for job in active
            for component in (job.attempt.components if job.attempt else ())
            if component.claimed_at is not None and (not owners or job.spec.owner in owners)
        ]

        def sum_up(ended: Sequence[NodeUse]) -> dict[str, list[float]]:
            sums: dict[str, list[float]] = {}
            for use in (*ended, *uses):
                start, end = max(use.start, since), min(use.end, until)
                if start >= end:
                    continue
                of_user = sums.setdefault(use.owner, [0.0] * slots)
                for slot in range(int((start - since) / slot_s), min(slots, ceil((end - since) / slot_s))):
                    begin = since + slot * slot_s
                    of_user[slot] += use.nodes * max(0.0, min(end, begin + slot_s) - max(start, begin))
            return sums

        return await asyncio.to_thread(sum_up, await query(self._store.node_use, since, until, owners))

    async def list_components(
        self, since: float, until: float, limit: int, cluster: ClusterName = ""
    ) -> tuple[list[PastComponent], bool]:
        """Return the largest ended components in a time range; see ``HistoryStore.ended_components``."""
        return await query(self._store.ended_components, since, until, limit, cluster)

    async def list_failed_components(self, cluster: ClusterName, limit: int) -> list[PastComponent]:
        """Return the last components of a cluster that ended early; see ``HistoryStore.failed_components``."""
        return await query(self._store.failed_components, cluster, limit)

    async def read_table(
        self, kind: Kind, step: Step, span: Span, name: str | None = None, max_lines: int = MAX_LINES
    ) -> UsageTable:
        """Return the figures of a span. Raise ``UsageError`` if they have more than ``max_lines`` lines."""
        return (await self._read_tables(span, (kind, step, name), max_lines=max_lines))[0]

    async def read_table_and_totals(
        self, kind: Kind, step: Step, span: Span, names: Sequence[str | None]
    ) -> tuple[UsageTable, list[UsageLine]]:
        """Return the same of several names, and the figures of each over the span, without a name of the whole grid."""
        sums = [(kind if name else Kind.GRID, Step.ALL, name) for name in names]
        tables = await self._read_tables(span, *((kind, step, name) for name in names), *sums)
        tables, totals = tables[: len(names)], tables[len(names) :]
        lines = sorted((line for table in tables for line in table.lines), key=lambda line: (line.start, line.name))
        return replace(tables[0], lines=lines), [line for total in totals for line in total.lines]

    async def _read_tables(
        self, span: Span, *selections: tuple[Kind, Step, str | None], max_lines: int = MAX_LINES
    ) -> list[UsageTable]:
        jobs = tuple(self._jobs())  # a copy: the query runs in a thread, while the scheduler changes jobs
        return await query(self._make_tables, span, selections, jobs, self._clock(), max_lines)

    def _make_tables(
        self,
        span: Span,
        selections: Sequence[tuple[Kind, Step, str | None]],
        jobs: Sequence[Job],
        now: float,
        max_lines: int,
    ) -> list[UsageTable]:
        """Return a table of the same days for each selection. Runs in a thread."""
        running, (first, last) = count_running_jobs(jobs, now), span.days
        steps = {Step.DAY: (1, 0), Step.WEEK: (7, FIRST_MONDAY), Step.ALL: (last - first + 1, first)}
        first_day, node_counts = self._store.first_day(), self._store.nodes_by_day(last)
        capacity_last = min(last, day_of(now))
        capacity_first = capacity_last if first_day is None else min(max(first_day, first), capacity_last)
        first_submission = self._store.first_submission() or 0.0
        capacity = _Capacity(node_counts, capacity_first, capacity_last, now, first_submission)
        since = None if first_day is None else to_date(first_day)
        tables = []
        for kind, step, name in selections:
            day_filter = DayFilter(kind, first, last, name, *steps[step], max_lines + 1)
            days = Days(self._store.days(day_filter))
            for key, figures in running.items():
                if day_filter.matches(key):
                    days[Key(key.kind, day_filter.period_start(key.day), key.name)].add(figures)
            if len(days) > max_lines:
                raise UsageError(
                    f"the table has more than {max_lines} lines",
                    field="step",
                    value=str(step),
                    hint="ask for fewer days, for weeks (step=week), or for one name (name=NAME)",
                )
            lines = [_make_line(key, figures, day_filter, capacity) for key, figures in sorted(days.items())]
            tables.append(UsageTable(kind, step, span.first, span.last, since, self._jobs_keep, lines))
        return tables

    async def export_trace(self, span: Span, user: str | None) -> AsyncIterator[str]:
        """Yield the kept jobs that ended in a span in the Standard Workload Format. ``user``: hide owner and
        application of other users' jobs; None hides nothing."""
        start, end = span.seconds
        yield _trace_header(start, end, await query(self._store.nodes_by_day, span.days[1]))
        numbers: Numbers = defaultdict(dict)
        position = (start, 0)
        while True:
            jobs: Sequence[EndedJob] = await query(self._store.ended_jobs, position, end, TRACE_PAGE_SIZE)
            lines = await asyncio.to_thread(lambda page: [_trace_line(job, numbers, user) for job in page], jobs)
            yield "".join(lines)
            if len(jobs) < TRACE_PAGE_SIZE:
                return
            position = (jobs[-1].ended_at, jobs[-1].id)


class _Capacity:
    """The available node-seconds of clusters, by the node counts that they reported last."""

    def __init__(
        self,
        node_counts: Sequence[tuple[int, ClusterName, int]],
        first: int,
        last: int,
        now: float,
        first_submission: float,
    ) -> None:
        """Count from day ``first`` to day ``last`` or ``now``.

        If the first submission was on the first reported day, that day counts from then: before, no daemon ran.
        """
        self._first = first
        self._sums: dict[str, list[float]] = {"": [0.0] * (last - first + 2)}
        changes: dict[ClusterName, list[tuple[int, int]]] = defaultdict(list)
        if not node_counts or day_of(first_submission) != min(day for day, _, _ in node_counts):
            first_submission = 0.0
        for day, cluster, nodes in node_counts:
            changes[cluster].append((day, nodes))
        for cluster, cluster_changes in changes.items():
            sums = list(self._cumulate_nodes(cluster_changes, first, last, now, first_submission))
            self._sums[cluster] = sums
            self._sums[""] = [total + added for total, added in zip(self._sums[""], sums, strict=True)]

    @staticmethod
    def _cumulate_nodes(
        changes: Sequence[tuple[int, int]], first: int, last: int, now: float, start: float
    ) -> Iterator[float]:
        """Yield the node-seconds from day ``first`` to the start of each day, then to the end of day ``last``."""
        total, nodes, remaining = 0.0, changes[0][1], deque(changes)
        for day in range(first, last + 2):
            yield total
            while remaining and remaining[0][0] <= day:
                nodes = remaining.popleft()[1]
            total += nodes * max(0.0, min((day + 1) * DAY, now) - max(day * DAY, start))

    def node_seconds(self, cluster: str, first: int, last: int) -> float:
        """Return the node-seconds of a cluster, or of all for an empty name; 0 if it reported no nodes."""
        sums = self._sums.get(cluster)
        if sums is None:
            return 0.0
        start, end = (min(max(day - self._first, 0), len(sums) - 1) for day in (first, last + 1))
        return sums[end] - sums[start]


def _make_line(key: Key, figures: Figures, day_filter: DayFilter, capacity: _Capacity) -> UsageLine:
    """Return the figures of one name and period, with means over the jobs that ran; None where none did."""
    end = min(key.day + day_filter.days - 1, day_filter.last)
    start = max(key.day, day_filter.first)
    available = capacity.node_seconds(key.name if key.kind is Kind.CLUSTER else "", start, end)

    def mean_of(name: str) -> float | None:
        return round(getattr(figures, name) / figures.ran, 6) if figures.ran else None

    values: dict[str, Any] = {name: getattr(figures, name) for name in COUNTS}
    values |= {name: mean_of(name) for name in (*MEANS, *QUEUE_TIME_LIMITS, "coallocated")}
    values |= {name: round(getattr(figures, name), 3) for name in ("node_seconds", "coallocated_node_seconds")}
    return UsageLine(
        start=to_date(start),
        end=to_date(end),
        name=key.name,
        success=None if figures.success is None else round(figures.success, 6),
        # Clusters may have shrunk within the day, or nodes been shared.
        utilisation=round(min(1.0, figures.node_seconds / available), 6) if available else None,
        **values,
    )


def to_date(day: int) -> date:
    return EPOCH + timedelta(days=day)


def day_number(day: date) -> int:
    return (day - EPOCH).days


# The Standard Workload Format of the Parallel Workloads Archive

SWF_STATUS = {JobState.FAILED: 0, JobState.SUCCEEDED: 1, JobState.CANCELLED: 5}
SWF_QUEUES = {Priority.HIGH: 1, Priority.LOW: 2}
UNKNOWN = -1
Numbers = dict[str, dict[str, int]]
"""The numbers that stand for names, by kind of name; from 1 on in order of occurrence."""
MAX_TIMESTAMP = datetime.max.replace(microsecond=0, tzinfo=UTC).timestamp()


def _trace_header(start: float, end: float, node_counts: Sequence[tuple[int, ClusterName, int]]) -> str:
    """Return the comment lines at the start of a trace in the Standard Workload Format. ``node_counts`` are (day,
    cluster, nodes), by day."""
    nodes = {cluster: count for _, cluster, count in node_counts}  # by days in order: the last count stays

    def format_time(timestamp: float) -> str:
        return datetime.fromtimestamp(min(timestamp, MAX_TIMESTAMP), UTC).strftime("%a %b %d %H:%M:%S %Y")

    fields = {
        "Version": "2.2",
        "Computer": f"koalapy {__version__}",
        "UnixStartTime": "0",
        "TimeZoneString": "UTC",
        "StartTime": format_time(start),
        "EndTime": format_time(end),
        "MaxNodes": str(sum(nodes.values())),
        "MaxProcs": str(sum(nodes.values())),
        "Queues": "1 high priority, 2 low priority",
        "Note": "jobs by their end in this span; processors are nodes; partition 0 is several clusters at once",
    }
    partitions = [f"; Partition: {number} {name}" for number, name in enumerate(sorted(nodes), 1)]
    return "\n".join([*(f"; {name}: {value}" for name, value in fields.items()), *partitions]) + "\n"


def _trace_line(job: EndedJob, numbers: Numbers, user: str | None) -> str:
    """Return a job as a line of a trace in the Standard Workload Format. Names become numbers, which ``numbers`` keeps.
    With ``user``, other users' names are unknown."""

    def number_of(kind: str, name: str) -> int:
        return numbers[kind].setdefault(name, len(numbers[kind]) + 1)

    is_visible = user in (None, job.owner)
    start = job.started_at
    fields = (
        job.id,
        round(job.submitted_at),
        UNKNOWN if start is None else max(0, round(start - job.submitted_at)),
        UNKNOWN if start is None else max(0, round(job.ended_at - start)),
        UNKNOWN if start is None else job.nodes,
        UNKNOWN,
        UNKNOWN,
        job.nodes or UNKNOWN,
        UNKNOWN if job.walltime is None else round(job.walltime),
        UNKNOWN,
        SWF_STATUS.get(job.state, UNKNOWN),
        number_of("user", job.owner) if is_visible else UNKNOWN,
        UNKNOWN,
        number_of("application", job.application) if is_visible and job.application else UNKNOWN,
        SWF_QUEUES.get(job.priority, UNKNOWN),
        number_of("cluster", job.clusters[0]) if len(job.clusters) == 1 else UNKNOWN if start is None else 0,
        UNKNOWN,
        UNKNOWN,
    )
    return " ".join(map(str, fields)) + "\n"
