"""Count how long the daemon has been silent, on a node and in an agent.

A runner asks its agent, and an agent asks the daemon, with a numbered query. The answer counts from the time of the
query. So a node never assumes a later contact than the daemon remembers, however long messages are delayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from koalapy.runner.connections import Loop
    from koalapy.runner.settings import Settings

MAX_PENDING_QUERIES = 100
"""Queries whose answers are still accepted; answers to older ones would not extend a lease."""


def boot_time() -> float:
    """Return the seconds since the machine was booted, including those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SilenceClock:
    """The time since the daemon was last known to run."""

    def __init__(self, contact_at: float, clock: Callable[[], float] = boot_time) -> None:
        self._clock = clock
        self.contact_at = contact_at
        """Time of the last contact by ``clock``; never later than the daemon's own record of it."""
        self._number = 0
        self._query_times: dict[int, float] = {}

    def start_query(self) -> int:
        """Return the number of a new query that is sent now."""
        self._number += 1
        self._query_times[self._number] = self._clock()
        self._query_times.pop(self._number - MAX_PENDING_QUERIES, None)
        return self._number

    def record_answer(self, number: int, silence: float = 0.0) -> None:
        """Record the answer to a query; ``silence``: seconds for which the daemon had been silent by then."""
        queried_at = self._query_times.pop(number, None)
        if queried_at is not None:
            self.contact_at = max(self.contact_at, queried_at - max(0.0, silence))

    @property
    def silence(self) -> float:
        """Seconds since the last contact."""
        return self._clock() - self.contact_at


def renewal_interval(lease: float | None, longest: float = 10.0, shortest: float = 0.02) -> float:
    """Return the seconds between two renewals of a lease: a tenth of it, so that some answers may be lost."""
    return longest if lease is None else max(shortest, min(longest, lease / 10))


class RunnerLease(SilenceClock):
    """The time for which a node's program may run without the daemon, which the runner asks its agent to renew."""

    def __init__(
        self, settings: Settings, loop: Loop, send: Callable[[dict[str, Any]], None], clock: Callable[[], float]
    ) -> None:
        """``send`` sends a message to the agent. Its welcome contains the lease: ``settings.lease``."""
        super().__init__(clock(), clock)
        self._settings, self._loop, self._send = settings, loop, send

    @property
    def remaining(self) -> float:
        """Seconds until the lease is over, negative afterwards; infinite without a lease."""
        return float("inf") if self._settings.lease is None else self._settings.lease - self.silence

    def request_renewal(self) -> None:
        """Request a renewal now and at intervals."""
        self._send({"t": "renew", "number": self.start_query()})
        self.plan_renewal()

    def plan_renewal(self) -> None:
        self._loop.set_alarm("renew", renewal_interval(self._settings.lease), self.request_renewal)

    def record_message(self, message: dict[str, Any]) -> None:
        """Renew the lease by the agent's answer to a request, if the agent knows how long the daemon was silent."""
        if message.get("silence") is not None:
            self.record_answer(message["number"], message["silence"])
