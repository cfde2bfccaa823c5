"""What there is on a grid at one moment, so that a simulation can go on from there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from koalapy.model.job import ComponentState, Job, JobState
from koalapy.model.request import ClusterName
from koalapy.policies.registry import Registry
from koalapy.record.beginning import Beginning, KnownCluster, People
from koalapy.scheduler.queries import Queries
from koalapy.scheduler.scheduler import Scheduler
from koalapy.simulation.grid import SimulatedCluster, SimulatedGrid

HAVE_NODES = frozenset({ComponentState.CLAIMED, ComponentState.RUNNING, ComponentState.STOPPING})
IN_QUEUE = frozenset({ComponentState.SUBMITTED, ComponentState.WAITING})
"""Of their resource manager, as far as is known."""


@dataclass(frozen=True, slots=True)
class NodesNow:
    """Nodes of a cluster that is connected."""

    total: int
    background: int = 0
    down: int = 0
    startup: float = 0.0
    """Seconds from the hand-over of a component to the resource manager, where it has room, until all its runners have
    reported."""


@dataclass(frozen=True)
class Moment:
    """All that a scheduler knows, and the nodes of the clusters that it hears of."""

    beginning: Beginning
    nodes: Mapping[ClusterName, NodesNow] = field(default_factory=dict)

    @property
    def now(self) -> float:
        return self.beginning.now

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Those that are not over, without those that are held: nobody knows when these are released."""
        return tuple(job for job in self.beginning.jobs if job.state is not JobState.HELD)

    def grid(self) -> SimulatedGrid:
        clusters = {
            cluster.name: SimulatedCluster(
                max(1, self._total(cluster)), cluster.speed, cluster.profile, startup=self._startup(cluster)
            )
            for cluster in self.beginning.clusters
        }
        return SimulatedGrid(clusters, {(one, other): link for one, other, link in self.beginning.links})

    def _total(self, cluster: KnownCluster) -> int:
        nodes = self.nodes.get(cluster.name)
        return cluster.total if nodes is None else nodes.total

    def _startup(self, cluster: KnownCluster) -> float:
        nodes = self.nodes.get(cluster.name)
        return 0.0 if nodes is None else nodes.startup

    def scheduler(self, policies: Registry, *, keeps_effects: bool) -> Scheduler:
        """One that has taken up all jobs; its clusters are out of reach until they are heard of."""
        nonces = (f"twin{number:012x}" for number in count())
        return self.beginning.scheduler(policies, lambda: next(nonces), None, keeps_effects=keeps_effects)


def moment_of(queries: Queries, people: People, now: float) -> Moment:
    """What a scheduler knows now."""
    grid = queries.grid
    statuses = grid.clusters()
    clusters = tuple(
        KnownCluster(
            each.name,
            each.speed,
            each.profile,
            each.total,
            each.drained,
            each.health.errors,
            each.health.unusable,
            each.health.note,
            each.health.trials,
        )
        for each in statuses
    )
    view = grid.view()
    return Moment(
        Beginning(
            queries.rules,
            tuple(queries.policies.names()),
            clusters,
            tuple((one, other, link) for (one, other), link in view.links.items()),
            tuple(queries.experience.runs()),
            people,
            dict(view.replicas),
            tuple(queries.jobs()),
            now=now,
        ),
        {
            each.name: NodesNow(each.total, each.background, each.down, each.evidence.mean_wait(now))
            for each in statuses
            if each.contact.connected and each.total
        },
    )
