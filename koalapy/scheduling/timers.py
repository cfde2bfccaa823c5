"""Deadlines in the scheduler's own time, fired by whoever tells it the time."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from koalapy.model.job import JobId
from koalapy.model.request import ClusterName


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


@dataclass(frozen=True, slots=True, order=True)
class Timer:
    at: float
    seq: int
    kind: Deadline
    job: JobId = 0
    generation: int = 0
    component: int = 0
    cluster: ClusterName = ""


class Timers:
    """A heap of deadlines. Those that no longer matter are not removed; whoever handles one looks whether it does."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._seq = 0

    def add(self, at: float, kind: Deadline, *, job: JobId = 0, generation: int = 0, component: int = 0,
            cluster: ClusterName = "") -> None:  # fmt: skip
        self._seq += 1
        heapq.heappush(self._heap, Timer(at, self._seq, kind, job, generation, component, cluster))

    def postpone(self, timer: Timer, at: float) -> None:
        """Have a deadline that was due come again."""
        self._seq += 1
        heapq.heappush(self._heap, replace(timer, at=at, seq=self._seq))

    def next_at(self) -> float | None:
        return self._heap[0].at if self._heap else None

    def due(self, now: float) -> Iterator[Timer]:
        while self._heap and self._heap[0].at <= now:
            yield heapq.heappop(self._heap)
