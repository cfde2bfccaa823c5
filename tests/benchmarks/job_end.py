"""The end of a job on a full grid while one of high priority waits that nothing can make room for."""

from statistics import median
from time import process_time

from koalapy.model.job import Attempt, Component, ComponentState, Job, JobId, JobSpec, JobState, Priority
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory
from koalapy.model.request import ComponentRequest, NonFixedRequest
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.events import Event, InventoryReceived, JobSubmitted, Reported
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState
from tests.benchmarks.waiting_jobs import CLUSTERS

LOCAL_USERS = 10
"""Nodes of each cluster that are theirs: no preemption gives these to the job that waits."""


def running(ident: JobId, cluster: str) -> Job:
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
    """100 clusters, all nodes of which are held by jobs of low priority with one component of one node, or by users."""

    def __init__(self, components: int) -> None:
        jobs = [running(ident, CLUSTERS[ident % len(CLUSTERS)]) for ident in range(1, components + 1)]
        self.scheduler = Scheduler(
            SchedulerState(Rules(), builtin_policies(), [ClusterStatus(name) for name in CLUSTERS]), str
        )
        self.scheduler.restore(jobs, 2.0)
        self._now = 2.0
        self._running = {name: [job for job in jobs if _cluster(job) == name] for name in CLUSTERS}
        self._nodes = {name: len(jobs) + LOCAL_USERS for name, jobs in self._running.items()}
        for name, here in self._running.items():
            statuses = tuple(ComponentStatus(job.token(0), ComponentState.RUNNING, lrm_job="1") for job in here)
            self._step([InventoryReceived(name, Inventory(statuses)), self._report(name)])
        wide = NonFixedRequest((ComponentRequest(max(self._nodes.values())),))
        self._step([JobSubmitted(Job(components + 1, JobSpec(wide, ("program",), priority=Priority.HIGH), self._now))])
        self._check(components)

    def seconds_per_end(self, ends: int) -> float:
        """CPU seconds of the step in which a job's end is told, and that its node is idle: the median."""
        took, live = [], sum(map(len, self._running.values()))
        for number in range(ends):
            name = CLUSTERS[number % len(CLUSTERS)]
            status = ComponentStatus(self._running[name].pop().token(0), ComponentState.ENDED, (), "1", 0)
            events = [Reported(name, status), self._report(name)]
            began = process_time()
            self._step(events)
            took.append(process_time() - began)
        self._check(live - ends)
        return median(took)

    def _step(self, events: list[Event]) -> None:
        self._now += 0.01
        self.scheduler.step(events, self._now)

    def _check(self, components: int) -> None:
        assert self.scheduler.queries.queued == 1
        assert sum(len(cluster.live) for cluster in self.scheduler.queries.grid.clusters()) == components

    def _report(self, name: str) -> Reported:
        held = frozenset(job.token(0) for job in self._running[name])
        nodes = self._nodes[name]
        return Reported(name, ClusterReport(nodes, nodes - LOCAL_USERS - len(held), LOCAL_USERS, holding=held))


def _cluster(job: Job) -> str:
    assert job.attempt is not None
    return job.attempt.head.cluster
