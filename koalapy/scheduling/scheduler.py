"""The scheduler: events in, effects out, time as an argument. It knows no clock, no socket and no database.

A world (live, embedded, simulated) calls ``step`` with what happened and the time, writes the effects down, and then
sends the commands among them. It calls again at ``next_wakeup`` at the latest.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import assert_never

from koalapy.model.cluster import Drain, GridView
from koalapy.model.errors import BusyError, ConflictError, NotFoundError, UsageError
from koalapy.model.job import Component, ComponentState, Job, JobId, JobState, Priority
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import shape_of
from koalapy.placement.registry import Registry
from koalapy.scheduling import events as ev
from koalapy.scheduling.claiming import Claiming
from koalapy.scheduling.commands import Effects
from koalapy.scheduling.components import Components
from koalapy.scheduling.faults import CLAIM_FAILED, Faults
from koalapy.scheduling.grid import ClusterBook, GridBook
from koalapy.scheduling.ledger import Ledger, live
from koalapy.scheduling.placing import BrokenPolicy, Placer
from koalapy.scheduling.queue import PlacementQueue
from koalapy.scheduling.rules import Rules
from koalapy.scheduling.timers import Deadline, Timer, Timers

Shape = tuple[object, ...]
NEEDS_CONTACT = (Deadline.CLAIM_GRACE, Deadline.LAUNCH, Deadline.WALLTIME)
"""Deadlines that say nothing while the clusters concerned are out of reach: what they wait for may have happened."""


class Scheduler:
    """One grid's scheduler. All state lives here or in what ``restore`` is given."""

    def __init__(self, rules: Rules, policies: Registry, clusters: Iterable[ClusterBook]) -> None:
        self.rules = rules
        self.policies = policies
        self.grid = GridBook(clusters)
        self._ledger = Ledger()
        self._timers = Timers()
        self._placer = Placer({book.name: book.profile for book in self.grid.books()})
        self._claiming = Claiming(rules, self._ledger, self.grid, self._timers)
        self._faults = Faults(rules, self._ledger, self.grid, self._claiming)
        self._components = Components(self._ledger, self.grid, self._claiming, self._faults)
        self._queues = {priority: PlacementQueue(rules.queue_order) for priority in Priority}
        self._queue_seq = 0
        self._arrivals: list[JobId] = []
        self._refusals: dict[Shape, Refusal] = {}
        self._broken: set[str] = set()
        """Policies of which was told that they answer nonsense."""
        self._high_scans = 0

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
            self._queue_seq = max(self._queue_seq, job.queue_seq)
            if job.state is JobState.QUEUED:
                self._push(job, job.queue_seq)
            elif job.state.is_active:
                self._restore_attempt(job, now)
        for book in self.grid.books():
            self._lose_contact(book, now)

    def next_wakeup(self) -> float | None:
        """When ``step`` must be called at the latest, even if nothing happens."""
        return self._timers.next_at()

    # What it knows, for those who ask

    def job(self, job: JobId) -> Job | None:
        """A job that is not final, as it stands."""
        return self._ledger.get(job)

    def jobs(self) -> list[Job]:
        """All jobs that are not final."""
        return list(self._ledger.jobs.values())

    @property
    def queued(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def waiting_reason(self, job: Job) -> str:
        """Why a queued job is not placed: what its shape was last refused for."""
        refusal = self._refusals.get(self._shape(job))
        return refusal.summary if refusal else job.reason or "waits for its turn in the queue"

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
        match event:
            case ev.JobSubmitted():
                self._ledger.note(event.job, now, "submitted")
                self._enqueue(event.job)
            case ev.JobCancelled():
                self._cancel(self.check_action(event), event.reason, now)
            case ev.JobHeld():
                job = self.check_action(event)
                self._queues[job.spec.priority].remove(job.id)
                self._ledger.move(job, JobState.HELD, now, "held", event.reason)
            case ev.JobReleased():
                self._enqueue(self._ledger.move(self.check_action(event), JobState.QUEUED, now, "released"))
            case ev.ClusterReported():
                self._report(event)
            case ev.ClusterDisconnected():
                self._disconnect(event, now)
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
                self._components.update(event, now)
                self._settle(event.token, now)
            case ev.InventoryReceived():
                self._inventory(event, now)
            case ev.PeriodicScan():
                self._scan_periodically(now)
            case _:
                assert_never(event)

    def decide(self, now: float) -> None:
        """Handle what is due and place what can be placed."""
        for timer in self._timers.due(now):
            self._fire(timer, now)
        arrivals, self._arrivals = self._arrivals, []
        if self.grid.take_growth() and self.rules.event_driven:
            for priority in Priority:
                self._scan(priority, now)
        self._try_arrivals(arrivals, now)

    def _report(self, event: ev.ClusterReported) -> None:
        book = self.grid[event.cluster]
        if event.problem != book.problem:
            self._ledger.cluster_changed(book.name)
        book.report(event.total, event.idle, event.background, event.down, event.holding, event.problem)

    def _disconnect(self, event: ev.ClusterDisconnected, now: float) -> None:
        book = self.grid[event.cluster]
        if book.connected or book.problem:
            book.disconnected_because, book.problem = event.reason, ""
            self._lose_contact(book, now)

    def _lose_contact(self, book: ClusterBook, now: float) -> None:
        """Nothing is placed on a cluster that is not connected; its components count as unknown a little later."""
        book.connected = False
        book.last_heard = now
        self._ledger.cluster_changed(book.name)
        self._timers.add(now + self.rules.unreachable_after, Deadline.UNREACHABLE, cluster=book.name)
        self._timers.add(now + self.rules.lost_after, Deadline.LOST, cluster=book.name)

    def _inventory(self, event: ev.InventoryReceived, now: float) -> None:
        book = self.grid[event.cluster]
        book.connected = True
        book.last_heard = now
        book.grew = True
        self._ledger.cluster_changed(book.name)
        for token in self._components.reconcile(event, now):
            self._settle(token, now)

    def _cancel(self, job: Job, reason: str, now: float) -> None:
        if job.state.is_active:
            if job.ending is None or job.ending is JobState.QUEUED:
                self._settle_job(self._claiming.end(job, JobState.CANCELLED, reason, now), now)
            return
        self._queues[job.spec.priority].remove(job.id)
        self._ledger.move(job, JobState.CANCELLED, now, "cancelled", reason, ended_at=now)

    # Queues and scans

    def _push(self, job: Job, seq: int) -> None:
        request = job.spec.request
        self._queues[job.spec.priority].push(job.id, seq, self._shape(job), request.total_size)

    def _enqueue(self, job: Job) -> None:
        """To the tail of its queue; it is tried at once."""
        self._queue_seq += 1
        job = self._ledger.change(job, queue_seq=self._queue_seq)
        self._push(job, self._queue_seq)
        self._arrivals.append(job.id)

    def _scan(self, priority: Priority, now: float) -> None:
        view = self.grid.view()

        def place(job_id: JobId) -> bool:
            nonlocal view
            if self._place(self._ledger.jobs[job_id], view, now):
                view = self.grid.view()
                return True
            return False

        self._queues[priority].scan(place, self.rules.queue)

    def _scan_periodically(self, now: float) -> None:
        """The high queue S times for each time of the low one; then count the tries of those that were refused."""
        self._scan(Priority.HIGH, now)
        self._high_scans += 1
        scanned = [Priority.HIGH]
        if self._high_scans >= self.rules.high_scans_per_low:
            self._high_scans = 0
            self._scan(Priority.LOW, now)
            scanned.append(Priority.LOW)
        for priority in scanned:
            # A scan that ends at the first refusal has tried nobody behind it.
            refused = islice(self._queues[priority], None if self.rules.queue == "scan" else 1)
            for job_id in [j for j in refused if self._try_limit(self._ledger.jobs[j]) is not None]:
                self._count_try(self._ledger.jobs[job_id], now)

    def _try_arrivals(self, arrivals: list[JobId], now: float) -> None:
        """Each newcomer is tried once, in order; shapes refused once are refused for all of them."""
        view: GridView | None = None
        refused: set[Shape] = set()
        for job_id in arrivals:
            job = self._ledger.get(job_id)
            if job is None or job_id not in self._queues[job.spec.priority]:
                continue
            queue = self._queues[job.spec.priority]
            if self.rules.queue == "fcfs" and queue.position(job_id) > 0:
                continue
            view = view or self.grid.view()
            shape = self._shape(job)
            if shape not in refused and self._place(job, view, now):
                queue.remove(job_id)
                view = None
                continue
            refused.add(shape)
            self._count_try(job, now)

    def _place(self, job: Job, view: GridView, now: float) -> bool:
        answer: Placement | Refusal
        try:
            policy = self.policies.resolve(job.spec.policy, job.spec.request)
            answer = self._placer.ask(policy, job.spec, view)
        except UsageError as error:  # the policy was known when the job was submitted, to an earlier daemon
            answer = Refusal(error.message)
        except BrokenPolicy as error:
            self._complain(error)
            answer = Refusal(error.message)
        shape = self._shape(job)
        if isinstance(answer, Refusal):
            self._refusals[shape] = answer
            return False
        self._refusals.pop(shape, None)
        self._claiming.start(job, answer, now)
        return True

    def _shape(self, job: Job) -> Shape:
        """What the answer to a job depends on."""
        return (job.spec.policy, *shape_of(job.spec.request), *self._placer.demands(job.spec))

    def _complain(self, error: BrokenPolicy) -> None:
        """Of each policy once: it is asked again and again."""
        if error.policy not in self._broken:
            self._broken.add(error.policy)
            self._ledger.warn(error.message)

    def _try_limit(self, job: Job) -> int | None:
        own = job.spec.max_placement_tries
        return own if own is not None else self.rules.max_placement_tries

    def _count_try(self, job: Job, now: float) -> None:
        """A try that failed: on arrival, and in each periodic scan."""
        limit = self._try_limit(job)
        job = self._ledger.change(job, placement_tries=job.placement_tries + 1, reason=self.waiting_reason(job))
        if limit is not None and job.placement_tries >= limit:
            self._queues[job.spec.priority].remove(job.id)
            reason = f"not placed in {limit} tries: {self.waiting_reason(job)}"
            self._ledger.move(job, JobState.FAILED, now, "failed", reason, ended_at=now)

    # The end of an attempt

    def _settle(self, token: str, now: float) -> None:
        job = self._components.job_of(token)
        if job is not None:
            self._settle_job(job, now)

    def _settle_job(self, job: Job, now: float) -> None:
        """When nothing of an ended attempt is left that can be waited for, the job becomes what it was to become."""
        if job.ending is None or any(_must_be_awaited(job, component) for component in live(job).components):
            return
        attempt = live(job)
        for component in attempt.components:
            if component.state is not ComponentState.ENDED:
                self.grid[component.cluster].release(job.token(component.index))
        becomes, reason = job.ending, attempt.end_reason
        if becomes is JobState.QUEUED:
            self._enqueue(self._ledger.move(job, becomes, now, "requeued", reason, ending=None))
            return
        # A program that came to its own end was carried there by its clusters, whatever it made of it.
        if becomes is JobState.SUCCEEDED or (becomes is JobState.FAILED and attempt.exit_code is not None):
            for component in attempt.components:
                self._faults.count_success(component.cluster)
        event = str(becomes)
        self._ledger.move(
            job, becomes, now, event, reason, ending=None, ended_at=attempt.ended_at, exit_code=attempt.exit_code
        )

    def _restore_attempt(self, job: Job, now: float) -> None:
        attempt = live(job)
        for component in attempt.components:
            if component.state is not ComponentState.ENDED:
                self.grid[component.cluster].promise(job.token(component.index), component.size)
            if component.state is ComponentState.WAITING:
                self._claiming.allow_grace(job, component, now)
        at = now + self.rules.barrier_timeout
        if job.ending is not None:
            self._timers.add(at, Deadline.STOP, job=job.id, generation=job.generation)
        elif attempt.barrier_at is None:
            self._timers.add(at, Deadline.BARRIER, job=job.id, generation=job.generation)
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
        job = self._ledger.get(timer.job)
        if job is None or job.generation != timer.generation or not job.state.is_active:
            return
        if timer.kind is Deadline.STOP:
            self._claiming.stop_components(job)
        elif job.ending is not None:
            return
        elif timer.kind in NEEDS_CONTACT and not self._in_contact(job, timer):
            self._timers.postpone(timer, now + self.rules.unreachable_after)
        else:
            self._settle_job(self._deadline_passed(job, timer, now), now)

    def _in_contact(self, job: Job, timer: Timer) -> bool:
        components = live(job).components
        if timer.kind is Deadline.CLAIM_GRACE:
            components = (components[timer.component],)
        return all(self.grid[c.cluster].connected for c in components if c.state is not ComponentState.ENDED)

    def _deadline_passed(self, job: Job, timer: Timer, now: float) -> Job:
        attempt = live(job)
        match timer.kind:
            case Deadline.CLAIM_GRACE:
                component = attempt.components[timer.component]
                if component.state is not ComponentState.WAITING:
                    return job
                reason = f"{CLAIM_FAILED}: local users of {component.cluster} were faster"
                return self._claiming.end(job, JobState.QUEUED, reason, now)
            case Deadline.BARRIER if attempt.barrier_at is None:
                claimed = (ComponentState.CLAIMED, None)
                late = next(c for c in attempt.components if (c.state, c.unknown_since) != claimed)
                error = f"its nodes had not all reported after {self.rules.barrier_timeout:g} s"
                return self._faults.infrastructure_failed(job, late, error, now)
            case Deadline.LAUNCH if attempt.launched_at is None:
                error = f"the program was not launched within {self.rules.barrier_timeout:g} s"
                return self._faults.infrastructure_failed(job, attempt.head, error, now)
            case Deadline.WALLTIME:
                reason = f"walltime of {job.spec.walltime:g} s exceeded"
                return self._claiming.end(job, JobState.FAILED, reason, now)
        return job

    def _contact_is_overdue(self, timer: Timer, now: float) -> None:
        book = self.grid[timer.cluster]
        heard = book.last_heard
        span = self.rules.lost_after if timer.kind is Deadline.LOST else self.rules.unreachable_after
        if book.connected or heard is None or now < heard + span:
            return
        for token in list(book.live):
            if timer.kind is Deadline.LOST:
                self._components.lose(token, f"not heard of for {self.rules.lost_after:g} s", now)
            else:
                self._components.lose_sight(token, heard, now)
            self._settle(token, now)


def _must_be_awaited(job: Job, component: Component) -> bool:
    """Whether the job cannot go on before this component has ended.

    One out of reach is not waited for, unless it may be running the program and the job is to be started again: no
    job may live twice, so that has to wait until the cluster is back or counts as lost.
    """
    if component.state is ComponentState.ENDED:
        return False
    out_of_reach = component.unknown_since is not None
    return not out_of_reach or (job.ending is JobState.QUEUED and live(job).barrier_at is not None)
