"""How long the daemon has been silent, counted where nobody can be asked: on a node, and by an agent.

Each side asks the next one with a number, and counts the answer from the moment at which it asked. So no node counts
from a later moment than the daemon does, however long messages are on their way or wait to be read.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_UNANSWERED = 100
"""Questions that may still be answered; an answer to an older one would say little."""


def boot_time() -> float:
    """Return seconds of a clock that cannot be set, and that counts the time in which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SilenceClock:
    """Counts the seconds since the daemon was last known to be there."""

    def __init__(self, heard_at: float, clock: Callable[[], float] = boot_time) -> None:
        self._clock = clock
        self.heard_at = heard_at
        """By ``clock``; never later than the daemon itself remembers."""
        self._number = 0
        self._asked: dict[int, float] = {}
        """When each question was asked that may still be answered."""

    def ask(self) -> int:
        """Return the number of a new question, whose answer counts from now on."""
        self._number += 1
        self._asked[self._number] = self._clock()
        self._asked.pop(self._number - MAX_UNANSWERED, None)
        return self._number

    def answered(self, number: int, silence: float = 0.0) -> None:
        """Take in that the daemon had been silent for so many seconds when a question was answered."""
        asked = self._asked.pop(number, None)
        if asked is not None:
            self.heard_at = max(self.heard_at, asked - max(0.0, silence))

    @property
    def silence(self) -> float:
        return self._clock() - self.heard_at


def renewal_interval(lease: float | None, longest: float = 10.0, shortest: float = 0.02) -> float:
    """Return after how many seconds a lease is renewed: often enough that some answers may get lost."""
    return longest if lease is None else max(shortest, min(longest, lease / 10))
