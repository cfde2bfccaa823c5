"""Choose the jobs that are tried in a cycle, in queue order (semantics 4), count their tries, and say why others wait.

A job is tried when it arrives, when a change may allow its placement, and in periodic scans.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

from koalapy.model.cluster import GridView
from koalapy.model.job import ClusterRefusal, Job, JobId, JobState, RefusalCause
from koalapy.model.job_sizes import Barred
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.placement import Placement, Refusal, RefusalKind
from koalapy.model.users import Sharing
from koalapy.model.wording import format_time
from koalapy.scheduler.claims.preemption import capacity_with_preemption, capacity_with_reclaiming
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.queue.eligibility import placement_limit, scan_tries_all
from koalapy.scheduler.queue.kept_nodes import KeptNodes
from koalapy.scheduler.queue.placement_queues import PRIORITIES, PlacementQueues
from koalapy.scheduler.queue.plan import Plan
from koalapy.scheduler.queue.questions import PolicyQuestions
from koalapy.scheduler.queue.queue import (
    LIMITS,
    Change,
    Duration,
    Group,
    IdleSummary,
    Needs,
    Shape,
    Wakeup,
    at_home,
    nodes_of,
)
from koalapy.scheduler.queue.start_conditions import describe_deferral
from koalapy.scheduler.state import SchedulerState


def refusal_text(refusal: ClusterRefusal, now: float) -> str:
    """Return a rejection as text: the cluster, the time of its next try if there is one, and the reason."""
    if refusal.cause is RefusalCause.CLAIM and refusal.until is not None:
        again = format_time(refusal.until, now, exact=True)
        return f"{refusal.cluster} {refusal.words}, and is tried again at {again}"
    if refusal.cause is RefusalCause.FAILURE and refusal.until is not None:
        failed = f"it has failed {refusal.times} times in a row on {refusal.cluster}"
        return f"{failed}, and may run there at {format_time(refusal.until, now, exact=True)}: {refusal.words}"
    again = "is not asked again"
    if refusal.until is not None:
        again = f"is asked again at {format_time(refusal.until, now, exact=True)}"
    return f"{refusal.cluster} has refused {refusal.refused}, and {again}: {refusal.words}"


class WaitingReasons:
    """The reasons why jobs wait, cached per job group until the next event."""

    def __init__(self, state: SchedulerState, queues: PlacementQueues, questions: PolicyQuestions) -> None:
        self._state, self._rules, self._grid = state, state.rules, state.grid
        self._queues, self._questions = queues, questions
        self._idle = state.grid.cached_view(lambda cluster: cluster.nodes.idle)
        self._refusals: dict[Shape, str] = {}
        """Why jobs of a shape are rejected; empty if they would be placed."""

    def invalidate(self) -> None:
        """Clear the cache after an event."""
        self._refusals.clear()

    def reason_of(self, job: Job) -> str:
        """Return why a queued job is not placed."""
        now = self._state.now
        if job.array_job is not None and self._state.ledger.get(job.id) is None:
            return f"waits for its turn in array {job.array_job}"
        if job.tasks is not None and not job.may_start_task:
            return f"{job.tasks.live} of its tasks run at once, as many as it allows"
        if job.is_deferred:
            return describe_deferral(job.awaits, job.spec.begin, now)
        refusals = "; ".join(refusal_text(refusal, now) for refusal in job.refusals if refusal.bars(now))
        if job.retry_at is not None:
            again = f"is tried again at {format_time(job.retry_at, job.retry_at, exact=True)}"
            if refusals:
                return f"{again}: {refusals}"
            return f"{again}, after {'a failed attempt' if job.restarts == 1 else f'{job.restarts} failed attempts'}"
        if (excess := self._state.owner_use.find_excess(job.spec, now)) is not None:
            return excess.waiting_reason
        if (head := self._in_front_of(job)) is not None:
            return f"waits behind job {head}"
        barred = job.barred_sizes(now)
        shape = self._queues.shape(job.spec, barred)
        refusal = self._refusals.get(shape)
        if refusal is None:
            refusal = self._refusals[shape] = self._policy_refusal(job, barred)
        if refusal:
            planned = self._describe_plan(job)
            return "; ".join(filter(None, (refusal, planned, refusals, self._queues.kept.describe(job.id))))
        keeper = self._queues.plan.keeper(job.spec, job.id)
        return "fits, and waits for the next scan" if keeper is None else self._queues.plan.describe_keeper(keeper)

    def _describe_plan(self, job: Job) -> str:
        """Return when a job is planned to start, or why not any more; empty if it had no plan."""
        planned, has_plan = job.planned_start, job.id == self._queues.plan.job
        if planned is not None and planned.late is None and has_plan is (planned.at is not None):
            return planned.describe(self._state.now)
        return self._queues.plan.describe_start() if has_plan else ""

    def _in_front_of(self, job: Job) -> JobId | None:
        """Return the job ahead that keeps this one waiting; None for the head and for a job that scans pass over."""
        queue = self._queues[job.spec.priority]
        if self._rules.queue == "scan" or (job.id in queue and queue.is_known_unplaceable(queue.group_of(job.id))):
            return None
        head = self._queues.head(job.spec)
        return head if head != job.id else None

    def _policy_refusal(self, job: Job, barred: Barred) -> str:
        """Return why the job's policy does not place it; empty if it would."""
        answer = self._questions.ask(job.spec, self._grid.view(), barred)
        if isinstance(answer, Placement):
            return ""
        capacity_restriction = [
            cluster for cluster in self._grid.clusters() if cluster.nodes.available < cluster.nodes.idle
        ]
        beside = self._questions.ask(job.spec, self._idle.view(), barred) if capacity_restriction else answer
        if isinstance(beside, Refusal):
            return answer.summary
        used = [cluster for cluster in capacity_restriction if beside.nodes_on(cluster.name) > cluster.nodes.available]
        return "; ".join(f"{cluster.name} {cluster.capacity_restriction}" for cluster in used) or answer.summary


GetView = Callable[[], GridView]
Clock = Callable[[], float]
"""Returns seconds since an arbitrary fixed time."""
MAX_DOUBLINGS = 10


class Budget:
    """The time that a cycle may spend on placing jobs. It doubles for a scan that had to start over, so that the scan
    completes."""

    def __init__(self, seconds: float, clock: Clock | None) -> None:
        """``clock``: None for no limit."""
        self._seconds, self._clock = seconds, clock
        self._doublings = 0
        self._until = inf

    def begin(self) -> None:
        """Start the time of a cycle."""
        if self._clock is not None:
            self._until = self._clock() + self._seconds * 2**self._doublings

    def double(self) -> None:
        """Double the budget, as an unfinished scan starts over."""
        self._doublings = min(self._doublings + 1, MAX_DOUBLINGS)

    def reset(self) -> None:
        """Restore the original budget, as no scan is unfinished."""
        self._doublings = 0

    @property
    def is_spent(self) -> bool:
        return self._clock is not None and self._clock() >= self._until


class Offer:
    """The nodes currently offered to jobs of one priority."""

    def __init__(
        self, see: GetView, see_with_preemption: GetView | None, see_taken_back: GetView, sharing: Sharing
    ) -> None:
        self._see, self.see_with_preemption = see, see_with_preemption
        self.see_taken_back, self._sharing = see_taken_back, sharing
        self._idle = self._taken_back = IdleSummary(GridView(()))

    @property
    def view(self) -> GridView:
        return self._see()

    def with_preemption(self, spec: JobSpec) -> GridView | None:
        """Return the view with low-priority jobs preempted; None if the job may not preempt."""
        return None if self.see_with_preemption is None or spec.share else self.see_with_preemption()

    def at_home(self, spec: JobSpec) -> GridView | None:
        """Return a view of a job's home site after reclaiming its nodes; None if it may not reclaim."""
        home = None if spec.share else self._sharing.reclaiming_site(spec.home_site)
        return self.see_taken_back().select_clusters(frozenset({home})) if home else None

    def idle_test(self) -> Callable[[Needs], bool]:
        """Return a fast test, without a policy call, whether enough nodes may be idle for a job's needs."""
        widest = (self.see_with_preemption or self._see)()
        if widest is not self._idle.view:
            self._idle = IdleSummary(widest)
        if not self._sharing.reclaims:
            return self._idle.may_fit
        taken_back = self.see_taken_back()
        if taken_back is not self._taken_back.view:
            self._taken_back = IdleSummary(taken_back)
        return lambda needs: self._idle.may_fit(needs) or self._taken_back.may_take_back(needs)


class Offers:
    """The nodes that jobs may use, by their priority and by whether they end after a planned start."""

    def __init__(self, state: SchedulerState, plan: Plan, kept_nodes: KeptNodes) -> None:
        self._plan, self._kept, self._sharing = plan, kept_nodes, state.sharing
        self._preempts = state.rules.preemption == "placement"
        kinds = [(priority, is_late) for priority in Priority for is_late in (False, True)]
        self._preempting = {
            is_late: state.grid.cached_view(partial(self._left_by_preemption, is_late), by_preemption=True).view
            for is_late in (False, True)
        }
        self._taken_back = {
            priority: state.grid.cached_view(partial(self._left_if_taken_back, priority), by_preemption=True).view
            for priority in Priority
        }
        self._ordinary = {kind: self._offer(*kind) for kind in kinds}

    def _offer(self, priority: Priority, is_late: bool) -> Offer:
        see = partial(self._plan.view, priority, is_late)
        may_preempt = priority is Priority.HIGH and self._preempts
        see_with_preemption = self._preempting[is_late] if may_preempt else None
        return Offer(see, see_with_preemption, self._taken_back[priority], self._sharing)

    def ordinary(self, priority: Priority, duration: Duration) -> Offer:
        """Return which nodes the jobs of a priority and run time may use."""
        return self._ordinary[priority, self._plan.is_delayed_by(duration)]

    def for_planned(self, job: Job) -> Offer:
        """Return which nodes the job with the planned start may use."""
        early = self._ordinary[job.spec.priority, False]
        return Offer(partial(self._plan.own_view, job), early.see_with_preemption, early.see_taken_back, self._sharing)

    def for_restart(self, job: Job, duration: Duration) -> Offer:
        """Return the nodes that a low-priority job may use to run again after a failure."""
        is_late = self._plan.is_delayed_by(duration)
        see = partial(self._plan.restart_view, job, is_late=is_late)
        return Offer(see, None, self._taken_back[Priority.LOW], self._sharing)

    def idle_test(self, priority: Priority) -> Callable[[Needs], bool]:
        """Return a fast test, without a policy call, whether enough nodes may be idle for a job's needs."""
        early = self._ordinary[priority, False].idle_test()
        if not self._plan.binds(priority):
            return early
        late = self._ordinary[priority, True].idle_test()
        is_delayed_by = self._plan.is_delayed_by
        return lambda needs: (late if is_delayed_by(needs.duration) else early)(needs)

    def _left_by_preemption(self, is_late: bool, cluster: ClusterStatus) -> int:
        return self._plan.limit(Priority.HIGH, is_late, cluster, capacity_with_preemption(cluster))

    def _left_if_taken_back(self, priority: Priority, cluster: ClusterStatus) -> int:
        """Return the nodes that a home site may have; a planned start of another job does not keep them from it."""
        return capacity_with_reclaiming(cluster) - (self._kept[cluster.name] if priority is Priority.LOW else 0)


class Candidate(NamedTuple):
    """A job to be tried."""

    job: JobId
    offer: Offer
    is_newcomer: bool = False
    """Whether it is tried out of turn, as it has just arrived."""


@dataclass(slots=True)
class Scan:
    """One pass through a queue over the jobs woken when it began; it may take several cycles."""

    wakeup: Wakeup
    tries: Iterator[Candidate]


class Candidates:
    """The jobs that are still to be tried."""

    def __init__(
        self,
        state: SchedulerState,
        queues: PlacementQueues,
        offers: Offers,
        questions: PolicyQuestions,
        reasons: WaitingReasons,
        budget: Budget,
        give_up_array: Callable[[Job, str, float], None],
    ) -> None:
        """``give_up_array``: fails the waiting tasks of an array for a reason, at a time."""
        self._give_up_array = give_up_array
        self._state, self._rules, self._ledger, self._grid = state, state.rules, state.ledger, state.grid
        self._queues, self._offers, self._questions = queues, offers, questions
        self._reasons, self._budget = reasons, budget
        self.is_unfinished = False
        """Whether jobs are left to be tried by the next cycle."""
        self._scans: dict[Priority, Scan] = {}
        """The scans in progress."""
        self._periodic: deque[Iterator[None]] = deque()
        self._scanned: Collection[Priority] = ()
        """The queues of the periodic scan in progress."""
        self._high_scans = 0
        """Periodic scans of the high queue since the last one of the low queue."""
        self._refused_newcomers: set[Group] = set()
        self._woken_at = 0
        """The version of the grid up to which changes have woken jobs."""

    def _never_fits(self, job_id: JobId) -> bool:
        job = self._ledger.jobs[job_id]
        barred = job.barred_sizes(self._state.now)
        if barred and self._questions.refusal_on_empty_grid(job.spec, barred):
            return True
        return bool(self._questions.refusal_on_empty_grid(job.spec, assume_links=False))  # by the known links

    def begin_cycle(self) -> None:
        """Wake the jobs that may be placed after the latest changes, and start the time budget."""
        self._queues.failed_at_once.clear()
        self._refused_newcomers.clear()
        self._wake_jobs()
        if self._scans and any(self._queues.wakeups[priority] for priority in self._scans if self.may_scan(priority)):
            self._budget.double()
        self._budget.begin()
        self.is_unfinished = True

    def plan_periodic_scan(self) -> None:
        """Plan a scan of the high queue, and every S-th time also of the low one. Do nothing while one is in
        progress."""
        if self.is_unfinished and self._periodic:
            return
        scanned = [Priority.HIGH]
        self._high_scans += 1
        if self._high_scans >= self._rules.high_scans_per_low:
            self._high_scans = 0
            scanned.append(Priority.LOW)
        self._periodic.append(self._periodic_scan(scanned))

    def _periodic_scan(self, scanned: Collection[Priority]) -> Iterator[None]:
        """Perform a periodic scan in parts; each part runs once no other candidate is left."""
        self._scanned = scanned
        self._queues.failed_at_once.clear()
        self.update_plan()
        self._queues.wake_all(scanned)
        yield
        for priority in scanned:
            for job in self._count_scan(priority):
                self._give_up(self._ledger.jobs[job], self._state.now)
                if self._budget.is_spent:
                    yield
        self._queues.kept.renew()
        self._queues.plan.invalidate()
        self.update_plan()
        yield
        self._scanned = ()

    # Wakeups

    def _wake_jobs(self) -> None:
        """Select the queued jobs to try again, since clusters have changed or an owner's use has decreased."""
        if self._rules.queue != "scan":
            for priority in Priority:
                self._queues[priority].empty_grid = self._questions.empty_grid()
        if self._grid.version != self._woken_at:
            self._woken_at = self._grid.version
            self._wake_by_grid()
        if self._state.owner_use.take_freed_flag(self._state.now):
            self._queues.wake([LIMITS])
        self.update_plan()

    def _wake_by_grid(self) -> None:
        """Wake the jobs that wait for what clusters have gained or soon gain: nodes, files or a link."""
        grid, queues = self._grid, self._queues
        if self._ledger.has_changed_clusters:
            queues.kept.renew()
            queues.plan.invalidate()
            queues.wake_all()
        if grid.take_link_learned():
            queues.wake_all()
        gains, departures = grid.take_capacity_changes()
        for cluster in gains:
            queues.wake(nodes_of(cluster))
        for cluster in departures:  # jobs may be placed on nodes that are about to be free
            queues.wake(nodes_of(cluster), [Priority.HIGH])
            queues.wake([at_home(cluster)], [Priority.LOW])
        if files := grid.take_files_learned():
            queues.wake([Change("file", name) for name in files])

    def update_plan(self) -> None:
        """Plan the next start again if that may have changed, and wake jobs that gain by it."""
        gained = self._queues.kept.take_release()
        if self._queues.plan.update(self._questions.ask) or gained:
            self._queues.wake_all()

    # The next one

    def may_scan(self, priority: Priority) -> bool:
        return self._rules.event_driven or priority in self._scanned

    def next_candidate(self) -> Candidate | None:
        """Return the next candidate; None if none is left, or if counting tries used up the budget."""
        while True:
            for priority in PRIORITIES:
                is_due = priority in self._scans or self._queues.wakeups[priority]
                if is_due and self.may_scan(priority) and (candidate := self._next_of_scan(priority)) is not None:
                    return candidate
                if self._queues.newcomers[priority] and (job := self._queues.next_newcomer(priority)) is not None:
                    if self._queues.is_tried_at_once(job.spec, job):
                        return Candidate(job.id, self._offer_to(job.id, priority), is_newcomer=True)
                    break
            else:
                if not self._go_on_with_periodic_scan():
                    self.is_unfinished = False
                    self._budget.reset()
                    return None
            if self._budget.is_spent:
                return None

    def _next_of_scan(self, priority: Priority) -> Candidate | None:
        """Return the next job of a scan. The scan starts over if jobs were woken since it began."""
        if self._queues.wakeups[priority]:
            wakeup, scan = self._queues.take_wakeup(priority), self._scans.get(priority)
            if scan is not None:
                wakeup.add(scan.wakeup)
            self._scans[priority] = Scan(wakeup, self._scan(priority, wakeup))
        if (scan := self._scans.get(priority)) is None:
            return None
        candidate = next(scan.tries, None)
        if candidate is None:
            del self._scans[priority]
        return candidate

    def _scan(self, priority: Priority, wakeup: Wakeup) -> Iterator[Candidate]:
        """Yield the job with the planned start first, then those that may use kept nodes, then all in order."""
        queue, plan = self._queues[priority], self._queues.plan
        while (planned := plan.job) is not None and planned in queue:
            offer = self._offers.for_planned(self._ledger.jobs[planned])
            if not offer.idle_test()(queue.group_of(planned).needs):
                break
            yield Candidate(planned, offer)
            if planned == plan.job:
                break
        if priority is Priority.LOW:
            yield from self._tries_with_kept_nodes()
        idle_test = partial(self._offers.idle_test, priority)
        for job in queue.scan(self._rules.queue, idle_test, wakeup, self._never_fits):
            yield Candidate(job, self._offer_to(job, priority))
        for kind, count in queue.take_refusals().items():
            self._ledger.count_refusals(kind, count)

    def _offer_to(self, job: JobId, priority: Priority) -> Offer:
        """Return which nodes a job may use."""
        if job == self._queues.plan.job:
            return self._offers.for_planned(self._ledger.jobs[job])
        return self._offers.ordinary(priority, self._queues[priority].group_of(job).needs.duration)

    def _tries_with_kept_nodes(self) -> Iterator[Candidate]:
        """Yield the jobs of low priority up to the last one for which nodes are kept, as far as scans reach."""
        queue, jobs, refused = self._queues[Priority.LOW], self._ledger.jobs, set[Group]()
        while restarting := self._queues.kept.restarting_jobs():
            last = jobs[restarting[-1]]
            firsts = queue.first_jobs(None, self._rules.queue) if last.spec.priority is Priority.LOW else []
            candidates = (job for job in firsts if jobs[job].queue_seq <= last.queue_seq)
            job = next((job for job in candidates if queue.group_of(job) not in refused), None)
            if job is None:
                return
            yield Candidate(job, self._offers.for_restart(jobs[job], queue.group_of(job).needs.duration))
            if job in queue:
                refused.add(queue.group_of(job))

    def _go_on_with_periodic_scan(self) -> bool:
        """Perform the next part of the oldest periodic scan; return False if none is in progress."""
        while self._periodic:
            for _ in self._periodic[0]:
                return True
            self._periodic.popleft()
        return False

    # Tries

    def is_rejected_early(self, newcomer: Candidate) -> bool:
        """Return whether a newcomer is rejected without a policy call: too few idle nodes, or its group was
        rejected."""
        group = self._queues[self._ledger.jobs[newcomer.job].spec.priority].group_of(newcomer.job)
        if group in self._refused_newcomers and newcomer.job != self._queues.plan.job:
            return True
        if newcomer.offer.idle_test()(group.needs):
            return False
        self._ledger.count_refusals(RefusalKind.NODES)
        return True

    def count_newcomer_try(self, job: Job, now: float) -> None:
        """Count the failed try of a newcomer that was not changed. Reject newcomers of its group in this cycle."""
        queue = self._queues[job.spec.priority]
        self._refused_newcomers.add(queue.group_of(job.id))
        if self._queues.plan.note_arrival(job):
            self.update_plan()
        if job.id in self._queues.changed:
            self._queues.changed.remove(job.id)
        else:
            self._count_try(job, now)
        if self._rules.queue == "fcfs" and job.id in queue:
            queue.check_placeable(job.id, self._never_fits)

    def _count_scan(self, priority: Priority) -> Iterator[JobId]:
        """Count a failed try of all jobs that remain after a scan; yield those that have used up their tries."""
        queue = self._queues[priority]
        if not scan_tries_all(self._rules):
            for head in queue.heads():
                self._count_try(self._ledger.jobs[head], self._state.now)
        elif len(queue):
            used_up = queue.count_scan()
            self._ledger.record_scan_count(priority, queue.scans)
            yield from (job for job in used_up if job in queue)

    def _count_try(self, job: Job, now: float) -> None:
        """Count a failed placement try, and fail the job if it has used up its tries."""
        job = self._ledger.change_job(job, placement_tries=job.placement_tries + 1)
        limit = placement_limit(job, self._rules)
        if limit is not None and self._queues.tries(job) >= limit:
            self._give_up(job, now)
        else:
            self._queues.record_tries(job)

    def _give_up(self, job: Job, now: float) -> None:
        reason = f"not placed in {placement_limit(job, self._rules)} tries: {self._reasons.reason_of(job)}"
        if job.tasks is not None:
            self._give_up_array(job, reason, now)
            return
        self._ledger.change_state(self._queues.remove(job), JobState.FAILED, now, "failed", reason, ended_at=now)
