"""Report what the advisor has learned of applications, and the placements that followed its advice."""

from dataclasses import dataclass
from enum import StrEnum

from koalapy.daemon.engine.database import query
from koalapy.model.advice import AdvisedPlacement
from koalapy.policies.knowledge import HOPELESS, PAYS_UP_TO, SURE, ClusterSet, LogNormal, Slowdowns
from koalapy.scheduler.advisor.experience import Experience, RunSummary
from koalapy.store.advice import AdviceStore

MAX_LEARNED_RUNS = 5000
"""The number of latest runs from which the advisor learns when a daemon starts."""


class Verdict(StrEnum):
    """What happens to an application's jobs that fit on no single cluster now, but will on one later."""

    CO_ALLOCATED = "co-allocated"
    """Co-allocate, unless the wait is known to be shorter than the cost of co-allocation."""
    BY_THE_WAIT = "by the wait"
    """Co-allocate if the wait is known to be longer than the cost."""
    ONE_CLUSTER = "one cluster"
    """Likewise, but not while other jobs wait."""
    NOT_KNOWN = "not known yet"
    """Likewise, but while other jobs wait only occasionally, to learn the slowdown."""


@dataclass(frozen=True, slots=True)
class ApplicationRecord:
    """The experience with an application; slowdown and verdict are those on its most used combination of clusters."""

    application: str
    clusters: ClusterSet
    slowdown: LogNormal
    runs_on_several: int
    """The number of co-allocated runs that could be compared with runs of the same size on one cluster."""
    killed_on_several: int
    """The number of those runs that were killed at their walltime."""
    verdict: Verdict
    runs: list[RunSummary]
    slowdowns: dict[ClusterSet, LogNormal]
    """Slowdowns by observed combination of clusters."""


@dataclass(frozen=True, slots=True)
class Advisor:
    """The experience of the scheduler and the stored advice."""

    experience: Experience
    store: AdviceStore

    async def list_applications(self, owner: str | None = None) -> list[ApplicationRecord]:
        """Return applications by name; with ``owner`` only those that this user's jobs have run."""
        names = self.experience.applications()
        visible = names if owner is None else await query(self.store.applications_of, owner)
        return [self._describe_application(name) for name in names if name in visible]

    def _describe_application(self, name: str) -> ApplicationRecord:
        """Return what past runs show of an application.

        Its verdict is on the clusters that it used together most often.
        """
        summaries, slowdowns = self.experience.seen(name), self.experience.slowdowns(name)
        several: dict[ClusterSet, int] = {}
        for summary in summaries:
            if summary.where:
                several[summary.where] = several.get(summary.where, 0) + summary.runs
        most_used = max(several, key=lambda clusters: (several[clusters], clusters), default=())
        return ApplicationRecord(
            name,
            most_used,
            slowdowns.on_clusters(most_used),
            slowdowns.runs,
            slowdowns.killed,
            verdict_on(slowdowns, most_used),
            summaries,
            {clusters: slowdowns.on_clusters(clusters) for clusters in several},
        )

    async def read_advice(self, application: str, limit: int, owner: str | None = None) -> list[AdvisedPlacement]:
        """Return stored advice, newest first; an empty application or no owner selects all."""
        return await query(self.store.record, application, limit, owner)


def verdict_on(slowdowns: Slowdowns, clusters: ClusterSet) -> Verdict:
    """Return the verdict that follows from the slowdown on these clusters."""
    harmless_probability = slowdowns.harmless_probability(clusters)
    if harmless_probability <= HOPELESS:
        return Verdict.ONE_CLUSTER
    if harmless_probability < SURE:
        return Verdict.NOT_KNOWN
    return Verdict.CO_ALLOCATED if slowdowns.on_clusters(clusters).value <= PAYS_UP_TO else Verdict.BY_THE_WAIT
