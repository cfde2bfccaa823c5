"""A simulated environment with recorded schedulers, one record for each daemon run."""

from collections.abc import Sequence
from typing import Any, cast

from koalapy.model.job import Job
from koalapy.model.users import User
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.scheduler import Scheduler
from koalapy.simulation.record.format import (
    Beginning,
    KnownCluster,
    People,
    Step,
    beginning_to_json,
    encode_line,
    step_to_json,
)
from koalapy.simulation.record.recorder import RecordedScheduler
from tests.scheduler.world import World

LAB = {name: User(groups=("lab",)) for name in ("bob", "cy")}
Life = list[bytes]
"""Lines of a record: the initial state and the steps."""


class RecordedWorld(World):
    """The environment of a scheduler, with records of each daemon run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.lives: list[Life] = []
        super().__init__(*args, **kwargs)

    def _scheduler(self, clusters: Sequence[ClusterStatus], jobs: Sequence[Job] | None = None) -> Scheduler:
        beginning = Beginning(
            self.rules,
            tuple(self.policies.names()),
            tuple(map(_to_known_cluster, clusters)),
            tuple((source, target, link) for (source, target), link in (self.links or {}).items()),
            people=People(users=LAB, limits=self.limits.settings) if self.limits else People(),
            jobs=tuple(jobs or ()),
            scans=self.scans if jobs is not None else {},
            now=self.now,
            streams=self.relays.streams,
            link_uses=tuple((first, second, use) for (first, second), use in self.relays.uses.items()),
        )
        run_lines = [encode_line(beginning_to_json(beginning))]
        self.lives.append(run_lines)

        def keep(step: Step) -> None:
            run_lines.append(encode_line(step_to_json(step)))

        recorded = RecordedScheduler(beginning, self.policies, self.nonces, self.clock or float, keep)
        return cast(Scheduler, recorded)


def _to_known_cluster(cluster: ClusterStatus) -> KnownCluster:
    health = cluster.health
    return KnownCluster(
        cluster.name,
        cluster.speed,
        cluster.profile,
        cluster.last_report.total,
        health.errors,
        unusable=health.unusable,
        note=health.note,
        trials=health.trials,
        drained=cluster.drained,
        planned_drains=cluster.planned_drains,
    )
