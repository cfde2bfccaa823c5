"""Plan the start of the job that has waited longest, so that other jobs use its nodes only if they end in time."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import chain, pairwise
from math import ceil, inf, nextafter

from koalapy.model.advice import Size, run_size
from koalapy.model.application import application_of
from koalapy.model.cluster import ClusterState, GridView, count_idle
from koalapy.model.job import ComponentState, Job, JobId
from koalapy.model.job_sizes import MAX_TIME, Barred, NodeReservation
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.node_requirement import ANY_NODE, NodeFilter, NodeRequirement
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import ClusterName, FixedRequest
from koalapy.model.wording import format_utc
from koalapy.scheduler.attempts.facts import unclaimed
from koalapy.scheduler.claims.preemption import capacity_with_preemption
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.queue.component_sizes import exclude_reserved, transfer_of, transfer_times
from koalapy.scheduler.queue.eligibility import count_streams
from koalapy.scheduler.queue.kept_nodes import KeptNodes
from koalapy.scheduler.queue.promises import Promises
from koalapy.scheduler.queue.queue import UNLIMITED, Duration, Entry, IdleSummary, PlacementQueue
from koalapy.scheduler.rules import UNKNOWN_RUN_TIME_S
from koalapy.scheduler.state import SchedulerState

MARGIN_S = 60.0
"""Seconds that a job may hold its nodes beyond its run time."""
MAX_ESTIMATE_AGE_S = 600.0
"""Seconds after which estimates are renewed."""
ROUNDING = ((3600.0, 60.0), (43200.0, 600.0), (inf, 3600.0))
"""Expected run times up to the first number are multiples of the second one, as users choose them: jobs of equal
requests and similar run times are tried together."""
MAX_SEGMENTS = 16
"""Number of spans with enough nodes, between last placements before reservations, that are searched; then the last."""
HOLDS_NO_NODES = (ComponentState.PLACED, ComponentState.DELIVERING, ComponentState.ENDED)

Alike = tuple[str, Size]
"""The application and the size of jobs with similar run times."""
Evaluate = Callable[[JobSpec, GridView, Barred], Placement | Refusal]
"""Returns the answer of a job's policy on a view, without the clusters that rejected the job."""


class Plan:
    """The planned start of one job: the time by which enough nodes are expected to be free for it.

    The job has the highest priority and has waited longest, of those that would fit without the scheduler's other jobs.
    It keeps its turn until its nodes are claimed. Other jobs of its priority and below may use all nodes until the
    planned start, and run beyond it on nodes that the job does not need. If the start is late since a job of unknown
    run time did not end as expected, it is planned anew. From then on only jobs with a walltime may use its nodes.
    """

    def __init__(
        self, state: SchedulerState, queues: Mapping[Priority, PlacementQueue], kept: KeptNodes, promises: Promises
    ) -> None:
        self._state, self._queues, self._kept, self._promises = state, queues, kept, promises
        self._rules, self._ledger, self._grid, self._policies = state.rules, state.ledger, state.grid, state.policies
        self.job: JobId | None = None
        """The waiting job with the planned start."""
        self._placed: JobId | None = None
        """The job with the last plan, while it has yet to request nodes."""
        self._last_placed: JobId | None = None
        """The last job that was placed by its plan."""
        self._turns: dict[Priority, JobId] = {}
        """By priority, the job that had the plan last: it has the next one too if it is waiting still or again."""
        self._returned: set[JobId] = set()
        """The placed jobs with a planned start that have come back to their queues since the last update."""
        self.start = inf
        self.first_start = inf
        """The start that was planned first."""
        self._transfer_s = 0.0
        """Estimated seconds from the planned placement until the job's files are there."""
        self._first_unknown_end: dict[ClusterName, float] = {}
        """The first expected end of jobs without a walltime, by cluster."""
        self._limits: dict[ClusterName, int] = {}
        """The nodes on each of the planned clusters that other jobs may use beyond the planned start."""
        self._binds: frozenset[Priority] = frozenset()
        """The priorities of the jobs that must leave the planned nodes."""
        self._streams = 0
        """Streams over the hub that the job would need."""
        self._estimates: dict[Alike, float] = {}
        """Estimated run times by application and size, for ``MAX_ESTIMATE_AGE_S`` seconds."""
        self._estimated_at = 0.0
        self._alike: dict[JobId, Alike] = {}
        """The applications and sizes of active jobs without a walltime, as far as they were needed."""
        self._ledger.on_job_removed.append(self._forget)
        self._is_stale = True
        self._awaits_grid = False
        """Whether the job that had the plan does not fit the grid without the scheduler's jobs any more."""
        self._planned_on = 0
        """The version of the grid for which the start was planned."""
        self._without_own_jobs = self._grid.cached_view(
            lambda cluster: cluster.nodes.capacity_without_own_jobs,
            streams=lambda: self._grid.relays.streams,
            hides_parts=lambda _: True,
        )
        self._preempting = self._grid.cached_view(capacity_with_preemption, by_preemption=True)
        self._empty = GridView(())
        """The grid without the scheduler's jobs, and without drains and reservations that end, as last seen."""
        self._grids = 0
        """The number of different such grids so far. A shape rejected on one stays rejected until the next."""
        self._left = {
            (priority, is_late): self._grid.cached_view(
                partial(self._count_left, priority, is_late),
                streams=partial(self.streams_left_to, priority, is_late),
                hides_parts=partial(self._withholds_nodes, priority, is_late),
            )
            for priority in Priority
            for is_late in (False, True)
        }

    @property
    def holder(self) -> JobId | None:
        """Return the job that nodes are planned for, which waits or has yet to request its nodes."""
        return self.job if self.job is not None else self._placed

    def duration_of(self, spec: JobSpec) -> Duration:
        """Return how long a job is expected to run, after the transfer of its inputs: its walltime, or the run time of
        such jobs.

        It has no limit while no starts are planned.
        """
        if not self._rules.plans_starts:
            return UNLIMITED
        seconds, is_certain = spec.walltime, True
        if seconds is None:
            seconds, is_certain = self._estimate(spec, (application_of(spec), run_size(spec))), False
        if spec.all_inputs:
            key = "transfer time", spec.request, spec.inputs
            seconds += self._grid.view().compute_lasting(key, partial(self._transfer_time, spec))
        step = next(step for limit, step in ROUNDING if seconds <= limit)
        return Duration(ceil(seconds / step) * step, is_certain)

    def _transfer_time(self, spec: JobSpec, view: GridView) -> float:
        """Return the seconds until a job's inputs are on all clusters of a fixed request, else on the nearest cluster,
        also from clusters that are out of reach."""
        in_reach = view.compute_lasting(("in reach",), _with_all_in_reach)  # the same for all jobs of a restart
        delays = transfer_times(spec, in_reach, self._rules.assumed_bandwidth)
        longest = [max(seconds) for seconds in delays.values() if seconds]
        return (max if isinstance(spec.request, FixedRequest) else min)(longest, default=0.0)

    def _estimate(self, spec: JobSpec, alike: Alike) -> float:
        if self._rules.default_walltime is not None:
            return self._rules.default_walltime
        if alike not in self._estimates:
            learned = self._state.experience.expected_at_most(spec)
            if learned is None:
                return UNKNOWN_RUN_TIME_S
            self._estimates[alike] = learned
        return self._estimates[alike]

    def restore(self, jobs: Iterable[Job]) -> None:
        """Restore the plan of an earlier daemon run, for a waiting job or one that has yet to request its nodes.

        Its clusters are kept from jobs that would run beyond it, until it is renewed.
        """
        for job in sorted(jobs, key=lambda job: (job.is_in_queue, job.placed_at or 0.0)):
            planned = job.planned_start
            if not self._rules.plans_starts or planned is None or planned.at is None or planned.late is not None:
                continue
            if job.is_in_queue:
                self.job = self._turns[job.spec.priority] = job.id
                self._placed = None  # else no other job would have got a planned start
            else:
                self._last_placed = job.id  # it is placed, or pauses after a failed attempt
                if not (job.is_placed and unclaimed(job)):
                    continue
                self._placed = job.id
            self.start, self.first_start = planned.at - planned.delay, planned.first - planned.delay
            self._limits = {name: 0 for name in planned.clusters if name in self._grid}
            self._binds = self._bound_by(job)

    @property
    def awaits_reports(self) -> bool:
        """Return whether a planned cluster is out of contact for so short a time that the plan is left as it is."""
        statuses = [] if self.job is None else [self._grid[name] for name in self._limits]
        return any(self._may_report_soon(status) for status in statuses if status.drained is None)

    def _may_report_soon(self, cluster: ClusterStatus) -> bool:
        contact = cluster.contact
        if contact.silent_since is None or (contact.connected and cluster.nodes.reported):
            return False
        until = max(contact.silent_since + self._rules.unreachable_after, contact.silence_ignored_until)
        return self._state.now < until

    # What other jobs may use

    def is_delayed_by(self, duration: Duration) -> bool:
        """Return whether a job would still run at the planned start of another job."""
        if not self._binds:
            return False
        now = self._state.now
        if not duration.is_certain and now >= self.first_start:
            return True
        return now + duration.seconds + MARGIN_S > self.start

    def limit(self, priority: Priority, is_late: bool, cluster: ClusterStatus, nodes: int) -> int:
        """Return how many of these nodes jobs of a priority may use; ``is_late``: beyond the planned start."""
        return min(nodes, self._limits.get(cluster.name, nodes)) if is_late and priority in self._binds else nodes

    def view(self, priority: Priority, is_late: bool) -> GridView:
        """Return the grid as offered to jobs that end after the planned start of another one, or before."""
        is_limited = is_late and priority in self._binds
        if not is_limited and not (self._kept and priority is Priority.LOW):
            return self._grid.view()
        return self._left[priority, is_limited].view()

    def own_view(self, job: Job) -> GridView:
        """Return the grid as offered to the job with the planned start."""
        return self.restart_view(job, is_late=False) if job.spec.priority is Priority.LOW else self._grid.view()

    def restart_view(self, job: Job, *, is_late: bool) -> GridView:
        """Return the grid as offered to a job of low priority, with the nodes kept for it and for jobs behind it."""
        if not self._kept:
            return self.view(Priority.LOW, is_late)
        return self._grid.view(partial(self._count_left_to_restart, job, is_late))

    def _count_left_to_restart(self, job: Job, is_late: bool, cluster: ClusterStatus) -> int:
        available, kept_behind = cluster.nodes.available, self._kept.behind(cluster.name, job.id)
        remaining = self.limit(Priority.LOW, is_late, cluster, available + kept_behind - self._kept[cluster.name])
        return max(min(kept_behind, available), remaining)

    def _count_left(self, priority: Priority, is_late: bool, cluster: ClusterStatus) -> int:
        kept_nodes = self._kept[cluster.name] if priority is Priority.LOW else 0
        return self.limit(priority, is_late, cluster, cluster.nodes.available - kept_nodes)

    def reserved_nodes(self, cluster: ClusterName, spec: JobSpec, job: Job | None = None) -> int:
        """Return the available nodes on a cluster that are not offered to a new job, or to a waiting ``job``."""
        if spec.reservation:
            return 0
        status, is_planned = self._grid[cluster], job is not None and job.id == self.job
        is_late = not is_planned and self.is_delayed_by(self.duration_of(spec))
        if job is not None and spec.priority is Priority.LOW:
            return status.nodes.available - self._count_left_to_restart(job, is_late, status)
        return status.nodes.available - self._count_left(spec.priority, is_late, status)

    def gained_nodes(self, cluster: ClusterStatus, spec: JobSpec, job: Job | None, freed: int) -> int:
        """Return by how many nodes a job would be offered more on a cluster if so many ``freed`` were idle.

        The plan of another job counts on the ends of our own jobs already.
        """
        is_late = (job is None or job.id != self.job) and self.is_delayed_by(self.duration_of(spec))
        if cluster.name not in self._limits or spec.priority not in self._binds or not is_late:
            return freed
        return min(freed, max(0, cluster.last_report.total - cluster.nodes.idle - cluster.nodes.used))

    def keeper(self, spec: JobSpec, job: JobId | None) -> JobId | None:
        """Return for which other job nodes are withheld from a new job, or from a waiting ``job``; None for none."""
        if spec.reservation:
            return None
        if self.holder != job and spec.priority in self._binds and self.is_delayed_by(self.duration_of(spec)):
            return self.holder
        restarting = self._kept.restarting_jobs() if spec.priority is Priority.LOW else []
        return next((holder for holder in restarting if holder != job), None)

    def describe_keeper(self, keeper: JobId) -> str:
        """Return, as text, for which job nodes are withheld."""
        reason = self.describe_start() if keeper == self.holder else "runs again after a failure"
        return f"nodes are kept for job {keeper}, which {reason}"

    def describe_start(self) -> str:
        """Return the planned start as text: ``is planned for 14:20 UTC``."""
        return f"is planned for {format_utc(max(self.start, self._state.now), self._state.now)}"

    def _withholds_nodes(self, priority: Priority, is_late: bool, cluster: ClusterStatus) -> bool:
        """Return whether some nodes of a cluster are not offered: then none may be shared for longer either."""
        is_planned = is_late and priority in self._binds and cluster.name in self._limits
        return is_planned or self._count_left(priority, is_late, cluster) < cluster.nodes.available

    def streams_left_to(self, priority: Priority, is_late: bool) -> int:
        """Return the streams over the hub that are offered to jobs of a priority."""
        reserved = self._streams if is_late and priority in self._binds else 0
        return max(0, self._grid.free_streams - reserved)

    # Changes

    def invalidate(self) -> None:
        """Make the next ``update`` choose again, by new estimates."""
        self._is_stale = True
        if self._state.now >= self._estimated_at + MAX_ESTIMATE_AGE_S:
            self._estimated_at = self._state.now
            self._estimates.clear()

    def note_arrival(self, job: Job) -> bool:
        """Return whether a job that was refused may get the plan at once; after a pause periodic scans see to that."""
        is_urgent = job.spec.priority is Priority.HIGH and Priority.HIGH not in self._binds
        may_be_planned = not self._rules.plan_after and (self.holder is None or is_urgent)
        self._is_stale |= may_be_planned
        return may_be_planned

    def note_return(self, job: Job) -> None:
        """Give a planned job that is back in its queue, such as after a failed claim, its turn again."""
        if job.planned_start is not None:
            self._returned.add(job.id)
        if job.id == self._last_placed:
            self._turns[job.spec.priority], self._is_stale = job.id, True
        elif self.holder is None and not self._rules.plan_after:
            self._is_stale = True

    def note_departure(self, job: JobId) -> None:
        """Plan for another job if the one with the planned start has left its queue."""
        if job == self.job:
            self.job, self._is_stale = None, True

    def _forget(self, job: Job) -> None:
        """Forget a job that the ledger removes."""
        self._alike.pop(job.id, None)
        self._turns = {priority: turn for priority, turn in self._turns.items() if turn != job.id}
        if job.id == self._last_placed:
            self._last_placed = None

    def binds(self, priority: Priority) -> bool:
        """Return whether jobs of a priority must leave the planned nodes by the planned start."""
        return priority in self._binds

    def note_placement(self, placed: Job, placement: Placement, duration: Duration, *, is_planned: bool) -> None:
        """Keep the planned nodes until a placed job requests them, or subtract those that another one uses beyond."""
        if is_planned:
            self.job, self._placed, self._last_placed, self._is_stale = None, placed.id, placed.id, True
            self._turns.pop(placed.spec.priority, None)
        elif placed.spec.priority not in self._binds:
            self._is_stale |= any(component.cluster in self._limits for component in placement.components)
        elif self.is_delayed_by(duration) and not placed.spec.reservation:
            for component in placement.components:
                if component.cluster in self._limits:
                    self._limits[component.cluster] -= component.size
                    self._grid.touch(component.cluster)

    def update(self, evaluate: Evaluate) -> bool:
        """Plan again after changes; return whether other jobs may gain nodes.

        A planned start in the future is left until the next periodic scan, since that costs much.
        """
        if not self._rules.plans_starts or not (self._is_stale or self._planned_on != self._grid.version):
            return False
        if (not self._is_stale and not self._may_change()) or self.awaits_reports:
            return False
        former_holder, limits, start = self.holder, self._limits, self.start
        binding = self._binds, self._streams
        self._limits, self._streams, self._binds = {}, 0, frozenset()
        for name in limits:
            self._grid[name].nodes.classes.kept = ANY_NODE
        if not self._keep_for_placed():
            self._plan_next(evaluate)
        self._is_stale = False
        self._update_promises(former_holder, limits)
        if self.holder != former_holder or self.holder is None:
            self.first_start = self.start
        for name in {*limits, *self._limits}:
            if limits.get(name) != self._limits.get(name) or binding != (self._binds, self._streams):
                self._grid.touch(name)
        self._planned_on = self._grid.version
        return (
            self.holder != former_holder
            or self.start > start
            or any(self._limits.get(name, inf) > nodes for name, nodes in limits.items())
        )

    def _update_promises(self, former_holder: JobId | None, earlier: Iterable[ClusterName]) -> None:
        """Store the planned start with its job, and that the job ``former_holder`` has none any more."""
        for ident in dict.fromkeys((former_holder, self.job)):  # in this order
            job = self._ledger.get(ident) if ident is not None else None
            if job is None or not job.is_in_queue or (ident != self.job and job.planned_start is None):
                continue
            start, clusters = (self.start + self._transfer_s, self._limits) if ident == self.job else (None, ())
            is_certain = all(self._first_unknown_end.get(name, inf) > self.start for name in clusters)
            self._promises.update(job, start, clusters, earlier, self._last_to_end, is_certain=is_certain)
        for job in filter(None, map(self._ledger.get, sorted(self._returned - {self.job}))):
            if job.is_in_queue and (planned := job.planned_start) and planned.at is not None and planned.late is None:
                reason = "it was placed, but did not get its nodes"
                self._ledger.change_job(job, planned_start=replace(planned, at=None, moved_because=reason))
        self._returned.clear()

    def _last_to_end(self) -> Job | None:
        """Return a job that is expected to end at the planned start; None if there is none."""
        return next((job for job in self._ledger.active_jobs() if self._expected_end(job) == self.start), None)

    def _may_change(self) -> bool:
        """Return whether a plan is due before the next periodic scan, since the grid has changed."""
        if self.holder is None:
            return self._awaits_grid and self._empty_grid() != self._empty
        return self.job is None or self._state.now >= self.start

    def _keep_for_placed(self) -> bool:
        """Plan for the job that was placed last; return False if it has requested all of its nodes."""
        job = None if self._placed is None else self._ledger.get(self._placed)
        if job is None or not job.state.is_active or job.ending is not None or not (waiting := unclaimed(job)):
            self._placed = None
            return False
        assert job.attempt is not None
        self.job, self.start = None, max(self._state.now, job.attempt.start_estimate or 0.0)
        self._binds = frozenset({job.spec.priority, Priority.LOW})
        for component in waiting:
            available = self._limits.get(component.cluster, self._grid[component.cluster].nodes.available)
            self._limits[component.cluster] = available - component.size
        return True

    def _plan_next(self, evaluate: Evaluate) -> None:
        """Plan the start of the job that has it now, or of another if that can have none."""
        if self._is_stale or self.job is None or not self._plan_start(self._ledger.jobs[self.job], evaluate):
            had_plan = self._awaits_grid or self.job is not None or not self._rules.plan_after
            self.job, self.start = None, inf
            for job in self._candidates(evaluate):
                if self._plan_start(job, evaluate):
                    self.job = self._turns[job.spec.priority] = job.id
                    self._awaits_grid = False
                    return
            self._awaits_grid = had_plan

    def _candidates(self, evaluate: Evaluate) -> Iterator[Job]:
        """Yield the jobs that would fit without the scheduler's jobs: the one whose turn it is, then by age."""
        if (empty := self._empty_grid()) != self._empty:
            self._empty, self._grids = empty, self._grids + 1
        idle = IdleSummary(self._empty)
        for priority, queue in self._queues.items():
            for entry in self._by_turn_and_age(priority, queue, idle):
                if self._state.now - entry.waits_since < (self._rules.plan_after or 0.0):
                    continue
                if self._fits(entry, idle, evaluate):
                    yield self._ledger.jobs[entry.job]

    def _empty_grid(self) -> GridView:
        """Return the grid without the scheduler's jobs, as it is once all drains and reservations with an end are
        over."""
        ending = frozenset(cluster.name for cluster in self._grid.clusters() if cluster.usable_from < inf)
        return self._without_own_jobs.view().compute_once(("after ends", ending), self._without_ends)

    def _without_ends(self, view: GridView) -> GridView:
        changed = []
        for cluster in view:
            lasting = tuple(reservation for reservation in cluster.reservations if reservation.ends >= MAX_TIME)
            is_drained = self._grid[cluster.name].usable_from < inf
            if is_drained or lasting != cluster.reservations:
                state = ClusterState.USABLE if is_drained else cluster.state
                changed.append(replace(cluster, state=state, reservations=lasting))
        return view.with_clusters(changed) if changed else view

    def _by_turn_and_age(self, priority: Priority, queue: PlacementQueue, idle: IdleSummary) -> Iterator[Entry]:
        """Yield the job whose turn it is. Sort the first jobs of all shapes only if it cannot be planned."""
        turn = self._turns.get(priority)
        if turn is not None and turn in queue and not queue.is_barred(turn):
            yield queue.entry_of(turn)
        yield from queue.first_of_each_shape(idle.may_fit)

    def _fits(self, entry: Entry, idle: IdleSummary, evaluate: Evaluate) -> bool:
        group, job = entry.group, self._ledger.jobs[entry.job]
        if (
            job.spec.internal
            or job.spec.reservation
            or group.refused_on == self._grids
            or not idle.may_fit(group.needs)
        ):
            return False
        if isinstance(evaluate(job.spec, self._empty, job.barred_sizes(self._state.now)), Placement):
            return True
        if not self._policies.capabilities(job.spec.policy).learns:
            group.refused_on = self._grids
        return False

    # Times

    def _plan_start(self, job: Job, evaluate: Evaluate) -> bool:
        """Plan the start of a job at the first time with enough free nodes; return False if there is none."""
        now, barred = self._state.now, job.barred_sizes(self._state.now)
        preempts = self._preempts(job)
        base = self._preempting.view() if preempts else self.own_view(job)
        releases = self._releases(preempts)

        def place_at(time: float) -> tuple[float, GridView, Placement] | None:
            view = self._view_at(time, base, releases)
            answer = evaluate(job.spec, view, barred)
            return (time, view, answer) if isinstance(answer, Placement) else None

        fitting = self._times_with_nodes(job, base, releases)
        fit = place_at(earliest) if (earliest := next(fitting, None)) is not None else None  # usually they suffice
        if fit is None:
            times = list(fitting)
            # Between the last placements before reservations, what fits at a time fits later too.
            limits = sorted({*self._last_placements(job.spec, base, times), 0} - {len(times)})
            bounds = [*pairwise(limits[: MAX_SEGMENTS + 1]), (limits[-1] if limits else 0, len(times))]
            for first, end in bounds:
                if first < end and (fit := place_at(times[end - 1])):
                    last = end - 1
                    while first < last:
                        middle = (first + last) // 2
                        if placed := place_at(times[middle]):
                            last, fit = middle, placed
                        else:
                            first = middle + 1
                    break
        if fit is None:
            return False
        self.start, view, placement = fit
        view, _ = exclude_reserved(view, job.spec.walltime, now)
        self._binds = self._bound_by(job)
        assumed = self._rules.assumed_bandwidth
        self._transfer_s = max(transfer_of(job.spec, c, view, assumed).seconds for c in placement.components)
        self._streams = count_streams(job.spec, placement, view)
        for component in placement.components:
            name = component.cluster
            cluster = view.get(name)
            free = self._limits.get(name, cluster.idle if cluster is not None else 0)
            self._limits[name] = free - component.size
            self._keep_class(job.spec.node_requirement(component.request_index), name, component.size)
        return True

    def _last_placements(self, spec: JobSpec, base: GridView, times: list[float]) -> Iterator[int]:
        """Yield how many of these times are not after the last placement before each reservation.

        The job then awaits its own files on that cluster, or those of its component with the longest transfer.
        """
        delays: dict[ClusterName, set[float]] = {}
        if base.has_reservations and spec.all_inputs:
            delays = transfer_times(spec, base, self._rules.assumed_bandwidth)
        longest = max(chain.from_iterable(delays.values()), default=0.0)
        for cluster in base:
            for reservation in cluster.reservations:
                for delay in {longest, *delays.get(cluster.name, ())}:
                    yield bisect_right(times, reservation.last_start(spec.walltime) - delay)

    def _times_with_nodes(
        self, job: Job, base: GridView, releases: list[tuple[float, ClusterName, int]]
    ) -> Iterator[float]:
        """Yield the times from now on with enough nodes on clusters without a planned drain, without a policy call."""
        now, walltime = self._state.now, job.spec.walltime
        needs = self._queues[job.spec.priority].group_of(job.id).needs
        cluster_sizes = dict(needs.cluster_sizes)
        free = {cluster.name: cluster.idle for cluster in base if not cluster_sizes or cluster.name in cluster_sizes}
        drains = Counter[ClusterName]()
        changes = [(self._grid[c.name].usable_from, "", 0, 0) for c in base if c.state is ClusterState.DRAINED]
        for cluster in base:
            for entry in cluster.reservations:
                name = cluster.name if entry.is_drain and cluster.name in free else ""
                changes += [(nextafter(entry.last_start(walltime), inf), name, 0, 1), (entry.ends, name, 0, -1)]
        changes += [(end, name if name in free else "", nodes, 0) for end, name, nodes in releases]
        changes.sort()
        current, total, largest = now, sum(free.values()), [(-nodes, name) for name, nodes in free.items()]
        heapify(largest)
        for time, name, nodes, begun in (*changes, (inf, "", 0, 0)):
            if time > current:
                while largest and (drains[largest[0][1]] or -largest[0][0] != free[largest[0][1]]):
                    heappop(largest)
                if needs.shares or (total >= needs.total and largest and -largest[0][0] >= needs.largest):
                    yield current
                if time >= MAX_TIME:
                    return
                current = time
            if name:
                total -= 0 if drains[name] else free[name]
                free[name], drains[name] = free[name] + nodes, drains[name] + begun
                if not drains[name]:
                    total += free[name]
                    heappush(largest, (-free[name], name))

    def _preempts(self, job: Job) -> bool:
        return job.spec.priority is Priority.HIGH and self._rules.preemption == "placement" and not job.spec.share

    def _bound_by(self, job: Job) -> frozenset[Priority]:
        """Return the priorities of the jobs that must leave the nodes that are planned for a job."""
        return frozenset({job.spec.priority} if self._preempts(job) else {job.spec.priority, Priority.LOW})

    def _keep_class(self, requirement: NodeRequirement | None, name: ClusterName, size: int) -> None:
        """Keep the idle nodes of a cluster that serve a planned job, since it is not known which become free."""
        if requirement is None:
            return
        nodes = NodeFilter(requirement=requirement.of_nodes)
        self._grid[name].nodes.classes.kept = nodes
        cluster = self._grid.view().get(name)
        if cluster is not None and not nodes.admits_all:
            serving = count_idle(cluster.known_classes, nodes)
            self._limits[name] = min(self._limits[name], cluster.idle - min(serving, size))

    def _releases(self, without_preemptible: bool) -> list[tuple[float, ClusterName, int]]:
        """Return when components of running jobs are expected to release nodes, the first ones first.

        Nodes of jobs that share them are free when the last of these jobs on the cluster has ended.
        """
        releases: list[tuple[float, ClusterName, int]] = []
        shared: dict[ClusterName, tuple[float, int]] = {}
        unknown = self._first_unknown_end = {}
        for job in self._ledger.active_jobs():
            spec, attempt = job.spec, job.attempt
            if attempt is None or spec.reservation or (without_preemptible and spec.priority is Priority.LOW):
                continue
            end, is_unknown = self._expected_end(job), spec.walltime is None and job.ending is None
            for component in attempt.components:
                state = component.state
                if state is not ComponentState.RUNNING and state in HOLDS_NO_NODES:  # most run, which is faster
                    continue
                cluster = component.cluster
                if is_unknown:
                    unknown[cluster] = min(end, unknown.get(cluster, inf))
                if spec.share:
                    latest, nodes = shared.get(cluster, (end, 0))
                    shared[cluster] = max(latest, end), nodes + component.size
                else:
                    releases.append((end, cluster, component.size))
        releases += ((end, name, nodes) for name, (end, nodes) in shared.items())
        releases.sort()
        return releases

    def _expected_end(self, job: Job) -> float:
        """Return when a job is expected to release its nodes: one that runs longer than expected, much later."""
        now, attempt, walltime = self._state.now, job.attempt, job.spec.walltime
        if job.ending is not None:
            return now + MARGIN_S
        began = now
        if attempt is not None:
            began = max(now, attempt.start_estimate or now) if attempt.barrier_at is None else attempt.barrier_at
        if walltime is not None:
            return max(began + walltime, now + MARGIN_S)
        if (alike := self._alike.get(job.id)) is None:
            alike = self._alike[job.id] = application_of(job.spec), run_size(job.spec)
        lasts = self._estimate(job.spec, alike)
        while began + lasts <= now:
            lasts *= 2
        return began + lasts

    def _view_at(self, time: float, base: GridView, releases: list[tuple[float, ClusterName, int]]) -> GridView:
        """Return the grid as it is expected to be then, with the times of reservations as if that were now."""
        freed = Counter[ClusterName]()
        for end, name, nodes in releases:
            if end > time:
                break
            freed[name] += nodes
        if time <= self._state.now:
            return base
        changed = []
        for cluster in base:
            status = self._grid[cluster.name]
            if freed[cluster.name] or cluster.reservations or status.usable_from <= time:
                max_idle = status.nodes.capacity_without_own_jobs
                idle = max(cluster.idle, min(cluster.idle + freed[cluster.name], max_idle))
                later = tuple(_shift(r, self._state.now, time) for r in cluster.reservations if r.ends > time)
                state = ClusterState.USABLE if status.usable_from <= time else cluster.state
                changed.append(replace(cluster.with_idle(idle), state=state, reservations=later))
        return self._grid.with_current_links(base.with_clusters(changed), self._grid.relays.streams)


def _with_all_in_reach(view: GridView) -> GridView:
    """Return the view as if its clusters that are out of reach were usable."""
    return view.with_clusters(
        [replace(c, state=ClusterState.USABLE) for c in view if c.state is ClusterState.UNREACHABLE]
    )


def _shift(reservation: NodeReservation, now: float, time: float) -> NodeReservation:
    """Return a reservation as a job sees it that starts at a later time, with times as if that were now."""
    # Nodes of a reservation that has begun are not among the idle ones.
    idle = reservation.idle if reservation.begins <= now else reservation.nodes
    ends = reservation.ends if reservation.ends >= MAX_TIME else reservation.ends - (time - now)
    return replace(reservation, idle=idle, begins=reservation.begins - (time - now), ends=ends)
