"""Whose fault was it, and what follows: errors counted per cluster, jobs restarted (semantics 6)."""

from koalapy.model.job import Component, Job, JobState
from koalapy.scheduling.claiming import Claiming
from koalapy.scheduling.grid import GridBook
from koalapy.scheduling.ledger import Ledger
from koalapy.scheduling.rules import Rules

INFRASTRUCTURE_FAILURE = "infrastructure-failure"
CLAIM_FAILED = "claim-failed"


class Faults:
    """Counts consecutive errors of clusters and decides whether a job is tried again."""

    def __init__(self, rules: Rules, ledger: Ledger, grid: GridBook, claiming: Claiming) -> None:
        self._rules = rules
        self._ledger = ledger
        self._grid = grid
        self._claiming = claiming

    def infrastructure_failed(self, job: Job, component: Component, error: str, now: float) -> Job:
        """A failure that is not the program's: the whole attempt ends and the job is tried again."""
        self._ledger.note(job, now, "error", error, component)
        self.count_error(component.cluster, error)
        return self.restart(job, f"{INFRASTRUCTURE_FAILURE}: {component.cluster}: {error}", now)

    def restart(self, job: Job, reason: str, now: float) -> Job:
        """End the attempt and try the job again, unless it has been tried too often."""
        limit = job.spec.max_restarts if job.spec.max_restarts is not None else self._rules.max_restarts
        if limit is not None and job.restarts >= limit:
            return self._claiming.end(job, JobState.FAILED, f"{reason} (gave up after {limit} restarts)", now)
        job = self._ledger.change(job, restarts=job.restarts + 1)
        return self._claiming.end(job, JobState.QUEUED, reason, now)

    def count_error(self, cluster: str, error: str) -> None:
        book = self._grid[cluster]
        book.errors += 1
        if book.errors >= self._rules.error_threshold and not book.unusable:
            book.unusable = True
            book.note = f"unusable after {book.errors} errors in a row, the last: {error}"
        self._ledger.cluster_changed(cluster)

    def count_success(self, cluster: str) -> None:
        book = self._grid[cluster]
        if book.errors and not book.unusable:
            book.errors = 0
            self._ledger.cluster_changed(cluster)

    def clear(self, cluster: str) -> None:
        """An operator says that the cluster is mended."""
        book = self._grid[cluster]
        book.errors, book.unusable, book.note = 0, False, ""
        self._ledger.cluster_changed(cluster)
