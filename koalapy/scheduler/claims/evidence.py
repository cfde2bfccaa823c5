"""What claims have shown of a cluster: how often its runners fail to get their nodes, and how long the others wait.

Counted by size class (1 node, 2 or 3, 4 to 7, ...), and what is counted fades: it weighs half as much after each
``HALF_LIFE``. A class of which little is known goes by its cluster, and a cluster of which little is known by what is
assumed of all. Nothing of it outlives the daemon, which learns it anew by a few claims. Times in seconds.
"""

from collections import defaultdict
from dataclasses import dataclass, field

HALF_LIFE = 3600.0
"""Local users of the afternoon are not those of the morning."""
ASSUMED_IN_VAIN = 0.03
"""The chance that a runner is overtaken or breaks, where no claim has shown anything."""
ASSUMED_START = 0.5
"""Seconds from the submission of a runner until its nodes have reported, where nothing is known."""
LITTLE = 0.1
"""So many events weigh as much as what is assumed; for a size class, one does as what is known of the cluster."""


@dataclass(slots=True)
class Faded:
    """A sum of which each part weighs half as much after each ``HALF_LIFE``."""

    _sum: float = 0.0
    _at: float = 0.0

    def add(self, amount: float, now: float) -> None:
        if now < self._at:  # it is as old as that by now
            self._sum += amount * _left(self._at - now)
        else:
            self._sum, self._at = self.at(now) + amount, now

    def at(self, now: float) -> float:
        return self._sum * _left(now - self._at) if now > self._at else self._sum


def _left(seconds: float) -> float:
    return float(2.0 ** -min(seconds / HALF_LIFE, 1000.0))


@dataclass(slots=True)
class Tally:
    """What was counted of one size class, or of all."""

    overtaken: Faded = field(default_factory=Faded)
    """Runners that did not get their nodes in time."""
    failed: Faded = field(default_factory=Faded)
    """Runners that broke before all their nodes had reported."""
    started: Faded = field(default_factory=Faded)
    """Runners that got them."""
    waited: Faded = field(default_factory=Faded)
    """Seconds that those took, from the submission until the last node reported."""

    def in_vain(self, now: float) -> float:
        """Return how many runners did not reach the barrier."""
        return self.overtaken.at(now) + self.failed.at(now)

    def runners(self, now: float) -> float:
        """Return how many runners reached the barrier or did not."""
        return self.in_vain(now) + self.started.at(now)


class ClaimEvidence:
    """What claims have shown of one cluster."""

    def __init__(self) -> None:
        self._of_all = Tally()
        self._by_class: defaultdict[int, Tally] = defaultdict(Tally)
        self.in_vain = 0
        """How many claims in a row were in vain though the cluster said all the while that it had the nodes: each makes
        the pause longer for which these do not count."""

    # What happens

    def started(self, size: int, waited: float, now: float) -> None:
        """A runner has got its nodes."""
        for tally in self._tallies(size):
            tally.started.add(1.0, now)
            tally.waited.add(max(0.0, waited), now)

    def overtaken(self, size: int, now: float) -> None:
        """A runner did not get its nodes in time."""
        for tally in self._tallies(size):
            tally.overtaken.add(1.0, now)

    def failed(self, size: int, now: float) -> None:
        """A runner has broken before all of its nodes had reported."""
        for tally in self._tallies(size):
            tally.failed.add(1.0, now)

    def _tallies(self, size: int) -> tuple[Tally, Tally]:
        return self._of_all, self._by_class[_class_of(size)]

    # What follows

    def claims(self, size: int, now: float) -> float:
        """How many runners of that size class have shown something, as far as that has not faded."""
        return self._known(size).runners(now)

    def chance_in_vain(self, size: int, now: float) -> float:
        """Return the chance that a runner of so many nodes does not reach the barrier, overtaken or broken."""
        known, every = self._known(size), self._of_all
        general = (every.in_vain(now) + LITTLE * ASSUMED_IN_VAIN) / (every.runners(now) + LITTLE)
        return (known.in_vain(now) + general) / (known.runners(now) + 1.0)

    def mean_wait(self, now: float) -> float:
        """Return the seconds from submission until the nodes of a runner have reported, on average."""
        started = self._of_all.started.at(now)
        return self._of_all.waited.at(now) / started if started > 0 else ASSUMED_START

    def _known(self, size: int) -> Tally:
        return self._by_class.get(_class_of(size)) or Tally()


def _class_of(size: int) -> int:
    return size.bit_length()
