"""Sample the use of the grid once a minute for the charts of the overview."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from koalapy.daemon.engine.database import query, run_in_database
from koalapy.daemon.engine.engine import Engine
from koalapy.model.cluster import ClusterState
from koalapy.model.errors import StoreUnavailable
from koalapy.model.history import Sample
from koalapy.model.job import Job, JobState
from koalapy.ports import SampleStore

SHOWN_S = 6 * 3600.0
"""The period of the charts."""
_BEFORE_START = (None, JobState.QUEUED, JobState.PLACED, JobState.CLAIMING, JobState.STARTING)


class Samples:
    """Takes and returns samples; counts the starts and ends of users' jobs between two samples."""

    def __init__(self, engine: Engine, store: SampleStore, clock: Callable[[], float]) -> None:
        self._engine, self._store, self._clock = engine, store, clock
        self._started = self._ended = 0
        self._startup_s = 0.0
        """Sum of the start-up times of the started jobs."""
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
        clusters, now = self._engine.queries.grid.clusters(), self._clock()
        started, ended, startup = self._started, self._ended, self._startup_s
        self._started = self._ended = 0
        self._startup_s = 0.0
        return Sample(
            now,
            ours=sum(cluster.used for cluster in clusters),
            local=sum(cluster.background for cluster in clusters),
            idle=sum(
                max(0, cluster.total - cluster.used - cluster.background - cluster.down)
                for cluster in clusters
                if cluster.state is ClusterState.USABLE and cluster.known_at(now) == now
            ),
            queued=self._engine.stored_queued,
            started=started,
            ended=ended,
            startup=startup / started if started else None,
        )

    async def take(self) -> None:
        """Store a sample; lose it while the database is unavailable."""
        sample = self.make_sample()
        with suppress(StoreUnavailable):
            await run_in_database(self._store.add_sample, sample)

    async def read_recent(self) -> Sequence[Sample]:
        """Return the stored samples of the last hours, oldest first; none while the database is unavailable."""
        try:
            samples: Sequence[Sample] = await query(self._store.samples, self._clock() - SHOWN_S)
        except StoreUnavailable:
            return ()
        return samples
