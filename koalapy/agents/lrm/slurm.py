"""Slurm as agents see it: driven by its commands, whose answers are read as JSON."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from koalapy.agents.lrm.commands import run
from koalapy.agents.lrm.control import JobControl
from koalapy.agents.lrm.polling import Polling
from koalapy.agents.lrm.port import Finding, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission
from koalapy.agents.lrm.script import write_script
from koalapy.agents.lrm.slurm_check import check_nodes, check_partition, check_version, partitions
from koalapy.agents.lrm.slurm_columns import COLUMNS, read_columns
from koalapy.agents.lrm.slurm_commands import (
    SlurmCommands,
    ask,
    complaint,
    environment,
    find_commands,
    refuse,
    time_limit,
)
from koalapy.agents.lrm.slurm_json import SlurmJob, SlurmNode, read_jobs, read_nodes, words_in
from koalapy.agents.lrm.slurm_refusals import fault_of_waiting
from koalapy.agents.lrm.slurm_states import job_end, job_state, node_standing
from koalapy.model.errors import SiteError, SiteRejected, SiteUnavailable

_LARGE_ANSWER = 1 << 20
"""Bytes of JSON from squeue beyond which it is asked for columns: 0.2 ms of processor time each 3 kB, one job."""
MESSAGE_TIMEOUT = 10.0
"""Seconds; Slurm's own default."""
_LOOKS_TO_AGREE = 3
_CANCELLED_KNOWN = 10_000
_REMEMBERED = "now-14days"
"""How far back accounting is searched for a job of ours."""


@dataclass(frozen=True, slots=True)
class SlurmSettings:
    """How the cluster is asked; ``options`` are further ones of sbatch, ``poll_interval`` is in seconds."""

    partition: str | None = None
    """None: the default partition, looked up once."""
    account: str | None = None
    options: tuple[str, ...] = ()
    poll_interval: float = 5.0


class _Named(NamedTuple):
    """A job as squeue or sacct tell it in one line."""

    job: str
    state: LrmJobState
    user: int
    name: str


class SlurmLrm:
    """Our jobs are those of our own user whose names begin with ``prefix``; all others' are background."""

    def __init__(self, settings: SlurmSettings, prefix: str = "koala-", control: JobControl | None = None) -> None:
        self._settings = settings
        self._prefix = prefix
        self._control: JobControl = control or SlurmCommands(self._options())
        self._partition = settings.partition
        self._polling = Polling(settings.poll_interval)
        self._columns = False
        """Whether squeue is asked for columns, because its JSON is too large."""
        self._total = 0
        """Nodes of the partition at the last look."""
        self._cancelled: set[str] = set()
        self._ended: frozenset[str] = frozenset()
        """Our ended jobs at the last look."""

    async def open(self) -> None:
        await self._control.open()

    async def close(self) -> None:
        self._polling.close()
        await self._control.close()

    async def submit(self, submission: LrmSubmission) -> str:
        await self._refuse_too_many(submission)
        script = await asyncio.to_thread(write_script, submission, "srun")
        try:
            return await self._control.submit(script, submission, self._native(submission))
        except SiteUnavailable as error:
            # It may have been taken all the same; then a second one of that name must never be.
            if (job := await self._find_after(error, submission.name)) is not None:
                return job
            raise
        finally:
            self._polling.soon()

    async def find(self, name: str) -> str | None:
        mine = ("squeue", "--me", "--states=all", "--noheader", f"--name={name}", "--format=%i|%T|%U|%j")
        found = [each for each in _lines((await ask(*mine)).output) if each.name == name]
        if not found:
            found = [each for each in await self._accounted(name) if each.name == name]
        found.sort(key=lambda each: (each.state is not LrmJobState.ENDED, len(each.job), each.job))
        return found[-1].job if found else None

    async def settling_time(self) -> float:
        """As long as Slurm's own parts wait for each other."""
        with contextlib.suppress(SiteError):
            told = (await ask("scontrol", "show", "config")).output.decode(errors="replace")
            if found := re.search(r"^MessageTimeout\s*=\s*(\d+)", told, re.MULTILINE):
                return float(found[1])
        return MESSAGE_TIMEOUT

    async def cancel(self, job: str, name: str, *, by_force: bool = False) -> None:
        answer = await run(
            "squeue", "--states=all", "--noheader", f"--jobs={job}", "--format=%i|%T|%U|%j", environment=environment()
        )
        if answer.code != 0:
            if "invalid job id" in complaint("squeue", answer).lower():
                return
            refuse("squeue", answer)
        for found in _lines(answer.output):
            if found.state is LrmJobState.ENDED:
                continue
            if found.name != name or found.user != os.getuid():
                raise SiteRejected(
                    f"job {job} is {found.name} of user {found.user}, not our {name}: it is left alone", value=job
                )
            self._cancelled.add(job)
            await self._control.cancel(job)
            self._polling.soon()

    async def check(self) -> Sequence[Finding]:
        found = [find_commands("sinfo", "squeue", "srun")]
        if found[0].ok:
            found.append(await check_version())
            found += [each async for each in check_partition(self._settings.partition)]
        if all(each.ok for each in found):
            try:
                found.append(check_nodes(await self._nodes()))
            except SiteError as error:
                found.append(Finding("nodes", False, error.message, error.hint or "try sinfo --json by hand"))
            found += await self._control.check()
        return found

    async def snapshot(self) -> LrmSnapshot:
        """Nodes first, jobs then: what has started in between counts as ours, and after an end both are asked again."""
        for _ in range(_LOOKS_TO_AGREE):
            nodes = await self._nodes()
            jobs = await self._jobs()
            ended = frozenset(job.id for job in jobs if job.state is LrmJobState.ENDED)
            agree, self._ended = ended <= self._ended, ended
            if agree:
                break
        if len(self._cancelled) > _CANCELLED_KNOWN:
            self._cancelled &= {job.id for job in jobs}
        return replace(snapshot_of(nodes, jobs), trouble=await self._control.trouble())

    def changes(self) -> AsyncIterator[None]:
        """Yields at once, then at a fixed rate, and after whatever we did ourselves."""
        return self._polling.changes()

    def _options(self) -> list[str]:
        """Of every job."""
        options = ["--ntasks-per-node=1", "--exclusive", "--no-requeue"]
        if self._settings.partition:
            options.append(f"--partition={self._settings.partition}")
        if self._settings.account:
            options.append(f"--account={self._settings.account}")
        return [*options, *self._settings.options]

    def _native(self, submission: LrmSubmission) -> list[str]:
        options = [f"--nodes={submission.nodes}", f"--comment={submission.name}"]
        if submission.walltime is not None:
            options.append(f"--time={time_limit(submission.walltime)}")
        return [*options, *self._options()]

    async def _refuse_too_many(self, submission: LrmSubmission) -> None:
        """Slurm itself may let a job wait for ever for nodes that do not exist."""
        if submission.nodes > self._total:
            await self._nodes()
        if submission.nodes > self._total:
            raise SiteRejected(
                f"{submission.nodes} nodes asked for, but partition {self._partition} has {self._total}",
                field="size", value=submission.nodes, hint=f"ask for at most {self._total} nodes", fault="limit",
            )  # fmt: skip

    async def _find_after(self, error: SiteUnavailable, name: str) -> str | None:
        try:
            return await self.find(name)
        except SiteError:
            raise error from None

    async def _accounted(self, name: str) -> list[_Named]:
        """From Slurm's accounting; none where there is none."""
        try:
            answer = await run(
                "sacct", "--noheader", "--parsable2", "--allocations", f"--name={name}", f"--starttime={_REMEMBERED}",
                "--format=JobIDRaw,State,UID,JobName", environment=environment(),
            )  # fmt: skip
        except SiteError:
            return []
        return _lines(answer.output) if answer.code == 0 else []

    async def _nodes(self) -> list[SlurmNode]:
        if self._partition is None:
            names = [name for name, (_, default) in (await partitions()).items() if default]
            if not names:
                raise SiteRejected("Slurm has no default partition", hint="set the cluster's partition", fault="site")
            self._partition = names[0]
        answer = await ask("sinfo", "--Node", f"--partition={self._partition}", "--json")
        nodes = read_nodes(answer.output, self._partition)
        if not nodes:
            raise SiteUnavailable(f"sinfo shows no nodes in partition {self._partition}", hint="set its partition")
        self._total = len(nodes)
        return nodes

    async def _jobs(self) -> list[LrmJob]:
        if self._columns:
            found = read_columns(
                (await ask("squeue", "--me", "--states=all", "--noheader", COLUMNS)).output, self._prefix
            )
        else:
            answer = await ask("squeue", "--me", "--states=all", "--json")
            found = read_jobs(answer.output, self._prefix)
            self._columns = len(answer.output) > _LARGE_ANSWER
        return [self._job(job) for job in found if job.name.startswith(self._prefix) and job.user == os.getuid()]

    def _job(self, job: SlurmJob) -> LrmJob:
        state = job_state(job.words)
        if state is not LrmJobState.ENDED:
            refused = fault_of_waiting(job.reason) if state is LrmJobState.QUEUED else None
            reason = f"Slurm will not start it: {job.reason}" if refused else ""
            return LrmJob(job.id, job.name, state, job.nodes, reason=reason, refused=refused)
        end = job_end(job.words, job.code, job.signal, job.reason, cancelled_by_us=job.id in self._cancelled)
        return LrmJob(job.id, job.name, state, job.nodes, end.exit_code, end.lost, end.reason)


def snapshot_of(nodes: Sequence[SlurmNode], jobs: Sequence[LrmJob]) -> LrmSnapshot:
    """Counts of nodes: those that our jobs hold are in none of idle, background and down."""
    busy = (LrmJobState.RUNNING, LrmJobState.UNKNOWN)
    held = {node for job in jobs if job.state in busy for node in job.nodes}
    standings = [node_standing(node.words) for node in nodes if node.name not in held]
    return LrmSnapshot(
        total=len(nodes),
        idle=standings.count("idle"),
        background=standings.count("busy"),
        down=standings.count("down"),
        jobs=tuple(jobs),
    )


def _lines(output: bytes) -> list[_Named]:
    """Lines of job, state, user and name."""
    found = []
    for line in output.decode(errors="replace").splitlines():
        job, _, rest = line.strip().partition("|")
        state, _, rest = rest.partition("|")
        user, _, name = rest.partition("|")
        if job.isdecimal() and user.isdecimal():
            found.append(_Named(job, job_state(words_in([state])), int(user), name))
    return found
