"""A simulated environment of the scheduler: a virtual clock, a store, an outbox, and in-memory clusters.

It acts as the daemon does: it stores effects before it sends commands, keeps each command until the cluster's agent
acknowledges it, and resends all of them when a cluster reconnects. All invariants are checked at each step.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from koalapy.model.cluster import NO_RELAYS, Relays
from koalapy.model.dependency import Clause, End, Resolution, resolve_ends
from koalapy.model.job import (
    DEFAULT_LEASE,
    WALLTIME_ALLOWANCE,
    ComponentState,
    Job,
    JobId,
    JobState,
    TimelineEntry,
    Token,
    lease_of,
    new_job,
    parse_token,
    with_margin,
)
from koalapy.model.job_spec import JobSpec, Launcher, Priority
from koalapy.model.limits import Limits
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import Request
from koalapy.model.users import Accounts
from koalapy.policies.registry import Registry, builtin_policies
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.effects import (
    Command,
    Effects,
    ForgetComponent,
    StageComponent,
    SubmitComponent,
    UnstageComponent,
)
from koalapy.scheduler.events import (
    ClusterDisconnected,
    ClusterLost,
    Event,
    InventoryReceived,
    JobCancelled,
    JobChanged,
    JobHeld,
    JobReleased,
    JobSubmitted,
    PeriodicScan,
)
from koalapy.scheduler.fair_share import FairShares
from koalapy.scheduler.grid import Links
from koalapy.scheduler.owner_use import OwnerUse
from koalapy.scheduler.queries import Queries
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState
from koalapy.simulation.record.format import KnownCluster
from tests.scheduler import invariants
from tests.scheduler.immutability import SnapshotCheck
from tests.scheduler.sites import STAGE_SIZE, Ack, Confirm, Site

MANY_STEPS = 2000
START_DELAY = 0.125
"""Seconds from a component's allocation until all its runners have reported."""


@dataclass(frozen=True)
class Program:
    """A job's program: its run time in seconds, per component or for all, and its exit code."""

    run_time: tuple[float, ...] = (10.0,)
    code: int = 0
    lingers: bool = False
    """Whether components other than the head run until they are stopped."""


PROGRAM = Program()


class World:
    """The environment of a scheduler. With ``manual``, clusters and agents act only when the test calls them."""

    site_class: type[Site] = Site

    def __init__(
        self,
        sizes: Mapping[str, int],
        rules: Rules | None = None,
        *,
        policies: Registry | None = None,
        manual: bool = False,
        strict: bool = True,
        now: float = 0.0,
        profiles: Mapping[str, ClusterProfile] | None = None,
        links: Links | None = None,
        speeds: Mapping[str, float] | None = None,
        nonces: Callable[[], str] = str,
        accounts: Accounts | None = None,
        limits: Limits | None = None,
        keeps_effects: bool = True,
        clock: Callable[[], float] | None = None,
        first_job: JobId = 1,
        lease: float = DEFAULT_LEASE,
        relays: Relays = NO_RELAYS,
        shares: tuple[Any, ...] = (),
    ) -> None:
        """Create the environment. ``nonces`` are empty by default to keep tokens short; ``clock`` measures steps.

        ``shares``: the parameters of ``FairShares``, for that queue order.
        """
        self.keeps_effects = keeps_effects
        self.now = now
        self.nonces, self.clock = nonces, clock
        self.rules = rules or Rules()
        self.policies = policies or builtin_policies()
        self.manual = manual
        self.strict = strict
        self.sites = {
            name: self.site_class(name, total, self._size_of, lambda: self.now) for name, total in sizes.items()
        }
        self.profiles = profiles or dict.fromkeys(sizes, ClusterProfile(lease=lease))
        for site in self.sites.values():
            site.lease_of = self._lease_of
        self._clusters: dict[str, dict[str, Any]] = {}
        self.links, self.relays, self.shares = links, relays, shares
        self.speeds = speeds or {}
        clusters = [self._cluster(name) for name in sizes]
        self.accounts, self.limits = accounts, limits
        self.scheduler = self._scheduler(clusters)
        self.jobs: dict[JobId, Job] = {}
        self.first_job = first_job
        self.returned_values = SnapshotCheck()
        self.scans: dict[Priority, int] = {}
        self.timeline: list[TimelineEntry] = []
        self.planned_jobs: set[JobId | None] = set()
        """Jobs that ever had the planned start."""
        self.outbox: dict[int, tuple[str, Command]] = {}
        self.sent: list[Command] = []
        self.warnings: list[str] = []
        self.programs: dict[JobId, Program] = {}
        self.transfer_slowdown = 1.0
        """Factor of actual to estimated transfer time."""
        self.gangs = invariants.AttemptHistory()
        self.renewed_at = dict.fromkeys(sizes, now)
        """Time at which each cluster could last renew the leases of its components."""
        self.declared_lost: set[Token] = set()
        """Components of clusters that an operator declared lost."""
        self.forgotten: set[Token] = set()
        """Components that were about to end, their nodes promised to other jobs, when the daemon restarted."""
        self._ready: set[str] = set()
        self._unconfirmed: set[str] = set()
        """Clusters that will be asked for a confirmation when they are ready."""
        self._sizes: dict[Token, int] = {}
        self._leases: dict[Token, float | None] = {}
        self._command_ids = count(1)
        self._order = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._next_scan = now + self.rules.scan_interval
        for name in sizes:
            self.connect(name)

    @property
    def queries(self) -> Queries:
        return self.scheduler.queries

    # Users

    def submit(
        self,
        request: Request,
        *,
        run_time: float | tuple[float, ...] = 10.0,
        code: int = 0,
        lingers: bool = False,
        launcher: Launcher = Launcher.PROCESSES,
        priority: Priority = Priority.LOW,
        command: tuple[str, ...] = ("program",),
        **spec: Any,
    ) -> JobId:
        """Submit a job, after admission, and return its id."""
        spec |= {"priority": priority, "launcher": launcher}
        program = Program(run_time if isinstance(run_time, tuple) else (run_time,), code, lingers)
        job_spec = JobSpec(request, command, **spec)
        self.queries.admit(job_spec)
        return self.submit_together([job_spec], program)[0]

    def submit_together(self, specs: Sequence[JobSpec], program: Program = PROGRAM) -> list[JobId]:
        """Submit jobs in one transaction and return their ids."""
        jobs = self.new_jobs(specs, program)
        self.step([JobSubmitted(job) for job in jobs])
        return [job.id for job in jobs]

    def new_jobs(self, specs: Sequence[JobSpec], program: Program = PROGRAM) -> list[Job]:
        """Create jobs without submitting them."""
        jobs = []
        for spec in specs:
            last = max((job.last_number for job in (*self.jobs.values(), *jobs)), default=self.first_job - 1)
            jobs.append(new_job(last + 1, spec, self.now, self.unmet_clauses(spec.after).remaining))
            self.programs |= dict.fromkeys(range(jobs[-1].id, jobs[-1].last_number + 1), program)
        return jobs

    def unmet_clauses(self, clauses: tuple[Clause, ...]) -> Resolution:
        """Return the clauses that do not hold yet, or the reason why one never will, as the daemon decides."""
        jobs = {dependency.job: self.jobs[dependency.job] for clause in clauses for dependency in clause}
        ended = {ident: job for ident, job in jobs.items() if job.state.is_final}
        ends = {ident: End(job.state, job.state is JobState.SUCCEEDED) for ident, job in ended.items()}
        return resolve_ends(clauses, ends)

    def cancel(self, job: JobId, *, warn: bool = False) -> None:
        self.step([JobCancelled(job, warn=warn)])

    def hold(self, job: JobId) -> None:
        self.step([JobHeld(job)])

    def release(self, job: JobId) -> None:
        self.step([JobReleased(job)])

    def change(self, job: JobId, **fields: Any) -> None:
        """Change fields of a waiting job's specification."""
        self.step([self.change_event(job, **fields)])

    def change_event(self, job: JobId, **fields: Any) -> JobChanged:
        return JobChanged(job, replace(self.jobs[job].spec, **fields))

    # Queries

    def job(self, job: JobId) -> Job:
        return self.jobs[job]

    def state(self, job: JobId) -> JobState:
        return self.jobs[job].state

    def timeline_events(self, job: JobId) -> list[str]:
        """Return the events of a job's timeline, in order."""
        return [entry.event for entry in self.timeline if entry.job == job]

    def reasons(self, job: JobId, event: str) -> list[str]:
        return [entry.reason for entry in self.timeline if entry.job == job and entry.event == event]

    def commands(self, job: JobId) -> list[tuple[str, Token]]:
        """Return kind and token of all commands for a job's components, in order."""
        ours = [c for c in self._sent_for(job) if not isinstance(c, StageComponent | UnstageComponent)]
        return [(type(c).__name__.removesuffix("Component").removesuffix("Barrier"), c.token) for c in ours]

    def staging_commands(self, job: JobId) -> list[tuple[str, str, Token]]:
        """Return ``Stage`` or ``Unstage``, cluster and token of all commands for a job's files, in order."""
        ours = [c for c in self._sent_for(job) if isinstance(c, StageComponent | UnstageComponent)]
        return [(type(c).__name__.removesuffix("Component"), c.cluster, c.token) for c in ours]

    def _sent_for(self, job: JobId) -> list[Command]:
        return [c for c in self.sent if parse_token(c.token)[0] == job]

    def site_of(self, token: Token) -> Site:
        return next(site for site in self.sites.values() if token in site.runners)

    def tokens(self, job: JobId) -> list[Token]:
        """Return the component tokens of a job's last attempt."""
        attempt = self.jobs[job].attempt
        return [self.jobs[job].token(c.index) for c in attempt.components] if attempt else []

    # The daemon

    def step(self, events: Sequence[Event] = ()) -> Effects:
        """Run one scheduler step and apply its effects."""
        self.planned_jobs.add(self.queries.planned_job)
        self.end_expired_components()
        invariants.check_live_attempts(self)
        return self.apply_effects(self.scheduler.step(events, self.now))

    def apply_effects(self, effects: Effects) -> Effects:
        """Check and store the effects of a step, then send its commands."""
        invariants.check_effects(self, effects)
        self.jobs |= effects.jobs
        self.returned_values.add([*effects.jobs.values(), *(attempt for _, attempt in effects.attempts)])
        self.scans |= effects.scans
        self.timeline += effects.timeline
        self.warnings += effects.warnings
        for name in effects.clusters:
            cluster = self.queries.grid[name]
            health = {name: getattr(cluster.health, name) for name in ("errors", "unusable", "note", "trials")}
            drains = {"drained": cluster.drained, "planned_drains": cluster.planned_drains}
            self._clusters[cluster.name] = health | drains
        for command in effects.commands:
            self._send(command)
        self._unconfirmed |= effects.confirm
        self._ask_to_confirm()
        if self.strict:
            invariants.check_counts(self)
            if self.rules.event_driven and not self.scheduler.is_unfinished:
                invariants.check_waiting(self)
            if self.scheduler.is_unfinished:
                invariants.check_no_job_passed(self, effects)
        return effects

    def finish(self) -> None:
        """Run steps until the scheduler has tried all waiting jobs."""
        for _ in range(MANY_STEPS):
            if not self.scheduler.is_unfinished:
                return
            self.step()
        raise AssertionError("steps have no end")

    def _send(self, command: Command) -> None:
        self.sent.append(command)
        if isinstance(command, SubmitComponent):
            job, _, index, _ = parse_token(command.token)
            attempt = self.jobs[job].attempt
            assert attempt is not None
            component = attempt.components[index]
            self._sizes[command.token] = component.size
            profile = self.profiles.get(component.cluster) or ClusterProfile()
            self._leases[command.token] = lease_of(self.jobs[job].spec.lease, profile.lease)
        ident = next(self._command_ids)
        if not isinstance(command, ForgetComponent):
            self.outbox[ident] = (command.cluster, command)
        if command.cluster in self._ready:
            self.sites[command.cluster].inbox.append((ident, command))

    def _ask_to_confirm(self) -> None:
        for name in sorted(self._unconfirmed & self._ready):
            self._unconfirmed.remove(name)
            self.sites[name].inbox.append((next(self._command_ids), Confirm(self.now)))

    def _size_of(self, token: Token) -> int:
        return self._sizes[token]

    def _lease_of(self, token: Token) -> float | None:
        return self._leases[token]

    def end_expired_components(self) -> None:
        """End the components of disconnected clusters that exceed their lease or walltime, as late as permitted."""
        for name, site in self.sites.items():
            if name in self._ready:
                self.renewed_at[name] = self.now
                continue
            for token, runner in list(site.runners.items()):
                spec = self.jobs[parse_token(token).job].spec
                if runner.is_killed or runner.phase in ("delivering", "ended"):
                    continue
                grace = spec.warning.grace if spec.warning is not None else 0.0
                if self._is_over(self.renewed_at[name], runner.lease, grace):
                    site.expire_lease(token)
                elif self._is_over(runner.launched_at, spec.walltime, WALLTIME_ALLOWANCE):
                    site.expire_walltime(token)

    def _is_over(self, since: float | None, seconds: float | None, extra: float) -> bool:
        """Return whether a limit of ``seconds`` and ``extra`` seconds is over even by a slow clock."""
        if since is None or seconds is None:
            return False
        return self.now >= since + with_margin(seconds + extra) - 0.001

    def loss_delay(self, name: str) -> float:
        """Return the seconds of silence after which components without a warning count as lost."""
        lease = self.profiles[name].lease
        assert lease is not None
        return with_margin(lease)

    def declare_lost(self, name: str, reason: str = "") -> None:
        """Declare a cluster lost as an operator, whether or not it is."""
        self.declared_lost |= self.sites[name].runners.keys()
        self.step([ClusterLost(name, "ops", reason)])

    def restart(self) -> None:
        """Replace the daemon by a new one that restores the stored state."""
        clusters = []
        for name, site in self.sites.items():
            self._disconnect_site(site)
            for token in self.queries.grid[name].nodes._leaving:
                component = self.queries.find(token)
                if component is not None and component[1].state is not ComponentState.STOPPING:
                    self.forgotten.add(token)
            clusters.append(self._cluster(name))
        self._ready.clear()
        self._unconfirmed.clear()
        self.scheduler = self._scheduler(clusters, [job for job in self.jobs.values() if not job.state.is_final])
        self.step()

    def _scheduler(self, clusters: Sequence[ClusterStatus], jobs: Sequence[Job] | None = None) -> Scheduler:
        """Create a scheduler; restore stored jobs if given."""
        scheduler = Scheduler(self._state(clusters), self.nonces, self.clock, keeps_effects=self.keeps_effects)
        if jobs is not None:
            scheduler.restore(jobs, self.now, self.scans)
        return scheduler

    def _state(self, clusters: Sequence[ClusterStatus]) -> SchedulerState:
        shares = FairShares(*self.shares) if self.rules.queue_order == "fair-share" else None
        use = OwnerUse(self.limits, shares=shares)
        return SchedulerState(
            self.rules, self.policies, clusters, self.links, accounts=self.accounts, owner_use=use, relays=self.relays
        )

    def _cluster(self, name: str) -> ClusterStatus:
        """Create a cluster's status with its stored parts."""
        profile = self.profiles.get(name) or ClusterProfile()
        return KnownCluster(name, self.speeds.get(name, 1.0), profile, **self._clusters.get(name, {})).make_status()

    # Clusters and the network

    def connect(self, name: str) -> None:
        site = self.sites[name]
        site.connect()
        if not self.manual:
            self.settle()

    def disconnect(self, name: str, reason: str = "its agent is not connected", heard: float | None = None) -> None:
        """Disconnect a cluster. ``heard`` is the time of its last message if the disconnect is noticed late."""
        self._disconnect_site(self.sites[name])
        self._ready.discard(name)
        self._unconfirmed.discard(name)
        self.step([ClusterDisconnected(name, reason, heard)])

    def _disconnect_site(self, site: Site) -> None:
        self.end_expired_components()
        site.disconnect()

    def deliver(self, name: str, limit: int | None = None) -> None:
        """Deliver a cluster's messages to the scheduler, one step for each."""
        stream = self.sites[name].stream
        for _ in range(len(stream) if limit is None else min(limit, len(stream))):
            message = stream.popleft()
            if isinstance(message, Ack):
                self.outbox.pop(message.ident, None)
            elif isinstance(message, InventoryReceived):
                self._take_inventory(message)
            else:
                self.step([message])

    def deliver_from_all_sites(self, limit: int | None = None) -> None:
        """Deliver all clusters' messages in one transaction, up to each cluster's next inventory."""
        events: list[Event] = []
        for site in self.sites.values():
            while site.stream and (limit is None or len(events) < limit):
                if isinstance(site.stream[0], InventoryReceived):
                    break
                message = site.stream.popleft()
                if isinstance(message, Ack):
                    self.outbox.pop(message.ident, None)
                else:
                    assert not isinstance(message, InventoryReceived)
                    events.append(message)
        self.step(events)

    def _take_inventory(self, inventory: InventoryReceived) -> None:
        name = inventory.cluster
        waiting = [(ident, command) for ident, (cluster, command) in self.outbox.items() if cluster == name]
        undelivered = frozenset(command.token for _, command in waiting if isinstance(command, SubmitComponent))
        effects = self.step([replace(inventory, undelivered=undelivered)])
        self._ready.add(name)
        self.sites[name].inbox.extend((i, c) for i, (cluster, c) in self.outbox.items() if cluster == name)
        forgets = [c for c in effects.commands if isinstance(c, ForgetComponent) and c.cluster == name]
        self.sites[name].inbox.extend((next(self._command_ids), c) for c in forgets)
        self._ask_to_confirm()

    def run_commands(self, name: str, limit: int | None = None) -> None:
        """Let a cluster's agent carry out its commands."""
        site = self.sites[name]
        for _ in range(len(site.inbox) if limit is None else min(limit, len(site.inbox))):
            site.carry_out(*site.inbox.popleft())

    # Time

    def schedule(self, delay: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + delay, next(self._order), act))

    def settle(self) -> None:
        """Process messages, commands and starts until none is left at the current time."""
        while True:
            for site in self.sites.values():
                site.send_report()
            for name in [name for name, site in self.sites.items() if site.stream]:
                self._deliver_together(name)
            busy = any(site.inbox for site in self.sites.values())
            for name in self.sites:
                self.run_commands(name)
            self._start_ready_components()
            if not busy and not any(site.stream for site in self.sites.values()):
                return

    def _deliver_together(self, name: str) -> None:
        """Deliver all messages up to the next inventory in one transaction, then the inventory."""
        stream, events = self.sites[name].stream, []
        while stream and not isinstance(stream[0], InventoryReceived):
            message = stream.popleft()
            if isinstance(message, Ack):
                self.outbox.pop(message.ident, None)
            elif not isinstance(message, InventoryReceived):
                events.append(message)
        if events:
            self.step(events)
        if stream:
            self.deliver(name, 1)

    def _start_ready_components(self) -> None:
        for site in self.sites.values():
            allocated, site.allocated = site.allocated, []
            opened, site.opened = site.opened, []
            staging, site.staging = site.staging, []
            graces, site.graces = site.graces, []
            for token, grace in graces:
                self.schedule(grace, lambda site=site, token=token: site.end_grace(token))  # type: ignore[misc]
            for token in staging:
                self.schedule(
                    self._transfer_time(token, site), lambda site=site, token=token: self.finish_staging(site, token)
                )  # type: ignore[misc]
            for token in allocated:
                self.schedule(START_DELAY, lambda site=site, token=token: self._report_claimed(site, token))  # type: ignore[misc]
            for token in opened:
                self._start_program(site, token)

    def _transfer_time(self, token: Token, site: Site) -> float:
        """Return the estimated transfer time, multiplied by ``transfer_slowdown``."""
        job_id, _, rank, _ = parse_token(token)
        attempt = self.jobs[job_id].attempt
        gang = attempt.gang if attempt else ()
        estimates = [c.transfer_time for c in gang if c.rank == rank and c.cluster == site.name]
        return self.transfer_slowdown * (estimates[0] if estimates else 0.0)

    def finish_staging(self, site: Site, token: Token) -> None:
        if token in site.stages:
            site.update_stage(token, STAGE_SIZE)

    def _report_claimed(self, site: Site, token: Token) -> None:
        if token in site.startable():
            site.report_claimed(token)

    def _start_program(self, site: Site, token: Token) -> None:
        job_id, _, index, _ = parse_token(token)
        job = self.jobs[job_id]
        attempt = job.attempt
        if job.spec.launcher is Launcher.OPENMPI and (attempt is None or attempt.head.index != index):
            return
        run_time = self.programs[job_id].run_time
        self.schedule(run_time[min(index, len(run_time) - 1)], lambda: self.end_program(site, token))

    def end_program(self, site: Site, token: Token) -> None:
        """End a component's program; under Open MPI the head's end ends the whole gang."""
        runner = site.runners.get(token)
        if runner is None or runner.phase != "running" or runner.stopped:
            return
        job_id, generation, *_ = parse_token(token)
        program = self.programs[job_id]
        site.exit_program(token, program.code)
        site.end_component(token)
        if self.jobs[job_id].spec.launcher is Launcher.OPENMPI and not program.lingers:
            for gang_site in self.sites.values():
                for gang_token in [t for t in gang_site.runners if parse_token(t)[:2] == (job_id, generation)]:
                    gang_site.end_component(gang_token)

    def advance(self, seconds: float) -> None:
        """Advance the clock and process everything that is due."""
        end = self.now + seconds
        self.settle()
        while (event_at := self._next_event_at()) <= end:
            self.now = max(self.now, event_at)
            while self._agenda and self._agenda[0][0] <= self.now:
                heapq.heappop(self._agenda)[2]()
            scan = self.now >= self._next_scan
            if scan:
                self._next_scan += self.rules.scan_interval
            wakeup = self.scheduler.next_wakeup()
            if scan or (wakeup is not None and wakeup <= self.now):
                self.step([PeriodicScan()] if scan else [])
            self.settle()
        self.now = end

    def _next_event_at(self) -> float:
        wakeup = self.scheduler.next_wakeup()
        agenda = self._agenda[0][0] if self._agenda else self._next_scan
        return min(agenda, self._next_scan, self._next_scan if wakeup is None else wakeup)

    def start_automation(self) -> None:
        """Switch from manual to automatic mode and schedule all pending actions."""
        self.manual = False
        self._next_scan = self.now + self.rules.scan_interval
        for site in self.sites.values():
            site.allocated, site.opened = site.startable(), site.in_phase("running")
            site.staging = [token for token, stage in site.stages.items() if stage.state == "running"]
