"""What a policy that learns is told of one job: its application's runs so far, and when nodes will be free.

The rules of the literature are its prior. They are stated for the ratio of communication to computation time on one
cluster (CCR): with one of 0.1 an application loses nothing by co-allocation, with one of 0.5 it should not be
co-allocated under load (sonmez-2010 VI-C). A slowdown of 1.25 is where co-allocation ceases to pay (Ernemann, in
mohamed-2005 6).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log
from typing import NamedTuple

from koalapy.model.request import ClusterName, InputFile
from koalapy.policies.log_normal import LogNormal

PAYS_UP_TO = 1.25
"""The slowdown up to which it pays to co-allocate rather than to wait for who knows how long."""
HARMLESS_CCR = 0.1
"""The CCR up to which co-allocation costs nothing."""
HARMFUL_CCR = 0.5
USUAL_CCR = 0.25
"""Of an application that declares nothing: as Poisson, the middle one of the three in sonmez-2010."""
WORST_PRIOR = 3.75
"""The most that is assumed: Wave's slowdown over four clusters (sonmez-2010 VI-A, figure 4), whose CCR is 4."""
DECLARED_WITHIN = 0.2
"""How far off a declared share of communication may be: the standard deviation of the slowdown's logarithm."""
BETWEEN_APPLICATIONS = 0.4
"""By how much the slowdowns of applications differ from each other, as long as few are known; likewise."""
SURE, HOPELESS = 0.75, 0.1
"""The probabilities of no harm from which on co-allocation counts as harmless, and up to which as harmful."""

Where = tuple[ClusterName, ...]
"""Several clusters, in order."""


@dataclass(frozen=True, slots=True)
class RunTimes:
    """How long a job would run at speed 1: on one cluster, and on such sets of several on which it has run."""

    alone: LogNormal | None = None
    seen: Mapping[Where, LogNormal] = field(default_factory=dict)

    def on(self, where: Where, slowdown: LogNormal) -> LogNormal | None:
        """On several clusters: as seen there, or as on one, slowed down."""
        if where in self.seen or self.alone is None:
            return self.seen.get(where)
        return self.alone.times(slowdown)


def prior_slowdown(communication: float | None = None) -> float:
    """The slowdown of an application of which only the share of communication is known, or nothing at all."""
    ccr = USUAL_CCR if communication is None else ccr_of(communication)
    return min(WORST_PRIOR, 1.0 + max(0.0, ccr - HARMLESS_CCR))


def assumed(communication: float | None = None) -> LogNormal:
    """What is believed of a slowdown before anything has run: what was declared, or nearly nothing."""
    within = 2**0.5 * BETWEEN_APPLICATIONS if communication is None else DECLARED_WITHIN
    return LogNormal(log(prior_slowdown(communication)), within)


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """How many times longer an application runs on several clusters than on one, and how many runs say so."""

    anywhere: LogNormal = field(default_factory=assumed)
    """On clusters together on which it has not run."""
    seen: Mapping[Where, LogNormal] = field(default_factory=dict)
    runs: int = 0
    """On several clusters, held against some of the same size on one."""
    killed: int = 0
    """Of these, before their end."""

    def on(self, where: Where) -> LogNormal:
        return self.seen.get(where, self.anywhere)

    def harmless(self, where: Where) -> float:
        """The probability that it is less there than what harms others; several clusters are never faster than one."""
        return self.on(where).between(1.0, HARMFUL)


class Release(NamedTuple):
    """Nodes that come free when a job of this scheduler ends, in so many seconds; None when that is not known."""

    seconds: float | None
    nodes: int
    age: float = 0.0
    """For how many seconds the job has had them."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What becomes of one cluster when the jobs of this scheduler end."""

    max_idle: int
    """Idle nodes once all of them have ended, as far as local users let it be."""
    releases: Sequence[Release] = ()
    """By time; those of unknown time last, by age, for what has run long will run longest."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Of one job. ``now`` in seconds since the epoch, for texts only."""

    application: str = ""
    times: RunTimes = field(default_factory=RunTimes)
    slowdowns: Slowdowns = field(default_factory=Slowdowns)
    communication: float | None = None
    """The declared share of communication in the run time."""
    inputs: tuple[InputFile, ...] = ()
    """What every component of a flexible request needs."""
    capacities: Mapping[ClusterName, Capacity] = field(default_factory=dict)
    loaded: bool = False
    """Whether other jobs wait."""
    waited: float = 0.0
    """Seconds for which there was room for the job in all, and it was not placed."""
    now: float = 0.0
    probing: Callable[[float], bool] | None = None
    """Whether it may be co-allocated just to find out how that goes, of the probability of no harm; None: never."""
    bandwidth: float = 0.0
    """Bytes per second that each of its nodes exchanges with all others."""
    memory: int = 0
    """Bytes that each of its nodes must have."""

    def slowdown(self, where: Where) -> float:
        """How many times longer the job is taken to run on these clusters than on one."""
        return max(1.0, self.slowdowns.on(where).value) if len(where) > 1 else 1.0

    @property
    def share(self) -> float:
        """Of communication in its run time on one cluster: as declared, or as its slowdown on several tells."""
        if self.communication is not None:
            return self.communication
        ccr = max(0.0, self.slowdowns.anywhere.value - 1.0) + HARMLESS_CCR
        return ccr / (1.0 + ccr)

    def run_time(self, where: Where) -> float | None:
        """Seconds on these clusters, at speed 1."""
        found = self.times.alone if len(where) < 2 else self.times.on(where, self.slowdowns.on(where))
        return None if found is None else found.value


def ccr_of(share: float) -> float:
    """The papers' ratio of communication to computation time, of the share of communication in both."""
    return share / (1.0 - share) if share < 1.0 else inf


HARMFUL = 1.0 + HARMFUL_CCR - HARMLESS_CCR
"""The slowdown from which on nothing is co-allocated under load: that of a CCR of ``HARMFUL_CCR``."""
