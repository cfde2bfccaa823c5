"""The decisions of a live grid, read from its record, and those of a simulation of the same jobs.

The simulation gets the submission times, the start-up time of each component, and how long it held its nodes after the
barrier. It decides itself when and where each job is placed and in which order. All times are those of scheduler steps
and are multiples of the resolution of the record, so their sums are exact.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from koalapy.model.job import ComponentState, Job, JobId, Token, TokenParts, parse_token
from koalapy.model.job_spec import Priority
from koalapy.model.reports import ClusterReport, ComponentStatus
from koalapy.model.request import ClusterName
from koalapy.scheduler.events import JobSubmitted, Reported
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.record.format import Beginning, Step
from koalapy.simulation.record.replay import RecordFile
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import Runner, SimulatedCluster, SimulatedGrid

CLUSTERS = {"east": 8, "north": 16, "south": 12}
ENDED_STATES = (ComponentState.DELIVERING, ComponentState.ENDED)
Gang = tuple[tuple[ClusterName, int], ...]
Body = Mapping[str, Any]


def create_workload(jobs: int, seed: int) -> list[Body]:
    """Return the bodies of ``jobs`` submissions: all kinds of request, several sizes and policies, both priorities.

    The jobs sleep for 0.2 to 1 second.
    """
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
class Decision:
    """A scheduler's decision on a job; times are seconds since the daemon started."""

    placed: float
    gang: Gang
    """Its number of nodes on each cluster, ordered by name."""
    started: float
    """The time at which the barrier opened."""


@dataclass(slots=True)
class ComponentTimes:
    """Times of one component in seconds since the daemon started; 0 for events that have not occurred."""

    cluster: ClusterName
    submitted: float
    claimed: float = 0.0
    opened: float = 0.0
    ended_at: float = 0.0
    """The time of the report of its end. Its nodes are free once the report of its cluster omits it, too."""
    free: float = 0.0


@dataclass(slots=True)
class LiveRun:
    """A run of a daemon, read from its record."""

    beginning: Beginning
    nodes: dict[ClusterName, int] = field(default_factory=dict)
    jobs: dict[JobId, tuple[float, Job]] = field(default_factory=dict)
    """Time and job of each submission."""
    components: dict[Token, ComponentTimes] = field(default_factory=dict)
    decided: dict[JobId, Decision] = field(default_factory=dict)
    attempts: int = 0
    _ending: set[Token] = field(default_factory=set)
    """Ended components that still hold nodes."""
    _holding: dict[ClusterName, frozenset[Token]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "LiveRun":
        """Read a record that holds one daemon run."""
        (live,) = [cls._read(recording.beginning, recording.steps) for recording in RecordFile(path).lives()]
        return live

    @classmethod
    def _read(cls, beginning: Beginning, steps: Iterator[Step]) -> "LiveRun":
        live = cls(beginning)
        for step in steps:
            live._replay_step(step, step.at - beginning.now)
        return live

    def _replay_step(self, step: Step, time: float) -> None:
        for event in step.events:
            if isinstance(event, JobSubmitted):
                self.jobs[event.job.id] = time, event.job
            elif isinstance(event, Reported) and isinstance(event.report, ComponentStatus):
                self._store_report(event.report, time)
            elif isinstance(event, Reported) and isinstance(event.report, ClusterReport):
                self.nodes[event.cluster] = max(event.report.total, self.nodes.get(event.cluster, 0))
                self._holding[event.cluster] = event.report.holding
        for token in [token for token in self._ending if token not in self._holding[self.components[token].cluster]]:
            self.components[token].free = time
            self._ending.remove(token)
        gangs = {job.job: _count_nodes((part.cluster, part.nodes) for part in job.gang) for job in step.done.jobs}
        for ordered in step.done.commands:
            if ordered.what == "SubmitComponent":
                self.components[ordered.token] = ComponentTimes(ordered.cluster, time)
                job = parse_token(ordered.token).job
                if job not in self.decided or self.decided[job].placed != time:
                    self.attempts += 1
                    self.decided[job] = Decision(time, gangs[job], 0.0)
            elif ordered.what == "OpenBarrier":
                self.components[ordered.token].opened = time
                job = parse_token(ordered.token).job
                self.decided[job] = Decision(self.decided[job].placed, self.decided[job].gang, time)

    def _store_report(self, status: ComponentStatus, time: float) -> None:
        component = self.components.get(status.token)
        if component is None:
            return
        if status.hosts and not component.claimed:
            component.claimed = time
        if status.state in ENDED_STATES and not component.ended_at:
            component.ended_at = time
            self._ending.add(status.token)

    @property
    def startups(self) -> list[float]:
        """Return the seconds until all runners of a component had reported, for each component."""
        return [durations.claimed - durations.submitted for durations in self.components.values()]


class SameDurations(Simulation):
    """A simulation in which each component takes as long as in the live grid, or starts at once if it is new."""

    def __init__(self, live: LiveRun, **rules: Any) -> None:
        begun = live.beginning
        clusters = {
            durations.name: SimulatedCluster(live.nodes[durations.name], durations.speed, durations.profile)
            for durations in begun.clusters
        }
        links = {(cluster, peer): link for cluster, peer, link in begun.links}
        super().__init__(SimulatedGrid(clusters, links), replace(begun.rules, **rules))
        self._took = {_component_key(parse_token(token)): durations for token, durations in live.components.items()}

    def startup_time(self, runner: Runner, cluster: str) -> float:
        took = self._took.get(_component_key(parse_token(runner.token)))
        return took.claimed - took.submitted if took else super().startup_time(runner, cluster)

    def holding_time(self, runner: Runner, lasts: float) -> float:
        took = self._took.get(_component_key(parse_token(runner.token)))
        return took.free - took.opened if took else super().holding_time(runner, lasts)


def _count_nodes(components: Iterable[tuple[ClusterName, int]]) -> Gang:
    nodes: Counter[ClusterName] = Counter()
    for cluster, size in components:
        nodes[cluster] += size
    return tuple(sorted(nodes.items()))


def _component_key(token: TokenParts) -> tuple[int, int, int]:
    return token.job, token.generation, token.component


def simulate_run(live: LiveRun, **rules: Any) -> dict[JobId, Decision]:
    """Return the simulated decisions on the same jobs, under the live grid's rules or ``rules``."""
    decided: dict[JobId, Decision] = {}
    planned = [PlannedJob(submitted_at, job.spec, 1.0, label=str(job.id)) for submitted_at, job in live.jobs.values()]
    for job in SameDurations(live, **rules).run(planned).jobs:
        assert job.placed is not None
        assert job.started is not None
        decided[int(job.planned.label)] = Decision(job.placed, _count_nodes(job.gang), job.started)
    return decided


def sort_jobs(decided: Mapping[JobId, Decision], event: str) -> Sequence[JobId]:
    """Return the jobs in the order of their ``placed`` or ``started`` times, and by number if these are equal."""
    return sorted(decided, key=lambda job: (getattr(decided[job], event), job))
