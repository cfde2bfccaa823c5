"""Whose fault was it, and what follows: errors counted per cluster, jobs restarted (semantics 6)."""

from collections.abc import Iterator
from contextlib import contextmanager

from koalapy.model.job import Component, Job, JobState
from koalapy.model.request import ClusterName
from koalapy.scheduling.claiming.claiming import Claiming
from koalapy.scheduling.grid import Limit
from koalapy.scheduling.state import SchedulerState
from koalapy.scheduling.timers import Deadline

INFRASTRUCTURE_FAILURE = "infrastructure-failure"
LIMIT_PAUSE = 15.0
"""Seconds for which a cluster whose resource manager told of a limit gets nothing as large, the first time;
each further one in a row doubles that."""
LONGEST_LIMIT_PAUSE = 120.0


class Faults:
    """Counts consecutive errors of clusters and decides whether a job is tried again."""

    def __init__(self, state: SchedulerState, claiming: Claiming) -> None:
        self._rules, self._ledger, self._grid, self._timers = state.rules, state.ledger, state.grid, state.timers
        self._claiming = claiming
        self._counted: dict[ClusterName, bool] = {}
        """Of clusters where all that goes wrong at the moment is one event: whether it was counted."""

    def infrastructure_failed(self, job: Job, component: Component, error: str, now: float) -> Job:
        """A failure that is not the program's: the whole attempt ends and the job is tried again."""
        self._ledger.note(job, now, "error", error, component)
        self.count_error(component.cluster, error, now)
        return self.restart(job, f"{INFRASTRUCTURE_FAILURE}: {component.cluster}: {error}", now)

    def refused(self, job: Job, component: Component, fault: str, error: str, now: float) -> Job:
        """A resource manager did not take a component, and that is no error of the cluster: by the job's own fault,
        which ends it, or for a limit, for which it waits as it does when local users were faster.
        """
        cluster = component.cluster
        if fault == "job":
            self._ledger.note(job, now, "error", error, component)
            return self._claiming.end(job, JobState.FAILED, f"{cluster} refused it: {error}", now)
        self.limit_reached(cluster, component.size, error, now)
        return self._claiming.overtaken(job, component, f"{cluster} takes no more: {error}", now)

    def limit_reached(self, cluster: str, size: int, error: str, now: float) -> None:
        """So many nodes were too many there: for a while fewer are tried at most."""
        status = self._grid[cluster]
        pause = _doubled(LIMIT_PAUSE, status.limits, LONGEST_LIMIT_PAUSE)
        status.limits += 1
        size = size if status.limit is None else min(size, status.limit.size)
        status.limit = Limit(max(1, size), now + pause, error)
        self._timers.add(status.limit.until, Deadline.LIMIT, cluster=cluster)
        self._ledger.cluster_changed(cluster)

    def lift_limit(self, cluster: str, at: float) -> None:
        """The pause after a limit is over: what was refused may be tried again."""
        status = self._grid[cluster]
        if status.limit is not None and status.limit.until == at:
            status.limit, status.capacity_gained = None, True
            self._ledger.cluster_changed(cluster)

    def count_taken(self, cluster: str) -> None:
        """A resource manager has taken a component: the next limit is a new one."""
        status = self._grid[cluster]
        if status.limit is None:
            status.limits = 0

    def restart(self, job: Job, reason: str, now: float, *, exit_code: int | None = None) -> Job:
        """End the attempt and try the job again, unless it has been tried too often; the first time at once, then
        after pauses that double, so that trouble which is over in a while does not use up all tries."""
        limit = job.spec.max_restarts if job.spec.max_restarts is not None else self._rules.max_restarts
        if limit is not None and job.restarts >= limit:
            reason = f"{reason} (gave up after {limit} restarts)"
            return self._claiming.end(job, JobState.FAILED, reason, now, exit_code=exit_code)
        number = job.restarts + 1
        pause = self._pause_before(number)
        said = f"restart {number}" if limit is None else f"restart {number} of {limit}"
        if pause:
            said += f", next try after {pause:.3g} s"
        job = self._ledger.change(job, restarts=number, retry_at=now + pause if pause else None)
        return self._claiming.end(job, JobState.QUEUED, f"{reason} ({said})", now, exit_code=exit_code)

    def _pause_before(self, restart: int) -> float:
        rules = self._rules
        return _doubled(rules.restart_pause, restart - 2, rules.restart_pause_max) if restart > 1 else 0.0

    @contextmanager
    def one_event(self, cluster: ClusterName) -> Iterator[None]:
        """Whatever goes wrong there meanwhile has one cause, and is one error."""
        self._counted[cluster] = False
        try:
            yield
        finally:
            del self._counted[cluster]

    def count_error(self, cluster: ClusterName, error: str, now: float) -> None:
        """One more in a row; those of one event count once."""
        if self._counted.get(cluster):
            return
        if cluster in self._counted:
            self._counted[cluster] = True
        status = self._grid[cluster]
        status.errors += 1
        if status.probation:
            status.trials += 1
        if status.probation or (status.errors >= self._rules.error_threshold and not status.unusable):
            status.unusable, status.probation = True, False
            status.note = f"{errors_in_a_row(status.errors)}, the last: {error}"
            self.plan_probation(cluster, now)
        self._ledger.cluster_changed(cluster)

    def plan_probation(self, cluster: str, now: float) -> None:
        """Have an unusable cluster tried again after a pause that doubles with each trial that failed."""
        if self._rules.probation:
            status = self._grid[cluster]
            pause = _doubled(self._rules.probation_pause, status.trials, self._rules.probation_pause_max)
            status.probation_at = now + pause
            self._timers.add(status.probation_at, Deadline.PROBATION, cluster=cluster)

    def begin_probation(self, cluster: str, at: float) -> None:
        """The pause is over: components may be tried there, one at a time."""
        status = self._grid[cluster]
        if status.unusable and status.probation_at == at:
            status.forget_trials()
            status.probation, status.capacity_gained = True, True
            self._ledger.cluster_changed(cluster)

    def trial_succeeded(self, cluster: str) -> None:
        """A program was started on a cluster: if it is on probation, that was its trial."""
        if self._grid[cluster].probation:
            self.clear(cluster)
            self._grid[cluster].capacity_gained = True

    def count_success(self, cluster: str) -> None:
        status = self._grid[cluster]
        if status.errors and not status.unusable:
            status.errors = 0
            self._ledger.cluster_changed(cluster)

    def clear(self, cluster: str) -> None:
        """An operator says that the cluster is mended."""
        status = self._grid[cluster]
        status.errors, status.unusable, status.probation, status.trials, status.note = 0, False, False, 0, ""
        status.probation_at = None
        status.forget_trials()
        status.limit, status.limits = None, 0
        status.doubt, status.doubts = None, 0
        self._ledger.cluster_changed(cluster)


def _doubled(pause: float, times: int, longest: float) -> float:
    return min(pause * 2.0 ** min(times, 60), longest)


def errors_in_a_row(count: int) -> str:
    return "1 error" if count == 1 else f"{count} errors in a row"
