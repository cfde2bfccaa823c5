"""Grid Engine as agents see it: jobs are submitted and ended by ``JobControl``, watched with ``qstat``."""

import contextlib
import math
import os
import pwd
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.settings import AgentSettings, SiteSettings
from koalapy.agent.lrm.drmaa.control import drmaa_control
from koalapy.agent.lrm.node_classes import KnownNode, NodeGroups, group_nodes
from koalapy.agent.lrm.port import (
    JOB_PREFIX,
    Finding,
    JobControl,
    LrmJob,
    LrmJobState,
    LrmSnapshot,
    LrmSubmission,
    PolledLrm,
)
from koalapy.agent.lrm.rejections import reject_other_job, reject_qsub_options, reject_size, split_options
from koalapy.agent.lrm.script import place_script
from koalapy.agent.lrm.sge.answers import (
    DELETED,
    Listing,
    NodeState,
    QueueInstance,
    SgeJob,
    is_broken,
    job_state,
    queue_state,
    read_listing,
    read_memory,
    short_name,
)
from koalapy.agent.lrm.sge.commands import Layout, QsubControl, SgeCommands, check_grid_engine, read_layout
from koalapy.agent.lrm.sge.jobs import EndResolver, TrackedJobs, active_job, unreachable_hosts
from koalapy.model.errors import SiteError, SiteRejected, SiteUnavailable
from koalapy.system.clock import SYSTEM_CLOCK, Clock

LAYOUT_MAX_AGE = 60.0
"""Seconds after which parallel environment and queues are looked at again."""
JOB_ERROR_TIMEOUT = 5.0
"""Seconds for which a snapshot waits to hear why a job will not start."""
NO_GROUPS = NodeGroups()
SETTLING_TIME = 10.0
"""Seconds after which the master has taken what it was sent, or has lost it."""


def make_lrm(settings: AgentSettings) -> "SgeLrm":
    folders = JobFolders.from_settings(settings)
    if folders.is_mapped and settings.library is None:
        return SgeLrm(settings, QsubControl(SgeCommands(folders.run_as)), folders=folders)
    return SgeLrm(settings, drmaa_control(settings.library, folders.run_as), folders=folders)


class SgeLrm(PolledLrm):
    """Our jobs are those whose names begin with ``prefix``, of our own user or of those we act for; all other used
    slots are background."""

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
        self._settings, self._control, self._extra = settings, control, split_options(settings.native_specification)
        queues = "leave it out, and set the cluster's queue"
        environments = "leave it out, and set the cluster's parallel_environment"
        reject_qsub_options(self._extra, q=queues, masterq=queues, pe=environments)
        self._commands = SgeCommands(self._folders.run_as)
        self._jobs = TrackedJobs(prefix, pwd.getpwuid(os.geteuid()).pw_name, self._folders.list_accounts, clock)
        self._users = "*" if self._folders.is_mapped else self._jobs.owner
        self._resolver = EndResolver(self._commands, self._jobs, control, self.poll_soon, clock)
        self._layout: Layout | None = None
        self._groups = NO_GROUPS
        """Its nodes by class."""
        self._layout_read = 0.0
        self._looked = False

    async def open(self) -> None:
        self._control.on_ended(self.poll_soon)

    async def close(self) -> None:
        await super().close()
        await self._resolver.close()
        await self._control.close()

    async def submit_job(self, submission: LrmSubmission) -> str:
        layout = await self._current_layout()
        if submission.nodes > len(layout.hosts):
            where = f"queue {self._settings.queue}" if self._settings.queue else self._settings.parallel_environment
            reject_size(submission.nodes, f"{where} has {len(layout.hosts)}", "ask for fewer nodes")
        native = self._native(submission, layout)
        script = await place_script(submission, "qrsh", self._folders)
        try:
            job = await self._control.submit_job(script, submission, native)
        except SiteRejected as error:
            raise self._commands.rejection(error) from error
        if submission.name.startswith(self._jobs.prefix):
            self._jobs.submitted(job, submission.name, submission.user)
        self.poll_soon()
        return job

    async def find_job(self, name: str, user: str = "") -> str | None:
        if (known := self._jobs.find(name, user)) is not None:
            return known
        jobs = await self._own_jobs("prsz")
        found = [job for job in jobs if (job.name, self._jobs.user_of(job)) == (name, user)]
        if found:
            return max(found, key=lambda job: (job_state(job.state) is not LrmJobState.ENDED, int(job.id))).id
        records = await self._commands.accounting(user or self._jobs.owner, name)
        return records[-1].job if records else None

    async def settling_time(self) -> float:
        return SETTLING_TIME

    async def cancel_job(self, job: str, name: str, user: str = "", *, by_force: bool = False) -> None:
        found = next((each for each in await self._own_jobs("prs") if each.id == job), None)
        if found is None or (DELETED in found.state and not by_force):
            return
        if (found.name, self._jobs.user_of(found)) != (name, user):
            reject_other_job(job, found.name, name)
        if job in self._jobs.known:
            self._jobs.known[job].cancelled = True
        if DELETED in found.state:
            # The word that it is deleted never reached its hosts, or theirs never came back.
            await self._commands.delete_by_force(job, user)
        else:
            await self._control.cancel_job(job, user)
        self.poll_soon()

    async def take_snapshot(self) -> LrmSnapshot:
        layout = await self._current_layout()
        began = self._clock.monotonic()
        # At first also what has ended lately: some of it may be ours, from before a restart.
        which = "prs" if self._looked else "prsz"
        listing = await self._list(which)
        ended = self._jobs.see(listing, began)
        self._looked = True
        await self._resolver.resolve(ended)
        silent = unreachable_hosts(listing)
        shown = [await self._active(job, silent) for job in self._jobs.active(listing)]
        jobs = (*shown, *self._jobs.unsettled(), *self._jobs.ended())
        held = {node for job in shown if job.state is LrmJobState.RUNNING for node in job.nodes}
        return replace(
            snapshot_of(listing, layout, held, jobs, self._groups), submit_error=await self._control.submit_error()
        )

    async def read_version(self) -> str:
        return await self._commands.read_version()

    async def check_setup(self) -> Sequence[Finding]:
        settings = self._settings
        found = await check_grid_engine(self._commands, settings.parallel_environment, settings.queue)
        return [*found, *await self._control.check_setup()]

    def _native(self, submission: LrmSubmission, layout: Layout) -> list[str]:
        options = ["-pe", self._settings.parallel_environment, str(submission.nodes * layout.slots)]
        if self._settings.queue:
            options += ["-q", self._settings.queue]
        if submission.walltime is not None:
            options += ["-l", f"h_rt={max(1, math.ceil(submission.walltime))}"]
        if submission.node_class:
            group = self._groups.select_class(submission.node_class, submission.nodes)
            options += ["-l", f"h={'|'.join(sorted(group.nodes))}"]
        # Run the script where it lies, which only we can read, and never a second time.
        return [*options, "-b", "y", "-shell", "n", "-r", "n", *self._extra]

    async def _current_layout(self) -> Layout:
        now = self._clock.monotonic()
        if self._layout is None or now > self._layout_read + LAYOUT_MAX_AGE:
            settings = self._settings
            self._layout = await read_layout(self._commands, settings.parallel_environment, settings.queue)
            self._layout_read = now
            memory: dict[str, int] = {}
            with contextlib.suppress(SiteError):  # Grid Engine does not say
                memory = read_memory((await self._commands.run_checked("qhost", "-xml")).output)
            known = [KnownNode(host, memory.get(short_name(host))) for host in sorted(self._layout.hosts)]
            self._groups = group_nodes(known, settings.node_classes)
        return self._layout

    async def _list(self, which: str) -> Listing:
        # Only our own user's jobs, if there is but that: the slots of all others are counted all the same.
        arguments = ("-f", "-g", "t", "-s", which, "-u", self._users, "-xml")
        return read_listing((await self._commands.run_checked("qstat", *arguments)).output)

    async def _own_jobs(self, which: str) -> Sequence[SgeJob]:
        answer = await self._commands.run_checked("qstat", "-s", which, "-u", self._users, "-xml")
        return read_listing(answer.output).jobs

    async def _active(self, job: SgeJob, silent: Collection[str]) -> LrmJob:
        known = self._jobs.known[job.id]
        if is_broken(job.state) and not known.error:
            known.error = await self._job_error(job.id)
        return active_job(job, known, silent)

    async def _job_error(self, job: str) -> str:
        """Why a job is in an error state, in Grid Engine's words; empty while it does not say."""
        try:
            answer = await self._commands.run("qstat", "-j", job, timeout=JOB_ERROR_TIMEOUT)
        except SiteUnavailable:
            return ""
        lines = answer.text.splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("error reason")), "")


def snapshot_of(
    listing: Listing, layout: Layout, held: Collection[str], jobs: tuple[LrmJob, ...], groups: NodeGroups = NO_GROUPS
) -> LrmSnapshot:
    """Nodes by what they are to us; each is one thing."""
    usable: dict[str, list[QueueInstance]] = {}
    used: set[str] = set()
    for each in listing.instances:
        if (each.queue, each.host) in layout.instances:
            usable.setdefault(each.host, []).append(each)
        if each.used or each.reserved:
            used.add(each.host)
    found: dict[NodeState, set[str]] = {"idle": set(), "busy": set(), "down": set()}
    for host, instances in usable.items():
        if host not in held:
            best = _best(instances, layout.slots)
            found["busy" if best == "idle" and host in used else best].add(host)
    return LrmSnapshot(
        len(usable),
        len(found["idle"]),
        len(found["busy"]),
        len(found["down"]),
        jobs,
        notices=groups.notices,
        node_classes=groups.report(lambda names: len(names & found["idle"])),
    )


def _best(instances: Sequence[QueueInstance], slots: int) -> NodeState:
    """What a host is to a job: Grid Engine takes its slots from one of its queues, or from several together."""
    total: Counter[NodeState] = Counter()
    for each in instances:
        total[queue_state(each.states)] += each.total
    if total["idle"] >= slots:
        return "idle"
    return "busy" if total["idle"] + total["busy"] >= slots else "down"
