"""What a cluster says is idle and does not give: nodes that do not count for a while (docs/adr/0012).

A claim that timed out since local users were faster, on a cluster that reports so too, was bad luck. Where a runner
stays queued though its cluster reports nodes enough for it, that report is worth less: of these nodes no more count
than the claim has not disproved, for a pause that doubles with each further claim that times out there. Both count as
evidence of what is to be expected of a claim there (``evidence.py``).
"""

from dataclasses import replace

from koalapy.model.job import Token
from koalapy.model.request import ClusterName
from koalapy.scheduler.cluster_conditions import Doubt
from koalapy.scheduler.state import SchedulerState
from koalapy.scheduler.timers import Deadline, doubled

DOUBT_PAUSE = 30.0
"""Seconds for which nodes do not count after the first claim that timed out; each further one doubles that."""
MAX_DOUBT_PAUSE = 1800.0


class DoubtfulNodes:
    """Counts what claims show; raises doubts about idle nodes when they fail, and ends them when they hold."""

    def __init__(self, state: SchedulerState) -> None:
        self._ledger, self._grid, self._timers = state.ledger, state.grid, state.timers

    def claim_failed(self, cluster: ClusterName, token: Token, size: int, now: float, submitted_at: float) -> None:
        """A component was told to end, since its resource manager kept it queued for too long."""
        status = self._grid[cluster]
        if not status.problem:
            status.evidence.overtaken(size, now)
        status.count_on_none_of(token)
        ahead = status.largest_queued(token, size)
        surplus, before = status.said_for_claims_like(token) - (ahead - 1), status.doubt
        if surplus <= 0 or status.problem or not status.contact.connected:
            return  # it does not say that it could have started
        if before is not None:
            surplus, ahead = max(surplus, before.nodes), min(ahead, before.size)
        if before is None or submitted_at > before.since:
            pause = doubled(DOUBT_PAUSE, status.evidence.in_vain, MAX_DOUBT_PAUSE)
            status.evidence.in_vain += 1
            asked = status.classes.asked_by(token)
            status.doubt = Doubt(surplus, ahead, now, now + pause, node_class=asked)
            self._timers.add(now + pause, Deadline.DOUBT, cluster=cluster)
        else:  # one of several claims that were made before anything was known
            status.doubt = replace(before, nodes=surplus, size=ahead)
        self._ledger.cluster_changed(cluster)

    def claim_held(self, cluster: ClusterName, token: Token, size: int, waited: float, now: float) -> None:
        """A component has got its nodes, so many seconds after it was submitted."""
        status = self._grid[cluster]
        status.evidence.started(size, waited, now)
        status.shown(token)
        if status.evidence.in_vain and (status.doubt is None or size >= status.doubt.size):
            status.doubt, status.evidence.in_vain, status.capacity_gained = None, 0, True
            self._ledger.cluster_changed(cluster)

    def pause_is_over(self, cluster: ClusterName, at: float) -> None:
        """The nodes count again, for one claim at a time, until one holds."""
        status = self._grid[cluster]
        if status.doubt is not None and status.doubt.until == at:
            status.doubt, status.capacity_gained = replace(status.doubt, is_tried=True), True
            self._ledger.cluster_changed(cluster)
