"""Grid Engine's own commands: where they are, what their complaints mean, jobs submitted by them, and the check."""

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
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable

FORCED_DELETE_HINT = (
    "have a manager of Grid Engine run qdel -f; set ENABLE_FORCED_QDEL=TRUE in its qmaster_params (qconf -mconf), "
    "so that the agent may"
)
FORCED_DELETE_TIMEOUT = 90.0
"""Seconds that ``qdel -f`` may take: it waits for the hosts first, as long as it takes to give them up."""
QACCT_TIMEOUT = 60.0
"""Seconds that ``qacct`` may take: it reads the accounting of all that ever ran."""
_OUT_OF_REACH = re.compile(r"commlib|qmaster|communication|cannot connect|can't connect|timeout", re.IGNORECASE)
_GONE = ("does not exist", "already in deletion", "registered the job")
_HINTS = (
    ("parallel environment", "set the cluster's parallel_environment to one of qconf -spl"),
    ("unknown queue", "set the cluster's queue to one of qconf -sql"),
    ("no suitable queues", "see whether queue, parallel environment and native_specification go together (qsub -w v)"),
    ("unknown resource", "correct the cluster's native_specification"),
    ("option", "correct the cluster's native_specification"),
    ("not allowed to submit", "make this host a submit host (qconf -as)"),
    ("submit host", "make this host a submit host (qconf -as)"),
)


class SgeCommands(Commands):
    """Runs them under English words, and without a wrapper script where there is one: that costs ten times as much."""

    def __init__(self, run_as: RunAs) -> None:
        super().__init__(run_as.run, inherited_environment(prefixes=("SGE_",)) | {"LC_ALL": "C"}, _OUT_OF_REACH, _HINTS)
        self._folder: str | None = None

    async def find_programs(self) -> None:
        """Find where the programs are. Raise ``SiteRejected`` when there are none."""
        found = shutil.which("qstat")
        if found is None:
            raise SiteRejected(
                "there is no qstat on the agent's PATH",
                fault=SiteFault.SITE,
                hint="install Grid Engine's commands on this host, or put their folder on the agent's PATH",
            )
        self._folder = os.path.dirname(found)
        root = os.environ.get("SGE_ROOT", "")
        if root and not await asyncio.to_thread(_is_program, found):
            try:
                architecture = (await super().run(f"{root}/util/arch")).text.strip()
            except SiteRejected:  # then the wrapper it is
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
        """Return the answer of a command that looks; ``SiteUnavailable`` if it fails, whatever it says."""
        answer = await self.run(command, *arguments, user=user)
        if answer.code:
            raise SiteUnavailable(f"{command}: {answer.error_line}")
        return answer

    async def delete_by_force(self, job: str, user: str) -> None:
        """Have the master forget a job that it was told to delete, as `user`; ``SiteRejected`` where it may not."""
        answer = await self.run("qdel", "-f", job, timeout=FORCED_DELETE_TIMEOUT, user=user)
        # It exits with 1 also when it has been done.
        done = re.search(r"registered|forced the|has forced|has deleted|does not exist", answer.text + answer.errors)
        if answer.code and not done:
            raise SiteRejected(f"qdel -f: {answer.error_line}", hint=FORCED_DELETE_HINT, value=job)

    async def may_delete_by_force(self) -> bool:
        """Return whether owners of jobs, or this account as a manager, may delete them with ``qdel -f``."""
        configuration = (await self.run_checked("qconf", "-sconf")).text
        managers = (await self.run_checked("qconf", "-sm")).text.split()
        parameters = re.search(r"^qmaster_params\s+(.*)", configuration, re.MULTILINE)
        allowed = re.search(r"ENABLE_FORCED_QDEL\s*=\s*(true|1)\b", parameters[1] if parameters else "", re.IGNORECASE)
        return bool(allowed) or getpass.getuser() in managers

    async def accounting(self, owner: str, what: str) -> Sequence[AccountingRecord]:
        """What is written of a job (by id or name), oldest first; nothing where there is no accounting yet."""
        answer = await self.run("qacct", "-o", owner, "-j", what, timeout=QACCT_TIMEOUT)
        if answer.code != 0:
            return []
        found = read_accounting(answer.text)
        return [each for each in found if each.owner == owner and what in (each.job, each.name)]


class QsubControl(JobControl):
    """Submits jobs and ends them by ``qsub`` and ``qdel``, each as its account."""

    def __init__(self, commands: SgeCommands) -> None:
        self._commands = commands

    async def submit_job(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        own = ("-terse", "-N", submission.name, "-wd", str(submission.workdir), "-o", str(submission.output), "-j", "y")
        answer = await self._commands.run("qsub", *own, *native, str(script), user=submission.user)
        if answer.code:
            raise self._commands.error("qsub", answer)
        return parse_job_number("qsub", answer)

    async def cancel_job(self, job: str, user: str = "") -> None:
        answer = await self._commands.run("qdel", job, user=user)
        if answer.code and not any(words in answer.text + answer.errors for words in _GONE):
            raise self._commands.error("qdel", answer, job)

    async def check_setup(self, nodes: int = 1) -> Sequence[Finding]:
        try:
            await self._commands.run("qsub", "-help")
        except SiteError as error:
            return [Finding("qsub", False, error.message, error.hint)]
        return [Finding("qsub", True, "hands jobs in, and qdel ends them")]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a parallel environment's jobs may run: the queue instances, and the slots that a job has on each node."""

    slots: int
    instances: frozenset[tuple[str, str]]

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset(host for _, host in self.instances)


async def read_layout(commands: SgeCommands, environment: str, queue: str | None) -> Layout:
    """Raises ``SiteRejected`` when jobs on whole nodes cannot be had this way, with the way out."""
    attributes = await parallel_environment(commands, environment)
    rule = attributes.get("allocation_rule", "")
    if not rule.isdecimal() or int(rule) < 1:
        raise SiteRejected(
            f"parallel environment {environment} does not give whole nodes: its allocation_rule is {rule or 'unset'}",
            hint="set allocation_rule to the slots of a node (qconf -mp)",
            value=rule,
            fault=SiteFault.SITE,
        )
    selected = await commands.run("qselect", "-pe", environment, *(("-q", queue) if queue else ()))
    words = selected.text.split()
    instances = [tuple(word.split("@", 1)) for word in words if "@" in word]
    if selected.code != 0 or not instances:
        where = f"the queue {queue} does not offer" if queue else "no queue offers"
        raise SiteRejected(
            f"{where} the parallel environment {environment}",
            fault=SiteFault.SITE,
            hint="see qconf -sql and qconf -sq QUEUE; its pe_list must name it (qconf -mq)",
        )
    return Layout(int(rule), frozenset((queue, host) for queue, host in instances))


async def parallel_environment(commands: SgeCommands, name: str) -> dict[str, str]:
    """Its attributes. Raises ``SiteRejected`` when there is none of that name."""
    answer = await commands.run("qconf", "-sp", name)
    if answer.code != 0:
        known = (await commands.run("qconf", "-spl")).text.split()
        raise SiteRejected(
            f"there is no parallel environment {name}",
            field="parallel_environment",
            value=name,
            fault=SiteFault.SITE,
            hint=f"there is {', '.join(known)}" if known else "make one with qconf -ap",
        )
    lines = (line.split(None, 1) for line in answer.text.splitlines())
    return {words[0]: words[1].strip() for words in lines if len(words) == 2}


def _is_program(path: str) -> bool:
    """Not a script."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


async def check_grid_engine(commands: SgeCommands, environment: str, queue: str | None) -> list[Finding]:
    """Return everything looked at, in order; what rests on something broken is left out."""
    found: list[Finding] = []
    try:
        await commands.find_programs()
        found.append(_root())
        await commands.run_checked("qconf", "-sql")
        found.append(Finding("master", True, f"answers; {await commands.read_version()}"))
        found.append(await _submit_host(commands))
        found.append(await _slaves(commands, environment))
        found.append(await _forced_delete(commands))
        found += await _nodes(commands, environment, queue)
    except SiteError as error:
        found.append(Finding("Grid Engine", False, error.message, error.hint or "see that sge_qmaster runs"))
    return found


def _root() -> Finding:
    root, cell = os.environ.get("SGE_ROOT", ""), os.environ.get("SGE_CELL", "default")
    if os.path.exists(f"{root}/{cell}/common/bootstrap"):
        return Finding("SGE_ROOT", True, f"{root}, cell {cell}")
    wrong = f"there is no cell {root}/{cell}" if root else "not set"
    return Finding("SGE_ROOT", False, wrong, "set SGE_ROOT (Debian: /var/lib/gridengine) and SGE_CELL for the agent")


async def _submit_host(commands: SgeCommands) -> Finding:
    hosts = (await commands.run_checked("qconf", "-ss")).text.split()
    own = socket.gethostname()
    if short_name(own) in map(short_name, hosts):
        return Finding("submit host", True, f"{own} is one")
    return Finding("submit host", False, f"{own} is none of {', '.join(hosts) or 'none'}", f"qconf -as {own}")


async def _slaves(commands: SgeCommands, environment: str) -> Finding:
    attributes = await parallel_environment(commands, environment)
    slots, rule = attributes.get("slots", "?"), attributes.get("allocation_rule", "?")
    found = f"{environment}: {slots} slots, {rule} on each node"
    if attributes.get("control_slaves", "").upper() == "TRUE":
        return Finding("parallel environment", True, found)
    hint = f"set control_slaves TRUE (qconf -mp {environment})"
    return Finding("parallel environment", False, f"{environment} cannot start anything on further nodes", hint)


async def _forced_delete(commands: SgeCommands) -> Finding:
    if await commands.may_delete_by_force():
        return Finding("qdel -f", True, "allowed for jobs that a restarted master keeps")
    problem = "not allowed: jobs that a restarted master keeps hold their nodes"
    return Finding("qdel -f", False, problem, FORCED_DELETE_HINT)


async def _nodes(commands: SgeCommands, environment: str, queue: str | None) -> Sequence[Finding]:
    layout = await read_layout(commands, environment, queue)
    queues = sorted({name for name, _ in layout.instances})
    found = [Finding("queues", True, ", ".join(queues))]
    listing = read_listing((await commands.run_checked("qstat", "-f", "-u", "nobody", "-xml")).output)
    instances = [each for each in listing.instances if (each.queue, each.host) in layout.instances]
    if odd := [each for each in instances if each.total != layout.slots]:
        example = f"{odd[0].queue}@{odd[0].host} has {odd[0].total} slots, jobs take {layout.slots}"
        hint = f"give them {layout.slots} slots, or a parallel environment of their own"
        found.append(Finding("whole nodes", False, f"{len(odd)} queue instances would be shared: {example}", hint))
    else:
        found.append(Finding("whole nodes", True, f"{layout.slots} slots each"))
    down = {each.host: each.states for each in instances if queue_state(each.states) == "down"}
    words = ", ".join(f"{host} ({states})" for host, states in sorted(down.items())[:5])
    total = len(layout.hosts)
    state = f"{total}, of which {len(down)} are down: {words}" if down else f"{total}, all up"
    found.append(Finding("nodes", len(down) < total, state, "see qstat -f -explain acE" if down else ""))
    return found
