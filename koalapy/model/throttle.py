"""A rate limiter with bursts."""

from collections import OrderedDict
from collections.abc import Hashable

MAX_REMEMBERED = 10_000
"""Maximum number of keys with stored state; the keys unused for longest are dropped first."""
_ROUNDING_S = 1e-9
"""Wait times up to this are rounding errors."""


class Throttle:
    """A rate limiter that counts each key separately. All times are of one monotonic clock."""

    def __init__(self, burst: float, interval: float, max_keys: int = MAX_REMEMBERED) -> None:
        """Allow ``burst`` actions at once, then one each ``interval`` seconds."""
        self._burst, self._interval, self._max_keys = burst, interval, max_keys
        self._full_at: OrderedDict[Hashable, float] = OrderedDict()
        """When each key has its full burst again; the key counted last is at the end."""
        self._sweep_at = 100

    def wait_time(self, key: Hashable, now: float) -> float:
        """Return the seconds until the next action is allowed; 0 if it is allowed now."""
        wait = self._full_at_after_action(key, now) - now - self._burst * self._interval
        return wait if wait > _ROUNDING_S else 0.0

    def count(self, key: Hashable, now: float) -> None:
        """Count an action. One that is not allowed uses up the burst, but lengthens the wait no further."""
        self._drop_idle_keys(now)
        self._full_at[key] = min(self._full_at_after_action(key, now), now + self._burst * self._interval)
        self._full_at.move_to_end(key)
        if len(self._full_at) > self._max_keys:
            self._full_at.popitem(last=False)

    def count_if_allowed(self, key: Hashable, now: float) -> float:
        """Count an action if it is allowed, and return the seconds to wait otherwise (0: counted)."""
        wait = self.wait_time(key, now)
        if not wait:
            self.count(key, now)
        return wait

    def _full_at_after_action(self, key: Hashable, now: float) -> float:
        """Return the time at which the key would have its full burst after one more action now."""
        return max(now, self._full_at.get(key, now)) + self._interval

    def _drop_idle_keys(self, now: float) -> None:
        """Drop the keys with a full burst. Do so only when the number of keys has doubled since the last time."""
        if len(self._full_at) >= self._sweep_at:
            self._full_at = OrderedDict((key, full_at) for key, full_at in self._full_at.items() if full_at > now)
            self._sweep_at = max(100, 2 * len(self._full_at))
