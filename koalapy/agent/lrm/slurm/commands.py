"""Run Slurm's commands, interpret their errors, submit jobs by ``sbatch``, and read the accounting of ended jobs."""

import math
import os
import pwd
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from koalapy.agent.accounts import RunAs
from koalapy.agent.core.settings import inherited_environment
from koalapy.agent.lrm.commands import Commands, parse_job_number
from koalapy.agent.lrm.port import Finding, JobControl, JobUse, LrmJob, LrmJobState, LrmSubmission
from koalapy.agent.lrm.slurm.answers import words_in
from koalapy.agent.lrm.slurm.states import CANCELLED_IN_SLURM, job_state
from koalapy.model.errors import SiteError
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

_TRANSIENT = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection (refused|reset|timed out)|connection failure"
    r"|Zero Bytes were transmitted|standby mode|Transport endpoint|try again|temporarily un|Incomplete message"
    r"|Munge|munge|authentication error|Insane message length|Unexpected message|I/O error|Broken pipe"
    r"|controller is not|Unable to establish|Name or service not known|name resolution|DNS SRV|Required partition not",
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


SACCT_TIMEOUT_S = 5.0
"""How long a snapshot with newly ended jobs waits for their use."""
RETRY_INTERVAL_S = 120.0
"""Time without queries after one that failed."""
CONFIGURATION_MAX_AGE_S = 3600.0
_FIELDS = "JobIDRaw,State,NNodes,CPUTimeRAW,TotalCPU,MaxRSS"
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([KMGTP]?)", re.ASCII)
_TIME = re.compile(r"(?:([0-9]{1,6})-)?(?:([0-9]{1,6}):)?([0-9]{1,9}):([0-9]{1,2}(?:\.[0-9]{1,9})?)", re.ASCII)
_SINCE = "now-14days"


@dataclass(slots=True)
class _Record:
    """The lines of one job: that of the job itself, and those of its steps."""

    nodes: int | None = None
    cpu_available: float | None = None
    is_complete: bool = False
    step_times: list[float] = field(default_factory=list)
    step_memories: list[int] = field(default_factory=list)


class SlurmAccounting:
    """Adds its use to each ended job. Each job is queried once, and several jobs by one command."""

    def __init__(self, commands: SlurmCommands, clock: Clock = SYSTEM_CLOCK) -> None:
        self._commands, self._clock = commands, clock
        self._uses: dict[str, JobUse | None] = {}
        """Use of the ended jobs of the last snapshot; None if the accounting had no complete record."""
        self._cancellers: dict[str, str] = {}
        """Who cancelled these jobs, as far as the accounting says."""
        self._exists = self._has_limits = False
        self._configuration_until = self._paused_until = float("-inf")

    async def add_uses(self, jobs: Sequence[LrmJob]) -> list[LrmJob]:
        """Return the jobs of a snapshot; those that have ended with what the accounting knows. Raise nothing."""
        ended = [job.id for job in jobs if job.state is LrmJobState.ENDED]
        self._uses = {job: self._uses[job] for job in ended if job in self._uses}
        self._cancellers = {job: self._cancellers[job] for job in ended if job in self._cancellers}
        if new := [job for job in ended if job not in self._uses]:
            self._uses |= dict.fromkeys(new)
            if self._clock.monotonic() >= self._paused_until:
                try:
                    if await self._has_database():
                        self._uses |= {job: use for job, use in (await self._query(new)).items() if job in self._uses}
                except SiteError as error:
                    log.warning("accounting does not answer", action="accounting-silent", reason=error.message)
                    self._paused_until = self._clock.monotonic() + RETRY_INTERVAL_S
        jobs = [replace(job, use=use) if (use := self._uses.get(job.id)) is not None else job for job in jobs]
        return [
            replace(job, reason=f"cancelled in Slurm by {user}")
            if job.reason == CANCELLED_IN_SLURM and (user := self._cancellers.get(job.id))
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
            self._exists = bool(re.search(r"^AccountingStorageType\s*=\s*\S*slurmdbd", answer.text, re.MULTILINE))
            enforces = re.search(r"^AccountingStorageEnforce\s*=.*(limits|safe)", answer.text, re.MULTILINE)
            self._has_limits = enforces is not None
            self._configuration_until = now + CONFIGURATION_MAX_AGE_S
        return self._exists

    async def _query(self, jobs: Iterable[str]) -> dict[str, JobUse]:
        options = (f"--jobs={','.join(jobs)}", f"--starttime={_SINCE}", f"--format={_FIELDS}")
        words = ("--noheader", "--parsable2", "--allusers", *options)
        answer = await self._commands.run("sacct", *words, timeout=SACCT_TIMEOUT_S)
        if answer.code:
            raise self._commands.error("sacct", answer)
        self._cancellers |= read_cancellers(answer.text)
        return read_uses(answer.text)


def read_cancellers(text: str) -> dict[str, str]:
    """Return who cancelled jobs, from states such as ``CANCELLED by 1500`` in an answer of ``sacct``."""
    cancellers = {}
    for job, uid in re.findall(r"^([0-9]{1,18})\|CANCELLED by ([0-9]{1,10})\|", text, re.MULTILINE):
        try:
            cancellers[job] = pwd.getpwuid(int(uid)).pw_name
        except (KeyError, OverflowError):
            cancellers[job] = f"uid {uid}"
    return cancellers


def read_uses(text: str) -> dict[str, JobUse]:
    """Return the use of each job in an answer of ``sacct``, without jobs whose record is not complete.

    The job's own line has its nodes and the time of its processors. Its steps have their processor time and memory. All
    times are zero if no plugin of Slurm gathers them; then the use is not known.
    """
    records: dict[str, _Record] = {}
    for line in text.splitlines():
        words = [word.strip() for word in line.split("|")]
        job, is_step, _ = words[0].partition(".")
        if len(words) < 6 or not re.fullmatch(r"[0-9]{1,18}", job, re.ASCII):
            continue
        record = records.setdefault(job, _Record())
        state, nodes, available, cpu_time, memory = words[1:6]
        if is_step:
            record.step_times += filter(None, (read_time(cpu_time),))
            record.step_memories += filter(None, (read_size(memory),))
            continue
        record.is_complete = job_state(words_in([state])) is LrmJobState.ENDED
        record.nodes = int(nodes) if re.fullmatch(r"[1-9][0-9]{0,6}", nodes, re.ASCII) else None
        record.cpu_available = float(available) if re.fullmatch(r"[0-9]{1,15}", available, re.ASCII) else None
    return {
        job: JobUse(sum(r.step_times), r.cpu_available, max(r.step_memories, default=None), r.nodes)
        for job, r in records.items()
        if r.is_complete and r.step_times
    }


def read_time(text: str) -> float | None:
    """Return the seconds of ``[[DAYS-]HOURS:]MINUTES:SECONDS``, as ``00:01.250``; None for other text."""
    if (match := _TIME.fullmatch(text)) is None:
        return None
    days, hours, minutes, seconds = match.groups()
    return int(days or 0) * 86_400 + int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds)


def read_size(text: str) -> int | None:
    """Return the bytes of ``1024``, ``4332K`` or ``1.5G``; None for other text."""
    match = _SIZE.fullmatch(text)
    return None if match is None else int(float(match[1]) * 1024 ** _UNITS[match[2]])
