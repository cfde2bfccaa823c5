"""How often somebody may do something: a bucket for each that fills again, and a bounded number of them."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

MAX_BUCKETS = 10_000
"""Who has done nothing for the longest time is forgotten first."""


class Rates:
    """Buckets by whose they are: each holds ``burst`` and gets ``rate`` more in a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = MAX_BUCKETS) -> None:
        self._clock, self._most = clock, most
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        """What was left, and when."""

    def wait(self, whose: Hashable, rate: float, burst: float) -> float:
        """Seconds until there is one to take; 0 where there is."""
        return max(0.0, (1 - self._left(whose, rate, burst)) / rate)

    def take(self, whose: Hashable, rate: float, burst: float) -> None:
        """One; where there is none, the bucket stays empty."""
        self._buckets[whose] = max(0.0, self._left(whose, rate, burst) - 1), self._clock()
        self._buckets.move_to_end(whose)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)

    def _left(self, whose: Hashable, rate: float, burst: float) -> float:
        left, at = self._buckets.get(whose, (burst, self._clock()))
        return min(burst, left + (self._clock() - at) * rate)
