"""Count signs of unreliable clusters: consecutive errors, limits of the resource manager, and doubts (semantics 6)."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from koalapy.model.job import Job, JobId, Token
from koalapy.model.request import ClusterName
from koalapy.scheduler.cluster_conditions import LAST_ERROR, Doubt, Limit
from koalapy.scheduler.state import Deadline, SchedulerState, backoff_pause

LIMIT_PAUSE = 15.0
"""Seconds for which a cluster gets no component as large as the rejected one after a limit; each further limit in a row
doubles it."""
MAX_LIMIT_PAUSE = 120.0

DOUBT_PAUSE = 30.0
"""Seconds for which nodes do not count after the first claim that timed out; each further one doubles it."""
MAX_DOUBT_PAUSE = 1800.0


class ClusterHealth:
    """The counts of errors and limits of clusters, and the times at which they are tried again."""

    def __init__(self, state: SchedulerState) -> None:
        self._rules, self._ledger, self._grid, self._timers = state.rules, state.ledger, state.grid, state.timers
        self._groups: dict[ClusterName, set[JobId | None]] = {}
        """The jobs that have failed, for each cluster with errors that currently count as one."""
        self._errors_of_jobs: dict[ClusterName, Counter[JobId | None]] = {}
        """The errors in a row of each cluster, by the unfinished job that failed; an array counts as one job."""
        state.ledger.on_job_removed.append(self._forget_job)

    # Errors, and probation

    @contextmanager
    def group_errors(self, name: ClusterName) -> Iterator[None]:
        """Count all errors of a cluster within the context as one, as they have one cause."""
        self._groups[name] = set()
        try:
            yield
        finally:
            del self._groups[name]

    def count_error(self, name: ClusterName, error: str, now: float, job: JobId | None = None) -> None:
        """Count an error of a cluster. At ``error_threshold`` errors in a row it becomes unusable.

        Several errors of one ``job`` alone do not make it so, since the job may be their cause.
        """
        group = self._groups.get(name, set())
        if group:
            if len(group) == 1 and job not in group:
                self._errors_of_jobs.get(name, Counter()).subtract(group)  # it is the error of several jobs
            group.add(job)
            return
        group.add(job)
        health, errors_of_job = self._grid[name].health, 0
        health.errors += 1
        if job is not None:
            errors = self._errors_of_jobs.setdefault(name, Counter())
            errors[job] += 1
            errors_of_job = errors[job]
        if health.probation:
            health.trials += 1
        threshold = self._rules.error_threshold
        is_conclusive = threshold == 1 or threshold <= health.errors > errors_of_job
        if health.probation or (is_conclusive and not health.unusable):
            health.unusable, health.probation = True, False
            in_a_row = "1 error" if health.errors == 1 else f"{health.errors} errors in a row"
            health.note = f"{in_a_row}{LAST_ERROR}{error}"
            self.plan_probation(name, now)
        self._ledger.mark_cluster_changed(name)

    def count_success(self, name: ClusterName) -> None:
        """Reset the errors of a cluster after a program has completed there."""
        health = self._grid[name].health
        if health.errors and not health.unusable:
            health.errors = 0
            self._errors_of_jobs.pop(name, None)
            self._ledger.mark_cluster_changed(name)

    def _forget_job(self, job: Job) -> None:
        for errors in self._errors_of_jobs.values():
            errors.pop(job.id, None)

    def plan_probation(self, name: ClusterName, now: float) -> None:
        """Try an unusable cluster again after a pause that doubles with each failed trial."""
        if self._rules.probation:
            health = self._grid[name].health
            pause = backoff_pause(self._rules.probation_pause, health.trials, self._rules.probation_pause_max)
            health.probation_at = now + pause
            self._timers.add(health.probation_at, Deadline.PROBATION, cluster=name)

    def begin_probation(self, name: ClusterName, due_at: float) -> None:
        """Begin the probation of a cluster after its pause: components are tried one at a time."""
        cluster = self._grid[name]
        if cluster.health.unusable and cluster.health.probation_at == due_at:
            cluster.nodes.clear_trials()
            cluster.health.probation, cluster.nodes.capacity_gained = True, True
            self._ledger.mark_cluster_changed(name)

    def end_probation(self, name: ClusterName) -> bool:
        """End a cluster's probation after a program has started; return whether it was on probation."""
        if not self._grid[name].health.probation:
            return False
        self.clear_errors(name)
        self._grid[name].nodes.capacity_gained = True
        return True

    def clear_errors(self, name: ClusterName) -> None:
        """Reset errors, limits and doubts of a cluster that an operator declares repaired."""
        cluster = self._grid[name]
        cluster.health.clear()
        self._errors_of_jobs.pop(name, None)
        cluster.nodes.clear_trials()
        self._ledger.mark_cluster_changed(name)

    # Limits

    def set_limit(self, name: ClusterName, size: int, error: str, now: float) -> None:
        """Place only components of fewer than ``size`` nodes for a pause, as the resource manager reported a limit."""
        cluster = self._grid[name]
        pause = backoff_pause(LIMIT_PAUSE, cluster.health.limits, MAX_LIMIT_PAUSE)
        cluster.health.limits += 1
        size = size if cluster.health.limit is None else min(size, cluster.health.limit.size)
        cluster.health.limit = Limit(max(1, size), now + pause, error)
        self._timers.add(cluster.health.limit.until, Deadline.LIMIT, cluster=name)
        self._ledger.mark_cluster_changed(name)

    def shorten_limit(self, name: ClusterName, now: float) -> None:
        """Lift a limit early after components on the cluster released nodes, but at most once per ``LIMIT_PAUSE``."""
        cluster = self._grid[name]
        if cluster.health.limit is None:
            return
        retry_at = max(now, cluster.health.limit_lifted_at + LIMIT_PAUSE)
        if retry_at < cluster.health.limit.until:
            cluster.health.limit = replace(cluster.health.limit, until=retry_at)
            self._timers.add(retry_at, Deadline.LIMIT, cluster=name)
            self._ledger.mark_cluster_changed(name)

    def lift_limit(self, name: ClusterName, due_at: float) -> None:
        """Lift a limit after its pause."""
        cluster = self._grid[name]
        if cluster.health.limit is not None and cluster.health.limit.until == due_at:
            cluster.health.limit, cluster.health.limit_lifted_at, cluster.nodes.capacity_gained = None, due_at, True
            self._ledger.mark_cluster_changed(name)

    def count_accepted(self, name: ClusterName) -> None:
        """Reset the pauses of limits after a resource manager has accepted a component."""
        cluster = self._grid[name]
        cluster.health.unknown_refusals.clear()
        if cluster.health.limit is None:
            cluster.health.limits = 0

    # Doubts: nodes that a cluster reports as idle but does not allocate do not count for a pause (docs/adr/0012)

    def record_failed_claim(
        self, cluster: ClusterName, token: Token, size: int, now: float, submitted_at: float, reason: str = ""
    ) -> None:
        """Record a component that got no nodes in time. If the nodes are still reported idle, doubt them.

        Doubted nodes count as unavailable for a pause. ``reason``: that of the resource manager.
        """
        status = self._grid[cluster]
        if not status.last_report.problem:
            status.health.evidence.record_failed(now)
        status.nodes.forget_promised_nodes(token)
        ahead = status.nodes.largest_queued(token, size)
        surplus, doubt = status.nodes.idle_reported_for(token) - (ahead - 1), status.health.doubt
        if surplus <= 0 or status.last_report.problem or not status.contact.connected:
            return  # the cluster does not report that the component could have started
        if doubt is not None:
            surplus, ahead = max(surplus, doubt.nodes), min(ahead, doubt.size)
        if doubt is None or submitted_at > doubt.since:
            pause = backoff_pause(DOUBT_PAUSE, status.health.evidence.consecutive_failures, MAX_DOUBT_PAUSE)
            status.health.evidence.consecutive_failures += 1
            nodes = status.nodes.classes.filter_of(token)
            status.health.doubt = Doubt(surplus, ahead, now, now + pause, filter=nodes, reason=reason)
            self._timers.add(now + pause, Deadline.DOUBT, cluster=cluster)
        else:  # one of several claims submitted before the first of them failed
            status.health.doubt = replace(doubt, nodes=surplus, size=ahead)
        self._ledger.mark_cluster_changed(cluster)

    def record_successful_claim(self, cluster: ClusterName, token: Token, size: int, waited: float, now: float) -> None:
        """Record a component that got its nodes ``waited`` seconds after its submission."""
        status = self._grid[cluster]
        status.health.evidence.record_started(waited, now)
        status.nodes.end_proof(token)
        if status.health.evidence.consecutive_failures and (
            status.health.doubt is None or size >= status.health.doubt.size
        ):
            status.health.doubt, status.health.evidence.consecutive_failures, status.nodes.capacity_gained = (
                None,
                0,
                True,
            )
            self._ledger.mark_cluster_changed(cluster)

    def retry_doubted_nodes(self, cluster: ClusterName, due_at: float) -> None:
        """Count nodes that are reported idle, but could not be allocated, as available again after their pause.

        Only one component at a time may try to get them, until one succeeds.
        """
        status = self._grid[cluster]
        if status.health.doubt is not None and status.health.doubt.until == due_at:
            status.health.doubt, status.nodes.capacity_gained = replace(status.health.doubt, is_tried=True), True
            self._ledger.mark_cluster_changed(cluster)
