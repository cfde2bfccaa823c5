"""Clusters where jobs fail as soon as they start: they are soon idle again, and so get ever more jobs."""

from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass

from koalapy.model.alert import Alert, AlertKind, AlertRules, Severity
from koalapy.model.job import Attempt, Job, JobState, Launcher
from koalapy.model.request import ClusterName
from koalapy.scheduler.clusters import ClusterStatus

MAX_ENDINGS = 1000
"""Endings of one cluster that are kept, the last ones."""
MOST = 0.8
"""Such a part of what ended on a black hole failed soon."""
ELSEWHERE = 3
"""So many endings elsewhere, of which at most half as large a part failed, show that it is not the jobs."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended on a cluster."""

    at: float
    failed_soon: bool
    exit_code: int
    owner: str


def _to_blame(attempt: Attempt, launcher: Launcher) -> set[ClusterName]:
    """Where a program ended: where each node has its own that failed, only the clusters of those that did."""
    failed = {component.cluster for component in attempt.gang if component.exit_code}
    return failed if failed and launcher is Launcher.PROCESSES else {component.cluster for component in attempt.gang}


class BlackHoleCheck:
    """Remembers how jobs ended where; of what operators have drained, nothing."""

    def __init__(
        self, clusters: Callable[[], Collection[ClusterStatus]], rules: AlertRules, clock: Callable[[], float]
    ) -> None:
        self._clusters, self._rules, self._clock = clusters, rules, clock
        self._endings: dict[ClusterName, deque[Ending]] = {}

    def changed(self, job: Job, before: JobState | None) -> None:
        """A program that has come to an end of its own, on each of its clusters."""
        del before
        if job.attempt is None or job.exit_code is None or job.started_at is None or job.spec.internal:
            return
        if job.state not in (JobState.SUCCEEDED, JobState.FAILED):
            return
        now = self._clock()
        took = (now if job.ended_at is None else job.ended_at) - job.started_at
        failed_soon = job.state is JobState.FAILED and took <= self._rules.black_hole_soon
        ending = Ending(now, failed_soon, job.exit_code, job.spec.owner)
        for cluster in _to_blame(job.attempt, job.spec.launcher):
            self._endings.setdefault(cluster, deque(maxlen=MAX_ENDINGS)).append(ending)

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        for endings in self._endings.values():
            while endings and now - endings[0].at > self._rules.black_hole_window:
                endings.popleft()
        for cluster in self._clusters():
            here = self._endings.get(cluster.name, ())
            if cluster.drained is not None:
                self._endings.pop(cluster.name, None)
            elif alert := self._alert(cluster.name, here):
                yield alert

    def _alert(self, name: ClusterName, here: Collection[Ending]) -> Alert | None:
        failed = [ending for ending in here if ending.failed_soon]
        if len(failed) < self._rules.black_hole_failures or len(failed) < MOST * len(here):
            return None
        there = [ending for other, endings in self._endings.items() if other != name for ending in endings]
        failed_there = sum(ending.failed_soon for ending in there)
        better_there = len(there) >= ELSEWHERE and failed_there / len(there) <= len(failed) / len(here) / 2
        if not better_there and len({ending.owner for ending in failed}) < 2:
            return None  # one user's jobs, that fail wherever they come: it is these
        soon, minutes = self._rules.black_hole_soon, self._rules.black_hole_window / 60
        return Alert(
            AlertKind.BLACK_HOLE,
            Severity.CRITICAL,
            f"cluster {name}",
            f"jobs fail on {name} as soon as they start",
            f"{len(failed)} of {len(here)} that ended there in {minutes:g} minutes failed within {soon:g} s of their "
            f"start, {failed_there} of {len(there)} elsewhere; the last with exit code {failed[-1].exit_code}",
            f"keep jobs from it until that is mended: koala clusters drain {name} --reason 'jobs fail there'",
            failed[0].at,
            cluster=name,
        )
