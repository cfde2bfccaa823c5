"""The simulation: a virtual clock and event queue around the production scheduler, virtual clusters and users.

All events at one time enter one step of the scheduler: first ends, then arrivals. Their consequences at the same time
enter further steps.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from math import ceil, floor
from random import Random

from koalapy.model.errors import UsageError
from koalapy.model.job import Attempt, ComponentState, Job, JobId, JobSpec, JobState, Launcher, Token, parse_token
from koalapy.model.reports import StageStatus
from koalapy.model.request import ClusterName, StopWarning
from koalapy.policies.registry import Registry, builtin
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.effects import Command, Effects, OpenBarrier, StageComponent, StopComponent, SubmitComponent
from koalapy.scheduler.events import ClusterConfirmed, Event, JobSubmitted, PeriodicScan, Reported
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState
from koalapy.simulation.grid import SimulatedGrid
from koalapy.simulation.jobs import Gang, LocalUser, PlannedJob, RunTime, constant
from koalapy.simulation.moment import HAVE_NODES, IN_QUEUE, Moment
from koalapy.simulation.outcome import JobOutcome, NotRun, Outcome
from koalapy.simulation.site import Runner, Site
from koalapy.validation.submission import check

MIN_IN_VAIN = 200
MAX_MOMENTS = 100_000
"""Number of times with only scans and deadlines after which a simulation without other events ends."""


class RegularScans:
    """The times of periodic scans: regular, as in production, but less frequent while nothing happens.

    The interval grows once waiting jobs have had so many scans without an event that further ones change nothing.
    """

    def __init__(self, rules: Rules, now: float) -> None:
        self._interval = rules.scan_interval
        self.at = now + self._interval
        """Time of the next scan."""
        promised = ceil((rules.low_patience or 0.0) / rules.scan_interval)
        self._enough = max(MIN_IN_VAIN, 2 * rules.aging_tries, 2 * promised)
        """Number of scans by which waiting jobs were aged and reached their starvation guarantee, if they ever do."""
        self._in_vain = 0
        """Scans since the last event."""
        self._moments = 0
        """Times since the last event, including those without a scan."""

    def skip_those_before(self, now: float) -> None:
        """Skip scans before ``now``, during which no job waited."""
        if self.at < now:
            self.at += ceil((now - self.at) / self._interval) * self._interval

    def something_happens(self, now: float) -> None:
        """Return to the regular interval, since an event occurred."""
        self._in_vain = self._moments = 0
        if self.at - now > self._interval:
            self.at -= floor((self.at - now) / self._interval) * self._interval

    def are_enough(self) -> bool:
        """Return whether further scans change nothing. Call it once for each time without another event."""
        self._moments += 1
        return self._in_vain >= self._enough or self._moments >= MAX_MOMENTS

    def next(self, *, is_counted: Callable[[], bool]) -> None:
        """Count a scan and set the time of the next one.

        ``is_counted`` returns whether a job counts its scans, so that none may be skipped.
        """
        self._in_vain += 1
        beyond = self._in_vain - self._enough
        times = 2 ** min(beyond, 32) if beyond > 0 and not is_counted() else 1
        self.at += times * self._interval


ENDS, ARRIVES = 0, 1
"""Order of events at one time."""
Watcher = Callable[[float, Effects], None]


class Simulation:
    """One run of the simulation. Equal arguments give equal outcomes, in any process on any machine."""

    def __init__(
        self,
        grid: SimulatedGrid,
        rules: Rules | None = None,
        *,
        run_time: RunTime = constant,
        local_users: Iterable[LocalUser] = (),
        policies: Registry | None = None,
        seed: int = 0,
        until: float | None = None,
        watch: Watcher | None = None,
        moment: Moment | None = None,
        known: Mapping[JobId, PlannedJob] | None = None,
    ) -> None:
        """Prepare a run.

        ``local_users`` are in the order of their arrival. ``until``: the time at which the simulation ends with jobs
        left; None: it ends with the last job. ``watch`` is called with the time and the effects of each step.

        ``moment``: the snapshot to start from, instead of an empty grid. It also supplies the rules; ``known`` has the
        plan of each of its jobs.
        """
        self.grid, self._run_time, self._until, self._watch = grid, run_time, until, watch
        self.rules = rules or Rules() if moment is None else moment.beginning.rules
        self.scheduler = self._new_scheduler(policies or builtin(), moment)
        self.now = self._began = 0.0 if moment is None else moment.now
        if watch is None:
            self.scheduler.disable_timelines()
        self._draws = Random(f"{seed}/failing starts")
        self._failures = {
            name: grid.failures if each.failures is None else each.failures for name, each in grid.clusters.items()
        }
        self._startup = {
            name: grid.startup if each.startup is None else each.startup for name, each in grid.clusters.items()
        }
        self._sites = {name: Site(name, each.nodes, self._allocated) for name, each in grid.clusters.items()}
        self._order = count()
        self._agenda: list[tuple[float, int, int, Callable[[], None]]] = []
        self._local_users = iter(local_users)
        self._events: list[Event] = []
        """Events for the next step."""
        self._changed: set[Site] = set()
        """Clusters with changed node counts that were not yet reported and do not follow from reports of components."""
        self._tell: set[Site] = set()
        """Clusters in ``_changed`` where a component changed, so that their agents report at once."""
        self._starting: list[tuple[Site, Runner]] = []
        """Components that have received their nodes and start without delay."""
        self._planned: dict[JobId, PlannedJob] = {}
        """Plans of the unfinished jobs."""
        self._waiting: set[JobId] = set()
        self._outside: deque[PlannedJob] = deque()
        """Jobs that found the queue full, until they enter it."""
        self._judged: dict[int, tuple[JobSpec, str]] = {}
        """Validated specifications by object identity, each with the reason for its rejection, or an empty text."""
        self._idents = count(1)
        self._next_look = grid.look_every
        self.outcome = Outcome(nodes=grid.nodes)
        self._arrivals: Iterator[PlannedJob] = iter(())
        self._expected: PlannedJob | None = None
        """The next job to arrive."""
        self._unreachable: set[ClusterName] = set()
        if moment is not None:
            self._take_up(moment, known or {})

    def _new_scheduler(self, policies: Registry, moment: Moment | None) -> Scheduler:
        keeps_effects = self._watch is not None
        if moment is not None:
            return moment.scheduler(policies, keeps_effects=keeps_effects)
        statuses = [ClusterStatus(name, each.speed, each.profile) for name, each in self.grid.clusters.items()]
        nonces = (f"{number:016x}" for number in count())
        state = SchedulerState(self.rules, policies, statuses, self.grid.links)
        return Scheduler(state, lambda: next(nonces), keeps_effects=keeps_effects)

    def _take_up(self, moment: Moment, known: Mapping[JobId, PlannedJob]) -> None:
        """Restore the waiting and running jobs of a snapshot on their clusters."""
        self._unreachable = set(self._sites) - set(moment.nodes)
        for name, nodes in moment.nodes.items():
            self._sites[name].take_up(nodes.background, nodes.down)
        for job in moment.jobs:
            self._planned[job.id] = known[job.id]
            if job.state is JobState.QUEUED:
                self._waiting.add(job.id)
            elif job.attempt is not None:
                self._take_up_attempt(job, job.attempt)
        self._idents = count(max((job.id for job in moment.beginning.jobs), default=0) + 1)

    def _take_up_attempt(self, job: Job, attempt: Attempt) -> None:
        planned, runs = self._planned[job.id], attempt.barrier_at is not None and job.ending is None
        for component in attempt.components:
            if component.cluster in self._unreachable or component.state not in HAVE_NODES | IN_QUEUE:
                continue
            site, runner = self._sites[component.cluster], Runner(job.id, job.token(component.index), component.size)
            since = component.claimed_at
            if component.state in HAVE_NODES:
                since = self.now if since is None else since
            site.take_up_runner(runner, since, runs=runs)
            left = 0.0
            if runs and attempt.barrier_at is not None:
                runner.exit_code = _exit_code(planned, job, attempt, runner.token)
                lasts = planned.lasts * self._run_time(planned, gang_of(attempt))
                left = max(0.0, attempt.barrier_at + lasts - self.now)
            if runs or component.state is ComponentState.STOPPING:
                self._later(left, ENDS, partial(self._ends, site, runner))

    @property
    def used(self) -> dict[ClusterName, int]:
        """Return the number of nodes of each cluster that jobs or local users have now."""
        return {name: site.nodes - site.idle for name, site in self._sites.items()}

    # Clock

    def run(self, jobs: Iterable[PlannedJob]) -> Outcome:
        """Submit the jobs, which are in the order of their arrival, run until all have ended, return the outcome."""
        self._arrivals = iter(jobs)
        self._expect_job()
        self._expect_local_user()
        for name, site in self._sites.items():
            if name not in self._unreachable:
                self._events += site.connect()
        self._settle()
        scans = RegularScans(self.rules, self.now)
        while self._expected or self._planned or self._outside:
            scans.skip_those_before(self.now)
            now = self._next(scans.at)
            if self._until is not None and now > self._until:
                self.now = self._until
                break
            self.now = now
            if self._agenda and self._agenda[0][0] <= now:
                scans.something_happens(now)
            elif scans.are_enough() and not self._agenda:
                break
            while self._agenda and self._agenda[0][0] <= now:
                heapq.heappop(self._agenda)[3]()
            if self._waiting and now >= scans.at:
                scans.next(is_counted=self._are_tries_counted)
                self._events.append(PeriodicScan())
            self._settle()
        return self._finish()

    def _next(self, scan_at: float) -> float:
        """Return the time of the next event. Periodic scans occur only while a job waits."""
        at = self._agenda[0][0] if self._agenda else scan_at
        if self._waiting and scan_at < at:
            at = scan_at
        wakeup = self.scheduler.next_wakeup()
        if wakeup is not None and wakeup < at:
            at = wakeup
        if self._changed and self._next_look < at:
            at = self._next_look
        return max(self.now, at)

    def _are_tries_counted(self) -> bool:
        """Return whether a waiting job gives up after a number of scans."""
        limit = self.rules.max_placement_tries
        return limit is not None or any(
            self._planned[ident].spec.max_placement_tries is not None for ident in self._waiting
        )

    def _later(self, seconds: float, kind: int, what: Callable[[], None]) -> None:
        self._at(self.now + seconds, kind, what)

    def _at(self, moment: float, kind: int, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (moment, kind, next(self._order), what))

    def _settle(self) -> None:
        """Run steps until no further events follow at this time."""
        while True:
            if self._outside:
                self._let_in()
            self._start()
            if self._changed:
                self._report()
            events, self._events = self._events, []
            effects = self.scheduler.step(events, self.now)
            self.outcome.steps += 1
            if self._watch is not None:
                self._watch(self.now, effects)
            self._take_in(effects)
            if not (self._events or self._starting or self._tell or self.scheduler.is_unfinished):
                return

    def _report(self) -> None:
        """Add the reports of clusters with a changed component; at the regular interval, of all changed clusters."""
        told = self._tell
        if self.now >= self._next_look:
            told = self._changed
            self._next_look = self.now + self.grid.look_every
        self._events += [site.report() for site in sorted(told, key=lambda site: site.name)]
        self._changed = self._changed - told
        self._tell = set()

    def _finish(self) -> Outcome:
        outcome = self.outcome
        left = [*self._planned.values(), *self._outside, *filter(None, [self._expected]), *self._arrivals]
        outcome.not_run += [NotRun(job, "it was not over when the simulation was", is_refused=False) for job in left]
        for site in self._sites.values():
            for runner in site.runners.values():
                self._count(runner)
        outcome.lasted = self.now - self._began
        return outcome

    # Arrivals

    def _expect_job(self) -> None:
        job = self._expected = next(self._arrivals, None)
        if job is None:
            return
        if job.at < self.now:
            raise UsageError(f"a job arrives at {job.at}, after one of {self.now}", field="at", value=job.at)

        def arrives() -> None:
            self._outside.append(job)
            self._expect_job()

        self._at(job.at, ARRIVES, arrives)

    def _let_in(self) -> None:
        """Submit the jobs that wait for space in the placement queue while it has space."""
        while self._outside:
            planned = self._outside[0]
            if refused := self._refusal(planned.spec):
                self.outcome.not_run.append(NotRun(planned, refused))
            elif len(self._waiting) >= self.rules.placement_queue_limit:
                return
            else:
                ident = next(self._idents)
                self._planned[ident] = planned
                self._waiting.add(ident)
                self._events.append(JobSubmitted(Job(ident, planned.spec, self.now)))
            self._outside.popleft()

    def _refusal(self, spec: JobSpec) -> str:
        """Return the reason why such a job could never run; empty if it could."""
        known, refused = self._judged.get(id(spec), (None, ""))
        if known is not spec:
            try:
                check(spec, self.scheduler.queries.limits())
            except UsageError as error:
                refused = str(error)
            self._judged[id(spec)] = spec, refused
        return refused

    def _expect_local_user(self) -> None:
        user = next(self._local_users, None)
        if user is None:
            return

        def arrives() -> None:
            site = self._sites[user.cluster]
            self._changed.add(site)
            site.comes(user)
            self._expect_local_user()

        self._at(max(user.at, self.now), ARRIVES, arrives)

    # Events on clusters

    def startup(self, runner: Runner, cluster: ClusterName) -> float:
        """Return the seconds from the time at which a component has its nodes until all its runners have reported.

        Subclasses may override it with a value for each component.
        """
        return self._startup[cluster]

    def holds(self, runner: Runner, lasts: float) -> float:
        """Return the seconds from the opening of the barrier for which a component keeps its nodes.

        ``lasts`` is the run time of its program. Subclasses may override it with a value for each component.
        """
        return lasts

    def _allocated(self, site: Site, who: Runner | LocalUser) -> None:
        if isinstance(who, Runner):
            who.since = self.now
            self._tell_nodes_of(site)
            if startup := self.startup(who, site.name):
                self._later(startup, ENDS, lambda: self._starts(site, who))
            else:
                self._starting.append((site, who))
            return
        self._changed.add(site)

        def leaves() -> None:
            self.outcome.local_node_seconds += who.nodes * who.lasts
            self._changed.add(site)
            site.leaves(who)

        self._later(who.lasts, ENDS, leaves)

    def _tell_nodes_of(self, site: Site) -> None:
        """Mark a cluster for a report after a component received or returned its nodes.

        Without local users there, the scheduler knows the idle nodes from the reports of components.
        """
        if site.tells_nodes:
            self._changed.add(site)
            self._tell.add(site)

    def _start(self) -> None:
        while self._starting:
            starting, self._starting = self._starting, []
            for site, runner in starting:
                self._starts(site, runner)

    def _starts(self, site: Site, runner: Runner) -> None:
        if runner.is_over:
            return
        chance = self._failures[site.name]
        if chance and self._draws.random() < chance:
            self._ends(site, runner, "the start failed")
        else:
            self._events.append(site.reports(runner))

    def _ends(self, site: Site, runner: Runner, error: str = "") -> None:
        if not runner.is_over:
            self._events.append(site.ends(runner, error))
            self._count(runner)
            self._tell_nodes_of(site)

    def _stop(self, site: Site, token: Token) -> None:
        if runner := site.runners.get(token):
            self._count(runner)
        self._events.append(site.stopped(token))
        self._tell_nodes_of(site)

    def _count(self, runner: Runner) -> None:
        if runner.since is not None:
            self.outcome.node_seconds += runner.size * (self.now - runner.since)

    # Commands of the scheduler

    def _take_in(self, effects: Effects) -> None:
        over: list[Job] = []
        for ident, job in effects.jobs.items():
            if job.state is JobState.QUEUED:
                self._waiting.add(ident)
            else:
                self._waiting.discard(ident)
            if job.state.is_final:
                over.append(job)
        opened: dict[JobId, list[tuple[Site, Runner]]] = {}
        for command in effects.commands:
            self._carry_out(command, effects, opened)
        for ident, gang in opened.items():
            self._program_starts(effects.jobs[ident], gang)
        for job in over:
            self._note(job)
        self._events += [ClusterConfirmed(name, self.now) for name in sorted(effects.confirm)]

    def _carry_out(self, command: Command, effects: Effects, opened: dict[JobId, list[tuple[Site, Runner]]]) -> None:
        site, token = self._sites[command.cluster], command.token
        match command:
            case SubmitComponent():
                if told := site.submit(self._runner(effects.jobs, token)):
                    self._events.append(told)
            case OpenBarrier():
                if runner := site.runners.get(token):
                    opened.setdefault(runner.job, []).append((site, runner))
            case StopComponent(warning=None):
                self._stop(site, token)
            case StopComponent(warning=StopWarning(grace=grace)):
                # Simulated programs ignore warnings.
                self._later(grace, ENDS, lambda: self._stop(site, token))
            case StageComponent():
                self._stage(site, token)
            case _:
                pass

    def _runner(self, jobs: Mapping[JobId, Job], token: Token) -> Runner:
        ident, _, index, _ = parse_token(token)
        attempt = jobs[ident].attempt
        assert attempt is not None, "who is handed to a resource manager was placed"
        return Runner(ident, token, attempt.components[index].size)

    def _program_starts(self, job: Job, gang: list[tuple[Site, Runner]]) -> None:
        planned, attempt = self._planned[job.id], job.attempt
        assert attempt is not None, "whose barrier opens was placed"
        lasts = planned.lasts * self._run_time(planned, gang_of(attempt))
        for site, runner in gang:
            self._events.append(site.runs(runner, _exit_code(planned, job, attempt, runner.token)))
            self._later(self.holds(runner, lasts), ENDS, partial(self._ends, site, runner))

    def _stage(self, site: Site, token: Token) -> None:
        """Schedule the end of the transfer of a component's inputs.

        Files are transferred one after another, each at the bandwidth of its link.
        """
        found = self.scheduler.queries.find_staged(token)
        if found is None:
            return
        job, component = found
        seconds, size = 0.0, 0
        for file, source in zip(job.spec.inputs_of(component.request_index), component.sources, strict=False):
            if source != site.name:
                bandwidth = self.scheduler.queries.grid.link(source, site.name).bandwidth
                seconds += file.size / (bandwidth or self.rules.assumed_bandwidth)
                size += file.size
        done = Reported(site.name, StageStatus(token, "done", size, size))
        self._later(seconds, ENDS, lambda: self._events.append(done))

    def _note(self, job: Job) -> None:
        attempt = job.attempt
        assert job.ended_at is not None, "it is over"
        first, last = job.first_start_estimate, attempt.start_estimate if attempt is not None else None
        self.outcome.jobs.append(
            JobOutcome(
                job.id,
                self._planned.pop(job.id),
                job.state,
                job.reason,
                job.submitted_at,
                job.placed_at,
                job.started_at,
                job.ended_at,
                gang_of(attempt) if attempt is not None else (),
                job.restarts,
                job.generation,
                job.placement_tries,
                job.claiming_tries,
                last - first if last is not None and first is not None else 0.0,
            )
        )


def _exit_code(planned: PlannedJob, job: Job, attempt: Attempt, token: Token) -> int | None:
    """Return the exit code that a component reports: under Open MPI only the head reports it, otherwise all do."""
    tells = job.spec.launcher is Launcher.PROCESSES or token == job.token(attempt.head.index)
    return planned.exit_code if tells else None


def gang_of(attempt: Attempt) -> Gang:
    """Return the clusters of an attempt in the order of its placement, with the number of nodes on each."""
    nodes: dict[ClusterName, int] = {}
    for component in attempt.gang:
        nodes[component.cluster] = nodes.get(component.cluster, 0) + component.size
    return tuple(nodes.items())
