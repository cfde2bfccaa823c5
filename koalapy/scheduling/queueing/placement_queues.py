"""The jobs that wait to be placed: two queues, their places, scans, tries and limits (semantics 4).

``docs/scheduling.md`` has a table of a job's place in its queue: ``_enter`` and ``leave`` are that table.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from koalapy.model.cluster import GridView
from koalapy.model.job import Job, JobId, JobState, Priority
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import ClusterName, Request
from koalapy.model.wording import clock
from koalapy.scheduling.grid import ClusterStatus
from koalapy.scheduling.queueing.aging import Aging
from koalapy.scheduling.queueing.needs import needs_of
from koalapy.scheduling.queueing.offers import Offers
from koalapy.scheduling.queueing.policy_evaluation import PolicyEvaluator, Shape
from koalapy.scheduling.queueing.queue import ANY_CLUSTER, PlacementQueue
from koalapy.scheduling.queueing.tries import placement_limit
from koalapy.scheduling.state import SchedulerState

SHARED_REQUESTS = 10_000


class PlacementQueues:
    """Offers the grid to waiting jobs; ``begin`` is called with each job that was placed, and its placement."""

    def __init__(
        self,
        state: SchedulerState,
        evaluator: PolicyEvaluator,
        room_with_preemption: Callable[[ClusterStatus], int],
        begin: Callable[[Job, Placement, float], None],
    ) -> None:
        self.rules, self.grid, self._ledger = state.rules, state.grid, state.ledger
        self.room_with_preemption = room_with_preemption
        self._evaluator = evaluator
        self._begin = begin
        self._queues = {priority: PlacementQueue(self.rules.queue_order) for priority in Priority}
        self._aging = Aging(state, self._queues, evaluator)
        self._seq = 0
        self._pausing: set[JobId] = set()
        """Queued jobs that come back to their queues later."""
        self._arrivals: list[JobId] = []
        """Jobs at the tails of their queues that are to be tried out of turn."""
        self._due: set[Priority] = set()
        """Queues where somebody may be placed that could not be when they were scanned last."""
        self._beginning: JobId | None = None
        self._bounced: set[JobId] = set()
        """Jobs whose claim failed in the moment in which they were placed: they are not placed again in that moment."""
        self._answers: dict[Shape, str] = {}
        """Why jobs of a shape are not placed, as asked since something last happened; empty when they would be."""
        self._requests: dict[Request, Request] = {}
        self._high_scans = 0

    # Who waits

    def __len__(self) -> int:
        return len(self._pausing) + sum(len(queue) for queue in self._queues.values())

    def requests(self) -> Iterable[Request]:
        """In the order of the queues, that of high priority first."""
        return (self._ledger.jobs[job].spec.request for queue in self._queues.values() for job in queue.in_order())

    def awaited_clusters(self) -> frozenset[ClusterName]:
        """Where a job that waits might be placed, as far as its request says."""
        named = frozenset[ClusterName]().union(*(queue.awaited for queue in self._queues.values()))
        return frozenset(cluster.name for cluster in self.grid.clusters()) if ANY_CLUSTER in named else named

    def arrive(self, job: Job) -> None:
        """A new job. Equal requests become one object: a full queue is mostly requests."""
        if len(self._requests) > SHARED_REQUESTS:
            self._requests.clear()
        request = self._requests.setdefault(job.spec.request, job.spec.request)
        if request is not job.spec.request:
            job = replace(job, spec=replace(job.spec, request=request))
        self._enter(job, anew=True)

    def release(self, job: Job) -> None:
        """A job that was held stands where a new one would."""
        self._enter(job, anew=True)

    def come_back(self, job: Job) -> None:
        """A job whose attempt is over, or the pause after it."""
        self._enter(job, anew=False)

    def pause(self, job: Job) -> None:
        """Keep a queued job out of its queue until its ``retry_at``, when it comes back."""
        self._pausing.add(job.id)

    def restore(self, job: Job) -> None:
        """A job of an earlier life, to its old place, with its tries."""
        self._seq = max(self._seq, job.queue_seq)
        if job.waits:
            self._push(job)

    def restore_scans(self, scans: Mapping[Priority, int]) -> None:
        """What the tries of jobs of an earlier life are counted by; before these are restored."""
        for priority, count in scans.items():
            self._queues[priority].scans = count

    def _enter(self, job: Job, *, anew: bool) -> None:
        """Put a job into its queue: at the tail, to be tried at once, or to the place that it has had all the time,
        to be tried when its turn comes in a scan, which is due."""
        self._pausing.discard(job.id)
        if anew:
            self._seq += 1
        scans = self._queues[job.spec.priority].scans
        job = self._ledger.change(
            job, queue_seq=self._seq if anew else job.queue_seq, retry_at=None, counted_scan=scans
        )
        self._push(job)
        if anew:
            self._arrivals.append(job.id)
        elif job.id == self._beginning:
            self._bounced.add(job.id)
        else:
            self._due.add(job.spec.priority)

    def _push(self, job: Job) -> None:
        queue = self._queues[job.spec.priority]
        queue.push(job.id, job.queue_seq, self._evaluator.shape(job.spec), job.spec.request)
        self._say_tries(job)
        if self.tries(job) >= self.rules.aging_tries:
            self._aging.reconsider()

    def leave(self, job: Job) -> Job:
        """Take a job out of its queue; the scans it went through become tries of its own."""
        if job.id in self._pausing:
            self._pausing.remove(job.id)
            return self._ledger.change(job, retry_at=None)
        priority, tries = job.spec.priority, self.tries(job)
        if job.id == self._aging.job:
            self._aging.reconsider()
        if self.rules.queue != "scan" and job.id != self._beginning:
            self._due.add(priority)  # it may have stood in others' way
        self._queues[priority].remove(job.id)
        return self._ledger.change(job, placement_tries=tries) if tries != job.placement_tries else job

    def tell_apart(self, jobs: Iterable[Job]) -> None:
        """The shapes of these jobs have changed: they are not refused any more with those they were like before."""
        for job in jobs:
            queue = self._queues[job.spec.priority]
            if job.id in queue:
                queue.remove(job.id)
                self._push(job)
                self._due.add(job.spec.priority)

    def position(self, job: Job) -> int | None:
        """A queued job's place in its queue, counted from 1."""
        queue = self._queues[job.spec.priority]
        return queue.position(job.id) + 1 if job.id in queue else None

    def tries(self, job: Job) -> int:
        """How often a job was tried to be placed, scans that passed it over among them."""
        queue = self._queues[job.spec.priority]
        return job.placement_tries + (queue.scans - job.counted_scan if job.id in queue else 0)

    # What they are offered

    @property
    def reservation(self) -> JobId | None:
        """The job that has failed so many scans that nodes are kept for it."""
        return self._aging.job

    def kept(self, cluster: ClusterName) -> int:
        """Nodes that are not offered to jobs of low priority there, for the sake of that one."""
        return self._aging.kept(cluster)

    def view(self, priority: Priority) -> GridView:
        """The grid as a job of that priority would be placed on it now."""
        return self._aging.view() if priority is Priority.LOW else self.grid.view()

    def view_with_preemption(self) -> GridView:
        """The grid as it would be if low-priority jobs made room for one of high priority."""
        return self.grid.view(self.room_with_preemption)

    def reason(self, job: Job) -> str:
        """Why a queued job is not placed."""
        if job.retry_at is not None:
            return f"is tried again at {clock(job.retry_at, job.retry_at, exact=True)}, after {_failures(job.restarts)}"
        queue = self._queues[job.spec.priority]
        if self.rules.queue != "scan" and (head := queue.head()) is not None and head != job.id:
            return f"waits behind job {head}"
        shape = self._evaluator.shape(job.spec)
        answer = self._answers.get(shape)
        if answer is None:
            refused = self._evaluator.ask(job.spec, self.grid.view())
            answer = self._answers[shape] = refused.summary if isinstance(refused, Refusal) else ""
        if answer:
            return answer
        if self.reservation not in (None, job.id) and job.spec.priority is Priority.LOW:
            return f"nodes are kept for job {self.reservation}, which has waited longer"
        return "fits, and waits for the next scan"

    def invalidate(self) -> None:
        """Reasons that were told may no longer hold."""
        self._answers.clear()

    # Scans

    def place(self, now: float) -> None:
        """Try whoever may have got a chance since this was last called, and each newcomer once."""
        self._bounced.clear()
        self._wake()
        self._choose()
        while True:
            if self.rules.event_driven:
                self._scan_due(Priority, now)
            if not self._arrivals:
                return
            self._try_arrivals(now)

    def scan_periodically(self, now: float) -> None:
        """The high queue S times for each time of the low one; each is a failed try of those that stay."""
        scanned = [Priority.HIGH]
        self._high_scans += 1
        if self._high_scans >= self.rules.high_scans_per_low:
            self._high_scans = 0
            scanned.append(Priority.LOW)
        self._bounced.clear()
        self._choose()
        self._due.update(scanned)
        self._scan_due(scanned, now)
        for priority in scanned:
            self._count_scan(priority, now)
        self._aging.reconsider()
        self._choose()
        self._scan_due(scanned, now)

    def _wake(self) -> None:
        """Whom may help what has changed of the grid."""
        grown, departing = self.grid.take_capacity_gained(), self.grid.take_departures()
        if self._ledger.changed_clusters:
            self._aging.reconsider()
        if grown or self._ledger.changed_clusters:
            self._due.update(Priority)
        elif departing:
            self._due.add(Priority.HIGH)  # which may be placed on nodes that are about to be free

    def _choose(self) -> None:
        """For whom nodes are kept, if that may have changed: it is offered these, and others what is not kept now."""
        if self._aging.choose():
            self._due.update(Priority)

    def _scan_due(self, priorities: Iterable[Priority], now: float) -> None:
        while due := [priority for priority in priorities if priority in self._due]:
            self._due.remove(due[0])
            self._scan(due[0], now)

    def _scan(self, priority: Priority, now: float) -> None:
        queue = self._queues[priority]
        if not len(queue):
            return
        while (aged := self._aging.job) is not None and aged in queue:
            if not self._place(aged, Offers(self, priority, everything=True), now):
                break
        offers = Offers(self, priority)
        queue.scan(lambda job: self._place(job, offers, now), self.rules.queue, offers.may_fit)

    def _try_arrivals(self, now: float) -> None:
        """Each newcomer once, in the order of the queues; shapes refused once are refused for all of a queue."""
        arrivals, self._arrivals = self._arrivals, []
        offers = {priority: Offers(self, priority) for priority in Priority}
        for priority, queue in self._queues.items():
            refused: set[Shape] = set()
            offer = offers[priority]
            for job_id in sorted({job for job in arrivals if job in queue}, key=queue.key):
                if self.rules.queue == "fcfs" and queue.head() != job_id:
                    continue
                job = self._ledger.jobs[job_id]
                shape, needs = self._evaluator.shape(job.spec), needs_of(job.spec.request)
                if shape not in refused and offer.may_fit(needs) and self._place(job_id, offer, now):
                    for other in offers.values():
                        other.renew()
                else:
                    refused.add(shape)
                    self._count_try(job, now)

    def _place(self, job_id: JobId, offers: Offers, now: float) -> bool:
        """Take a job out of its queue and begin to claim for it, if it can be placed."""
        if job_id in self._bounced:
            return False
        job = self._ledger.jobs[job_id]
        answer = self._evaluator.ask(job.spec, offers.view)
        if isinstance(answer, Refusal) and offers.with_preemption is not None:
            answer = self._evaluator.ask(job.spec, offers.with_preemption)
        if isinstance(answer, Refusal):
            return False
        self._beginning = job_id
        job = self.leave(job)
        self._begin(job, answer, now)
        self._beginning = None
        self._choose()
        offers.renew()
        return True

    # Tries

    def _say_tries(self, job: Job) -> None:
        """Tell the queue how often a job was tried; where only the head is in each scan, scans use up no tries."""
        limit = placement_limit(job, self.rules) if self.rules.queue == "scan" else None
        self._queues[job.spec.priority].tried(job.id, self.tries(job), limit)

    def _count_scan(self, priority: Priority, now: float) -> None:
        queue = self._queues[priority]
        if self.rules.queue != "scan":
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
        limit = placement_limit(job, self.rules)
        if limit is not None and self.tries(job) >= limit:
            self._give_up(job, now)
        else:
            self._say_tries(job)

    def _give_up(self, job: Job, now: float) -> None:
        reason = f"not placed in {placement_limit(job, self.rules)} tries: {self.reason(job)}"
        self._ledger.move(self.leave(job), JobState.FAILED, now, "failed", reason, ended_at=now)


def _failures(count: int) -> str:
    return "a failed attempt" if count == 1 else f"{count} failed attempts"
