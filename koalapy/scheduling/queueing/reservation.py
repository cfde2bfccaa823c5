"""Nodes are kept for a job that has failed many scans, so that wide jobs do not starve (aging, semantics 4)."""

from collections import Counter
from collections.abc import Callable, Mapping

from koalapy.model.cluster import GridView
from koalapy.model.job import JobId, JobSpec, Priority
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import ClusterName
from koalapy.scheduling.queueing.feasibility import IdleSummary, idle_summary
from koalapy.scheduling.queueing.queue import PlacementQueue
from koalapy.scheduling.state import SchedulerState

Evaluate = Callable[[JobSpec, GridView], Placement | Refusal]
"""What a job's policy answers on a view."""


class Reservation:
    """One at a time: that of the job that has waited longest, of high priority before low, among those that could be
    placed at all.

    A job is placed on the grid as it would be if all jobs of this scheduler had ended; as many nodes as it would have
    on each cluster are then not offered to jobs of low priority, until it is placed. The oldest of a shape stands for
    it, and who could not be placed even so keeps nothing. The daemon's own jobs never hold up anybody's.

    Whom nodes are kept for keeps them until it is placed, also when an older one of its priority could be placed again
    meanwhile: else one whose claims a limit refuses again and again would undo, each time, what was kept for others.
    But who returns from a claim that failed, and could be placed at once, has lost nothing.
    """

    def __init__(self, state: SchedulerState, queues: Mapping[Priority, PlacementQueue]) -> None:
        self._rules, self._ledger, self._grid, self._policies = state.rules, state.ledger, state.grid, state.policies
        self._queues = queues
        self._stale = False
        self._chosen: JobId | None = None
        self._placed: JobId | None = None
        """Whom nodes were kept for before, until it was placed."""
        self._kept: Counter[ClusterName] = Counter()
        self._beside = self._grid.lens(lambda cluster: cluster.available - self._kept[cluster.name])
        """What is left to others."""
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

    def kept(self, cluster: ClusterName) -> int:
        """Nodes that are not offered to jobs of low priority there."""
        return 0 if self.job is None else self._kept[cluster]

    def view(self, priority: Priority) -> GridView:
        """The grid as jobs of a priority are offered it."""
        if priority is Priority.HIGH or self.job is None:
            return self._grid.view()
        return self._beside.view()

    def invalidate(self) -> None:
        """Another job may be chosen, or other nodes be kept, by the next ``update``."""
        self._stale = True

    def update(self, evaluate: Evaluate) -> bool:
        """Choose who has waited too long, and what is kept for it; whether somebody may now have what he could not."""
        if not self._stale:
            return False
        self._stale = False
        job, kept = self.job, self._kept
        if job is None and self._chosen is not None:
            self._placed = self._chosen
        self._chosen, self._kept = None, Counter()
        if self._rules.aging:
            self._choose(evaluate, turns=(self._placed, job))
        if self._placed is not None and any(self._placed in queue for queue in self._queues.values()):
            self._placed = None  # it has its turn again, or has lost it
        for cluster in {*kept, *self._kept}:
            self._grid.touch(cluster)
        return self._chosen != job or any(self._kept[cluster] < count for cluster, count in kept.items())

    def _choose(self, evaluate: Evaluate, turns: tuple[JobId | None, ...]) -> None:
        """``turns``: whose turn it is, before all others of their queue."""
        idle: IdleSummary | None = None
        for queue in self._queues.values():
            oldest = queue.oldest_of_each_shape(self._rules.aging_tries)
            for entry in sorted(oldest, key=lambda entry: [entry.job != job for job in turns]):
                idle = idle or self._look()
                group = entry.group
                if group.refused_on == self._grids or not idle.may_fit(group.needs):
                    continue
                spec = self._ledger.jobs[entry.job].spec
                if spec.internal:
                    continue
                answer = evaluate(spec, self._empty)
                if isinstance(answer, Placement):
                    self._chosen = entry.job
                    for component in answer.components:
                        self._kept[component.cluster] += component.size
                    return
                if not self._policies.capabilities(spec.policy).learns:
                    group.refused_on = self._grids

    def _look(self) -> IdleSummary:
        """Look at the grid without our jobs; who was refused there is refused while it stays as it is."""
        empty = self._without_ours.view()
        if empty != self._empty:
            self._empty = empty
            self._grids += 1
        return idle_summary(self._empty)
