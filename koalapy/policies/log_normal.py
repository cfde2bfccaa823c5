"""Log-normal estimates of positive quantities such as run times and slowdowns."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import erf, exp, log, sqrt

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
