"""Store with a job when it is planned to start, why that has moved, and how late it really started."""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from math import ceil

from koalapy.model.bounds import MAX_NODES
from koalapy.model.job import ON_TIME_S, Job, PlannedStart
from koalapy.model.job_spec import Priority
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list, format_time, format_utc
from koalapy.scheduler.attempts.facts import walltime_ends
from koalapy.scheduler.ledger import live
from koalapy.scheduler.state import SchedulerState

MAX_PAST_STARTS = 500
"""Maximum number of past planned starts from which delays are learned."""
MIN_STARTS = 10
"""Number of past planned starts on a cluster from which on its delay is known."""
MAX_STARTS = 100
"""Number of newest planned starts on a cluster that count."""
MIN_MOVE_S = 120.0
"""Seconds up to which users do not see that a start moves, such as while a job ends that has used up its walltime."""
TIME_TOLERANCE_S = 0.01
"""Seconds by which sums of times may differ by rounding."""
KEPT_FRACTION = 0.9
"""The fraction of planned starts that are to be kept."""


class Promises:
    """The planned starts that users see. Only the job with a plan has one; a job that has lost its plan keeps the
    first time, with the reason."""

    def __init__(self, state: SchedulerState) -> None:
        self._state, self._grid, self._ledger = state, state.grid, state.ledger
        self._past = deque(state.past_starts, MAX_PAST_STARTS)
        """Planned starts of jobs that have started, oldest first."""
        self._nodes_then: dict[ClusterName, tuple[int, int]] = {}
        """By planned cluster, its nodes of local users and those that were down when the start was last stored."""

    # Learn

    def note_start(self, planned: PlannedStart | None) -> PlannedStart | None:
        """Return the planned start of a job that starts now, with its delay. Learn only from its first start."""
        if planned is None or planned.late is not None:
            return planned
        planned = replace(planned, late=self._state.now - (planned.first - planned.delay))
        self._past.append(planned)
        return planned

    def note_end(self, planned: PlannedStart) -> PlannedStart | None:
        """Return the planned start of a job that stops waiting for it, with its delay; None if it was not broken."""
        return self.note_start(planned) if self._state.now > planned.first + ON_TIME_S else None

    def _record_of(self, clusters: Collection[ClusterName], is_certain: bool) -> tuple[float, int, int]:
        """Return the delay to expect on clusters, and how many past starts were kept of how many."""
        delay, past = 0.0, [planned for planned in self._past if planned.is_certain is is_certain]
        for cluster in clusters:
            late = sorted([planned.late or 0.0 for planned in past if cluster in planned.clusters][-MAX_STARTS:])
            if len(late) >= MIN_STARTS:
                place = min(len(late), ceil(KEPT_FRACTION * (len(late) + 1)))
                delay = max(delay, late[place - 1])
        counted = [planned for planned in past if not set(clusters).isdisjoint(planned.clusters)]
        return delay, sum(planned.is_kept for planned in counted), len(counted)

    # Promise

    def update(
        self,
        job: Job,
        start: float | None,
        clusters: Collection[ClusterName],
        earlier: Iterable[ClusterName],
        last_to_end: Callable[[], Job | None],
        *,
        is_certain: bool,
    ) -> None:
        """Store when a waiting job is planned to start, and in words why that has become later.

        ``start``: None if it has no plan any more. ``clusters``: those of its plan; ``earlier``: those of the plan
        before. ``last_to_end``: returns the job that it is planned to wait for.
        """
        now, planned = self._state.now, job.planned_start
        if planned is None or planned.late is not None:
            if start is not None and start >= now + ON_TIME_S:
                names = tuple(sorted(clusters))
                delay, on_time, starts = self._record_of(names, is_certain)
                first = _next_minute(start + delay)
                planned = PlannedStart(now, first, first, names, is_certain, first - start, starts, on_time)
                self._store(job, planned, names, f"by {format_utc(first, now)} on {format_list(names)}")
            return
        new_time = None if start is None else start + planned.delay
        old_time = planned.first if planned.at is None else planned.at
        if planned.at is None if start is None else planned.at is not None and start <= now:
            return  # it has none as before, or starts at once
        if new_time is not None and planned.at is not None and abs(new_time - old_time) <= MIN_MOVE_S:
            if is_certain is not planned.is_certain:
                self._ledger.change_job(job, planned_start=replace(planned, is_certain=is_certain))
            self._nodes_then = self._nodes_then or self._count_nodes(clusters)  # none are known after a restart
            return
        new_time = None if new_time is None else _next_minute(new_time)
        because, text = planned.moved_because, ""
        if new_time is None or (new_time > old_time and planned.at is not None):
            because = self._find_reason(job, planned.made_at, clusters or earlier, last_to_end())
        elif new_time <= planned.first:
            because = ""
        if new_time is None:
            text = because
        elif because and (planned.at is None or because != planned.moved_because):
            text = f"by {format_time(new_time, now)}, not {format_utc(old_time, now)}: {because}"
        planned = replace(planned, at=new_time, moved_because=because, is_certain=is_certain)
        self._store(job, planned, clusters, text)

    def _store(self, job: Job, planned: PlannedStart, clusters: Iterable[ClusterName], text: str) -> None:
        """Store a planned start on clusters with its job, and with ``text`` an entry of its timeline."""
        job = self._ledger.change_job(job, planned_start=planned)
        if text:
            self._ledger.record_event(job, self._state.now, "planned", text)
        self._nodes_then = self._count_nodes(clusters)

    def _count_nodes(self, clusters: Iterable[ClusterName]) -> dict[ClusterName, tuple[int, int]]:
        reports = {name: self._grid[name].last_report for name in clusters}
        return {name: (report.background, report.down) for name, report in reports.items()}

    def _find_reason(self, job: Job, made_at: float, clusters: Iterable[ClusterName], blocker: Job | None) -> str:
        """Return as text why a start that was planned first at ``made_at`` is later than before.

        ``blocker``: the job that it is planned to wait for; None if there is none.
        """
        names, now = [name for name in clusters if name in self._grid], self._state.now
        for name in names:
            if not self._grid[name].is_open:
                return f"{name} is {self._grid[name].state}"
        began, ends = (None, None) if blocker is None else (live(blocker).barrier_at, walltime_ends(blocker))
        if blocker is not None and live(blocker).placed_at > made_at:
            if blocker.spec.priority is Priority.HIGH and job.spec.priority is Priority.LOW:
                return f"job {blocker.display_name} of higher priority came first"
            if ends is not None and ends > now:
                return f"job {blocker.display_name} came first"
        for name in names:
            report, (local, down) = self._grid[name].last_report, self._nodes_then.get(name, (MAX_NODES, MAX_NODES))
            if report.background > local:
                return f"local users took nodes on {name}"
            if report.down > down:
                return f"nodes of {name} are down"
        if blocker is not None and began is None:
            return f"job {blocker.display_name} has not started yet"
        if blocker is not None and (ends is None or ends <= now):
            return f"job {blocker.display_name} runs longer than expected"
        return "nodes become free later than expected"


def _next_minute(timestamp: float) -> float:
    """Return the first whole minute from a time on, as users read times without seconds."""
    return ceil((timestamp - TIME_TOLERANCE_S) / 60.0) * 60.0
