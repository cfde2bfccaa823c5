"""The scheduler: events in, effects out, time as an argument. It knows no clock, no socket and no database.

A world (live, embedded, simulated) calls ``step`` with what happened and the time, writes the effects down, and then
sends the commands among them. It calls again at ``next_wakeup`` at the latest.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from koalapy.model.cluster import Drain
from koalapy.model.errors import ConflictError, NotFoundError, ProblemCode
from koalapy.model.job import Component, ComponentState, Job, JobState, Priority
from koalapy.model.reports import ClusterReport, ComponentStatus, Report
from koalapy.model.request import ClusterName
from koalapy.scheduler import events as ev
from koalapy.scheduler.advisor.knowledge import KnowledgeBuilder
from koalapy.scheduler.attempts.attempt_deadlines import AttemptDeadlines
from koalapy.scheduler.attempts.attempt_endings import AttemptEndings
from koalapy.scheduler.attempts.attempt_facts import is_program_over, walltime_ends
from koalapy.scheduler.attempts.attempts import Attempts
from koalapy.scheduler.attempts.clock_correction import corrected
from koalapy.scheduler.attempts.cluster_health import ClusterHealth
from koalapy.scheduler.attempts.components import Components
from koalapy.scheduler.attempts.confirmations import Confirmations
from koalapy.scheduler.attempts.contact import Contact
from koalapy.scheduler.attempts.failures import Failures
from koalapy.scheduler.attempts.refusals import Refusals
from koalapy.scheduler.claims.claiming import Claiming, Nonces
from koalapy.scheduler.claims.doubtful_nodes import DoubtfulNodes
from koalapy.scheduler.claims.reclaiming import MakingRoom
from koalapy.scheduler.claims.relocation import Relocation
from koalapy.scheduler.claims.transfers import Transfers
from koalapy.scheduler.cluster_status import ClusterStatus
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.ledger import live
from koalapy.scheduler.queries import Queries
from koalapy.scheduler.queue.budget import Clock
from koalapy.scheduler.queue.eligibility import Eligibility
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.queue.policy_evaluation import PolicyEvaluator
from koalapy.scheduler.queue.scan import Scanner
from koalapy.scheduler.state import SchedulerState
from koalapy.scheduler.timers import Deadline, Timer

MAX_FILES_GONE = 1000
"""Files that are nowhere and that nobody may want any more."""


class Scheduler:
    """One grid's scheduler: the parts that change its state, and the order in which they do."""

    def __init__(
        self, state: SchedulerState, nonces: Nonces, clock: Clock | None = None, *, keeps_effects: bool = True
    ) -> None:
        """``clock`` measures for how long a step has placed jobs: what is left after ``step_budget`` seconds goes into
        the next step, which is wanted at once; None for no such limit. ``keeps_effects``: whether its world keeps what
        it is told of unfinished jobs beyond the next step, as one that writes it down does; jobs are copied for that.
        """
        self._keeps_effects = keeps_effects
        self._state, self._grid, self._ledger, self._timers = state, state.grid, state.ledger, state.timers
        profiles = {cluster.name: cluster.profile for cluster in state.grid.clusters()}
        eligibility = Eligibility(profiles, state.accounts, state.sharing)
        self._queues = PlacementQueues(state, eligibility)
        self._knowledge = KnowledgeBuilder(state, self._queues)
        evaluator = PolicyEvaluator(state, eligibility, self._queues, self._knowledge)
        self._attempts = Attempts(state)
        self._health = ClusterHealth(state)
        self._doubtful_nodes = DoubtfulNodes(state)
        making_room = MakingRoom(state, self._queues.put_first)
        relocation = Relocation(state, eligibility, self._queues.reservation)
        self._claiming = Claiming(state, self._attempts, making_room, relocation, nonces)
        self._refusals = refusals = Refusals(state, self._attempts, self._health, self._queues, evaluator)
        failures = Failures(state, self._attempts, self._claiming, self._health, self._doubtful_nodes, refusals)
        self._transfers = Transfers(state, self._attempts, self._claiming, failures)
        self._components = Components(state, self._attempts, failures, self._health, self._doubtful_nodes)
        self._confirmations = Confirmations(state)
        self._contact = Contact(state, self._confirmations, self._components, self._health)
        self._deadlines = AttemptDeadlines(state, self._confirmations, self._attempts, self._claiming, failures)
        self._endings = AttemptEndings(state, self._attempts, self._health, self._queues)
        self._scanner = Scanner(
            state, self._queues, evaluator, making_room.preemption, self._claiming, self._endings, clock
        )
        self.queries = Queries(state, self._queues, self._scanner, evaluator)

    # What a world does with it

    def step(self, events: Sequence[ev.Event], now: float) -> Effects:
        """Take in what happened, decide what follows, and hand out everything that changed."""
        now = self._advance_clock(now)
        for event in events:
            self._take_in(event, now)
        self.decide(now)
        return self.take()

    def take(self) -> Effects:
        """Everything that changed since this was last called."""
        return self._ledger.take(share=self._keeps_effects)

    def tell_no_timelines(self) -> None:
        """Its world reads none: what it is told from now on is without."""
        self._ledger.tells_timelines = False

    def restore(self, jobs: Iterable[Job], now: float, scans: Mapping[Priority, int] | None = None) -> None:
        """Take up the jobs of an earlier life, and how often its queues had been scanned; clusters count as out of
        reach until they are heard of."""
        for job in sorted(jobs, key=lambda job: job.queue_seq):
            self._ledger.restore(job)
            if (after := corrected(job, now, self._state.rules.restart_pause_max)) != job:
                self._ledger.put(after)
        self._contact.began = now
        restored = list(self._ledger.jobs.values())
        self._queues.restore(restored, scans or {})
        for job in restored:
            self._refusals.restore_timers(job)
            if job.state.is_active:
                self._restore_attempt(job, now)
            elif job.retry_at is not None:
                self._endings.pause(job, job.retry_at)
        self._restore_nodes(now)
        for cluster in self._grid.clusters():
            self._lose_contact(cluster, now, now)
            if cluster.health.unusable:
                self._health.plan_probation(cluster.name, now)

    def next_wakeup(self) -> float | None:
        """When ``step`` must be called at the latest, even if nothing happens."""
        return self._state.now if self.is_unfinished else self._timers.next_at()

    @property
    def is_unfinished(self) -> bool:
        """Whether the last step had no time left for some who are to be tried."""
        return self._scanner.is_unfinished

    # Events

    def apply(self, event: ev.Event, now: float) -> None:
        """Take in one event; what follows from it is decided later, in ``decide``."""
        self._invalidate()
        self._take_in(event, self._advance_clock(now))

    def _take_in(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.Reported():  # as most are
                self._reported(event.cluster, event.report, now)
            case ev.JobSubmitted():
                job = event.job if event.job.submitted_at <= now else replace(event.job, submitted_at=now)
                self._ledger.note(job, now, "submitted", by=event.by)
                self._queues.arrive(job)
            case ev.JobCancelled():
                self._cancel(self._acted_on(event), event, now)
            case ev.JobHeld():
                job = self._queues.leave(self._acted_on(event))
                self._ledger.move(job, JobState.HELD, now, "held", event.reason, by=event.by)
            case ev.JobReleased():
                job = self._acted_on(event)
                self._queues.release(self._ledger.move(job, JobState.QUEUED, now, "released", by=event.by))
            case ev.JobPriorityChanged():
                self._change_priority(self._acted_on(event), event, now)
            case ev.ClusterConfirmed():
                self._confirmations.received(event.cluster, event.as_of)
            case ev.ClusterDisconnected():
                self._disconnect(event, now)
            case ev.AgentConnected():
                contact = self._grid[event.cluster].contact
                contact.has_agent, contact.agent_failed = True, ""
                self._ledger.cluster_changed(event.cluster)
            case ev.AgentFailed():
                self._grid[event.cluster].contact.agent_failed = event.reason
                self._ledger.cluster_changed(event.cluster)
            case ev.ClusterCleared():
                self._health.clear(event.cluster)
                self._refusals.forget_refusals(event.cluster)
                self._grid[event.cluster].capacity_gained = True
            case ev.ClusterDrained():
                if event.reason or self._grid[event.cluster].drained is None:
                    self._grid[event.cluster].drained = Drain(now, event.by, event.reason)
                    self._ledger.cluster_changed(event.cluster)
                if event.requeue:
                    self._requeue_all(event, now)
            case ev.ClusterResumed():
                cluster = self._grid[event.cluster]
                cluster.drained, cluster.capacity_gained = None, True
                self._ledger.cluster_changed(event.cluster)
            case ev.ClusterLost():
                for token in self._contact.declare_lost(event, now):
                    self._endings.settle(token, now)
                self._ledger.cluster_changed(event.cluster)
            case ev.InventoryReceived():
                self._inventory(event, now)
            case ev.ReplicasChanged():
                self._grid.set_replicas({event.file: event.sites})
                if self._grid.files_gone > MAX_FILES_GONE:
                    jobs = self._ledger.jobs.values()
                    self._grid.forget_files({file.name for job in jobs for file in job.spec.all_inputs})
            case ev.LinkMeasured():
                self._grid.set_link(event.one, event.other, event.link)
            case ev.PeriodicScan():
                self._scanner.scan_periodically()
            case _:
                assert_never(event)

    def decide(self, now: float) -> None:
        """Handle what is due and place what can be placed."""
        now = self._advance_clock(now)
        for timer in self._timers.due(now):
            self._deadline_passed(timer, now)
        self._invalidate()
        self._regroup_first_seen()
        self._knowledge.notes_waits = True
        self._scanner.place(now)
        self._knowledge.notes_waits = False
        self._invalidate()

    def _deadline_passed(self, timer: Timer, now: float) -> None:
        match timer.kind:
            case Deadline.UNREACHABLE | Deadline.LOST:
                for token in self._contact.is_overdue(timer, now):
                    self._endings.settle(token, now)
            case Deadline.PROBATION:
                self._health.begin_probation(timer.cluster, timer.at)
            case Deadline.LIMIT:
                self._health.lift_limit(timer.cluster, timer.at)
            case Deadline.REFUSAL:
                self._refusals.pause_is_over(timer.job)
            case Deadline.DOUBT:
                self._doubtful_nodes.pause_is_over(timer.cluster, timer.at)
            case Deadline.RETRY:
                self._endings.pause_is_over(timer.job, timer.at)
            case _:
                job = self._deadlines.passed(timer, now)
                if job is not None:
                    self._endings.settle_job(job, now)

    def _invalidate(self) -> None:
        """What was worked out for those who ask may no longer hold."""
        self._scanner.invalidate()
        self._knowledge.invalidate()

    def _advance_clock(self, now: float) -> float:
        """Time does not go back, whatever a clock does."""
        if now > self._state.now:
            self._contact.slept(now, self._state.now)
            self._state.now = now
        return self._state.now

    def _reported(self, cluster: ClusterName, report: Report, now: float) -> None:
        if isinstance(report, ClusterReport):
            self._report(self._grid[cluster], report, now)
            return
        if isinstance(report, ComponentStatus):
            job = self._components.update(cluster, report, now)
            if job is not None and job.ending is not None:
                self._endings.settle_job(job, now)
        else:
            self._transfers.update(cluster, report, now)
            self._endings.settle(report.token, now)

    def _report(self, cluster: ClusterStatus, report: ClusterReport, now: float) -> None:
        shown = report.total, report.problem, report.notices, report.lacks
        if shown != (cluster.total, cluster.problem, cluster.notices, cluster.lacks) or not cluster.reported:
            self._ledger.cluster_changed(cluster.name)
        doubt = cluster.doubt
        cluster.report(report, now)
        if cluster.doubt != doubt:
            self._ledger.cluster_changed(cluster.name)

    def _disconnect(self, event: ev.ClusterDisconnected, now: float) -> None:
        cluster = self._grid[event.cluster]
        contact = cluster.contact
        if contact.has_agent or contact.connected or cluster.problem:
            contact.has_agent, contact.disconnected_because = False, event.reason
            self._ledger.cluster_changed(cluster.name)
        if contact.connected or cluster.problem:
            cluster.problem = ""
            self._lose_contact(cluster, now if event.heard is None else min(event.heard, now), now)

    def _lose_contact(self, cluster: ClusterStatus, heard: float, now: float) -> None:
        """Nothing is placed on a cluster that is not connected; its components count as unknown a little later."""
        self._contact.lost(cluster, heard, now)
        self._ledger.cluster_changed(cluster.name)

    def _inventory(self, event: ev.InventoryReceived, now: float) -> None:
        cluster = self._grid[event.cluster]
        self._contact.made(cluster, now)
        cluster.contact.agent_failed = ""
        cluster.capacity_gained = True
        self._ledger.cluster_changed(cluster.name)
        with self._health.one_event(cluster.name):
            for token in self._components.reconcile(event, now):
                self._endings.settle(token, now)
            self._transfers.reconcile(event, now)
        for stage in event.inventory.stages:
            self._endings.settle(stage.token, now)

    def _acted_on(self, event: ev.JobCancelled | ev.JobHeld | ev.JobReleased | ev.JobPriorityChanged) -> Job:
        """The job an action is for; ``NotFoundError`` or ``ConflictError`` when the action is not possible now."""
        job = self._ledger.get(event.job)
        if job is None:
            raise NotFoundError(
                f"there is no unfinished job {event.job}", field="job", value=event.job, code=ProblemCode.JOB_NOT_FOUND
            )
        if isinstance(event, ev.JobHeld) and job.state is not JobState.QUEUED:
            raise ConflictError(f"job {job.id} is {job.state}: only queued jobs can be held", hint="cancel it instead")
        if isinstance(event, ev.JobReleased) and job.state is not JobState.HELD:
            raise ConflictError(f"job {job.id} is {job.state}: only held jobs can be released")
        if isinstance(event, ev.JobPriorityChanged) and not job.state.waits:
            raise ConflictError(f"job {job.id} is {job.state}: only jobs that wait can be given another priority")
        return job

    def _change_priority(self, job: Job, event: ev.JobPriorityChanged, now: float) -> None:
        """Nothing happens where it has that priority already."""
        before = job.spec.priority
        if before is not event.priority:
            told = f"{before} to {event.priority}" + (f": {event.reason}" if event.reason else "")
            self._ledger.note(self._queues.change_priority(job, event.priority), now, "priority", told, by=event.by)

    def _cancel(self, job: Job, event: ev.JobCancelled, now: float) -> None:
        if job.state.is_active:
            if job.ending is None or job.ending is JobState.QUEUED:
                ending = self._attempts.end(job, JobState.CANCELLED, event.reason, now, by=event.by, warn=event.warn)
                self._endings.settle_job(ending, now)
            elif job.ending is JobState.CANCELLED and not event.warn:
                self._attempts.end_grace(job)
            return
        if job.state is JobState.QUEUED:
            job = self._queues.leave(job)
        self._ledger.move(job, JobState.CANCELLED, now, "cancelled", event.reason, by=event.by, ended_at=now)

    def _requeue_all(self, order: ev.ClusterDrained, now: float) -> None:
        """Every job that has nodes on a cluster leaves all of its own, and returns to its queue; it is no restart."""
        reason = f"drained: {order.cluster}" + (f": {order.reason}" if order.reason else " is to be empty")
        for token in list(self._grid[order.cluster].live):
            found = self._ledger.find(token)
            if found is None or found[1].superseded or found[0].ending is not None:
                continue
            if not is_program_over(found[0], self._grid):
                job = self._attempts.end(found[0], JobState.QUEUED, reason, now, by=order.by, warn=True)
                self._endings.settle_job(job, now)

    def _regroup_first_seen(self) -> None:
        """Waiting jobs of an application that has become known are no longer refused with those of unknown ones."""
        if first_seen := self._state.experience.take_first_seen():
            self._queues.regroup(first_seen)

    def _restore_nodes(self, now: float) -> None:
        """Who has nodes, or is promised some: first those that are leaving, whose nodes others may be promised."""
        held: list[tuple[Job, Component]] = []
        for job in (job for job in self._ledger.jobs.values() if job.state.is_active):
            for component in live(job).components:
                cluster, token = self._grid[component.cluster], job.token(component.index)
                if component.state is ComponentState.DELIVERING:
                    cluster.deliver(token)
                elif component.state is ComponentState.STOPPING:
                    cluster.promise(token, component.size, component.node_class)
                    self._attempts.leave_after_grace(job, component)
                elif component.state not in (ComponentState.PLACED, ComponentState.ENDED):
                    held.append((job, component))
        for job, component in held:
            self._attempts.promise(job, component, now)
            if component.warned_at is not None:
                self._attempts.leave_after_grace(job, component)

    def _restore_attempt(self, job: Job, now: float) -> None:
        attempt = live(job)
        patience = now + self._state.rules.barrier_timeout
        if job.ending is not None:
            self._attempts.set_deadline(job, Deadline.STOP, patience)
        elif attempt.barrier_at is None:
            self._claiming.restore(job, now)
        elif attempt.launched_at is None:
            self._attempts.set_deadline(job, Deadline.LAUNCH, patience)
        elif (end := walltime_ends(job)) is not None:
            self._attempts.set_deadline(job, Deadline.WALLTIME, end)
