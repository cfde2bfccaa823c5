"""Our jobs in Grid Engine from one listing to the next: it forgets a job at once when that ends."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from koalapy.agent.lrm.port import JobEnd, LrmJob, LrmJobState
from koalapy.agent.lrm.sge.qstat import Listing, SgeJob
from koalapy.agent.lrm.sge.states import DELETED, HELD, SUSPENDED, UNREACHABLE, is_broken, job_state
from koalapy.system.clock import SYSTEM_CLOCK, Clock

ENDED_RETENTION = 60.0
"""Seconds for which an ended job stays in our snapshots."""


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
        """It has ended so."""
        self.known.pop(known.id, None)
        job = LrmJob(
            known.id,
            known.name,
            LrmJobState.ENDED,
            known.nodes,
            end.exit_code,
            end.lost,
            end.reason,
            user=known.user,
            exceeded=end.exceeded,
        )
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
