"""What the advisor has learned, and how right it was, for those who ask."""

from dataclasses import dataclass
from enum import StrEnum

from koalapy.daemon.engine.database import query
from koalapy.daemon.forecast.track_record import TrackRecord
from koalapy.model.advice import AdvisedPlacement
from koalapy.model.prediction import Coverage
from koalapy.policies.knowledge import HOPELESS, PAYS_UP_TO, SURE, Slowdowns, Where
from koalapy.policies.log_normal import LogNormal
from koalapy.ports import AdviceStore
from koalapy.scheduler.advisor.experience import Experience, Seen

MAX_LEARNED_RUNS = 5000
"""Of so many of the last jobs it is read what they teach when a daemon starts."""


class Verdict(StrEnum):
    """What becomes of an application's jobs that no single cluster has room for now, but one would have later."""

    CO_ALLOCATED = "co-allocated"
    """Unless the wait is known to be shorter than what co-allocation costs."""
    BY_THE_WAIT = "by the wait"
    """Co-allocated if the wait is known to be longer than that."""
    ONE_CLUSTER = "one cluster"
    """As before, but not while other jobs wait."""
    NOT_KNOWN = "not known yet"
    """As before, but while others wait no more than now and then, to find out."""


@dataclass(frozen=True, slots=True)
class ApplicationRecord:
    """One application; ``slowdown`` and verdict are for the clusters that it ran on together most, if on any."""

    application: str
    where: Where
    slowdown: LogNormal
    runs_on_several: int
    """Of these, how many could be held against runs of the same size on one cluster."""
    killed_on_several: int
    """Of those, how many were killed at their walltime."""
    verdict: Verdict
    seen: list[Seen]
    slowdowns: dict[Where, LogNormal]
    """By clusters, as far as seen."""


class Advisor:
    """Reads the experience of the scheduler, and the record in the store."""

    def __init__(self, experience: Experience, store: AdviceStore, track_record: TrackRecord) -> None:
        self._experience = experience
        self._store = store
        self._track_record = track_record

    async def applications(self, owner: str | None = None) -> list[ApplicationRecord]:
        """In order of name; of somebody, those that his jobs have run: what others run is not told."""
        known = self._experience.applications()
        theirs = known if owner is None else await query(self._store.applications_of, owner)
        return [self._application(name) for name in known if name in theirs]

    def _application(self, name: str) -> ApplicationRecord:
        seen, slowdowns = self._experience.seen(name), self._experience.slowdowns(name)
        several: dict[Where, int] = {}
        for each in seen:
            if each.where:
                several[each.where] = several.get(each.where, 0) + each.runs
        most = max(several, key=lambda where: (several[where], where), default=())
        return ApplicationRecord(
            name,
            most,
            slowdowns.on(most),
            slowdowns.runs,
            slowdowns.killed,
            verdict_on(slowdowns, most),
            seen,
            {where: slowdowns.on(where) for where in several},
        )

    async def record(self, application: str, limit: int, owner: str | None = None) -> list[AdvisedPlacement]:
        """What was advised, newest first: of all applications when none is named, and of everybody's jobs."""
        return await query(self._store.record, application, limit, owner)

    async def coverage(self, application: str, owner: str | None = None) -> list[Coverage]:
        """How right predictions were, by kind and period: of the same."""
        return await self._track_record.coverage(owner, application)


def verdict_on(slowdowns: Slowdowns, where: Where) -> Verdict:
    """What follows from how many times longer it runs on these clusters."""
    harmless = slowdowns.harmless(where)
    if harmless <= HOPELESS:
        return Verdict.ONE_CLUSTER
    if harmless < SURE:
        return Verdict.NOT_KNOWN
    return Verdict.CO_ALLOCATED if slowdowns.on(where).value <= PAYS_UP_TO else Verdict.BY_THE_WAIT
