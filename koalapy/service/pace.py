"""How fast requests may come: those of a user, and those that show no token which is known, by where they come from."""

from ipaddress import IPv6Address, ip_address, ip_network

from koalapy.model.limits import Excess, Limits
from koalapy.service.rates import Rates

RATE = "requests_per_second"
BURST_SECONDS = 5.0
"""As much may come at once as in so many seconds."""
FAILURES_PER_SECOND = 0.5
FAILURES_AT_ONCE = 20.0
"""Requests with tokens that nobody has, from one address."""


class Pace:
    """Counts requests; ``limits`` are of users and groups."""

    def __init__(self, limits: Limits | None = None, rates: Rates | None = None, failures: Rates | None = None) -> None:
        self._limits = limits or Limits()
        self._is_limited = self._limits.limits(RATE)
        self._rates, self._failures = rates or Rates(), failures or Rates()

    def excess(self, user: str) -> tuple[Excess, float] | None:
        """The limit that a user has reached, and seconds until the next request may come; else one more is counted."""
        if not self._is_limited:
            return None
        scopes = [(s.key, rate, s) for s in self._limits.scopes(user) if (rate := s.limits.requests_per_second)]
        for key, rate, scope in scopes:
            burst = max(1.0, rate * BURST_SECONDS)
            if wait := self._rates.wait(key, rate, burst):
                return Excess(scope, RATE, rate, rate, 1, self._limits.contact), wait
        for key, rate, _ in scopes:
            self._rates.take(key, rate, max(1.0, rate * BURST_SECONDS))
        return None

    def guessing(self, address: str) -> float:
        """Seconds for which nothing is said to an address that has shown too many tokens which nobody has."""
        return self._failures.wait(_network(address), FAILURES_PER_SECOND, FAILURES_AT_ONCE)

    def failed(self, address: str) -> None:
        """A token was shown that nobody has."""
        self._failures.take(_network(address), FAILURES_PER_SECOND, FAILURES_AT_ONCE)


def _network(address: str) -> str:
    """What is one party's: of IPv6 whoever has one address has 2^64 of them."""
    try:
        known = ip_address(address)
    except ValueError:
        return address
    return str(ip_network((known, 64), strict=False)) if isinstance(known, IPv6Address) else address
