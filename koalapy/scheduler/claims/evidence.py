"""What claims have shown of a cluster: how often its nodes go to others first, how soon they come back, how long a
runner waits for them.

Counted by size class (1 node, 2 or 3, 4 to 7, ...), and what is counted fades: it weighs half as much after each
``HALF_LIFE``. A class of which little is known goes by its cluster, and a cluster of which little is known by what is
assumed of all. Nothing of it outlives the daemon, which learns it anew by a few claims. Times in seconds.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import expm1

from koalapy.model.job import JobId

HALF_LIFE = 3600.0
"""Local users of the afternoon are not those of the morning."""
ASSUMED_OVERTAKEN = 0.02
"""The chance that a runner is overtaken, where no claim has shown anything."""
ASSUMED_IN_VAIN = 0.03
"""The same, and the chance that it breaks."""
ASSUMED_LOSSES = 1 / 600
"""How often a second idle nodes are lost that nobody holds, where nothing is known."""
ASSUMED_RETURNS = 1 / 60
"""How often a second nodes come back that were lost, where nothing is known."""
ASSUMED_START = 0.5
"""Seconds from the submission of a runner until its nodes have reported, where nothing is known."""
ASSUMED_DELAY = 30.0
"""Seconds by which a job starts later whose claim is given up, where nothing is known."""
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
    idle: Faded = field(default_factory=Faded)
    """Seconds for which nodes were idle for somebody who did not hold them."""
    lost: Faded = field(default_factory=Faded)
    """How often they were gone in the end."""
    lacking: Faded = field(default_factory=Faded)
    """Seconds for which nodes were not there for somebody who needed them."""
    returned: Faded = field(default_factory=Faded)
    """How often they were in the end."""

    def runners(self, now: float) -> float:
        """Those of which it is known how they fared."""
        return self.overtaken.at(now) + self.failed.at(now) + self.started.at(now)


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

    def watched(self, size: int, seconds: float, *, had_room: bool, has_room: bool, now: float) -> None:
        """Somebody who needs nodes and does not hold them has looked again, after so many seconds."""
        for tally in self._tallies(size):
            if had_room:
                tally.idle.add(max(0.0, seconds), now)
                tally.lost.add(float(not has_room), now)
            else:
                tally.lacking.add(max(0.0, seconds), now)
                tally.returned.add(float(has_room), now)

    def _tallies(self, size: int) -> tuple[Tally, Tally]:
        return self._of_all, self._by_class[_class_of(size)]

    # What follows

    def claims(self, size: int, now: float) -> float:
        """How many runners of that size class have shown something, as far as that has not faded."""
        return self._known(size).runners(now)

    def chance_overtaken(self, size: int, now: float) -> float:
        """That a runner of so many nodes does not get them, though they are idle when it is submitted."""
        return self._share(size, now, lambda tally: tally.overtaken.at(now), ASSUMED_OVERTAKEN)

    def chance_in_vain(self, size: int, now: float) -> float:
        """That a runner of so many nodes does not get as far as the barrier, overtaken or broken."""
        return self._share(size, now, lambda tally: tally.overtaken.at(now) + tally.failed.at(now), ASSUMED_IN_VAIN)

    def _share(self, size: int, now: float, count: Callable[[Tally], float], assumed: float) -> float:
        """Of the runners of a size class, those that are counted."""
        known, every = self._known(size), self._of_all
        general = (count(every) + LITTLE * assumed) / (every.runners(now) + LITTLE)
        return (count(known) + general) / (known.runners(now) + 1.0)

    def chance_lost(self, size: int, seconds: float, now: float) -> float:
        """That so many idle nodes are gone, if nobody holds them for so many seconds."""
        general = (self._of_all.lost.at(now) + LITTLE) / (self._of_all.idle.at(now) + LITTLE / ASSUMED_LOSSES)
        tally = self._known(size)
        return _within(seconds, (tally.lost.at(now) + 1.0) / (tally.idle.at(now) + 1.0 / general))

    def chance_returned(self, size: int, seconds: float, now: float) -> float:
        """That so many nodes that are not idle become so within so many seconds."""
        return _within(seconds, self._returns(size, now))

    def until_returned(self, size: int, now: float) -> float:
        """Seconds until so many nodes that are not idle become so, on average."""
        return 1.0 / self._returns(size, now)

    def _returns(self, size: int, now: float) -> float:
        general = (self._of_all.returned.at(now) + LITTLE) / (self._of_all.lacking.at(now) + LITTLE / ASSUMED_RETURNS)
        tally = self._known(size)
        return (tally.returned.at(now) + 1.0) / (tally.lacking.at(now) + 1.0 / general)

    def runner_wait(self, size: int, now: float) -> float:
        """Seconds from a runner's submission until its nodes have reported, of those that got them."""
        every = self._of_all
        general = (every.waited.at(now) + LITTLE * ASSUMED_START) / (every.started.at(now) + LITTLE)
        tally = self._known(size)
        return (tally.waited.at(now) + general) / (tally.started.at(now) + 1.0)

    def mean_wait(self, now: float) -> float:
        """The same of runners of all sizes, as they were, or as is assumed where there were none."""
        started = self._of_all.started.at(now)
        return self._of_all.waited.at(now) / started if started > 0 else ASSUMED_START

    def _known(self, size: int) -> Tally:
        return self._by_class.get(_class_of(size)) or Tally()


def _class_of(size: int) -> int:
    return size.bit_length()


def _within(seconds: float, rate: float) -> float:
    """The chance that what happens at a rate happens within so many seconds."""
    return -expm1(-rate * max(0.0, seconds))


@dataclass(slots=True)
class Delays:
    """So many seconds in all, of so many delays."""

    seconds: Faded = field(default_factory=Faded)
    times: Faded = field(default_factory=Faded)


class LaterStarts:
    """How much later those jobs started whose claims were given up, by size class of all their nodes."""

    def __init__(self) -> None:
        self._given_up: dict[JobId, tuple[int, float]] = {}
        """How often a job was, and the sum of these moments; until it starts."""
        self._of_all = Delays()
        self._by_class: defaultdict[int, Delays] = defaultdict(Delays)

    def given_up(self, job: JobId, now: float) -> None:
        """A job gives back what it had, and queues again."""
        times, moments = self._given_up.get(job, (0, 0.0))
        self._given_up[job] = times + 1, moments + now

    def forget(self, job: JobId) -> None:
        """A job is over."""
        self._given_up.pop(job, None)

    def started(self, job: JobId, width: int, now: float) -> None:
        """A job has started, on so many nodes, which it may have wanted to before."""
        if job not in self._given_up:
            return
        times, moments = self._given_up.pop(job)
        for delays in (self._of_all, self._by_class[_class_of(width)]):
            delays.seconds.add(max(0.0, times * now - moments), now)
            delays.times.add(float(times), now)

    def expected(self, width: int, now: float) -> float:
        """Seconds by which a job of so many nodes starts later once its claim is given up."""
        every, known = self._of_all, self._by_class.get(_class_of(width)) or Delays()
        general = (every.seconds.at(now) + LITTLE * ASSUMED_DELAY) / (every.times.at(now) + LITTLE)
        return (known.seconds.at(now) + general) / (known.times.at(now) + 1.0)
