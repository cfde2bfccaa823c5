"""Any resource manager with a DRMAA 1.0 library: jobs are submitted, watched and ended through it alone."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.settings import AgentSettings, SiteSettings
from koalapy.agent.lrm.drmaa.control import DrmaaAccounts, DrmaaControl, drmaa_control
from koalapy.agent.lrm.drmaa.process import NO_SUCH_JOB, Unanswered
from koalapy.agent.lrm.port import DrmaaEnding, Finding, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission, PolledLrm
from koalapy.agent.lrm.rejections import (
    reject_other_job,
    reject_qsub_options,
    reject_sbatch_options,
    reject_size,
    split_options,
)
from koalapy.agent.lrm.script import place_script
from koalapy.agent.lrm.slurm.commands import time_limit
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.runner.atomic_files import replace_file
from koalapy.system.clock import SYSTEM_CLOCK, Clock

STATES: Mapping[str, LrmJobState] = {
    "undetermined": LrmJobState.UNKNOWN,
    "queued_active": LrmJobState.QUEUED,
    "system_on_hold": LrmJobState.QUEUED,
    "user_on_hold": LrmJobState.QUEUED,
    "user_system_on_hold": LrmJobState.QUEUED,
    "running": LrmJobState.RUNNING,
    "system_suspended": LrmJobState.RUNNING,
    "user_suspended": LrmJobState.RUNNING,
    "user_system_suspended": LrmJobState.RUNNING,
    "done": LrmJobState.ENDED,
    "failed": LrmJobState.ENDED,
}
_HOLDING = (LrmJobState.RUNNING, LrmJobState.UNKNOWN)
EXIT_CODE_TIMEOUT = 5.0
"""Seconds in which an ended job's exit code may still arrive."""
ENDED_RETENTION = 60.0
"""Seconds for which an ended job stays in our snapshots."""

_ENTRY_RETENTION = 7 * 86400.0
"""Seconds for which an ended job is remembered."""


def make_lrm(settings: AgentSettings) -> "DrmaaLrm":
    folders = JobFolders.from_settings(settings)
    control = drmaa_control(settings.library, folders.run_as)
    return DrmaaLrm(settings, control, settings.directory.parent, folders)


@dataclass(slots=True)
class SubmittedJob:
    """One job; ``job`` is None from before it is submitted until that is answered, ``ended`` the time of its end."""

    name: str
    nodes: int
    job: str | None = None
    ended: float = 0.0
    cancelled: bool = False
    exit_code: int | None = None
    lost: bool = False
    reason: str = ""
    user: str = ""

    def as_job(self) -> LrmJob:
        """As it ended."""
        code, lost = self.exit_code, self.lost
        return LrmJob(self.job or "", self.name, LrmJobState.ENDED, (), code, lost, self.reason, user=self.user)


class SubmittedJobs:
    """Every method that changes something has written it when it returns; they raise ``SiteUnavailable``."""

    def __init__(self, path: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path, self._clock = path, clock
        self.entries: dict[str, SubmittedJob] = {}

    def load(self) -> None:
        try:
            stored = json.loads(self._path.read_bytes())
            self.entries = {name: SubmittedJob(**fields) for name, fields in stored.items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise SiteUnavailable(f"cannot read {self._path}: {error}", hint="move it away") from error

    def intend(self, name: str, nodes: int, user: str = "") -> None:
        self.entries[name] = SubmittedJob(name, nodes, user=user)
        self._write()

    def submitted(self, name: str, job: str) -> None:
        self.entries[name].job = job
        self._write()

    def forget(self, name: str) -> None:
        self.entries.pop(name, None)
        self._write()

    def ended(self, jobs: Sequence[LrmJob]) -> None:
        now = self._clock.now()
        for job in jobs:
            entry = self.entries[job.name]
            entry.ended, entry.exit_code, entry.lost, entry.reason = now, job.exit_code, job.lost, job.reason
        self._write()

    def _write(self) -> None:
        limit = self._clock.now() - _ENTRY_RETENTION
        self.entries = {name: each for name, each in self.entries.items() if not 0 < each.ended < limit}
        content = json.dumps({name: asdict(each) for name, each in self.entries.items()}).encode()
        try:
            replace_file(self._path, content)
        except OSError as error:
            raise SiteUnavailable(f"cannot write {self._path}: {error.strerror}") from error


class DrmaaLrm(PolledLrm):
    """Knows of no jobs but ours: whatever they do not hold counts as idle."""

    def __init__(
        self,
        settings: SiteSettings,
        control: DrmaaControl | DrmaaAccounts,
        directory: Path,
        folders: JobFolders | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """In ``directory`` the names and ids of jobs submitted are written down."""
        super().__init__(settings.poll_interval)
        self._folders, self._clock = folders or JobFolders.for_own_account(), clock
        self._control, self._settings, self._fanout = control, settings, settings.fanout or "none"
        options = split_options(settings.native_specification)
        if self._fanout == "qrsh":
            reject_qsub_options(options)
        else:
            reject_sbatch_options(options, short=self._fanout == "srun")
        self._table = SubmittedJobs(directory / "drmaa-jobs.json", clock)
        self._gone: dict[str, float] = {}
        """Jobs that the library calls ended or does not know, and since when; their exit codes may still come."""

    async def open(self) -> None:
        await asyncio.to_thread(self._table.load)
        self._control.on_ended(self.poll_soon)

    async def close(self) -> None:
        await super().close()
        await self._control.close()

    async def submit_job(self, submission: LrmSubmission) -> str:
        if submission.nodes > self._settings.nodes:
            hint = "ask for fewer, or correct the cluster's nodes in the configuration"
            reject_size(submission.nodes, f"the cluster has {self._settings.nodes}", hint)
        native = self._native(submission)
        script = await place_script(submission, self._fanout, self._folders)
        # Written down first: after a crash in between, nobody may hand it in a second time.
        await asyncio.to_thread(self._table.intend, submission.name, submission.nodes, submission.user)
        try:
            job = await self._control.submit_job(script, submission, native)
        except Unanswered:
            raise
        except SiteError:
            await asyncio.to_thread(self._table.forget, submission.name)
            raise
        await asyncio.to_thread(self._table.submitted, submission.name, job)
        self.poll_soon()
        return job

    async def find_job(self, name: str, user: str = "") -> str | None:
        entry = self._table.entries.get(name)
        if entry is not None and entry.job is None:
            raise SiteRejected(
                f"whether {name} was handed in is not known: the DRMAA library failed while it was asked to",
                hint="look for a job of that name in the cluster, and end it",
                fault=SiteFault.SITE,
            )
        return entry.job if entry else None

    async def settling_time(self) -> float:
        return 0.0  # what was not answered is never submitted again: it is not known by its name

    async def cancel_job(self, job: str, name: str, user: str = "", *, by_force: bool = False) -> None:
        known = next((each for each in self._table.entries.values() if each.job == job), None)
        if known is None or known.ended:
            return
        if known.name != name:
            reject_other_job(job, known.name, name)
        await self._control.cancel_job(job, known.user)
        known.cancelled = True
        self.poll_soon()

    async def take_snapshot(self) -> LrmSnapshot:
        asked = {entry.job: entry for entry in self._table.entries.values() if entry.job and not entry.ended}
        states: dict[str, str] = {}
        for user in {entry.user for entry in asked.values()}:
            own = [job for job, entry in asked.items() if entry.user == user]
            states |= await self._status(own, user)
        shown = [self._job(asked[job], state) for job, state in states.items()]
        running = sum(e.nodes for e, job in zip(asked.values(), shown, strict=True) if job.state in _HOLDING)
        over = [each for each in shown if each.state is LrmJobState.ENDED]
        if over:
            await asyncio.to_thread(self._table.ended, over)
        earlier = [e.as_job() for e in self._table.entries.values() if e.ended > self._clock.now() - ENDED_RETENTION]
        jobs = {each.id: each for each in (*earlier, *shown)}
        total = self._settings.nodes
        submit_error = await self._control.submit_error()
        return LrmSnapshot(total, max(0, total - running), 0, 0, tuple(jobs.values()), submit_error)

    async def _status(self, jobs: Sequence[str], user: str) -> Mapping[str, str]:
        """One account that is gone, or closed, keeps nobody from hearing of the others' jobs."""
        try:
            return await self._control.status(jobs, user)
        except SiteRejected:
            if not user:
                raise
            return dict.fromkeys(jobs, "undetermined")

    async def read_version(self) -> str:
        return await self._control.read_version()

    async def check_setup(self) -> Sequence[Finding]:
        return [
            *await self._control.check_setup(),
            Finding("nodes", True, f"{self._settings.nodes} by the configuration, all taken for ours"),
        ]

    def _native(self, submission: LrmSubmission) -> list[str]:
        text = self._settings.native_specification
        if "{walltime}" in text and submission.walltime is None:
            raise SiteRejected(
                "this cluster wants a walltime for every job",
                field="walltime",
                hint="submit the job with one",
                fault=SiteFault.UNSUITABLE,
            )
        seconds = submission.walltime or 0.0
        # Where srun starts the runners it is a Slurm, to whose library a mere number is nothing.
        limit = time_limit(seconds) if self._fanout == "srun" else str(max(1, round(seconds)))
        text = text.replace("{walltime}", limit)
        return list(split_options(text.replace("{nodes}", str(submission.nodes))))

    def _job(self, entry: SubmittedJob, word: str) -> LrmJob:
        """As it is now; one that has ended is given a moment for its exit code to arrive."""
        assert entry.job is not None
        state = LrmJobState.ENDED if word == NO_SUCH_JOB else STATES.get(word, LrmJobState.UNKNOWN)
        ending = self._control.reported_ending(entry.job)
        if state is LrmJobState.UNKNOWN and ending is None:
            return LrmJob(entry.job, entry.name, state, reason=f"DRMAA says {word}", user=entry.user)
        if state is not LrmJobState.ENDED and ending is None:
            self._gone.pop(entry.job, None)
            return LrmJob(entry.job, entry.name, state, user=entry.user)
        since = self._gone.setdefault(entry.job, self._clock.monotonic())
        if ending is None and self._clock.monotonic() < since + EXIT_CODE_TIMEOUT:
            self.poll_soon(1.0)
            return LrmJob(entry.job, entry.name, LrmJobState.RUNNING, user=entry.user)
        self._gone.pop(entry.job, None)
        return _ended(entry, word, ending)


def _ended(entry: SubmittedJob, word: str, ending: DrmaaEnding | None) -> LrmJob:
    assert entry.job is not None
    code, number = (ending.exit_code, ending.signal_number) if ending else (None, None)
    lost = True
    if entry.cancelled:
        lost, reason = False, "cancelled"
    elif number is not None:
        reason = f"ended by signal {number}"
    elif code is not None:
        lost, reason = False, ""
    elif ending is not None and ending.aborted:
        reason = "aborted by the resource manager"
    elif word == "failed":
        reason = "failed, says DRMAA, and no more"
    else:
        lost, reason = False, "the resource manager no longer knows how it ended"
    return LrmJob(entry.job, entry.name, LrmJobState.ENDED, exit_code=code, lost=lost, reason=reason, user=entry.user)
