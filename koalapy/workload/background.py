"""Background load: keep a fraction of a cluster busy with Poisson arrivals of local jobs, corrected by measurements.

sonmez-2010 6.2.1 kept 10 to 30 % busy by injecting or killing dummy jobs. Here the arrival rate follows the missing
node-seconds: those that should be used until a mean job's time ahead, minus those used and those in outstanding jobs.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from random import Random

from koalapy.client.errors import GridError
from koalapy.client.http import Json
from koalapy.workload.daemon import WorkloadDaemon

LONGEST = 600.0
"""Maximum run time of a job in seconds."""
TAIL = 3.0
"""Maximum run time of a job as a multiple of the mean."""
GONE = 120.0
"""Seconds after its expected end until a job that was never observed to run is dropped."""
LONGEST_GAP = 30.0
"""Maximum seconds between two observations that count as one measurement. Longer gaps are not compensated."""


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A job of a local user."""

    nodes: int
    seconds: float


@dataclass(slots=True)
class _Outstanding:
    """A submitted job that is not known to have ended."""

    job: LocalJob
    submitted_at: float
    remaining: float
    """Remaining run time in seconds."""


class Keeper:
    """The background load of one cluster. All times are in seconds of the same clock."""

    def __init__(self, target: float, draws: Random, *, seconds: float, nodes: int | None = None) -> None:
        """``target`` is a fraction of the nodes, ``seconds`` the mean run time, ``nodes`` the maximum of a job."""
        self._target, self._draws = target, draws
        self._mean, self._max_nodes = seconds, nodes
        self._total = 0
        self._observed_at: float | None = None
        self._busy = 0
        self._owed = 0.0
        """Node-seconds up to the last observation that the target required and that were not used."""
        self._outstanding: deque[_Outstanding] = deque()
        self._until_next = draws.expovariate(1.0)
        """Remaining increase of the integral of the rate until the next arrival."""

    def record_nodes(self, now: float, total: int, background: int) -> None:
        """Record the nodes in service of the cluster and how many of them local users have."""
        if self._observed_at is not None and (span := now - self._observed_at) > 0:
            if span <= LONGEST_GAP:
                self._owed += span * (self._target * self._total - self._busy)
            self._advance_jobs(span, self._busy, now)
        self._observed_at, self._total, self._busy = now, total, background

    def draw_arrivals(self, span: float) -> Iterator[LocalJob]:
        """Yield the jobs that arrive in the next ``span`` seconds; each counts as outstanding until ``refused``."""
        if self._observed_at is None or not self._total or self._target <= 0:
            return
        # The arrivals per second are those for the target, and those for the missing node-seconds.
        work = (1 + self._max_job_nodes()) / 2 * self._mean
        rate = max(0.0, self._target * self._total + self._missing_node_seconds() / self._mean) / work
        grown = rate * span
        while grown >= self._until_next:
            grown -= self._until_next
            self._until_next = self._draws.expovariate(1.0)
            # A uniform number of nodes and an exponential run time, within limits.
            seconds = min(self._draws.expovariate(1 / self._mean), TAIL * self._mean, LONGEST)
            job = LocalJob(self._draws.randint(1, self._max_job_nodes()), round(max(0.5, seconds), 1))
            self._outstanding.append(_Outstanding(job, self._observed_at, job.seconds))
            yield job
            # The new job reduces the missing node-seconds.
            if self._missing_node_seconds() <= 0:
                return
        self._until_next -= grown

    def remove_job(self, job: LocalJob) -> None:
        """Remove a job that the cluster rejected."""
        for entry in reversed(self._outstanding):
            if entry.job is job:
                self._outstanding.remove(entry)
                return

    def _max_job_nodes(self) -> int:
        """Return the maximum nodes of a job: the configured number, or a quarter of the cluster."""
        return max(1, min(self._max_nodes or self._total // 4, self._total))

    def _missing_node_seconds(self) -> float:
        """Return the node-seconds, until a mean job's time ahead, that outstanding jobs do not cover."""
        ahead = self._target * self._total * self._mean
        return self._owed + ahead - sum(entry.job.nodes * entry.remaining for entry in self._outstanding)

    def _advance_jobs(self, span: float, busy: int, now: float) -> None:
        """Reduce the remaining time of the oldest jobs that fit into the busy nodes, and drop jobs that have ended."""
        remaining: deque[_Outstanding] = deque()
        free = float(busy) if busy else -inf
        for entry in self._outstanding:
            if entry.job.nodes <= free:
                free -= entry.job.nodes
                entry.remaining -= span
            if entry.remaining > 0 and now < entry.submitted_at + entry.job.seconds + GONE:
                remaining.append(entry)
        self._outstanding = remaining


AT_ONCE = 4


class BackgroundLoad:
    """Background load on all clusters: it submits local jobs where too few nodes are busy."""

    def __init__(
        self,
        daemon: WorkloadDaemon,
        target: float,
        *,
        seconds: float,
        nodes: int | None = None,
        seed: int = 1,
        tell: Callable[[str], None],
    ) -> None:
        self._daemon, self._target, self._seconds, self._nodes, self._seed = daemon, target, seconds, nodes, seed
        self._tell = tell
        self._keepers: dict[str, Keeper] = {}
        self._pool = ThreadPoolExecutor(AT_ONCE, "background")
        self._submitted: list[tuple[str, LocalJob, Future[None]]] = []
        self._complained: set[str] = set()
        self._observed_at = 0.0

    def adjust_load(self, now: float, clusters: Iterable[Json]) -> None:
        """Record the states of the clusters and submit the jobs due until the next call."""
        self._collect_results()
        span, self._observed_at = max(0.0, now - self._observed_at), now
        for cluster in clusters:
            name = cluster["name"]
            if name not in self._keepers:
                draws = Random(f"{self._seed}/{name}")
                self._keepers[name] = Keeper(self._target, draws, seconds=self._seconds, nodes=self._nodes)
            keeper = self._keepers[name]
            keeper.record_nodes(now, cluster["total"] - cluster["down"], cluster["background"])
            if cluster["state"] == "unreachable":
                continue
            for job in keeper.draw_arrivals(min(span, self._seconds)):
                self._submitted.append(
                    (name, job, self._pool.submit(self._daemon.start_load, name, job.nodes, job.seconds))
                )

    def end_jobs(self) -> None:
        """End all jobs that were submitted and still run."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._collect_results()
        for name in self._keepers:
            try:
                self._daemon.end_load(name)
            except GridError as error:
                self._tell(f"background load of {name} goes on by itself: {error}")

    def _collect_results(self) -> None:
        """Remove jobs that the daemon rejected, and report the first error of each cluster.

        Raise any other error of a submission.
        """
        finished = [entry for entry in self._submitted if entry[2].done()]
        self._submitted = [entry for entry in self._submitted if not entry[2].done()]
        for name, job, future in finished:
            if future.cancelled():
                continue
            error = future.exception()
            if error is None:
                self._complained.discard(name)
                continue
            if not isinstance(error, GridError):
                raise error
            self._keepers[name].remove_job(job)
            if name not in self._complained:
                self._complained.add(name)
                self._tell(f"no background load on {name}: {error}")
