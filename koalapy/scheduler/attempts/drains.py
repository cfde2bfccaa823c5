"""Drains: the orders of operators to place nothing on a cluster, at once or in a time to come.

Before the begin of a planned drain, jobs are placed there only if they end in time, as before a reservation of all
nodes.
"""

from math import inf

from koalapy.model.bounds import MAX_NODES
from koalapy.model.cluster import Drain
from koalapy.model.job import JobState
from koalapy.model.job_sizes import MAX_TIME, NodeReservation
from koalapy.model.request import ClusterName
from koalapy.scheduler.attempts.attempts import Attempts
from koalapy.scheduler.attempts.facts import is_program_over
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.events import ClusterDrained, ClusterResumed
from koalapy.scheduler.rules import UNKNOWN_RUN_TIME_S
from koalapy.scheduler.state import Deadline, SchedulerState


class Drains:
    """The drains in force and the planned ones."""

    def __init__(self, state: SchedulerState, attempts: Attempts) -> None:
        self._rules, self._grid, self._ledger, self._timers = state.rules, state.grid, state.ledger, state.timers
        self._state, self._attempts = state, attempts
        self._deadlines: dict[ClusterName, float] = {}
        """When the next drain of a cluster begins or ends."""

    def restore(self) -> None:
        """Set the deadlines of the drains of an earlier daemon run."""
        for cluster in self._grid.clusters():
            self._set_planned(cluster, cluster.planned_drains)
            self._set_deadline(cluster, after=-inf)

    def add(self, event: ClusterDrained, now: float) -> None:
        """Drain a cluster, or plan to. An order without a reason leaves the drain in force as it is."""
        cluster = self._grid[event.cluster]
        self.handle_due(cluster.name, now)  # the order replaces the deadline
        drain = Drain(now, event.by, event.reason, event.begins_at, event.ends_at, event.requeue)
        if drain.since > now:
            self._set_planned(cluster, (*cluster.planned_drains, drain))
        elif event.reason or cluster.drained is None:
            self._begin(cluster, drain)
        if event.requeue and cluster.drained is not None and drain not in cluster.planned_drains:
            self._requeue_jobs(event.cluster, drain, now)

    def remove(self, event: ClusterResumed, now: float) -> None:
        """End the drain in force, so that planned drains under it begin. ``planned``: only withdraw planned ones."""
        cluster = self._grid[event.cluster]
        self.handle_due(cluster.name, now)
        if event.planned:
            remaining = list(cluster.planned_drains)
            for drain in cluster.planned_drains:
                if event.begins_at is None:
                    remaining.clear()
                elif event.begins_at == drain.since and event.ordered_at in (None, drain.at):
                    remaining.remove(drain)
                    break
            self._set_planned(cluster, tuple(remaining))
        else:
            self._end(cluster)
            self._begin_due(cluster, now)

    def handle_due(self, name: ClusterName, now: float) -> None:
        """End the drain of a cluster that is over, and begin the planned ones that are due."""
        cluster, due_at = self._grid[name], self._deadlines.get(name, inf)
        if due_at > now:
            return
        if cluster.drained is not None and cluster.drained.until <= now:
            self._end(cluster)
        for drain in cluster.planned_drains:
            if drain.requeue and due_at <= drain.since <= now < drain.until:
                self._requeue_jobs(cluster.name, drain, now)
        self._begin_due(cluster, now)

    def _begin_due(self, cluster: ClusterStatus, now: float) -> None:
        """Put the due drain with the latest end in force, if that is later than the end of the one in force.

        The drains that it covers stay planned until their end, since the cluster may be resumed before.
        """
        planned = [drain for drain in cluster.planned_drains if drain.until > now]
        due = [drain for drain in planned if drain.since <= now]
        latest = max(due, key=lambda drain: drain.until, default=None)
        if latest is not None and (cluster.drained is None or latest.until > cluster.drained.until):
            planned.remove(latest)
            self._begin(cluster, latest)
        self._set_planned(cluster, tuple(planned))

    def _begin(self, cluster: ClusterStatus, drain: Drain) -> None:
        cluster.drained = drain
        self._ledger.mark_cluster_changed(cluster.name)
        self._set_deadline(cluster, after=self._state.now)

    def _end(self, cluster: ClusterStatus) -> None:
        cluster.drained, cluster.nodes.capacity_gained = None, True
        self._ledger.mark_cluster_changed(cluster.name)

    def _set_deadline(self, cluster: ClusterStatus, after: float) -> None:
        """Replace the deadline of a cluster by the next begin after a time, or the end of the drain in force."""
        end = inf if cluster.drained is None else cluster.drained.until
        self._timers.cancel(0, cluster.name, Deadline.DRAIN)
        begins = (drain.since for drain in cluster.planned_drains if drain.since > after)
        self._deadlines[cluster.name] = due_at = min([end, *begins])
        if due_at < inf:
            self._timers.add(due_at, Deadline.DRAIN, cluster=cluster.name)

    def _set_planned(self, cluster: ClusterStatus, drains: tuple[Drain, ...]) -> None:
        """Replace the planned drains of a cluster, and reserve its nodes for them.

        A job without a walltime is expected to run for ``default_walltime``, or a day.
        """
        drains = tuple(sorted(drains, key=lambda drain: drain.since))
        lasts = self._rules.default_walltime or UNKNOWN_RUN_TIME_S
        if drains or cluster.planned_drains:
            cluster.planned_drains, cluster.nodes.capacity_gained = drains, True
            cluster.nodes.drain_reservations = tuple(
                NodeReservation("", MAX_NODES, MAX_NODES, drain.since, min(drain.until, MAX_TIME), lasts)
                for drain in drains
            )
            self._ledger.mark_cluster_changed(cluster.name)
        self._set_deadline(cluster, after=self._state.now)

    def _requeue_jobs(self, name: ClusterName, drain: Drain, now: float) -> None:
        """Requeue all jobs that have nodes on a cluster. That does not count as a restart."""
        reason = f"drained: {name}" + (f": {drain.reason}" if drain.reason else " is to be empty")
        for token in list(self._grid[name].nodes.live):
            match = self._ledger.find(token)
            if match is None or match[1].superseded or match[0].ending is not None:
                continue
            if not is_program_over(match[0], self._grid):
                job = self._attempts.end_attempt(match[0], JobState.QUEUED, reason, now, by=drain.by, warn=True)
                self._attempts.settle_job(job, now)
