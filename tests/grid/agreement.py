"""One workload in two worlds: what a live grid did, as its record tells it, and a simulation of the same jobs.

The simulation is told how long things took, and nothing of what was decided: when each job came, how long each
component took to start up, and how long from the barrier on it had its nodes. When a job is placed, where, and after
whom, it finds out by itself, with clusters, agents and an event loop of its own. The seconds of both are those of steps
of a scheduler, and all are multiples of what one number of the record differs by from the next: sums of them are exact.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from koalapy.model.job import ComponentState, Job, JobId, Priority, Token, TokenParts, parse_token
from koalapy.model.reports import ClusterReport, ComponentStatus
from koalapy.model.request import ClusterName
from koalapy.record.beginning import Beginning
from koalapy.record.reading import RecordFile
from koalapy.record.step import Step
from koalapy.scheduler.events import JobSubmitted, Reported
from koalapy.simulation.grid import SimulatedCluster, SimulatedGrid
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import Runner

CLUSTERS = {"east": 8, "north": 16, "south": 12}
OVER = (ComponentState.DELIVERING, ComponentState.ENDED)
Gang = tuple[tuple[ClusterName, int], ...]
Body = Mapping[str, Any]


def workload(jobs: int, seed: int) -> list[Body]:
    """So many jobs as they are submitted: of all kinds of request, several sizes, policies and both priorities; they
    sleep for 0.2 to 1 second."""
    draw = Random(seed)
    return [
        {
            **_request(draw),
            "command": ["sleep", str(draw.choice([0.2, 0.2, 0.3, 0.5, 1.0]))],
            "launcher": "processes",
            "priority": draw.choices(list(Priority), [1, 3])[0],
        }
        for _ in range(jobs)
    ]


def _request(draw: Random) -> dict[str, Any]:
    kind = draw.choice(["fixed", "nonfixed", "flexible", "flexible"])
    if kind == "flexible":
        policy = draw.choice(["cluster-minimization", "larger-first", "adaptive"])
        size = draw.choice([1, 1, 2, 2, 3, 4, 6, 20])
        return {"request": {"type": kind, "total_size": size}, "policy": policy}
    if kind == "nonfixed":
        sizes = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
        return {"request": {"type": kind, "components": [{"size": size} for size in sizes]}}
    clusters = draw.sample(sorted(CLUSTERS), draw.randint(1, 2))
    return {"request": {"type": kind, "components": [{"cluster": c, "size": draw.randint(1, 3)} for c in clusters]}}


@dataclass(frozen=True, slots=True)
class Decided:
    """What a scheduler made of one job; seconds since the daemon began."""

    placed: float
    gang: Gang
    """Its nodes on each cluster, by names."""
    started: float
    """When the barrier opened."""


@dataclass(slots=True)
class Lasted:
    """What became of one component, in seconds since the daemon began; 0 for what did not happen yet."""

    cluster: ClusterName
    submitted: float
    claimed: float = 0.0
    opened: float = 0.0
    over: float = 0.0
    """When its end was told; its nodes are free when their cluster does not count it any more either."""
    free: float = 0.0


@dataclass(slots=True)
class Live:
    """The life of a daemon, as its record tells it."""

    beginning: Beginning
    nodes: dict[ClusterName, int] = field(default_factory=dict)
    jobs: dict[JobId, tuple[float, Job]] = field(default_factory=dict)
    """As they were submitted, and when."""
    components: dict[Token, Lasted] = field(default_factory=dict)
    decided: dict[JobId, Decided] = field(default_factory=dict)
    attempts: int = 0
    _ending: set[Token] = field(default_factory=set)
    """Those that are over and not free."""
    _holding: dict[ClusterName, frozenset[Token]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> "Live":
        """The one life of a record."""
        (found,) = [cls._read(life.beginning, life.steps) for life in RecordFile(path).lives()]
        return found

    @classmethod
    def _read(cls, beginning: Beginning, steps: Iterator[Step]) -> "Live":
        live = cls(beginning)
        for step in steps:
            live._take(step, step.at - beginning.now)
        return live

    def _take(self, step: Step, at: float) -> None:
        for event in step.events:
            if isinstance(event, JobSubmitted):
                self.jobs[event.job.id] = at, event.job
            elif isinstance(event, Reported) and isinstance(event.report, ComponentStatus):
                self._hear(event.report, at)
            elif isinstance(event, Reported) and isinstance(event.report, ClusterReport):
                self.nodes[event.cluster] = max(event.report.total, self.nodes.get(event.cluster, 0))
                self._holding[event.cluster] = event.report.holding
        for token in [token for token in self._ending if token not in self._holding[self.components[token].cluster]]:
            self.components[token].free = at
            self._ending.remove(token)
        gangs = {job.job: _gang((each.cluster, each.nodes) for each in job.gang) for job in step.done.jobs}
        for ordered in step.done.commands:
            if ordered.what == "SubmitComponent":
                self.components[ordered.token] = Lasted(ordered.cluster, at)
                job = parse_token(ordered.token).job
                if job not in self.decided or self.decided[job].placed != at:
                    self.attempts += 1
                    self.decided[job] = Decided(at, gangs[job], 0.0)
            elif ordered.what == "OpenBarrier":
                self.components[ordered.token].opened = at
                job = parse_token(ordered.token).job
                self.decided[job] = Decided(self.decided[job].placed, self.decided[job].gang, at)

    def _hear(self, status: ComponentStatus, at: float) -> None:
        component = self.components.get(status.token)
        if component is None:
            return
        if status.hosts and not component.claimed:
            component.claimed = at
        if status.state in OVER and not component.over:
            component.over = at
            self._ending.add(status.token)

    @property
    def startups(self) -> list[float]:
        """Seconds that components took until all their runners had reported."""
        return [each.claimed - each.submitted for each in self.components.values()]


class SameDurations(Simulation):
    """Each component takes as long as it did in the live grid; one that there was not there starts up at once."""

    def __init__(self, live: Live, **rules: Any) -> None:
        begun = live.beginning
        clusters = {
            each.name: SimulatedCluster(live.nodes[each.name], each.speed, each.profile) for each in begun.clusters
        }
        links = {(one, other): link for one, other, link in begun.links}
        super().__init__(SimulatedGrid(clusters, links), replace(begun.rules, **rules))
        self._took = {_parts(parse_token(token)): each for token, each in live.components.items()}

    def startup(self, runner: Runner, cluster: str) -> float:
        took = self._took.get(_parts(parse_token(runner.token)))
        return took.claimed - took.submitted if took else super().startup(runner, cluster)

    def holds(self, runner: Runner, lasts: float) -> float:
        took = self._took.get(_parts(parse_token(runner.token)))
        return took.free - took.opened if took else super().holds(runner, lasts)


def _gang(components: Iterable[tuple[ClusterName, int]]) -> Gang:
    nodes: Counter[ClusterName] = Counter()
    for cluster, size in components:
        nodes[cluster] += size
    return tuple(sorted(nodes.items()))


def _parts(token: TokenParts) -> tuple[int, int, int]:
    return token.job, token.generation, token.component


def simulated(live: Live, **rules: Any) -> dict[JobId, Decided]:
    """What becomes of the same jobs in the simulated world, by the live grid's rules or some others."""
    decided: dict[JobId, Decided] = {}
    planned = [PlannedJob(at, job.spec, 1.0, label=str(job.id)) for at, job in live.jobs.values()]
    for job in SameDurations(live, **rules).run(planned).jobs:
        assert job.placed is not None
        assert job.started is not None
        decided[int(job.planned.label)] = Decided(job.placed, _gang(job.gang), job.started)
    return decided


def order(decided: Mapping[JobId, Decided], what: str) -> Sequence[JobId]:
    """Jobs in the order in which they were ``placed`` or ``started``; those of one moment by their numbers."""
    return sorted(decided, key=lambda job: (getattr(decided[job], what), job))
