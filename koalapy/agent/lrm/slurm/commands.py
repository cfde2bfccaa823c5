"""Run Slurm's commands, interpret their errors, submit jobs by ``sbatch``, and read who cancelled jobs."""

import math
import os
import pwd
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from koalapy.agent.accounts import RunAs
from koalapy.agent.core.settings import inherited_environment
from koalapy.agent.lrm.commands import Commands, parse_job_number
from koalapy.agent.lrm.port import Finding, LrmJob, LrmSubmission
from koalapy.agent.lrm.slurm.states import CANCELLED_IN_SLURM
from koalapy.model.errors import SiteError
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

_TRANSIENT = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection (refused|reset|timed out)|connection failure"
    r"|Zero Bytes were transmitted|standby mode|Transport endpoint|job record, try again|altered now, try again"
    r"|temporarily un|Incomplete message|Message (send|receive) failure|Header lengths are longer|Rate limit exceeded"
    r"|Munge|munge|authentication error|Insane message length|Unexpected message|I/O error|Broken pipe"
    r"|controller is not|Unable to establish|Name or service not known|name resolution|DNS SRV|shutdown failure"
    r"|Unexpected missing socket",
    re.IGNORECASE,
)
_HINTS = (
    (re.compile(r"unrecognized option '?--json"), "upgrade Slurm to 21.08 or later: this one has no JSON output"),
    (
        re.compile(r"\bplugin\b.*\bjson\b|\bjson\b.*\bplugin\b", re.IGNORECASE),
        "this Slurm was built without its JSON plugin: install a package of it that was built with json-c",
    ),
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


def own_account() -> str:
    """Return the name of the agent's account, or its number if it has no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def time_limit(walltime: float) -> str:
    """Return seconds as ``H:MM:00``, which sbatch and DRMAA libraries of Slurm accept.

    Slurm counts whole minutes. It is at least one, since 0 means no limit.
    """
    hours, minutes = divmod(max(1, math.ceil(walltime / 60)), 60)
    return f"{hours}:{minutes:02}:00"


class SbatchControl:
    """Submits jobs by ``sbatch``, and cancels them by ``scancel``."""

    def __init__(self, trial_options: Sequence[str], commands: SlurmCommands) -> None:
        """``trial_options``: options of the job that ``check_setup`` tries."""
        self._trial_options, self._commands = tuple(trial_options), commands

    async def submit_job(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        """Submit a script with these options and return the job's id. Raise ``SiteError``."""
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
        """End an account's job. An ended or unknown job is not an error. Raise ``SiteError``."""
        answer = await self._commands.run("scancel", job, user=user)
        if answer.code and not _UNKNOWN_JOB.search(answer.errors):
            raise self._commands.error("scancel", answer)

    def submit_error(self) -> str:
        """Return why no job can be submitted now, in one line; empty if no problem is known."""
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


SACCT_TIMEOUT_S = 5.0
"""How long a snapshot waits for the accounting."""
CONFIGURATION_MAX_AGE_S = 3600.0
_TIME = re.compile(r"(?:([0-9]{1,6})-)?(?:([0-9]{1,6}):)?([0-9]{1,9}):([0-9]{1,2}(?:\.[0-9]{1,9})?)", re.ASCII)
_SINCE = "now-14days"


class SlurmAccounting:
    """Reads who cancelled jobs, each once, and whether Slurm enforces limits."""

    def __init__(self, commands: SlurmCommands, clock: Clock = SYSTEM_CLOCK) -> None:
        self._commands, self._clock = commands, clock
        self._cancellers: dict[str, str] = {}
        """Who cancelled jobs of the last snapshot, empty if the accounting does not say."""
        self._exists = self._has_limits = False
        self._configuration_until = float("-inf")

    async def name_cancellers(self, jobs: Sequence[LrmJob]) -> list[LrmJob]:
        """Return the jobs of a snapshot, with the users who cancelled some in Slurm as reasons. Raise nothing."""
        cancelled = {job.id for job in jobs if job.reason == CANCELLED_IN_SLURM}
        new = cancelled - self._cancellers.keys()
        self._cancellers = {job: self._cancellers.get(job, "") for job in cancelled}
        if new:
            options = (f"--jobs={','.join(sorted(new))}", f"--starttime={_SINCE}", "--format=JobIDRaw,State")
            try:
                if await self._has_database():
                    arguments = ("--noheader", "--parsable2", "--allusers", "--allocations", *options)
                    self._cancellers |= read_cancellers(
                        (await self._commands.run("sacct", *arguments, timeout=SACCT_TIMEOUT_S)).text
                    )
            except SiteError as error:
                log.warning("accounting does not answer", action="accounting-silent", reason=error.message)
        return [
            replace(job, reason=f"cancelled in Slurm by {user}")
            if job.id in cancelled and (user := self._cancellers[job.id])
            else job
            for job in jobs
        ]

    async def enforces_limits(self) -> bool:
        """Return whether Slurm enforces limits of accounts. Raise ``SiteError``."""
        return await self._has_database() and self._has_limits

    async def _has_database(self) -> bool:
        """Return whether Slurm keeps its accounting in a database. Raise ``SiteError``."""
        now = self._clock.monotonic()
        if now >= self._configuration_until:
            answer = await self._commands.run("scontrol", "show", "config", timeout=SACCT_TIMEOUT_S)
            if answer.code:
                raise self._commands.error("scontrol", answer)
            self._exists = bool(re.search(r"^AccountingStorageType\s*=\s*\S*slurmdbd", answer.text, re.MULTILINE))
            enforces = re.search(r"^AccountingStorageEnforce\s*=.*(limits|safe)", answer.text, re.MULTILINE)
            self._has_limits = enforces is not None
            self._configuration_until = now + CONFIGURATION_MAX_AGE_S
        return self._exists


def read_cancellers(text: str) -> dict[str, str]:
    """Return who cancelled jobs, from states such as ``CANCELLED by 1500`` in an answer of ``sacct``."""
    cancellers = {}
    for job, uid in re.findall(r"^([0-9]{1,18})\|CANCELLED by ([0-9]{1,10})$", text, re.MULTILINE):
        try:
            cancellers[job] = pwd.getpwuid(int(uid)).pw_name
        except (KeyError, OverflowError):
            cancellers[job] = f"uid {uid}"
    return cancellers


def read_time(text: str) -> float | None:
    """Return the seconds of ``[[DAYS-]HOURS:]MINUTES:SECONDS``, as ``00:01.250``; None for other text."""
    if (match := _TIME.fullmatch(text)) is None:
        return None
    days, hours, minutes, seconds = match.groups()
    return int(days or 0) * 86_400 + int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds)
