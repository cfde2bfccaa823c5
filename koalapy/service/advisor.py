"""What the advisor has learned, and how right it was, for those who ask."""

from dataclasses import dataclass
from enum import StrEnum

from koalapy.model.advice import Advised
from koalapy.placement.knowledge import HARMFUL, PAYS_UP_TO, slowdown
from koalapy.ports import AdviceStore
from koalapy.scheduling.experience import Experience, Seen
from koalapy.service.database import asked

LEARNED_FROM = 5000
"""So many of the last jobs that succeeded are read when a daemon starts."""


class Verdict(StrEnum):
    """What becomes of an application's jobs that no single cluster has room for now, but one would have later."""

    CO_ALLOCATED = "co-allocated"
    """Unless the wait is known to be shorter than what co-allocation costs."""
    BY_THE_WAIT = "by the wait"
    """Co-allocated if the wait is known to be longer than that."""
    ONE_CLUSTER = "one cluster"
    """As before, but not while other jobs wait."""


@dataclass(frozen=True, slots=True)
class ApplicationRecord:
    """One application; ``slowdown`` on the number of clusters that it ran on most, 2 if on none, and what follows."""

    application: str
    clusters: int
    slowdown: float
    runs_on_several: int
    """Of these, how many could be held against runs of the same size on one cluster."""
    verdict: Verdict
    seen: list[Seen]
    slowdowns: dict[int, float]
    """By number of clusters, as far as seen."""


class Advisor:
    """Reads the experience of the scheduler, and the record in the store."""

    def __init__(self, experience: Experience, store: AdviceStore) -> None:
        self._experience = experience
        self._store = store

    def applications(self) -> list[ApplicationRecord]:
        """In order of name."""
        return [self._application(name) for name in self._experience.applications()]

    def _application(self, name: str) -> ApplicationRecord:
        seen, ratios = self._experience.seen(name), self._experience.ratios(name)
        runs: dict[int, int] = {}
        for each in seen:
            runs[each.clusters] = runs.get(each.clusters, 0) + each.runs
        several = {clusters: count for clusters, count in runs.items() if clusters > 1}
        most = max(several, key=lambda clusters: (several[clusters], -clusters), default=2)
        value = slowdown(ratios, most)
        slowdowns = {clusters: slowdown(ratios, clusters) for clusters in several}
        compared = sum(ratio.runs for ratio in ratios)
        return ApplicationRecord(name, most, value, compared, verdict_on(value), seen, slowdowns)

    async def record(self, application: str, limit: int) -> list[Advised]:
        """What was advised, newest first; of all applications when none is named."""
        return await asked(self._store.record, application, limit)


def verdict_on(slowdown: float) -> Verdict:
    if slowdown <= PAYS_UP_TO:
        return Verdict.CO_ALLOCATED
    return Verdict.ONE_CLUSTER if slowdown >= HARMFUL else Verdict.BY_THE_WAIT
