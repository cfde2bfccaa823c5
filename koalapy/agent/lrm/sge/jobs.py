"""Follow our jobs in Grid Engine from one listing to the next: it forgets a job at once when that ends.

How a job ended is found out beside the listings, since the accounting may take its time.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from koalapy.agent.lrm.port import JobControl, JobEnd, LrmJob, LrmJobState
from koalapy.agent.lrm.sge.answers import (
    DELETED,
    HELD,
    SUSPENDED,
    UNREACHABLE,
    AccountingRecord,
    Listing,
    SgeJob,
    end_of,
    is_broken,
    job_state,
)
from koalapy.agent.lrm.sge.commands import SgeCommands
from koalapy.model.errors import SiteError
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

ENDED_RETENTION = 60.0
"""Seconds for which an ended job stays in our snapshots."""
ACCOUNTING_DELAY = 5.0
"""Seconds in which it may still become known how a job ended: the accounting is written with a delay."""
ACCOUNTING_TIMEOUT = 60.0
"""Seconds for which an accounting that does not answer is waited for, with each job."""
ACCOUNTING_WAIT = 0.5
"""Seconds for which a listing waits for the accounting: one that answers at once has its word in the same listing."""
ACCOUNTING_INTERVAL = 1.0
MAX_CONCURRENT_QACCT = 4


@dataclass(slots=True)
class TrackedJob:
    """A job of ours that has not been settled as ended; times are monotonic seconds."""

    id: str
    name: str
    since: float
    nodes: tuple[str, ...] = ()
    state: LrmJobState = LrmJobState.QUEUED
    cancelled: bool = False
    gone: float | None = None
    """Since when it is not shown any more."""
    asked: float = 0.0
    """When the accounting was last asked about it, and had answered or was given up."""
    unanswered_since: float | None = None
    """Since when the accounting is asked about it and has not answered once."""
    error: str = ""
    """Why it will not start, once asked for."""
    user: str = ""
    """Whose it is, if not our own user's."""


@dataclass(slots=True)
class TrackedJobs:
    """Our jobs are those whose names begin with ``prefix``, of our own user or of the others that we act for."""

    prefix: str
    owner: str
    others: Callable[[], Collection[str]] = frozenset
    clock: Clock = SYSTEM_CLOCK
    known: dict[str, TrackedJob] = field(default_factory=dict)
    _ended: dict[str, tuple[LrmJob, float]] = field(default_factory=dict)

    def submitted(self, id: str, name: str, user: str = "") -> None:
        self.known[id] = TrackedJob(id, name, self.clock.monotonic(), user=user)

    def user_of(self, job: SgeJob) -> str:
        return "" if job.owner == self.owner else job.owner

    def active(self, listing: Listing) -> list[SgeJob]:
        """Those of ours that have not ended."""
        return [job for job in self._ours(listing) if job_state(job.state) is not LrmJobState.ENDED]

    def see(self, listing: Listing, began: float) -> list[TrackedJob]:
        """Take in a listing that began at that time; those that have ended since and are not settled."""
        present = set()
        for job in self._ours(listing):
            if job_state(job.state) is LrmJobState.ENDED:
                if job.id not in self._ended:
                    # Its accounting is settled: nobody knows since when it has been over.
                    self.known.setdefault(job.id, TrackedJob(job.id, job.name, 0.0, gone=0.0, user=self.user_of(job)))
                continue
            known = self.known.setdefault(job.id, TrackedJob(job.id, job.name, began, user=self.user_of(job)))
            known.nodes, known.state, known.gone = job.hosts or known.nodes, job_state(job.state), None
            present.add(job.id)
        missing = [known for known in self.known.values() if known.id not in present and known.since < began]
        for known in missing:
            known.gone = began if known.gone is None else known.gone
        return missing

    def _ours(self, listing: Listing) -> list[SgeJob]:
        owners = {self.owner, *self.others()}
        return [job for job in listing.jobs if job.owner in owners and job.name.startswith(self.prefix)]

    def end(self, known: TrackedJob, end: JobEnd) -> None:
        """Take a job for ended in that way."""
        self.known.pop(known.id, None)
        job = end.apply_to(LrmJob(known.id, known.name, LrmJobState.ENDED, known.nodes, user=known.user))
        self._ended[known.id] = (job, self.clock.monotonic() + ENDED_RETENTION)

    def ended(self) -> list[LrmJob]:
        now = self.clock.monotonic()
        self._ended = {id: each for id, each in self._ended.items() if each[1] > now}
        return [job for job, _ in self._ended.values()]

    def find(self, name: str, user: str = "") -> str | None:
        ids = [known.id for known in self.known.values() if (known.name, known.user) == (name, user)]
        ids += [job.id for job, _ in self._ended.values() if (job.name, job.user) == (name, user)]
        return max(ids, key=int, default=None)

    def unsettled(self) -> list[LrmJob]:
        """Those that have ended, while it is not yet known how."""
        return [
            LrmJob(known.id, known.name, LrmJobState.RUNNING, known.nodes, user=known.user)
            for known in self.known.values()
            if known.gone is not None
        ]


def active_job(job: SgeJob, known: TrackedJob, unreachable: Iterable[str]) -> LrmJob:
    """One that Grid Engine shows, as the port tells it."""
    state, reason, lost = job_state(job.state), "", False
    silent = sorted(set(job.hosts) & set(unreachable))
    if is_broken(job.state):
        reason, lost = f"Grid Engine will not start it: {known.error or 'it is in an error state'}", True
    elif silent:
        # Its processes run on, also after a restart of the qmaster, for which every host is silent at first: whether
        # the node is lost, its runner tells. Once deleted, it is only waited for that the host comes back.
        reason, lost = f"node {silent[0]} does not answer Grid Engine", DELETED in job.state
        state = LrmJobState.ENDED if lost else state
    elif state is LrmJobState.RUNNING and any(letter in SUSPENDED for letter in job.state):
        reason = "suspended by Grid Engine"
    elif state is LrmJobState.QUEUED and HELD in job.state:
        reason = "Grid Engine holds it (qrls lets it go)"
    elif state is LrmJobState.UNKNOWN:
        reason = f"Grid Engine says {job.state!r}"
    return LrmJob(job.id, job.name, state, job.hosts, None, lost, reason, user=known.user)


def unreachable_hosts(listing: Listing) -> Sequence[str]:
    return [each.host for each in listing.instances if UNREACHABLE in each.states]


class EndResolver:
    """Asks about each job that is no longer shown until it is known how it ended, or will never be; ``soon`` is called
    when there is news, or with the seconds after which there may be some."""

    def __init__(
        self,
        commands: SgeCommands,
        jobs: TrackedJobs,
        control: JobControl,
        soon: Callable[[float], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._commands, self._jobs, self._control, self._soon, self._clock = commands, jobs, control, soon, clock
        self._places = asyncio.Semaphore(MAX_CONCURRENT_QACCT)
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def resolve(self, ended: Iterable[TrackedJob]) -> None:
        """Settle what can be told of them now."""
        now = self._clock.monotonic()
        open = [known for known in ended if not self._resolved_at_once(known)]
        due = [known for known in open if known.id not in self._asking and now >= known.asked + ACCOUNTING_INTERVAL]
        for known in due:
            known.unanswered_since = now if known.unanswered_since is None else known.unanswered_since
            self._asking[known.id] = asyncio.create_task(self._inquire(known))
        if due:
            await asyncio.wait([self._asking[known.id] for known in due], timeout=ACCOUNTING_WAIT)
        for known in open:
            if known.id in self._jobs.known:
                self._give_up(known, self._clock.monotonic())

    async def close(self) -> None:
        """Ask no further."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _resolved_at_once(self, known: TrackedJob) -> bool:
        """Whether it could be settled without asking."""
        ending = self._control.reported_ending(known.id)
        if ending is not None and ending.exit_code is not None and ending.signal_number is None and not known.cancelled:
            self._jobs.end(known, JobEnd(ending.exit_code))
        elif known.cancelled and not known.nodes:  # it never ran
            self._jobs.end(known, JobEnd(None, reason="cancelled"))
        else:
            # Of a killed job the library says "aborted" at best; the accounting knows why.
            return False
        return True

    async def _inquire(self, known: TrackedJob) -> None:
        try:
            async with self._places:
                records = await self._accounted(known) if known.id in self._jobs.known else []
        except SiteError as error:
            log.warning(
                "accounting does not answer", action="accounting-silent", lrm_job=known.id, reason=error.message
            )
            return
        finally:
            known.asked = self._clock.monotonic()
            self._asking.pop(known.id, None)
        known.unanswered_since = None
        if records and known.id in self._jobs.known:
            self._jobs.end(known, end_of(records[-1], cancelled=known.cancelled))
            self._soon(0.0)

    def _give_up(self, known: TrackedJob, now: float) -> None:
        """Settle it without the accounting's word if that has had its time."""
        asking = known.unanswered_since is not None
        began, timeout = (known.unanswered_since, ACCOUNTING_TIMEOUT) if asking else (known.gone, ACCOUNTING_DELAY)
        if began is not None and now - began < timeout:
            self._soon(ACCOUNTING_INTERVAL)
            return
        ending = self._control.reported_ending(known.id)
        if known.cancelled:
            self._jobs.end(known, JobEnd(None, reason="cancelled"))
        elif ending is not None and (ending.aborted or ending.signal):
            self._jobs.end(known, JobEnd(None, lost=True, reason=f"Grid Engine ended it {ending.signal}".strip()))
        else:
            why = f": its accounting has not answered for {ACCOUNTING_TIMEOUT:g} s" if asking else ""
            self._jobs.end(known, JobEnd(None, reason=f"Grid Engine does not say how it ended{why}"))

    async def _accounted(self, known: TrackedJob) -> Sequence[AccountingRecord]:
        found = await self._commands.accounting(known.user or self._jobs.owner, known.id)
        own = [each for each in found if each.name == known.name]
        # What ran on further hosts has records of its own; the job's is that of the host where it was started.
        return [each for each in own if each.host == known.nodes[0]] if known.nodes else own
