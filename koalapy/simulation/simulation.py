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
from koalapy.model.job import Attempt, ComponentState, Job, JobId, JobState, Token, new_job, parse_token
from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.model.reports import StageStatus
from koalapy.model.request import ClusterName, StopWarning
from koalapy.policies.registry import Registry, builtin_policies
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.effects import Command, Effects, OpenBarrier, StageComponent, StopComponent, SubmitComponent
from koalapy.scheduler.events import ClusterConfirmed, Event, JobSubmitted, PeriodicScan, RelayChanged, Reported
from koalapy.scheduler.fair_share import FairShares
from koalapy.scheduler.owner_use import OwnerUse
from koalapy.scheduler.queue.start_conditions import latest_start
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState
from koalapy.simulation.jobs import Gang, JobOutcome, LocalUser, NotRun, Outcome, PlannedJob, RunTime, constant_run_time
from koalapy.simulation.moment import HAVE_NODES, IN_QUEUE, Moment
from koalapy.simulation.site import Runner, SimulatedGrid, Site
from koalapy.validation.submission import check_submission

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
        self._enough = max(MIN_IN_VAIN, 2 * ceil((rules.plan_after or 0.0) / rules.scan_interval))
        """Number of scans by which the start of a waiting job was planned, if it ever is."""
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

    def schedule_next(self, *, is_counted: Callable[[], bool]) -> None:
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
        run_time: RunTime = constant_run_time,
        local_users: Iterable[LocalUser] = (),
        policies: Registry | None = None,
        seed: int = 0,
        until: float | None = None,
        watch: Watcher | None = None,
        moment: Moment | None = None,
        known: Mapping[JobId, PlannedJob] | None = None,
        max_tasks: int | None = None,
        shares: FairShares | None = None,
    ) -> None:
        """Prepare a run.

        ``local_users`` are in the order of their arrival. ``until``: the time at which the simulation ends with jobs
        left; None: it ends with the last job. ``watch`` is called with the time and the effects of each step.

        ``moment``: the snapshot to start from, instead of an empty grid. It also supplies the rules; ``known`` has the
        plan of each of its jobs. ``max_tasks``: the simulation ends once so many tasks of its arrays have started.
        ``shares``: the weights and the use of users, for the queue order ``fair-share``.
        """
        self.grid, self._run_time, self._until, self._watch = grid, run_time, until, watch
        self._max_tasks, self._started_tasks, self._shares = max_tasks, 0, shares
        self.rules = rules or Rules() if moment is None else moment.beginning.rules
        self.scheduler = self._new_scheduler(policies or builtin_policies(), moment)
        self.now = self._began = 0.0 if moment is None else moment.now
        if watch is None:
            self.scheduler.disable_timelines()
        self._draws = Random(f"{seed}/failing starts")
        self._failures = {
            name: grid.failures if cluster.failures is None else cluster.failures
            for name, cluster in grid.clusters.items()
        }
        self._startup = {
            name: grid.startup if cluster.startup is None else cluster.startup
            for name, cluster in grid.clusters.items()
        }
        self._sites = {name: Site(name, cluster.nodes, self._on_allocation) for name, cluster in grid.clusters.items()}
        self._order = count()
        self._agenda: list[tuple[float, int, int, Callable[[], None]]] = []
        self._local_users = iter(local_users)
        self._events: list[Event] = []
        """Events for the next step."""
        self._changed: set[Site] = set()
        """Clusters with changed node counts that were not yet reported and do not follow from reports of components."""
        self._reporting: set[Site] = set()
        """Clusters in ``_changed`` where a component changed, so that their agents report at once."""
        self._starting: list[tuple[Site, Runner]] = []
        """Components that have received their nodes and start without delay."""
        self._planned: dict[JobId, PlannedJob] = {}
        """Plans of the unfinished jobs."""
        self._waiting: set[JobId] = set()
        self._unqueued: deque[PlannedJob] = deque()
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
            self._restore_snapshot(moment, known or {})

    def _new_scheduler(self, policies: Registry, moment: Moment | None) -> Scheduler:
        """Create the scheduler, with the jobs and clusters of the snapshot, or without jobs if there is none."""
        keeps_effects = self._watch is not None
        if moment is not None:
            return moment.create_scheduler(policies, keeps_effects=keeps_effects, max_starts=self._max_tasks)
        statuses = [ClusterStatus(name, cluster.speed, cluster.profile) for name, cluster in self.grid.clusters.items()]
        nonces = (f"{number:016x}" for number in count())
        use = None if self._shares is None else OwnerUse(shares=self._shares)
        state = SchedulerState(self.rules, policies, statuses, self.grid.links, owner_use=use)
        return Scheduler(state, lambda: next(nonces), keeps_effects=keeps_effects)

    def _restore_snapshot(self, moment: Moment, plans: Mapping[JobId, PlannedJob]) -> None:
        """Restore the waiting and running jobs of a snapshot on their clusters."""
        self._unreachable = set(self._sites) - set(moment.nodes)
        for name, nodes in moment.nodes.items():
            self._sites[name].take_up(nodes.background, nodes.down, nodes.overlap, nodes.reservations, nodes.job_sizes)
            self._expect_change(*(reservation.ends for reservation in nodes.reservations))
            if nodes.has_relay or nodes.relayed_only:
                self._events.append(RelayChanged(name, nodes.has_relay, nodes.relayed_only))
        for job in moment.beginning.jobs:
            self._expect_start_conditions(job.spec)
        for cluster in moment.beginning.clusters:
            for drain in filter(None, (cluster.drained, *cluster.planned_drains)):
                self._expect_change(drain.begins_at, drain.ends_at)
        for job in moment.jobs:
            self._planned[job.id] = plans[job.id]
            if job.state is JobState.QUEUED:
                self._waiting.add(job.id)
            elif job.attempt is not None:
                self._restore_attempt(job, job.attempt)
        self._idents = count(max((job.last_number for job in moment.beginning.jobs), default=0) + 1)

    def _restore_attempt(self, job: Job, attempt: Attempt) -> None:
        """Restore the components of a snapshot's active job on their clusters.

        Schedule the ends of those that run or are being stopped.
        """
        planned, runs = self._planned[job.id], attempt.barrier_at is not None and job.ending is None
        for component in attempt.components:
            if component.cluster in self._unreachable or component.state not in HAVE_NODES | IN_QUEUE:
                continue
            site, runner = self._sites[component.cluster], Runner(job.id, job.token(component.index), component.size)
            runner.shares = job.spec.share
            since = component.claimed_at
            if component.state in HAVE_NODES:
                since = self.now if since is None else since
            site.take_up_runner(runner, since, runs=runs)
            remaining = 0.0
            if runs and attempt.barrier_at is not None:
                runner.exit_code = _exit_code(planned, job, attempt, runner.token)
                lasts = planned.lasts * self._run_time(planned, gang_of(attempt))
                remaining = max(0.0, attempt.barrier_at + lasts - self.now)
            if runs or component.state is ComponentState.STOPPING:
                self._schedule_after(remaining, ENDS, partial(self._on_end, site, runner))

    @property
    def used(self) -> dict[ClusterName, int]:
        """Return the number of nodes of each cluster that jobs or local users have now."""
        return {name: site.used for name, site in self._sites.items()}

    @property
    def has_started_max_tasks(self) -> bool:
        """Return whether the maximum number of tasks of arrays has started, so that the simulation ends."""
        return self._max_tasks is not None and self._started_tasks >= self._max_tasks

    # Clock

    def run(self, jobs: Iterable[PlannedJob]) -> Outcome:
        """Submit the jobs, which are in the order of their arrival, run until all have ended, return the outcome."""
        self._arrivals = iter(jobs)
        self._expect_job()
        self._expect_local_user()
        for name, site in self._sites.items():
            if name not in self._unreachable:
                self._events += site.connect()
        self._run_steps()
        scans = RegularScans(self.rules, self.now)
        while (self._expected or self._planned or self._unqueued) and not self.has_started_max_tasks:
            scans.skip_those_before(self.now)
            now = self._next_event_time(scans.at)
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
                scans.schedule_next(is_counted=self._are_tries_counted)
                self._events.append(PeriodicScan())
            self._run_steps()
        return self._complete_outcome()

    def _next_event_time(self, scan_at: float) -> float:
        """Return the time of the next event. Periodic scans occur only while a job waits."""
        event_at = self._agenda[0][0] if self._agenda else scan_at
        if self._waiting and scan_at < event_at:
            event_at = scan_at
        wakeup = self.scheduler.next_wakeup()
        if wakeup is not None and wakeup < event_at:
            event_at = wakeup
        if self._changed and self._next_look < event_at:
            event_at = self._next_look
        return max(self.now, event_at)

    def _are_tries_counted(self) -> bool:
        """Return whether a waiting job gives up after a number of scans."""
        limit = self.rules.max_placement_tries
        specs = (self._planned[ident].spec for ident in self._waiting)
        return any(
            (limit is not None or spec.max_placement_tries is not None)
            and (spec.begin is None or spec.begin <= self.now)
            for spec in specs
        )

    def _schedule_after(self, seconds: float, kind: int, action: Callable[[], None]) -> None:
        self._schedule_at(self.now + seconds, kind, action)

    def _schedule_at(self, time: float, kind: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time, kind, next(self._order), action))

    def _run_steps(self) -> None:
        """Run steps until no further events follow at this time."""
        while True:
            if self._unqueued:
                self._submit_waiting()
            while self._starting:
                starting, self._starting = self._starting, []
                for site, runner in starting:
                    self._on_start(site, runner)
            if self._changed:
                self._report_nodes()
            events, self._events = self._events, []
            effects = self.scheduler.step(events, self.now)
            self.outcome.steps += 1
            if self._watch is not None:
                self._watch(self.now, effects)
            self._apply_effects(effects)
            is_settled = not (self._events or self._starting or self._reporting or self.scheduler.is_unfinished)
            if is_settled or self.has_started_max_tasks:
                return

    def _report_nodes(self) -> None:
        """Add the reports of clusters with a changed component; at the regular interval, of all changed clusters."""
        reporting = self._reporting
        if self.now >= self._next_look:
            reporting = self._changed
            self._next_look = self.now + self.grid.look_every
        self._events += [site.node_report() for site in sorted(reporting, key=lambda site: site.name)]
        self._changed = self._changed - reporting
        self._reporting = set()

    def _complete_outcome(self) -> Outcome:
        """Add the jobs that have not ended, and the node-seconds that they used, to the outcome and return it."""
        outcome = self.outcome
        unfinished = [*self._planned.values(), *self._unqueued, *filter(None, [self._expected]), *self._arrivals]
        outcome.not_run += [
            NotRun(job, "it was not over when the simulation was", is_refused=False) for job in unfinished
        ]
        for site in self._sites.values():
            for runner in site.runners.values():
                self._count_node_seconds(runner)
        outcome.lasted = self.now - self._began
        return outcome

    # Arrivals

    def _expect_job(self) -> None:
        """Schedule the arrival of the next job, which in turn schedules the one after it.

        Raise ``UsageError`` if that job should have arrived before the present time.
        """
        job = self._expected = next(self._arrivals, None)
        if job is None:
            return
        if job.arrives_at < self.now:
            raise UsageError(
                f"jobs are not in the order of arrival: one that arrives at {job.arrives_at} follows one at {self.now}",
                field="arrives_at",
                value=job.arrives_at,
            )

        def arrives() -> None:
            self._unqueued.append(job)
            self._expect_job()

        self._schedule_at(job.arrives_at, ARRIVES, arrives)

    def _submit_waiting(self) -> None:
        """Submit the jobs that wait for space in the placement queue while it has space."""
        while self._unqueued:
            planned = self._unqueued[0]
            if problem := self._rejection_reason(planned.spec):
                self.outcome.not_run.append(NotRun(planned, problem))
            elif len(self._waiting) >= self.rules.placement_queue_limit:
                return
            else:
                job = new_job(ident := next(self._idents), planned.spec, self.now)
                self._idents = count(job.last_number + 1)
                self._planned[ident] = planned
                self._waiting.add(ident)
                self._events.append(JobSubmitted(job))
                self._expect_start_conditions(planned.spec)
            self._unqueued.popleft()

    def _expect_start_conditions(self, spec: JobSpec) -> None:
        """Schedule the begin and the latest start of a job as events, so that no scan before them is the last one."""
        self._expect_change(spec.begin, latest_start(spec, self.rules))

    def _expect_change(self, *times: float | None) -> None:
        for time in times:
            if time is not None and time > self.now:
                self._schedule_at(time, ARRIVES, lambda: None)  # the scheduler has its own deadlines

    def _rejection_reason(self, spec: JobSpec) -> str:
        """Return the reason why such a job could never run; empty if it could."""
        checked, problem = self._judged.get(id(spec), (None, ""))
        if checked is not spec:
            try:
                check_submission(spec, self.scheduler.queries.limits())
            except UsageError as error:
                problem = str(error)
            self._judged[id(spec)] = spec, problem
        return problem

    def _expect_local_user(self) -> None:
        """Schedule the arrival of the next local user, which in turn schedules the one after it."""
        user = next(self._local_users, None)
        if user is None:
            return

        def arrives() -> None:
            site = self._sites[user.cluster]
            self._changed.add(site)
            site.add_local_user(user)
            self._expect_local_user()

        self._schedule_at(max(user.at, self.now), ARRIVES, arrives)

    # Events on clusters

    def startup_time(self, runner: Runner, cluster: ClusterName) -> float:
        """Return the seconds from the time at which a component has its nodes until all its runners have reported.

        Subclasses may override it with a value for each component.
        """
        return self._startup[cluster]

    def holding_time(self, runner: Runner, lasts: float) -> float:
        """Return the seconds for which a component keeps its nodes, from the common start of its job's program.

        ``lasts`` is the run time of its program. Subclasses may override it with a value for each component.
        """
        return lasts

    def _on_allocation(self, site: Site, receiver: Runner | LocalUser) -> None:
        """Schedule what follows once a component or local user has received its nodes: the start, or the departure."""
        if isinstance(receiver, Runner):
            receiver.since = self.now
            self._mark_for_report(site)
            if startup := self.startup_time(receiver, site.name):
                self._schedule_after(startup, ENDS, lambda: self._on_start(site, receiver))
            else:
                self._starting.append((site, receiver))
            return
        self._changed.add(site)

        def leaves() -> None:
            self.outcome.local_node_seconds += receiver.nodes * receiver.lasts
            self._changed.add(site)
            site.remove_local_user(receiver)

        self._schedule_after(receiver.lasts, ENDS, leaves)

    def _mark_for_report(self, site: Site) -> None:
        """Mark a cluster for a report after a component received or returned its nodes.

        Without local users there, the scheduler knows the idle nodes from the reports of components.
        """
        if site.tells_nodes:
            self._changed.add(site)
            self._reporting.add(site)

    def _on_start(self, site: Site, runner: Runner) -> None:
        """Report that all nodes of a component have started, or let it fail with the probability of its cluster."""
        if runner.is_over:
            return
        chance = self._failures[site.name]
        if chance and self._draws.random() < chance:
            self._on_end(site, runner, "the start failed")
        else:
            self._events.append(site.claimed_report(runner))

    def _on_end(self, site: Site, runner: Runner, error: str = "") -> None:
        """End a component that has not ended yet, and report it. An ``error`` is a fault of its cluster."""
        if not runner.is_over:
            self._events.append(site.end_component(runner, error))
            self._count_node_seconds(runner)
            self._mark_for_report(site)

    def _stop_component(self, site: Site, token: Token) -> None:
        if runner := site.runners.get(token):
            self._count_node_seconds(runner)
        self._events.append(site.stop_component(token))
        self._mark_for_report(site)

    def _count_node_seconds(self, runner: Runner) -> None:
        """Count the node-seconds of a component since the begin of the simulation."""
        if runner.since is not None:
            self.outcome.node_seconds += runner.size * (self.now - max(runner.since, self._began))

    # Commands of the scheduler

    def _apply_effects(self, effects: Effects) -> None:
        """Carry out the commands of a scheduling step, and add the jobs that have ended to the outcome."""
        ended: list[Job] = []
        for ident, job in effects.jobs.items():
            if job.array_job is not None and ident not in self._planned:
                self._planned[ident] = self._planned[job.array_job]
                self._started_tasks += 1
            if job.state is JobState.QUEUED:
                self._waiting.add(ident)
            else:
                self._waiting.discard(ident)
            if job.state.is_final:
                ended.append(job)
        opened: dict[JobId, list[tuple[Site, Runner]]] = {}
        for command in effects.commands:
            self._carry_out(command, effects, opened)
        for ident, gang in opened.items():
            self._program_starts(effects.jobs[ident], gang)
        for job in ended:
            self._record_outcome(job)
        self._events += [ClusterConfirmed(name, self.now) for name in sorted(effects.confirm)]

    def _carry_out(self, command: Command, effects: Effects, opened: dict[JobId, list[tuple[Site, Runner]]]) -> None:
        """Carry out one command of the scheduler on its cluster.

        ``opened`` collects, by job, the components that may start their program, so that all of them start together.
        """
        site, token = self._sites[command.cluster], command.token
        match command:
            case SubmitComponent():
                ident, _, index, _ = parse_token(token)
                attempt = effects.jobs[ident].attempt
                assert attempt is not None, "who is handed to a resource manager was placed"
                if report := site.submit(Runner(ident, token, attempt.components[index].size)):
                    self._events.append(report)
            case OpenBarrier():
                if runner := site.runners.get(token):
                    opened.setdefault(runner.job, []).append((site, runner))
            case StopComponent(warning=None):
                self._stop_component(site, token)
            case StopComponent(warning=StopWarning(grace=grace)):
                # Simulated programs ignore warnings.
                self._schedule_after(grace, ENDS, lambda: self._stop_component(site, token))
            case StageComponent():
                self._stage_inputs(site, token)
            case _:
                pass

    def _program_starts(self, job: Job, gang: list[tuple[Site, Runner]]) -> None:
        """Report that a program runs on all its components, and schedule their ends."""
        planned, attempt = self._planned[job.id], job.attempt
        assert attempt is not None, "whose barrier opens was placed"
        lasts = planned.lasts * self._run_time(planned, gang_of(attempt))
        for site, runner in gang:
            self._events.append(site.running_report(runner, _exit_code(planned, job, attempt, runner.token)))
            self._schedule_after(self.holding_time(runner, lasts), ENDS, partial(self._on_end, site, runner))

    def _stage_inputs(self, site: Site, token: Token) -> None:
        """Schedule the end of the transfer of a component's inputs.

        Files are transferred one after another, each at the bandwidth of its link.
        """
        staged = self.scheduler.queries.find_staged(token)
        if staged is None:
            return
        job, component = staged
        seconds, size = 0.0, 0
        for file, source in zip(job.spec.inputs_of(component.request_index), component.sources, strict=False):
            if source != site.name:
                bandwidth = self.scheduler.queries.grid.link(source, site.name).bandwidth
                seconds += file.size / (bandwidth or self.rules.assumed_bandwidth)
                size += file.size
        status = Reported(site.name, StageStatus(token, "done", size, size))
        self._schedule_after(seconds, ENDS, lambda: self._events.append(status))

    def _record_outcome(self, job: Job) -> None:
        """Add an ended job with its times and placement to the outcome, and drop its plan.

        Held jobs have no plan: they start in no simulation, but their deadline or a dependency may end them.
        """
        if job.id not in self._planned:
            return
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
