"""Nodes are kept for a job that has waited for long: wide jobs do not starve (aging), nor do those of low priority."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from koalapy.model.cluster import GridView
from koalapy.model.job import Job, JobId, JobSpec, Priority
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import ClusterName
from koalapy.scheduler.attempts.attempt_facts import unclaimed
from koalapy.scheduler.cluster_status import ClusterStatus
from koalapy.scheduler.ledger import live
from koalapy.scheduler.queue.feasibility import IdleSummary
from koalapy.scheduler.queue.promise import is_promised
from koalapy.scheduler.queue.queue import Entry, PlacementQueue
from koalapy.scheduler.state import SchedulerState

Evaluate = Callable[[JobSpec, GridView, frozenset[ClusterName]], Placement | Refusal]
"""What a job's policy answers on a view, without the clusters that have refused the job."""


class Reservation:
    """One at a time: that of the job that has waited longest among those that could be placed at all: of those who were
    promised their turn, then of high priority before low.

    A job is placed on the grid as it would be if all jobs of this scheduler had ended; as many nodes as it would have
    on each cluster are then not offered to jobs of low priority, until it is placed. Of a shape the first of those
    that have waited stands for it, and who could not be placed even so keeps nothing. The daemon's own jobs never hold
    up anybody's.

    Whom nodes are kept for keeps them until it is placed, also when an older one of its priority could be placed again
    meanwhile: else one whose claims a limit refuses again and again would undo, each time, what was kept for others.
    But who returns from a claim that failed, and could be placed at once, has lost nothing.

    For who was promised its turn they are kept from everybody, jobs of high priority, too, and until they are claimed.
    """

    def __init__(self, state: SchedulerState, queues: Mapping[Priority, PlacementQueue]) -> None:
        self._rules, self._ledger, self._grid, self._policies = state.rules, state.ledger, state.grid, state.policies
        self._state, self._queues = state, queues
        self._stale = False
        self._chosen: JobId | None = None
        self._placed: JobId | None = None
        """Whom nodes were kept for before, until it was placed."""
        self._kept: Counter[ClusterName] = Counter()
        self._is_promised = False
        """Whether they are kept from jobs of high priority, too."""
        self._held: dict[JobId, Counter[ClusterName]] = {}
        """Nodes that are kept from everybody else: for who was promised its turn, until they are claimed."""
        self._left = {priority: self._grid.lens(partial(self._left_to, priority)) for priority in Priority}
        self._own = self._grid.lens(lambda cluster: cluster.available - cluster.kept_from(self._chosen))
        self._without_ours = self._grid.lens(lambda cluster: cluster.without_ours)
        self._empty = GridView(())
        """The grid without our jobs, as it was when it was last looked at."""
        self._grids = 0
        """How many it has been."""

    @property
    def job(self) -> JobId | None:
        """The job nodes are kept for, while it waits."""
        if self._chosen is not None and not any(self._chosen in queue for queue in self._queues.values()):
            return None
        return self._chosen

    @property
    def kept_for(self) -> JobId | None:
        """The same, or one that is placed and was promised its nodes until they are claimed."""
        return self.job or next(iter(self._held), None)

    def keeper(self, job: JobId | None) -> JobId | None:
        """For whom nodes are kept that a job, or a new one, is not given: of that one that they are kept for, who was
        promised its turn before."""
        if job is None or job != self.job:
            return self.kept_for
        first = next(iter(self._held), None)
        return first if first != job else None

    def is_kept_from(self, priority: Priority) -> bool:
        """Whether jobs of a priority are offered less than there is."""
        return bool(self._held) or (priority is Priority.LOW and self.job is not None)

    def kept(self, cluster: ClusterName, priority: Priority) -> int:
        """Nodes that are not offered to jobs of a priority there."""
        if not self.is_kept_from(priority):
            return 0
        return self._grid[cluster].kept_from() + (self.aged(cluster) if priority is Priority.LOW else 0)

    def aged(self, cluster: ClusterName) -> int:
        """Of these, nodes that are kept from jobs of low priority only: for who has aged, and waits."""
        return 0 if self._is_promised or self.job is None else self._kept[cluster]

    def _left_to(self, priority: Priority, cluster: ClusterStatus) -> int:
        return cluster.available - self.kept(cluster.name, priority)

    def view(self, priority: Priority) -> GridView:
        """The grid as jobs of a priority are offered it."""
        return self._left[priority].view() if self.is_kept_from(priority) else self._grid.view()

    def own_view(self) -> GridView:
        """The grid as the job is offered it that nodes are kept for."""
        return self._own.view() if self._held else self._grid.view()

    def invalidate(self) -> None:
        """Another job may be chosen, or other nodes be kept, by the next ``update``."""
        self._stale = True

    def update(self, evaluate: Evaluate) -> bool:
        """Choose who has waited too long, and what is kept for it; whether somebody may now have what he could not."""
        if not self._stale:
            return self._hold() if self._held else False
        self._stale = False
        job, kept = self.job, self._kept
        if job is None and self._chosen is not None:
            self._placed = self._chosen
        self._chosen, self._kept, self._is_promised = None, Counter(), False
        self._choose(evaluate, turns=(self._placed, job))
        if self._placed is not None and any(self._placed in queue for queue in self._queues.values()):
            self._placed = None  # it has its turn again, or has lost it
        for cluster in set[ClusterName]().union(kept, self._kept, *self._held.values()):
            self._grid.touch(cluster)
        is_less_held = self._hold()
        return (
            is_less_held or self._chosen != job or any(self._kept[cluster] < count for cluster, count in kept.items())
        )

    def restore(self, jobs: Iterable[Job]) -> None:
        """Of an earlier life: what is kept for who was promised its turn, and is placed."""
        active = [job for job in jobs if job.state.is_active and is_promised(job, self._rules, live(job).placed_at)]
        for job in sorted(active, key=lambda job: (live(job).placed_at, job.queue_seq)):
            if nodes := self._unclaimed(job.id):
                self._held[job.id] = nodes
                for name, count in nodes.items():
                    self._grid[name].keep_for(job.id, count)

    def _hold(self) -> bool:
        """Keep nodes from everybody else for who was promised its turn, and, once it is placed, until they are claimed;
        whether fewer are kept for somebody than before."""
        held = {job: nodes for job in self._held if (nodes := self._unclaimed(job))}
        if self._chosen is not None and self._is_promised:
            held[self._chosen] = self._kept
        is_less = False
        for job in dict.fromkeys([*held, *self._held]):  # who was placed first, as its turn came before
            before, after = self._held.get(job, Counter()), held.get(job, Counter())
            for name in {*before, *after}:
                if before[name] != after[name]:
                    self._grid[name].keep_for(job, after[name])
                    is_less |= after[name] < before[name]
        self._held = held
        return is_less

    def _unclaimed(self, ident: JobId) -> Counter[ClusterName]:
        """The nodes for which a placed job has still to claim."""
        nodes = Counter[ClusterName]()
        job = self._ledger.get(ident)
        if job is not None and job.state.is_active and job.ending is None:
            for component in unclaimed(job):
                nodes[component.cluster] += component.size
        return nodes

    def _choose(self, evaluate: Evaluate, turns: tuple[JobId | None, ...]) -> None:
        """``turns``: whose turn it is, before all others of their kind."""
        idle: IdleSummary | None = None
        for entries in self._who_waited():
            for entry in sorted(entries, key=lambda entry: [entry.job != job for job in turns]):
                idle = idle or self._look()
                group = entry.group
                if group.refused_on == self._grids or not idle.may_fit(group.needs):
                    continue
                job = self._ledger.jobs[entry.job]
                spec = job.spec
                if spec.internal:
                    continue
                answer = evaluate(spec, self._empty, job.barred_from(self._state.now))
                if isinstance(answer, Placement):
                    self._chosen, self._is_promised = entry.job, self._was_promised(entry)
                    for component in answer.components:
                        self._kept[component.cluster] += component.size
                    return
                if not self._policies.capabilities(spec.policy).learns:
                    group.refused_on = self._grids

    def _who_waited(self) -> Iterator[Iterable[Entry]]:
        """Who has waited for too long, one kind after the other."""
        if self._rules.low_patience is not None:
            yield self._queues[Priority.LOW].first_of_each_shape(self._was_promised)
        if self._rules.aging:
            for queue in self._queues.values():
                has_aged = partial(_has_aged, queue, self._rules.aging_tries)
                yield queue.first_of_each_shape(has_aged)

    def _was_promised(self, entry: Entry) -> bool:
        return is_promised(self._ledger.jobs[entry.job], self._rules, self._state.now)

    def _look(self) -> IdleSummary:
        """Look at the grid without our jobs; who was refused there is refused while it stays as it is."""
        empty = self._without_ours.view()
        if empty != self._empty:
            self._empty = empty
            self._grids += 1
        return IdleSummary(self._empty)


def _has_aged(queue: PlacementQueue, tries: int, entry: Entry) -> bool:
    return queue.tries(entry) >= tries
