"""The placement queues of both priorities, with a section for each home site (semantics 4 and 8).

The table of queue positions in ``docs/scheduling.md`` is implemented by ``_enter`` and ``remove``.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from koalapy.model.application import application_of
from koalapy.model.job import Job, JobId, RefusalCause
from koalapy.model.job_sizes import NOTHING_BARRED, Barred
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import ClusterName, Request, shape_of
from koalapy.scheduler.queue.eligibility import Eligibility, placement_limit, scan_tries_all
from koalapy.scheduler.queue.kept_nodes import KeptNodes
from koalapy.scheduler.queue.plan import Plan
from koalapy.scheduler.queue.promises import Promises
from koalapy.scheduler.queue.queue import NODES_ANYWHERE, Change, Duration, Key, Place, PlacementQueue, Shape, Wakeup
from koalapy.scheduler.state import Deadline, SchedulerState

PRIORITIES = tuple(Priority)
"""The priorities in the order in which their queues are tried."""
MAX_SHARED_REQUESTS = 10_000
RESERVED_SECTION = 10**6
"""The first section of jobs in reservations, each of which has one, after those of home sites."""


class PlacementQueues:
    """The queues of both priorities, the jobs that are to be tried, the plan, and the nodes kept for restarts."""

    def __init__(self, state: SchedulerState, eligibility: Eligibility) -> None:
        self._state, self._rules, self._ledger = state, state.rules, state.ledger
        self._eligibility = eligibility
        self._use = state.owner_use
        order = state.rules.queue_order
        self._queues = {
            priority: PlacementQueue(
                order, lambda ask: state.owner_use.excess_of(ask, state.now) is not None, state.standing
            )
            for priority in Priority
        }
        self.kept = KeptNodes(state)
        self.promises = Promises(state)
        self.plan = Plan(state, self._queues, self.kept, self.promises)
        self._last_seq = 0
        self._first_seq = 0
        """The lowest number: that of the last job moved to the front of its section."""
        self._pausing: set[JobId] = set()
        """Queued jobs outside their queues: they are deferred, or return after a pause."""
        self.newcomers: dict[Priority, list[Place]] = {priority: [] for priority in Priority}
        """Heaps of jobs to try out of turn; some may have left the queue."""
        self.changed: set[JobId] = set()
        """Newcomers that had waited before and were changed. This try of them does not count."""
        self._unknown: defaultdict[str, set[JobId]] = defaultdict(set)
        """Jobs with learning policies, by application, for applications without run-time statistics."""
        self.wakeups = {priority: Wakeup() for priority in Priority}
        """The jobs to be tried in a scan, as a change may allow their placement."""
        self.placing: JobId | None = None
        """The job that is being placed now, if any."""
        self.failed_at_once: set[JobId] = set()
        """Jobs with a claim that failed in the cycle of their placement. They are not placed again in that cycle,
        unless they are barred from its clusters."""
        self._requests: dict[Request, Request] = {}
        self.unreserved: list[JobId] = []
        """Jobs that have come since the last ``StartConditions.settle`` with a reservation that is not in force."""

    def __getitem__(self, priority: Priority) -> PlacementQueue:
        return self._queues[priority]

    def __len__(self) -> int:
        return len(self._pausing) + sum(len(queue) for queue in self._queues.values())

    def shape(self, spec: JobSpec, barred: Barred = NOTHING_BARRED, duration: Duration | None = None) -> Shape:
        """Return all properties of a job on which its policy depends; ``barred``: sizes that were rejected."""
        learned: tuple[object, ...] = ()
        if self._learns(spec):
            learned = (*self._state.experience.shape(spec), spec.per_node_bandwidth, spec.memory)
        internal = ("internal",) if spec.internal else ()
        # A job rejected by a limit must not stop the jobs of other owners.
        demand = () if (ask := self._use.demand_of(spec)) is None else (ask,)
        site = ("site", site) if (site := self._state.sharing.site_of(spec.home_site)) else ()
        demands = self._eligibility.demands(spec)
        has_hub = bool(self._state.grid.relays.streams)
        ranks = ("ranks", spec.processes_per_node, spec.cpus_per_rank) if has_hub else ()
        refused = ("refused", *sorted(barred)) if barred else ()
        until = ("walltime", spec.walltime) if self._state.grid.view().has_reservations else ()
        owner = ("owner", spec.owner) if self._rules.queue_order == "fair-share" else ()
        reserved = ("reservation", spec.reservation) if spec.reservation else ()
        return (
            spec.policy,
            *shape_of(spec.request),
            *demands,
            *spec.inputs,
            *learned,
            *internal,
            *demand,
            *site,
            *ranks,
            *refused,
            *until,
            *owner,
            *reserved,
            duration or self.plan.duration_of(spec),
        )

    def duration_of(self, spec: JobSpec, job: Job | None = None) -> Duration:
        """Return how long a new job is expected to run, or a waiting ``job``: as when it entered its queue."""
        if job is not None and job.spec == spec and job.id in self._queues[spec.priority]:
            return self._queues[spec.priority].group_of(job.id).needs.duration
        return self.plan.duration_of(spec)

    def waiting_requests(self) -> Iterator[Request]:
        """Yield the requests of waiting jobs in queue order, high priority first."""
        return (self._ledger.jobs[job].spec.request for queue in self._queues.values() for job in queue)

    def awaited_clusters(self) -> frozenset[ClusterName]:
        """Return the clusters where a waiting job might be placed, as far as its request says."""
        names = frozenset[ClusterName]().union(*(queue.awaited for queue in self._queues.values()))
        anywhere = NODES_ANYWHERE.name in names
        return frozenset(cluster.name for cluster in self._state.grid.clusters()) if anywhere else names

    def position(self, job: Job) -> int | None:
        """Return a queued job's position in its section, counted from 1; None if it is not in a queue."""
        queue = self._queues[job.spec.priority]
        return queue.position(job.id) + 1 if job.id in queue else None

    def positions(self, jobs: Iterable[Job]) -> dict[JobId, int]:
        """Return the positions of those of the jobs that are in a queue."""
        return {job.id: position for job in jobs if (position := self.position(job)) is not None}

    # Adding and removing jobs

    def add_new(self, job: Job, *, deferred: bool = False) -> None:
        """Add a new job to its queue, or with ``deferred`` to the jobs that wait outside of it.

        Equal requests are replaced by one object, since they use most of the queue's memory.
        """
        if len(self._requests) > MAX_SHARED_REQUESTS:
            self._requests.clear()
        self._ledger.use_equal_request(job, self._requests.setdefault(job.spec.request, job.spec.request))
        if deferred:
            self._last_seq += 1
            self.pause(self._ledger.change_job(job, queue_seq=self._last_seq))
        else:
            self._enter(job, anew=True)

    def release(self, job: Job) -> None:
        """Add a released job where a new one would be added."""
        self._enter(job, anew=True)

    def requeue(self, job: Job) -> None:
        """Return a job to its old position after its attempt or pause."""
        self._enter(job, anew=False)

    def move_to_front(self, job: Job) -> Job:
        """Set a job to return before all others of its home site, since its nodes were reclaimed."""
        self._first_seq -= 1
        return self._ledger.change_job(job, queue_seq=self._first_seq)

    def head(self, spec: JobSpec) -> JobId | None:
        """Return the first job of the section of such a job, as far as limits go; None if there is none."""
        return self._queues[spec.priority].head(self._section_of(spec))

    def _section_of(self, spec: JobSpec) -> int:
        """Return the section of a job: jobs of other sections do not block it."""
        if spec.reservation:
            reservation = self._state.reservations.get(spec.reservation)
            return RESERVED_SECTION + (0 if reservation is None else reservation.id)
        return self._state.sharing.section_of(spec.home_site)

    def head_before(self, spec: JobSpec, job: Job | None = None) -> JobId | None:
        """Return the first job before a new job, or before a waiting ``job`` that is changed; None if there is none.

        ``spec``: that of the new or changed job.
        """
        return self._queues[spec.priority].head_before(self._key_of(spec, job))

    def is_tried_at_once(self, spec: JobSpec, job: Job | None = None) -> bool:
        """Return whether a new job, or a waiting ``job`` that is changed, is tried before the next scan."""
        if self._rules.queue != "fcfs" or (job is not None and job.id == self.plan.job):
            return True
        return self.head_before(spec, job) is None

    def count_before(self, spec: JobSpec, job: Job | None = None) -> int:
        """Return how many jobs would be before a new job, or before a waiting ``job`` that is changed."""
        return self._queues[spec.priority].count_before(self._key_of(spec, job))

    def _key_of(self, spec: JobSpec, job: Job | None) -> Key:
        """Return the sort key that a new job, or a waiting ``job`` that is changed, would have in its queue."""
        queue, section = self._queues[spec.priority], self._section_of(spec)
        if job is None:
            return queue.key_of(spec.owner, section, spec.request.total_size)
        return queue.key_of(spec.owner, section, spec.request.total_size, job.queue_seq, job.id)

    def pause(self, job: Job) -> None:
        """Keep a queued job out of its queue until its ``retry_at``, or while it is deferred."""
        self._pausing.add(job.id)
        self._check_reservation(job.spec, job.id)

    def restore(self, jobs: Collection[Job], scans: Mapping[Priority, int]) -> None:
        """Return jobs of an earlier daemon run to their positions, with its scan counts."""
        for priority, count in scans.items():
            self._queues[priority].scans = count
        for job in jobs:
            self._last_seq = max(self._last_seq, job.queue_seq)
            self._first_seq = min(self._first_seq, job.queue_seq)
            if job.is_in_queue:
                self._push_job(job)
        for job in jobs:
            self.kept.keep_for_restart(job)
        self.plan.restore(jobs)

    def _enter(self, job: Job, *, anew: bool, is_changed: bool = False) -> None:
        """Add a job at the tail if ``anew``, else at its old position. Try a new or changed one at once, others by a
        scan."""
        self._pausing.discard(job.id)
        if anew:
            self._last_seq += 1
        scans = self._queues[job.spec.priority].scans
        job = self._ledger.change_job(
            job, queue_seq=self._last_seq if anew else job.queue_seq, retry_at=None, counted_scan=scans
        )
        self._push_job(job)
        if not anew:
            self.plan.note_return(job)
        priority = job.spec.priority
        if is_changed:
            self.changed.add(job.id)
        if anew or is_changed:
            heapq.heappush(self.newcomers[priority], self._queues[priority].entry_of(job.id).place)
        elif job.id == self.placing:
            self.failed_at_once.add(job.id)
        else:
            self.wakeups[priority].jobs.add(job.id)

    def _push_job(self, job: Job) -> None:
        """Insert a job in the queue of its priority, at the position that its ``queue_seq`` gives."""
        spec, sharing = job.spec, self._state.sharing
        self._check_reservation(spec, job.id)
        section, home = self._section_of(spec), sharing.reclaiming_site(spec.home_site)
        queue = self._queues[spec.priority]
        ask, duration = self._use.demand_of(spec), self.plan.duration_of(spec)
        shape = self.shape(spec, job.barred_sizes(self._state.now), duration)
        queue.push(job.id, job.queue_seq, shape, spec, ask, home, section, job.waits_since, duration)
        if self._learns(spec) and not self._state.experience.knows(application := application_of(spec)):
            self._unknown[application].add(job.id)
        self.record_tries(job)

    def _check_reservation(self, spec: JobSpec, job: JobId) -> None:
        if spec.reservation and self._state.reservations.get(spec.reservation) is None:
            self.unreserved.append(job)

    def remove(self, job: Job) -> Job:
        """Remove a job from its queue, and count the scans it went through as its tries."""
        self.kept.release_kept(job.id)
        if job.planned_start is not None and job.id != self.placing:
            job = self._ledger.change_job(job, planned_start=self.promises.note_end(job.planned_start))
        if job.id in self._pausing:
            self._pausing.remove(job.id)
            self._state.timers.cancel(job.id, 0, Deadline.RETRY)
            return self._ledger.change_job(job, retry_at=None)
        priority, tries = job.spec.priority, self.tries(job)
        self.plan.note_departure(job.id)
        if self._rules.queue != "scan":
            if job.id != self.placing:
                self.wakeups[priority].all_jobs = True  # it may have blocked other jobs
            elif self._use.demand_of(job.spec) is not None:
                self.wake_all()  # its use may bar jobs of its owner that blocked other jobs
        self._queues[priority].remove(job.id)
        self.wakeups[priority].jobs.discard(job.id)
        self.changed.discard(job.id)
        if self._unknown and self._learns(job.spec) and (application := application_of(job.spec)) in self._unknown:
            self._unknown[application].discard(job.id)
            if not self._unknown[application]:
                del self._unknown[application]
        return self._ledger.change_job(job, placement_tries=tries) if tries != job.placement_tries else job

    def has(self, job: Job) -> bool:
        """Return whether a job is in the queue of its priority, or deferred."""
        return job.id in self._queues[job.spec.priority] or job.id in self._pausing

    def renew(self, array: Job) -> None:
        """Keep an array in its queue after a task was placed, with no tries: another task may be placed at once.

        For the plan it waits from now on, so that it does not keep the planned start from other jobs.
        """
        priority = array.spec.priority
        if self._rules.queue != "scan" and self._use.demand_of(array.spec) is not None:
            self.wake_all()  # its use may bar jobs of its owner that blocked other jobs
        self._queues[priority].renew(array.id, self._state.now)
        self.record_tries(array)

    def try_again(self, job: Job, *, is_newcomer: bool = False) -> None:
        """Try a job again in this cycle: an array that no scan has tried, or a job that may be placed elsewhere."""
        priority = job.spec.priority
        self.failed_at_once.discard(job.id)
        if is_newcomer:
            heapq.heappush(self.newcomers[priority], self._queues[priority].entry_of(job.id).place)
        else:
            self.wakeups[priority].jobs.add(job.id)

    def _learns(self, spec: JobSpec) -> bool:
        return self._state.policies.capabilities(spec.policy).learns

    def next_newcomer(self, priority: Priority) -> Job | None:
        """Return the first newcomer that was not tried yet, each only once; None if there is none."""
        queue, newcomers = self._queues[priority], self.newcomers[priority]
        while newcomers:
            place = heapq.heappop(newcomers)
            if (job := place[-1]) in queue and queue.entry_of(job).place == place:
                return self._ledger.jobs[job]
        return None

    def change(self, job: Job, spec: JobSpec) -> Job:
        """Replace the specification of a waiting job, and try it at once unless it is held or deferred.

        It keeps its tries, and its submission time, which orders the queue. A pause before its next attempt ends.
        Rejections of the former specification are forgotten, and nodes are kept for its restart only.
        """
        if replace(spec, priority=job.spec.priority) != job.spec:
            self.kept.release_kept(job.id)
            refusals = tuple(entry for entry in job.refusals if entry.cause is not RefusalCause.REJECTED)
            job = self._ledger.change_job(job, refusals=refusals)
        if job.is_deferred or not self.has(job):
            return self._ledger.change_job(job, spec=spec)
        has_kept_nodes = job.id in self.kept.restarting_jobs()
        job = self._ledger.change_job(self.remove(job), spec=spec)
        self._enter(job, anew=False, is_changed=True)
        if has_kept_nodes:
            self.kept.keep_for_restart(self._ledger.jobs[job.id])
        return self._ledger.jobs[job.id]

    def regroup_jobs(self, applications: Iterable[str]) -> None:
        """Regroup the jobs of applications for which run-time statistics now exist."""
        for application in applications:
            for ident in self._unknown.pop(application, ()):
                self._move_to_group(self._ledger.jobs[ident])

    def regroup_job(self, job: Job) -> None:
        """Regroup a queued job after the clusters that rejected it have changed."""
        if job.id in self._queues[job.spec.priority]:
            self._move_to_group(job)

    def _move_to_group(self, job: Job) -> None:
        """Move a queued job to the group of jobs that now have equal properties, and wake it."""
        self._queues[job.spec.priority].remove(job.id)
        self._push_job(job)
        self.wakeups[job.spec.priority].jobs.add(job.id)

    # Waking jobs that may fit after a change

    def wake(self, changes: Iterable[Change], priorities: Iterable[Priority] = PRIORITIES) -> None:
        """Wake the jobs that wait for one of these changes."""
        for priority in priorities:
            if self._queues[priority]:
                self.wakeups[priority].changes.update(changes)

    def wake_all(self, priorities: Iterable[Priority] = PRIORITIES) -> None:
        """Wake all jobs of these priorities."""
        for priority in priorities:
            self.wakeups[priority].all_jobs |= bool(self._queues[priority])

    def take_wakeup(self, priority: Priority) -> Wakeup:
        """Return and reset the jobs of a priority that are to be tried."""
        wakeup, self.wakeups[priority] = self.wakeups[priority], Wakeup()
        return wakeup

    # Tries

    def tries(self, job: Job) -> int:
        """Return a job's placement tries, including scans that passed it over."""
        queue = self._queues[job.spec.priority]
        return job.placement_tries + (queue.scans - job.counted_scan if job.id in queue else 0)

    def record_tries(self, job: Job) -> None:
        """Pass a job's tries to its queue. If scans try only the head, they use up no tries."""
        limit = placement_limit(job, self._rules) if scan_tries_all(self._rules) else None
        self._queues[job.spec.priority].set_tries(job.id, self.tries(job), limit)
