"""Apply events to jobs and clusters. Consequences for other jobs follow later in the cycle."""

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from koalapy.model.array import format_task
from koalapy.model.errors import ConflictError, NotFoundError, ProblemCode
from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import describe_changes
from koalapy.model.reports import ClusterReport, ComponentStatus, Report
from koalapy.model.request import ClusterName
from koalapy.model.reservation import Reservation
from koalapy.scheduler import events as ev
from koalapy.scheduler.arrays import single
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.parts import Parts

MAX_MISSING_FILES = 1000
"""Number of stored files without a replica after which those that no job needs are removed."""


class EventHandler:
    """The dispatcher of events to the components of the scheduler that handle them."""

    def __init__(self, parts: Parts) -> None:
        self._state = state = parts.state
        self._grid, self._ledger, self._reservations = state.grid, state.ledger, state.reservations
        self._queues, self._candidates = parts.queues, parts.candidates
        self._attempts, self._components = parts.attempts, parts.components
        self._transfers, self._confirmations = parts.transfers, parts.confirmations
        self._contact, self._health, self._failures = parts.contact, parts.health, parts.failures
        self._arrays, self._conditions = parts.arrays, parts.conditions
        self._link_paths, self._drains = parts.link_paths, parts.drains

    def apply(self, event: ev.Event, now: float) -> None:
        """Apply one event. Raise ``NotFoundError`` or ``ConflictError`` for an action that is not possible now."""
        match event:
            case ev.Reported():  # the most frequent events
                self._apply_report(event.cluster, event.report, now)
            case ev.JobSubmitted():
                job = event.job if event.job.submitted_at <= now else replace(event.job, submitted_at=now)
                self._conditions.admit(job, now)
                self._ledger.record_event(job, now, "submitted", by=event.by)
                self._arrays.add(job)
            case ev.JobCancelled():
                if (pending := self._arrays.find_pending(event.job)) is not None:
                    event = replace(event, job=pending[0].id, tasks=single(pending[1]))
                job = self._job_of(event)
                if job.tasks is not None:
                    self._arrays.cancel(job, event, now)
                elif event.tasks is not None:
                    raise ConflictError(f"job {job.id} is not an array", field="tasks", value=str(event.tasks))
                else:
                    self._attempts.cancel(job, event.reason, now, by=event.by, warn=event.warn)
            case ev.JobHeld():
                job = self._queues.remove(self._job_of(event))
                self._ledger.change_state(job, JobState.HELD, now, "held", event.reason, by=event.by)
            case ev.JobReleased():
                job = self._ledger.change_state(self._job_of(event), JobState.QUEUED, now, "released", by=event.by)
                self._conditions.release(job, now)
            case ev.JobChanged():
                job = self._job_of(event)
                changes = describe_changes(job.spec, event.spec)
                job = self._queues.change(job, event.spec)
                if changes:
                    text = changes + (f": {event.reason}" if event.reason else "")
                    self._ledger.record_event(job, now, "changed", text, by=event.by)
            case ev.ClusterConfirmed():
                self._confirmations.record_confirmation(event.cluster, event.as_of)
            case ev.ClusterDisconnected():
                self._contact.disconnect(self._grid[event.cluster], event.reason, event.heard, now)
            case ev.AgentConnected():
                contact = self._grid[event.cluster].contact
                contact.has_agent, contact.agent_failed = True, ""
                self._ledger.mark_cluster_changed(event.cluster)
            case ev.AgentFailed():
                self._grid[event.cluster].contact.agent_failed = event.reason
                self._ledger.mark_cluster_changed(event.cluster)
            case ev.ClusterCleared():
                self._health.clear_errors(event.cluster)
                self._failures.forget_refusals(event.cluster)
                self._grid[event.cluster].nodes.capacity_gained = True
            case ev.ClusterDrained():
                self._drains.add(event, now)
            case ev.ClusterResumed():
                self._drains.remove(event, now)
            case ev.ClusterLost():
                for token in self._contact.declare_lost(event, now):
                    self._attempts.settle_job_of(token, now)
                self._ledger.mark_cluster_changed(event.cluster)
            case ev.InventoryReceived():
                self._apply_inventory(event, now)
            case ev.ReplicasChanged():
                self._grid.set_replicas({event.file: event.sites})
                if self._grid.missing_files > MAX_MISSING_FILES:
                    jobs = self._ledger.jobs.values()
                    self._grid.forget_files({file.name for job in jobs for file in job.spec.all_inputs})
            case ev.LinkMeasured():
                self._link_paths.apply_measurement(event, now)
                self._open_barriers((event.one, event.other), now)
            case ev.RelayChanged():
                self._grid.set_relay(event.cluster, is_ready=event.is_ready, relayed_only=event.relayed_only)
                self._open_barriers((event.cluster,) if event.is_ready else (), now)
            case ev.ReservationChanged():
                self._apply_reservation(event.reservation, now)
            case ev.WeightChanged():
                if (shares := self._state.owner_use.shares) is not None:
                    shares.set_weight(event.user, event.weight)
            case ev.PeriodicScan():
                self._candidates.plan_periodic_scan()
            case _:
                assert_never(event)

    def _apply_reservation(self, reservation: Reservation, now: float) -> None:
        """Keep the nodes of a new reservation, or release those of one that has ended and fail the jobs that wait."""
        self._state.store_reservation(reservation)
        for part in (part for part in reservation.parts if part.cluster in self._grid):
            self._ledger.mark_cluster_changed(part.cluster)
        if self._reservations.get(reservation.name) is None:
            self._conditions.end_reservation(reservation.name, reservation.reason, now)

    def _open_barriers(self, clusters: Iterable[ClusterName], now: float) -> None:
        """Open the barriers of jobs on some clusters that were only waiting for a path between them."""
        for token in [token for name in clusters if name in self._grid for token in self._grid[name].nodes.live]:
            if (match := self._ledger.find(token)) is not None:
                self._attempts.open_barrier_if_complete(match[0], now)

    def _apply_report(self, cluster: ClusterName, report: Report, now: float) -> None:
        """Apply an agent's report about its cluster, a component or a file transfer.

        If a job was only waiting for this before its next state, it changes its state.
        """
        if isinstance(report, ClusterReport):
            self._apply_cluster_report(self._grid[cluster], report, now)
        elif isinstance(report, ComponentStatus):
            job = self._components.update(cluster, report, now)
            if job is not None and job.ending is not None:
                self._attempts.settle_job(job, now)
        else:
            self._transfers.update(cluster, report, now)
            self._attempts.settle_job_of(report.token, now)

    def _apply_cluster_report(self, cluster: ClusterStatus, report: ClusterReport, now: float) -> None:
        """Store a cluster's report about its nodes. Mark the cluster as changed if more than their use differs."""
        reported = report.total, report.problem, report.notices, report.lacks, report.reservations
        previous = (
            cluster.last_report.total,
            cluster.last_report.problem,
            cluster.last_report.notices,
            cluster.last_report.lacks,
            cluster.last_report.reservations,
        )
        if reported != previous or not cluster.nodes.reported:
            self._ledger.mark_cluster_changed(cluster.name)
        doubt = cluster.health.doubt
        cluster.report(report, now)
        if cluster.health.doubt != doubt:
            self._ledger.mark_cluster_changed(cluster.name)

    def _apply_inventory(self, event: ev.InventoryReceived, now: float) -> None:
        """Mark a cluster as connected, and compare what its agent found with the recorded components and transfers."""
        cluster = self._grid[event.cluster]
        self._contact.mark_connected(cluster, now)
        cluster.contact.agent_failed = ""
        cluster.nodes.capacity_gained = True
        self._ledger.mark_cluster_changed(cluster.name)
        with self._health.group_errors(cluster.name):
            for token in self._components.reconcile(event, now):
                self._attempts.settle_job_of(token, now)
            self._transfers.reconcile(event, now)
        for stage in event.inventory.stages:
            self._attempts.settle_job_of(stage.token, now)

    def _job_of(self, event: ev.JobCancelled | ev.JobHeld | ev.JobReleased | ev.JobChanged) -> Job:
        """Return the job of an action. Raise ``NotFoundError`` or ``ConflictError`` if it is not possible now."""
        job = self._ledger.get(event.job)
        if job is None and (pending := self._arrays.find_pending(event.job)) is not None:
            array, index = pending
            raise ConflictError(
                f"task {format_task(array.id, index)} was not started", hint=f"hold, release or change array {array.id}"
            )
        if job is None:
            raise NotFoundError(
                f"there is no unfinished job {event.job}", field="job", value=event.job, code=ProblemCode.JOB_NOT_FOUND
            )
        if isinstance(event, ev.JobHeld) and job.state is not JobState.QUEUED:
            raise ConflictError(f"job {job.id} is {job.state}: only queued jobs can be held", hint="cancel it instead")
        if isinstance(event, ev.JobReleased) and job.state is not JobState.HELD:
            raise ConflictError(f"job {job.id} is {job.state}: only held jobs can be released")
        if isinstance(event, ev.JobChanged) and not job.state.is_waiting:
            raise ConflictError(f"job {job.id} is {job.state}: only jobs that wait can be changed")
        return job
