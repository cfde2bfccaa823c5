"""Slurm's own commands: what environment they get, what their complaints mean, and jobs submitted by ``sbatch``."""

import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from koalapy.agent.accounts.accounts import RunAs
from koalapy.agent.core.environment import inherited
from koalapy.agent.lrm.commands import CommandResult, printed_job
from koalapy.agent.lrm.port import Finding, LrmSubmission
from koalapy.agent.lrm.refusals import fault_of
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable

_TRANSIENT = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection (refused|reset|timed out)|connection failure"
    r"|Zero Bytes were transmitted|standby mode|Transport endpoint|try again|temporarily un|Incomplete message"
    r"|Munge|munge|authentication error|Insane message length|Unexpected message|I/O error|Broken pipe"
    r"|controller is not|Unable to establish|Name or service not known|name resolution|DNS SRV|Required partition not",
    re.IGNORECASE,
)
_HINTS = (
    ("json", "this Slurm was built without its JSON plugin: install a package of it that was built with json-c"),
    ("account", "set the cluster's account to one that this user may charge in its partition"),
    ("partition", "set the cluster's partition to one of those that sinfo lists"),
    ("qos", "correct --qos in the cluster's native_specification"),
    ("time limit", "ask for a shorter walltime"),
    ("node count", "ask for a number of nodes from the partition's MinNodes to its MaxNodes (scontrol show partition)"),
    ("node configuration", "ask for fewer nodes, or correct the cluster's native_specification"),
    ("option", "correct the cluster's native_specification"),
)
_UNKNOWN_JOB = re.compile(r"Invalid job id|already complet", re.IGNORECASE)


def environment() -> dict[str, str]:
    """What Slurm's commands, and by them the jobs, get of this process's environment: no secrets, no defaults."""
    return inherited(["SLURM_CONF"])


async def ask(run_as: RunAs, *argv: str, user: str = "") -> CommandResult:
    """Run one of Slurm's commands and return its answer; raise ``SiteError`` with its own words if it failed."""
    answer = await run_as.run(user, *argv, environment=environment())
    if answer.code != 0:
        raise_error(argv[0], answer)
    return answer


def raise_error(command: str, answer: CommandResult) -> NoReturn:
    """Raise what an answer that did not go well means."""
    text = error_text(command, answer)
    if answer.code < 0:
        raise SiteUnavailable(f"{command} was killed by signal {-answer.code}")
    if _TRANSIENT.search(text):
        raise SiteUnavailable(f"{command}: {text}", hint="see that slurmctld and munged run and can be reached")
    lowered = text.lower()
    hint = next((hint for word, hint in _HINTS if word in lowered), "")
    raise SiteRejected(f"{command}: {text}", hint=hint, fault=SiteFault(fault_of(text)))


def error_text(command: str, answer: CommandResult) -> str:
    """All that a command had to say, in one line."""
    lines = (answer.errors or answer.output.decode(errors="replace")).splitlines()
    texts = [re.sub(rf"^{command}: (error|fatal): ", "", line).strip() for line in lines]
    return "; ".join(dict.fromkeys(line for line in texts if line)) or f"exit code {answer.code}"


def time_limit(walltime: float) -> str:
    """Seconds as ``H:MM:00``, the one form that sbatch and its DRMAA library both take: whole minutes, for which Slurm
    counts, and at least one, for 0 is no limit at all."""
    hours, minutes = divmod(max(1, math.ceil(walltime / 60)), 60)
    return f"{hours}:{minutes:02}:00"


def find_commands(*names: str) -> Finding:
    """Whether they are installed."""
    places = {name: shutil.which(name, path=environment().get("PATH")) for name in names}
    missing = [name for name, place in places.items() if place is None]
    what = ", ".join(names)
    if missing:
        hint = "install Slurm's client commands on this host, or put them on the agent's PATH"
        return Finding(what, False, f"not found: {', '.join(missing)}", hint)
    return Finding(what, True, os.path.dirname(places[names[0]] or ""))


class SlurmCommands:
    """Submits jobs and ends them by ``sbatch`` and ``scancel``; ``trial`` are the options of a job for the check."""

    def __init__(self, trial: Sequence[str], run_as: RunAs) -> None:
        self._trial, self._run_as = tuple(trial), run_as

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def submit(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        answer = await ask(
            self._run_as,
            "sbatch",
            "--parsable",
            f"--job-name={submission.name}",
            f"--chdir={submission.workdir}",
            f"--output={str(submission.output).replace('%', '%%')}",
            "--open-mode=append",
            *native,
            str(script),
            user=submission.user,
        )
        return printed_job("sbatch", answer)

    async def cancel(self, job: str, user: str = "") -> None:
        answer = await self._run_as.run(user, "scancel", job, environment=environment())
        if answer.code != 0 and not _UNKNOWN_JOB.search(answer.errors):
            raise_error("scancel", answer)

    async def submit_error(self) -> str:
        found = find_commands("sbatch", "scancel")
        return "" if found.ok else f"{found.found}; {found.hint}"

    async def check(self, nodes: int = 1) -> list[Finding]:
        found = find_commands("sbatch", "scancel")
        return [found, await self._test_submission(nodes)] if found.ok else [found]

    async def _test_submission(self, nodes: int) -> Finding:
        """Tell whether Slurm would take a job of so many nodes with our options."""
        what = "a job's options"
        try:
            answer = await ask(self._run_as, "sbatch", "--test-only", f"--nodes={nodes}", *self._trial, "--wrap=true")
        except SiteError as error:
            return Finding(what, False, error.message, error.hint or "correct the cluster's partition and account")
        return Finding(what, True, error_text("sbatch", answer).removeprefix("sbatch: "))
