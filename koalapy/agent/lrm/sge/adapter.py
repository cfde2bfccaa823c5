"""Adapter of Grid Engine: jobs are submitted and cancelled by ``JobControl``, and watched by ``qstat``.

Jobs are followed from one listing to the next, since Grid Engine forgets a job when that ends. How it ended is read
from the accounting concurrently, since that is written late.
"""

import asyncio
import contextlib
import math
import os
import pwd
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import structlog

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.settings import AgentSettings, SiteSettings
from koalapy.agent.lrm.drmaa.control import drmaa_control
from koalapy.agent.lrm.node_classes import NO_GROUPS, KnownNode, NodeGroups, group_nodes
from koalapy.agent.lrm.port import (
    JOB_PREFIX,
    SUSPENDED_TEXT,
    Finding,
    JobControl,
    JobEnd,
    LrmJob,
    LrmJobState,
    LrmSnapshot,
    LrmSubmission,
    PolledLrm,
    ReservationOrder,
    report_reservations,
)
from koalapy.agent.lrm.rejections import (
    blame_choice,
    reject_charges,
    reject_fields,
    reject_other_job,
    reject_qsub_options,
    reject_size,
    reservation_rejection,
    split_options,
)
from koalapy.agent.lrm.script import place_script
from koalapy.agent.lrm.sge.answers import (
    DELETED,
    HELD,
    SUSPENDED,
    UNREACHABLE,
    AccountingRecord,
    Listing,
    NodeState,
    QueueInstance,
    SgeJob,
    end_of,
    is_broken,
    job_state,
    queue_state,
    read_hosts,
    read_job_error,
    read_listing,
    read_waiting_reason,
    short_name,
)
from koalapy.agent.lrm.sge.commands import Layout, QsubControl, SgeCommands, check_grid_engine, read_layout
from koalapy.agent.lrm.sge.reservations import RESERVATIONS_MAX_AGE_S, SgeReservations
from koalapy.model.errors import SiteError, SiteRejected, SiteUnavailable
from koalapy.model.job_sizes import JobSizes
from koalapy.model.node_requirement import Gpus
from koalapy.model.reports import ListedState
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

LAYOUT_MAX_AGE_S = 60.0
"""Age at which parallel environment and queues are read again."""
JOB_ERROR_TIMEOUT_S = 5.0
"""How long a snapshot waits for the reason why a job will not start."""
WAITING_QUERY_INTERVAL_S = 3.0
"""Time between two queries of the reason why a job waits, and before the first."""
MAX_WAITING_QUERIES = 3
"""Such queries in one snapshot."""
SETTLING_TIME_S = 10.0


def make_lrm(settings: AgentSettings) -> "SgeLrm":
    folders = JobFolders.from_settings(settings)
    if folders.is_mapped and settings.library is None:
        return SgeLrm(settings, QsubControl(SgeCommands(folders.run_as)), folders=folders)
    return SgeLrm(settings, drmaa_control(settings.library, folders.run_as), folders=folders)


class SgeLrm(PolledLrm):
    """A Grid Engine cluster.

    Grid jobs run as the agent's account or as accounts that it may use, and their names begin with ``prefix``. Slots of
    all other jobs are background load.
    """

    product = "Grid Engine"

    def __init__(
        self,
        settings: SiteSettings,
        control: JobControl,
        prefix: str = JOB_PREFIX,
        folders: JobFolders | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(settings.poll_interval)
        self._clock = clock
        self._folders = folders or JobFolders.for_own_account()
        self._settings, self._control = settings, control
        self._native_options = split_options(settings.native_specification)
        queue_hint = "leave it out, and set the cluster's queue"
        environment_hint = "leave it out, and set the cluster's parallel_environment"
        reject_qsub_options(self._native_options, q=queue_hint, masterq=queue_hint, pe=environment_hint)
        self._commands = SgeCommands(self._folders.run_as)
        accounts = self._folders.list_accounts
        self._jobs = TrackedJobs(self._commands, control, self.poll_soon, prefix, accounts, clock)
        self._reservations = SgeReservations(self._commands, settings, self._jobs.owner, self._native_options)
        self._users = "*" if self._folders.is_mapped else self._jobs.owner
        self._layout: Layout | None = None
        self._groups = NO_GROUPS
        self._layout_read_at = 0.0
        self._gpus: dict[str, tuple[Gpus, ...]] = {}
        """The most free GPUs of each host so far."""
        self._has_listed = False

    async def open(self) -> None:
        self._control.on_ended(self.poll_soon)

    async def close(self) -> None:
        await super().close()
        await self._jobs.close()
        await self._control.close()

    async def submit_job(self, submission: LrmSubmission) -> str:
        layout = await self._current_layout()
        if submission.nodes > layout.most:
            limit = f"{self._settings.parallel_environment} gives its jobs {layout.most}"
            reject_size(submission.nodes, limit, f"ask for at most {layout.most} nodes")
        if submission.nodes > len(layout.hosts):
            subject = f"queue {self._settings.queue}" if self._settings.queue else self._settings.parallel_environment
            reject_size(submission.nodes, f"{subject} has {len(layout.hosts)}", "ask for fewer nodes")
        native = ["-pe", self._settings.parallel_environment, str(submission.nodes * layout.slots)]
        if queue := submission.requirement.partition or self._settings.queue:
            native += ["-q", queue]
        walltime = submission.walltime
        if submission.reservation:
            if (reservation := await self._reservations.find(submission.reservation)) is None:
                text = f"there is no advance reservation {submission.reservation}"
                raise reservation_rejection(text, submission.reservation)
            native += ["-ar", reservation.id]
            longest = reservation.longest_walltime(self._clock.now())
            walltime = longest if walltime is None else min(walltime, longest)
        if walltime is not None:
            native += ["-l", f"h_rt={max(1, math.ceil(walltime))}"]
        native += self._node_options(submission, layout)
        # Run the script in its place, which only its account can read, and never a second time.
        native += ["-b", "y", "-shell", "n", "-r", "n", *self._native_options]
        script = await place_script(submission, "qrsh", self._folders)
        try:
            job = await self._control.submit_job(script, submission, native)
        except SiteRejected as error:
            rejection = self._commands.rejection(error)
            raise blame_choice(rejection, submission.requirement, submission.reservation) from error
        self._jobs.add_job(job, submission.name, submission.user)
        self.poll_soon()
        return job

    def _node_options(self, submission: LrmSubmission, layout: Layout) -> list[str]:
        """Return options that restrict a job to the hosts that it may get, and the project that it chooses.

        Amounts are not requested, since Grid Engine counts them for each slot: a job gets whole hosts.
        """
        requirement = submission.requirement
        allowed = {"account": self._settings.allowed_account}
        reject_charges(requirement, allowed, is_mapped=self._folders.is_mapped)
        reject_fields(requirement, ("qos",), "Grid Engine has no quality of service {value}")
        options = ["-P", requirement.account] if requirement.account else []
        hosts = self._groups.admitted_nodes(submission.node_class, requirement, submission.nodes, layout.hosts)
        if hosts is not None and (submission.node_class or len(hosts) < len(layout.hosts)):
            options += ["-l", f"h={'|'.join(sorted(hosts))}"]
        return options

    async def reserve_nodes(self, order: ReservationOrder) -> Sequence[str]:
        return await self._reservations.create(order, await self._current_layout(), self._clock.now())

    async def release_reservation(self, name: str) -> None:
        await self._reservations.delete(name)

    async def list_reservations(self, prefix: str) -> Sequence[str]:
        return [reservation.name for reservation in await self._reservations.find_own(prefix)]

    async def find_job(self, name: str, user: str = "") -> str | None:
        if (id := self._jobs.find_id(name, user)) is not None:
            return id
        jobs = await self._list_jobs("prsz")
        if matching := [job for job in jobs if (job.name, self._jobs.user_of(job)) == (name, user)]:
            return max(matching, key=lambda job: (job_state(job.state) is not LrmJobState.ENDED, int(job.id))).id
        records = await self._commands.read_job_accounting(user or self._jobs.owner, name)
        return records[-1].job if records else None

    def expect_job(self, job: str, name: str, user: str = "") -> None:
        self._jobs.add_job(job, name, user)

    async def settling_time(self) -> float:
        return SETTLING_TIME_S

    async def cancel_job(self, job: str, name: str, user: str = "", *, by_force: bool = False) -> None:
        listed = next((listed for listed in await self._list_jobs("prs") if listed.id == job), None)
        if listed is None or (DELETED in listed.state and not by_force):
            return
        if (listed.name, self._jobs.user_of(listed)) != (name, user):
            reject_other_job(job, listed.name, name)
        if job in self._jobs.by_id:
            tracked = self._jobs.by_id[job]
            tracked.cancelled, tracked.state = True, job_state(listed.state)
        if DELETED in listed.state:
            # The deletion has not reached its hosts, or they have not confirmed it.
            await self._commands.delete_by_force(job, user)
        else:
            await self._control.cancel_job(job, user)
        self.poll_soon()

    async def take_snapshot(self) -> LrmSnapshot:
        layout = await self._current_layout()
        began = self._clock.monotonic()
        # The first listing includes jobs that have ended lately: some may be grid jobs from before a restart. Jobs of
        # other accounts are not listed if grid jobs have only one; their slots are counted anyway.
        states = "prs" if self._has_listed else "prsz"
        options = ("-f", "-g", "t", "-s", states, "-u", self._users, "-xml")
        listing = read_listing((await self._commands.run_checked("qstat", *options)).output)
        await self._jobs.read_owners()
        ended = self._jobs.update(listing, began)
        self._has_listed = True
        await self._jobs.resolve(ended)
        unreachable = [instance.host for instance in listing.instances if UNREACHABLE in instance.states]
        active_jobs, query_count = [], 0
        for job in self._jobs.active_jobs(listing):
            tracked = self._jobs.by_id[job.id]
            if is_broken(job.state) and not tracked.error:
                tracked.error = await self._read_job_field(job.id, read_job_error)
            elif tracked.may_ask_why(self._clock.monotonic()) and query_count < MAX_WAITING_QUERIES:
                query_count += 1
                tracked.waiting = await self._read_job_field(job.id, read_waiting_reason)
                tracked.waiting_read_at = self._clock.monotonic()
            active_jobs.append(convert_job(job, tracked, unreachable))
        jobs = (*active_jobs, *self._jobs.unresolved_jobs(), *self._jobs.ended_jobs())
        used_nodes = {node for job in active_jobs if job.state is LrmJobState.RUNNING for node in job.nodes}
        if self._clock.monotonic() > self._reservations.read_at + RESERVATIONS_MAX_AGE_S:
            self._reservations.read_at = self._clock.monotonic()
            with contextlib.suppress(SiteError):  # then the previous ones count
                await self._reservations.find_all()
        return replace(
            make_snapshot(listing, layout, used_nodes, jobs, self._groups, tuple(self._reservations.list_uses())),
            submit_error=await self._control.submit_error(),
        )

    async def read_version(self) -> str:
        return await self._commands.read_version()

    async def check_setup(self) -> Sequence[Finding]:
        settings = self._settings
        findings = await check_grid_engine(self._commands, settings.parallel_environment, settings.queue)
        findings += await self._control.check_setup()
        if all(finding.ok for finding in findings):
            findings.append(await self._reservations.check_right())
        return findings

    async def _current_layout(self) -> Layout:
        """Return the hosts and slots of the parallel environment; read them again when they are too old."""
        now = self._clock.monotonic()
        if self._layout is None or now > self._layout_read_at + LAYOUT_MAX_AGE_S:
            settings = self._settings
            self._layout = await read_layout(self._commands, settings.parallel_environment, settings.queue)
            self._layout_read_at = now
            hosts: dict[str, KnownNode] = {}
            with contextlib.suppress(SiteError):  # then they are unknown
                hosts = read_hosts((await self._commands.run_checked("qhost", "-F", "-xml")).output)
            nodes = []
            for host in sorted(self._layout.hosts):
                node = hosts.get(short_name(host), KnownNode(host))
                # Grid Engine reports those GPUs that are free: the most seen so far count.
                self._gpus[host] = max(self._gpus.get(host, ()), node.gpus, key=lambda gpus: sum(e.count for e in gpus))
                queues = frozenset(queue for queue, name in self._layout.instances if name == host)
                nodes.append(replace(node, name=host, gpus=self._gpus[host], partitions=queues))
            self._groups = group_nodes(nodes, settings.node_classes)
        return self._layout

    async def _list_jobs(self, states: str) -> Sequence[SgeJob]:
        answer = await self._commands.run_checked("qstat", "-s", states, "-u", self._users, "-xml")
        return read_listing(answer.output).jobs

    async def _read_job_field(self, job: str, read: Callable[[str], str]) -> str:
        """Return what a function reads in Grid Engine's description of a job; empty if there is none."""
        try:
            answer = await self._commands.run("qstat", "-j", job, timeout=JOB_ERROR_TIMEOUT_S)
        except SiteUnavailable:
            return ""
        return read(answer.text)


def make_snapshot(
    listing: Listing,
    layout: Layout,
    used_nodes: Collection[str],
    jobs: tuple[LrmJob, ...],
    groups: NodeGroups = NO_GROUPS,
    reservations: Iterable[tuple[str, Collection[str], float, float]] = (),
) -> LrmSnapshot:
    """Return a snapshot. Each node counts in at most one of idle, background and down."""
    usable: dict[str, list[QueueInstance]] = {}
    used: set[str] = set()
    for instance in listing.instances:
        if (instance.queue, instance.host) in layout.instances:
            usable.setdefault(instance.host, []).append(instance)
        if instance.used or instance.reserved:
            used.add(instance.host)
    states: dict[str, ListedState] = {}
    for host, instances in sorted(usable.items()):
        # Grid Engine takes the slots of a job from one queue of a host, or from several together.
        slots: Counter[NodeState] = Counter()
        for instance in instances:
            slots[queue_state(instance.states)] += instance.total
        if host in used_nodes:
            states[host] = "held"
        elif slots["idle"] >= layout.slots and host not in used:
            states[host] = "idle"
        else:
            states[host] = "local" if slots["idle"] + slots["busy"] >= layout.slots else "down"
    problems = {host: "".join(sorted({*"".join(instance.states for instance in usable[host])})) for host in usable}
    reasons = {host: f"queue state {letters}" for host, letters in problems.items() if letters}
    sizes = (JobSizes(most=max(1, layout.most)),) if layout.most < len(usable) else ()
    snapshot = groups.make_snapshot(states, reasons, jobs)
    idle = {host for host, state in states.items() if state == "idle"}
    return replace(snapshot, job_sizes=sizes, reservations=report_reservations(reservations, states.keys(), idle))


ENDED_RETENTION_S = 60.0
"""How long snapshots contain an ended job."""
ACCOUNTING_DELAY_S = 5.0
"""Maximum time after a job's end until the accounting has its record."""
ACCOUNTING_TIMEOUT_S = 60.0
"""How long to wait for an accounting that does not answer, about any job."""
ACCOUNTING_WAIT_S = 0.5
"""How long a snapshot waits for the accounting; a fast answer is in the same snapshot."""
ACCOUNTING_INTERVAL_S = 1.0
MAX_CONCURRENT_QACCT = 4


@dataclass(slots=True)
class TrackedJob:
    """A grid job that is not known to have ended in a known way; times are monotonic seconds."""

    id: str
    name: str
    since: float
    nodes: tuple[str, ...] = ()
    state: LrmJobState = LrmJobState.QUEUED
    cancelled: bool = False
    gone_since: float | None = None
    """When it was first missing in a listing."""
    queried_at: float = 0.0
    """When the last query of the accounting about it ended."""
    unanswered_since: float | None = None
    """When the first of the queries began that the accounting has not answered."""
    error: str = ""
    """Why it will not start, once that was queried."""
    waiting: str = ""
    """Why it waits, as last queried."""
    waiting_read_at: float | None = None
    user: str = ""
    """The account that it runs as; empty for the agent's own."""

    def may_ask_why(self, now: float) -> bool:
        """Return whether it has waited for so long that it is worth a query of the reason."""
        since = self.since if self.waiting_read_at is None else self.waiting_read_at
        return self.state is LrmJobState.QUEUED and now - since >= WAITING_QUERY_INTERVAL_S


class TrackedJobs:
    """Follows grid jobs from listing to listing, and finds out how they ended: by the control or the accounting.

    They are those of the agent's account or other accounts that it uses, with names that begin with ``prefix``.
    """

    def __init__(
        self,
        commands: SgeCommands,
        control: JobControl,
        poll_soon: Callable[[float], None],
        prefix: str,
        other_accounts: Callable[[], Collection[str]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """``poll_soon`` is called when an end is known, or with the seconds after which it may be."""
        self._commands, self._control, self._poll_soon = commands, control, poll_soon
        self.prefix, self._other_accounts, self._clock = prefix, other_accounts, clock
        self.owner = pwd.getpwuid(os.geteuid()).pw_name
        self._owners = {self.owner}
        self.by_id: dict[str, TrackedJob] = {}
        self._ended: dict[str, tuple[LrmJob, float]] = {}
        """Ended jobs by id, with the time until which snapshots show them."""
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_QACCT)
        self._queries: dict[str, asyncio.Task[None]] = {}
        self._answered_at = float("-inf")
        """When the accounting last answered a query."""

    def add_job(self, id: str, name: str, user: str = "") -> None:
        """Follow a job that was submitted now or before, unless its name is no grid job's or its end is known."""
        if name.startswith(self.prefix) and id not in self._ended:
            self.by_id.setdefault(id, TrackedJob(id, name, self._clock.monotonic(), user=user))

    def user_of(self, job: SgeJob) -> str:
        return "" if job.owner == self.owner else job.owner

    def active_jobs(self, listing: Listing) -> list[SgeJob]:
        """Return the grid jobs that have not ended."""
        return [job for job in self._select(listing) if job_state(job.state) is not LrmJobState.ENDED]

    def update(self, listing: Listing, began: float) -> list[TrackedJob]:
        """Apply a listing that began at that time. Return jobs that have ended in a way that is not known yet."""
        present = set()
        for job in self._select(listing):
            if job_state(job.state) is LrmJobState.ENDED:
                if job.id not in self._ended:
                    # It may have ended long ago, so that its accounting is complete.
                    ended = TrackedJob(job.id, job.name, 0.0, gone_since=0.0, user=self.user_of(job))
                    self.by_id.setdefault(job.id, ended)
                continue
            tracked = self.by_id.setdefault(job.id, TrackedJob(job.id, job.name, began, user=self.user_of(job)))
            tracked.nodes, tracked.state, tracked.gone_since = job.hosts or tracked.nodes, job_state(job.state), None
            present.add(job.id)
        missing = [
            job
            for job in self.by_id.values()
            if job.id not in present and job.since < began and not (listing.unreadable and job.gone_since is None)
        ]
        for tracked in missing:
            tracked.gone_since = began if tracked.gone_since is None else tracked.gone_since
        return missing

    async def read_owners(self) -> None:
        """Read the accounts of grid jobs in a thread, since file system and name service may be slow."""
        self._owners = {self.owner, *await asyncio.to_thread(self._other_accounts)}

    def _select(self, listing: Listing) -> list[SgeJob]:
        """Return the grid jobs in a listing, by their accounts and the prefix of their names."""
        return [job for job in listing.jobs if job.owner in self._owners and job.name.startswith(self.prefix)]

    def record_end(self, tracked: TrackedJob, end: JobEnd) -> None:
        """Record how a job ended; snapshots show it for ``ENDED_RETENTION_S`` seconds."""
        self.by_id.pop(tracked.id, None)
        job = end.apply_to(LrmJob(tracked.id, tracked.name, LrmJobState.ENDED, tracked.nodes, user=tracked.user))
        self._ended[tracked.id] = (job, self._clock.monotonic() + ENDED_RETENTION_S)

    def ended_jobs(self) -> list[LrmJob]:
        """Return the jobs that ended less than ``ENDED_RETENTION_S`` seconds ago."""
        now = self._clock.monotonic()
        self._ended = {id: entry for id, entry in self._ended.items() if entry[1] > now}
        return [job for job, _ in self._ended.values()]

    def find_id(self, name: str, user: str = "") -> str | None:
        """Return the id of an account's newest job of a name, also an ended one; None without one."""
        ids = [job.id for job in self.by_id.values() if (job.name, job.user) == (name, user)]
        ids += [job.id for job, _ in self._ended.values() if (job.name, job.user) == (name, user)]
        return max(ids, key=int, default=None)

    def unresolved_jobs(self) -> list[LrmJob]:
        """Return the jobs that have gone but with unknown exit codes; snapshots show them as running."""
        return [
            LrmJob(job.id, job.name, LrmJobState.RUNNING, job.nodes, user=job.user, gone=True)
            for job in self.by_id.values()
            if job.gone_since is not None
        ]

    async def resolve(self, jobs: Iterable[TrackedJob]) -> None:
        """Record the ends of jobs that are known now, and query the accounting about others."""
        now = self._clock.monotonic()
        unresolved = []
        for job in jobs:
            ending = self._control.reported_ending(job.id)
            if job.cancelled and not job.nodes and job.state is LrmJobState.QUEUED:  # it never ran
                self.record_end(job, JobEnd(None, reason="cancelled"))
            elif ending is None or ending.exit_code is None or ending.signal_number is not None or job.cancelled:
                # Of a killed job the library reports "aborted" at best; the accounting has the cause.
                unresolved.append(job)
            else:
                self.record_end(job, JobEnd(ending.exit_code))
        due = [
            job for job in unresolved if job.id not in self._queries and now >= job.queried_at + ACCOUNTING_INTERVAL_S
        ]
        for job in due:
            job.unanswered_since = now if job.unanswered_since is None else job.unanswered_since
            self._queries[job.id] = asyncio.create_task(self._query_accounting(job))
        if due:
            await asyncio.wait([self._queries[job.id] for job in due], timeout=ACCOUNTING_WAIT_S)
        for job in unresolved:
            if job.id in self.by_id:
                self._give_up_late(job, self._clock.monotonic())

    async def close(self) -> None:
        """Cancel all queries."""
        tasks = list(self._queries.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _query_accounting(self, job: TrackedJob) -> None:
        """Query the accounting for the end of a job, and record it if there is a record."""
        records: Sequence[AccountingRecord] = ()
        try:
            async with self._slots:
                if job.id in self.by_id:
                    records = await self._commands.read_job_accounting(job.user or self.owner, job.id)
                    self._answered_at = self._clock.monotonic()
        except SiteError as error:
            log.warning("accounting does not answer", action="accounting-silent", lrm_job=job.id, reason=error.message)
            return
        finally:
            job.queried_at = self._clock.monotonic()
            self._queries.pop(job.id, None)
        job.unanswered_since = None
        # Processes on further hosts have separate records; the job's is that of the host where it was started.
        hosts = job.nodes[:1]
        records = [r for r in records if r.name == job.name and (not hosts or r.host in hosts)]
        if records and job.id in self.by_id:
            self.record_end(job, end_of(records[-1], cancelled=job.cancelled))
            self._poll_soon(0.0)

    def _give_up_late(self, job: TrackedJob, now: float) -> None:
        """Record an end without exit code if the accounting has no record in time; else request a later poll."""
        since, timeout, is_asked = job.gone_since, ACCOUNTING_DELAY_S, False
        if job.unanswered_since is not None:  # it waits while the accounting answers about other jobs
            since, timeout, is_asked = max(job.unanswered_since, self._answered_at), ACCOUNTING_TIMEOUT_S, True
        is_certain = now > job.since + PolledLrm.max_snapshot_age_s  # a listing may be from before its submission
        if since is not None and (now - since < timeout or not is_certain):
            self._poll_soon(ACCOUNTING_INTERVAL_S)
            return
        ending = self._control.reported_ending(job.id)
        if job.cancelled:
            self.record_end(job, JobEnd(None, reason="cancelled"))
        elif ending is not None and (ending.aborted or ending.signal):
            self.record_end(job, JobEnd(None, lost=True, reason=f"Grid Engine ended it {ending.signal}".strip()))
        else:
            detail = f": its accounting has not answered for {ACCOUNTING_TIMEOUT_S:g} s" if is_asked else ""
            self.record_end(job, JobEnd(None, reason=f"Grid Engine does not say how it ended{detail}"))


def convert_job(job: SgeJob, tracked: TrackedJob, unreachable: Iterable[str]) -> LrmJob:
    """Return a job of Grid Engine's listing for a snapshot, with the reason why it waits or is lost."""
    state, reason, lost = job_state(job.state), "", False
    unreachable_nodes = sorted(set(job.hosts) & set(unreachable))
    if is_broken(job.state):
        reason, lost = f"Grid Engine will not start it: {tracked.error or 'it is in an error state'}", True
    elif unreachable_nodes:
        # Its processes continue. After a restart of the master every host is unreachable at first, so only the runner
        # knows whether the node is lost. A deleted job only waits for the host to return.
        reason, lost = f"node {unreachable_nodes[0]} does not answer Grid Engine", DELETED in job.state
        state = LrmJobState.ENDED if lost else state
    elif state is LrmJobState.RUNNING and any(letter in SUSPENDED for letter in job.state):
        reason = SUSPENDED_TEXT.format("Grid Engine")
    elif state is LrmJobState.QUEUED and HELD in job.state:
        reason = "Grid Engine holds it (qrls releases it)"
    elif state is LrmJobState.UNKNOWN:
        reason = f"Grid Engine says {job.state!r}"
    elif state is LrmJobState.QUEUED and tracked.waiting:
        reason = f"Grid Engine says {tracked.waiting}"
    return LrmJob(job.id, job.name, state, job.hosts, None, lost, reason, user=tracked.user)
