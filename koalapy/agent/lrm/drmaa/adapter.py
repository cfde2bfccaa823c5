"""Adapter of any resource manager with a DRMAA 1.0 library, by which jobs are submitted, watched and cancelled."""

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.settings import AgentSettings, SiteSettings
from koalapy.agent.lrm.drmaa.control import NO_SUCH_JOB, DrmaaControl, Unanswered, drmaa_control
from koalapy.agent.lrm.port import DrmaaEnding, Finding, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission, PolledLrm
from koalapy.agent.lrm.rejections import (
    reject_fields,
    reject_other_job,
    reject_qsub_options,
    reject_sbatch_options,
    reject_size,
    reservation_rejection,
    split_options,
)
from koalapy.agent.lrm.script import place_script
from koalapy.agent.lrm.slurm.commands import time_limit
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.runner.folders import replace_file
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
_STATES_WITH_NODES = (LrmJobState.RUNNING, LrmJobState.UNKNOWN)
EXIT_CODE_TIMEOUT_S = 5.0
"""How long to wait for the exit code of an ended job."""
ENDED_RETENTION_S = 60.0
"""How long snapshots contain an ended job."""
_ENTRY_RETENTION_S = 7 * 86400.0
"""How long the table contains an ended job."""


def make_lrm(settings: AgentSettings) -> "DrmaaLrm":
    folders = JobFolders.from_settings(settings)
    control = drmaa_control(settings.library, folders.run_as)
    return DrmaaLrm(settings, control, settings.directory.parent, folders)


@dataclass(slots=True)
class SubmittedJob:
    """A job; ``job`` is its id, None until the submission is answered; ``ended`` is the time of its end."""

    name: str
    nodes: int
    job: str | None = None
    ended: float = 0.0
    cancelled: bool = False
    exit_code: int | None = None
    lost: bool = False
    reason: str = ""


@dataclass(eq=False, slots=True)
class SubmittedJobs:
    """The table of submitted jobs in a file. Each change is written before its method returns.

    Methods raise ``SiteUnavailable``, and then change nothing. Threads may call them at the same time.
    """

    _path: Path
    _clock: Clock = SYSTEM_CLOCK
    entries: Mapping[str, SubmittedJob] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self) -> None:
        """Read the table from disk; raise ``SiteUnavailable`` if the file is damaged."""
        try:
            stored = json.loads(self._path.read_bytes())
            for fields in stored.values():
                fields.pop("user", None)  # of an agent of an earlier version
            self.entries = {name: SubmittedJob(**fields) for name, fields in stored.items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise SiteUnavailable(
                f"cannot read {self._path}: {error}",
                hint=(
                    "move this table of submitted jobs away, after ending "
                    "the cluster's grid jobs; the agent then starts a new one"
                ),
            ) from error

    def store(self, *entries: SubmittedJob) -> None:
        """Add or replace jobs; they are known after a restart."""
        with self._lock:
            self._replace({**self.entries, **{entry.name: entry for entry in entries}})

    def remove(self, name: str) -> None:
        with self._lock:
            self._replace({other: entry for other, entry in self.entries.items() if other != name})

    def _replace(self, entries: Mapping[str, SubmittedJob]) -> None:
        """Write a new table, without jobs that ended long ago, to the disk and then use it."""
        limit = self._clock.now() - _ENTRY_RETENTION_S
        kept = {name: entry for name, entry in entries.items() if not 0 < entry.ended < limit}
        try:
            replace_file(self._path, json.dumps({name: asdict(entry) for name, entry in kept.items()}).encode())
        except OSError as error:
            raise SiteUnavailable(f"cannot write {self._path}: {error.strerror}") from error
        self.entries = kept


_FIELDS_WITHOUT_MEANING = ("gpus", "features", "partition", "account", "qos", "exclude")
"""Fields of requirements that a DRMAA library cannot express."""


class DrmaaLrm(PolledLrm):
    """A cluster with a DRMAA library. It lists only grid jobs; all nodes that they do not hold count as idle."""

    def __init__(
        self,
        settings: SiteSettings,
        control: DrmaaControl,
        directory: Path,
        folders: JobFolders | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """``directory`` is for the file with the names and ids of submitted jobs."""
        super().__init__(settings.poll_interval)
        self._folders, self._clock = folders or JobFolders.for_own_account(), clock
        self._control, self._settings, self._fanout = control, settings, settings.fanout or "none"
        options = split_options(settings.native_specification)
        if self._fanout == "qrsh":
            reject_qsub_options(options)
        else:
            reject_sbatch_options(options, short=self._fanout == "srun")
        self._table = SubmittedJobs(directory / "drmaa-jobs.json", clock)
        self._ended_since: dict[str, float] = {}
        """Jobs that the library calls ended or does not know, and since when; their exit codes may arrive later."""

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
        problem = "a cluster of the kind drmaa cannot choose its nodes by {field}"
        reject_fields(submission.requirement, _FIELDS_WITHOUT_MEANING, problem)
        if submission.reservation:
            raise reservation_rejection("a cluster of the kind drmaa has no reservations", submission.reservation)
        native = self._native_options(submission)
        script = await place_script(submission, self._fanout, self._folders)
        # Recorded first: after a crash in between, it must not be submitted a second time.
        entry = SubmittedJob(submission.name, submission.nodes)
        await asyncio.to_thread(self._table.store, entry)
        try:
            job = await self._control.submit_job(script, submission, native)
        except Unanswered:
            raise
        except SiteError:
            await asyncio.to_thread(self._table.remove, submission.name)
            raise
        entry.job = job
        await asyncio.to_thread(self._table.store, entry)
        self.poll_soon()
        return job

    async def find_job(self, name: str, user: str = "") -> str | None:
        entry = self._table.entries.get(name)
        if entry is not None and entry.job is None:
            raise SiteRejected(
                f"it is not known whether {name} was submitted: the DRMAA library failed during the submission",
                hint="look for a job of that name in the cluster, and cancel it",
                fault=SiteFault.SITE,
            )
        return entry.job if entry else None

    async def settling_time(self) -> float:
        return 0.0  # an unanswered submission is never repeated, since the job cannot be found by its name

    async def cancel_job(self, job: str, name: str, user: str = "", *, by_force: bool = False) -> None:
        entry = next((entry for entry in self._table.entries.values() if entry.job == job), None)
        if entry is None or entry.ended:
            return
        if entry.name != name:
            reject_other_job(job, entry.name, name)
        await self._control.cancel_job(job)
        entry.cancelled = True
        self.poll_soon()

    async def take_snapshot(self) -> LrmSnapshot:
        active = {entry.job: entry for entry in self._table.entries.values() if entry.job and not entry.ended}
        states = await self._control.read_states(list(active)) if active else {}
        jobs = [self._convert_job(active[job], state) for job, state in states.items()]
        used_nodes = sum(
            entry.nodes for entry, job in zip(active.values(), jobs, strict=True) if job.state in _STATES_WITH_NODES
        )
        ended = []
        for job in jobs:
            if job.state is LrmJobState.ENDED:
                entry = active[job.id]
                entry.ended = self._clock.now()
                entry.exit_code, entry.lost, entry.reason = job.exit_code, job.lost, job.reason
                ended.append(entry)
        if ended:  # so that snapshots still show them for a while, also after a restart
            await asyncio.to_thread(self._table.store, *ended)
        limit = self._clock.now() - ENDED_RETENTION_S
        ended_before = [
            _ended_job(entry, entry.exit_code, entry.lost, entry.reason)
            for entry in self._table.entries.values()
            if entry.ended > limit
        ]
        by_id = {job.id: job for job in (*ended_before, *jobs)}
        total = self._settings.nodes
        submit_error = await self._control.submit_error()
        return LrmSnapshot(total, max(0, total - used_nodes), 0, 0, tuple(by_id.values()), submit_error)

    async def read_version(self) -> str:
        return await self._control.read_version()

    async def check_setup(self) -> Sequence[Finding]:
        return [
            *await self._control.check_setup(),
            Finding("nodes", True, f"{self._settings.nodes} by the configuration, all counted for grid jobs"),
        ]

    def _native_options(self, submission: LrmSubmission) -> list[str]:
        """Return the configured native options of a job, with its walltime and number of nodes filled in."""
        text = self._settings.native_specification
        if "{walltime}" in text and submission.walltime is None:
            raise SiteRejected(
                "this cluster requires a walltime for every job",
                field="walltime",
                hint="submit the job with one",
                fault=SiteFault.UNSUITABLE,
            )
        seconds = submission.walltime or 0.0
        # Where srun starts the runners the library is that of Slurm, which rejects a plain number.
        limit = time_limit(seconds) if self._fanout == "srun" else str(max(1, round(seconds)))
        text = text.replace("{walltime}", limit)
        return list(split_options(text.replace("{nodes}", str(submission.nodes))))

    def _convert_job(self, entry: SubmittedJob, drmaa_state: str) -> LrmJob:
        """Return a job for a snapshot. An ended one counts as running until its exit code arrives, or for a while."""
        assert entry.job is not None
        state = LrmJobState.ENDED if drmaa_state == NO_SUCH_JOB else STATES.get(drmaa_state, LrmJobState.UNKNOWN)
        ending = self._control.reported_ending(entry.job)
        if state is LrmJobState.UNKNOWN and ending is None:
            return LrmJob(entry.job, entry.name, state, reason=f"DRMAA says {drmaa_state}")
        if state is not LrmJobState.ENDED and ending is None:
            self._ended_since.pop(entry.job, None)
            return LrmJob(entry.job, entry.name, state)
        since = self._ended_since.setdefault(entry.job, self._clock.monotonic())
        # A resource manager that does not know the job may be one that has taken over, and know it a moment later.
        timeout = self.max_snapshot_age_s if drmaa_state == NO_SUCH_JOB else EXIT_CODE_TIMEOUT_S
        if ending is None and self._clock.monotonic() < since + timeout:
            self.poll_soon(1.0)
            return LrmJob(entry.job, entry.name, LrmJobState.RUNNING)
        self._ended_since.pop(entry.job, None)
        return _convert_ended_job(entry, drmaa_state, ending)


def _convert_ended_job(entry: SubmittedJob, drmaa_state: str, ending: DrmaaEnding | None) -> LrmJob:
    """Convert an ended job; it counts as lost if a signal ended it, or if it aborted or failed without a code."""
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
    elif drmaa_state == "failed":
        reason = "failed; the DRMAA library gives no reason"
    else:
        lost, reason = False, "the resource manager no longer knows how it ended"
    return _ended_job(entry, code, lost, reason)


def _ended_job(entry: SubmittedJob, exit_code: int | None, lost: bool, reason: str) -> LrmJob:
    return LrmJob(entry.job or "", entry.name, LrmJobState.ENDED, (), exit_code, lost, reason)
