"""Compare the use of job owners with their limits (quotas): waiting jobs, nodes, node-hours of the last day."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from math import floor
from typing import NamedTuple

from koalapy.model.job import Attempt, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.limits import DAY, Excess, Limits, NodeUse, Scope, ScopeKey
from koalapy.scheduler.fair_share import FairShares

HOUR = 3600.0
NODES, HOURS, QUEUED = "nodes", "node_hours_per_day", "queued_jobs"


class LimitedDemand(NamedTuple):
    """The use that a job would add for a limited owner. Jobs with equal demands are rejected together."""

    owner: str
    nodes: int
    hours: float
    """Node-hours that it may use within a day; 0 if these are not limited."""


class OwnerUse:
    """Counters of the limited use per scope, and fair shares. Without limits and shares nothing is counted."""

    def __init__(
        self, limits: Limits | None = None, past: Iterable[NodeUse] = (), shares: FairShares | None = None
    ) -> None:
        """``past`` is the use within the last day by attempts that have ended."""
        self.limits, self.shares = limits or Limits(), shares
        self._counts_nodes = self.limits.has_any(NODES, HOURS)
        self.counts = self._counts_nodes or self.limits.has_any(QUEUED) or shares is not None
        """Whether changes of jobs must be passed to ``update``."""
        self._counts_hours = self.limits.has_any(HOURS)
        self._waiting: Counter[ScopeKey] = Counter()
        self._nodes: Counter[ScopeKey] = Counter()
        self._promised: defaultdict[ScopeKey, float] = defaultdict(float)
        """Node-hours that active jobs may still use within a day."""
        self._past: defaultdict[ScopeKey, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        """Node-hours of ended attempts, by the hour in which they were used."""
        self._freed = False
        self._hour: int | None = None
        """The hour of the last call of ``take_freed_flag``."""
        for use in past:
            self._spend(use)

    def take_freed_flag(self, now: float) -> bool:
        """Return whether the use of a limited owner may have decreased since the last call."""
        hour = floor(now / HOUR)
        freed, self._freed = self._freed or (self._counts_hours and hour != self._hour), False
        self._hour = hour
        return freed

    # Changes of jobs

    def update(self, job: Job, was: JobState | None) -> None:
        """Count a job that has changed its state from ``was``; None: it is new."""
        if job.spec.internal:
            return
        has_ended = was is not None and was.is_active and not job.state.is_active
        counts_past = has_ended and (self._counts_hours or self.shares is not None)
        used = list(_used(job.spec.owner, job.attempt, job.ended_at)) if counts_past else []
        if self.shares is not None:
            self.shares.update(job, was, used)
        if not (scopes := self.limits.scopes(job.spec.owner)):
            return
        self._count_use(scopes, job.spec, job.state, 1)
        if was is not None:
            self._count_use(scopes, job.spec, was, -1)
            if has_ended:
                self._freed = True
                for use in used if self._counts_hours else ():
                    self._spend(use)

    def _count_use(self, scopes: Iterable[Scope], spec: JobSpec, state: JobState, sign: int) -> None:
        """Count a job in ``state`` towards the limits of its owner. A ``sign`` of -1 uncounts it."""
        size = spec.request.total_size
        for scope in scopes:
            if state in (JobState.QUEUED, JobState.HELD):
                self._waiting[scope.key] += sign
            elif state.is_active and spec.array is None:  # the tasks of an array are counted, not the array
                self._nodes[scope.key] += sign * size
                self._promised[scope.key] += sign * _hours(spec)

    def _spend(self, use: NodeUse) -> None:
        """Add the node-hours of an ended component to its owner's past use, hour by hour."""
        for scope in self.limits.scopes(use.owner):
            hours = self._past[scope.key]
            for hour in range(floor(max(use.start, use.end - DAY) / HOUR), floor(use.end / HOUR) + 1):
                within = min(use.end, (hour + 1) * HOUR) - max(use.start, hour * HOUR)
                hours[hour] += max(0.0, within) * use.nodes / HOUR

    # Demand

    def demand_of(self, spec: JobSpec) -> LimitedDemand | None:
        """Return the limited use that a job adds for its owner; None if its owner is not limited."""
        if not self._counts_nodes or spec.internal:
            return None
        limited = [scope.limits for scope in self.limits.scopes(spec.owner)]
        hours = any(limits.node_hours_per_day is not None for limits in limited)
        if not hours and all(limits.nodes is None for limits in limited):
            return None
        return LimitedDemand(spec.owner, spec.request.total_size, _hours(spec) if hours else 0.0)

    def excess_of(self, ask: LimitedDemand | None, now: float) -> Excess | None:
        """Return the limit that a demand would exceed now; None if there is none."""
        if ask is None:
            return None
        for scope in self.limits.scopes(ask.owner):
            excess = self.limits.find_excess(scope, NODES, self._nodes[scope.key], ask.nodes)
            if excess is None and scope.limits.node_hours_per_day is not None:
                excess = self.limits.find_excess(scope, HOURS, self._hours_used(scope.key, now), ask.hours)
            if excess is not None:
                return excess
        return None

    def find_excess(self, spec: JobSpec, now: float) -> Excess | None:
        """Return the owner's limit that keeps a job from being placed now; None if there is none."""
        return self.excess_of(self.demand_of(spec), now)

    def check(self, spec: JobSpec, ahead: Counter[ScopeKey] | None = None, *, is_queued: bool = False) -> None:
        """Raise ``NeverAllowed`` if a job can never be placed, ``LimitReached`` if its owner has too many.

        ``ahead``: the earlier jobs of the same batch by scope, to which this one is added. ``is_queued``: whether the
        job waits already, so that it does not count again.
        """
        if not self.counts or spec.internal:
            return
        for scope in self.limits.scopes(spec.owner):
            asks = (
                (NODES, 0, spec.request.total_size),
                (HOURS, 0, _hours(spec)),
                (QUEUED, self._waiting[scope.key] + (ahead[scope.key] if ahead is not None else 0), int(not is_queued)),
            )
            for name, used, requested in asks:
                if excess := self.limits.find_excess(scope, name, used, requested):
                    excess.raise_error()
            if ahead is not None:
                ahead[scope.key] += 1

    def current_use(self, scope: Scope, now: float) -> dict[str, float]:
        """Return the counted use of a scope, by limit."""
        key = scope.key
        return {QUEUED: self._waiting[key], NODES: self._nodes[key], HOURS: self._hours_used(key, now)}

    def _hours_used(self, key: ScopeKey, now: float) -> float:
        """Return the node-hours used in the last day, and those that active jobs may still use; forget older ones."""
        hours, oldest = self._past[key], floor((now - DAY) / HOUR) + 1
        for hour in [hour for hour in hours if hour < oldest]:
            del hours[hour]
        return round(self._promised[key] + sum(hours.values()), 6)


def _hours(spec: JobSpec) -> float:
    """Return the node-hours that a job may use within a day; a job without walltime may use all of it."""
    return spec.request.total_size * min(spec.walltime or DAY, DAY) / HOUR


def _used(owner: str, attempt: Attempt | None, ended_at: float | None) -> Iterable[NodeUse]:
    """Yield the node use of an ended attempt. A component without a known end counts until ``ended_at``."""
    for component in attempt.components if attempt else ():
        end = component.ended_at if component.ended_at is not None else ended_at
        if component.claimed_at is not None and end is not None and end > component.claimed_at:
            yield NodeUse(owner, component.size, component.claimed_at, end, component.node_part)
