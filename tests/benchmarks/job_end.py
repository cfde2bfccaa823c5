"""Measure the end of a job on a full grid, while a job of high priority waits that no preemption can place."""

from collections.abc import Sequence
from statistics import median
from time import process_time

from koalapy.model.job import Attempt, Component, ComponentState, Job, JobId, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory
from koalapy.model.request import ComponentRequest, NonFixedRequest
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.events import Event, InventoryReceived, JobSubmitted, Reported
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState
from tests.benchmarks.waiting_jobs import CLUSTERS

LOCAL_NODES = 10
"""Nodes of local users on each cluster, which no preemption frees for the waiting job."""


def running_job(ident: JobId, cluster: str) -> Job:
    component = Component(
        0,
        cluster,
        1,
        ComponentState.RUNNING,
        request_index=0,
        hosts=(f"{cluster}-node",),
        lrm_job="1",
        submitted_at=1.0,
        claimed_at=1.0,
    )
    attempt = Attempt(1, (component,), 1.0, 1.0, 1.0, barrier_at=1.0, launched_at=1.0, nonce=f"{ident:016x}")
    spec = JobSpec(NonFixedRequest((ComponentRequest(1),)), ("program",))
    return Job(ident, spec, 0.0, JobState.RUNNING, generation=1, attempt=attempt, placed_at=1.0, started_at=1.0)


class FullGrid:
    """A grid of 100 clusters on which jobs of one node with low priority and local users occupy all nodes."""

    def __init__(self, components: int) -> None:
        jobs = [running_job(ident, CLUSTERS[ident % len(CLUSTERS)]) for ident in range(1, components + 1)]
        self.scheduler = Scheduler(
            SchedulerState(Rules(), builtin_policies(), [ClusterStatus(name) for name in CLUSTERS]), str
        )
        self.scheduler.restore(jobs, 2.0)
        self._now = 2.0
        self._running = {name: [job for job in jobs if _cluster(job) == name] for name in CLUSTERS}
        self._nodes = {name: len(jobs) + LOCAL_NODES for name, jobs in self._running.items()}
        for name, cluster_jobs in self._running.items():
            statuses = tuple(ComponentStatus(job.token(0), ComponentState.RUNNING, lrm_job="1") for job in cluster_jobs)
            self._step([InventoryReceived(name, Inventory(statuses)), self._report(name)])
        wide = NonFixedRequest((ComponentRequest(max(self._nodes.values())),))
        self._step([JobSubmitted(Job(components + 1, JobSpec(wide, ("program",), priority=Priority.HIGH), self._now))])
        self._check(components)

    def seconds_per_end(self, ends: int) -> float:
        """Return the median CPU seconds of a step with the reports of a job's end and of its idle node."""
        times, live = [], sum(map(len, self._running.values()))
        for number in range(ends):
            name = CLUSTERS[number % len(CLUSTERS)]
            status = ComponentStatus(self._running[name].pop().token(0), ComponentState.ENDED, (), "1", 0)
            events = [Reported(name, status), self._report(name)]
            began = process_time()
            self._step(events)
            times.append(process_time() - began)
        self._check(live - ends)
        return median(times)

    def _step(self, events: Sequence[Event]) -> None:
        self._now += 0.01
        self.scheduler.step(events, self._now)

    def _check(self, components: int) -> None:
        assert self.scheduler.queries.queued == 1
        assert sum(len(cluster.nodes.live) for cluster in self.scheduler.queries.grid.clusters()) == components

    def _report(self, name: str) -> Reported:
        tokens = frozenset(job.token(0) for job in self._running[name])
        nodes = self._nodes[name]
        return Reported(name, ClusterReport(nodes, nodes - LOCAL_NODES - len(tokens), LOCAL_NODES, holding=tokens))


def _cluster(job: Job) -> str:
    assert job.attempt is not None
    return job.attempt.head.cluster
