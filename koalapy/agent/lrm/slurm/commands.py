"""Run Slurm's commands, interpret their errors, and submit jobs by ``sbatch``."""

import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from koalapy.agent.accounts import RunAs
from koalapy.agent.core.settings import inherited_environment
from koalapy.agent.lrm.commands import Commands, parse_job_number
from koalapy.agent.lrm.port import Finding, JobControl, LrmSubmission
from koalapy.model.errors import SiteError

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


class SlurmCommands(Commands):
    """Runs Slurm's commands. They, and so the jobs, inherit no secrets and no defaults of this process."""

    def __init__(self, run_as: RunAs) -> None:
        hint = "see that slurmctld and munged run and are reachable"
        super().__init__(run_as.run, inherited_environment(["SLURM_CONF"]), _TRANSIENT, _HINTS, hint)

    async def read_version(self) -> str:
        return (await self.run_checked("sinfo", "--version")).text.strip()

    def check_installed(self, *names: str) -> Finding:
        """Check that these commands are installed."""
        paths = {name: shutil.which(name, path=self.environment.get("PATH")) for name in names}
        missing = [name for name, path in paths.items() if path is None]
        subject = ", ".join(names)
        if missing:
            hint = "install Slurm's client commands on this host, or put them on the agent's PATH"
            return Finding(subject, False, f"not found: {', '.join(missing)}", hint)
        return Finding(subject, True, os.path.dirname(paths[names[0]] or ""))


def time_limit(walltime: float) -> str:
    """Return seconds as ``H:MM:00``, which sbatch and its DRMAA library both accept.

    Slurm counts whole minutes. It is at least one, since 0 means no limit.
    """
    hours, minutes = divmod(max(1, math.ceil(walltime / 60)), 60)
    return f"{hours}:{minutes:02}:00"


class SbatchControl(JobControl):
    """Submits jobs by ``sbatch``, and cancels them by ``scancel``."""

    def __init__(self, trial_options: Sequence[str], commands: SlurmCommands) -> None:
        """``trial_options``: options of the job that ``check_setup`` tries."""
        self._trial_options, self._commands = tuple(trial_options), commands

    async def submit_job(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        answer = await self._commands.run_checked(
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
        return parse_job_number("sbatch", answer)

    async def cancel_job(self, job: str, user: str = "") -> None:
        answer = await self._commands.run("scancel", job, user=user)
        if answer.code and not _UNKNOWN_JOB.search(answer.errors):
            raise self._commands.error("scancel", answer)

    async def submit_error(self) -> str:
        finding = self._commands.check_installed("sbatch", "scancel")
        return "" if finding.ok else f"{finding.result}; {finding.hint}"

    async def check_setup(self, nodes: int = 1) -> list[Finding]:
        """Check that Slurm would accept a job of so many nodes with the configured options."""
        installed = self._commands.check_installed("sbatch", "scancel")
        if not installed.ok:
            return [installed]
        subject = "a job's options"
        try:
            answer = await self._commands.run_checked(
                "sbatch", "--test-only", f"--nodes={nodes}", *self._trial_options, "--wrap=true"
            )
        except SiteError as error:
            hint = error.hint or "correct the cluster's partition and account"
            return [installed, Finding(subject, False, error.message, hint)]
        return [installed, Finding(subject, True, answer.error_text("sbatch").removeprefix("sbatch: "))]
