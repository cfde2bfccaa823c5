"""Count and time operations, since the daemon's start and recently."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the cumulative histogram in seconds."""
RECENT_SPAN = 300.0
"""Seconds that count as recent."""
MAX_RECENT = 4096
"""Maximum number of recent operations that are kept, the last ones."""


@dataclass(frozen=True, slots=True)
class Recent:
    """The number and durations of recent operations, in seconds; all 0 if there were none."""

    count: int
    per_second: float
    mean: float
    percentile_95: float
    """The 95th percentile."""
    largest: float


@dataclass(slots=True)
class Timings:
    """The number, failures and durations of one kind of operation."""

    count: int = 0
    failures: int = 0
    seconds: float = 0.0
    largest: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * len(BUCKETS))
    """Numbers of operations that took no longer than each bound of ``BUCKETS``."""
    clock: Callable[[], float] = time.monotonic
    _recent: deque[tuple[float, float, bool]] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    """End, duration and failure of each recent operation."""

    def note(self, seconds: float, *, failed: bool = False) -> None:
        """Count an operation that has just ended after ``seconds``."""
        self.count += 1
        self.failures += failed
        self.seconds += seconds
        self.largest = max(self.largest, seconds)
        for index, limit in enumerate(BUCKETS):
            if seconds <= limit:
                self.buckets[index] += 1
        self._recent.append((self.clock(), seconds, failed))

    def summarize_recent(self) -> Recent:
        """Return the statistics of the operations of the last ``RECENT_SPAN`` seconds."""
        now = self.clock()
        while self._recent and now - self._recent[0][0] > RECENT_SPAN:
            self._recent.popleft()
        took = sorted(seconds for _, seconds, _ in self._recent)
        if not took:
            return Recent(0, 0.0, 0.0, 0.0, 0.0)
        span = RECENT_SPAN if len(took) < MAX_RECENT else max(1e-3, now - self._recent[0][0])
        percentile_95 = took[min(len(took) - 1, int(len(took) * 0.95))]
        return Recent(len(took), len(took) / span, sum(took) / len(took), percentile_95, took[-1])

    def recent_median(self, span: float) -> float | None:
        """Return the median duration of the successes of the last ``span`` seconds; None if there are none."""
        now = self.clock()
        took = [seconds for ended_at, seconds, failed in self._recent if now - ended_at <= span and not failed]
        return median(took) if took else None
