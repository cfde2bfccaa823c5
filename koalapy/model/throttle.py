"""How often something may be done: so many times at once, and then at a steady pace."""

from collections import OrderedDict
from collections.abc import Hashable

MAX_REMEMBERED = 10_000
"""Of whom it is known what they did lately; who has done nothing for the longest time is forgotten first."""
_EXACT = 1e-9
"""Seconds that are no waiting: what is left by rounding."""


class Throttle:
    """For each of many by itself; remembered is only who did something lately. All times are by one steady clock."""

    def __init__(self, burst: float, interval: float, most: int = MAX_REMEMBERED) -> None:
        """``burst`` times at once; ``interval``: seconds after which there is one more; ``most`` are remembered."""
        self._burst, self._interval, self._most = burst, interval, most
        self._full_at: OrderedDict[Hashable, float] = OrderedDict()
        """From when on one may have the whole burst again; who was counted last stands last."""
        self._sweep_at = 100

    def wait_time(self, who: Hashable, now: float) -> float:
        """Seconds until there may be one more; 0 when there may be now."""
        early = self._with_one_more(who, now) - now - self._burst * self._interval
        return early if early > _EXACT else 0.0

    def count(self, who: Hashable, now: float) -> None:
        """One more; where there may be none, all of the burst is used up, and no more than that."""
        self._forget(now)
        self._full_at[who] = min(self._with_one_more(who, now), now + self._burst * self._interval)
        self._full_at.move_to_end(who)
        if len(self._full_at) > self._most:
            self._full_at.popitem(last=False)

    def count_if_allowed(self, who: Hashable, now: float) -> float:
        """As ``wait``, and count one more if that may be."""
        wait = self.wait_time(who, now)
        if not wait:
            self.count(who, now)
        return wait

    def _with_one_more(self, who: Hashable, now: float) -> float:
        return max(now, self._full_at.get(who, now)) + self._interval

    def _forget(self, now: float) -> None:
        """Whoever may have the whole burst again; looked for when there are twice as many as were left last time."""
        if len(self._full_at) >= self._sweep_at:
            self._full_at = OrderedDict((who, at) for who, at in self._full_at.items() if at > now)
            self._sweep_at = max(100, 2 * len(self._full_at))
