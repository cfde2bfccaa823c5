"""Compute confidence intervals of the mean of a few repetitions."""

from collections.abc import Sequence
from math import fsum, sqrt
from statistics import NormalDist

FEW = (12.706, 4.303, 3.182, 2.776)
NORMAL = NormalDist().inv_cdf(0.975)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval (Student); a single value is its own interval."""
    if not values:
        raise ValueError("no values, no mean")
    count = len(values)
    mean = fsum(values) / count
    if count == 1:
        return mean, mean, mean
    deviation = sqrt(fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = student_quantile(count - 1) * deviation / sqrt(count)
    return mean, mean - half, mean + half


def student_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's distribution, to a thousandth."""
    if degrees <= len(FEW):
        return FEW[degrees - 1]
    z, n = NORMAL, degrees
    return (  # Abramowitz and Stegun 26.7.5
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
