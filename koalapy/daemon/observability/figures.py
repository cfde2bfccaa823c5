"""Count the unfinished jobs for the metrics, and take samples of jobs and nodes for the charts."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from math import ceil

from koalapy.daemon.engine.database import query, run_in_database
from koalapy.daemon.engine.engine import Engine
from koalapy.model.errors import StoreUnavailable
from koalapy.model.history import LOAD_SLOT_S, LoadPeriod, LocalLoad, Sample
from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import Priority
from koalapy.model.request import ClusterName
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


SHOWN_S = 6 * 3600.0
"""The period of the charts."""
LOAD_PERIODS = 48
"""Maximum number of periods of a cluster's local load in a timeline."""
_MAX_CACHED_LOADS = 20
_BEFORE_START = (None, JobState.QUEUED, JobState.PLACED, JobState.CLAIMING, JobState.STARTING)


class Samples:
    """Takes and returns samples; counts the starts and ends of users' jobs between two samples."""

    def __init__(self, engine: Engine, store: SampleStore, clock: Callable[[], float]) -> None:
        self._engine, self._store, self._clock = engine, store, clock
        self._started = self._ended = 0
        self._startup_s = 0.0
        """Sum of the start-up times of the started jobs."""
        self._slot, self._slot_counts = 0, dict[ClusterName, list[tuple[int, int]]]()
        """The current slot of local load, and for each cluster its local and all nodes, at each sample."""
        self._loads: dict[tuple[int, int], Mapping[ClusterName, tuple[LoadPeriod, ...]]] = {}
        """Loads by first slot and number of joined slots, until the next slot is stored."""
        self._stored = 0
        self._recent: Sequence[Sample] | None = None
        """The number of samples stored by this process, and all recent ones as read since the last one was stored."""
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

    def make_sample(self) -> Sample:
        """Return the current use of the grid with the events since the last sample, and reset their counters."""
        uses, now = [cluster.node_use for cluster in self._engine.queries.grid.clusters()], self._clock()
        started, ended, startup = self._started, self._ended, self._startup_s
        self._started = self._ended = 0
        self._startup_s = 0.0
        return Sample(
            now,
            ours=sum(use.used for use in uses),
            local=sum(use.local for use in uses),
            idle=sum(use.idle for use in uses),
            queued=self._engine.stored_queued,
            started=started,
            ended=ended,
            startup=startup / started if started else None,
        )

    def sample_background(self) -> list[LocalLoad]:
        """Count the nodes of local users by cluster. Return the means of the last slot when another has begun.

        A cluster without a current report is not counted, so that its load has a gap.
        """
        now, ended = self._clock(), list[LocalLoad]()
        if (slot := int(now // LOAD_SLOT_S)) != self._slot:
            for name, counts in self._slot_counts.items():
                local, total = (sum(numbers) / len(counts) for numbers in zip(*counts, strict=True))
                ended.append(LocalLoad(self._slot, name, local, total))
            self._slot, self._slot_counts = slot, {}
        for cluster in self._engine.queries.grid.clusters():
            if cluster.known_at(now) == now and cluster.last_report.total:
                self._slot_counts.setdefault(cluster.name, []).append(
                    (cluster.last_report.background, cluster.last_report.total)
                )
        return ended

    async def take(self) -> None:
        """Store a sample, and the local load of a slot that has ended; lose them while the database is unavailable."""
        sample, loads = self.make_sample(), self.sample_background()
        with suppress(StoreUnavailable):
            await run_in_database(self._store.add_sample, sample)
            self._stored, self._recent = self._stored + 1, None
            if loads:
                await run_in_database(self._store.add_local_load, loads)
                self._loads.clear()

    async def read_local_load(self, seconds: float) -> Mapping[ClusterName, tuple[LoadPeriod, ...]]:
        """Return the local load of the last seconds by cluster, in at most ``LOAD_PERIODS`` periods, oldest first.

        There are no periods for times at which a cluster was not reported.
        """
        joined = max(1, ceil(seconds / LOAD_SLOT_S / LOAD_PERIODS))
        first = int((self._clock() - seconds) // LOAD_SLOT_S) // joined * joined
        if (loads := self._loads.get((first, joined))) is None:
            try:
                rows: Sequence[LocalLoad] = await query(self._store.local_load, first, joined)
            except StoreUnavailable:
                return {}
            length, end = joined * LOAD_SLOT_S, self._slot * LOAD_SLOT_S or self._clock()
            loads = {
                name: tuple(
                    LoadPeriod(row.slot * length, min(end, (row.slot + 1) * length), min(1.0, row.local / row.total))
                    for row in rows_of_cluster
                )
                for name, rows_of_cluster in groupby(rows, key=lambda row: row.cluster)
            }
            if len(self._loads) >= _MAX_CACHED_LOADS:
                self._loads.clear()
            self._loads[first, joined] = loads
        start = self._slot * LOAD_SLOT_S
        current = {
            name: (LoadPeriod(start, start + LOAD_SLOT_S, min(1.0, counts[-1][0] / counts[-1][1])),)
            for name, counts in self._slot_counts.items()
        }
        return {name: loads.get(name, ()) + current.get(name, ()) for name in loads.keys() | current.keys()}

    async def read_recent(self) -> Sequence[Sample]:
        """Return the stored samples of the last hours, oldest first; none while the database is unavailable."""
        if self._recent is None:
            try:
                stored = self._stored
                samples: Sequence[Sample] = await query(self._store.samples, self._clock() - SHOWN_S)
            except StoreUnavailable:
                return ()
            if stored != self._stored:
                return samples
            self._recent = samples
        return self._recent
