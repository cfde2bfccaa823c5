"""Adapter of Slurm, driven by its commands."""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.settings import AgentSettings, SiteSettings
from koalapy.agent.lrm.commands import CommandResult
from koalapy.agent.lrm.node_classes import NO_GROUPS, NodeGroups, group_nodes
from koalapy.agent.lrm.port import (
    JOB_PREFIX,
    SUSPENDED_TEXT,
    Finding,
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
    reject_other_job,
    reject_sbatch_options,
    reject_size,
    split_options,
)
from koalapy.agent.lrm.script import place_script
from koalapy.agent.lrm.slurm.answers import (
    COLUMNS,
    SlurmJob,
    SlurmNode,
    quote_line,
    read_columns,
    read_hosts,
    read_lines,
    read_nodes,
)
from koalapy.agent.lrm.slurm.commands import SbatchControl, SlurmAccounting, SlurmCommands, own_account, time_limit
from koalapy.agent.lrm.slurm.limits import NO_LIMIT, AccountLimit, read_account_limit
from koalapy.agent.lrm.slurm.offer import (
    Offer,
    check_nodes,
    check_partition,
    check_version,
    node_states,
    option_value,
    partly_used_nodes,
    read_offer,
    read_sharing,
    split_names,
)
from koalapy.agent.lrm.slurm.reservations import SlurmReservations
from koalapy.agent.lrm.slurm.states import (
    NODE_RESERVED,
    NodeState,
    is_account_limit,
    is_job_starting,
    is_job_suspended,
    is_node_starting,
    job_end,
    job_state,
    unavailable_nodes,
    waiting_fault,
    waiting_text,
)
from koalapy.model.bounds import MAX_NODES
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.model.node_requirement import NodeRequirement, compress_host_list, count_gpus, expand_host_list
from koalapy.model.reports import ListedState
from koalapy.model.wording import format_nodes
from koalapy.system.clock import SYSTEM_CLOCK, Clock

MESSAGE_TIMEOUT_S = 10.0
"""Slurm's default of MessageTimeout, used if the configuration cannot be read."""
RESUME_TIMEOUT_S = 60.0
"""Slurm's default of ResumeTimeout."""
OFFER_MAX_AGE_S = 10.0
"""Age at which partitions and reservations are read again."""
LIMIT_MAX_AGE_S = 60.0
"""Age at which limits of accounts are read again; each snapshot reads those of which jobs use a part."""
HOLDING = (LrmJobState.RUNNING, LrmJobState.UNKNOWN)
"""States of jobs that hold nodes."""
_MAX_SNAPSHOT_TRIES = 3
_MEMORY_OPTIONS = ("--mem", "--mem-per-cpu", "--mem-per-gpu")
_MAX_RETAINED_CANCELLED = 10_000
_ACCOUNTING_SINCE = "now-14days"


def make_lrm(settings: AgentSettings) -> "SlurmLrm":
    if settings.library is not None:
        raise SiteRejected(
            "Slurm is driven by its commands, without a DRMAA library",
            field="library",
            value=settings.library,
            hint="remove the cluster's setting library",
            fault=SiteFault.SITE,
        )
    return SlurmLrm(settings, folders=JobFolders.from_settings(settings))


class SlurmLrm(PolledLrm):
    """A Slurm cluster.

    Grid jobs run as the agent's account or as accounts that it may use, and their names begin with ``prefix``. All
    other jobs are background load.
    """

    product = "Slurm"

    def __init__(
        self,
        settings: SiteSettings,
        prefix: str = JOB_PREFIX,
        folders: JobFolders | None = None,
        message_timeout_s: float = MESSAGE_TIMEOUT_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(settings.poll_interval)
        self._clock, self._message_timeout_s = clock, message_timeout_s
        self._folders = folders or JobFolders.for_own_account()
        self._commands = SlurmCommands(self._folders.run_as)
        self._settings, self._native_options = settings, split_options(settings.native_specification)
        reject_sbatch_options(self._native_options, partition="leave it out, and set the cluster's partition")
        self._reservations = SlurmReservations(self._commands, self._native_options)
        self._prefix = prefix
        self._control = SbatchControl(self._common_options(), self._commands)
        self._offer: Offer | None = None
        self._offer_read_at = 0.0
        self._limit, self._limit_until = NO_LIMIT, float("-inf")
        self._known_nodes: list[SlurmNode] = []
        """Nodes with the properties of the last snapshot."""
        self._groups = NO_GROUPS
        """The same by class."""
        self._total = self._max_job_nodes = 0
        """Nodes of the last snapshot, and how many of them one job may have."""
        self._accounting = SlurmAccounting(self._commands, clock)
        self._max_start_s: float | None = None
        self._cancelled: set[str] = set()
        self._ended: frozenset[str] = frozenset()
        """Ended grid jobs of the last snapshot."""
        self._running: frozenset[str] = frozenset()
        """Running grid jobs of the last answer of squeue."""

    async def open(self) -> None:
        return

    async def submit_job(self, submission: LrmSubmission) -> str:
        if not (submission.requirement.share and (await self._current_offer()).shares):
            submission = replace(submission, requirement=replace(submission.requirement, share=False))
        await self._reject_size(submission)
        native = [f"--nodes={submission.nodes}", f"--comment={submission.name}"]
        walltime = submission.walltime
        if submission.reservation:
            longest = await self._reservations.longest_walltime(submission.reservation, self._clock.now())
            walltime = longest if walltime is None else min(walltime, longest)
        if walltime is not None:
            native.append(f"--time={time_limit(walltime)}")
        part = submission.requirement if submission.requirement.share else None
        native += [*self._common_options(part), *self._node_options(submission)]
        if submission.reservation:
            native.append(f"--reservation={submission.reservation}")
        script = await place_script(submission, "srun", self._folders)
        try:
            return await self._control.submit_job(script, submission, native)
        except SiteUnavailable:
            # Slurm may have accepted the job. Then a second one of that name must not be submitted.
            with contextlib.suppress(SiteError):
                if (job := await self.find_job(submission.name, submission.user)) is not None:
                    return job
            raise
        except SiteRejected as error:
            if error.fault is SiteFault.UNSUITABLE:
                self._offer = None  # its limits may have changed
                with contextlib.suppress(SiteUnavailable):
                    await self._reject_size(submission)
                    error.sizes = error.sizes or (await self._current_offer()).find_misfit(error, submission.nodes)
            rejection = self._commands.rejection(error)
            raise blame_choice(rejection, submission.requirement, submission.reservation) from error
        finally:
            self.poll_soon()

    async def find_job(self, name: str, user: str = "") -> str | None:
        uid = (await self._folders.run_as.accounts.find_account(user)).uid if user else os.getuid()
        answer = await self._squeue((user,), "--noheader", f"--name={name}", "--format=%i|%T|%U|%j")
        lines = [line for line in read_lines(answer.output) if (line.name, line.uid) == (name, uid)]
        if not lines:
            lines = [line for line in await self._read_accounting(name, user) if (line.name, line.uid) == (name, uid)]
        lines.sort(key=lambda line: (job_state(line.words) is not LrmJobState.ENDED, len(line.id), line.id))
        return lines[-1].id if lines else None

    async def settling_time(self) -> float:
        """Return Slurm's own message timeout."""
        return (await self._read_configuration("MessageTimeout")).get("MessageTimeout", self._message_timeout_s)

    async def cancel_job(self, job: str, name: str, user: str = "", *, by_force: bool = False) -> None:
        options = ("--states=all", "--noheader", f"--jobs={job}", "--format=%i|%T|%U|%j")
        answer = await self._commands.run("squeue", *options)
        if answer.code:
            if "invalid job id" in answer.error_text("squeue").lower():
                return
            raise self._commands.error("squeue", answer)
        for line in read_lines(answer.output):
            if job_state(line.words) is LrmJobState.ENDED:
                continue
            if line.name != name or (await self._account_of(line.uid)) != user:
                reject_other_job(job, f"{line.name} of uid {line.uid}", f"{name} of {user or own_account()}")
            self._cancelled.add(job)
            await self._control.cancel_job(job, user)
            self.poll_soon()

    async def reserve_nodes(self, order: ReservationOrder) -> Sequence[str]:
        try:
            return await self._reservations.create(order, await self._current_offer(), self._clock.now())
        finally:
            self._offer = None  # it lists reservations

    async def release_reservation(self, name: str) -> None:
        await self._reservations.delete(name)
        self._offer = None

    async def list_reservations(self, prefix: str) -> Sequence[str]:
        return [name for name in await self._reservations.find_all() if name.startswith(prefix)]

    async def read_version(self) -> str:
        return await self._commands.read_version()

    async def check_setup(self) -> Sequence[Finding]:
        findings = [self._commands.check_installed("sinfo", "squeue", "srun")]
        if findings[0].ok:
            findings.append(await check_version(self._commands))
            findings += [finding async for finding in check_partition(self._commands, self._settings.partition)]
        if all(finding.ok for finding in findings):
            min_nodes = 1
            try:
                offer = await self._current_offer()
                min_nodes = offer.min_job_nodes
                if offer.error:
                    findings.append(Finding("offer", False, offer.error, "correct the cluster's native_specification"))
                if offer.exclusive_because:
                    hint = "remove the setting share, or let Slurm share nodes"
                    findings.append(Finding("share", False, f"jobs get whole nodes: {offer.exclusive_because}", hint))
                nodes = await self._read_nodes(offer)
                findings.append(check_nodes(nodes, node_states(nodes, offer)))
            except SiteError as error:
                findings.append(Finding("nodes", False, error.message, error.hint or "try sinfo --json by hand"))
            try:
                jobs, unreadable = await self._read_jobs()
                text = f"can be read; jobs of koalapy in it: {len(jobs)}"
                if unreadable:
                    text = f"{len(unreadable)} lines of squeue cannot be read: {quote_line(unreadable[0])}"
                findings.append(Finding("queue", not unreadable, text, "try squeue --me by hand" if unreadable else ""))
            except SiteError as error:
                findings.append(Finding("queue", False, error.message, error.hint or "try squeue --me by hand"))
            findings += await self._control.check_setup(min_nodes)
            if self._offer is not None:
                findings.append(await self._reservations.check_right(self._offer))
        return findings

    async def take_snapshot(self) -> LrmSnapshot:
        """Query nodes and then jobs, so that a job that starts in between counts as ours; repeat if one has ended."""
        offer = await self._current_offer()
        for _ in range(_MAX_SNAPSHOT_TRIES):
            nodes = await self._read_nodes(offer)
            slurm_jobs, unreadable = await self._read_jobs()
            jobs = [await self._convert_job(job, nodes, offer) for job in slurm_jobs]
            ended = frozenset(job.id for job in jobs if job.state is LrmJobState.ENDED)
            is_consistent, self._ended = ended <= self._ended, ended
            new = {job.id for job in jobs if job.state in HOLDING} - self._running
            # Slurm may not have counted these when it was asked for its nodes.
            not_counted = {name for job in jobs if job.id in new for name in job.nodes}
            self._running = frozenset(job.id for job in jobs if job.state in HOLDING)
            if is_consistent:
                break
        jobs = await self._accounting.name_cancellers(jobs)
        if len(self._cancelled) > _MAX_RETAINED_CANCELLED:
            self._cancelled &= {job.id for job in jobs}
        if any(job.reason.startswith("Partition") for job in slurm_jobs):
            self._offer = None  # its limits may have changed
        queued_nodes = sum(
            slurm_job.requested_nodes
            for slurm_job, job in zip(slurm_jobs, jobs, strict=True)
            if job.state is LrmJobState.QUEUED
        )
        error = "; ".join(filter(None, (offer.error, self._control.submit_error())))
        shared = partly_used_nodes(nodes, offer, not_counted) if offer.shares else None
        snapshot = make_snapshot(nodes, jobs, offer, queued_nodes, self._groups, shared)
        notices = snapshot.notices
        if unreadable:
            first = quote_line(unreadable[0])
            notices = (*notices, f"squeue prints {len(unreadable)} lines that cannot be read: {first}")
        return replace(snapshot, submit_error=error, notices=notices, unreadable=len(unreadable))

    def _common_options(self, part: NodeRequirement | None = None) -> list[str]:
        """Return the options of every job; ``part``: the requested part of each node, for a job that shares nodes."""
        options = ["--ntasks-per-node=1", f"--cpus-per-task={part.cores}" if part else "--exclusive", "--no-requeue"]
        if not any(option.partition("=")[0] in _MEMORY_OPTIONS for option in self._native_options):
            # The whole memory of each node, or that of the requested cores: not the site's default.
            options += self._memory_of_part(part) if part else ["--mem=0"]
        if self._settings.partition:
            options.append(f"--partition={self._settings.partition}")
        if self._settings.account:
            options.append(f"--account={self._settings.account}")
        return [*options, *self._native_options]

    def _memory_of_part(self, part: NodeRequirement) -> list[str]:
        """Return the memory of a job that shares nodes; by default the memory of its cores."""
        if part.memory:
            return [f"--mem={-(-part.memory >> 20)}M"]
        groups = [group for group in self._groups.groups if part.is_met_by(group)]
        per_core = min((memory for group in groups if (memory := group.memory_per_core)), default=0) >> 20
        return [f"--mem-per-cpu={per_core}M"] if per_core else []

    def _node_options(self, submission: LrmSubmission) -> list[str]:
        """Return options that restrict a job to the nodes that it may get, and the account that it chooses.

        They follow the configured options, since only the last one of an option counts. Slurm chooses by itself by
        features, GPUs and partition; nodes that only their class, cores, memory or name tell apart are excluded.
        """
        requirement, nodes = submission.requirement, self._known_nodes
        allowed = {"account": self._settings.allowed_account, "qos": self._settings.allowed_qos}
        reject_charges(requirement, allowed, is_mapped=self._folders.is_mapped)
        options = [
            f"--{name}={value}" for name in ("partition", "account", "qos") if (value := getattr(requirement, name))
        ]
        names = [node.name for node in nodes]
        admitted = self._groups.admitted_nodes(submission.node_class, requirement, submission.nodes, names)
        if admitted is None:
            return options
        chosen = [node for node in nodes if node.name in admitted]
        barred = [node for node in nodes if node.name not in admitted]
        features = self._constraint(submission, chosen)
        if features:
            options.append(f"--constraint={'&'.join(features)}")
            barred = [node for node in barred if node.features.issuperset(features)]
        if (gpus := requirement.gpus) and all(count_gpus(node.gpus, gpus.type) >= gpus.count for node in chosen):
            options.append(f"--gres=gpu:{gpus}")
            barred = [node for node in barred if count_gpus(node.gpus, gpus.type) >= gpus.count]
        if requirement.partition:
            barred = [node for node in barred if requirement.partition in node.partitions]
        if barred:
            excluded = {node.name for node in barred} | (self._offer.excluded if self._offer is not None else set())
            options.append(f"--exclude={compress_host_list(excluded)}")  # an argument has at most 128 KiB
        return options

    def _constraint(self, submission: LrmSubmission, chosen: Sequence[SlurmNode]) -> list[str]:
        """Return the features by which Slurm is to choose; none if the configured options already have some."""
        if self._offer is not None and self._offer.constraint:
            return []
        group = self._groups.select_class(submission.node_class, 0) if submission.node_class else None
        requested = (*submission.requirement.features, *([group.feature] if group and group.feature else ()))
        return [feature for feature in requested if all(feature in node.features for node in chosen)]

    async def _reject_size(self, submission: LrmSubmission) -> None:
        """Raise ``SiteRejected`` for a number of nodes that Slurm never gives to one job.

        Slurm may accept such a job and never start it, and has the same message for too few nodes as for too many.
        """
        offer = await self._current_offer()
        min_nodes = offer.next_size(submission.nodes, submission.requirement.partition)
        if submission.nodes < min_nodes:
            limit, hint = f"{offer.description} gives a job at least {min_nodes}", f"ask for at least {min_nodes} nodes"
            reject_size(submission.nodes, limit, hint, SiteFault.UNSUITABLE, "few")
        is_particular = submission.node_class or submission.requirement.matching_part is not None
        if submission.nodes > self._max_job_nodes or (is_particular and not self._known_nodes):
            await self._read_nodes(offer)
        if submission.nodes > (max_nodes := min(self._total, self._max_job_nodes)):
            verb = "has" if max_nodes == self._total else "gives a job at most"
            limit = f"{offer.description} {verb} {max_nodes}"
            reject_size(submission.nodes, limit, f"ask for at most {max_nodes} nodes")

    async def _account_of(self, uid: int) -> str | None:
        """Return the account of a uid that runs grid jobs; empty for the agent's account, None for other users."""
        return "" if uid == os.getuid() else (await self._folders.account_names()).get(uid)

    async def _read_accounting(self, name: str, user: str) -> list[SlurmJob]:
        """Return jobs of this name in Slurm's accounting; empty if there is no accounting."""
        options = (f"--name={name}", f"--starttime={_ACCOUNTING_SINCE}", "--format=JobIDRaw,State,UID,JobName")
        try:
            answer = await self._commands.run_checked(
                "sacct", "--noheader", "--parsable2", "--allocations", *options, user=user
            )
        except SiteError:
            return []
        return read_lines(answer.output)

    async def _current_offer(self) -> Offer:
        """Return partitions and limits for grid jobs; read them anew when they are too old."""
        now = self._clock.monotonic()
        if self._offer is None or now > self._offer_read_at + OFFER_MAX_AGE_S:
            offer = await read_offer(self._commands, self._settings.partition, self._native_options)
            self._offer = await read_sharing(self._commands, offer) if self._settings.share else offer
            self._offer_read_at = now
        if not self._folders.is_mapped and (now >= self._limit_until or self._offer.limit.free_nodes < MAX_NODES):
            self._limit = await self._read_limit()
            self._limit_until = now + LIMIT_MAX_AGE_S
        if self._offer.limit != self._limit:
            self._offer = replace(self._offer, limit=self._limit)
        return self._offer

    async def _read_limit(self) -> AccountLimit:
        """Return the limits of the account of all jobs, as far as Slurm shows them."""
        account = self._settings.account or option_value(self._native_options, "--account", "-A") or ""
        qos = option_value(self._native_options, "--qos", "-q") or ""
        try:
            if not await self._accounting.enforces_limits():
                return NO_LIMIT
            options = ("flags=assoc,qos", f"users={own_account()}")
            answer = await self._commands.run_checked("scontrol", "show", "assoc_mgr", "--oneliner", *options)
        except SiteError:
            return self._limit
        return read_account_limit(answer.text, own_account(), account, split_names(qos))

    async def _read_nodes(self, offer: Offer) -> list[SlurmNode]:
        """Return all nodes that grid jobs may get."""
        names = [partition.name for partition in offer.partitions]
        answer = await self._commands.run_checked("sinfo", "--Node", f"--partition={','.join(names)}", "--json")
        if not answer.output.strip() and answer.errors.strip():
            raise self._commands.error("sinfo", answer)
        nodes = offer.select_nodes(read_nodes(answer.output, names))
        if not nodes:
            raise SiteUnavailable(
                f"sinfo shows no nodes in {offer.description}",
                hint="set the cluster's partition to one that sinfo --Node lists",
            )
        self._total, self._max_job_nodes = len(nodes), offer.max_job_nodes(nodes)
        if nodes != self._known_nodes:  # their properties, whatever their states
            self._known_nodes, self._groups = nodes, group_nodes(nodes, self._settings.node_classes)
        return nodes

    async def _read_jobs(self) -> tuple[list[SlurmJob], list[bytes]]:
        """Return grid jobs, and the lines that cannot be read. Jobs of other users may be many, and are not queried."""
        accounts = await self._folders.account_names()
        answer = await self._squeue(("", *sorted(accounts.values())), "--noconvert", COLUMNS)
        jobs, unreadable = read_columns(answer.output, self._prefix, {os.getuid(), *accounts})
        return await self._add_hosts(jobs), unreadable

    async def _squeue(self, users: Iterable[str], *options: str) -> CommandResult:
        """Run squeue for the jobs of accounts; an empty name is the agent's own.

        Names are used, since Slurm up to 24.05 takes no number of 2³¹ and more, and converts ``--me`` to one. squeue
        skips an account that it does not know; its jobs must not be taken for ended ones.
        """
        names = [name or own_account() for name in users]
        answer = await self._commands.run_checked("squeue", f"--user={','.join(names)}", "--states=all", *options)
        for name in re.findall(r"Invalid user: (\S+)", answer.errors):
            exists = True
            if name != own_account():
                try:
                    await self._folders.run_as.accounts.find_account(name)
                except SiteRejected:
                    exists = False
            if exists:
                raise SiteUnavailable(f"squeue does not know the account {name}", hint="see getent passwd on this host")
        return answer

    async def _add_hosts(self, jobs: list[SlurmJob]) -> list[SlurmJob]:
        """Return the jobs; query the nodes of jobs with a list that did not fit into its column."""
        cut = ",".join(job.id for job in jobs if job.hosts_cut)
        if not cut:
            return jobs
        options = ("--states=all", "--noheader", f"--jobs={cut}", "--format=%i|%N")
        hosts = read_hosts((await self._commands.run_checked("squeue", *options)).output)
        if missing := next((job.id for job in jobs if job.hosts_cut and job.id not in hosts), ""):
            raise SiteUnavailable(f"squeue does not show the nodes of job {missing}")
        return [replace(job, nodes=hosts[job.id], hosts_cut=False) if job.hosts_cut else job for job in jobs]

    async def _read_configuration(self, *names: str) -> dict[str, float]:
        """Return numbers of Slurm's configuration; without those that cannot be read."""
        with contextlib.suppress(SiteError):
            text = (await self._commands.run_checked("scontrol", "show", "config")).text
            lines = re.findall(r"^(\w+)\s*=\s*(\d+)", text, re.MULTILINE)
            return {name: float(number) for name, number in lines if name in names}
        return {}

    async def _convert_job(self, job: SlurmJob, nodes: Sequence[SlurmNode], offer: Offer) -> LrmJob:
        """Convert a job of squeue, with the reason for its wait or the cause of its end."""
        state, user = job_state(job.words), await self._account_of(job.uid) or ""
        if state is LrmJobState.ENDED:
            end = job_end(job.words, job.code, job.signal, job.reason, cancelled_by_us=job.id in self._cancelled)
            return end.apply_to(LrmJob(job.id, job.name, state, job.nodes, user=user))
        fault, reason, starting = None, "", is_job_starting(job.words)
        if starting:
            reason = "Slurm makes its nodes ready"
        elif is_job_suspended(job.words):
            reason = SUSPENDED_TEXT.format("Slurm")
        elif state is LrmJobState.QUEUED:
            fault = waiting_fault(job.reason, has_several_partitions=len(offer.partitions) > 1)
            reason = f"Slurm will not start it: {job.reason}" if fault else waiting_text(job.reason)
            starting = _waits_for_starting_nodes(job, nodes)
        if starting and self._max_start_s is None:
            # After these seconds Slurm gives up a node that it has switched on.
            timeouts = await self._read_configuration("ResumeTimeout", "BatchStartTimeout")
            self._max_start_s = max(timeouts.get("ResumeTimeout", 0.0), RESUME_TIMEOUT_S)
            self._max_start_s += timeouts.get("BatchStartTimeout", 0.0)
        start_s = self._max_start_s or 0.0 if starting else 0.0
        limited = state is LrmJobState.QUEUED and is_account_limit(job.reason)
        return LrmJob(
            job.id, job.name, state, job.nodes, reason=reason, starting=start_s, fault=fault, user=user, limited=limited
        )


def _waits_for_starting_nodes(job: SlurmJob, nodes: Sequence[SlurmNode]) -> bool:
    """Return whether a queued job lacks only nodes that are starting."""
    try:
        missing = set(expand_host_list(unavailable_nodes(job.reason)))
    except ValueError:
        return False
    return bool(missing) and missing <= {node.name for node in nodes if is_node_starting(node.words)}


def make_snapshot(
    nodes: Sequence[SlurmNode],
    jobs: Sequence[LrmJob],
    offer: Offer,
    queued_nodes: int = 0,
    groups: NodeGroups = NO_GROUPS,
    shared: Sequence[SlurmNode] | None = None,
) -> LrmSnapshot:
    """Return a snapshot; ``queued_nodes`` is the number of nodes that queued grid jobs request.

    ``shared``: the partly used nodes that further jobs may share; None if jobs share no nodes.

    So many planned nodes count as idle, since the backfill scheduler may keep them for these jobs. No more nodes are
    idle than one job could have; the others are withheld.
    """
    used_nodes = {name for job in jobs if job.state in HOLDING for name in job.nodes}
    all_states = list(zip(nodes, node_states(nodes, offer), strict=True))
    states = [pair for pair in all_states if pair[0].name not in used_nodes]
    idle_nodes = [node for node, state in states if state == "idle"]
    planned = [node for node, state in states if state == "planned"]
    available = [*idle_nodes, *planned[:queued_nodes]]
    idle = offer.max_job_nodes(available, offer.limit.free_nodes)
    down = sum(state == "down" for _, state in states)
    max_nodes = offer.max_job_nodes(nodes)
    limits = []
    if 0 < max_nodes < len(nodes):
        limits.append(f"a job in {offer.description} gets at most {max_nodes} of its {len(nodes)} nodes")
    if offer.min_job_nodes > 1:
        limits.append(
            f"a job in {offer.description} gets at least {offer.min_job_nodes} nodes, and smaller ones are rejected"
        )
    if offer.exclusive_because:
        limits.append(f"the site's setting share has no effect: {offer.exclusive_because}")
    if offer.limit.free_nodes < len(available):
        limits.append(f"the limits of its account leave {format_nodes(offer.limit.free_nodes)} to further jobs")
    parts = list(shared or ())[
        : max(0, offer.max_job_nodes([*available, *(shared or ())], offer.limit.free_nodes) - idle)
    ]
    return LrmSnapshot(
        total=len(nodes),
        idle=idle,
        background=len(states) - len(available) - down,
        down=down,
        jobs=tuple(jobs),
        notices=(*limits, *groups.notices),
        node_classes=groups.report(
            lambda names: offer.max_job_nodes([n for n in available if n.name in names], offer.limit.free_nodes),
            {node.name: node.used for node in parts if node.used is not None},
        ),
        shares=shared is not None,
        withheld=len(available) - idle,
        job_sizes=offer.job_sizes,
        reservations=report_reservations(
            ((r.name, r.nodes, r.begins_at, r.ends_at) for r in offer.others if r.begins_at is not None),
            {n.name for n in nodes},
            {n.name for n in available},
            offer.default_walltime,
        ),
        nodes=groups.list_nodes(
            {node.name: "held" if node.name in used_nodes else _LISTED_STATES[state] for node, state in all_states},
            {
                node.name: ": ".join(filter(None, ("+".join(sorted(node.words)).lower(), node.reason)))
                for node, state in states
                if state not in ("idle", "busy") or node.reason or node.words & NODE_RESERVED
            },
        ),
    )


_LISTED_STATES: Mapping[NodeState, ListedState] = {"idle": "idle", "planned": "local", "busy": "local", "down": "down"}
