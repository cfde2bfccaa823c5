"""What a cluster says is idle and does not give: nodes that do not count for a while (docs/adr/0012).

A claim that local users have overtaken, on a cluster that says so too, was bad luck. Where a runner stays queued though
its cluster says that there are nodes enough for it, that word is worth less: of these nodes no more count than the
claim has not disproved, for a pause that doubles with each further claim that is made there in vain.
"""

from dataclasses import replace

from koalapy.model.job import Token
from koalapy.model.request import ClusterName
from koalapy.scheduling.grid import Doubt, GridBook
from koalapy.scheduling.ledger import Ledger
from koalapy.scheduling.timers import Deadline, Timers

DOUBT_PAUSE = 30.0
"""Seconds for which nodes do not count after the first claim in vain; each further one doubles that."""
LONGEST_DOUBT_PAUSE = 1800.0


class Doubts:
    """Raises doubts about idle nodes when claims fail, and ends them when claims hold."""

    def __init__(self, ledger: Ledger, grid: GridBook, timers: Timers) -> None:
        self._ledger, self._grid, self._timers = ledger, grid, timers

    def claim_failed(self, cluster: ClusterName, token: Token, size: int, now: float, submitted_at: float) -> None:
        """A component was told to end, since its resource manager kept it queued for too long."""
        book = self._grid[cluster]
        book.count_on_none_of(token)
        ahead = book.largest_queued(token, size)
        surplus, before = book.said_for_new_claims - (ahead - 1), book.doubt
        if surplus <= 0 or book.problem or not book.connected:
            return  # it does not say that it could have started
        if before is not None:
            surplus, ahead = max(surplus, before.nodes), min(ahead, before.size)
        if before is None or submitted_at > before.since:
            pause = min(DOUBT_PAUSE * 2.0 ** min(book.doubts, 60), LONGEST_DOUBT_PAUSE)
            book.doubts += 1
            book.doubt = Doubt(surplus, ahead, now, now + pause)
            self._timers.add(now + pause, Deadline.DOUBT, cluster=cluster)
        else:  # one of several claims that were made before anything was known
            book.doubt = replace(before, nodes=surplus, size=ahead)
        self._ledger.cluster_changed(cluster)

    def claim_held(self, cluster: ClusterName, token: Token, size: int) -> None:
        """A component has got its nodes."""
        book = self._grid[cluster]
        book.shown(token)
        if book.doubt is None or size >= book.doubt.size:
            self._end(cluster)

    def pause_is_over(self, cluster: ClusterName, at: float) -> None:
        """The nodes count again, for one claim at a time, until one holds."""
        book = self._grid[cluster]
        if book.doubt is not None and book.doubt.until == at:
            book.doubt, book.grew = replace(book.doubt, is_tried=True), True
            self._ledger.cluster_changed(cluster)

    def _end(self, cluster: ClusterName) -> None:
        book = self._grid[cluster]
        if book.doubts:
            book.doubt, book.doubts, book.grew = None, 0, True
            self._ledger.cluster_changed(cluster)
