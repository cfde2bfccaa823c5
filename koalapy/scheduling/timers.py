"""Deadlines in the scheduler's own time, fired by whoever tells it the time."""

import heapq
from collections import Counter
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
    """A heap of deadlines. Those of attempts that are over are removed when they are as many as the others; of the rest
    whoever handles one looks whether it still matters."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._seq = 0
        self._of: Counter[Attempt] = Counter()
        """How many deadlines each attempt has that is not over."""
        self._over: set[Attempt] = set()
        self._stale = 0
        """How many of the heap are of attempts that are over."""

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
        attempt = timer.job, timer.generation
        if attempt not in self._over:
            heapq.heappush(self._heap, timer)
            self._of[attempt] += 1

    def forget(self, job: JobId, generation: int) -> None:
        """An attempt is over: none of its deadlines means anything any more."""
        count = self._of.pop((job, generation), 0)
        if count:
            self._over.add((job, generation))
            self._stale += count
        if self._stale > len(self._heap) // 2:
            self._heap = [timer for timer in self._heap if (timer.job, timer.generation) not in self._over]
            heapq.heapify(self._heap)
            self._over.clear()
            self._stale = 0

    def next_at(self) -> float | None:
        heap = self._heap
        while heap and self._stale and (heap[0].job, heap[0].generation) in self._over:
            heapq.heappop(heap)
            self._stale -= 1
        return heap[0].at if heap else None

    def due(self, now: float) -> Iterator[Timer]:
        while self._heap and self._heap[0].at <= now and (at := self.next_at()) is not None and at <= now:
            timer = heapq.heappop(self._heap)
            attempt = timer.job, timer.generation
            self._of[attempt] -= 1
            if not self._of[attempt]:
                del self._of[attempt]
            yield timer


def doubled(pause: float, times: int, longest: float) -> float:
    """A pause that doubles each time, up to the longest."""
    return min(pause * 2.0 ** min(times, 60), longest)
