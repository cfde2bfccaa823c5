"""Grid Engine as agents see it: jobs are handed in and ended by ``JobControl``, watched with ``qstat``."""

import asyncio
import math
import os
import pwd
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace

from koalapy.agents.lrm.commands import words
from koalapy.agents.lrm.drmaa.control import DrmaaControl
from koalapy.agents.lrm.polling import Polling
from koalapy.agents.lrm.port import JOB_PREFIX, Finding, JobControl, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission
from koalapy.agents.lrm.script import write_script
from koalapy.agents.lrm.sge.check import findings
from koalapy.agents.lrm.sge.commands import Layout, SgeCommands, read_layout
from koalapy.agents.lrm.sge.endings import Settling
from koalapy.agents.lrm.sge.jobs import Ledger, active_job, unreachable_hosts
from koalapy.agents.lrm.sge.qstat import Instance, Job, Look, read_look
from koalapy.agents.lrm.sge.refusals import fault_of
from koalapy.agents.lrm.sge.states import DELETED, Standing, is_broken, job_state, standing
from koalapy.agents.settings import AgentSettings, SiteSettings
from koalapy.model.errors import SiteRejected, SiteUnavailable

LAYOUT_HOLDS = 60.0
"""Seconds after which parallel environment and queues are looked at again."""
TROUBLE_PATIENCE = 5.0
"""Seconds for which a look waits to hear why a job will not start."""
SETTLING = 10.0
"""Seconds after which the master has taken what it was sent, or has lost it."""


def make(settings: AgentSettings) -> "SgeLrm":
    return SgeLrm(settings, DrmaaControl(settings.library))


class SgeLrm:
    """Our jobs are those of our own user whose names begin with ``prefix``; all other used slots are background."""

    def __init__(self, settings: SiteSettings, control: JobControl, prefix: str = JOB_PREFIX) -> None:
        self._settings, self._control, self._extra = settings, control, words(settings.native_specification)
        self._commands = SgeCommands()
        self._polling = Polling(settings.poll_interval)
        self._ledger = Ledger(prefix, pwd.getpwuid(os.geteuid()).pw_name)
        self._settling = Settling(self._commands, self._ledger, control, self._polling.soon)
        self._layout: Layout | None = None
        self._layout_read = 0.0
        self._looked = False

    async def open(self) -> None:
        if isinstance(self._control, DrmaaControl):
            self._control.on_ended(self._polling.soon)
        await self._control.open()

    async def close(self) -> None:
        self._polling.close()
        await self._settling.close()
        await self._control.close()

    async def submit(self, submission: LrmSubmission) -> str:
        layout = await self._current_layout()
        if submission.nodes > len(layout.hosts):
            raise SiteRejected(
                f"{submission.nodes} nodes asked for, but {self._where} has {len(layout.hosts)}",
                field="size",
                value=submission.nodes,
                hint="ask for fewer nodes",
                fault="limit",
            )
        script = await asyncio.to_thread(write_script, submission, "qrsh")
        try:
            job = await self._control.submit(script, submission, self._native(submission, layout))
        except SiteRejected as error:
            raise _explained(error) from error
        if submission.name.startswith(self._ledger.prefix):
            self._ledger.handed_in(job, submission.name)
        self._polling.soon()
        return job

    async def find(self, name: str) -> str | None:
        if (known := self._ledger.find(name)) is not None:
            return known
        found = [job for job in await self._own_jobs("prsz") if job.name == name]
        if found:
            return max(found, key=lambda job: (job_state(job.state) is not LrmJobState.ENDED, int(job.id))).id
        records = await self._commands.accounting(self._ledger.owner, name)
        return records[-1].job if records else None

    async def settling_time(self) -> float:
        return SETTLING

    async def cancel(self, job: str, name: str, *, by_force: bool = False) -> None:
        found = next((each for each in await self._own_jobs("prs") if each.id == job), None)
        if found is None or (DELETED in found.state and not by_force):
            return
        if found.name != name:
            raise SiteRejected(f"job {job} is {found.name}, not {name}: left alone", value=job)
        if job in self._ledger.known:
            self._ledger.known[job].cancelled = True
        if DELETED in found.state:
            # The word that it is deleted never reached its hosts, or theirs never came back.
            await self._commands.delete_by_force(job)
        else:
            await self._control.cancel(job)
        self._polling.soon()

    async def snapshot(self) -> LrmSnapshot:
        layout = await self._current_layout()
        began = time.monotonic()
        # At first also what has ended lately: some of it may be ours, from before a restart.
        which = "prs" if self._looked else "prsz"
        look = await self._look(which)
        ended = self._ledger.see(look, began)
        self._looked = True
        await self._settling.settle(ended)
        silent = unreachable_hosts(look)
        shown = [await self._active(job, silent) for job in self._ledger.active(look)]
        jobs = (*shown, *self._ledger.unsettled(), *self._ledger.ended())
        held = {node for job in shown if job.state is LrmJobState.RUNNING for node in job.nodes}
        return replace(counted(look, layout, held, jobs), trouble=await self._control.trouble())

    async def check(self) -> Sequence[Finding]:
        return [
            *await findings(self._commands, self._settings.parallel_environment, self._settings.queue),
            *await self._control.check(),
        ]

    def changes(self) -> AsyncIterator[None]:
        return self._polling.changes()

    @property
    def _where(self) -> str:
        return f"queue {self._settings.queue}" if self._settings.queue else self._settings.parallel_environment

    def _native(self, submission: LrmSubmission, layout: Layout) -> list[str]:
        options = ["-pe", self._settings.parallel_environment, str(submission.nodes * layout.slots)]
        if self._settings.queue:
            options += ["-q", self._settings.queue]
        if submission.walltime is not None:
            options += ["-l", f"h_rt={max(1, math.ceil(submission.walltime))}"]
        # Run the script where it lies, which only we can read, and never a second time.
        return [*options, "-b", "y", "-shell", "n", "-r", "n", *self._extra]

    async def _current_layout(self) -> Layout:
        now = time.monotonic()
        if self._layout is None or now > self._layout_read + LAYOUT_HOLDS:
            settings = self._settings
            self._layout = await read_layout(self._commands, settings.parallel_environment, settings.queue)
            self._layout_read = now
        return self._layout

    async def _look(self, which: str) -> Look:
        # Only our own user's jobs: the slots of all others are counted all the same.
        arguments = ("-f", "-g", "t", "-s", which, "-u", self._ledger.owner, "-xml")
        return read_look(await self._commands.ask("qstat", *arguments))

    async def _own_jobs(self, which: str) -> Sequence[Job]:
        return read_look(await self._commands.ask("qstat", "-s", which, "-u", self._ledger.owner, "-xml")).jobs

    async def _active(self, job: Job, silent: Collection[str]) -> LrmJob:
        known = self._ledger.known[job.id]
        if is_broken(job.state) and not known.trouble:
            known.trouble = await self._trouble(job.id)
        return active_job(job, known, silent)

    async def _trouble(self, job: str) -> str:
        """Why a job is in an error state, in Grid Engine's words; empty while it does not say."""
        try:
            answer = await self._commands.run("qstat", "-j", job, patience=TROUBLE_PATIENCE)
        except SiteUnavailable:
            return ""
        lines = answer.output.decode(errors="replace").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("error reason")), "")


def counted(look: Look, layout: Layout, held: Collection[str], jobs: tuple[LrmJob, ...]) -> LrmSnapshot:
    """Nodes by what they are to us; each is one thing."""
    usable: dict[str, list[Instance]] = {}
    used: set[str] = set()
    for each in look.instances:
        if (each.queue, each.host) in layout.instances:
            usable.setdefault(each.host, []).append(each)
        if each.used or each.reserved:
            used.add(each.host)
    counts = {"idle": 0, "busy": 0, "down": 0}
    for host, instances in usable.items():
        if host not in held:
            best = _best(instances, layout.slots)
            counts["busy" if best == "idle" and host in used else best] += 1
    return LrmSnapshot(len(usable), counts["idle"], counts["busy"], counts["down"], jobs)


def _best(instances: Sequence[Instance], slots: int) -> Standing:
    """What a host is to a job: Grid Engine takes its slots from one of its queues, or from several together."""
    total: Counter[Standing] = Counter()
    for each in instances:
        total[standing(each.states)] += each.total
    if total["idle"] >= slots:
        return "idle"
    return "busy" if total["idle"] + total["busy"] >= slots else "down"


def _explained(error: SiteRejected) -> SiteRejected:
    """With the way out, where Grid Engine's words leave it open."""
    said, hint = error.message, error.hint
    if "parallel environment" in said:
        hint = "set the cluster's parallel_environment to one of qconf -spl"
    elif "unknown queue" in said:
        hint = "set the cluster's queue to one of qconf -sql"
    elif "no suitable queues" in said:
        hint = "see whether queue, parallel environment and native_specification go together (qsub -w v)"
    elif "unknown resource" in said or "option" in said:
        hint = "correct the cluster's native_specification"
    elif "not allowed to submit" in said or "no submit host" in said or "submit host" in said:
        hint = "make this host a submit host (qconf -as)"
    return SiteRejected(said, field=error.field, value=error.value, hint=hint, fault=error.fault or fault_of(said))
