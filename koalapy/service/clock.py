"""The daemon's clock: as long as it lives, it neither jumps nor goes back, whatever is done to the machine's."""

import time
from collections.abc import Callable


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch as the machine had them when this was called, and counted on from there.

    Deadlines of claims and jobs hang on it: a step of the machine's clock must not let them pass, nor hold them up.
    What it shows is set right at the daemon's next start.
    """
    began = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return lambda: began + time.clock_gettime(time.CLOCK_BOOTTIME)


def for_removal(clock: Callable[[], float]) -> Callable[[], float]:
    """By which it is told what is old enough to be removed: a daemon that was started while the machine's clock was
    ahead goes by the one that was set right since, for what is removed does not come back."""
    return lambda: min(clock(), time.time())
