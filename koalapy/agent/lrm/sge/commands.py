"""Grid Engine's own commands: where they are, and what their complaints mean."""

import asyncio
import getpass
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from koalapy.agent.accounts.accounts import RunAs
from koalapy.agent.core.environment import inherited
from koalapy.agent.lrm.commands import COMMAND_TIMEOUT, CommandResult
from koalapy.agent.lrm.sge.states import AccountingRecord, read_accounting
from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable

FORCED_DELETE_HINT = (
    "have a manager of Grid Engine run qdel -f; set ENABLE_FORCED_QDEL=TRUE in its qmaster_params (qconf -mconf), "
    "so that the agent may"
)
FORCED_DELETE_TIMEOUT = 90.0
"""Seconds that ``qdel -f`` may take: it waits for the hosts first, as long as it takes to give them up."""
QACCT_TIMEOUT = 60.0
"""Seconds that ``qacct`` may take: it reads the accounting of all that ever ran."""
_OUT_OF_REACH = re.compile(r"commlib|qmaster|communication|cannot connect|can't connect|timeout", re.IGNORECASE)


class SgeCommands:
    """Runs them under English words, and without a wrapper script where there is one: that costs ten times as much."""

    def __init__(self, run_as: RunAs) -> None:
        self._run_as = run_as
        self._folder: str | None = None
        self._environment = inherited(prefixes=("SGE_",)) | {"LC_ALL": "C"}

    async def find(self) -> None:
        """Find where the programs are. Raises ``SiteRejected`` when there are none."""
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
                answer = await self._run_as.run("", f"{root}/util/arch", environment=self._environment)
                architecture = answer.output.decode(errors="replace").strip()
            except SiteRejected:  # then the wrapper it is
                return
            folder = f"{root}/bin/{architecture}"
            if await asyncio.to_thread(_is_program, f"{folder}/qstat"):
                self._folder = folder

    async def version(self) -> str:
        """As Grid Engine says it itself."""
        return (await self.run("qstat", "-help")).output.decode(errors="replace").split("\n")[0].strip()

    async def run(
        self, command: str, *arguments: str, timeout: float = COMMAND_TIMEOUT, user: str = ""
    ) -> CommandResult:
        """An answer whatever its exit code, unless the master is out of reach (``SiteUnavailable``)."""
        if self._folder is None:
            await self.find()
        answer = await self._run_as.run(
            user, f"{self._folder}/{command}", *arguments, environment=self._environment, timeout=timeout
        )
        if answer.code != 0 and _OUT_OF_REACH.search(answer.error_line):
            raise SiteUnavailable(f"{command}: {answer.error_line}")
        return answer

    async def ask(self, command: str, *arguments: str) -> bytes:
        """An answer; anything else is ``SiteUnavailable``."""
        answer = await self.run(command, *arguments)
        if answer.code != 0:
            raise SiteUnavailable(f"{command}: {answer.error_line}")
        return answer.output

    async def delete_by_force(self, job: str, user: str) -> None:
        """Have the master forget a job that it was told to delete, as `user`; ``SiteRejected`` where it may not."""
        answer = await self.run("qdel", "-f", job, timeout=FORCED_DELETE_TIMEOUT, user=user)
        output = answer.output.decode(errors="replace") + answer.errors
        # It exits with 1 also when it has been done.
        if answer.code != 0 and not re.search(r"registered|forced the|has forced|has deleted|does not exist", output):
            raise SiteRejected(f"qdel -f: {answer.error_line}", hint=FORCED_DELETE_HINT, value=job)

    async def may_delete_by_force(self) -> bool:
        """Return whether owners of jobs, or this account as a manager, may delete them with ``qdel -f``."""
        configuration = (await self.ask("qconf", "-sconf")).decode(errors="replace")
        managers = (await self.ask("qconf", "-sm")).decode(errors="replace").split()
        parameters = re.search(r"^qmaster_params\s+(.*)", configuration, re.MULTILINE)
        allowed = re.search(r"ENABLE_FORCED_QDEL\s*=\s*(true|1)\b", parameters[1] if parameters else "", re.IGNORECASE)
        return bool(allowed) or getpass.getuser() in managers

    async def accounting(self, owner: str, what: str) -> Sequence[AccountingRecord]:
        """What is written of a job (by id or name), oldest first; nothing where there is no accounting yet."""
        answer = await self.run("qacct", "-o", owner, "-j", what, timeout=QACCT_TIMEOUT)
        if answer.code != 0:
            return []
        found = read_accounting(answer.output.decode(errors="replace"))
        return [each for each in found if each.owner == owner and what in (each.job, each.name)]


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
    words = selected.output.decode(errors="replace").split()
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
        known = (await commands.run("qconf", "-spl")).output.decode(errors="replace").split()
        raise SiteRejected(
            f"there is no parallel environment {name}",
            field="parallel_environment",
            value=name,
            fault=SiteFault.SITE,
            hint=f"there is {', '.join(known)}" if known else "make one with qconf -ap",
        )
    lines = (line.split(None, 1) for line in answer.output.decode(errors="replace").splitlines())
    return {words[0]: words[1].strip() for words in lines if len(words) == 2}


def _is_program(path: str) -> bool:
    """Not a script."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False
