"""What has become of jobs by days, weeks or all together: of the grid, by cluster, user, policy and priority.

It is told by the days as they add up with every job that ends, so that it costs the same however many jobs there were,
and outlives them.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from koalapy.daemon.engine.database import query
from koalapy.daemon.jobs.swf import header, lines
from koalapy.model.errors import UsageError
from koalapy.model.history import DAY, WITHIN, DayFilter, Days, EndedJob, Figures, Key, Kind, Step, day_of, running
from koalapy.model.job import Job
from koalapy.model.request import ClusterName
from koalapy.ports import HistoryStore

MAX_LINES = 5000
"""That are told at once."""
PIECE = 1000
"""Jobs of a trace that are read at once."""
EPOCH = date(1970, 1, 1)
COUNTS = ("jobs", "succeeded", "failed", "cancelled", "restarts", "ran")
MEANS = ("queue_time", "wait_time", "startup_overhead", "run_time", "response_time", "slowdown")
MONDAY = 4
"""The first Monday after the epoch."""


@dataclass(frozen=True, slots=True)
class HistoryLine:
    """One span of days of one cluster, user and so on; times are means in seconds over the jobs that ``ran``, which is
    to an end of their own, and null where there were none.
    """

    start: date
    end: date
    """The last day of it."""
    name: str
    """Empty for the whole grid."""
    jobs: int
    """That ended in it."""
    succeeded: int
    failed: int
    cancelled: int
    success: float | None
    """Of those that succeeded or failed, the share that succeeded."""
    restarts: int
    ran: int
    queue_time: float | None
    wait_time: float | None
    startup_overhead: float | None
    run_time: float | None
    response_time: float | None
    slowdown: float | None
    """Response time by run time, at least 1; who ran for less than 10 s counts as having run for 10 s."""
    within_1m: float | None
    """The share of those that ran that were placed within a minute; the others likewise."""
    within_10m: float | None
    within_1h: float | None
    within_6h: float | None
    within_1d: float | None
    coallocated: float | None
    """The share of those that ran that ran on several clusters at once."""
    node_seconds: float
    """That jobs had, of whatever attempts."""
    coallocated_node_seconds: float
    utilisation: float | None
    """Node-seconds by those that there were: of the cluster, or of all clusters."""


@dataclass(frozen=True, slots=True)
class Table:
    """Lines in order of their days and names."""

    by: Kind
    step: Step
    first: date
    last: date
    since: date | None
    """The first day of which anything is known; days are kept for good."""
    jobs_keep: float | None
    """Seconds for which jobs themselves are kept after their end; null: for good."""
    lines: Sequence[HistoryLine]


@dataclass(frozen=True, slots=True)
class Span:
    """From the first to the last day."""

    first: date
    last: date

    @property
    def days(self) -> tuple[int, int]:
        return _number(self.first), _number(self.last)

    @property
    def seconds(self) -> tuple[float, float]:
        """Its beginning, and its end."""
        first, last = self.days
        return first * DAY, (last + 1) * DAY


class History:
    """Reads the store's days, and what of today is still under way from the jobs that run."""

    def __init__(
        self,
        store: HistoryStore,
        clock: Callable[[], float],
        jobs: Callable[[], Iterable[Job]],
        jobs_keep: float | None = None,
    ) -> None:
        self._store, self._clock, self._jobs, self._jobs_keep = store, clock, jobs, jobs_keep

    def span(self, first: date | None, last: date | None, days: int = 30) -> Span:
        """What is not said is today, and so many days until then; ``UsageError`` for one that ends before it begins."""
        last = last or _date(day_of(self._clock()))
        first = first or last - min(timedelta(days=days - 1), last - date.min)
        if first > last:
            raise UsageError(
                f"first is {first}, after last, which is {last}",
                field="first",
                value=str(first),
                hint="give the earlier day first",
            )
        return Span(first, last)

    async def table(self, by: Kind, step: Step, span: Span, name: str | None = None) -> Table:
        """``UsageError`` for more lines than are told at once."""
        now = self._clock()
        first, last = span.days
        length, offset = {Step.DAY: (1, 0), Step.WEEK: (7, MONDAY), Step.ALL: (last - first + 1, first)}[step]
        which = DayFilter(by, first, last, name, length, offset, MAX_LINES + 1)
        jobs = tuple(self._jobs())  # as they are now: what is read of them aside does not change
        known = await query(self._read, which, jobs, now)
        if len(known.lines) > MAX_LINES:
            raise UsageError(
                f"that is more than {MAX_LINES} lines",
                field="step",
                value=str(step),
                hint="ask for fewer days, for weeks (step=week), or for one (name)",
            )
        since = None if known.since is None else _date(known.since)
        return Table(by, step, span.first, span.last, since, self._jobs_keep, known.lines)

    def _read(self, which: DayFilter, jobs: Sequence[Job], now: float) -> "_Known":
        """What blocks, or takes its time."""
        found = Days(self._store.days(which))
        for key, figures in running(jobs, now).items():
            if which.has(key):
                found[Key(key.kind, which.period(key.day), key.name)].add(figures)
        since, sizes = self._store.first_day(), self._store.nodes_by_day(which.last)
        last = min(which.last, day_of(now))
        first = last if since is None else min(max(since, which.first), last)
        began = self._store.first_submission()
        capacity = _Capacity(sizes, first, last, now, 0.0 if began is None else began)
        return _Known([_line(key, figures, which, capacity) for key, figures in sorted(found.items())], since)

    async def trace(self, span: Span, user: str | None) -> AsyncIterator[str]:
        """Jobs that ended in a span, as far as they are kept, in the Standard Workload Format.

        ``user``: of others' jobs neither who nor what they were is told; None tells all.
        """
        start, end = span.seconds
        yield header(start, end, await query(self._store.nodes_by_day, span.days[1]))
        numbers: dict[str, dict[str, int]] = defaultdict(dict)
        after = (start, 0)
        while True:
            jobs: Sequence[EndedJob] = await query(self._store.ended, after, end, PIECE)
            yield await asyncio.to_thread(lines, jobs, numbers, user)
            if len(jobs) < PIECE:
                return
            after = (jobs[-1].ended_at, jobs[-1].id)


class _Capacity:
    """The node-seconds that there were: each day as many nodes as the clusters had when that was told last."""

    def __init__(
        self, sizes: Sequence[tuple[int, ClusterName, int]], first: int, last: int, now: float, began: float
    ) -> None:
        """Count up to now, and from the first day on of which anything is known.

        ``began``: when the first job was submitted. On the day on which the first cluster told its nodes they count
        from then on, as before there was no daemon.
        """
        self._first = first
        self._sums: dict[str, list[float]] = {"": [0.0] * (last - first + 2)}
        told: dict[ClusterName, list[tuple[int, int]]] = defaultdict(list)
        if not sizes or day_of(began) != min(day for day, _, _ in sizes):
            began = 0.0
        for day, cluster, nodes in sizes:
            told[cluster].append((day, nodes))
        for cluster, changes in told.items():
            self._sums[cluster] = list(self._added_up(changes, first, last, now, began))
        for cluster in told:
            self._sums[""] = [all_ + one for all_, one in zip(self._sums[""], self._sums[cluster], strict=True)]

    @staticmethod
    def _added_up(
        changes: Sequence[tuple[int, int]], first: int, last: int, now: float, began: float
    ) -> Iterator[float]:
        """Node-seconds from the first day to the beginning of each, and to the end of the last."""
        total, nodes, coming = 0.0, changes[0][1], deque(changes)
        for day in range(first, last + 2):
            yield total
            while coming and coming[0][0] <= day:
                nodes = coming.popleft()[1]
            total += nodes * max(0.0, min((day + 1) * DAY, now) - max(day * DAY, began))

    def of(self, name: str, first: int, last: int) -> float:
        """Of a cluster, or of all; 0 where nothing is known of it."""
        sums = self._sums.get(name)
        if sums is None:
            return 0.0
        start, end = (min(max(day - self._first, 0), len(sums) - 1) for day in (first, last + 1))
        return sums[end] - sums[start]


@dataclass(frozen=True, slots=True)
class _Known:
    lines: list[HistoryLine]
    since: int | None


def _line(key: Key, figures: Figures, which: DayFilter, capacity: _Capacity) -> HistoryLine:
    end = min(key.day + which.days - 1, which.last)
    start = max(key.day, which.first)
    there = capacity.of(key.name if key.kind is Kind.CLUSTER else "", start, end)
    ended_itself = figures.succeeded + figures.failed

    def mean(name: str) -> float | None:
        return round(getattr(figures, name) / figures.ran, 6) if figures.ran else None

    values: dict[str, Any] = {name: getattr(figures, name) for name in COUNTS}
    values |= {name: mean(name) for name in (*MEANS, *WITHIN, "coallocated")}
    values |= {name: round(getattr(figures, name), 3) for name in ("node_seconds", "coallocated_node_seconds")}
    return HistoryLine(
        start=_date(start),
        end=_date(end),
        name=key.name,
        success=round(figures.succeeded / ended_itself, 6) if ended_itself else None,
        utilisation=round(figures.node_seconds / there, 6) if there else None,
        **values,
    )


def _date(day: int) -> date:
    return EPOCH + timedelta(days=day)


def _number(day: date) -> int:
    return (day - EPOCH).days
