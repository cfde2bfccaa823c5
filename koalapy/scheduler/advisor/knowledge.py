"""Prepare the knowledge of a learning policy about a job: run-time statistics, and expected releases of nodes."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf
from typing import TypeVar

from koalapy.model.advice import run_size
from koalapy.model.application import application_of
from koalapy.model.cluster import GridView
from koalapy.model.job import Job, JobId, parse_token
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ClusterName
from koalapy.policies.knowledge import SURE, Capacity, Knowledge, Release
from koalapy.scheduler.advisor.experience import Experience
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.grid import GridStatus
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.state import SchedulerState

T = TypeVar("T")

MAX_RETAINED_WAITS = 10_000
"""Number of recent jobs for which the waiting time with enough idle nodes is stored."""
FREE_ODDS = 2.0
"""The highest odds of a slowdown at which a job is co-allocated as a probe on an idle grid."""
MAX_RUNS_BETWEEN = 200
"""Runs on one cluster after which one on several is probed, however unlikely a benefit."""
MAX_GAP_SECONDS = 120.0
"""The longest time between two evaluations that counts as waiting; the state in between is unknown."""


@dataclass(slots=True)
class IdleWait:
    """The time for which enough nodes were idle for a waiting job, identified by its spec object."""

    spec: JobSpec
    asked: float
    had_nodes: bool = False
    """Whether enough nodes were idle in total at the last evaluation."""
    seconds: float = 0.0

    def until(self, now: float) -> float:
        """Return the seconds including those since the last evaluation."""
        return self.seconds + min(now - self.asked, MAX_GAP_SECONDS) if self.had_nodes else self.seconds


class PerCluster(Mapping[ClusterName, T]):
    """Values computed per cluster on demand, cached until the cluster is touched."""

    def __init__(self, grid: GridStatus, work: Callable[[ClusterStatus], T]) -> None:
        self._grid, self._work = grid, work
        self._known: dict[ClusterName, T] = {}
        self._version = 0

    def forget(self) -> None:
        """Clear the cache, as time or jobs have changed."""
        self._known.clear()

    def __getitem__(self, name: ClusterName) -> T:
        if self._version != self._grid.version:
            for cluster in self._grid.changed_since(self._version):
                self._known.pop(cluster.name, None)
            self._version = self._grid.version
        if name not in self._known:
            self._known[name] = self._work(self._grid[name])
        return self._known[name]

    def __iter__(self) -> Iterator[ClusterName]:
        return (cluster.name for cluster in self._grid.clusters())

    def __len__(self) -> int:
        return len(self._grid.clusters())


class KnowledgeBuilder:
    """A builder of the knowledge about a job. Values of the whole grid are computed once per view."""

    def __init__(self, state: SchedulerState, queues: PlacementQueues) -> None:
        self._state, self._experience, self._ledger, self._grid = state, state.experience, state.ledger, state.grid
        self._queues = queues
        self._waits: OrderedDict[int, IdleWait] = OrderedDict()
        self.notes_waits = False
        """Whether the scheduler evaluates a job, not a query, which must not change anything."""
        self._capacities = PerCluster(state.grid, self._capacity)
        self._co_allocated = PerCluster(state.grid, self._co_allocated_on)

    def invalidate(self) -> None:
        """Clear the cached values, as time or jobs have changed."""
        self._capacities.forget()

    def build(self, spec: JobSpec, view: GridView) -> Knowledge:
        """Return the statistics about a job that its policy uses on a view."""
        application = application_of(spec)
        first_two = view.compute_once(
            ("first two that wait",), lambda view: tuple(islice(self._queues.waiting_requests(), 2))
        )
        slowdowns, times = self._experience.answer(application, run_size(spec), spec.communication)
        loaded = any(request != spec.request for request in first_two) or len(first_two) > 1
        return Knowledge(
            application,
            times,
            slowdowns,
            spec.communication,
            spec.inputs,
            self._capacities,
            loaded,
            self._update_wait(spec, view),
            self._state.now,
            partial(self._may_probe, spec, view, loaded) if application else None,
            spec.per_node_bandwidth or 0.0,
            spec.memory or 0,
        )

    def _may_probe(self, spec: JobSpec, view: GridView, loaded: bool, probability: float) -> bool:
        """Return whether to co-allocate a job as a probe, the less often the lower the ``probability`` of a benefit.

        With other jobs waiting, only after runs on one cluster to compare with, and on a small part of all nodes.
        """
        application, size = application_of(spec), spec.request.total_size
        under_way = view.compute_once(("probes",), lambda view: self._probes())
        between = runs_between(probability, loaded) * (1 + len(under_way.get(application, ())))
        if self._experience.single_cluster_runs(application) < between:
            return False
        total = sum(cluster.last_report.total for cluster in self._grid.clusters())
        return sum(map(sum, under_way.values())) + size <= max(size, probability**2 * total)

    def _probes(self) -> dict[str, list[int]]:
        """Return the nodes of each co-allocated job with a slowdown that is still uncertain, by application."""
        probes: dict[str, list[int]] = {}
        largest = max((cluster.last_report.total for cluster in self._grid.clusters()), default=0)
        for ident in set[JobId]().union(*self._co_allocated.values()):
            job = self._ledger.get(ident)
            if job is None or job.spec.request.total_size > largest:
                continue
            clusters = _clusters_of(job)
            if len(clusters) > 1:
                application = application_of(job.spec)
                slowdowns, _ = self._experience.answer(application, run_size(job.spec), job.spec.communication)
                if slowdowns.harmless_probability(clusters) < SURE:
                    probes.setdefault(application, []).append(job.spec.request.total_size)
        return probes

    def _co_allocated_on(self, cluster: ClusterStatus) -> set[JobId]:
        """Return the jobs on several clusters that have nodes of this one."""
        jobs = map(self._ledger.get, {parse_token(token).job for token in cluster.nodes.live})
        return {job.id for job in jobs if job is not None and len(_clusters_of(job)) > 1}

    def _update_wait(self, spec: JobSpec, view: GridView) -> float:
        """Return the seconds for which a job waited while enough nodes were idle."""
        now, wait = self._state.now, self._waits.get(id(spec))
        if not self.notes_waits:
            return 0.0 if wait is None else wait.until(now)
        if wait is None:
            wait = self._waits[id(spec)] = IdleWait(spec, now)  # it refers to the spec, so that the id is not reused
            if len(self._waits) > MAX_RETAINED_WAITS:
                self._waits.popitem(last=False)
        wait.seconds = wait.until(now)
        idle = min(self._grid.view().usable_idle, view.usable_idle)
        wait.asked, wait.had_nodes = now, spec.request.total_size <= idle
        self._waits.move_to_end(id(spec))
        return wait.seconds

    def _capacity(self, cluster: ClusterStatus) -> Capacity:
        """Return the capacity of a cluster and when its components release nodes."""
        now, releases = self._state.now, []
        for token, size in cluster.nodes.live.items():
            job = self._ledger.get(parse_token(token).job)
            remaining, age = (None, 0.0) if job is None else self._remaining_time(job, now)
            releases.append(Release(remaining, size, age))
        releases.sort(
            key=lambda release: (inf if release.seconds is None else release.seconds, release.age, release.nodes)
        )
        return Capacity(
            max(
                0,
                cluster.last_report.total
                - cluster.last_report.background
                - cluster.last_report.withheld
                - cluster.last_report.down,
            ),
            tuple(releases),
        )

    def _remaining_time(self, job: Job, now: float) -> tuple[float | None, float]:
        """Return the seconds until a job releases its nodes (None if unknown) and how long it has run."""
        end = expected_end(job, self._experience, now)
        began = None if job.attempt is None or job.ending is not None else job.attempt.barrier_at
        return None if end is None else end - now, 0.0 if began is None else max(0.0, now - began)


def _clusters_of(job: Job) -> tuple[ClusterName, ...]:
    return () if job.attempt is None else tuple(sorted({component.cluster for component in job.attempt.gang}))


def expected_end(job: Job, experience: Experience, now: float) -> float | None:
    """Return when a job releases its nodes, by walltime and run-time statistics; None if unknown."""
    attempt = job.attempt
    if attempt is None:
        return None
    if job.ending is not None:
        return now
    began = attempt.barrier_at
    if began is None:
        began = max(now, attempt.start_estimate or now)
    run = experience.expected(job.spec, {component.cluster for component in attempt.gang})
    lasts = [seconds for seconds in (run, job.spec.walltime) if seconds is not None]
    ends = [began + seconds for seconds in lasts if began + seconds > now]
    return min(ends, default=None)


def runs_between(probability: float, loaded: bool) -> float:
    """Return the runs on one cluster between two probes, by the ``probability`` that co-allocation causes no
    slowdown."""
    odds = 1.0 / max(probability, 1e-3) - 1.0
    return min(MAX_RUNS_BETWEEN, max(1.0, odds**2) if loaded else max(0.0, odds - FREE_ODDS))
