"""Any resource manager with a DRMAA 1.0 library: jobs are submitted, watched and ended through it alone."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.settings import AgentSettings, SiteSettings
from koalapy.agent.lrm.commands import split_options
from koalapy.agent.lrm.drmaa.accounts import DrmaaAccounts, drmaa_control
from koalapy.agent.lrm.drmaa.codes import NO_SUCH_JOB, STATES, DrmaaEnding
from koalapy.agent.lrm.drmaa.control import DrmaaControl
from koalapy.agent.lrm.drmaa.jobs import SubmittedJob, SubmittedJobs
from koalapy.agent.lrm.drmaa.process import Unanswered
from koalapy.agent.lrm.native_options import reject_qsub_options, reject_sbatch_options
from koalapy.agent.lrm.polling import Polling
from koalapy.agent.lrm.port import Finding, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission
from koalapy.agent.lrm.script import place_script
from koalapy.agent.lrm.slurm.commands import time_limit
from koalapy.model.errors import SiteError, SiteFault, SiteRejected
from koalapy.system.clock import SYSTEM_CLOCK, Clock

EXIT_CODE_TIMEOUT = 5.0
"""Seconds in which an ended job's exit code may still arrive."""
ENDED_RETENTION = 60.0
"""Seconds for which an ended job stays in our snapshots."""


def make(settings: AgentSettings) -> "DrmaaLrm":
    folders = JobFolders.of(settings)
    control = drmaa_control(settings.library, folders.run_as)
    return DrmaaLrm(settings, control, settings.directory.parent, folders)


class DrmaaLrm:
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
        self._folders, self._clock = folders or JobFolders.alone(), clock
        self._control, self._settings, self._fanout = control, settings, settings.fanout or "none"
        options = split_options(settings.native_specification)
        if self._fanout == "qrsh":
            reject_qsub_options(options)
        else:
            reject_sbatch_options(options, short=self._fanout == "srun")
        self._polling = Polling(settings.poll_interval)
        self._table = SubmittedJobs(directory / "drmaa-jobs.json", clock)
        self._gone: dict[str, float] = {}
        """Jobs that the library calls ended or does not know, and since when; their exit codes may still come."""

    async def open(self) -> None:
        await asyncio.to_thread(self._table.load)
        self._control.on_ended(self._polling.soon)
        await self._control.open()

    async def close(self) -> None:
        self._polling.close()
        await self._control.close()

    async def submit(self, submission: LrmSubmission) -> str:
        if submission.nodes > self._settings.nodes:
            raise SiteRejected(
                f"{submission.nodes} nodes asked for, but the cluster has {self._settings.nodes}",
                field="size",
                value=submission.nodes,
                hint="ask for fewer, or correct the cluster's nodes in the configuration",
                fault=SiteFault.LIMIT,
            )
        native = self._native(submission)
        script = await place_script(submission, self._fanout, self._folders)
        # Written down first: after a crash in between, nobody may hand it in a second time.
        await asyncio.to_thread(self._table.intend, submission.name, submission.nodes, submission.user)
        try:
            job = await self._control.submit(script, submission, native)
        except Unanswered:
            raise
        except SiteError:
            await asyncio.to_thread(self._table.forget, submission.name)
            raise
        await asyncio.to_thread(self._table.submitted, submission.name, job)
        self._polling.soon()
        return job

    async def find(self, name: str, user: str = "") -> str | None:
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

    async def cancel(self, job: str, name: str, user: str = "", *, by_force: bool = False) -> None:
        known = next((each for each in self._table.entries.values() if each.job == job), None)
        if known is None or known.ended:
            return
        if known.name != name:
            raise SiteRejected(f"job {job} is {known.name}, not {name}: left alone", value=job)
        await self._control.cancel(job, known.user)
        known.cancelled = True
        self._polling.soon()

    def runners_key(self) -> bytes:
        return b""

    async def snapshot(self) -> LrmSnapshot:
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

    async def version(self) -> str:
        return await self._control.version()

    async def check(self) -> Sequence[Finding]:
        return [
            *await self._control.check(),
            Finding("nodes", True, f"{self._settings.nodes} by the configuration, all taken for ours"),
        ]

    def changes(self) -> AsyncIterator[None]:
        return self._polling.changes()

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
        ending = self._control.ending(entry.job)
        if state is LrmJobState.UNKNOWN and ending is None:
            return LrmJob(entry.job, entry.name, state, reason=f"DRMAA says {word}", user=entry.user)
        if state is not LrmJobState.ENDED and ending is None:
            self._gone.pop(entry.job, None)
            return LrmJob(entry.job, entry.name, state, user=entry.user)
        since = self._gone.setdefault(entry.job, self._clock.monotonic())
        if ending is None and self._clock.monotonic() < since + EXIT_CODE_TIMEOUT:
            self._polling.soon(1.0)
            return LrmJob(entry.job, entry.name, LrmJobState.RUNNING, user=entry.user)
        self._gone.pop(entry.job, None)
        return _ended(entry, word, ending)


_HOLDING = (LrmJobState.RUNNING, LrmJobState.UNKNOWN)


def _ended(entry: SubmittedJob, word: str, ending: DrmaaEnding | None) -> LrmJob:
    assert entry.job is not None
    code = ending.exit_code if ending else None
    number = ending.signal_number if ending else None
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
