"""Keep the nodes of a failed attempt from low-priority jobs until its job is placed again."""

from collections import Counter
from collections.abc import Iterable
from math import inf

from koalapy.model.cluster import ClusterState
from koalapy.model.job import Job, JobId, JobState
from koalapy.model.job_sizes import is_barred
from koalapy.model.job_spec import Priority
from koalapy.model.node_requirement import ANY_NODE
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_nodes
from koalapy.scheduler.attempts.facts import INFRASTRUCTURE_FAILURE, TRANSFER_FAILURE, filter_of
from koalapy.scheduler.state import SchedulerState

KEPT_S = 600.0
"""Seconds after a failed attempt for which its nodes are kept."""
MAX_RESTARTING = 100
"""Maximum number of jobs whose nodes are kept at a time."""
FAILURES = (INFRASTRUCTURE_FAILURE, TRANSFER_FAILURE)


class KeptNodes:
    """The nodes of jobs with a failed attempt, kept from the low-priority jobs behind them."""

    def __init__(self, state: SchedulerState) -> None:
        self._state, self._rules, self._ledger, self._grid = state, state.rules, state.ledger, state.grid
        self._restarting: dict[JobId, Counter[ClusterName]] = {}
        """Released nodes of jobs that wait for another attempt after a failure."""
        self._kept = Counter[ClusterName]()
        """The sum of these nodes."""
        self._fewer_kept = False
        """Whether other jobs may have gained nodes since ``take_release``."""
        self._ledger.on_job_removed.append(lambda job: self.release_kept(job.id))

    def __getitem__(self, cluster: ClusterName) -> int:
        return self._kept[cluster]

    def __bool__(self) -> bool:
        return bool(self._restarting)

    def restarting_jobs(self) -> list[JobId]:
        """Return the jobs that wait for another attempt with nodes kept for them, in order."""
        return sorted((job for job, nodes in self._restarting.items() if nodes), key=self._rank)

    def describe(self, job: JobId) -> str:
        """Return, as text, how many nodes are kept for the restart of a job; empty for none."""
        nodes = self._restarting.get(job, Counter()).total()
        are_kept = "is" if nodes == 1 else "are"
        return f"{format_nodes(nodes)} of its failed attempt {are_kept} kept for it" if nodes else ""

    def behind(self, cluster: ClusterName, job: JobId) -> int:
        """Return the nodes kept for a job itself and for the jobs behind it, which it may use."""
        rank = self._rank(job)
        return sum(nodes[cluster] for ident, nodes in self._restarting.items() if self._rank(ident) >= rank)

    def _rank(self, ident: JobId) -> tuple[bool, float]:
        """Return the sort key of a job among those that nodes are kept for."""
        job = self._ledger.get(ident)  # None for a task that was not started
        return (True, inf) if job is None else (job.spec.priority is Priority.LOW, job.queue_seq)

    def keep_for_restart(self, job: Job) -> None:
        """Keep the released nodes of a job after a failed attempt, until it is placed again.

        They are kept for ``KEPT_S`` seconds at most, and not at all while one of its clusters is gone.
        """
        if not self._may_restart(job):
            self.release_kept(job.id)
        elif job.id in self._restarting or len(self._restarting) < MAX_RESTARTING:
            self._set_kept(job, self._released_nodes(job))

    def release_kept(self, job: JobId) -> None:
        """Keep no nodes for a job any more: it is placed again, or is not to be."""
        if (nodes := self._restarting.pop(job, None)) is not None:
            self._kept.subtract(nodes)
            self._announce_kept(nodes)
            self._fewer_kept = True

    def _set_kept(self, job: Job, nodes: Counter[ClusterName]) -> None:
        previous = self._restarting.get(job.id, Counter())
        self._restarting[job.id] = nodes
        if nodes != previous:
            self._kept.update(nodes)
            self._kept.subtract(previous)
            self._fewer_kept |= bool(previous - nodes)
            self._announce_kept(nodes | previous)
        if job.attempt is not None:
            for component in job.attempt.gang:
                if nodes[component.cluster]:
                    self._grid[component.cluster].nodes.classes.kept = filter_of(job.spec, component)

    def _announce_kept(self, clusters: Iterable[ClusterName]) -> None:
        """Announce that other nodes of these clusters are kept."""
        for name in clusters:
            if not self._kept[name]:
                self._grid[name].nodes.classes.kept = ANY_NODE
            self._grid.touch(name)

    def _may_restart(self, job: Job) -> bool:
        """Return whether a job waits for another attempt after a failure.

        In a pause nodes are kept only for a program that had run for longer, not for one that fails at each start.
        """
        attempt = job.attempt
        if attempt is None or attempt.ended_at is None or not attempt.end_reason.startswith(FAILURES):
            return False
        if not self._rules.keeps_for_restart or job.spec.share or job.spec.internal or job.spec.reservation:
            return False
        if job.retry_at is not None:
            lasted = attempt.ended_at - (attempt.ended_at if attempt.launched_at is None else attempt.launched_at)
            if lasted < job.retry_at - attempt.ended_at:
                return False
        is_waiting = job.state is JobState.QUEUED or job.ending is JobState.QUEUED
        return is_waiting and self._state.now < attempt.ended_at + KEPT_S

    def _released_nodes(self, job: Job) -> Counter[ClusterName]:
        """Return the nodes of a failed attempt that its components have released.

        There are none if a cluster is gone or may not run the job now.

        A cluster that has not reported in this daemon run yet may still be there.
        """
        nodes = Counter[ClusterName]()
        barred = job.barred_sizes(self._state.now)
        for component in job.attempt.gang if job.attempt is not None else ():
            if component.cluster not in self._grid:
                return Counter()
            cluster = self._grid[component.cluster]
            is_away = cluster.state is ClusterState.UNREACHABLE and cluster.nodes.reported
            if is_away or cluster.state in (ClusterState.UNUSABLE, ClusterState.DRAINED):
                return Counter()
            if is_barred(barred, component.cluster, component.size):
                return Counter()
            if component.has_ended:
                nodes[component.cluster] += component.size
        return nodes

    def renew(self) -> None:
        """Keep no nodes of clusters that are gone, or beyond the time."""
        for ident in list(self._restarting):
            self.keep_for_restart(self._ledger.jobs[ident])

    def take_release(self) -> bool:
        """Return whether other jobs may have gained nodes since the last call."""
        is_less, self._fewer_kept = self._fewer_kept, False
        return is_less
