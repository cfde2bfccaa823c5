"""Measure the processor time and the memory of the program on this node.

The kernel counts the processor time of all ended descendants, since this runner adopts and reaps them. The memory of
all running processes together is read from ``/proc`` at intervals, so that of short programs is that of their largest
process, which the kernel reports at its end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from koalapy.runner.processes import descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from koalapy.runner.link import Loop
    from koalapy.runner.processes import Processes

FIRST_INTERVAL_S = 1.0
MAX_INTERVAL_S = 30.0
INTERVAL_GROWTH = 0.1
"""Interval between two readings, relative to the time for which the program has run."""
COST_FACTOR = 500.0
"""Minimum interval relative to the duration of a reading, so that readings cost at most 0.2 % of a processor."""


class UsageMeter:
    """The use of this node by the program, from the start of its first process."""

    def __init__(self, loop: Loop, processes: Processes, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop, self._processes, self._clock = loop, processes, clock
        self._started_at: float | None = None
        self._peak_memory = 0

    def start(self) -> None:
        """Begin to measure. Later calls have no effect."""
        if self._started_at is None:
            self._started_at = self._clock()
            self._loop.set_alarm("usage", FIRST_INTERVAL_S, self._read_memory)

    def finish(self) -> dict[str, Any] | None:
        """Return the use of the node once all processes are reaped; None if the program never started.

        ``cpu``: processor seconds; ``seconds`` that the program ran; ``memory``: largest memory in bytes.
        """
        if self._started_at is None:
            return None
        self._loop.cancel_alarm("usage")
        return {
            "cpu": round(self._processes.cpu_time, 6),
            "seconds": round(max(0.0, self._clock() - self._started_at), 6),
            "processors": len(os.sched_getaffinity(0)),
            "memory": max(self._peak_memory, self._processes.peak_memory),
        }

    def _read_memory(self) -> None:
        """Read the memory of all processes of the program, and plan the next reading."""
        assert self._started_at is not None
        began = self._clock()
        page_size = os.sysconf("SC_PAGE_SIZE")
        self._peak_memory = max(self._peak_memory, sum(map(resident_pages, descendants(os.getpid()))) * page_size)
        now = self._clock()
        interval = min(MAX_INTERVAL_S, max(FIRST_INTERVAL_S, INTERVAL_GROWTH * (now - self._started_at)))
        self._loop.set_alarm("usage", max(interval, COST_FACTOR * (now - began)), self._read_memory)


def resident_pages(pid: int) -> int:
    """Return the pages of a process that are in memory; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
