"""Follow grid jobs in Grid Engine from one listing to the next, since it forgets a job when that ends.

How a job ended is read from the accounting concurrently, since that is written late.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

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
    use_of,
)
from koalapy.agent.lrm.sge.commands import SgeCommands
from koalapy.model.errors import SiteError
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

ENDED_RETENTION_S = 60.0
"""How long snapshots contain an ended job."""
ACCOUNTING_DELAY_S = 5.0
"""Maximum time after a job's end until the accounting has its record."""
ACCOUNTING_TIMEOUT_S = 60.0
"""How long to wait, for each job, for an accounting that does not answer."""
ACCOUNTING_WAIT_S = 0.5
"""How long a snapshot waits for the accounting; a fast answer is in the same snapshot."""
ACCOUNTING_INTERVAL_S = 1.0
MAX_CONCURRENT_QACCT = 4


@dataclass(slots=True)
class TrackedJob:
    """A grid job that is not known to have ended in a known way; times are monotonic seconds."""

    id: str
    name: str
    since: float
    nodes: tuple[str, ...] = ()
    state: LrmJobState = LrmJobState.QUEUED
    cancelled: bool = False
    gone_since: float | None = None
    """When it was first missing in a listing."""
    queried_at: float = 0.0
    """When the last query of the accounting about it ended."""
    unanswered_since: float | None = None
    """When the first of the queries began that the accounting has not answered."""
    error: str = ""
    """Why it will not start, once that was queried."""
    user: str = ""
    """The account that it runs as; empty for the agent's own."""


@dataclass(slots=True)
class TrackedJobs:
    """Grid jobs: those of the agent's account or other accounts that it uses, with names that begin with ``prefix``."""

    prefix: str
    owner: str
    other_accounts: Callable[[], Collection[str]] = frozenset
    clock: Clock = SYSTEM_CLOCK
    by_id: dict[str, TrackedJob] = field(default_factory=dict)
    _ended: dict[str, tuple[LrmJob, float]] = field(default_factory=dict)

    def add_submitted(self, id: str, name: str, user: str = "") -> None:
        self.by_id[id] = TrackedJob(id, name, self.clock.monotonic(), user=user)

    def user_of(self, job: SgeJob) -> str:
        return "" if job.owner == self.owner else job.owner

    def active_jobs(self, listing: Listing) -> list[SgeJob]:
        """Return the grid jobs that have not ended."""
        return [job for job in self._select(listing) if job_state(job.state) is not LrmJobState.ENDED]

    def update(self, listing: Listing, began: float) -> list[TrackedJob]:
        """Apply a listing that began at that time. Return jobs that have ended in a way that is not known yet."""
        present = set()
        for job in self._select(listing):
            if job_state(job.state) is LrmJobState.ENDED:
                if job.id not in self._ended:
                    # It may have ended long ago, so that its accounting is complete.
                    ended = TrackedJob(job.id, job.name, 0.0, gone_since=0.0, user=self.user_of(job))
                    self.by_id.setdefault(job.id, ended)
                continue
            tracked = self.by_id.setdefault(job.id, TrackedJob(job.id, job.name, began, user=self.user_of(job)))
            tracked.nodes, tracked.state, tracked.gone_since = job.hosts or tracked.nodes, job_state(job.state), None
            present.add(job.id)
        missing = [job for job in self.by_id.values() if job.id not in present and job.since < began]
        for tracked in missing:
            tracked.gone_since = began if tracked.gone_since is None else tracked.gone_since
        return missing

    def _select(self, listing: Listing) -> list[SgeJob]:
        """Return the grid jobs in a listing, by their accounts and the prefix of their names."""
        owners = {self.owner, *self.other_accounts()}
        return [job for job in listing.jobs if job.owner in owners and job.name.startswith(self.prefix)]

    def record_end(self, tracked: TrackedJob, end: JobEnd) -> None:
        """Record how a job ended; snapshots show it for ``ENDED_RETENTION_S`` seconds."""
        self.by_id.pop(tracked.id, None)
        job = end.apply_to(LrmJob(tracked.id, tracked.name, LrmJobState.ENDED, tracked.nodes, user=tracked.user))
        self._ended[tracked.id] = (job, self.clock.monotonic() + ENDED_RETENTION_S)

    def ended_jobs(self) -> list[LrmJob]:
        """Return the jobs that ended less than ``ENDED_RETENTION_S`` seconds ago."""
        now = self.clock.monotonic()
        self._ended = {id: entry for id, entry in self._ended.items() if entry[1] > now}
        return [job for job, _ in self._ended.values()]

    def find_id(self, name: str, user: str = "") -> str | None:
        """Return the id of an account's newest job of a name, also an ended one; None without one."""
        ids = [job.id for job in self.by_id.values() if (job.name, job.user) == (name, user)]
        ids += [job.id for job, _ in self._ended.values() if (job.name, job.user) == (name, user)]
        return max(ids, key=int, default=None)

    def unresolved_jobs(self) -> list[LrmJob]:
        """Return the jobs that have gone but with unknown exit codes; snapshots show them as running."""
        return [
            LrmJob(job.id, job.name, LrmJobState.RUNNING, job.nodes, user=job.user)
            for job in self.by_id.values()
            if job.gone_since is not None
        ]


def convert_job(job: SgeJob, tracked: TrackedJob, unreachable: Iterable[str]) -> LrmJob:
    """Return a job of Grid Engine's listing for a snapshot, with the reason why it waits or is lost."""
    state, reason, lost = job_state(job.state), "", False
    unreachable_nodes = sorted(set(job.hosts) & set(unreachable))
    if is_broken(job.state):
        reason, lost = f"Grid Engine will not start it: {tracked.error or 'it is in an error state'}", True
    elif unreachable_nodes:
        # Its processes continue. After a restart of the master every host is unreachable at first, so only the runner
        # knows whether the node is lost. A deleted job only waits for the host to return.
        reason, lost = f"node {unreachable_nodes[0]} does not answer Grid Engine", DELETED in job.state
        state = LrmJobState.ENDED if lost else state
    elif state is LrmJobState.RUNNING and any(letter in SUSPENDED for letter in job.state):
        reason = "suspended by Grid Engine"
    elif state is LrmJobState.QUEUED and HELD in job.state:
        reason = "Grid Engine holds it (qrls releases it)"
    elif state is LrmJobState.UNKNOWN:
        reason = f"Grid Engine says {job.state!r}"
    return LrmJob(job.id, job.name, state, job.hosts, None, lost, reason, user=tracked.user)


def unreachable_hosts(listing: Listing) -> Sequence[str]:
    return [instance.host for instance in listing.instances if UNREACHABLE in instance.states]


class EndResolver:
    """Finds out how jobs ended, from the control's reports or the accounting."""

    def __init__(
        self,
        commands: SgeCommands,
        jobs: TrackedJobs,
        control: JobControl,
        poll_soon: Callable[[float], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """``poll_soon`` is called when an end is known, or with the seconds after which it may be."""
        self._commands, self._jobs, self._control, self._poll_soon = commands, jobs, control, poll_soon
        self._clock = clock
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_QACCT)
        self._queries: dict[str, asyncio.Task[None]] = {}

    async def resolve(self, jobs: Iterable[TrackedJob]) -> None:
        """Record the ends of jobs that are known now, and query the accounting about others."""
        now = self._clock.monotonic()
        unresolved = []
        for job in jobs:
            ending = self._control.reported_ending(job.id)
            if job.cancelled and not job.nodes:  # it never ran
                self._jobs.record_end(job, JobEnd(None, reason="cancelled"))
            elif ending is None or ending.exit_code is None or ending.signal_number is not None or job.cancelled:
                # Of a killed job the library reports "aborted" at best; the accounting has the cause.
                unresolved.append(job)
            else:
                self._jobs.record_end(job, JobEnd(ending.exit_code, use=ending.use))
        due = [
            job for job in unresolved if job.id not in self._queries and now >= job.queried_at + ACCOUNTING_INTERVAL_S
        ]
        for job in due:
            job.unanswered_since = now if job.unanswered_since is None else job.unanswered_since
            self._queries[job.id] = asyncio.create_task(self._query_accounting(job))
        if due:
            await asyncio.wait([self._queries[job.id] for job in due], timeout=ACCOUNTING_WAIT_S)
        for job in unresolved:
            if job.id in self._jobs.by_id:
                self._give_up_late(job, self._clock.monotonic())

    async def close(self) -> None:
        """Cancel all queries."""
        tasks = list(self._queries.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _query_accounting(self, job: TrackedJob) -> None:
        """Query the accounting for the end of a job, and record it if there is a record."""
        records: Sequence[AccountingRecord] = ()
        try:
            async with self._slots:
                if job.id in self._jobs.by_id:
                    records = await self._commands.read_job_accounting(job.user or self._jobs.owner, job.id)
        except SiteError as error:
            log.warning("accounting does not answer", action="accounting-silent", lrm_job=job.id, reason=error.message)
            return
        finally:
            job.queried_at = self._clock.monotonic()
            self._queries.pop(job.id, None)
        job.unanswered_since = None
        # Processes on further hosts have separate records; the job's is that of the host where it was started.
        of_job = [record for record in records if record.name == job.name]
        records = [record for record in of_job if not job.nodes or record.host == job.nodes[0]]
        if records and job.id in self._jobs.by_id:
            end = end_of(records[-1], cancelled=job.cancelled)
            self._jobs.record_end(job, replace(end, use=use_of(of_job)))
            self._poll_soon(0.0)

    def _give_up_late(self, job: TrackedJob, now: float) -> None:
        """Record an end without exit code if the accounting has no record in time; else request a later poll."""
        is_asked = job.unanswered_since is not None
        since, timeout = (
            (job.unanswered_since, ACCOUNTING_TIMEOUT_S) if is_asked else (job.gone_since, ACCOUNTING_DELAY_S)
        )
        if since is not None and now - since < timeout:
            self._poll_soon(ACCOUNTING_INTERVAL_S)
            return
        ending = self._control.reported_ending(job.id)
        if job.cancelled:
            self._jobs.record_end(job, JobEnd(None, reason="cancelled"))
        elif ending is not None and (ending.aborted or ending.signal):
            self._jobs.record_end(job, JobEnd(None, lost=True, reason=f"Grid Engine ended it {ending.signal}".strip()))
        else:
            detail = f": its accounting has not answered for {ACCOUNTING_TIMEOUT_S:g} s" if is_asked else ""
            self._jobs.record_end(job, JobEnd(None, reason=f"Grid Engine does not say how it ended{detail}"))
