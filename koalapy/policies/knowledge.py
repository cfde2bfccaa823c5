"""Run-time statistics and expected releases of nodes, as a learning policy receives them for one job.

The prior follows the literature. Its rules use the ratio of communication to computation time on one cluster (CCR): at
0.1 an application loses nothing by co-allocation, at 0.5 it should not be co-allocated under load (sonmez-2010 VI-C).
Co-allocation ceases to pay at a slowdown of 1.25 (Ernemann, in mohamed-2005 6).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import erf, exp, inf, log, sqrt
from typing import NamedTuple

from koalapy.model.request import ClusterName, InputFile

EIGHTY_PERCENT = 1.2816
"""Number of standard deviations on each side of the mean that enclose 80 % of a normal distribution."""
MIN_DEVIATION = 1e-6
"""Minimum standard deviation of an estimate."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Estimate of a positive quantity, by the mean and the standard deviation of its logarithm."""

    log: float
    deviation: float

    @property
    def value(self) -> float:
        return exp(self.log)

    @property
    def low(self) -> float:
        """Return the 10th percentile of the quantity."""
        return exp(self.log - EIGHTY_PERCENT * self.deviation)

    @property
    def high(self) -> float:
        """Return the 90th percentile of the quantity."""
        return exp(self.log + EIGHTY_PERCENT * self.deviation)

    def probability_between(self, low: float, high: float) -> float:
        """Return the probability that the quantity is at most ``high``, given that it is at least ``low``."""
        above = 1.0 - self._probability_below(log(low))
        return (
            max(0.0, self._probability_below(log(high)) - self._probability_below(log(low))) / above
            if above > 1e-12
            else 1.0
        )

    def _probability_below(self, bound: float) -> float:
        if self.deviation <= 0:
            return float(self.log < bound)
        return 0.5 * (1.0 + erf((bound - self.log) / (self.deviation * sqrt(2.0))))

    def multiply_by(self, factor: "LogNormal") -> "LogNormal":
        """Return the estimate of the product with another quantity."""
        return LogNormal(self.log + factor.log, sqrt(self.deviation**2 + factor.deviation**2))

    def divide_by(self, factor: "LogNormal") -> "LogNormal":
        """Return the estimate of the quotient by another quantity."""
        return LogNormal(self.log - factor.log, sqrt(self.deviation**2 + factor.deviation**2))


def combine_estimates(estimates: Iterable[LogNormal]) -> LogNormal:
    """Combine independent estimates of one quantity, weighted by their precision. At least one is needed."""
    total = weights = 0.0
    for estimate in estimates:
        weight = 1.0 / max(estimate.deviation, MIN_DEVIATION) ** 2
        total += weight * estimate.log
        weights += weight
    return LogNormal(total / weights, 1.0 / sqrt(weights))


def remove_estimate(combination: LogNormal, part: LogNormal) -> LogNormal:
    """Remove one estimate from a combination; the inverse of ``combine_estimates``."""
    weight = combination.deviation**-2 - max(part.deviation, MIN_DEVIATION) ** -2
    log = (combination.log * combination.deviation**-2 - part.log * max(part.deviation, MIN_DEVIATION) ** -2) / weight
    return LogNormal(log, weight**-0.5)


def spread_of(numbers: Iterable[LogNormal], center: float, assumed: float, weight: float) -> float:
    """Return the standard deviation of the logarithms of similar quantities, without the uncertainty of each estimate.

    ``assumed`` is the prior standard deviation; it counts as much as ``weight`` precise estimates.
    """
    squares, total = weight * assumed**2, weight
    for number in numbers:
        counts = assumed**2 / (assumed**2 + number.deviation**2)
        squares += counts * max(0.0, (number.log - center) ** 2 - number.deviation**2)
        total += counts
    return sqrt(squares / total)


PAYS_UP_TO = 1.25
"""Maximum slowdown at which co-allocation is preferred to a wait of unknown length."""
HARMLESS_CCR = 0.1
"""Maximum CCR at which co-allocation costs nothing."""
HARMFUL_CCR = 0.5
USUAL_CCR = 0.25
"""CCR of an application that declares none: that of Poisson, the middle one of the three in sonmez-2010."""
WORST_PRIOR = 3.75
"""Maximum prior slowdown: that of Wave over four clusters (sonmez-2010 VI-A, figure 4), which has a CCR of 4."""
DECLARED_WITHIN = 0.2
"""Uncertainty of a declared share of communication, as standard deviation of the logarithm of the slowdown."""
BETWEEN_APPLICATIONS = 0.4
"""Variation of the slowdown between applications while few are known, as standard deviation of its logarithm."""
SURE, HOPELESS = 0.75, 0.1
"""Probabilities of no harm: from ``SURE`` on co-allocation counts as harmless, up to ``HOPELESS`` as harmful."""

ClusterSet = tuple[ClusterName, ...]
"""Names of several clusters, sorted."""


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Estimated run times of a job at speed 1: on one cluster, and on each set of clusters on which it has run."""

    single_cluster: LogNormal | None = None
    measured: Mapping[ClusterSet, LogNormal] = field(default_factory=dict)

    def on_clusters(self, clusters: ClusterSet, slowdown: LogNormal) -> LogNormal | None:
        """Return the run time on several clusters: as measured there, or else on one cluster times the slowdown.

        Return None if neither is known.
        """
        if clusters in self.measured or self.single_cluster is None:
            return self.measured.get(clusters)
        return self.single_cluster.multiply_by(slowdown)


def prior_slowdown(communication: float | None = None) -> float:
    """Return the slowdown expected from the declared fraction of run time in communication; None: undeclared."""
    ccr = USUAL_CCR if communication is None else ccr_of(communication)
    return min(WORST_PRIOR, 1.0 + max(0.0, ccr - HARMLESS_CCR))


def assume_slowdown(communication: float | None = None) -> LogNormal:
    """Return the prior distribution of a slowdown: narrow if a share of communication is declared, wide if not."""
    within = 2**0.5 * BETWEEN_APPLICATIONS if communication is None else DECLARED_WITHIN
    return LogNormal(log(prior_slowdown(communication)), within)


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """Estimated slowdowns of an application on several clusters as against one, and the number of runs behind them."""

    anywhere: LogNormal = field(default_factory=assume_slowdown)
    """Slowdown on sets of clusters on which the application has not run."""
    measured: Mapping[ClusterSet, LogNormal] = field(default_factory=dict)
    runs: int = 0
    """Number of runs on several clusters that were compared with runs of the same size on one."""
    killed: int = 0
    """Number of these runs that were killed before their end."""

    def on_clusters(self, clusters: ClusterSet) -> LogNormal:
        return self.measured.get(clusters, self.anywhere)

    def harmless_probability(self, clusters: ClusterSet) -> float:
        """Return the probability that the slowdown is below ``HARMFUL``, given that it is at least 1."""
        return self.on_clusters(clusters).probability_between(1.0, HARMFUL)


class Release(NamedTuple):
    """Nodes that become idle in ``seconds`` when a job of this scheduler ends; None if the time is unknown."""

    seconds: float | None
    nodes: int
    age: float = 0.0
    """Seconds for which the job has had the nodes."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The idle nodes of a cluster as jobs of this scheduler end."""

    max_idle: int
    """Idle nodes once all of these jobs have ended, given the nodes that local users have."""
    releases: Sequence[Release] = ()
    """Releases by time; those of unknown time come last, by age.

    A job that has run long is expected to run longest.
    """


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Statistics and expectations for one job. ``now`` is in seconds since the epoch and is used only in texts."""

    application: str = ""
    times: RunTimes = field(default_factory=RunTimes)
    slowdowns: Slowdowns = field(default_factory=Slowdowns)
    communication: float | None = None
    """Declared share of communication in the run time; None: undeclared."""
    inputs: tuple[InputFile, ...] = ()
    """Input files of every component of a flexible request."""
    capacities: Mapping[ClusterName, Capacity] = field(default_factory=dict)
    loaded: bool = False
    """Whether other jobs are waiting."""
    waited: float = 0.0
    """Total seconds for which several clusters had the nodes and the job was not placed."""
    now: float = 0.0
    probing: Callable[[float], bool] | None = None
    """Decides by the probability of no harm whether to co-allocate the job to measure its slowdown; None: never."""
    bandwidth: float = 0.0
    """Bandwidth in bytes per second that each node uses to exchange data with all others."""
    memory: int = 0
    """Memory in bytes that each node must have."""

    def slowdown(self, clusters: ClusterSet) -> float:
        """Return the estimated slowdown on these clusters as against one; 1 for one cluster."""
        return max(1.0, self.slowdowns.on_clusters(clusters).value) if len(clusters) > 1 else 1.0

    @property
    def share(self) -> float:
        """Return the share of communication in the run time on one cluster.

        It is the declared share, or else estimated from the slowdown.
        """
        if self.communication is not None:
            return self.communication
        ccr = max(0.0, self.slowdowns.anywhere.value - 1.0) + HARMLESS_CCR
        return ccr / (1.0 + ccr)

    def run_time(self, clusters: ClusterSet) -> float | None:
        """Return the estimated seconds on these clusters at speed 1; None if unknown. No clusters: on one."""
        if len(clusters) < 2:
            estimate = self.times.single_cluster
        else:
            estimate = self.times.on_clusters(clusters, self.slowdowns.on_clusters(clusters))
        return None if estimate is None else estimate.value


def ccr_of(share: float) -> float:
    """Return the ratio of communication to computation time (CCR) for a share of communication in their sum."""
    return share / (1.0 - share) if share < 1.0 else inf


HARMFUL = 1.0 + HARMFUL_CCR - HARMLESS_CCR
"""Slowdown above which jobs are not co-allocated under load: that of a CCR of ``HARMFUL_CCR``."""
