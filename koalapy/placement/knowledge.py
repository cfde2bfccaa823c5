"""What a policy that learns is told of one job: its application's runs so far, and when nodes will be free.

The rules of the literature are its prior. They are stated for the ratio of communication to computation time on one
cluster (CCR): with one of 0.1 an application loses nothing by co-allocation, with one of 0.5 it should not be
co-allocated under load (sonmez-2010 VI-C). A slowdown of 1.25 is where co-allocation ceases to pay (Ernemann, in
mohamed-2005 6).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log
from typing import NamedTuple

from koalapy.model.request import ClusterName, InputFile

PAYS_UP_TO = 1.25
"""The slowdown up to which it pays to co-allocate rather than to wait for who knows how long."""
HARMLESS_CCR = 0.1
"""The CCR up to which co-allocation costs nothing."""
HARMFUL_CCR = 0.5
USUAL_CCR = 0.25
"""Of an application that declares nothing: as Poisson, the middle one of the three in sonmez-2010."""
WORST_PRIOR = 3.75
"""The most that is assumed: Wave's slowdown over four clusters (sonmez-2010 VI-A, figure 4), whose CCR is 4."""
PRIOR_WEIGHT = 2.0
"""Of the prior; n runs on one cluster held against m on several weigh n·m / (n + m), so four against four as much."""
ELSEWHERE = 0.5
"""What was seen with another number of clusters counts for so much of what was seen with the same."""

BEFORE_A_VERDICT = 2
"""With fewer runs on several clusters nothing learned speaks against co-allocation: a single one may be bad luck."""
ENOUGH = 3
"""So many runs on a number of clusters tell by themselves how long one takes there."""


class Ratio(NamedTuple):
    """Runs of one size on ``clusters`` clusters held against those on one; ``weight`` grows with the runs of both."""

    clusters: int
    log: float
    weight: float
    runs: int
    """On these clusters."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds at speed 1, and how many runs say so; ``exact`` when they were of the same size."""

    seconds: float
    runs: int
    exact: bool = True


@dataclass(frozen=True, slots=True)
class RunTimes:
    """How long an application runs at speed 1: on one cluster, and by number of clusters as far as it was seen."""

    alone: Estimate | None = None
    seen: Mapping[int, Estimate] = field(default_factory=dict)

    def on(self, clusters: int, slowdown: float) -> float | None:
        """Seconds on so many clusters: as seen, or with too few runs for that as on one cluster, slowed down."""
        seen = self.seen.get(clusters)
        if self.alone is None:
            return None
        if seen is not None and seen.runs >= ENOUGH:
            return max(seen.seconds, self.alone.seconds)  # what looks faster on several clusters was luck
        return self.alone.seconds * slowdown


class Release(NamedTuple):
    """Nodes that come free when a job of this scheduler ends, in so many seconds; None when that is not known."""

    seconds: float | None
    nodes: int
    age: float = 0.0
    """For how many seconds the job has had them."""


@dataclass(frozen=True, slots=True)
class Room:
    """What becomes of one cluster when the jobs of this scheduler end."""

    most: int
    """Idle nodes once all of them have ended, as far as local users let it be."""
    releases: Sequence[Release] = ()
    """By time; those of unknown time last, by age, for what has run long will run longest."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Of one job. ``now`` in seconds since the epoch, for texts only."""

    application: str = ""
    times: RunTimes = field(default_factory=RunTimes)
    ratios: tuple[Ratio, ...] = ()
    communication: float | None = None
    """The declared share of communication in the run time."""
    inputs: tuple[InputFile, ...] = ()
    """What every component of a flexible request needs."""
    rooms: Mapping[ClusterName, Room] = field(default_factory=dict)
    loaded: bool = False
    """Whether other jobs wait."""
    waited: float = 0.0
    """Seconds for which there was room for the job in all, and it was not placed."""
    now: float = 0.0

    def slowdown(self, clusters: int) -> float:
        """How many times longer the job is taken to run on so many clusters than on one."""
        return slowdown(self.ratios, clusters, self.communication)

    def run_time(self, clusters: int) -> float | None:
        """Seconds on so many clusters of speed 1."""
        return self.times.on(clusters, self.slowdown(clusters))

    def runs_on_several(self) -> int:
        return sum(ratio.runs for ratio in self.ratios)


def slowdown(ratios: Sequence[Ratio], clusters: int, communication: float | None = None) -> float:
    """The prior of the declared share of communication, drawn towards what was seen the more there is of it."""
    if clusters < 2:
        return 1.0
    total, weight = PRIOR_WEIGHT * log(prior_slowdown(communication)), PRIOR_WEIGHT
    for ratio in ratios:
        counted = ratio.weight if ratio.clusters == clusters else ELSEWHERE * ratio.weight
        total += counted * ratio.log
        weight += counted
    found = max(1.0, exp(total / weight))
    if sum(ratio.runs for ratio in ratios) < BEFORE_A_VERDICT:
        return min(found, max(PAYS_UP_TO, prior_slowdown(communication)))
    return found


def prior_slowdown(communication: float | None) -> float:
    """The slowdown of an application of which only the share of communication is known, or nothing at all."""
    ccr = USUAL_CCR if communication is None else ccr_of(communication)
    return min(WORST_PRIOR, 1.0 + max(0.0, ccr - HARMLESS_CCR))


def ccr_of(share: float) -> float:
    """The papers' ratio of communication to computation time, of the share of communication in both."""
    return share / (1.0 - share) if share < 1.0 else inf


HARMFUL = 1.0 + HARMFUL_CCR - HARMLESS_CCR
"""The slowdown from which on nothing is co-allocated under load: that of a CCR of ``HARMFUL_CCR``."""
