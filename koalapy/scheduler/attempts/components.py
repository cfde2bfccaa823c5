"""Apply the component reports of clusters to their jobs."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from koalapy.model.cluster import pair_of, relayed_text
from koalapy.model.job import Component, ComponentState, Job, JobState, Token
from koalapy.model.reports import ComponentStatus
from koalapy.model.request import ClusterName
from koalapy.model.wording import describe_exit, format_time
from koalapy.scheduler.attempts.attempts import Attempts
from koalapy.scheduler.attempts.facts import (
    INFRASTRUCTURE_FAILURE,
    derived_state,
    is_launched,
    program_result,
    reporting_components,
    unknown_reason,
)
from koalapy.scheduler.attempts.failures import Failures
from koalapy.scheduler.attempts.health import ClusterHealth
from koalapy.scheduler.attempts.link_paths import LinkPaths
from koalapy.scheduler.effects import MAX_STRAYS, AttemptFailure, ForgetComponent, StopComponent
from koalapy.scheduler.events import InventoryReceived
from koalapy.scheduler.ledger import live
from koalapy.scheduler.state import SchedulerState

BEFORE_BARRIER = (ComponentState.SUBMITTED, ComponentState.WAITING)
NOT_THERE = (ComponentState.PLACED, ComponentState.ENDED)
"""States in which no cluster holds resources of a component, even if a report differs."""
ALL_THERE = (ComponentState.CLAIMED, ComponentState.RUNNING)
BEFORE_PROGRAM = (ComponentState.WAITING, ComponentState.CLAIMED)


class Components:
    """The handler of component reports. A report may arrive twice, late, or for an attempt that has ended."""

    def __init__(
        self,
        state: SchedulerState,
        attempts: Attempts,
        failures: Failures,
        health: ClusterHealth,
        link_paths: LinkPaths,
    ) -> None:
        self._ledger, self._grid, self._lrm_waits = state.ledger, state.grid, state.lrm_waits
        self._attempts, self._failures, self._health, self._link_paths = attempts, failures, health, link_paths
        self._strays: dict[ClusterName, set[Token]] = defaultdict(set)
        """Components of no live attempt that were stopped and have not ended yet."""

    def update(self, cluster: ClusterName, status: ComponentStatus, now: float) -> Job | None:
        """Apply a component's report and return its job, None if it has none. Ignore components that were not submitted
        yet."""
        if status.token in self._ledger.unsent_submits:
            return None
        if status.over and status.token in self._grid[cluster].nodes.live:
            self._grid[cluster].nodes.exited.add(status.token)
        match = self._ledger.find(status.token)
        if match is None or match[1].state in NOT_THERE or match[1].cluster != cluster:
            self._reject_stray(cluster, status)
            return match and match[0]
        job, component = match
        if status.results_lost and (not job.spec.collect or live(job).barrier_at is None):
            status = replace(status, results_lost=False)  # it had no files to send
        job = self._record_details(job, component, status, now)
        component = live(job).components[component.index]
        if status.relayed:
            job = self._record_relayed_links(job, component.cluster, status, now)
        job = self._advance_component(job, component, status, now)
        has_nodes = component.claimed_at is not None and not component.has_ended
        if status.state is ComponentState.DELIVERING:
            job = self._attempts.mark_delivering(job, live(job).components[component.index], now, status.missing)
        elif status.state is ComponentState.ENDED:
            job = self._attempts.mark_ended(job, live(job).components[component.index], now, status.missing)
        job = self._record_wait(job, live(job).components[component.index], status, now)
        if has_nodes and status.state in (ComponentState.DELIVERING, ComponentState.ENDED):
            self._health.shorten_limit(cluster, now)
        job = self._apply_to_job(job, component.index, status, now)
        return self._attempts.open_barrier_if_complete(job, now)

    def _record_wait(self, job: Job, component: Component, status: ComponentStatus, now: float) -> Job:
        """Record why a component waits for its nodes or is suspended; forget it once neither is the case."""
        waits = component.state in BEFORE_BARRIER
        if not waits:
            self._lrm_waits.forget(status.token)
            if status.state not in (ComponentState.CLAIMED, ComponentState.RUNNING) or not status.pending:
                return job
        limit = self._grid[component.cluster].profile.node_start_limit
        if not self._lrm_waits.update(status, limit, now) or not waits or job.state is not JobState.CLAIMING:
            return job
        reason = f"{component.cluster} has started its nodes"
        if status.starting:
            up_by = format_time(self._lrm_waits.up_by(status.token) or now, now, exact=True)
            reason = f"waits for {component.cluster} to start its nodes, until {up_by} UTC at most"
        return self._ledger.change_job(job, reason=reason)

    def _record_relayed_links(self, job: Job, cluster: ClusterName, status: ComponentStatus, now: float) -> Job:
        """Record which links of an attempt go over relays, by the report of a cluster."""
        recorded = live(job).relayed
        clusters = {component.cluster for component in live(job).gang}
        pairs = sorted({pair_of(*pair) for pair in status.relayed if clusters.issuperset(pair) and pair[0] != pair[1]})
        if live(job).barrier_at is None or not (new := [pair for pair in pairs if pair not in recorded]):
            return job
        unreached = new if status.unreached is None else sorted({pair_of(*pair) for pair in status.unreached} & {*new})
        ignored = self._link_paths.learn_from_report(job, cluster, unreached, now)
        job = self._ledger.change_attempt(job, relayed=tuple(sorted({*recorded, *new})))
        text = relayed_text(new)
        if ignored:
            text += f", as {cluster} reports; other jobs try links of other sites directly"
        self._ledger.record_event(job, now, "relayed", text)
        return job

    def reconcile(self, event: InventoryReceived, now: float) -> Iterator[Token]:
        """Compare an inventory with the jobs; yield the tokens of jobs that may have to be settled."""
        reported = {status.token for status in event.inventory.components}
        # An event before this one in the same step may have led to submits, which are in no outbox yet.
        undelivered = event.undelivered | self._ledger.unsent_submits
        if event.inventory.whole:
            self._strays.pop(event.cluster, None)
        for status in event.inventory.components:
            self.update(event.cluster, status, now)
            yield status.token
        for token in self._grid[event.cluster].nodes.awaited_components:
            if token in reported:
                continue
            if token in undelivered:
                if (match := self._ledger.find(token)) is not None and match[1].unknown_since is not None:
                    job = self._ledger.update_component(match[0], match[1].index, unknown_since=None, lost_at=None)
                    self._update_unknown_state(job, now, f"{match[1].cluster} is back")
            elif event.inventory.whole:
                self.mark_lost(token, "the cluster knows nothing of it", now)
            yield token

    def mark_lost(self, token: Token, error: str, now: float, lost_at: float | None = None) -> None:
        """Mark a component as gone: its cluster will not report it again.

        ``lost_at``: when it has certainly ended, since its lease or walltime is over.
        """
        self._lrm_waits.forget(token)
        if (match := self._ledger.find(token)) is None:
            return
        job, component = match
        delivers = component.state is ComponentState.DELIVERING
        self._attempts.note_lost_output(job, component, error, now)
        if not delivers:
            since = now if component.unknown_since is None else component.unknown_since
            job = self._ledger.update_component(job, component.index, unknown_since=since, lost_at=lost_at)
        job = self._attempts.mark_ended(job, component, now)
        if job.ending is None and not component.superseded and not delivers:
            self._failures.handle_infrastructure_failure(job, component, AttemptFailure.LOST, error, now)

    def mark_unknown(self, token: Token, last_heard: float, lost_at: float | None, now: float) -> None:
        """Mark a component on an unreachable cluster: it may still run, and has certainly ended at ``lost_at``."""
        if (match := self._ledger.find(token)) is None:
            return
        job, component = match
        is_news = component.unknown_since is None
        if not is_news and component.lost_at == lost_at:
            return
        since = last_heard if component.unknown_since is None else component.unknown_since
        job = self._ledger.update_component(job, component.index, unknown_since=since, lost_at=lost_at)
        if job.ending is None and derived_state(job) is JobState.UNKNOWN:
            reason = unknown_reason(job, now)
            if job.state is JobState.UNKNOWN:
                self._ledger.change_job(job, reason=reason)
            else:
                self._ledger.change_state(job, JobState.UNKNOWN, now, str(JobState.UNKNOWN), reason)

    def _record_details(self, job: Job, component: Component, status: ComponentStatus, now: float) -> Job:
        """Store the details of a report other than the state: hosts, LRM job, exit code, error."""
        changes: dict[str, Any] = {}
        if len(status.hosts) == component.size and status.hosts != component.hosts:
            changes["hosts"] = status.hosts
        if status.lrm_job is not None and status.lrm_job != component.lrm_job:
            changes["lrm_job"] = status.lrm_job
        if status.program_exit is not None and component.exit_code is None:
            changes["exit_code"] = status.program_exit
        if status.results_lost and component.exit_code is not None:
            changes["exit_code"] = None
        if status.error and (not component.error or status.results_lost) and status.error != component.error:
            changes["error"], changes["infrastructure"] = status.error, status.infrastructure
        if (use := status.use) is not None and use.nodes > component.measured_nodes:
            changes["measured_nodes"], changes["peak_memory"] = use.nodes, use.peak_memory
            changes["cpu_time"], changes["cpu_available"] = use.cpu_time, use.cpu_available
        if status.lease != component.lease:
            changes["lease"] = status.lease
        if component.unknown_since is not None:
            changes["unknown_since"] = changes["lost_at"] = None
        if changes:
            job = self._ledger.update_component(job, component.index, **changes)
        if status.warned:
            job = self._attempts.mark_warned(job, live(job).components[component.index], now)
        if job.state is JobState.UNKNOWN:
            return self._update_unknown_state(job, now, f"{component.cluster} is back")
        return job

    def _update_unknown_state(self, job: Job, now: float, reason: str) -> Job:
        """Update the job's state after a component became unreachable or reachable."""
        state = derived_state(job)
        if job.ending is None and JobState.UNKNOWN in (state, job.state) and state is not job.state:
            return self._ledger.change_state(job, state, now, str(state), reason)
        return job

    def _advance_component(self, job: Job, component: Component, status: ComponentStatus, now: float) -> Job:
        """Move the component to the reported state, never to an earlier one."""
        if component.state in (ComponentState.STOPPING, ComponentState.DELIVERING):
            return job
        if status.state in (ComponentState.WAITING, ComponentState.CLAIMED) and not status.error:
            self._health.count_accepted(component.cluster)
        if status.state is ComponentState.WAITING and component.state is ComponentState.SUBMITTED:
            return self._attempts.mark_waiting(job, component, now)
        # The plan of the gang needs the hosts of all nodes: each node that has reported has one.
        all_reported = len(component.hosts) == component.size
        if status.state in ALL_THERE and component.state in BEFORE_BARRIER and all_reported:
            job = self._attempts.mark_claimed(job, component, now)
            waited = now - (component.submitted_at or now)
            self._health.record_successful_claim(component.cluster, status.token, component.size, waited, now)
        if status.state is ComponentState.RUNNING:
            job = self._ledger.update_component(job, component.index, state=ComponentState.RUNNING)
        return job

    def _apply_to_job(self, job: Job, index: int, status: ComponentStatus, now: float) -> Job:
        """Derive from a report whether the job has launched, succeeded, failed, or must be retried."""
        component = live(job).components[index]
        if component.superseded:
            return job
        if status.refused and job.ending is None:
            refused = status.refused, status.refused_sizes
            return self._failures.handle_refusal(job, component, *refused, status.error, now)
        if status.exceeded and job.ending in (None, JobState.QUEUED, JobState.FAILED):
            return self._failures.handle_exceeded_limit(job, component, status.error, now)
        # An infrastructure failure also overrides a failed program that it may have caused, until that is settled.
        may_be_blamed = job.ending is None or (job.ending is JobState.FAILED and live(job).exit_code is not None)
        failure, result = AttemptFailure.CLUSTER, program_result(job)
        if status.results_lost:  # after the end of the program; without its exit code, this one waits for the head
            knows_code = job.ending is None and component in reporting_components(job)
            may_be_blamed, failure = knows_code or job.ending is JobState.SUCCEEDED, AttemptFailure.RESULTS
        if status.infrastructure and may_be_blamed:
            return self._failures.handle_infrastructure_failure(
                job, component, failure, status.error, now, is_elsewhere=status.relay_lost or status.results_lost
            )
        may_be_over = job.ending in (JobState.QUEUED, JobState.FAILED) and live(job).exit_code is None
        has_failed = may_be_over and job.reason.startswith(INFRASTRUCTURE_FAILURE)
        if result == 0 and has_failed and 0 not in job.spec.retry_on_exit:
            # The program had ended before it could be stopped, as after the loss of a relay that it needed no more.
            # A preempted program may end with 0 after it has saved its work.
            return self._attempts.end_attempt(job, JobState.SUCCEEDED, "", now, exit_code=0)
        if job.ending is not None or (status.state in BEFORE_PROGRAM and status.program_exit is None):
            return job
        if live(job).launched_at is None and is_launched(job):
            job = self._attempts.mark_launched(job, now)
            self._link_paths.learn_from_launch(job)
            for launched in live(job).gang:
                self._failures.end_cluster_probation(launched.cluster)
        if result in job.spec.retry_on_exit:
            return self._failures.restart_job(job, _exit_reason(result, status.error), now, exit_code=result)
        if result == 0 and (loser := next((c for c in live(job).gang if c.infrastructure), None)):
            return self._failures.handle_infrastructure_failure(
                job, loser, AttemptFailure.RESULTS, loser.error, now, is_elsewhere=True
            )
        if result is not None:
            ends = JobState.FAILED if result else JobState.SUCCEEDED
            return self._attempts.end_attempt(job, ends, _exit_reason(result, status.error), now, exit_code=result)
        lacks_exit_code = any(c.has_ended and c.exit_code is None for c in reporting_components(job))
        is_given_back = status.state in (ComponentState.DELIVERING, ComponentState.ENDED)
        if is_given_back and (live(job).barrier_at is None or lacks_exit_code):
            error = status.error or "its nodes were given back before the program had ended"
            return self._failures.handle_infrastructure_failure(job, component, AttemptFailure.ENDED_EARLY, error, now)
        return job

    def _reject_stray(self, cluster: ClusterName, status: ComponentStatus) -> None:
        """Stop a component of an old generation; forget it once it has ended."""
        self._lrm_waits.forget(status.token)
        if status.state is ComponentState.DELIVERING:
            return
        if status.state is ComponentState.ENDED:
            self._strays[cluster].discard(status.token)
            self._ledger.send_command(ForgetComponent(cluster, status.token))
        elif status.token not in (strays := self._strays[cluster]) and len(strays) < MAX_STRAYS:
            # Stop it only once: the agent responds to each stop with a status, which would cause another stop.
            strays.add(status.token)
            self._ledger.send_command(StopComponent(cluster, status.token, "not of a live attempt", stray=True))


def _exit_reason(code: int | None, error: str) -> str:
    if not code:
        return ""
    return f"the program {describe_exit(code)}" + (f": {error}" if error else "")
