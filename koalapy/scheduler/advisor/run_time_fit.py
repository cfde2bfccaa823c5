"""Estimate run times and slowdowns of one application from its runs, with confidence from their scatter.

All values are logarithms: a run takes the time of its size on one cluster, times the slowdown of its clusters. A run
that was killed at its walltime is a lower bound.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import erfc, exp, log, pi, sqrt
from typing import NamedTuple

from koalapy.model.advice import Size
from koalapy.policies.knowledge import ClusterSet, LogNormal, Slowdowns, combine_estimates, spread_of

SINGLE_CLUSTER: ClusterSet = ()
"""Key used in place of the set of clusters for runs on one cluster."""

USUAL_SCATTER, SCATTER_WEIGHT = 0.3, 2.0
"""The assumed standard deviation among equal runs, and its weight as a number of runs."""
MIDDLE_EFFICIENCY = 0.84
"""The efficiency of the interquartile mean relative to the mean of all: the price of its robustness."""
BETWEEN_SETS, SETS_WEIGHT = 0.1, 1.0
"""The assumed standard deviation of an application's slowdowns between sets of clusters, and its weight as a number of
sets."""
SPEED_UP, SPEED_UP_DEVIATION = 0.5, 0.5
"""The assumed exponent with which run times fall with nodes: 0 if jobs use more nodes for more work, 1 for the same
work."""
OTHER_LAYOUT = 0.5
"""The standard deviation of run times with another number of processes per node."""
MAX_DEVIATION = log(2.0)
"""Maximum standard deviation of a mean run time, as a logarithm: a factor of two. Beyond it the run time counts as
unknown."""
MIN_WEIGHT = 0.01
"""The lowest weight of a group."""
MAX_ROUNDS, TOLERANCE = 8, 0.01
"""Limits of the iteration over slowdown and time of killed runs, which depend on each other: the maximum number of
rounds, and the change, as a fraction of the scatter, at which to stop."""


class RunSample(NamedTuple):
    """One run: the logarithm of its seconds at speed 1, and whether it was killed before its end."""

    log: float
    killed: bool = False


Groups = Mapping[tuple[Size, ClusterSet], Sequence[RunSample]]


class Group(NamedTuple):
    """The estimate from equal runs: their mean, and its weight as a number of completed runs."""

    mean: float
    weight: float

    def belief(self, scatter: float) -> LogNormal:
        return LogNormal(self.mean, scatter / sqrt(max(self.weight, MIN_WEIGHT)))


@dataclass(frozen=True, slots=True)
class Fit:
    """The runs of one application by size and clusters, and the scatter of equal runs."""

    groups: Mapping[tuple[Size, ClusterSet], Group]
    scatter: float

    def observed_slowdowns(self) -> list[LogNormal]:
        """Return the slowdown of each size that ran both on several clusters and on one."""
        by_size: dict[Size, list[Group]] = {}
        for (size, clusters), group in self.groups.items():
            if clusters and (size, SINGLE_CLUSTER) in self.groups:
                by_size.setdefault(size, []).append(group)
        slowdowns = []
        for size, groups in by_size.items():
            weight = sum(group.weight for group in groups)
            mean = sum(group.mean * group.weight for group in groups) / weight
            slowdowns.append(self._slowdown(size, Group(mean, weight)))
        return slowdowns

    def slowdowns(self, prior: LogNormal) -> Slowdowns:
        """Return the slowdown of each set of clusters, and that of other sets."""
        anywhere = combine_estimates([prior, *self.observed_slowdowns()])
        by_where: dict[ClusterSet, list[LogNormal]] = {}
        for (size, clusters), group in self.groups.items():
            if clusters and (size, SINGLE_CLUSTER) in self.groups:
                by_where.setdefault(clusters, []).append(self._slowdown(size, group))
        by_clusters = {clusters: combine_estimates(beliefs) for clusters, beliefs in by_where.items()}
        between = spread_of(by_clusters.values(), anywhere.log, BETWEEN_SETS, SETS_WEIGHT)
        elsewhere = anywhere.multiply_by(LogNormal(0.0, between))
        return Slowdowns(
            elsewhere, {clusters: combine_estimates([elsewhere, beliefs]) for clusters, beliefs in by_clusters.items()}
        )

    def _slowdown(self, size: Size, together: Group) -> LogNormal:
        alone = self.groups[size, SINGLE_CLUSTER]
        return LogNormal(together.mean - alone.mean, self.scatter * sqrt(1 / together.weight + 1 / alone.weight))

    # Run times

    def single_cluster_time(self, size: Size, slowdowns: Slowdowns) -> LogNormal | None:
        """Return the run time on one cluster; for a new size extrapolated from the nearest one. None without runs."""
        sizes = {size for size, _ in self.groups}
        if size in sizes or not sizes:
            return self._measured_time(size, slowdowns) if sizes else None
        nearest = min(sizes, key=lambda candidate: (apart(size, candidate), candidate))
        alike = sorted(similar for similar in sizes if similar.per_node == nearest.per_node)
        times = {similar: self._measured_time(similar, slowdowns) for similar in alike}
        power = _estimate_speed_up(list(times.items()))
        log_ratio = log(size.nodes / nearest.nodes)
        layout = OTHER_LAYOUT * (size.per_node != nearest.per_node)
        return times[nearest].multiply_by(
            LogNormal(-power.log * log_ratio, sqrt((power.deviation * log_ratio) ** 2 + layout**2))
        )

    def _measured_time(self, size: Size, slowdowns: Slowdowns) -> LogNormal:
        """Return the run time on one cluster of a size that ran, without slowdown if it only ran on several."""
        group = self.groups.get((size, SINGLE_CLUSTER))
        if group is not None:
            return group.belief(self.scatter)
        beliefs = []
        for (measured_size, clusters), group in self.groups.items():
            if measured_size == size:
                beliefs.append(group.belief(self.scatter).divide_by(slowdowns.on_clusters(clusters)))
        return combine_estimates(beliefs)

    def multi_cluster_time(self, size: Size, clusters: ClusterSet, alone: LogNormal, slowdowns: Slowdowns) -> LogNormal:
        """Return the run time on several clusters, from runs there and from those on one, slowed down."""
        group = self.groups.get((size, clusters))
        beliefs = [] if group is None else [group.belief(self.scatter)]
        belief = combine_estimates([*beliefs, alone.multiply_by(slowdowns.on_clusters(clusters))])
        return belief if belief.log >= alone.log else alone  # a faster result on several clusters is chance


def _estimate_speed_up(times: Sequence[tuple[Size, LogNormal]]) -> LogNormal:
    """Return the exponent with which run times fall with nodes, as measured between sizes."""
    weights = [1.0 / (belief.deviation**2 + USUAL_SCATTER**2) for _, belief in times]
    total = sum(weights)
    nodes = [log(size.nodes) for size, _ in times]
    middle = sum(w * x for w, x in zip(weights, nodes, strict=True)) / total
    level = sum(w * belief.log for w, (_, belief) in zip(weights, times, strict=True)) / total
    squares = sum(w * (x - middle) ** 2 for w, x in zip(weights, nodes, strict=True))
    products = sum(
        w * (x - middle) * (level - belief.log) for w, x, (_, belief) in zip(weights, nodes, times, strict=True)
    )
    assumed = SPEED_UP_DEVIATION**-2
    return LogNormal((assumed * SPEED_UP + products) / (assumed + squares), 1.0 / sqrt(assumed + squares))


def apart(first: Size, second: Size) -> float:
    """Return the distance of two sizes. Another number of processes per node counts as much as e times the nodes."""
    return abs(log(first.nodes / second.nodes)) + (first.per_node != second.per_node)


def fit(groups: Groups, prior: LogNormal) -> Fit:
    """Fit the statistics to the runs. The run times of killed runs are estimated together with the slowdowns."""
    scatter = _estimate_scatter(groups.values())
    estimates = {key: _fit_group(ran, scatter) for key, ran in groups.items()}
    killed = {key for key, ran in groups.items() if any(run.killed for run in ran)}
    for _ in range(MAX_ROUNDS if killed else 0):
        so_far = Fit(estimates, scatter)
        slowdowns = so_far.slowdowns(prior)
        again = {
            key: _fit_group(groups[key], scatter, _expected_log(key, groups[key], so_far, slowdowns)) for key in killed
        }
        moved = max(abs(group.mean - estimates[key].mean) for key, group in again.items())
        estimates = estimates | again
        if moved < TOLERANCE * scatter:
            break
    return Fit(estimates, scatter)


def _expected_log(key: tuple[Size, ClusterSet], ran: Sequence[RunSample], so_far: Fit, slowdowns: Slowdowns) -> float:
    """Return the expected logarithm of a group with killed runs, from its other runs and those on one cluster."""
    size, clusters = key
    belief, alone = so_far.groups[key].belief(so_far.scatter), so_far.groups.get((size, SINGLE_CLUSTER))
    by_alone = alone.belief(so_far.scatter).multiply_by(slowdowns.on_clusters(clusters)) if clusters and alone else None
    if not all(run.killed for run in ran):
        return combine_estimates(filter(None, (belief, by_alone))).log
    return max(run.log for run in ran) if by_alone is None else by_alone.log


def _estimate_scatter(groups: Iterable[Sequence[RunSample]]) -> float:
    """Return the standard deviation among equal runs, over all sizes and clusters."""
    total, weight = SCATTER_WEIGHT * USUAL_SCATTER, SCATTER_WEIGHT
    for ran in groups:
        _, deviation, freedom = _completed_run_statistics(tuple(ran))
        total += freedom * deviation
        weight += freedom
    return total / weight


@lru_cache(maxsize=20_000)
def _completed_run_statistics(ran: tuple[RunSample, ...]) -> tuple[float, float, int]:
    """Return mean, standard deviation and degrees of freedom of the completed runs; cached, as most groups stay."""
    logs = [run.log for run in ran if not run.killed]
    if not logs:
        return 0.0, 0.0, 0
    middle, freedom = _interquartile_mean([(value, 1.0) for value in logs]), len(logs) - 1
    return middle, sqrt(pi / 2) * sum(abs(value - middle) for value in logs) / max(1, freedom), freedom


def _fit_group(ran: Sequence[RunSample], scatter: float, expected: float | None = None) -> Group:
    """Return the estimate of a group. A killed run counts as its expected time, with a weight by its information."""
    bounds = [run.log for run in ran if run.killed]
    if not bounds:
        return Group(_completed_run_statistics(tuple(ran))[0], MIDDLE_EFFICIENCY * len(ran))
    observations = [(run.log, 1.0) for run in ran if not run.killed]
    observations += [
        (bound, 1.0) if expected is None else _censored_observation(bound, expected, scatter) for bound in bounds
    ]
    return Group(_interquartile_mean(observations), MIDDLE_EFFICIENCY * sum(weight for _, weight in observations))


def _censored_observation(bound: float, expected: float, scatter: float) -> tuple[float, float]:
    """Return the observation equivalent to a run longer than ``bound``, and its weight."""
    above = (bound - expected) / scatter
    rate = exp(-0.5 * above**2) / sqrt(2 * pi) / (0.5 * erfc(above / sqrt(2.0))) if above < 8 else above + 1 / above
    return expected + scatter / (rate - above), max(rate * (rate - above), 1e-9)


def _interquartile_mean(observations: Sequence[tuple[float, float]]) -> float:
    """Return the weighted mean of the middle half, which ignores outliers on both sides."""
    ordered = sorted(observations)
    total = sum(weight for _, weight in ordered)
    low, high, cumulated, weighted_sum = 0.25 * total, 0.75 * total, 0.0, 0.0
    for value, weight in ordered:
        weighted_sum += value * max(0.0, min(high, cumulated + weight) - max(low, cumulated))
        cumulated += weight
    return weighted_sum / (high - low)
