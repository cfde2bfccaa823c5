"""Estimates of numbers that luck and inputs are mixed into: the logarithm is normal, known so and so well."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import erf, exp, log, sqrt

EIGHTY_PERCENT = 1.2816
"""Standard deviations to each side between which it lies with that probability."""
MIN_DEVIATION = 1e-6
"""Nothing is known better than that."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Of a positive number: the mean and the standard deviation of what its logarithm may be."""

    log: float
    deviation: float

    @property
    def value(self) -> float:
        return exp(self.log)

    @property
    def low(self) -> float:
        """It is less with a probability of a tenth."""
        return exp(self.log - EIGHTY_PERCENT * self.deviation)

    @property
    def high(self) -> float:
        """It is more with a probability of a tenth."""
        return exp(self.log + EIGHTY_PERCENT * self.deviation)

    def between(self, low: float, high: float) -> float:
        """How probable it is that it is no more than ``high``, when it is sure to be no less than ``low``."""
        above = 1.0 - self._below(log(low))
        return max(0.0, self._below(log(high)) - self._below(log(low))) / above if above > 1e-12 else 1.0

    def _below(self, bound: float) -> float:
        if self.deviation <= 0:
            return float(self.log < bound)
        return 0.5 * (1.0 + erf((bound - self.log) / (self.deviation * sqrt(2.0))))

    def times(self, factor: "LogNormal") -> "LogNormal":
        """The product with another number."""
        return LogNormal(self.log + factor.log, sqrt(self.deviation**2 + factor.deviation**2))

    def over(self, factor: "LogNormal") -> "LogNormal":
        """The quotient by another number."""
        return LogNormal(self.log - factor.log, sqrt(self.deviation**2 + factor.deviation**2))


def combine(estimates: Iterable[LogNormal]) -> LogNormal:
    """Of several independent estimates of one number, each by how sure it is; there is at least one."""
    total = weights = 0.0
    for estimate in estimates:
        weight = 1.0 / max(estimate.deviation, MIN_DEVIATION) ** 2
        total += weight * estimate.log
        weights += weight
    return LogNormal(total / weights, 1.0 / sqrt(weights))


def separate(whole: LogNormal, part: LogNormal) -> LogNormal:
    """What is left of a combined estimate without one of those it was made of."""
    weight = whole.deviation**-2 - max(part.deviation, MIN_DEVIATION) ** -2
    log = (whole.log * whole.deviation**-2 - part.log * max(part.deviation, MIN_DEVIATION) ** -2) / weight
    return LogNormal(log, weight**-0.5)


def spread_of(numbers: Iterable[LogNormal], center: float, assumed: float, weight: float) -> float:
    """By how much numbers of one kind differ from each other, beside what is not known of each: a standard deviation.

    ``weight`` is of how many well known ones what is assumed counts for as much.
    """
    squares, total = weight * assumed**2, weight
    for number in numbers:
        counts = assumed**2 / (assumed**2 + number.deviation**2)
        squares += counts * max(0.0, (number.log - center) ** 2 - number.deviation**2)
        total += counts
    return sqrt(squares / total)
