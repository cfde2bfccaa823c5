"""A site takes back nodes for its own users (semantics 8): jobs of other home sites there make room for them."""

from collections.abc import Callable, Iterable, Mapping

from koalapy.model.job import Job, Priority, Token
from koalapy.model.request import ClusterName
from koalapy.model.wording import listed, nodes
from koalapy.scheduler.claims.preemption import Preemption, Victim, within_limit
from koalapy.scheduler.cluster_status import ClusterStatus
from koalapy.scheduler.ledger import live
from koalapy.scheduler.state import SchedulerState

RECLAIMED = "reclaimed"


def taken_back(cluster: ClusterStatus, more: int = 0) -> int:
    """Nodes that a job could have on its home site, were so many ``more`` idle: idle, about to be, or with jobs of low
    priority of other sites; as many of all these are left as are kept for who was promised its turn."""
    return within_limit(cluster, cluster.expected + more + cluster.reclaimable - cluster.kept_from())


class Reclaiming(Preemption):
    """The same for one site, and for its own users only: who makes room there are jobs of others."""

    event = RECLAIMED

    def __init__(self, state: SchedulerState, site: ClusterName, put_first: Callable[[Job], Job]) -> None:
        super().__init__(state)
        self._site, self._put_first = site, put_first

    def available(self, cluster: ClusterStatus) -> int:
        return taken_back(cluster) if cluster.name == self._site else 0

    def _stoppable(self, cluster: ClusterStatus) -> Mapping[Token, int]:
        return cluster.reclaimable_components

    def reason(self, where: str, job: Job) -> str:
        return f"{RECLAIMED}: {where} takes back its nodes for job {job.id} of its own users"

    def told(self, victims: Iterable[Victim]) -> str:
        jobs = [victim.job for victim in victims]
        freed = sum(c.size for job in jobs for c in live(job).components if c.cluster == self._site and not c.has_ended)
        return f"your site {self._site} reclaimed {nodes(freed)}, of {listed([f'job {job.id}' for job in jobs])}"

    def stopping(self, victim: Job) -> Job:
        return self._put_first(victim) if self._rules.reclaimed_position == "front" else victim


class MakingRoom:
    """For whom others make room, and which."""

    def __init__(self, state: SchedulerState, put_first: Callable[[Job], Job]) -> None:
        self._rules, self._sharing = state.rules, state.sharing
        self.preemption = Preemption(state)
        sites = [cluster.name for cluster in state.grid.clusters()] if state.sharing.reclaims else []
        self._reclaiming = {site: Reclaiming(state, site, put_first) for site in sites}

    def of(self, job: Job) -> Preemption | None:
        """Jobs of high priority preempt, wherever they are; others have their home site take back its nodes."""
        if job.spec.priority is Priority.HIGH and self._rules.preemption != "never":
            return self.preemption
        return self._reclaiming.get(self._sharing.takes_back(job.spec.home_site))
