"""The scheduler: events in, effects out, time as an argument. It knows no clock, no socket and no database.

A world (live, embedded, simulated) calls ``step`` with what happened and the time, writes the effects down, and then
sends the commands among them. It calls again at ``next_wakeup`` at the latest.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import assert_never

from koalapy.model.advice import advised
from koalapy.model.application import application_of
from koalapy.model.cluster import Drain, GridView
from koalapy.model.errors import BusyError, ConflictError, NotFoundError
from koalapy.model.job import Component, ComponentState, Job, JobId, JobSpec, JobState, Priority, Token
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import Request
from koalapy.model.wording import nodes
from koalapy.placement.registry import Registry
from koalapy.scheduling import events as ev
from koalapy.scheduling import staging
from koalapy.scheduling.advising import Advising
from koalapy.scheduling.asking import Asking
from koalapy.scheduling.claiming import Claiming, Nonces
from koalapy.scheduling.commands import Effects
from koalapy.scheduling.components import Components
from koalapy.scheduling.earlier import as_of
from koalapy.scheduling.experience import Experience
from koalapy.scheduling.faults import Faults
from koalapy.scheduling.grid import ClusterBook, GridBook, Links
from koalapy.scheduling.ledger import Ledger, live
from koalapy.scheduling.news import News
from koalapy.scheduling.placing import Placer
from koalapy.scheduling.relocation import Relocation
from koalapy.scheduling.rules import Rules
from koalapy.scheduling.timers import Deadline, Timer, Timers
from koalapy.scheduling.transfers import Transfers
from koalapy.scheduling.waiting import Waiting

RESULT_PAUSE = 5.0
"""Seconds until it is looked again whether the exit code of a program is there that has ended."""


class Scheduler:
    """One grid's scheduler. All state lives here or in what ``restore`` is given."""

    def __init__(
        self, rules: Rules, policies: Registry, clusters: Iterable[ClusterBook], links: Links | None = None,
        experience: Experience | None = None, *, nonces: Nonces,
    ) -> None:  # fmt: skip
        self.rules = rules
        self.policies = policies
        self.grid = GridBook(clusters, links)
        self._latest = 0.0
        self._ledger = Ledger()
        self._timers = Timers()
        placer = Placer({book.name: book.profile for book in self.grid.books()})
        self._claiming = Claiming(rules, self._ledger, self.grid, self._timers, Relocation(placer, policies), nonces)
        self._faults = Faults(rules, self._ledger, self.grid, self._timers, self._claiming)
        self._components = Components(self._ledger, self.grid, self._claiming, self._faults)
        self._news = News(rules, self._ledger, self.grid, self._timers)
        self._transfers = Transfers(self._ledger, self._claiming, self._faults)
        self.experience = experience or Experience({book.name: book.speed for book in self.grid.books()})
        self._met: set[str] = set()
        """Applications of which the first run was seen in this step."""
        self._advising = Advising(self.experience, self._ledger, self.grid, self._requests, lambda: self._latest)
        self._asking = Asking(policies, placer, self.grid, self._requests, self._ledger.warn, self._advising)
        room = self._claiming.preemption.room
        self._waiting = Waiting(rules, self._ledger, self.grid, self._asking, room, self._begin)

    # What a world does with it

    def step(self, events: Sequence[ev.Event], now: float) -> Effects:
        """Take in what happened, decide what follows, and hand out everything that changed."""
        for event in events:
            self.apply(event, now)
        self.decide(now)
        return self.take()

    def take(self) -> Effects:
        """Everything that changed since this was last called."""
        return self._ledger.take()

    def restore(self, jobs: Iterable[Job], now: float) -> None:
        """Take up the jobs of an earlier life; clusters count as out of reach until they are heard of."""
        for job in sorted(jobs, key=lambda j: j.queue_seq):
            self._ledger.jobs[job.id] = job
            if (told := as_of(job, now, self.rules.restart_pause_max)) != job:
                job = self._ledger.put(told)
            self._waiting.restore(job)
            if job.state.is_active:
                self._restore_attempt(job, now)
            elif job.retry_at is not None:
                self._pause(job, job.retry_at)
        for book in self.grid.books():
            self._lose_contact(book, now, now)
            if book.unusable:
                self._faults.plan_probation(book.name, now)

    def next_wakeup(self) -> float | None:
        """When ``step`` must be called at the latest, even if nothing happens."""
        return self._timers.next_at()

    # What it knows, for those who ask

    def job(self, job: JobId) -> Job | None:
        """A job that is not final, as it stands."""
        return self._ledger.get(job)

    def find(self, token: Token) -> tuple[Job, Component] | None:
        """The component of a live attempt that a token names, and its job."""
        return self._ledger.find(token)

    def find_staged(self, token: Token) -> tuple[Job, Component] | None:
        """The component of a live attempt whose stage a token names, and its job."""
        return self._ledger.find_staged(token)

    def jobs(self) -> list[Job]:
        """All jobs that are not final."""
        return list(self._ledger.jobs.values())

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def reservation(self) -> JobId | None:
        """The job that has failed so many scans that nodes are kept for it."""
        return self._waiting.reservation

    def view(self, priority: Priority) -> GridView:
        """The grid as a job of that priority would be placed on it now."""
        return self._waiting.view(priority)

    def view_with_preemption(self) -> GridView:
        """The grid as it would be if low-priority jobs made room for one of high priority."""
        return self._waiting.view_with_preemption()

    def ask(self, spec: JobSpec, view: GridView) -> Placement | Refusal:
        """What the job's policy answers on a view."""
        return self._asking.ask(spec, view)

    def reasons(self, spec: JobSpec, view: GridView) -> tuple[ClusterReason, ...]:
        """Cluster by cluster, why the job is not placed on a view; empty when it would be."""
        return self._asking.reasons(spec, view)

    def position(self, job: JobId) -> int | None:
        """A queued job's place in its queue, counted from 1."""
        known = self._ledger.get(job)
        return self._waiting.position(known) if known else None

    def tries(self, job: JobId) -> int:
        """How often an unfinished job was tried to be placed, scans that passed it over among them."""
        known = self._ledger.get(job)
        if known is None:
            raise NotFoundError(f"there is no unfinished job {job}", field="job", value=job)
        return self._waiting.tries(known)

    def waiting_reason(self, job: Job) -> str:
        """Why a queued job is not placed."""
        return self._waiting.reason(job)

    def admit(self) -> None:
        """Refuse a submission while the placement queues are full; nothing is kept of it."""
        if self.queued >= self.rules.placement_queue_limit:
            raise BusyError(
                f"{self.queued} jobs wait already, and placement_queue_limit is {self.rules.placement_queue_limit}",
                retry_after=self.rules.scan_interval,
                hint="submit again later",
            )

    def check_action(self, event: ev.JobCancelled | ev.JobHeld | ev.JobReleased) -> Job:
        """The job an action is for; ``NotFoundError`` or ``ConflictError`` when the action is not possible now."""
        job = self._ledger.get(event.job)
        if job is None:
            raise NotFoundError(f"there is no unfinished job {event.job}", field="job", value=event.job)
        if isinstance(event, ev.JobHeld) and job.state is not JobState.QUEUED:
            raise ConflictError(f"job {job.id} is {job.state}: only queued jobs can be held", hint="cancel it instead")
        if isinstance(event, ev.JobReleased) and job.state is not JobState.HELD:
            raise ConflictError(f"job {job.id} is {job.state}: only held jobs can be released")
        return job

    # Events

    def apply(self, event: ev.Event, now: float) -> None:
        """Take in one event; what follows from it is decided later, in ``decide``."""
        now = self._monotonic(now)
        self._something_happened()
        match event:
            case ev.JobSubmitted():
                job = replace(event.job, submitted_at=min(event.job.submitted_at, now))
                self._ledger.note(job, now, "submitted")
                self._waiting.arrive(job)
            case ev.JobCancelled():
                self._cancel(self.check_action(event), event.reason, now)
            case ev.JobHeld():
                job = self._waiting.leave(self.check_action(event))
                self._ledger.move(job, JobState.HELD, now, "held", event.reason)
            case ev.JobReleased():
                self._waiting.enqueue(self._ledger.move(self.check_action(event), JobState.QUEUED, now, "released"))
            case ev.ClusterReported():
                self._report(event)
            case ev.ClusterConfirmed():
                self._news.confirmed(event.cluster, event.as_of)
            case ev.ClusterDisconnected():
                self._disconnect(event, now)
            case ev.AgentFailed():
                self.grid[event.cluster].agent_failed = event.reason
                self._ledger.cluster_changed(event.cluster)
            case ev.ClusterCleared():
                self._faults.clear(event.cluster)
                self.grid[event.cluster].grew = True
            case ev.ClusterDrained():
                self.grid[event.cluster].drained = Drain(now, event.by, event.reason)
                self._ledger.cluster_changed(event.cluster)
            case ev.ClusterResumed():
                book = self.grid[event.cluster]
                book.drained, book.grew = None, True
                self._ledger.cluster_changed(event.cluster)
            case ev.ComponentUpdated():
                self._news.told(event)
                self._components.update(event, now)
                self._settle(event.token, now)
            case ev.InventoryReceived():
                self._inventory(event, now)
            case ev.StageUpdated():
                self._transfers.update(event, now)
                self._settle(event.token, now)
            case ev.ReplicasChanged():
                self.grid.set_replicas({event.file: event.sites})
                self.grid.grew |= bool(event.sites)
            case ev.LinkMeasured():
                if event.unreachable:
                    self.grid.forget_link(event.one, event.other)
                self.grid.set_link(event.one, event.other, event.link)
                self.grid.grew = True
            case ev.PeriodicScan():
                self._waiting.scan_periodically(now)
            case _:
                assert_never(event)

    def decide(self, now: float) -> None:
        """Handle what is due and place what can be placed."""
        now = self._monotonic(now)
        for timer in self._timers.due(now):
            self._fire(timer, now)
        self._advising.something_happened()
        self._tell_apart()
        if self.grid.take_growth() and self.rules.event_driven:
            self._waiting.scan_all(now)
        self._waiting.try_arrivals(now)
        self._something_happened()

    def _something_happened(self) -> None:
        """What was worked out for those who ask may no longer hold."""
        self._waiting.something_happened()
        self._advising.something_happened()

    def _monotonic(self, now: float) -> float:
        """Time does not go back, whatever a clock does."""
        self._news.slept(now, self._latest)
        self._latest = max(self._latest, now)
        return self._latest

    def _report(self, event: ev.ClusterReported) -> None:
        book = self.grid[event.cluster]
        if (event.problem, event.notices, event.lacks) != (book.problem, book.notices, book.lacks):
            self._ledger.cluster_changed(book.name)
        book.disks = event.disks
        book.report(
            event.total, event.idle, event.background, event.down, event.holding, event.problem, event.notices,
            event.lacks,
        )  # fmt: skip

    def _disconnect(self, event: ev.ClusterDisconnected, now: float) -> None:
        book = self.grid[event.cluster]
        if book.connected or book.problem:
            book.disconnected_because, book.problem = event.reason, ""
            self._lose_contact(book, now if event.heard is None else min(event.heard, now), now)

    def _lose_contact(self, book: ClusterBook, heard: float, now: float) -> None:
        """Nothing is placed on a cluster that is not connected; its components count as unknown a little later."""
        self._news.contact_lost(book, heard, now)
        self._ledger.cluster_changed(book.name)

    def _inventory(self, event: ev.InventoryReceived, now: float) -> None:
        book = self.grid[event.cluster]
        self._news.contact_made(book, now)
        book.agent_failed = ""
        book.grew = True
        self._ledger.cluster_changed(book.name)
        for told in event.components:
            self._news.told(told)
        for token in self._components.reconcile(event, now):
            self._settle(token, now)
        self._transfers.reconcile(event, self.jobs(), now)
        for update in event.stages:
            self._settle(update.token, now)

    def _cancel(self, job: Job, reason: str, now: float) -> None:
        if job.state.is_active:
            if job.ending is None or job.ending is JobState.QUEUED:
                self._settle_job(self._claiming.end(job, JobState.CANCELLED, reason, now), now)
            return
        if job.state is JobState.QUEUED:
            job = self._waiting.leave(job)
        self._ledger.move(job, JobState.CANCELLED, now, "cancelled", reason, ended_at=now)

    def _requests(self) -> Iterable[Request]:
        """Of the jobs that wait."""
        return self._waiting.requests()

    def _begin(self, job: Job, placement: Placement, now: float) -> None:
        """A job that was placed leaves the placement queues for the claiming queue."""
        job = self._claiming.start(job, placement, now)
        if placement.advice is not None:
            self._ledger.advised(advised(job, now, placement.advice, placement.reason))
        self._settle_job(job, now)

    # The end of an attempt

    def _settle(self, token: str, now: float) -> None:
        found = self._ledger.find(token)
        if found is not None:
            self._settle_job(found[0], now)

    def _settle_job(self, job: Job, now: float) -> None:
        """When nothing of an ended attempt is left that can be waited for, the job becomes what it was to become."""
        if job.ending is None or any(_must_be_awaited(job, component) for component in live(job).components):
            return
        attempt = live(job)
        for component in attempt.components:
            if component.state is not ComponentState.ENDED:
                self.grid[component.cluster].release(job.token(component.index))
                if job.ending is not JobState.QUEUED and attempt.launched_at is not None:
                    what = f"what had not come yet: {component.cluster} is out of reach"
                    self._claiming.output_is_missing(job, component, what, now)
        for component in attempt.gang:
            staging.end(self._ledger, job, component)
        becomes, reason = job.ending, attempt.end_reason
        if becomes is JobState.QUEUED:
            self._requeue(self._ledger.move(job, becomes, now, "requeued", reason, ending=None), now)
            return
        # A program that came to its own end was carried there by its clusters, whatever it made of it.
        if becomes is JobState.SUCCEEDED or (becomes is JobState.FAILED and attempt.exit_code is not None):
            for component in attempt.gang:
                self._faults.count_success(component.cluster)
        event = str(becomes)
        job = self._ledger.move(
            job, becomes, now, event, reason, ending=None, ended_at=attempt.ended_at, exit_code=attempt.exit_code,
            retry_at=None,
        )  # fmt: skip
        if met := self.experience.learn(job):
            self._met.add(met)

    def _requeue(self, job: Job, now: float) -> None:
        """Back to the placement queue, at once or after the pause that its failures have earned it."""
        if job.retry_at is None or job.retry_at <= now:
            self._waiting.enqueue(job)
        else:
            self._pause(job, job.retry_at)

    def _pause(self, job: Job, until: float) -> None:
        self._waiting.pause(job)
        self._timers.add(until, Deadline.RETRY, job=job.id)

    def _tell_apart(self) -> None:
        """Waiting jobs of an application that has become known are no longer refused with those of unknown ones."""
        met, self._met = self._met, set()
        if not met:
            return
        learning = (job for job in self.jobs() if job.waits and self.policies.learns(job.spec.policy))
        waiting = [job for job in learning if application_of(job.spec) in met]
        for job in sorted(waiting, key=lambda job: job.queue_seq):
            self._waiting.restore(self._waiting.leave(job))

    def _restore_attempt(self, job: Job, now: float) -> None:
        attempt = live(job)
        for component in attempt.components:
            if component.state is ComponentState.DELIVERING:
                self.grid[component.cluster].deliver(job.token(component.index))
            elif component.state not in (ComponentState.PLACED, ComponentState.ENDED):
                self.grid[component.cluster].promise(job.token(component.index), component.size)
            if component.state is ComponentState.STOPPING:
                self.grid[component.cluster].leave(job.token(component.index))
        at = now + self.rules.barrier_timeout
        if job.ending is not None:
            self._timers.add(at, Deadline.STOP, job=job.id, generation=job.generation)
        elif attempt.barrier_at is None:
            self._claiming.restore(job, now)
        elif attempt.launched_at is None:
            self._timers.add(at, Deadline.LAUNCH, job=job.id, generation=job.generation)
        elif job.spec.walltime is not None:
            at = attempt.launched_at + job.spec.walltime
            self._timers.add(at, Deadline.WALLTIME, job=job.id, generation=job.generation)

    # Deadlines

    def _fire(self, timer: Timer, now: float) -> None:
        if timer.kind in (Deadline.UNREACHABLE, Deadline.LOST):
            self._contact_is_overdue(timer, now)
            return
        if timer.kind is Deadline.PROBATION:
            self._faults.begin_probation(timer.cluster, timer.at)
            return
        if timer.kind is Deadline.LIMIT:
            self._faults.lift_limit(timer.cluster, timer.at)
            return
        job = self._ledger.get(timer.job)
        if timer.kind is Deadline.RETRY:
            if job is not None and job.state is JobState.QUEUED and job.retry_at == timer.at:
                self._waiting.enqueue(job)
            return
        if job is None or job.generation != timer.generation or not job.state.is_active:
            return
        if _is_moot(timer, job) or self._news.is_old_for(timer, job):
            return
        if timer.kind is Deadline.STOP:
            self._claiming.stop_components(job)
        elif timer.kind is Deadline.CLAIM_GRACE and not self._is_overtaken(job, timer, now):
            self._timers.postpone(timer, now + self.rules.claim_grace)
        elif timer.kind is Deadline.WALLTIME and self._news.is_over(job):
            self._timers.postpone(timer, now + RESULT_PAUSE)
        elif timer.kind is Deadline.BARRIER and _only_files_are_missing(job):
            self._timers.postpone(timer, now + self.rules.barrier_timeout)
        else:
            self._settle_job(self._deadline_passed(job, timer, now), now)

    def _is_overtaken(self, job: Job, timer: Timer, now: float) -> bool:
        """Whether a runner waits for local users: not for jobs that were preempted or end anyway, unless those never
        do, nor on its own nodes, from where it has not been heard; that has limits of its own."""
        component = live(job).components[timer.component]
        book = self.grid[component.cluster]
        waited = now - (component.submitted_at or now)
        last = waited + self.rules.claim_grace >= self.rules.barrier_timeout  # after that it is the cluster's error
        return not book.holds(job.token(component.index)) and (last or not book.leaving)

    def _deadline_passed(self, job: Job, timer: Timer, now: float) -> Job:
        attempt = live(job)
        match timer.kind:
            case Deadline.CLAIM_GRACE:
                component = attempt.components[timer.component]
                cluster, leaving = component.cluster, self.grid[component.cluster].leaving
                in_the_way = f"{cluster} does not let go of {nodes(leaving)}" if leaving else ""
                reason = self._trouble([component]) or in_the_way or f"local users of {cluster} were faster"
                return self._claiming.overtaken(job, component, reason, now)
            case Deadline.CLAIM:
                return self._claiming.claim_is_due(job, timer.at, now)
            case Deadline.BARRIER:
                claimed = (ComponentState.CLAIMED, None)
                late = next((c for c in attempt.gang if (c.state, c.unknown_since) != claimed), attempt.head)
                error = f"its nodes had not all reported after {self.rules.barrier_timeout:g} s"
                error = "; ".join(filter(None, (error, self._trouble([late]))))
                return self._faults.infrastructure_failed(job, late, error, now)
            case Deadline.LAUNCH:
                error = f"the program was not launched within {self.rules.barrier_timeout:g} s"
                error = "; ".join(filter(None, (error, self._trouble(attempt.gang))))
                return self._faults.infrastructure_failed(job, attempt.head, error, now)
            case Deadline.WALLTIME:
                reason = f"walltime of {job.spec.walltime:g} s exceeded"
                return self._claiming.end(job, JobState.FAILED, reason, now)
        return job

    def _trouble(self, components: Iterable[Component]) -> str:
        """What the clusters of components say is the matter with their resource managers."""
        problems = {c.cluster: self.grid[c.cluster].problem for c in components}
        return "; ".join(f"{cluster}: {problem}" for cluster, problem in sorted(problems.items()) if problem)

    def _contact_is_overdue(self, timer: Timer, now: float) -> None:
        book = self.grid[timer.cluster]
        heard = book.last_heard
        span = self.rules.lost_after if timer.kind is Deadline.LOST else self.rules.unreachable_after
        if heard is None or not self._news.is_silent_for(book, span, now):
            return
        for token in book.awaited:
            if timer.kind is Deadline.LOST:
                self._components.lose(token, f"not heard of for {self.rules.lost_after:g} s", now)
            else:
                self._components.lose_sight(token, heard, now)
            self._settle(token, now)
        self._news.look_again(book.name)
        if timer.kind is Deadline.UNREACHABLE:
            self._news.go_on_watching(book, now)


def _is_moot(timer: Timer, job: Job) -> bool:
    """Whether what a deadline was set for has happened, or is not awaited any more."""
    attempt = live(job)
    match timer.kind:
        case Deadline.STOP:
            return False
        case Deadline.CLAIM_GRACE:
            done = attempt.components[timer.component].state is not ComponentState.WAITING
        case Deadline.BARRIER:
            done = attempt.barrier_at is not None or timer.component != len(attempt.components)
        case Deadline.LAUNCH:
            done = attempt.launched_at is not None
        case _:
            done = False
    return done or job.ending is not None


def _only_files_are_missing(job: Job) -> bool:
    """Whether a gang waits at the barrier for nothing but its files, whose transfers have limits of their own."""
    gang = live(job).gang
    return any(c.awaits_files for c in gang) and all(
        c.state is ComponentState.CLAIMED and c.unknown_since is None for c in gang
    )


def _must_be_awaited(job: Job, component: Component) -> bool:
    """Whether the job cannot go on before this component has ended.

    One that still sends its output is waited for when the job is about to be over, not when it is to be queued again.
    One out of reach is not waited for, unless it may be running the program and the job is to be started again: no
    job may live twice, so that has to wait until the cluster is back or counts as lost.
    """
    if component.state is ComponentState.ENDED:
        return False
    out_of_reach = component.unknown_since is not None
    if component.state is ComponentState.DELIVERING:
        return not out_of_reach and job.ending is not JobState.QUEUED
    return not out_of_reach or (job.ending is JobState.QUEUED and live(job).barrier_at is not None)
