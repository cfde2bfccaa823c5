"""Aging: nodes are kept for a job that has failed many scans, so that wide jobs do not starve (semantics 4)."""

from collections import Counter
from collections.abc import Mapping

from koalapy.model.cluster import ClusterState, GridView
from koalapy.model.job import JobId, Priority
from koalapy.model.placement import Placement
from koalapy.model.request import ClusterName
from koalapy.scheduling.queueing.needs import Room
from koalapy.scheduling.queueing.policy_evaluation import PolicyEvaluator
from koalapy.scheduling.queueing.queue import PlacementQueue
from koalapy.scheduling.state import SchedulerState


class Aging:
    """One reservation at a time: that of the job that has waited longest, of high priority before low, among those
    that could be placed at all.

    A job is placed on the grid as it would be if all jobs of this scheduler had ended; as many nodes as it would have
    on each cluster are then not offered to jobs of low priority, until it is placed. The oldest of a shape stands for
    it, and who could not be placed even so keeps nothing. The daemon's own jobs never hold up anybody's.
    """

    def __init__(
        self, state: SchedulerState, queues: Mapping[Priority, PlacementQueue], evaluator: PolicyEvaluator
    ) -> None:
        self._rules, self._ledger, self._grid = state.rules, state.ledger, state.grid
        self._queues = queues
        self._evaluator = evaluator
        self._stale = False
        self._chosen: JobId | None = None
        self._kept: Counter[ClusterName] = Counter()
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

    def reconsider(self) -> None:
        """Who is chosen may be another one, or be kept other nodes, when ``choose`` is called next."""
        self._stale = True

    def choose(self) -> bool:
        """Who has waited too long, and what is kept for it; whether somebody may have what he could not before."""
        if not self._stale:
            return False
        self._stale = False
        job, kept = self.job, self._kept
        self._chosen, self._kept = None, Counter()
        if self._rules.aging:
            self._choose()
        return self._chosen != job or any(self._kept[cluster] < count for cluster, count in kept.items())

    def _choose(self) -> None:
        room: Room | None = None
        for queue in self._queues.values():
            for entry in queue.oldest_of_each_shape(self._rules.aging_tries):
                room = room or self._look()
                group = entry.group
                if group.refused_on == self._grids or not room.may_fit(group.needs):
                    continue
                spec = self._ledger.jobs[entry.job].spec
                if spec.internal:
                    continue
                answer = self._evaluator.ask(spec, self._empty)
                if isinstance(answer, Placement):
                    self._chosen = entry.job
                    for component in answer.components:
                        self._kept[component.cluster] += component.size
                    return
                if not self._evaluator.learns(spec):
                    group.refused_on = self._grids

    def _look(self) -> Room:
        """Look at the grid without our jobs; who was refused there is refused while it stays as it is."""
        empty = self._grid.view(lambda cluster: cluster.without_ours)
        if empty != self._empty:
            self._empty = empty
            self._grids += 1
        return Room({c.name: c.idle for c in self._empty.clusters if c.state is ClusterState.USABLE})

    def kept(self, cluster: ClusterName) -> int:
        """Nodes that are not offered to jobs of low priority there."""
        return 0 if self.job is None else self._kept[cluster]

    def view(self) -> GridView:
        """What jobs of low priority are offered."""
        if self.job is None:
            return self._grid.view()
        return self._grid.view(lambda cluster: cluster.available - self._kept[cluster.name])
