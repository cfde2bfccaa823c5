"""When the scheduler of a simulation scans its queues though nothing has happened."""

from collections.abc import Callable
from math import ceil, floor

from koalapy.scheduler.rules import Rules

MIN_IN_VAIN = 200
MAX_MOMENTS = 100_000
"""At which nothing happens but scans and deadlines, before a simulation in which nothing else is going to is over."""


class RegularScans:
    """On schedule, as in production; ever more seldom in stretches in which nothing happens, once whoever waits has had
    so many scans that further ones change nothing."""

    def __init__(self, rules: Rules, now: float) -> None:
        self._interval = rules.scan_interval
        self.at = now + self._interval
        """When the next one is."""
        promised = ceil((rules.low_patience or 0.0) / rules.scan_interval)
        self._enough = max(MIN_IN_VAIN, 2 * rules.aging_tries, 2 * promised)
        """By then whoever waits was aged and promised its turn, if it ever is."""
        self._in_vain = 0
        """Scans since something happened."""
        self._moments = 0
        """As long as that."""

    def skip_those_before(self, now: float) -> None:
        """As while nobody waited."""
        if self.at < now:
            self.at += ceil((now - self.at) / self._interval) * self._interval

    def something_happens(self, now: float) -> None:
        """From now on they are on schedule."""
        self._in_vain = self._moments = 0
        if self.at - now > self._interval:
            self.at -= floor((self.at - now) / self._interval) * self._interval

    def are_enough(self) -> bool:
        """To be asked once for each moment at which nothing else happens: whether nothing more will come of them."""
        self._moments += 1
        return self._in_vain >= self._enough or self._moments >= MAX_MOMENTS

    def next(self, *, is_counted: Callable[[], bool]) -> None:
        """One takes place, and the next will. ``is_counted``: whether somebody counts them, so that none may be left
        out."""
        self._in_vain += 1
        beyond = self._in_vain - self._enough
        times = 2 ** min(beyond, 32) if beyond > 0 and not is_counted() else 1
        self.at += times * self._interval
