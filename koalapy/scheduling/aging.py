"""Aging: nodes are kept for a job that has failed many scans, so that wide jobs do not starve (semantics 4)."""

from collections import Counter
from collections.abc import Callable, Mapping

from koalapy.model.cluster import GridView
from koalapy.model.job import JobId, JobSpec, Priority
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import ClusterName
from koalapy.scheduling.grid import ClusterBook, GridBook
from koalapy.scheduling.ledger import Ledger
from koalapy.scheduling.queue import PlacementQueue
from koalapy.scheduling.rules import Rules


class Aging:
    """One reservation at a time: that of the job that has waited longest, of high priority before low.

    The job is placed on the grid as it would be if all jobs of this scheduler had ended; as many nodes as it would have
    on each cluster are then not offered to jobs of low priority, until it is placed.
    """

    def __init__(
        self, rules: Rules, queues: Mapping[Priority, PlacementQueue], ledger: Ledger, grid: GridBook,
        ask: Callable[[JobSpec, GridView], Placement | Refusal],
    ) -> None:  # fmt: skip
        self._rules = rules
        self._queues = queues
        self._ledger = ledger
        self._grid = grid
        self._ask = ask
        self._chosen: JobId | None = None
        self._kept: Counter[ClusterName] = Counter()

    @property
    def job(self) -> JobId | None:
        """The job nodes are kept for, while it waits."""
        if self._chosen is not None and not any(self._chosen in queue for queue in self._queues.values()):
            self._chosen = None
        return self._chosen

    def choose(self) -> None:
        """After a scan: who has waited too long, and what is kept for it."""
        self._chosen = None
        self._kept.clear()
        if not self._rules.aging:
            return
        for priority in Priority:
            queue = self._queues[priority]
            oldest = queue.oldest()
            if oldest is not None and self._tries(oldest, queue) >= self._rules.aging_tries:
                answer = self._ask(self._ledger.jobs[oldest].spec, self._grid.view(_without_our_jobs))
                if isinstance(answer, Placement):
                    self._chosen = oldest
                    for component in answer.components:
                        self._kept[component.cluster] += component.size
                    return

    def _tries(self, job: JobId, queue: PlacementQueue) -> int:
        return self._ledger.jobs[job].placement_tries + queue.scans_of(job)

    def placed(self, job: JobId) -> None:
        if job == self._chosen:
            self._chosen = None

    def view(self) -> GridView:
        """What jobs of low priority are offered."""
        if self.job is None:
            return self._grid.view()
        return self._grid.view(lambda book: book.available - self._kept[book.name])


def _without_our_jobs(book: ClusterBook) -> int:
    """Nodes that neither local users have nor are down, and that there is no doubt about."""
    return book.total - book.background - book.down - book.doubted
