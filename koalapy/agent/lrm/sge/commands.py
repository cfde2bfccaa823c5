"""Run Grid Engine's commands, interpret their errors, submit jobs by ``qsub``, and check the installation."""

import asyncio
import getpass
import os
import re
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from koalapy.agent.accounts import RunAs
from koalapy.agent.core.settings import inherited_environment
from koalapy.agent.lrm.commands import COMMAND_TIMEOUT_S, CommandResult, Commands, parse_job_number
from koalapy.agent.lrm.port import Finding, JobControl, LrmSubmission
from koalapy.agent.lrm.sge.answers import AccountingRecord, queue_state, read_accounting, read_listing, short_name
from koalapy.model.bounds import MAX_NODES
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable

FORCED_DELETE_HINT = (
    "have a manager of Grid Engine run qdel -f; set ENABLE_FORCED_QDEL=TRUE in its qmaster_params (qconf -mconf), "
    "so that the agent may"
)
FORCED_DELETE_TIMEOUT_S = 90.0
"""``qdel -f`` first waits until it gives up the hosts."""
QACCT_TIMEOUT_S = 60.0
"""``qacct`` reads the accounting of all jobs that ever ran."""
_OUT_OF_REACH = re.compile(
    r"(?:^|; )(?:(?:critical )?error: |Unable to run job: )*"
    r"(?:commlib |communication error|unable to (?:contact|send|connect)|can(?:no|')t connect|failed receiving )",
    re.IGNORECASE,
)
"""Beginnings of lines about an unreachable master. Other text of a line may be a site's or a job's own."""
_ENDED_JOB_PHRASES = ("does not exist", "already in deletion", "registered the job")


class SgeCommands(Commands):
    """Runs Grid Engine's commands in English, and bypasses wrapper scripts, which take ten times as long."""

    def __init__(self, run_as: RunAs) -> None:
        super().__init__(run_as.run, inherited_environment(prefixes=("SGE_",)) | {"LC_ALL": "C"}, _OUT_OF_REACH)
        self._folder: str | None = None

    async def find_programs(self) -> None:
        """Find the folder of the programs. Raise ``SiteRejected`` if there is none."""
        qstat = shutil.which("qstat")
        if qstat is None:
            raise SiteRejected(
                "qstat is not on the agent's PATH",
                fault=SiteFault.SITE,
                hint="install Grid Engine's commands on this host, or put their folder on the agent's PATH",
            )
        self._folder = os.path.dirname(qstat)
        root = os.environ.get("SGE_ROOT", "")
        if root and not await asyncio.to_thread(_is_program, qstat):
            try:
                architecture = (await super().run(f"{root}/util/arch")).text.strip()
            except SiteRejected:  # then use the wrapper
                return
            folder = f"{root}/bin/{architecture}"
            if await asyncio.to_thread(_is_program, f"{folder}/qstat"):
                self._folder = folder

    async def read_version(self) -> str:
        return (await self.run("qstat", "-help")).text.split("\n")[0].strip()

    async def run(
        self, command: str, *arguments: str, user: str = "", timeout: float = COMMAND_TIMEOUT_S
    ) -> CommandResult:
        if self._folder is None:
            await self.find_programs()
        return await super().run(f"{self._folder}/{command}", *arguments, user=user, timeout=timeout)

    async def run_checked(self, command: str, *arguments: str, user: str = "") -> CommandResult:
        """Run a query and return its result. Raise ``SiteUnavailable`` if it fails for any reason."""
        answer = await self.run(command, *arguments, user=user)
        if answer.code:
            raise SiteUnavailable(f"{command}: {answer.error_line}")
        return answer

    async def delete_by_force(self, job: str, user: str) -> None:
        """Make the master forget a deleted job. Raise ``SiteRejected`` if ``user`` may not do that."""
        answer = await self.run("qdel", "-f", job, timeout=FORCED_DELETE_TIMEOUT_S, user=user)
        # It exits with 1 even if it succeeds.
        success = re.search(r"registered|forced the|has forced|has deleted|does not exist", answer.text + answer.errors)
        if answer.code and not success:
            raise SiteRejected(f"qdel -f: {answer.error_line}", hint=FORCED_DELETE_HINT, value=job)

    async def may_delete_by_force(self) -> bool:
        """Return whether ``qdel -f`` is allowed to owners of jobs, or to this account as a manager."""
        configuration = (await self.run_checked("qconf", "-sconf")).text
        managers = (await self.run_checked("qconf", "-sm")).text.split()
        line = re.search(r"^qmaster_params\s+(.*)", configuration, re.MULTILINE)
        setting = re.search(r"ENABLE_FORCED_QDEL\s*=\s*(true|1)\b", line[1] if line else "", re.IGNORECASE)
        return bool(setting) or getpass.getuser() in managers

    async def read_job_accounting(self, owner: str, job: str) -> Sequence[AccountingRecord]:
        """Return the accounting records of a job, by id or name, oldest first; empty if there are none yet."""
        answer = await self.run("qacct", "-o", owner, "-j", job, timeout=QACCT_TIMEOUT_S)
        if answer.code != 0:
            return []
        records = read_accounting(answer.text)
        return [record for record in records if record.owner == owner and job in (record.job, record.name)]


class QsubControl(JobControl):
    """Submits jobs by ``qsub``, and cancels them by ``qdel``, as their accounts."""

    def __init__(self, commands: SgeCommands) -> None:
        self._commands = commands

    async def submit_job(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        files = ("-wd", str(submission.workdir), "-o", str(submission.output), "-j", "y")
        options = ("-terse", "-N", submission.name, *files, *native)
        answer = await self._commands.run("qsub", *options, str(script), user=submission.user)
        if answer.code:
            raise self._commands.error("qsub", answer)
        return parse_job_number("qsub", answer)

    async def cancel_job(self, job: str, user: str = "") -> None:
        answer = await self._commands.run("qdel", job, user=user)
        if answer.code and not any(phrase in answer.text + answer.errors for phrase in _ENDED_JOB_PHRASES):
            raise self._commands.error("qdel", answer, job)

    async def check_setup(self, nodes: int = 1) -> Sequence[Finding]:
        try:
            await self._commands.run("qsub", "-help")
        except SiteError as error:
            return [Finding("qsub", False, error.message, error.hint)]
        return [Finding("qsub", True, "submits jobs, and qdel cancels them")]


@dataclass(frozen=True, slots=True)
class Layout:
    """The queue instances of a parallel environment, as (queue, host), and the slots of a job on each node."""

    slots: int
    instances: frozenset[tuple[str, str]]
    most: int = MAX_NODES
    """Nodes that the parallel environment gives to all of its jobs together."""

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset(host for _, host in self.instances)


async def read_layout(commands: SgeCommands, environment: str, queue: str | None) -> Layout:
    """Read the layout. Raise ``SiteRejected`` if jobs cannot get whole nodes in this parallel environment."""
    attributes = await read_parallel_environment(commands, environment)
    rule = attributes.get("allocation_rule", "")
    if not rule.isdecimal() or int(rule) < 1:
        raise SiteRejected(
            f"parallel environment {environment} does not give whole nodes: its allocation_rule is {rule or 'unset'}",
            hint="set allocation_rule to the slots of a node (qconf -mp)",
            value=rule,
            fault=SiteFault.SITE,
        )
    answer = await commands.run("qselect", "-pe", environment, *(("-q", queue) if queue else ()))
    lines = [line.strip() for line in answer.text.splitlines()]
    instances = [tuple(line.split("@", 1)) for line in lines if re.fullmatch(r"[^\s@]+@[^\s@]+", line)]
    if answer.code != 0 or not instances:
        subject = f"the queue {queue} does not offer" if queue else "no queue offers"
        raise SiteRejected(
            f"{subject} the parallel environment {environment}",
            fault=SiteFault.SITE,
            hint="see qconf -sql and qconf -sq QUEUE; its pe_list must name it (qconf -mq)",
        )
    slots = attributes.get("slots", "")
    max_nodes = int(slots) // int(rule) if slots.isdecimal() else MAX_NODES
    return Layout(int(rule), frozenset((queue, host) for queue, host in instances), min(max_nodes, MAX_NODES))


async def read_parallel_environment(commands: SgeCommands, name: str) -> dict[str, str]:
    """Return the attributes of a parallel environment. Raise ``SiteRejected`` if it does not exist."""
    answer = await commands.run("qconf", "-sp", name)
    if answer.code != 0:
        names = (await commands.run("qconf", "-spl")).text.split()
        raise SiteRejected(
            f"there is no parallel environment {name}",
            field="parallel_environment",
            value=name,
            fault=SiteFault.SITE,
            hint=f"use one of {', '.join(names)}" if names else "make one with qconf -ap",
        )
    pairs = (line.split(None, 1) for line in answer.text.splitlines())
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def _is_program(path: str) -> bool:
    """Return whether a file is an executable program and not a script."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


async def check_grid_engine(commands: SgeCommands, environment: str, queue: str | None) -> list[Finding]:
    """Check programs, master, submit host and queues. Skip the checks that depend on a failed one."""
    findings: list[Finding] = []
    try:
        await commands.find_programs()
        findings.append(_check_root())
        await commands.run_checked("qconf", "-sql")
        findings.append(Finding("master", True, f"answers; {await commands.read_version()}"))
        hosts = (await commands.run_checked("qconf", "-ss")).text.split()
        host = socket.gethostname()
        if short_name(host) in map(short_name, hosts):
            findings.append(Finding("submit host", True, f"{host} is one"))
        else:
            problem = f"{host} is not among {', '.join(hosts) or 'none'}"
            findings.append(Finding("submit host", False, problem, f"qconf -as {host}"))
        findings.append(await _check_parallel_environment(commands, environment))
        if await commands.may_delete_by_force():
            findings.append(Finding("qdel -f", True, "allowed for jobs that a restarted master keeps"))
        else:
            problem = "not allowed: jobs that a restarted master keeps hold their nodes"
            findings.append(Finding("qdel -f", False, problem, FORCED_DELETE_HINT))
        findings += await _check_nodes(commands, environment, queue)
    except SiteError as error:
        findings.append(Finding("Grid Engine", False, error.message, error.hint or "see that sge_qmaster runs"))
    return findings


def _check_root() -> Finding:
    """Check that the variables ``SGE_ROOT`` and ``SGE_CELL`` lead to a Grid Engine installation."""
    root, cell = os.environ.get("SGE_ROOT", ""), os.environ.get("SGE_CELL", "default")
    if os.path.exists(f"{root}/{cell}/common/bootstrap"):
        return Finding("SGE_ROOT", True, f"{root}, cell {cell}")
    problem = f"there is no cell {root}/{cell}" if root else "not set"
    hint = "set SGE_ROOT (Debian: /var/lib/gridengine) and SGE_CELL for the agent"
    return Finding("SGE_ROOT", False, problem, hint)


async def _check_parallel_environment(commands: SgeCommands, environment: str) -> Finding:
    """Check that a parallel environment lets jobs start processes on their further nodes."""
    attributes = await read_parallel_environment(commands, environment)
    slots, rule = attributes.get("slots", "?"), attributes.get("allocation_rule", "?")
    if attributes.get("control_slaves", "").upper() == "TRUE":
        return Finding("parallel environment", True, f"{environment}: {slots} slots, {rule} on each node")
    hint = f"set control_slaves TRUE (qconf -mp {environment})"
    return Finding("parallel environment", False, f"{environment} cannot start processes on further nodes", hint)


async def _check_nodes(commands: SgeCommands, environment: str, queue: str | None) -> Sequence[Finding]:
    """Check that all queue instances have the slots of whole nodes, and that some host is up."""
    layout = await read_layout(commands, environment, queue)
    findings = [Finding("queues", True, ", ".join(sorted({name for name, _ in layout.instances})))]
    listing = read_listing((await commands.run_checked("qstat", "-f", "-u", "nobody", "-xml")).output)
    instances = [instance for instance in listing.instances if (instance.queue, instance.host) in layout.instances]
    if uneven := [instance for instance in instances if instance.total != layout.slots]:
        first = uneven[0]
        example = f"{first.queue}@{first.host} has {first.total} slots, jobs take {layout.slots}"
        hint = f"give them {layout.slots} slots, or a separate parallel environment"
        findings.append(
            Finding("whole nodes", False, f"{len(uneven)} queue instances would be shared: {example}", hint)
        )
    else:
        findings.append(Finding("whole nodes", True, f"{layout.slots} slots each"))
    down = {instance.host: instance.states for instance in instances if queue_state(instance.states) == "down"}
    hosts = ", ".join(f"{host} ({states})" for host, states in sorted(down.items())[:5])
    total = len(layout.hosts)
    result = f"{total}, of which {len(down)} are down: {hosts}" if down else f"{total}, all up"
    findings.append(Finding("nodes", len(down) < total, result, "see qstat -f -explain acE" if down else ""))
    return findings
