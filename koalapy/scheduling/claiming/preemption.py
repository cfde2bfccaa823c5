"""Which low-priority jobs make room for a job of high priority (semantics 5, step 3 of a claiming try)."""

from koalapy.model.job import ComponentState, Job, JobId, Priority
from koalapy.model.request import ClusterName
from koalapy.scheduling.cluster_status import ClusterStatus
from koalapy.scheduling.ledger import live
from koalapy.scheduling.state import SchedulerState


class Preemption:
    """Chooses victims; to end them is the claiming's business."""

    def __init__(self, state: SchedulerState) -> None:
        self._ledger, self._grid = state.ledger, state.grid

    def available(self, cluster: ClusterStatus) -> int:
        """Nodes that a job of high priority could have there: idle, about to be, or held by low-priority jobs."""
        available = cluster.expected + sum(self._held(cluster).values())
        return available if cluster.limit is None else min(available, cluster.limit.size - 1)

    def victims(self, cluster: ClusterName, size: int) -> list[Job] | None:
        """The low-priority jobs to preempt for ``size`` nodes; none when nodes are about to be free, None if too few.

        In descending order of their JST, and no more than needed: those that turn out to be superfluous once the
        others are chosen are spared, the one that has run longest first.
        """
        status = self._grid[cluster]
        lacking = size - status.expected
        if lacking <= 0:
            return []
        held = self._held(status)
        order = sorted(held, key=lambda job: (-(live(self._ledger.jobs[job]).start_estimate or 0.0), -job))
        chosen: list[JobId] = []
        for job in order:
            if lacking <= 0:
                break
            chosen.append(job)
            lacking -= held[job]
        if lacking > 0:
            return None
        for job in reversed(chosen):
            if lacking + held[job] <= 0:
                chosen.remove(job)
                lacking += held[job]
        return [self._ledger.jobs[job] for job in chosen]

    def _held(self, cluster: ClusterStatus) -> dict[JobId, int]:
        """The nodes of each low-priority job there that is not ending anyway."""
        held: dict[JobId, int] = {}
        for token, size in cluster.live.items():
            found = self._ledger.find(token)
            if found is None or found[0].spec.priority is not Priority.LOW:
                continue
            job, component = found
            if job.ending is None and component.state is not ComponentState.STOPPING:
                held[job.id] = held.get(job.id, 0) + size
        return held
