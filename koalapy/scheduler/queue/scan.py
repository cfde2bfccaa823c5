"""Scans of the placement queues: the grid is offered to those who wait, and whom its policy places is claimed for."""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from koalapy.model.advice import advised
from koalapy.model.cluster import GridView
from koalapy.model.job import Job, JobId, JobSpec, JobState, Priority
from koalapy.model.placement import Placement, Refusal, RefusalKind
from koalapy.model.request import ClusterName
from koalapy.model.wording import clock
from koalapy.scheduler.attempts.attempt_endings import AttemptEndings
from koalapy.scheduler.attempts.refusals import refusal_text
from koalapy.scheduler.claims.claiming import Claiming
from koalapy.scheduler.claims.preemption import Preemption
from koalapy.scheduler.queue.budget import Budget, Clock
from koalapy.scheduler.queue.offer import Offer, Offers
from koalapy.scheduler.queue.placement_queues import PRIORITIES, PlacementQueues
from koalapy.scheduler.queue.policy_evaluation import PolicyEvaluator
from koalapy.scheduler.queue.queue import Group, Shape
from koalapy.scheduler.queue.try_limits import placement_limit, scan_tries_all
from koalapy.scheduler.queue.wakeup import LIMITS, Change, Wakeup, at_home, nodes_of
from koalapy.scheduler.state import SchedulerState


@dataclass(slots=True)
class Scan:
    """One pass through a queue, which goes on in the next step if this one's budget is spent before its end."""

    wakeup: Wakeup
    """Who may have got a chance when it began."""
    tries: Iterator[tuple[JobId, Offer]]


class Scanner:
    """Tries jobs in the order of their queues, and starts an attempt of each that was placed."""

    def __init__(
        self,
        state: SchedulerState,
        queues: PlacementQueues,
        evaluator: PolicyEvaluator,
        preemption: Preemption,
        claiming: Claiming,
        endings: AttemptEndings,
        clock: Clock | None,
    ) -> None:
        """``clock`` is what the budget of a step is measured by; None for no budget."""
        self._rules, self._ledger, self._grid = state.rules, state.ledger, state.grid
        self._owner_use, self._state = state.owner_use, state
        self._queues, self._evaluator = queues, evaluator
        self._all_offers = offers = Offers(state, queues.reservation, preemption)
        self._offers = {priority: offers.of(priority) for priority in Priority}
        self._everything = {priority: offers.of(priority, everything=True) for priority in Priority}
        self._claiming, self._endings = claiming, endings
        self._idle = state.grid.lens(lambda cluster: cluster.idle)
        if state.rules.queue != "scan":
            for priority in Priority:
                queues[priority].never_fits = self._never_fits
        self._budget = Budget(state.rules.step_budget, clock)
        self._scans: dict[Priority, Scan] = {}
        """Those that are under way."""
        self._periodic: deque[Iterator[None]] = deque()
        self._scanned: Collection[Priority] = ()
        """The queues that the periodic scan goes through which is under way, if one is."""
        self._refused_newcomers: set[Group] = set()
        self._in_turn: set[JobId] = set()
        """Jobs that are about to be placed, once those are that would take back nodes."""
        self._guest_sites: set[ClusterName] = set()
        """The clusters where jobs of other home sites were placed in this step."""
        self._refused_owners: set[Group] = set()
        """The shapes of jobs that were tried in this step before a guest on their home site, in vain."""
        self.is_unfinished = False
        """Whether there are jobs left to be tried, for the next step."""
        self._woken_at = 0
        """The moment of the grid by which those were woken last who wait for something of it."""
        self._high_scans = 0
        """Periodic scans of the high queue since the last one of the low queue."""
        self._refusals: dict[Shape, str] = {}
        """Why jobs of a shape are not placed, as asked since something last happened; empty when they would be."""

    def invalidate(self) -> None:
        """Reasons that were worked out may no longer hold."""
        self._refusals.clear()

    def view_with_preemption(self) -> GridView:
        """The grid as it would be if low-priority jobs made room for one of high priority."""
        return self._all_offers.view_with_preemption()

    def view_at_home(self, spec: JobSpec, *, everything: bool) -> GridView | None:
        """A job's home site with the nodes that it may take back for it; ``everything``: also those kept for it."""
        return (self._everything if everything else self._offers)[spec.priority].at_home(spec)

    # What is tried, and when

    def place(self, now: float) -> None:
        """Try whoever may have got a chance since this was last called, and each newcomer once, as far as the budget of
        a step goes."""
        self._queues.bounced.clear()
        self._refused_newcomers.clear()
        self._refused_owners.clear()
        self._guest_sites.clear()
        self._wake()
        if self._scans and any(self._queues.wakeups[priority] for priority in self._scans if self._may_scan(priority)):
            self._budget.double()
        self._budget.begin()
        self.is_unfinished = True
        while self._try_next(now):
            if self._budget.is_spent:
                return
        self.is_unfinished = False
        self._budget.reset()

    def scan_periodically(self) -> None:
        """The high queue S times for each time of the low one; each is a failed try of those that stay.

        One that comes while another is left over from an earlier step is the same as that.
        """
        if self.is_unfinished and self._periodic:
            return
        scanned = [Priority.HIGH]
        self._high_scans += 1
        if self._high_scans >= self._rules.high_scans_per_low:
            self._high_scans = 0
            scanned.append(Priority.LOW)
        self._periodic.append(self._periodic_scan(scanned))

    def _periodic_scan(self, scanned: Collection[Priority]) -> Iterator[None]:
        """It goes on when there is nobody left to be tried."""
        self._scanned = scanned
        self._queues.bounced.clear()
        self._update_reservation()
        self._queues.wake_everybody(scanned)
        yield
        for priority in scanned:
            for job in self._count_scan(priority):
                self._give_up(self._ledger.jobs[job], self._state.now)
                if self._budget.is_spent:
                    yield
        self._queues.reservation.invalidate()
        self._update_reservation()
        yield
        self._scanned = ()

    def _never_fits(self, job_id: JobId) -> bool:
        """Return whether a job would not be placed on the empty grid, by the links as they are known."""
        spec = self._ledger.jobs[job_id].spec
        return bool(self._evaluator.refusal_on_empty_grid(spec, assume_links=False))

    def _wake(self) -> None:
        """Find out what has changed since the last step, and who may be placed by that."""
        if self._rules.queue != "scan":
            for priority in Priority:
                self._queues[priority].empty_grid = self._evaluator.empty_grid()
        if self._grid.moment != self._woken_at:
            self._woken_at = self._grid.moment
            self._wake_by_grid()
        if self._owner_use.take_freed(self._state.now):
            self._queues.wake([LIMITS])
        self._update_reservation()

    def _wake_by_grid(self) -> None:
        grid, queues = self._grid, self._queues
        if self._ledger.changed_clusters:
            queues.reservation.invalidate()
            queues.wake_everybody()
        if grid.take_link_learned():
            queues.wake_everybody()
        gains, departures = grid.take_news()
        for cluster in gains:
            queues.wake(nodes_of(cluster))
        for cluster in departures:
            # Who may be placed on what is about to be free.
            queues.wake(nodes_of(cluster), [Priority.HIGH])
            queues.wake([at_home(cluster)], [Priority.LOW])
        if files := grid.take_files_learned():
            queues.wake([Change("file", name) for name in files])

    def _update_reservation(self) -> None:
        """For whom nodes are kept, if that may have changed: it is offered these, and others what is not kept now."""
        if self._queues.reservation.update(self._evaluator.evaluate):
            self._queues.wake_everybody()

    def _may_scan(self, priority: Priority) -> bool:
        return self._rules.event_driven or priority in self._scanned

    def _try_next(self, now: float) -> bool:
        """Try one more job; False when there is nobody left."""
        for priority in PRIORITIES:
            is_due = priority in self._scans or self._queues.wakeups[priority]
            if is_due and self._may_scan(priority) and (found := self._next_of_scan(priority)) is not None:
                self._place(*found, now)
                return True
            if self._queues.newcomers[priority] and (newcomer := self._queues.next_newcomer(priority)) is not None:
                self._try_newcomer(newcomer, now)
                return True
        while self._periodic:
            for _ in self._periodic[0]:
                return True
            self._periodic.popleft()
        return False

    # One scan

    def _next_of_scan(self, priority: Priority) -> tuple[JobId, Offer] | None:
        """Who is to be tried next, and what it is offered. A scan begins anew with whoever has got a chance since it
        began: nobody is passed over by those behind it."""
        if self._queues.wakeups[priority]:
            wakeup, scan = self._queues.take_wakeup(priority), self._scans.get(priority)
            if scan is not None:
                wakeup.add(scan.wakeup)
            self._scans[priority] = Scan(wakeup, self._scan(priority, wakeup))
        if (scan := self._scans.get(priority)) is None:
            return None
        found = next(scan.tries, None)
        if found is None:
            del self._scans[priority]
        return found

    def _scan(self, priority: Priority, wakeup: Wakeup) -> Iterator[tuple[JobId, Offer]]:
        """Those who are to be tried, from head to tail; first of all the one that nodes are kept for."""
        queue, reservation = self._queues[priority], self._queues.reservation
        everything, offer = self._everything[priority], self._offers[priority]
        while (reserved := reservation.job) is not None and reserved in queue:
            yield reserved, everything
            if reserved in queue:
                break
        for job in queue.scan(self._rules.queue, offer.glance, wakeup):
            yield job, offer
        for kind, count in queue.take_refusals().items():
            self._ledger.count_refusals(kind, count)

    def _try_newcomer(self, job: Job, now: float) -> None:
        """Once, out of turn; shapes refused once in a step are refused for all newcomers of a queue."""
        queue, offer = self._queues[job.spec.priority], self._offers[job.spec.priority]
        if self._rules.queue == "fcfs" and self._queues.head(job.spec) != job.id:
            return
        group = queue.group_of(job.id)
        is_hopeless = group in self._refused_newcomers
        if not is_hopeless and not offer.glance()(group.needs):
            self._ledger.count_refusals(RefusalKind.NODES)
            is_hopeless = True
        if is_hopeless or not self._place(job.id, offer, now):
            self._refused_newcomers.add(group)
            self._count_try(job, now)
            if self._rules.queue == "fcfs" and job.id in queue:
                queue.judge(job.id)

    def _place(self, job_id: JobId, offer: Offer, now: float) -> bool:
        """Take a job out of its queue and start to claim for it, if it can be placed."""
        if job_id in self._queues.bounced:
            return False
        job = self._ledger.jobs[job_id]
        if self._owner_use.of(job.spec, self._state.now) is not None:
            self._ledger.count_refusals(RefusalKind.LIMIT)
            return False
        answer = self._answer(job, offer, now)
        while isinstance(answer, Placement) and self._place_owner(job, answer, now):
            answer = self._answer(job, offer, now)
        if isinstance(answer, Refusal):
            self._ledger.count_refusals(answer.kind)
            return False
        self._queues.placing = job_id
        job = self._claiming.start(self._queues.leave(job), answer, now)
        if answer.advice is not None:
            self._ledger.advised(advised(job, now, answer.advice, answer.reason))
        self._endings.settle_job(job, now)
        self._queues.placing = None
        self._update_reservation()
        return True

    def _answer(self, job: Job, offer: Offer, now: float) -> Placement | Refusal:
        """Return where a job would go on what it is offered, if need be by preemption or what its home takes back."""
        barred = job.barred_from(now)
        answer = self._evaluator.evaluate(job.spec, offer.view, barred)
        if isinstance(answer, Refusal) and offer.with_preemption is not None:
            answer = self._evaluator.evaluate(job.spec, offer.with_preemption, barred)
        if isinstance(answer, Refusal) and (home := offer.at_home(job.spec)) is not None:
            taken_back = self._evaluator.evaluate(job.spec, home, barred)
            answer = taken_back if isinstance(taken_back, Placement) else answer
        return answer

    def _place_owner(self, job: Job, answer: Placement, now: float) -> bool:
        """Place first, if there is one, a job of a site where guests go in this step: one that goes home, or that would
        take back the nodes of a guest once ``job`` is placed. It has its turn in the same step.
        """
        sharing, priority = self._state.sharing, job.spec.priority
        if not sharing.reclaims:
            return False
        queue, offer = self._queues[priority], self._offers[priority]
        newcomers = {place[-1] for place in self._queues.newcomers[priority]}
        sites = {component.cluster for component in answer.components} - {job.spec.home_site}
        self._in_turn.add(job.id)
        try:
            for site in sorted(sites | self._guest_sites):
                for job_id in queue.firsts(sharing.section(site), self._rules.queue):
                    group = queue.group_of(job_id)
                    may_be_tried = self._may_scan(priority) or job_id in newcomers
                    if not may_be_tried or job_id in self._in_turn or group in self._refused_owners:
                        continue
                    owner = self._ledger.jobs[job_id]
                    wanted = self._answer(owner, offer, now) if offer.glance()(group.needs) else None
                    if not isinstance(wanted, Placement):
                        self._refused_owners.add(group)
                    elif _is_on(owner.spec.home_site, wanted) or self._would_take_back(owner, offer, answer, now):
                        return self._place(job_id, offer, now)
        finally:
            self._in_turn.discard(job.id)
        self._guest_sites |= sites
        return False

    def _would_take_back(self, owner: Job, offer: Offer, guest: Placement, now: float) -> bool:
        """Return whether a job would be placed only by what its home site takes back, once a guest is placed."""
        barred, home = owner.barred_from(now), offer.at_home(owner.spec)
        if home is None or isinstance(self._evaluator.evaluate(owner.spec, home, barred), Refusal):
            return False
        taken = [cluster for cluster in offer.view if guest.nodes_on(cluster.name)]
        left = offer.view.changed([c.with_idle(max(0, c.idle - guest.nodes_on(c.name))) for c in taken])
        return isinstance(self._evaluator.evaluate(owner.spec, left, barred), Refusal)

    # Tries

    def _count_scan(self, priority: Priority) -> Iterator[JobId]:
        """All that were tried and are still there have failed once more; those of them whose tries are used up."""
        queue = self._queues[priority]
        if not scan_tries_all(self._rules):
            for head in queue.heads():
                self._count_try(self._ledger.jobs[head], self._state.now)
        elif len(queue):
            used_up = queue.count_scan()
            self._ledger.scanned(priority, queue.scans)
            yield from (job for job in used_up if job in queue)

    def _count_try(self, job: Job, now: float) -> None:
        """A try that failed: on arrival, and where only the head is tried in each scan."""
        job = self._ledger.change(job, placement_tries=job.placement_tries + 1)
        limit = placement_limit(job, self._rules)
        if limit is not None and self._queues.tries(job) >= limit:
            self._give_up(job, now)
        else:
            self._queues.record_tries(job)

    def _give_up(self, job: Job, now: float) -> None:
        reason = f"not placed in {placement_limit(job, self._rules)} tries: {self.waiting_reason(job)}"
        self._ledger.move(self._queues.leave(job), JobState.FAILED, now, "failed", reason, ended_at=now)

    def _in_front_of(self, job: Job) -> JobId | None:
        """Return the job that keeps one waiting by its place; None for the head, and for one that is passed over."""
        queue = self._queues[job.spec.priority]
        if self._rules.queue == "scan" or (job.id in queue and queue.is_hopeless(queue.group_of(job.id))):
            return None
        head = self._queues.head(job.spec)
        return head if head != job.id else None

    def _why_refused(self, job: Job, barred: frozenset[ClusterName]) -> str:
        """Return why the job's policy does not place it; empty where it would."""
        answer = self._evaluator.evaluate(job.spec, self._grid.view(), barred)
        if isinstance(answer, Placement):
            return ""
        held_back = [cluster for cluster in self._grid.clusters() if cluster.available < cluster.idle]
        beside = self._evaluator.evaluate(job.spec, self._idle.view(), barred) if held_back else answer
        if isinstance(beside, Refusal):
            return answer.summary
        used = [cluster for cluster in held_back if beside.nodes_on(cluster.name) > cluster.available]
        return "; ".join(f"{cluster.name} {cluster.held_back}" for cluster in used) or answer.summary

    def waiting_reason(self, job: Job) -> str:
        """Why a queued job is not placed."""
        now = self._state.now
        refusals = "; ".join(refusal_text(each, now) for each in job.refusals if each.bars(now))
        if job.retry_at is not None:
            again = f"is tried again at {clock(job.retry_at, job.retry_at, exact=True)}"
            if refusals:
                return f"{again}: {refusals}"
            return f"{again}, after {'a failed attempt' if job.restarts == 1 else f'{job.restarts} failed attempts'}"
        if (excess := self._owner_use.of(job.spec, self._state.now)) is not None:
            return excess.said
        if (head := self._in_front_of(job)) is not None:
            return f"waits behind job {head}"
        barred = job.barred_from(now)
        shape = self._queues.shape(job.spec, barred)
        refusal = self._refusals.get(shape)
        if refusal is None:
            refusal = self._refusals[shape] = self._why_refused(job, barred)
        if refusal:
            return "; ".join(filter(None, (refusal, refusals)))
        reservation = self._queues.reservation
        keeper = reservation.keeper(job.id)
        if keeper is not None and (job.id == reservation.job or reservation.is_kept_from(job.spec.priority)):
            return f"nodes are kept for job {keeper}, which has waited longer"
        return "fits, and waits for the next scan"


def _is_on(site: ClusterName, placement: Placement) -> bool:
    """Return whether all components are on one cluster."""
    return all(component.cluster == site for component in placement.components)
