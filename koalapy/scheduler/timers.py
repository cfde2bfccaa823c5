"""Deadlines in the scheduler's own time, fired by whoever tells it the time."""

import heapq
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from koalapy.model.job import JobId
from koalapy.model.request import ClusterName

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

    def forget(self, job: JobId, generation: int, *kinds: Deadline) -> None:
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

    def due(self, now: float) -> Iterator[Timer]:
        while self._heap and self._heap[0].at <= now and (at := self.next_at()) is not None and at <= now:
            timer = heapq.heappop(self._heap)
            of = self._of[timer.job, timer.generation]
            del of[timer.seq]
            if not of:
                del self._of[timer.job, timer.generation]
            yield timer


def doubled(pause: float, times: int, longest: float) -> float:
    """A pause that doubles each time, up to the longest."""
    return min(pause * 2.0 ** min(times, 60), longest)
