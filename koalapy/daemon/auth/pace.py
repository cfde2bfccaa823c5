"""How fast requests may come: those of a user, and those that show no token which is known, by where they come from."""

import time
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address, ip_network

from koalapy.model.limits import Excess, Limits
from koalapy.model.throttle import Throttle

RATE = "requests_per_second"
BURST_SECONDS = 5.0
"""As much may come at once as in so many seconds."""
FAILURES_AT_ONCE = 20.0
"""Requests with tokens that nobody has, from one address."""
FAILURE_INTERVAL = 2.0
"""Seconds after which there may be one more."""


class Pace:
    """Counts requests; ``limits`` are of users and groups."""

    def __init__(self, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or Limits()
        self._is_limited = self._limits.has_any(RATE)
        self._clock = clock
        self._requests: dict[float, Throttle] = {}
        """By the rate that is the limit: of these there are as many as the configuration names."""
        self._failures = Throttle(FAILURES_AT_ONCE, FAILURE_INTERVAL)

    def excess(self, user: str) -> tuple[Excess, float] | None:
        """The limit that a user has reached, and seconds until the next request may come; else one more is counted."""
        if not self._is_limited:
            return None
        now = self._clock()
        scopes = [(s, rate) for s in self._limits.scopes(user) if (rate := s.limits.requests_per_second)]
        for scope, rate in scopes:
            if wait := self._throttle(rate).wait_time(scope.key, now):
                return Excess(scope, RATE, rate, rate, 1, self._limits.contact), wait
        for scope, rate in scopes:
            self._throttle(rate).count(scope.key, now)
        return None

    def _throttle(self, rate: float) -> Throttle:
        throttle = self._requests.get(rate)
        if throttle is None:
            throttle = self._requests[rate] = Throttle(max(1.0, rate * BURST_SECONDS), 1 / rate)
        return throttle

    def guessing(self, address: str) -> float:
        """Seconds for which nothing is said to an address that has shown too many tokens which nobody has."""
        return self._failures.wait_time(_network(address), self._clock())

    def failed(self, address: str) -> None:
        """A token was shown that nobody has."""
        self._failures.count(_network(address), self._clock())


class AgentAttempts:
    """Bound the wrong agents' tokens that are looked at: from one address, and for one cluster from all addresses.

    A token that cannot be guessed is always looked at, and so is every token from the address of the cluster's last
    agent, so that guesses from elsewhere keep no agent out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = Throttle(FAILURES_AT_ONCE, FAILURE_INTERVAL)
        self._admitted: dict[str, str] = {}
        """By cluster: where the right token came from last."""

    def wait(self, cluster: str, address: str) -> float:
        """Return the seconds for which no token that could be guessed is looked at; 0 if one is."""
        network, now = _network(address), self._clock()
        of_cluster = (
            0.0 if self._admitted.get(cluster) == network else self._failures.wait_time(("cluster", cluster), now)
        )
        return max(of_cluster, self._failures.wait_time(("address", network), now))

    def failed(self, cluster: str, address: str) -> None:
        """Count a wrong token."""
        now = self._clock()
        for key in (("address", _network(address)), ("cluster", cluster)):
            self._failures.count(key, now)

    def admitted(self, cluster: str, address: str) -> None:
        """Note where the right token came from."""
        self._admitted[cluster] = _network(address)


def _network(address: str) -> str:
    """What is one party's: of IPv6 whoever has one address has 2^64 of them."""
    try:
        known = ip_address(address)
    except ValueError:
        return address
    return str(ip_network((known, 64), strict=False)) if isinstance(known, IPv6Address) else address
