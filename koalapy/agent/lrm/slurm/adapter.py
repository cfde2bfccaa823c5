"""Slurm as agents see it: driven by its commands."""

import contextlib
import os
import pwd
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.settings import AgentSettings, SiteSettings
from koalapy.agent.lrm.commands import CommandResult
from koalapy.agent.lrm.drmaa.control import drmaa_control
from koalapy.agent.lrm.node_classes import KnownNode, NodeGroups, expand_host_list, group_nodes
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
from koalapy.agent.lrm.rejections import reject_sbatch_options, reject_size, split_options
from koalapy.agent.lrm.script import place_script
from koalapy.agent.lrm.slurm.answers import (
    COLUMNS,
    SlurmJob,
    SlurmNode,
    read_columns,
    read_hosts,
    read_nodes,
    read_uid,
    words_in,
)
from koalapy.agent.lrm.slurm.commands import SbatchControl, SlurmCommands, time_limit
from koalapy.agent.lrm.slurm.offer import Offer, check_nodes, check_partition, check_version, read_offer
from koalapy.agent.lrm.slurm.states import (
    NodeState,
    fault_of_waiting,
    is_starting,
    job_end,
    job_state,
    node_starts,
    node_state,
    nodes_waited_for,
    waiting_text,
)
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.system.clock import SYSTEM_CLOCK, Clock

MESSAGE_TIMEOUT_S = 10.0
"""How long Slurm's parts wait for each other, where its configuration does not say (Slurm's own default)."""
RESUME_TIMEOUT = 60.0
"""Seconds; Slurm's own default."""
OFFER_MAX_AGE = 10.0
"""Seconds after which partitions and reservations are looked at again."""
NO_GROUPS = NodeGroups()
_MAX_SNAPSHOT_TRIES = 3
_MEMORY = ("--mem", "--mem-per-cpu", "--mem-per-gpu")
_MAX_RETAINED_CANCELLED = 10_000
_ACCOUNTING_SINCE = "now-14days"
"""How far back accounting is searched for a job of ours."""


class _JobLine(NamedTuple):
    """A job as squeue or sacct tell it in one line."""

    job: str
    state: LrmJobState
    user: int
    name: str


def make_lrm(settings: AgentSettings) -> "SlurmLrm":
    folders = JobFolders.from_settings(settings)
    control = drmaa_control(settings.library, folders.run_as) if settings.library else None
    return SlurmLrm(settings, control, folders=folders)


class SlurmLrm(PolledLrm):
    """Our jobs are those whose names begin with ``prefix``, of our own user or of those we act for; all others' are
    background."""

    def __init__(
        self,
        settings: SiteSettings,
        control: JobControl | None = None,
        prefix: str = JOB_PREFIX,
        folders: JobFolders | None = None,
        message_timeout_s: float = MESSAGE_TIMEOUT_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(settings.poll_interval)
        self._clock, self._message_timeout_s = clock, message_timeout_s
        self._folders = folders or JobFolders.for_own_account()
        self._commands = SlurmCommands(self._folders.run_as)
        self._settings, self._extra = settings, split_options(settings.native_specification)
        reject_sbatch_options(self._extra, partition="leave it out, and set the cluster's partition")
        self._prefix = prefix
        self._control: JobControl = control or SbatchControl(self._options(), self._commands)
        self._offer: Offer | None = None
        self._offer_read = 0.0
        self._known: list[KnownNode] = []
        self._groups = NodeGroups()
        """The nodes that there were at the last look, and the same by class."""
        self._total = self._largest = 0
        """Nodes that there were for us at the last look, and that one job could have of them."""
        self._boot_time: float | None = None
        self._cancelled: set[str] = set()
        self._ended: frozenset[str] = frozenset()
        """Our ended jobs at the last look."""

    async def open(self) -> None:
        self._control.on_ended(self.poll_soon)

    async def close(self) -> None:
        await super().close()
        await self._control.close()

    async def submit_job(self, submission: LrmSubmission) -> str:
        await self._reject_size(submission)
        native = self._native(submission)
        script = await place_script(submission, "srun", self._folders)
        try:
            return await self._control.submit_job(script, submission, native)
        except SiteUnavailable as error:
            # It may have been taken all the same; then a second one of that name must never be.
            if (job := await self._find_unanswered(error, submission)) is not None:
                return job
            raise
        except SiteRejected as error:
            if error.fault is SiteFault.UNSUITABLE:
                self._offer = None  # its limits may have changed
            raise
        finally:
            self.poll_soon()

    async def find_job(self, name: str, user: str = "") -> str | None:
        uid = (await self._folders.run_as.accounts.find_account(user)).uid if user else os.getuid()
        answer = await self._squeue((user,), f"--name={name}", "--format=%i|%T|%U|%j")
        found = [each for each in _lines(answer.output) if (each.name, each.user) == (name, uid)]
        if not found:
            found = [each for each in await self._accounted(name, user) if (each.name, each.user) == (name, uid)]
        found.sort(key=lambda each: (each.state is not LrmJobState.ENDED, len(each.job), each.job))
        return found[-1].job if found else None

    async def settling_time(self) -> float:
        """As long as Slurm's own parts wait for each other."""
        return (await self._configured("MessageTimeout")).get("MessageTimeout", self._message_timeout_s)

    async def cancel_job(self, job: str, name: str, user: str = "", *, by_force: bool = False) -> None:
        look = ("--states=all", "--noheader", f"--jobs={job}", "--format=%i|%T|%U|%j")
        answer = await self._commands.run("squeue", *look)
        if answer.code:
            if "invalid job id" in answer.error_text("squeue").lower():
                return
            raise self._commands.error("squeue", answer)
        for found in _lines(answer.output):
            if found.state is LrmJobState.ENDED:
                continue
            if found.name != name or (await self._owner(found.user)) != user:
                raise SiteRejected(
                    f"job {job} is {found.name} of user {found.user}, not our {name}: it is left alone", value=job
                )
            self._cancelled.add(job)
            await self._control.cancel_job(job, user)
            self.poll_soon()

    async def read_version(self) -> str:
        return await self._commands.read_version()

    async def check_setup(self) -> Sequence[Finding]:
        found = [self._commands.check_installed("sinfo", "squeue", "srun")]
        if found[0].ok:
            found.append(await check_version(self._commands))
            found += [each async for each in check_partition(self._commands, self._settings.partition)]
        if all(each.ok for each in found):
            smallest = 1
            try:
                offer = await self._current_offer()
                smallest = offer.smallest
                if offer.error:
                    found.append(Finding("offer", False, offer.error, "correct the cluster's native_specification"))
                nodes = await self._nodes(offer)
                found.append(check_nodes(nodes, node_states(nodes, offer)))
            except SiteError as error:
                found.append(Finding("nodes", False, error.message, error.hint or "try sinfo --json by hand"))
            try:
                found.append(Finding("queue", True, f"can be read; jobs of koalapy in it: {len(await self._jobs())}"))
            except SiteError as error:
                found.append(Finding("queue", False, error.message, error.hint or "try squeue --me by hand"))
            found += await self._control.check_setup(smallest)
        return found

    async def take_snapshot(self) -> LrmSnapshot:
        """Nodes first, jobs then: what has started in between counts as ours, and after an end both are asked again."""
        offer = await self._current_offer()
        for _ in range(_MAX_SNAPSHOT_TRIES):
            nodes = await self._nodes(offer)
            found = await self._jobs()
            jobs = [await self._job(job, nodes, offer) for job in found]
            ended = frozenset(job.id for job in jobs if job.state is LrmJobState.ENDED)
            agree, self._ended = ended <= self._ended, ended
            if agree:
                break
        if len(self._cancelled) > _MAX_RETAINED_CANCELLED:
            self._cancelled &= {job.id for job in jobs}
        if any(job.reason.startswith("Partition") for job in found):
            self._offer = None  # its limits may have changed
        wanted = sum(each.wants for each, job in zip(found, jobs, strict=True) if job.state is LrmJobState.QUEUED)
        error = "; ".join(filter(None, (offer.error, await self._control.submit_error())))
        return replace(snapshot_of(nodes, jobs, offer, wanted, self._groups), submit_error=error)

    def _options(self) -> list[str]:
        """Of every job."""
        options = ["--ntasks-per-node=1", "--exclusive", "--no-requeue"]
        if not any(word.partition("=")[0] in _MEMORY for word in self._extra):
            options.append("--mem=0")  # whole nodes, with all their memory: not what the site gives who asks for none
        if self._settings.partition:
            options.append(f"--partition={self._settings.partition}")
        if self._settings.account:
            options.append(f"--account={self._settings.account}")
        return [*options, *self._extra]

    def _native(self, submission: LrmSubmission) -> list[str]:
        options = [f"--nodes={submission.nodes}", f"--comment={submission.name}"]
        if submission.walltime is not None:
            options.append(f"--time={time_limit(submission.walltime)}")
        return [*options, *self._options(), *self._of_class(submission)]

    def _of_class(self, submission: LrmSubmission) -> list[str]:
        """By which it gets nodes of its class only: the last one of an option counts, so these hold what is configured
        as well."""
        if not submission.node_class:
            return []
        group = self._groups.select_class(submission.node_class, submission.nodes)
        if group.feature and self._offer is not None and not self._offer.constraint:
            return [f"--constraint={group.feature}"]
        others = {name for each in self._groups.groups for name in each.nodes} - group.nodes
        excluded = others | (self._offer.excluded if self._offer is not None else frozenset())
        return [f"--exclude={','.join(sorted(excluded))}"] if excluded else []

    async def _reject_size(self, submission: LrmSubmission) -> None:
        """Raise ``SiteRejected`` for a number of nodes that Slurm never gives to one job.

        Slurm itself may let it wait for ever, and says the same of too few nodes as of too many.
        """
        offer = await self._current_offer()
        if submission.nodes < (least := offer.next_size(submission.nodes)):
            limit, hint = f"{offer.where} gives a job at least {least}", f"ask for at least {least} nodes"
            reject_size(submission.nodes, limit, hint, SiteFault.UNSUITABLE)
        if submission.nodes > self._largest or (submission.node_class and not self._groups.groups):
            await self._nodes(offer)
        if submission.nodes > (max_nodes := min(self._total, self._largest)):
            gives = "has" if max_nodes == self._total else "gives a job at most"
            reject_size(submission.nodes, f"{offer.where} {gives} {max_nodes}", f"ask for at most {max_nodes} nodes")

    async def _owner(self, uid: int) -> str | None:
        """Whose job it is, of those we act for; empty: ours."""
        return "" if uid == os.getuid() else (await self._folders.account_names()).get(uid)

    async def _find_unanswered(self, error: SiteUnavailable, submission: LrmSubmission) -> str | None:
        try:
            return await self.find_job(submission.name, submission.user)
        except SiteError:
            raise error from None

    async def _accounted(self, name: str, user: str) -> list[_JobLine]:
        """From Slurm's accounting; none where there is none."""
        which = (f"--name={name}", f"--starttime={_ACCOUNTING_SINCE}", "--format=JobIDRaw,State,UID,JobName")
        try:
            answer = await self._commands.run_checked(
                "sacct", "--noheader", "--parsable2", "--allocations", *which, user=user
            )
        except SiteError:
            return []
        return _lines(answer.output)

    async def _current_offer(self) -> Offer:
        now = self._clock.monotonic()
        if self._offer is None or now > self._offer_read + OFFER_MAX_AGE:
            self._offer = await read_offer(self._commands, self._settings.partition, self._extra)
            self._offer_read = now
        return self._offer

    async def _nodes(self, offer: Offer) -> list[SlurmNode]:
        """All that jobs of ours may ever get."""
        names = [each.name for each in offer.partitions]
        answer = await self._commands.run_checked("sinfo", "--Node", f"--partition={','.join(names)}", "--json")
        if not answer.output.strip() and answer.errors.strip():
            raise self._commands.error("sinfo", answer)
        nodes = offer.ours(read_nodes(answer.output, names))
        if not nodes:
            raise SiteUnavailable(f"sinfo shows no nodes in {offer.where}", hint="set its partition")
        self._total, self._largest = len(nodes), offer.largest(nodes)
        known = [KnownNode(n.name, n.memory, n.features or frozenset(), n.weight) for n in nodes]
        if known != self._known:
            self._known, self._groups = known, group_nodes(known, self._settings.node_classes)
        return nodes

    async def _jobs(self) -> list[SlurmJob]:
        """Return our jobs; other users' jobs are not asked for, since there may be many."""
        people = await self._folders.account_names()
        answer = await self._squeue(("", *sorted(people.values())), "--noconvert", COLUMNS)
        return await self._with_hosts(read_columns(answer.output, self._prefix, {os.getuid(), *people}))

    async def _squeue(self, users: Iterable[str], *options: str) -> CommandResult:
        """Ask squeue for the jobs of accounts, of which an empty name is our own.

        They are named, since Slurm up to 24.05 takes no number of 2³¹ and more, and ``--me`` is a number to it. It
        passes over an account that it does not know, and that account's jobs must not be taken for ended ones.
        """
        names = [name or _own_account() for name in users]
        answer = await self._commands.run_checked(
            "squeue", f"--user={','.join(names)}", "--states=all", "--noheader", *options
        )
        for name in re.findall(r"Invalid user: (\S+)", answer.errors):
            if name == _own_account() or await self._exists(name):
                raise SiteUnavailable(f"squeue does not know the account {name}", hint="see getent passwd on this host")
        return answer

    async def _exists(self, user: str) -> bool:
        try:
            await self._folders.run_as.accounts.find_account(user)
        except SiteRejected:
            return False
        return True

    async def _with_hosts(self, jobs: list[SlurmJob]) -> list[SlurmJob]:
        """With the nodes of those that have too many for a column, who are asked about alone."""
        cut = ",".join(job.id for job in jobs if job.hosts_cut)
        if not cut:
            return jobs
        hosts = read_hosts(
            (
                await self._commands.run_checked(
                    "squeue", "--states=all", "--noheader", f"--jobs={cut}", "--format=%i|%N"
                )
            ).output
        )
        if missing := next((job.id for job in jobs if job.hosts_cut and job.id not in hosts), ""):
            raise SiteUnavailable(f"squeue does not say which nodes job {missing} has")
        return [replace(job, nodes=hosts[job.id], hosts_cut=False) if job.hosts_cut else job for job in jobs]

    async def _configured(self, *names: str) -> dict[str, float]:
        """Numbers of Slurm's configuration, as far as it tells them."""
        with contextlib.suppress(SiteError):
            configured = (await self._commands.run_checked("scontrol", "show", "config")).text
            lines = re.findall(r"^(\w+)\s*=\s*(\d+)", configured, re.MULTILINE)
            return {name: float(number) for name, number in lines if name in names}
        return {}

    async def _job(self, job: SlurmJob, nodes: Sequence[SlurmNode], offer: Offer) -> LrmJob:
        state, user = job_state(job.words), await self._owner(job.user) or ""
        if state is LrmJobState.ENDED:
            end = job_end(job.words, job.code, job.signal, job.reason, cancelled_by_us=job.id in self._cancelled)
            code, lost, why, exceeded = end.exit_code, end.lost, end.reason, end.exceeded
            return LrmJob(job.id, job.name, state, job.nodes, code, lost, why, user=user, exceeded=exceeded)
        refused, reason, starting = None, "", is_starting(job.words)
        if starting:
            reason = "Slurm makes its nodes ready"
        elif state is LrmJobState.QUEUED:
            refused = fault_of_waiting(job.reason, choice=len(offer.partitions) > 1)
            reason = f"Slurm will not start it: {job.reason}" if refused else waiting_text(job.reason)
            starting = _waits_for_a_start(job, nodes)
        takes = await self._longest_start() if starting else 0.0
        return LrmJob(job.id, job.name, state, job.nodes, reason=reason, starting=takes, fault=refused, user=user)

    async def _longest_start(self) -> float:
        """Seconds after which Slurm itself gives up a node that it has switched on."""
        if self._boot_time is None:
            timeouts = await self._configured("ResumeTimeout", "BatchStartTimeout")
            self._boot_time = max(timeouts.get("ResumeTimeout", 0.0), RESUME_TIMEOUT)
            self._boot_time += timeouts.get("BatchStartTimeout", 0.0)
        return self._boot_time


def _waits_for_a_start(job: SlurmJob, nodes: Sequence[SlurmNode]) -> bool:
    """Whether all that a queued job lacks are nodes that start."""
    try:
        missing = set(expand_host_list(nodes_waited_for(job.reason)))
    except ValueError:
        return False
    return bool(missing) and missing <= {node.name for node in nodes if node_starts(node.words)}


def node_states(nodes: Sequence[SlurmNode], offer: Offer) -> list[NodeState]:
    """What each node is to a job of ours."""
    up = {each.name for each in offer.partitions if each.up}
    return [
        node_state(node.words, reserved=offer.reserves(node.name)) if node.partitions & up else "down" for node in nodes
    ]


def snapshot_of(
    nodes: Sequence[SlurmNode], jobs: Sequence[LrmJob], offer: Offer, wanted: int = 0, groups: NodeGroups = NO_GROUPS
) -> LrmSnapshot:
    """Counts of nodes: those that our jobs hold are in none of idle, background and down. ``wanted`` are those that
    our queued jobs ask for: what backfill keeps may be for them. Idle are as many as one job could have."""
    busy = (LrmJobState.RUNNING, LrmJobState.UNKNOWN)
    held = {node for job in jobs if job.state in busy for node in job.nodes}
    seen = [each for each in zip(nodes, node_states(nodes, offer), strict=True) if each[0].name not in held]
    free = [node for node, state in seen if state == "idle"]
    planned = [node for node, state in seen if state == "planned"]
    may_be_had = [*free, *planned[:wanted]]
    idle = offer.largest(may_be_had)
    down = sum(state == "down" for _, state in seen)
    max_nodes = offer.largest(nodes)
    limits = []
    if 0 < max_nodes < len(nodes):
        limits.append(f"a job in {offer.where} gets at most {max_nodes} of its {len(nodes)} nodes")
    if offer.smallest > 1:
        limits.append(f"a job in {offer.where} gets at least {offer.smallest} nodes, and smaller ones are refused")
    return LrmSnapshot(
        total=len(nodes),
        idle=idle,
        background=len(seen) - idle - down,
        down=down,
        jobs=tuple(jobs),
        notices=(*limits, *groups.notices),
        node_classes=groups.report(lambda names: offer.largest([node for node in may_be_had if node.name in names])),
        min_job_nodes=offer.smallest,
    )


def _own_account() -> str:
    """Return the name of the agent's account, or its number if it has no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _lines(output: bytes) -> list[_JobLine]:
    """Lines of job, state, user and name."""
    found = []
    for line in output.decode(errors="replace").splitlines():
        job, _, rest = line.strip().partition("|")
        state, _, rest = rest.partition("|")
        user, _, name = rest.partition("|")
        if job.isdecimal() and (uid := read_uid(user)) is not None:
            found.append(_JobLine(job, job_state(words_in([state])), uid, name))
    return found
