"""Model run times that depend on the placement; models can be combined.

Each model returns a factor on the run time on one cluster of speed 1.
"""

from collections.abc import Mapping, Sequence
from math import isfinite

from koalapy.model.errors import UsageError
from koalapy.model.request import ClusterName
from koalapy.simulation.jobs import Gang, PlannedJob, RunTime


def by_number_of_clusters(curve: Sequence[float]) -> RunTime:
    """Model run times by the number of clusters of a job (sonmez-2010, Fig. 4).

    ``curve`` begins with one cluster and is extended linearly beyond its last two values.
    """
    if not curve or curve[0] <= 0 or not all(isfinite(value) and value > 0 for value in curve):
        raise UsageError("a curve needs the time on one cluster, and each above 0", field="curve", value=list(curve))
    factors = [value / curve[0] for value in curve]
    slope = factors[-1] - factors[-2] if len(factors) > 1 else 0.0

    def factor(job: PlannedJob, gang: Gang) -> float:
        beyond = len(gang) - len(factors)
        return factors[len(gang) - 1] if beyond <= 0 else max(factors[-1] + slope * beyond, factors[-1])

    return factor


def by_communication(ccr: float, slowdown: Sequence[float]) -> RunTime:
    """Model a program that spends ``ccr`` times as long communicating as computing (sonmez-2010 VI-C.3).

    Its communication takes ``slowdown`` times as long over 1, 2, … clusters.
    """
    if not (isfinite(ccr) and ccr >= 0):
        raise UsageError(f"the ratio of communication is {ccr}, but must be at least 0", field="ccr", value=ccr)
    computing = 1 / (1 + ccr)
    return by_number_of_clusters([computing + (1 - computing) * slowdown_of_count for slowdown_of_count in slowdown])


def by_speed(speeds: Mapping[ClusterName, float]) -> RunTime:
    """Model a job as fast as the slowest of its clusters (huang-2007, 3)."""

    def factor(job: PlannedJob, gang: Gang) -> float:
        return 1.0 / min(speeds[cluster] for cluster, _ in gang)

    return factor


def multi_site(p: float) -> RunTime:
    """Model a job on several clusters as r* = (1 + p)·r (huang-2007, 6)."""

    def factor(job: PlannedJob, gang: Gang) -> float:
        return 1.0 if len(gang) == 1 else 1.0 + p

    return factor


def multiply_models(*models: RunTime) -> RunTime:
    """Multiply models."""

    def factor(job: PlannedJob, gang: Gang) -> float:
        result = 1.0
        for model in models:
            result *= model(job, gang)
        return result

    return factor
