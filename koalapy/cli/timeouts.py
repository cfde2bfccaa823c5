"""A limit on how long the command may take, whatever it is doing."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeIsUp(BaseException):
    """The deadline has passed."""


@contextmanager
def until(deadline: float | None) -> Iterator[None]:
    """Run the block; ``TimeIsUp`` is raised in it at ``deadline`` (monotonic seconds). For the main thread only."""
    if deadline is None:
        yield
        return

    def ring(_signum: int, _frame: FrameType | None) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, deadline - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
