"""Read the time and wait, through one object that tests replace."""

import asyncio
import time


class Clock:
    """The clocks of this machine, and waiting by them. Tests pass a clock that they control."""

    def now(self) -> float:
        """Return the wall clock in seconds since 1970. It may jump when an operator sets it."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back; only differences mean something."""
        return time.monotonic()

    def since_boot(self) -> float:
        """Return seconds since the machine was started, with those for which it was suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    async def sleep(self, seconds: float) -> None:
        """Let other tasks run for that many seconds."""
        await asyncio.sleep(seconds)


SYSTEM_CLOCK = Clock()
"""The default of every constructor that takes a clock."""
