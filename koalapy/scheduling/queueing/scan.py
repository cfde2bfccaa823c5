"""Scans of the placement queues: the grid is offered to those who wait, and whom its policy places is claimed for."""

from collections.abc import Iterable
from functools import partial

from koalapy.model.advice import advised
from koalapy.model.cluster import GridView
from koalapy.model.job import Job, JobId, JobState, Priority
from koalapy.model.placement import Refusal, RefusalKind
from koalapy.model.wording import clock
from koalapy.scheduling.claiming.claiming import Claiming
from koalapy.scheduling.claiming.preemption import Preemption
from koalapy.scheduling.lifecycle.attempt_endings import AttemptEndings
from koalapy.scheduling.queueing.feasibility import Needs, needs_of
from koalapy.scheduling.queueing.offer import Offer, Offers
from koalapy.scheduling.queueing.placement_queues import PlacementQueues
from koalapy.scheduling.queueing.policy_evaluation import PolicyEvaluator
from koalapy.scheduling.queueing.queue import Shape
from koalapy.scheduling.queueing.try_limits import placement_limit
from koalapy.scheduling.state import SchedulerState


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
    ) -> None:
        self._rules, self._ledger, self._grid = state.rules, state.ledger, state.grid
        self._owner_use, self._state = state.owner_use, state
        self._queues, self._evaluator = queues, evaluator
        self._offers = Offers(state, queues.reservation, preemption)
        self._claiming, self._endings = claiming, endings
        self._high_scans = 0
        """Periodic scans of the high queue since the last one of the low queue."""
        self._refusals: dict[Shape, str] = {}
        """Why jobs of a shape are not placed, as asked since something last happened; empty when they would be."""

    def invalidate(self) -> None:
        """Reasons that were worked out may no longer hold."""
        self._refusals.clear()

    # What is scanned, and when

    def place(self, now: float) -> None:
        """Try whoever may have got a chance since this was last called, and each newcomer once."""
        self._queues.bounced.clear()
        capacity_gained, departures = self._grid.take_capacity_gained(), self._grid.take_departures()
        if self._ledger.changed_clusters:
            self._queues.reservation.invalidate()
        if capacity_gained or self._ledger.changed_clusters or self._owner_use.take_freed():
            self._queues.due.update(Priority)
        elif departures:
            self._queues.due.add(Priority.HIGH)  # which may be placed on nodes that are about to be free
        self._update_reservation()
        while True:
            if self._rules.event_driven:
                self._scan_due(Priority, now)
            if not self._queues.arrivals:
                return
            self._try_arrivals(now)

    def scan_periodically(self, now: float) -> None:
        """The high queue S times for each time of the low one; each is a failed try of those that stay."""
        scanned = [Priority.HIGH]
        self._high_scans += 1
        if self._high_scans >= self._rules.high_scans_per_low:
            self._high_scans = 0
            scanned.append(Priority.LOW)
        self._queues.bounced.clear()
        self._update_reservation()
        self._queues.due.update(scanned)
        self._scan_due(scanned, now)
        for priority in scanned:
            self._count_scan(priority, now)
        self._queues.reservation.invalidate()
        self._update_reservation()
        self._scan_due(scanned, now)

    def _update_reservation(self) -> None:
        """For whom nodes are kept, if that may have changed: it is offered these, and others what is not kept now."""
        if self._queues.reservation.update(self._evaluator.evaluate):
            self._queues.due.update(Priority)

    def _scan_due(self, priorities: Iterable[Priority], now: float) -> None:
        while due := [priority for priority in priorities if priority in self._queues.due]:
            self._queues.due.remove(due[0])
            self._scan(due[0], now)

    # One scan

    def view_with_preemption(self) -> GridView:
        """The grid as it would be if low-priority jobs made room for one of high priority."""
        return self._offers.view_with_preemption()

    def _scan(self, priority: Priority, now: float) -> None:
        queue = self._queues[priority]
        if not len(queue):
            return
        while (reserved := self._queues.reservation.job) is not None and reserved in queue:
            if not self._place(reserved, self._offers.of(priority, everything=True), now):
                break
        offer, barred = self._offers.of(priority), queue.barred
        queue.scan(lambda job: self._place(job, offer, now), self._rules.queue, partial(self._may_fit, offer))
        if queue.barred > barred:
            self._ledger.count_refusals(RefusalKind.LIMIT, queue.barred - barred)

    def _may_fit(self, offer: Offer, needs: Needs) -> bool:
        may = offer.may_fit(needs)
        if not may:
            self._ledger.count_refusals(RefusalKind.NODES)
        return may

    def _try_arrivals(self, now: float) -> None:
        """Each newcomer once, in the order of the queues; shapes refused once are refused for all of a queue."""
        arrivals, self._queues.arrivals = self._queues.arrivals, []
        offers = {priority: self._offers.of(priority) for priority in Priority}
        for priority, offer in offers.items():
            queue, refused = self._queues[priority], set[Shape]()
            for job_id in sorted({job for job in arrivals if job in queue}, key=queue.key):
                if self._rules.queue == "fcfs" and queue.head() != job_id:
                    continue
                job = self._ledger.jobs[job_id]
                shape, needs = self._queues.shape(job.spec), needs_of(job.spec.request)
                if shape in refused or not self._may_fit(offer, needs) or not self._place(job_id, offer, now):
                    refused.add(shape)
                    self._count_try(job, now)

    def _place(self, job_id: JobId, offer: Offer, now: float) -> bool:
        """Take a job out of its queue and start to claim for it, if it can be placed."""
        if job_id in self._queues.bounced:
            return False
        job = self._ledger.jobs[job_id]
        if self._owner_use.of(job.spec, self._state.now) is not None:
            self._ledger.count_refusals(RefusalKind.LIMIT)
            return False
        answer = self._evaluator.evaluate(job.spec, offer.view)
        if isinstance(answer, Refusal) and offer.with_preemption is not None:
            answer = self._evaluator.evaluate(job.spec, offer.with_preemption)
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

    # Tries

    def _count_scan(self, priority: Priority, now: float) -> None:
        queue = self._queues[priority]
        if self._rules.queue != "scan":
            # A scan that ends at the first refusal has tried nobody behind it.
            if (head := queue.head()) is not None:
                self._count_try(self._ledger.jobs[head], now)
        elif len(queue):
            for job in queue.count_scan():
                self._give_up(self._ledger.jobs[job], now)
            self._ledger.scanned(priority, queue.scans)

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

    def waiting_reason(self, job: Job) -> str:
        """Why a queued job is not placed."""
        if job.retry_at is not None:
            failures = "a failed attempt" if job.restarts == 1 else f"{job.restarts} failed attempts"
            return f"is tried again at {clock(job.retry_at, job.retry_at, exact=True)}, after {failures}"
        if (excess := self._owner_use.of(job.spec, self._state.now)) is not None:
            return excess.said
        queue = self._queues[job.spec.priority]
        if self._rules.queue != "scan" and (head := queue.head()) is not None and head != job.id:
            return f"waits behind job {head}"
        shape = self._queues.shape(job.spec)
        refusal = self._refusals.get(shape)
        if refusal is None:
            answer = self._evaluator.evaluate(job.spec, self._grid.view())
            refusal = self._refusals[shape] = answer.summary if isinstance(answer, Refusal) else ""
        if refusal:
            return refusal
        reserved = self._queues.reservation.job
        if reserved not in (None, job.id) and job.spec.priority is Priority.LOW:
            return f"nodes are kept for job {reserved}, which has waited longer"
        return "fits, and waits for the next scan"
