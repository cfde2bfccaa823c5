"""Read the use of processors and memory by ended jobs from Slurm's accounting database, where there is one."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import structlog

from koalapy.agent.lrm.port import JobUse, LrmJob, LrmJobState
from koalapy.agent.lrm.slurm.answers import words_in
from koalapy.agent.lrm.slurm.commands import SlurmCommands
from koalapy.agent.lrm.slurm.states import job_state
from koalapy.model.errors import SiteError
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

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
        self._exists = False
        self._configuration_until = self._paused_until = float("-inf")

    async def add_uses(self, jobs: Sequence[LrmJob]) -> list[LrmJob]:
        """Return the jobs of a snapshot; those that have ended, and whose use is known, with it. Raise nothing."""
        ended = [job.id for job in jobs if job.state is LrmJobState.ENDED]
        self._uses = {job: self._uses[job] for job in ended if job in self._uses}
        if new := [job for job in ended if job not in self._uses]:
            self._uses |= dict.fromkeys(new)
            if self._clock.monotonic() >= self._paused_until:
                try:
                    if await self._has_database():
                        self._uses |= {job: use for job, use in (await self._query(new)).items() if job in self._uses}
                except SiteError as error:
                    log.warning("accounting does not answer", action="accounting-silent", reason=error.message)
                    self._paused_until = self._clock.monotonic() + RETRY_INTERVAL_S
        return [replace(job, use=use) if (use := self._uses.get(job.id)) is not None else job for job in jobs]

    async def _has_database(self) -> bool:
        """Return whether Slurm keeps its accounting in a database. Raise ``SiteError``."""
        now = self._clock.monotonic()
        if now >= self._configuration_until:
            answer = await self._commands.run("scontrol", "show", "config", timeout=SACCT_TIMEOUT_S)
            self._exists = bool(re.search(r"^AccountingStorageType\s*=\s*\S*slurmdbd", answer.text, re.MULTILINE))
            self._configuration_until = now + CONFIGURATION_MAX_AGE_S
        return self._exists

    async def _query(self, jobs: Iterable[str]) -> dict[str, JobUse]:
        options = (f"--jobs={','.join(jobs)}", f"--starttime={_SINCE}", f"--format={_FIELDS}")
        words = ("--noheader", "--parsable2", "--allusers", *options)
        answer = await self._commands.run("sacct", *words, timeout=SACCT_TIMEOUT_S)
        if answer.code:
            raise self._commands.error("sacct", answer)
        return read_uses(answer.text)


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
