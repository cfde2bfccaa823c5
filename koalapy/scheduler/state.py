"""What all parts of the scheduler work on."""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from koalapy.model.job import ComponentState, JobId, Token
from koalapy.model.reports import ComponentStatus
from koalapy.model.request import ClusterName
from koalapy.model.sharing import Sharing
from koalapy.model.users import Accounts
from koalapy.policies.registry import Registry
from koalapy.scheduler.advisor.experience import Experience
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.grid import GridStatus, Links
from koalapy.scheduler.ledger import Ledger
from koalapy.scheduler.owner_use import OwnerUse
from koalapy.scheduler.rules import Rules

MIN_RETRY_PAUSE = 1.0
"""Seconds at least until it is looked again whether something is still awaited, however short the patience with it."""


class Deadline(StrEnum):
    CLAIM = "claim"
    """A JCT: the next claiming try."""
    CLAIM_GRACE = "claim-grace"
    BARRIER = "barrier"
    LAUNCH = "launch"
    WALLTIME = "walltime"
    UNREACHABLE = "unreachable"
    LOST = "lost"
    STOP = "stop"
    PROBATION = "probation"
    RETRY = "retry"
    LIMIT = "limit"
    """A limit of a cluster's resource manager may be gone."""
    REFUSAL = "refusal"
    """A job may be tried again on a cluster that has refused it."""
    DOUBT = "doubt"
    """Nodes that did not count are to be tried again."""


class Timer(NamedTuple):
    at: float
    seq: int
    kind: Deadline
    job: JobId = 0
    generation: int = 0
    component: int = 0
    cluster: ClusterName = ""


Attempt = tuple[JobId, int]
"""A job and the generation of an attempt of it."""


class Timers:
    """A heap of deadlines. Void ones never come, and are removed when they are as many as the others."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._seq = 0
        self._of: dict[Attempt, dict[int, Deadline]] = {}
        """The deadlines of each attempt, by their numbers; of attempts that have any."""
        self._void: set[int] = set()
        """The numbers of those in the heap that mean nothing any more."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(
        self,
        at: float,
        kind: Deadline,
        *,
        job: JobId = 0,
        generation: int = 0,
        component: int = 0,
        cluster: ClusterName = "",
    ) -> None:
        self._seq += 1
        self._push(Timer(at, self._seq, kind, job, generation, component, cluster))

    def postpone(self, timer: Timer, at: float) -> None:
        """Have a deadline that was due come again."""
        self._seq += 1
        self._push(timer._replace(at=at, seq=self._seq))

    def _push(self, timer: Timer) -> None:
        heapq.heappush(self._heap, timer)
        self._of.setdefault((timer.job, timer.generation), {})[timer.seq] = timer.kind

    def cancel(self, job: JobId, generation: int, *kinds: Deadline) -> None:
        """Make deadlines of these kinds of an attempt void; all of them if no kind is named, as it is over."""
        of = self._of.pop((job, generation), None)
        if of is None:
            return
        left = {seq: kind for seq, kind in of.items() if kind not in kinds} if kinds else {}
        if left:
            self._of[job, generation] = left
        self._void.update(of.keys() - left.keys() if left else of)
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
        while self._heap and self._heap[0].at <= now and (at := self.next_at()) is not None and at <= now:
            timer = heapq.heappop(self._heap)
            of = self._of[timer.job, timer.generation]
            del of[timer.seq]
            if not of:
                del self._of[timer.job, timer.generation]
            yield timer


def backoff_pause(pause: float, times: int, longest: float) -> float:
    """A pause that doubles each time, up to the longest."""
    return min(pause * 2.0 ** min(times, 60), longest)


@dataclass(frozen=True, slots=True)
class LrmWait:
    """Of a component whose nodes have not all reported."""

    reason: str = ""
    up_by: float | None = None
    """When its nodes, which are its own and had to be started, were up, or will be at the latest; None where none had
    to be."""
    starting: bool = False
    """Whether that is still to come."""
    first_up_by: float = 0.0
    """When nodes that were started first would have been up at the latest: others in their place get no more time."""


NONE_KNOWN = LrmWait()


class LrmWaits:
    """Why each component waits, and until when that is nobody's fault."""

    def __init__(self) -> None:
        self._waits: dict[Token, LrmWait] = {}

    def update(self, status: ComponentStatus, now: float) -> None:
        """Take in what was reported last of one component."""
        if status.state not in (ComponentState.SUBMITTED, ComponentState.WAITING):
            self.forget(status.token)
            return
        before = self._waits.get(status.token, NONE_KNOWN)
        if not (status.starting or before.starting) and status.pending == before.reason:
            return
        up_by, first_up_by = before.up_by, before.first_up_by
        if status.starting and not before.starting:
            up_by = first_up_by = first_up_by or now + status.starting
        elif before.starting and not status.starting:
            up_by = min(now, before.up_by or now)
        after = LrmWait(status.pending, up_by, bool(status.starting), first_up_by)
        if after != before:
            self._waits[status.token] = after

    def forget(self, token: Token) -> None:
        """It waits for nothing any more."""
        self._waits.pop(token, None)

    def reason(self, token: Token) -> str:
        """Why it waits, in its resource manager's words; empty when that was not said."""
        return self._waits.get(token, NONE_KNOWN).reason

    def up_by(self, token: Token) -> float | None:
        """Since when its nodes have been up, or when they will be at the latest; None where none had to be started."""
        return self._waits.get(token, NONE_KNOWN).up_by


class SchedulerState:
    """The rules, what is known of clusters and jobs, what has been learned, and the deadlines; every part gets it."""

    def __init__(
        self,
        rules: Rules,
        policies: Registry,
        clusters: Iterable[ClusterStatus],
        links: Links | None = None,
        experience: Experience | None = None,
        accounts: Accounts | None = None,
        owner_use: OwnerUse | None = None,
    ) -> None:
        self.rules = rules
        self.policies = policies
        self.accounts = accounts or Accounts()
        self.grid = GridStatus(clusters, links)
        speeds = {cluster.name: cluster.speed for cluster in self.grid.clusters()}
        self.sharing = Sharing(rules.sharing, rules.speed_threshold, speeds)
        self.owner_use = owner_use or OwnerUse()
        self.ledger = Ledger(self.owner_use, self.grid.touch)
        self.timers = Timers()
        self.lrm_waits = LrmWaits()
        self.experience = experience or Experience(speeds)
        self.now = 0.0
        """The latest time that the scheduler was told."""
