"""Which low-priority jobs make room for a job of high priority (semantics 5, step 3 of a claiming try)."""

from collections import Counter

from koalapy.model.job import Job, JobId, Priority, parse_token
from koalapy.model.request import ClusterName
from koalapy.scheduling.cluster_status import ClusterStatus
from koalapy.scheduling.ledger import live
from koalapy.scheduling.queueing.promise import is_promised
from koalapy.scheduling.rules import Rules
from koalapy.scheduling.state import SchedulerState


class Preemption:
    """Chooses victims; to end them is the claiming's business."""

    def __init__(self, state: SchedulerState) -> None:
        self._ledger, self._grid = state.ledger, state.grid

    def available(self, cluster: ClusterStatus) -> int:
        """Nodes that a job of high priority could have there: idle, about to be, or held by low-priority jobs."""
        available = cluster.expected + cluster.preemptible
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

    def _held(self, cluster: ClusterStatus) -> Counter[JobId]:
        """The nodes of each low-priority job there that is not ending anyway."""
        held = Counter[JobId]()
        for token, size in cluster.preemptible_components.items():
            held[parse_token(token).job] += size
        return held


def is_preemptible(job: Job, rules: Rules, now: float) -> bool:
    """Whether the live attempt of a job makes room for jobs of high priority, as long as it does not end anyway."""
    return job.spec.priority is Priority.LOW and job.ending is None and not is_promised(job, rules, now)
