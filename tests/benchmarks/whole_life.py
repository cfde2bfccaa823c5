"""Simulate jobs from submission to end in virtual time, with the real scheduler and minimal clusters and agents.

Agents send the same reports as real ones: that a component waits in the resource manager, its hosts, that it runs, and
how its program has ended; and for their clusters the number of idle nodes and the components on the others. All events
of one time are in one step. There is no store.
"""

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from statistics import fmean

from koalapy.model.job import ComponentState, Job, JobId, JobState, Token, parse_token
from koalapy.model.job_spec import JobSpec
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory
from koalapy.model.request import ClusterName, ComponentRequest, NonFixedRequest
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.effects import Effects, OpenBarrier, StopComponent, SubmitComponent
from koalapy.scheduler.events import Event, InventoryReceived, JobSubmitted, PeriodicScan, Reported
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState

CLUSTERS = [f"cluster-{number}" for number in range(10)]
NODES = 64
"""Number of nodes of each cluster."""
HOSTS = {name: tuple(f"{name}-node-{number:02}" for number in range(NODES)) for name in CLUSTERS}
LOAD = 1.05
"""Offered load; above 1, so that jobs wait."""
SIZES = (1, 2, 4, 8, 16)
LASTS = (60, 600)
"""Least and most seconds that a program runs."""
SEVERAL = (2, 3, 4)
"""Numbers of components of a job with several."""
START_DELAY = 1.0
"""Seconds from a submission to its resource manager until all nodes of a component have reported."""
RULES = Rules()

Step = tuple[Sequence[Event], float]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job of a workload, in whole seconds for other simulators."""

    time_s: int
    sizes: tuple[int, ...]
    lasts: int
    walltime: float | None = None


def create_workload(jobs: int, several: float = 0.0, seed: int = 1) -> list[Arrival]:
    """Return jobs in the order of arrival; a fraction ``several`` of them has 2 to 4 components."""
    draws = random.Random(seed)
    counts = [draws.choice(SEVERAL) if draws.random() < several else 1 for _ in range(jobs)]
    programs = [(tuple(draws.choices(SIZES, k=number)), draws.randint(*LASTS)) for number in counts]
    gap = fmean(sum(sizes) * lasts for sizes, lasts in programs) / (LOAD * len(CLUSTERS) * NODES)
    time_s, arrivals = 0.0, []
    for sizes, lasts in programs:
        time_s += draws.expovariate(1 / gap)
        arrivals.append(Arrival(int(time_s), sizes, lasts))
    return arrivals


def new_scheduler() -> Scheduler:
    clusters = [ClusterStatus(name) for name in CLUSTERS]
    nonces = (f"{number:016x}" for number in count())
    return Scheduler(SchedulerState(RULES, builtin_policies(), clusters), lambda: next(nonces), keeps_effects=False)


def create_submission(ident: JobId, arrival: Arrival) -> JobSubmitted:
    request = NonFixedRequest(tuple(ComponentRequest(size) for size in arrival.sizes))
    command, owner = ("program", f"--case={ident}"), f"user-{ident % 30}"
    spec = JobSpec(request, command, name=f"case-{ident}", owner=owner, walltime=arrival.walltime)
    return JobSubmitted(Job(ident, spec, arrival.time_s))


@dataclass(slots=True)
class Runner:
    """A component on its cluster, while it has nodes."""

    size: int
    lasts: int
    exit_code: int | None
    """The exit code that it reports; with Open MPI only the head has one."""
    runs: bool = False


@dataclass(slots=True)
class Site:
    """A cluster with its agent. It has no local users, so submitted components get their nodes at once."""

    name: ClusterName
    idle: int = NODES
    runners: dict[Token, Runner] = field(default_factory=dict)

    def submit(self, token: Token, runner: Runner) -> Event:
        self.runners[token] = runner
        self.idle -= runner.size
        assert self.idle >= 0
        return Reported(self.name, ComponentStatus(token, ComponentState.WAITING, lrm_job="1"))

    def reports(self, token: Token) -> Event:
        """Return the report of a component's hosts."""
        hosts = HOSTS[self.name][: self.runners[token].size]
        return Reported(self.name, ComponentStatus(token, ComponentState.CLAIMED, hosts, "1"))

    def runs(self, token: Token) -> Event:
        self.runners[token].runs = True
        return Reported(self.name, ComponentStatus(token, ComponentState.RUNNING, lrm_job="1"))

    def ends(self, token: Token) -> Event:
        runner = self.runners.pop(token)
        self.idle += runner.size
        return Reported(self.name, ComponentStatus(token, ComponentState.ENDED, (), "1", runner.exit_code))

    def report(self) -> Event:
        return Reported(self.name, ClusterReport(NODES, self.idle, holding=frozenset(self.runners)))


class SimulatedGrid:
    """Clusters and agents with an agenda of events, which run a scheduler until every job has ended."""

    def __init__(self, arrivals: Sequence[Arrival], steps: list[Step] | None = None) -> None:
        """Record the events and time of each scheduler step in ``steps``."""
        self.scheduler = new_scheduler()
        self._steps = steps
        self.states: dict[JobId, JobState] = {}
        self._sites = {name: Site(name) for name in CLUSTERS}
        self._arrivals = arrivals
        self._order = count()
        self._agenda: list[tuple[float, int, JobSubmitted | tuple[Site, Token]]] = []
        """Future submissions, and components that advance, by time."""
        for ident, arrival in enumerate(arrivals, 1):
            self._later(arrival.time_s, create_submission(ident, arrival))

    def run(self, until: float = inf) -> None:
        """Run from the first arrival to the last end, or to the first step at or after ``until``."""
        self._step([InventoryReceived(name, Inventory(())) for name in CLUSTERS], set(CLUSTERS), 0.0)
        agenda, scan_at = self._agenda, RULES.scan_interval
        while agenda:
            wakeup = self.scheduler.next_wakeup()
            now = min(agenda[0][0], scan_at, scan_at if wakeup is None else wakeup)
            if now >= until:
                return
            events: list[Event] = []
            changed: set[ClusterName] = set()
            while agenda and agenda[0][0] <= now:
                item = heapq.heappop(agenda)[2]
                if isinstance(item, JobSubmitted):
                    events.append(item)
                    continue
                site, token = item
                if site.runners[token].runs:
                    events.append(site.ends(token))
                    changed.add(site.name)
                else:
                    events.append(site.reports(token))
            if now >= scan_at:
                scan_at += RULES.scan_interval
                events.append(PeriodicScan())
            self._step(events, changed, now)

    def _step(self, events: list[Event], changed: set[ClusterName], now: float) -> None:
        """Execute a scheduler step, and further ones with the agents' answers at the same time."""
        while True:
            events += [self._sites[name].report() for name in sorted(changed)]
            if self._steps is not None:
                self._steps.append((events, now))
            events, changed = self._carry_out(self.scheduler.step(events, now), now)
            if not events:
                return

    def _carry_out(self, effects: Effects, now: float) -> tuple[list[Event], set[ClusterName]]:
        """Execute the commands of a step, and return the answers and the clusters with changed nodes."""
        answers: list[Event] = []
        changed: set[ClusterName] = set()
        for ident, job in effects.jobs.items():
            self.states[ident] = job.state
        for command in effects.commands:
            site, token = self._sites[command.cluster], command.token
            if isinstance(command, SubmitComponent):
                answers.append(site.submit(token, self._runner(effects.jobs, token)))
                changed.add(site.name)
                self._later(now + START_DELAY, (site, token))
            elif isinstance(command, OpenBarrier):
                answers.append(site.runs(token))
                self._later(now + site.runners[token].lasts, (site, token))
            else:
                assert not isinstance(command, StopComponent), "no job has to be stopped"
        return answers, changed

    def _runner(self, jobs: dict[JobId, Job], token: Token) -> Runner:
        ident, _, index, _ = parse_token(token)
        attempt = jobs[ident].attempt
        assert attempt is not None
        exit_code = 0 if attempt.head.index == index else None
        return Runner(attempt.components[index].size, self._arrivals[ident - 1].lasts, exit_code)

    def _later(self, time_s: float, item: JobSubmitted | tuple[Site, Token]) -> None:
        heapq.heappush(self._agenda, (time_s, next(self._order), item))


def replay(steps: Sequence[Step]) -> Iterator[Scheduler]:
    """Repeat recorded steps with a new scheduler, without clusters and agents."""
    scheduler = new_scheduler()
    for events, now in steps:
        scheduler.next_wakeup()
        scheduler.step(events, now)
        yield scheduler
