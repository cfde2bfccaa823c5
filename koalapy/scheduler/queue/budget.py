"""How long a step goes on placing jobs: what is left then goes into the next one."""

from collections.abc import Callable
from math import inf

Clock = Callable[[], float]
"""Seconds, from whatever moment on."""
MAX_DOUBLINGS = 10


class Budget:
    """Of each step in turn. A scan that has to begin anew is given twice as long, so that it comes to its end."""

    def __init__(self, seconds: float, clock: Clock | None) -> None:
        """Without a clock a step does all there is to do."""
        self._seconds, self._clock = seconds, clock
        self._doublings = 0
        self._until = inf

    def begin(self) -> None:
        """A step begins to place jobs."""
        if self._clock is not None:
            self._until = self._clock() + self._seconds * 2**self._doublings

    def double(self) -> None:
        """What was left over begins anew."""
        self._doublings = min(self._doublings + 1, MAX_DOUBLINGS)

    def reset(self) -> None:
        """Nothing is left over."""
        self._doublings = 0

    @property
    def is_spent(self) -> bool:
        return self._clock is not None and self._clock() >= self._until
