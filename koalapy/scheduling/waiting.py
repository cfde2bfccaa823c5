"""The jobs that wait to be placed: two queues, their scans, tries and limits (semantics 4)."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heappop, heappush

from koalapy.model.cluster import GridView
from koalapy.model.job import Job, JobId, JobState, Priority
from koalapy.model.moment import clock
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import ClusterName, Request
from koalapy.scheduling.aging import Aging
from koalapy.scheduling.asking import Asking, Shape
from koalapy.scheduling.grid import ClusterBook, GridBook
from koalapy.scheduling.ledger import Ledger
from koalapy.scheduling.needs import needs_of
from koalapy.scheduling.offers import Offers
from koalapy.scheduling.queue import ANY_CLUSTER, PlacementQueue
from koalapy.scheduling.rules import Rules

SHARED_REQUESTS = 10_000


class Waiting:
    """Offers the grid to waiting jobs; ``begin`` is called with each job that was placed, and its placement."""

    def __init__(
        self, rules: Rules, ledger: Ledger, grid: GridBook, asking: Asking,
        room_with_preemption: Callable[[ClusterBook], int], begin: Callable[[Job, Placement, float], None],
    ) -> None:  # fmt: skip
        self.rules = rules
        self.grid = grid
        self.room_with_preemption = room_with_preemption
        self._ledger = ledger
        self._asking = asking
        self._begin = begin
        self._queues = {priority: PlacementQueue(rules.queue_order) for priority in Priority}
        self._aging = Aging(rules, self._queues, ledger, grid, asking.ask)
        self._seq = 0
        self._pausing: set[JobId] = set()
        """Queued jobs that come back to the tail of their queues later."""
        self._arrivals: list[JobId] = []
        self._expiries: dict[Priority, list[tuple[int, int, JobId]]] = {priority: [] for priority in Priority}
        """Of jobs with a limit of placement tries: (the scan at which it is reached, queue_seq, job)."""
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
        return frozenset(book.name for book in self.grid.books()) if ANY_CLUSTER in named else named

    def arrive(self, job: Job) -> None:
        """A new job. Equal requests become one object: a full queue is mostly requests."""
        if len(self._requests) > SHARED_REQUESTS:
            self._requests.clear()
        request = self._requests.setdefault(job.spec.request, job.spec.request)
        self.enqueue(job if request is job.spec.request else replace(job, spec=replace(job.spec, request=request)))

    def enqueue(self, job: Job) -> None:
        """To the tail of its queue; it is tried at once."""
        self._seq += 1
        self._pausing.discard(job.id)
        job = self._ledger.change(job, queue_seq=self._seq, retry_at=None)
        self._push(job)
        self._arrivals.append(job.id)

    def restore(self, job: Job) -> None:
        """A job of an earlier life, to its old place; jobs come in the order of ``queue_seq``."""
        self._seq = max(self._seq, job.queue_seq)
        if job.waits:
            self._push(job)

    def pause(self, job: Job) -> None:
        """Keep a queued job out of its queue until its ``retry_at``, when it is to be put there."""
        self._pausing.add(job.id)

    def _push(self, job: Job) -> None:
        queue = self._queues[job.spec.priority]
        queue.push(job.id, job.queue_seq, self._asking.shape(job.spec), job.spec.request)
        self._expect_limit(job)

    def leave(self, job: Job) -> Job:
        """Take a job out of its queue; the scans it went through become tries of its own."""
        if job.id in self._pausing:
            self._pausing.remove(job.id)
            return self._ledger.change(job, retry_at=None)
        scans = self._queues[job.spec.priority].remove(job.id)
        return self._ledger.change(job, placement_tries=job.placement_tries + scans) if scans else job

    def position(self, job: Job) -> int | None:
        """A queued job's place in its queue, counted from 1."""
        queue = self._queues[job.spec.priority]
        return queue.position(job.id) + 1 if job.id in queue else None

    def tries(self, job: Job) -> int:
        """How often a job was tried to be placed, scans that passed it over among them."""
        queue = self._queues[job.spec.priority]
        return job.placement_tries + (queue.scans_of(job.id) if job.id in queue else 0)

    # What they are offered

    @property
    def reservation(self) -> JobId | None:
        """The job that has failed so many scans that nodes are kept for it."""
        return self._aging.job

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
        shape = self._asking.shape(job.spec)
        answer = self._answers.get(shape)
        if answer is None:
            refused = self._asking.ask(job.spec, self.grid.view())
            answer = self._answers[shape] = refused.summary if isinstance(refused, Refusal) else ""
        if answer:
            return answer
        if self.reservation not in (None, job.id) and job.spec.priority is Priority.LOW:
            return f"nodes are kept for job {self.reservation}, which has waited longer"
        return "fits, and waits for the next scan"

    def something_happened(self) -> None:
        """Reasons that were told may no longer hold."""
        self._answers.clear()

    # Scans

    def scan_all(self, now: float) -> None:
        """Both queues, since nodes became free somewhere."""
        for priority in Priority:
            self._scan(priority, now)

    def scan_periodically(self, now: float) -> None:
        """The high queue S times for each time of the low one; each is a failed try of those that stay."""
        scanned = [Priority.HIGH]
        self._high_scans += 1
        if self._high_scans >= self.rules.high_scans_per_low:
            self._high_scans = 0
            scanned.append(Priority.LOW)
        for priority in scanned:
            self._scan(priority, now)
            self._count_scan(priority, now)
        self._aging.choose()

    def _scan(self, priority: Priority, now: float) -> None:
        queue = self._queues[priority]
        if not len(queue):
            return
        aged = self._aging.job
        if aged is not None and aged in queue:
            self._place(aged, Offers(self, priority, everything=True), now)
        offers = Offers(self, priority)
        queue.scan(lambda job: self._place(job, offers, now), self.rules.queue, offers.may_fit)

    def try_arrivals(self, now: float) -> None:
        """Each newcomer is tried once, in order; shapes refused once are refused for all of them."""
        arrivals, self._arrivals = self._arrivals, []
        offers = {priority: Offers(self, priority) for priority in Priority}
        refused: set[Shape] = set()
        for job_id in arrivals:
            job = self._ledger.get(job_id)
            if job is None or job_id not in self._queues[job.spec.priority]:
                continue
            if self.rules.queue == "fcfs" and self._queues[job.spec.priority].head() != job_id:
                continue
            shape, offer = self._asking.shape(job.spec), offers[job.spec.priority]
            if shape not in refused and offer.may_fit(needs_of(job.spec.request)) and self._place(job_id, offer, now):
                for other in offers.values():
                    other.renew()
            else:
                refused.add(shape)
                self._count_try(job, now)

    def _place(self, job_id: JobId, offers: Offers, now: float) -> bool:
        """Take a job out of its queue and begin to claim for it, if it can be placed."""
        job = self._ledger.jobs[job_id]
        answer = self._asking.ask(job.spec, offers.view)
        if isinstance(answer, Refusal) and offers.with_preemption is not None:
            answer = self._asking.ask(job.spec, offers.with_preemption)
        if isinstance(answer, Refusal):
            return False
        job = self.leave(job)
        self._aging.placed(job_id)
        offers.renew()
        self._begin(job, answer, now)
        return True

    # Tries

    def _limit(self, job: Job) -> int | None:
        own = job.spec.max_placement_tries
        return own if own is not None else self.rules.max_placement_tries

    def _expect_limit(self, job: Job) -> None:
        limit = self._limit(job)
        if limit is not None:
            at = self._queues[job.spec.priority].scans + max(0, limit - job.placement_tries)
            heappush(self._expiries[job.spec.priority], (at, job.queue_seq, job.id))

    def _count_scan(self, priority: Priority, now: float) -> None:
        queue = self._queues[priority]
        if self.rules.queue == "scan":
            queue.scans += 1
            expiries = self._expiries[priority]
            while expiries and expiries[0][0] <= queue.scans:
                _, seq, job_id = heappop(expiries)
                job = self._ledger.get(job_id)
                if job is not None and job.queue_seq == seq and job_id in queue:
                    self._give_up(job, now)
        elif (head := queue.head()) is not None:
            # A scan that ends at the first refusal has tried nobody behind it.
            self._count_try(self._ledger.jobs[head], now)

    def _count_try(self, job: Job, now: float) -> None:
        """A try that failed: on arrival, and where only the head is tried in each scan."""
        job = self._ledger.change(job, placement_tries=job.placement_tries + 1)
        limit = self._limit(job)
        if limit is not None and self.tries(job) >= limit:
            self._give_up(job, now)
        elif self.rules.queue == "scan":
            self._expect_limit(job)

    def _give_up(self, job: Job, now: float) -> None:
        reason = f"not placed in {self._limit(job)} tries: {self.reason(job)}"
        self._ledger.move(self.leave(job), JobState.FAILED, now, "failed", reason, ended_at=now)


def _failures(count: int) -> str:
    return "a failed attempt" if count == 1 else f"{count} failed attempts"
