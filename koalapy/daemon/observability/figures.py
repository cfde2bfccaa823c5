"""Count the unfinished jobs for the metrics, and take samples of jobs and nodes for the charts."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil

from koalapy.daemon.engine.database import query, run_in_database
from koalapy.daemon.engine.engine import Engine
from koalapy.model.errors import StoreUnavailable
from koalapy.model.history import CLUSTER_SLOT_S, SLOTS_KEPT_S, USES, UseSum, UseSums
from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import Priority
from koalapy.model.request import ClusterName
from koalapy.scheduler.clusters import NodeUse
from koalapy.store.service_tables import SampleStore
from koalapy.system.event_loop import iterate_in_slices


@dataclass(frozen=True, slots=True)
class JobFigures:
    """The numbers of unfinished jobs of users, and of the daemon's internal jobs."""

    counts: Mapping[tuple[JobState, Priority], int]
    oldest: Mapping[JobState, float]
    """By state, seconds since the oldest job was submitted (waiting), placed or started."""
    internal: int
    staging: int
    """Components with files that are being staged."""
    missing: int
    """Bytes that are still to be staged."""
    by_site: Mapping[tuple[ClusterName, JobState], int]
    """Jobs with a home site, by that site and state."""


async def count_jobs(jobs: Sequence[Job], now: float) -> JobFigures:
    """Count unfinished jobs for the metrics. Let other tasks run in between."""
    counts: Counter[tuple[JobState, Priority]] = Counter()
    by_site: Counter[tuple[ClusterName, JobState]] = Counter()
    since: dict[JobState, float] = {}
    internal = staging = missing = 0
    async for chunk in iterate_in_slices(jobs):
        for job in chunk:
            state = job.state
            if job.spec.internal:
                internal += 1
                continue
            counts[state, job.spec.priority] += 1
            if job.spec.home_site:
                by_site[job.spec.home_site, state] += 1
            state_since = (job.started_at or job.placed_at if state.is_active else None) or job.submitted_at
            if state_since < since.get(state, now):
                since[state] = state_since
            if job.attempt is not None and state.is_active:
                for component in job.attempt.components:
                    if component.awaits_files and not component.superseded:
                        staging += 1
                        missing += max(0, component.stage_size - component.staged)
    oldest = {state: now - state_since for state, state_since in since.items()}
    return JobFigures(counts, oldest, internal, staging, missing, by_site)


MAX_SLOTS = 96
"""Maximum number of slots of a time range."""
MAX_CACHED_RANGES = 20
_BEFORE_START = (None, JobState.QUEUED, JobState.PLACED, JobState.CLAIMING, JobState.STARTING)


class Samples:
    """Takes samples of nodes and jobs, and returns their sums by slots. Counts the starts and ends of users' jobs
    between two samples."""

    def __init__(self, engine: Engine, store: SampleStore, clock: Callable[[], float]) -> None:
        self._engine, self._store, self._clock = engine, store, clock
        self._started = self._ended = 0
        self._startup_s = 0.0
        """Sum of the start-up times of the started jobs."""
        self._stored = 0
        self._ranges: dict[tuple[object, ...], UseSums] = {}
        """The number of samples stored by this process, and the ranges that were read since the last one."""
        engine.subscribe(self._count_change)

    def _count_change(self, job: Job, previous_state: JobState | None) -> None:
        """Count a job that has started or ended."""
        if job.spec.internal:
            return
        has_begun = job.state is JobState.RUNNING or job.state.is_final
        if has_begun and previous_state in _BEFORE_START and job.attempt is not None and job.attempt.barrier_at:
            self._started += 1
            if job.started_at is not None and job.placed_at is not None:
                self._startup_s += max(0.0, job.started_at - job.placed_at)
        self._ended += job.state.is_final

    def make_samples(self) -> list[UseSum]:
        """Return the use of each cluster, and of all with the events since the last sample. Reset their counters.

        A cluster that never reported is left out.
        """
        uses = {cluster.name: cluster.node_use for cluster in self._engine.queries.grid.clusters()}
        samples = [
            UseSum(0, name, 1, use.used, use.local, use.idle, use.down, use.withheld, use.unknown)
            for name, use in uses.items()
            if use != NodeUse()
        ]
        jobs = {"queued": self._engine.stored_queued, "started": self._started, "ended": self._ended}
        nodes = {name: sum(getattr(sample, name) for sample in samples) for name in USES}
        samples.append(UseSum(0, "", 1, **nodes, **jobs, startup=self._startup_s))
        self._started = self._ended = 0
        self._startup_s = 0.0
        return samples

    async def take(self) -> None:
        """Store samples; lose them while the database is unavailable."""
        samples = self.make_samples()
        with suppress(StoreUnavailable):
            await run_in_database(self._store.add, samples, self._clock())
            self._stored += 1
            self._ranges.clear()

    async def read(
        self, since: float, until: float, clusters: Sequence[ClusterName] = ("",), max_slots: int = MAX_SLOTS
    ) -> UseSums:
        """Return the sums of a time range in at most about ``max_slots`` slots; none while the database is unavailable.

        ``clusters``: those to return, ``""`` for all together; empty for each single one.
        """
        shortest, age = min(SLOTS_KEPT_S) if clusters == ("",) else CLUSTER_SLOT_S, self._clock() - since
        lengths = [length for length, kept_s in SLOTS_KEPT_S.items() if length >= shortest and age <= kept_s + 60]
        length = lengths[0] if lengths else max(SLOTS_KEPT_S)
        joined = length * max(1, ceil((until - since) / length / max_slots))
        starts = range(int(since // joined) * joined, ceil(until), joined)
        key = length, starts, int(until // length), tuple(clusters)
        if (sums := self._ranges.get(key)) is None:
            stored = self._stored
            try:
                rows: Sequence[UseSum] = await query(self._store.read, length, joined, starts[0], until, clusters)
            except StoreUnavailable:
                return UseSums(joined, [*starts], {})
            by_cluster: dict[ClusterName, dict[int, UseSum]] = {}
            for row in rows:
                by_cluster.setdefault(row.cluster, {})[row.start] = row
            sums = UseSums(joined, [*starts], by_cluster)
            if stored == self._stored:
                if len(self._ranges) >= MAX_CACHED_RANGES:
                    self._ranges.clear()
                self._ranges[key] = sums
        return sums
