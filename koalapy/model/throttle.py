"""How often something may be done: so many times at once, and then at a steady pace."""

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Throttle:
    """For each of many; remembered is only who did something lately."""

    burst: int
    """Times at once."""
    interval: float
    """Seconds after which there is one more."""
    _full_at: dict[Hashable, float] = field(default_factory=dict)
    """From when on one may have the whole burst again."""
    _sweep_at: int = 100

    def allows(self, who: Hashable, now: float) -> float:
        """Count one more, if that may be: 0, or in how many seconds it may; ``now`` by a steady clock."""
        full_at = max(now, self._full_at.get(who, now)) + self.interval
        too_early = full_at - now - self.burst * self.interval
        if too_early > 1e-9:
            return too_early
        self._forget(now)
        self._full_at[who] = full_at
        return 0.0

    def _forget(self, now: float) -> None:
        """Whoever may have the whole burst again; looked for when there are twice as many as were left last time."""
        if len(self._full_at) >= self._sweep_at:
            self._full_at = {who: at for who, at in self._full_at.items() if at > now}
            self._sweep_at = max(100, 2 * len(self._full_at))
