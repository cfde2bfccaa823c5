"""The state that all components of the scheduler share, and the deadlines in the scheduler's time."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from koalapy.model.cluster import NO_RELAYS, ClusterPair, RelayedSince, Relays
from koalapy.model.job import Job, JobId, PlannedStart, Token
from koalapy.model.reports import ComponentStatus
from koalapy.model.request import ClusterName
from koalapy.model.reservation import Reservation
from koalapy.model.users import Accounts, Sharing
from koalapy.policies.registry import Registry
from koalapy.scheduler.advisor.experience import Experience
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.fair_share import FRONT, FairShares, Standing
from koalapy.scheduler.grid import GridStatus, Links
from koalapy.scheduler.ledger import Ledger
from koalapy.scheduler.owner_use import OwnerUse
from koalapy.scheduler.reservations import Reservations
from koalapy.scheduler.rules import Rules

MIN_RETRY_PAUSE = 1.0
"""Minimum time in seconds between two checks of a condition, even if its timeout is shorter."""


class Deadline(StrEnum):
    CLAIM = "claim"
    """A job claiming time (JCT): the next claiming try."""
    CLAIM_GRACE = "claim-grace"
    BARRIER = "barrier"
    LAUNCH = "launch"
    WALLTIME = "walltime"
    UNREACHABLE = "unreachable"
    LOST = "lost"
    STOP = "stop"
    PROBATION = "probation"
    DRAIN = "drain"
    """The begin or the end of a drain."""
    RETRY = "retry"
    LIMIT = "limit"
    """A limit of a cluster's resource manager may have been lifted."""
    REFUSAL = "refusal"
    """A job may be tried again on a cluster that rejected it."""
    DIRECT_RETRY = "direct-retry"
    """A relayed link is to be tried directly again."""
    DOUBT = "doubt"
    """Doubted nodes are to be tried again."""
    BEGIN = "begin"
    """The begin of a deferred job."""
    LATEST_START = "latest-start"
    """A job that has not started can no longer end before its deadline."""
    DEADLINE = "deadline"
    """The deadline of a job with an attempt, or the time to warn its program."""


class Timer(NamedTuple):
    at: float
    seq: int
    kind: Deadline
    job: JobId = 0
    generation: int = 0
    component: int = 0
    cluster: ClusterName = ""

    @property
    def owner(self) -> "TimerOwner":
        return self.job, self.generation if self.job else self.cluster


TimerOwner = tuple[JobId, int | ClusterName]
"""A job and the generation of one of its attempts, or 0 and a cluster."""


class Timers:
    """A heap of deadlines. Cancelled ones are skipped, and removed once they are more than half of the heap."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._seq = 0
        self._of: dict[TimerOwner, dict[int, Deadline]] = {}
        """The deadlines of each attempt and cluster that has any, by sequence number."""
        self._void: set[int] = set()
        """The sequence numbers of cancelled deadlines that are still in the heap."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(
        self,
        due_at: float,
        kind: Deadline,
        *,
        job: JobId = 0,
        generation: int = 0,
        component: int = 0,
        cluster: ClusterName = "",
    ) -> None:
        """Add a deadline of a cluster, a job, or one attempt (``generation``) or component of a job.

        ``due_at`` is in seconds of the scheduler's time.
        """
        self._seq += 1
        self._push(Timer(due_at, self._seq, kind, job, generation, component, cluster))

    def postpone(self, timer: Timer, due_at: float) -> None:
        """Add a deadline that was due again, for a later time."""
        self._seq += 1
        self._push(timer._replace(at=due_at, seq=self._seq))

    def _push(self, timer: Timer) -> None:
        heapq.heappush(self._heap, timer)
        self._of.setdefault(timer.owner, {})[timer.seq] = timer.kind

    def cancel(self, job: JobId, owner: int | ClusterName, *kinds: Deadline) -> None:
        """Cancel deadlines of these kinds, or all, of an attempt (``owner``: its generation) or a cluster (0, name)."""
        deadlines = self._of.pop((job, owner), None)
        if deadlines is None:
            return
        remaining = {seq: kind for seq, kind in deadlines.items() if kind not in kinds} if kinds else {}
        if remaining:
            self._of[job, owner] = remaining
        self._void.update(deadlines.keys() - remaining.keys() if remaining else deadlines)
        if len(self._void) > len(self._heap) // 2:
            self._heap = [timer for timer in self._heap if timer.seq not in self._void]
            heapq.heapify(self._heap)
            self._void.clear()

    def next_at(self) -> float | None:
        heap = self._heap
        while heap and self._void and heap[0].seq in self._void:
            self._void.remove(heapq.heappop(heap).seq)
        return heap[0].at if heap else None

    def pop_due(self, now: float) -> Iterator[Timer]:
        """Remove and yield the deadlines that are due, the earliest first, including those added in the meantime."""
        while self._heap and self._heap[0].at <= now and (due_at := self.next_at()) is not None and due_at <= now:
            timer = heapq.heappop(self._heap)
            deadlines = self._of[timer.owner]
            del deadlines[timer.seq]
            if not deadlines:
                del self._of[timer.owner]
            yield timer


def backoff_pause(pause: float, times: int, longest: float) -> float:
    """Return the pause before a retry: ``pause``, doubled ``times`` times, at most ``longest``."""
    return min(pause * 2.0 ** min(times, 60), longest)


@dataclass(frozen=True, slots=True)
class LrmWait:
    """The reason why a component waits for its nodes in the resource manager, or is suspended."""

    reason: str = ""
    is_limit: bool = False
    """Whether the reason is a limit of its account."""
    up_by: float | None = None
    """When its powered-down nodes were started, or will be at the latest; None if none had to be started."""
    starting: bool = False
    """Whether these nodes are still being started."""
    first_up_by: float = 0.0
    """When the first nodes that were started for it should have been up. Replacements get no extra time."""


NONE_KNOWN = LrmWait()
SUSPENDED = "suspended"


class LrmWaits:
    """The reported reasons why components wait, and the times until which a wait is not a timeout."""

    def __init__(self) -> None:
        self._waits: dict[Token, LrmWait] = {}

    def update(self, status: ComponentStatus, start_limit: float, now: float) -> bool:
        """Store the latest report of one component; return whether its nodes began or ceased to be started.

        ``start_limit``: maximum seconds for starting its nodes, counted from the first report of that.
        """
        previous = self._waits.get(status.token, NONE_KNOWN)
        pending = status.pending, status.limited
        if not (status.starting or previous.starting) and pending == (previous.reason, previous.is_limit):
            return False
        up_by, first_up_by = previous.up_by, previous.first_up_by
        if status.starting and not previous.starting:
            up_by = first_up_by = first_up_by or now + min(status.starting, start_limit)
        elif previous.starting and not status.starting:
            up_by = min(now, previous.up_by or now)
        new = LrmWait(status.pending, status.limited, up_by, bool(status.starting), first_up_by)
        if new != previous:
            self._waits[status.token] = new
        return new.starting is not previous.starting

    def forget(self, token: Token) -> None:
        """Remove a component that waits for nothing any more."""
        self._waits.pop(token, None)

    def reason(self, token: Token) -> str:
        """Return the resource manager's reason for a component's wait; empty if it reported none."""
        return self._waits.get(token, NONE_KNOWN).reason

    def is_limited(self, token: Token) -> bool:
        """Return whether a component waits for a limit of its account."""
        return self._waits.get(token, NONE_KNOWN).is_limit

    def describe(self, job: Job) -> str:
        """Return what the resource managers say of a job's components: ``suspended on north by Slurm``."""
        if job.attempt is None:
            return ""
        reasons = {c.cluster: self.reason(job.token(c.index)) for c in job.attempt.gang if not c.has_ended}
        texts = []
        for cluster, reason in sorted(reasons.items()):
            if reason.startswith(SUSPENDED):
                texts.append(f"{SUSPENDED} on {cluster}{reason.removeprefix(SUSPENDED)}")
            elif reason:
                texts.append(f"{cluster}: {reason}")
        return "; ".join(texts)

    def up_by(self, token: Token) -> float | None:
        """Return when a component's nodes have been or will be started; None if none had to be started."""
        return self._waits.get(token, NONE_KNOWN).up_by

    def has_missed_start(self, token: Token, now: float) -> bool:
        """Return whether nodes that were started for a component should have been up before ``now``."""
        return 0.0 < self._waits.get(token, NONE_KNOWN).first_up_by <= now


class SchedulerState:
    """The rules, the grid, the jobs, the learned run times and the deadlines, shared by all components."""

    def __init__(
        self,
        rules: Rules,
        policies: Registry,
        clusters: Iterable[ClusterStatus],
        links: Links | None = None,
        experience: Experience | None = None,
        accounts: Accounts | None = None,
        owner_use: OwnerUse | None = None,
        relays: Relays = NO_RELAYS,
        past_starts: Sequence[PlannedStart] = (),
    ) -> None:
        """``past_starts``: planned starts of jobs that have started, oldest first."""
        self.rules = rules
        self.policies = policies
        self.accounts = accounts or Accounts()
        self.grid = GridStatus(clusters, links, relays)
        self.reservations = Reservations(self.grid)
        speeds = {cluster.name: cluster.speed for cluster in self.grid.clusters()}
        self.sharing = Sharing(rules.sharing, rules.speed_threshold, speeds)
        self.owner_use = owner_use or OwnerUse(shares=FairShares() if rules.queue_order == "fair-share" else None)
        self.ledger = Ledger(self.owner_use, self.grid.touch)
        self.ledger.on_streams = self.grid.reserve_streams
        self.relayed: dict[ClusterPair, RelayedSince] = {}
        """Why links are relayed, as measurements and starts of jobs have shown."""
        self.timers = Timers()
        self.lrm_waits = LrmWaits()
        self.experience = experience or Experience(speeds)
        self.past_starts = past_starts
        self.now = 0.0
        """The scheduler's time: the latest time passed to it."""

    def store_reservation(self, reservation: Reservation) -> None:
        """Keep the nodes of a new reservation and charge its owner, or release those of one that has ended."""
        self.reservations.store(reservation)
        if self.owner_use.shares is not None:
            self.owner_use.shares.store_reservation(reservation)

    def standing(self, owner: str) -> Standing:
        """Return the sort key of an owner by fair share now."""
        shares = self.owner_use.shares
        return FRONT if shares is None else shares.standing(owner, self.now)
