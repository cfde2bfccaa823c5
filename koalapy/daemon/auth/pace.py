"""Limit the rate of requests, by user, and of requests with unknown tokens, by network address."""

import time
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address, ip_network

from koalapy.model.limits import Excess, Limits
from koalapy.model.throttle import Throttle

RATE = "requests_per_second"
BURST_SECONDS = 5.0
"""Size of a burst: as many requests as the rate allows in this many seconds."""
FAILURES_AT_ONCE = 20.0
"""Requests with unknown tokens that are allowed at once from one address."""
FAILURE_INTERVAL = 2.0
"""Seconds after which one more is allowed."""


class Pace:
    """A rate limiter of requests by the limits of users and groups, and of unknown tokens by address."""

    def __init__(self, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or Limits()
        self._is_limited = self._limits.has_any(RATE)
        self._clock = clock
        self._requests: dict[float, Throttle] = {}
        """By rate in requests per second; there are only as many as the configuration has different rates."""
        self._failures = Throttle(FAILURES_AT_ONCE, FAILURE_INTERVAL)

    def find_excess(self, user: str) -> tuple[Excess, float] | None:
        """Return the limit that a user has reached and the seconds until the next request is allowed.

        Return None, and count the request, if it is allowed.
        """
        if not self._is_limited:
            return None
        now = self._clock()
        scopes = [(s, rate) for s in self._limits.scopes(user) if (rate := s.limits.requests_per_second)]
        for scope, rate in scopes:
            if wait := self._throttle_for(rate).wait_time(scope.key, now):
                return Excess(scope, RATE, rate, rate, 1, self._limits.contact), wait
        for scope, rate in scopes:
            self._throttle_for(rate).count(scope.key, now)
        return None

    def _throttle_for(self, rate: float) -> Throttle:
        """Return the limiter of all users and groups with that rate, in requests per second."""
        throttle = self._requests.get(rate)
        if throttle is None:
            throttle = self._requests[rate] = Throttle(max(1.0, rate * BURST_SECONDS), 1 / rate)
        return throttle

    def block_time(self, address: str) -> float:
        """Return the seconds for which an address is blocked after too many unknown tokens; 0 if it is not."""
        return self._failures.wait_time(_network_key(address), self._clock())

    def count_failure(self, address: str) -> None:
        """Count a request with an unknown token."""
        self._failures.count(_network_key(address), self._clock())


def _network_key(address: str) -> str:
    """Return the key by which an address is counted: for IPv6 its /64 network, which one party holds as a whole."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    return str(ip_network((parsed, 64), strict=False)) if isinstance(parsed, IPv6Address) else address
