"""How often something is done, and how long it takes: since the daemon began, and lately."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds: how many took no longer than each is counted."""
RECENT_SPAN = 300.0
"""Seconds that are lately."""
MAX_RECENT = 4096
"""Of more in that time, the last."""


@dataclass(frozen=True, slots=True)
class Recent:
    """What took how long lately, in seconds; of nothing all are 0."""

    count: int
    per_second: float
    mean: float
    most: float
    """95 of 100 took no longer."""
    largest: float


@dataclass(slots=True)
class Timings:
    """Of one kind of thing."""

    count: int = 0
    failures: int = 0
    seconds: float = 0.0
    largest: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * len(BUCKETS))
    """How many took no longer than each of ``BUCKETS``."""
    clock: Callable[[], float] = time.monotonic
    _recent: deque[tuple[float, float, bool]] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    """When each was over, how long it took, and whether it failed."""

    def note(self, seconds: float, *, failed: bool = False) -> None:
        """One more, that is just over."""
        self.count += 1
        self.failures += failed
        self.seconds += seconds
        self.largest = max(self.largest, seconds)
        for index, limit in enumerate(BUCKETS):
            if seconds <= limit:
                self.buckets[index] += 1
        self._recent.append((self.clock(), seconds, failed))

    def recent(self) -> Recent:
        """What was lately."""
        now = self.clock()
        while self._recent and now - self._recent[0][0] > RECENT_SPAN:
            self._recent.popleft()
        took = sorted(seconds for _, seconds, _ in self._recent)
        if not took:
            return Recent(0, 0.0, 0.0, 0.0, 0.0)
        span = RECENT_SPAN if len(took) < MAX_RECENT else max(1e-3, now - self._recent[0][0])
        most = took[min(len(took) - 1, int(len(took) * 0.95))]
        return Recent(len(took), len(took) / span, sum(took) / len(took), most, took[-1])

    def middle(self, span: float) -> float | None:
        """Seconds that one takes that goes well, in the middle of those of the last ``span`` seconds; None without."""
        now = self.clock()
        took = [seconds for at, seconds, failed in self._recent if now - at <= span and not failed]
        return median(took) if took else None
