"""Reserve nodes for a job that has waited long, so that wide and low-priority jobs do not starve."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import inf

from koalapy.model.cluster import ClusterState, GridView
from koalapy.model.job import Job, JobId, JobState
from koalapy.model.job_sizes import Barred, is_barred
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.node_requirement import ANY_NODE, NodeFilter
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_nodes
from koalapy.scheduler.attempts.facts import INFRASTRUCTURE_FAILURE, TRANSFER_FAILURE, filter_of, unclaimed
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.ledger import live
from koalapy.scheduler.queue.eligibility import count_streams
from koalapy.scheduler.queue.queue import Entry, IdleSummary, PlacementQueue
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.state import SchedulerState

KEPT_S = 600.0
"""Seconds after a failed attempt for which its nodes are kept."""
MAX_RESTARTING = 100
"""Maximum number of jobs whose nodes are kept at a time."""
FAILURES = (INFRASTRUCTURE_FAILURE, TRANSFER_FAILURE)


def is_promised(job: Job, rules: Rules, now: float) -> bool:
    """Return whether a low-priority job has the starvation guarantee: it waited ``low_patience`` before it was placed.

    Jobs of high priority delay it no further: it is not preempted, and nodes reserved for it are offered to no other
    job.
    """
    if rules.low_patience is None or now - job.waits_since < rules.low_patience:
        return False
    if job.spec.priority is not Priority.LOW or job.spec.internal:
        return False
    attempt = job.attempt if job.is_placed else None
    waited_until = now if attempt is None else attempt.placed_at
    return waited_until - job.waits_since >= rules.low_patience


Evaluate = Callable[[JobSpec, GridView, Barred], Placement | Refusal]
"""Returns the answer of a job's policy on a view, without the clusters that rejected the job."""


class Reservation:
    """The nodes reserved for one job: the longest waiting one that would fit on the grid without the scheduler's jobs.

    Jobs with the starvation guarantee come first, then those of high priority. The nodes that it would get on each
    cluster are not offered to low-priority jobs until it is placed. An older job that becomes placeable in that time
    does not replace it: a job with claims that are rejected repeatedly would undo the reservation. For a job with the
    starvation guarantee the nodes are reserved against all others until they are claimed. The daemon's own jobs get no
    reservation.

    In addition, the nodes of jobs whose attempts have failed are kept from low-priority jobs behind them. A job with a
    starvation guarantee may still have these.
    """

    def __init__(self, state: SchedulerState, queues: Mapping[Priority, PlacementQueue]) -> None:
        self._rules, self._ledger, self._grid, self._policies = state.rules, state.ledger, state.grid, state.policies
        self._state, self._queues = state, queues
        self._stale = False
        self._chosen: JobId | None = None
        self._placed: JobId | None = None
        """The previous holder of the reservation, which was placed."""
        self._reserved_nodes: Counter[ClusterName] = Counter()
        self._is_promised = False
        """Whether the nodes are also reserved against jobs of high priority."""
        self._reserved_streams = 0
        """Streams over the hub that the job would need, reserved like its nodes until it is placed."""
        self._held: dict[JobId, Counter[ClusterName]] = {}
        """Nodes of jobs with the starvation guarantee, reserved against all others until they are claimed."""
        self._restarting: dict[JobId, Counter[ClusterName]] = {}
        """Released nodes of jobs that wait for another attempt after a failure, kept for these."""
        self._kept = Counter[ClusterName]()
        """The sum of these nodes."""
        self._fewer_kept = False
        """Whether other jobs may have gained nodes that were kept since the last ``update``."""
        self._ledger.on_job_removed.append(lambda job: self.release_kept(job.id))
        # A node becomes idle only if no further job is placed beside those that run there.
        self._left = {
            priority: self._grid.cached_view(
                partial(self._left_to, priority),
                streams=partial(self.streams_left_to, priority),
                hides_parts=partial(self._withholds_nodes, priority),
            )
            for priority in Priority
        }
        self._own = self._grid.cached_view(
            lambda cluster: cluster.nodes.available - self.withheld_from_own(cluster),
            hides_parts=lambda cluster: self.withheld_from_own(cluster) > 0,
        )
        self._without_own_jobs = self._grid.cached_view(
            lambda cluster: cluster.nodes.capacity_without_own_jobs,
            streams=lambda: self._grid.relays.streams,
            hides_parts=lambda _: True,
        )
        self._empty = GridView(())
        """The grid without the scheduler's jobs, as last seen."""
        self._grids = 0
        """The number of different such grids so far."""

    @property
    def job(self) -> JobId | None:
        """Return the waiting job with the reservation; None if there is none."""
        if self._chosen is not None and not any(self._chosen in queue for queue in self._queues.values()):
            return None
        return self._chosen

    def keeper(self, job: JobId | None) -> JobId | None:
        """Return the job whose nodes are withheld from this job, or from a new one if None.

        It waits, or is placed and has yet to request guaranteed nodes.
        """
        restarting = (holder for holder, nodes in self._restarting.items() if nodes)
        holders = (self.job, *self._held, *restarting)
        return next((holder for holder in holders if holder is not None and holder != job), None)

    def describe_keeper(self, keeper: JobId | None) -> str:
        """Return, as text, for which job nodes are withheld."""
        has_failed = keeper in self._restarting and keeper != self.job
        reason = "runs again after a failure" if has_failed else "has waited longer"
        return f"nodes are kept for job {keeper}, which {reason}"

    def is_kept_from(self, priority: Priority) -> bool:
        """Return whether jobs of a priority are offered less than is available."""
        return bool(self._held) or (priority is Priority.LOW and (self.job is not None or bool(self._restarting)))

    def reserved_nodes(self, cluster: ClusterName, priority: Priority, job: JobId | None = None) -> int:
        """Return the nodes on a cluster that are not offered to jobs of a priority, or not to a job with kept nodes."""
        if not self.is_kept_from(priority):
            return 0
        may_use = self._kept_behind(cluster, job) if job is not None else 0
        kept = self.kept_from_low(cluster) - may_use if priority is Priority.LOW else 0
        return self._grid[cluster].nodes.reserved_for_others() + kept

    def kept_from_low(self, cluster: ClusterName) -> int:
        """Return the nodes on a cluster that are reserved only against low-priority jobs, by aging or for restarts."""
        aged = 0 if self._is_promised or self.job is None else self._reserved_nodes[cluster]
        return aged + self._kept[cluster]

    def _left_to(self, priority: Priority, cluster: ClusterStatus) -> int:
        return cluster.nodes.available - self.reserved_nodes(cluster.name, priority)

    def _withholds_nodes(self, priority: Priority, cluster: ClusterStatus) -> bool:
        """Return whether some nodes of a cluster are not offered to jobs of a priority."""
        return self.reserved_nodes(cluster.name, priority) > 0

    def streams_left_to(self, priority: Priority) -> int:
        """Return the streams over the hub that are offered to jobs of a priority."""
        is_kept = self.job is not None and (self._is_promised or priority is Priority.LOW)
        return max(0, self._grid.free_streams - (self._reserved_streams if is_kept else 0))

    def view(self, priority: Priority) -> GridView:
        """Return the grid as offered to jobs of a priority."""
        return self._left[priority].view() if self.is_kept_from(priority) else self._grid.view()

    def own_view(self) -> GridView:
        """Return the grid as offered to the job with the reservation."""
        return self._own.view() if self._held or self._restarting else self._grid.view()

    def withheld_from_own(self, cluster: ClusterStatus) -> int:
        """Return the nodes on a cluster that are not offered to the job with the reservation."""
        kept = 0
        if self._restarting and not self._is_promised and (job := self.job) is not None:
            kept = self._kept[cluster.name] - self._kept_behind(cluster.name, job)
        return cluster.nodes.reserved_for_others(self._chosen) + kept

    # Restarts after failures

    def restarting_jobs(self) -> list[JobId]:
        """Return the jobs that wait for another attempt with nodes kept for them, in order."""
        return sorted((job for job, nodes in self._restarting.items() if nodes), key=self._rank)

    def kept_for(self, job: JobId) -> str:
        """Return, as text, how many nodes are kept for the restart of a job; empty for none."""
        nodes = self._restarting.get(job, Counter()).total()
        return (
            f"{format_nodes(nodes)} of its failed attempt {'is' if nodes == 1 else 'are'} kept for it" if nodes else ""
        )

    def restart_view(self, job: Job) -> GridView:
        """Return the grid as offered to a job of low priority, with the nodes kept for it and for jobs behind it."""
        return self._grid.view(partial(self._left_with_kept, job.id))

    def _left_with_kept(self, job: JobId, cluster: ClusterStatus) -> int:
        left, may_use = (
            cluster.nodes.available - cluster.nodes.reserved_for_others(job),
            self._kept_behind(cluster.name, job),
        )
        return max(min(may_use, left), left + may_use - self.kept_from_low(cluster.name))

    def _kept_behind(self, cluster: ClusterName, job: JobId) -> int:
        """Return the nodes kept for a job itself and for the jobs behind it, which it may use."""
        rank = self._rank(job)
        return sum(nodes[cluster] for other, nodes in self._restarting.items() if self._rank(other) >= rank)

    def _rank(self, ident: JobId) -> tuple[bool, float]:
        """Return the sort key of a job among those that nodes are kept for."""
        job = self._ledger.get(ident)  # None for a task that was not started
        return (True, inf) if job is None else (job.spec.priority is Priority.LOW, job.queue_seq)

    def keep_for_restart(self, job: Job) -> None:
        """Keep the released nodes of a job whose attempt has failed, until it is placed again.

        They are kept for ``KEPT_S`` seconds at most, and not at all while one of its clusters is gone.
        """
        if not self._may_restart(job):
            self.release_kept(job.id)
        elif job.id in self._restarting or len(self._restarting) < MAX_RESTARTING:
            self._set_kept(job, self._released_nodes(job))

    def release_kept(self, job: JobId) -> None:
        """Keep no nodes for a job any more: it is placed again, or is not to be."""
        if (nodes := self._restarting.pop(job, None)) is not None:
            self._kept.subtract(nodes)
            self._announce_kept(nodes)
            self._fewer_kept = True

    def _set_kept(self, job: Job, nodes: Counter[ClusterName]) -> None:
        previous = self._restarting.get(job.id, Counter())
        self._restarting[job.id] = nodes
        if nodes != previous:
            self._kept.update(nodes)
            self._kept.subtract(previous)
            self._fewer_kept |= bool(previous - nodes)
            self._announce_kept(nodes | previous)
        if job.attempt is not None:
            for component in job.attempt.gang:
                if nodes[component.cluster] and not self._reserved_nodes[component.cluster]:
                    self._grid[component.cluster].nodes.classes.kept = filter_of(job.spec, component)

    def _announce_kept(self, clusters: Iterable[ClusterName]) -> None:
        """Announce that other nodes of these clusters are kept."""
        for name in clusters:
            if not self._kept[name] and not self._reserved_nodes[name]:
                self._grid[name].nodes.classes.kept = ANY_NODE
            self._grid.touch(name)

    def _may_restart(self, job: Job) -> bool:
        """Return whether a job waits for another attempt after a failure.

        In a pause nodes are kept only for a program that had run for longer, not for one that fails at each start.
        """
        attempt = job.attempt
        if attempt is None or attempt.ended_at is None or not attempt.end_reason.startswith(FAILURES):
            return False
        if not self._rules.keeps_for_restart or job.spec.share or job.spec.internal:
            return False
        if job.retry_at is not None:
            lasted = attempt.ended_at - (attempt.ended_at if attempt.launched_at is None else attempt.launched_at)
            if lasted < job.retry_at - attempt.ended_at:
                return False
        is_waiting = job.state is JobState.QUEUED or job.ending is JobState.QUEUED
        return is_waiting and self._state.now < attempt.ended_at + KEPT_S

    def _released_nodes(self, job: Job) -> Counter[ClusterName]:
        """Return the nodes of a failed attempt that its components have released.

        There are none if a cluster is gone or may not run the job now.

        A cluster that has not reported in this daemon run yet may still be there.
        """
        nodes = Counter[ClusterName]()
        barred = job.barred_sizes(self._state.now)
        for component in job.attempt.gang if job.attempt is not None else ():
            if component.cluster not in self._grid:
                return Counter()
            cluster = self._grid[component.cluster]
            is_away = cluster.state is ClusterState.UNREACHABLE and cluster.nodes.reported
            if is_away or cluster.state in (ClusterState.UNUSABLE, ClusterState.DRAINED):
                return Counter()
            if is_barred(barred, component.cluster, component.size):
                return Counter()
            if component.has_ended:
                nodes[component.cluster] += component.size
        return nodes

    def invalidate(self) -> None:
        """Make the next ``update`` choose again."""
        self._stale = True

    def update(self, evaluate: Evaluate) -> bool:
        """Choose the job and its nodes again; return whether other jobs may gain nodes."""
        if self._stale:
            for ident in list(self._restarting):
                self.keep_for_restart(self._ledger.jobs[ident])
        is_less_kept, self._fewer_kept = self._fewer_kept, False
        if not self._stale:
            return (self._hold() if self._held else False) or is_less_kept
        self._stale = False
        job, previous = self.job, self._reserved_nodes
        if job is None and self._chosen is not None:
            self._placed = self._chosen
        self._chosen, self._reserved_nodes, self._reserved_streams, self._is_promised = None, Counter(), 0, False
        for cluster in previous:
            self._grid[cluster].nodes.classes.kept = ANY_NODE
        self._choose(evaluate, turns=(self._placed, job))
        if self._placed is not None and any(self._placed in queue for queue in self._queues.values()):
            self._placed = None  # it holds the reservation again, or has lost it
        for cluster in set[ClusterName]().union(previous, self._reserved_nodes, self._kept, *self._held.values()):
            self._grid.touch(cluster)
        is_less_held = self._hold()
        return (
            is_less_held
            or is_less_kept
            or self._chosen != job
            or any(self._reserved_nodes[cluster] < count for cluster, count in previous.items())
        )

    def pass_on(self, array: JobId, task: JobId) -> None:
        """Give the nodes reserved for an array to the task that was placed on them, and choose again."""
        if array == self._chosen:
            self._stale = True
        if (nodes := self._held.pop(array, None)) is not None:
            self._held[task] = nodes
            for name, count in nodes.items():
                self._grid[name].nodes.reserve(array, 0)
                self._grid[name].nodes.reserve(task, count)

    def restore(self, jobs: Iterable[Job]) -> None:
        """Restore the reserved nodes of placed jobs with the starvation guarantee, and kept ones, after a restart."""
        for job in jobs:
            self.keep_for_restart(job)
        active = [job for job in jobs if job.is_placed and is_promised(job, self._rules, live(job).placed_at)]
        for job in sorted(active, key=lambda job: (live(job).placed_at, job.queue_seq)):
            if nodes := self._unclaimed(job.id):
                self._held[job.id] = nodes
                for name, count in nodes.items():
                    self._grid[name].nodes.reserve(job.id, count)

    def _hold(self) -> bool:
        """Update the nodes reserved by the starvation guarantee; return whether a job has fewer now."""
        reserved = {job: nodes for job in self._held if (nodes := self._unclaimed(job))}
        if self._chosen is not None and self._is_promised:
            reserved[self._chosen] = self._reserved_nodes
        is_less = False
        for job in dict.fromkeys([*reserved, *self._held]):  # the job placed first gets its nodes first
            nodes_before, nodes_after = self._held.get(job, Counter()), reserved.get(job, Counter())
            for name in {*nodes_before, *nodes_after}:
                if nodes_before[name] != nodes_after[name]:
                    self._grid[name].nodes.reserve(job, nodes_after[name])
                    is_less |= nodes_after[name] < nodes_before[name]
        self._held = reserved
        return is_less

    def _unclaimed(self, ident: JobId) -> Counter[ClusterName]:
        """Return the nodes that a placed job has not requested from its clusters yet."""
        nodes = Counter[ClusterName]()
        job = self._ledger.get(ident)
        if job is not None and job.state.is_active and job.ending is None:
            for component in unclaimed(job):
                nodes[component.cluster] += component.size
        return nodes

    def _choose(self, evaluate: Evaluate, turns: tuple[JobId | None, ...]) -> None:
        """Choose the job with the reservation: the oldest, ``turns`` first among those of one age."""
        idle: IdleSummary | None = None
        for entries in self._entries_by_age():
            for entry in sorted(entries, key=lambda entry: [entry.job != job for job in turns]):
                if idle is None:  # a shape rejected on this grid stays rejected until the grid changes
                    if (empty := self._without_own_jobs.view()) != self._empty:
                        self._empty, self._grids = empty, self._grids + 1
                    idle = IdleSummary(self._empty)
                group = entry.group
                if group.refused_on == self._grids or not idle.may_fit(group.needs):
                    continue
                job = self._ledger.jobs[entry.job]
                spec = job.spec
                if spec.internal:
                    continue
                answer = evaluate(spec, self._empty, job.barred_sizes(self._state.now))
                if isinstance(answer, Placement):
                    self._chosen, self._is_promised = entry.job, self._was_promised(entry)
                    self._reserved_streams = count_streams(spec, answer, self._empty)
                    for component in answer.components:
                        self._reserved_nodes[component.cluster] += component.size
                        requirement = spec.node_requirement(component.request_index)
                        nodes = NodeFilter(requirement=requirement and requirement.of_nodes)
                        self._grid[component.cluster].nodes.classes.kept = nodes
                    return
                if not self._policies.capabilities(spec.policy).learns:
                    group.refused_on = self._grids

    def _entries_by_age(self) -> Iterator[Iterable[Entry]]:
        """Yield the entries that have waited too long, those with the starvation guarantee first."""
        if self._rules.low_patience is not None:
            yield self._queues[Priority.LOW].first_of_each_shape(self._was_promised)
        if self._rules.aging:
            for queue in self._queues.values():
                yield queue.first_of_each_shape(partial(queue.has_aged, self._rules.aging_tries))

    def _was_promised(self, entry: Entry) -> bool:
        return is_promised(self._ledger.jobs[entry.job], self._rules, self._state.now)
