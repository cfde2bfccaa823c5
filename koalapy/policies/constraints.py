"""Constraints on the clusters that a job combines: how many, and how different their speeds may be.

Policies are unaware of the constraints. A policy is first called with the whole grid. If its answer violates a
constraint, it is called with parts of the grid in which an answer violates fewer constraints, or none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.placement import Placement
from koalapy.model.request import ClusterName, FixedRequest, FlexibleRequest, Request
from koalapy.policies.network import estimate_transfer

MAX_PARTS_TRIED = 8
"""Maximum number of parts of the grid that are tried for each range of speeds."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """Limits: at most ``at_most`` clusters, the slowest with at least ``speed_ratio`` of the speed of the fastest."""

    at_most: int | None = None
    speed_ratio: float | None = None

    def __bool__(self) -> bool:
        return self.at_most is not None or self.speed_ratio is not None

    def describe_violations(self, placement: Placement, grid: GridView) -> str:
        """Return a text that says which constraints a placement violates; empty if none."""
        names = {component.cluster for component in placement.components}
        violations = []
        if self.at_most is not None and len(names) > self.at_most:
            violations.append(f"coallocation is {self.at_most}, and it fits only on {len(names)} clusters together")
        used = sorted((cluster for cluster in grid if cluster.name in names), key=lambda c: (c.speed, c.name))
        if not self.are_speeds_similar(used):
            slow, fast = used[0], used[-1]
            ratio = f"{slow.name} has {slow.speed / fast.speed:.2g} of the speed of {fast.name}"
            violations.append(f"speed_ratio_min is {self.speed_ratio:g}, and {ratio}")
        return "; ".join(violations)

    def are_speeds_similar(self, clusters: Sequence[ClusterView]) -> bool:
        """Return whether the speeds of these clusters are similar enough to combine them."""
        if self.speed_ratio is None or not clusters:
            return True
        speeds = [cluster.speed for cluster in clusters]
        return min(speeds) >= max(speeds) * self.speed_ratio


def grid_parts(
    request: Request, answer: Placement, grid: GridView, constraints: Constraints
) -> Iterator[tuple[Request, GridView]]:
    """Yield (request, grid) pairs to call the policy with after its answer for the whole grid violated a constraint.

    Ranges of speeds are ordered by the nodes that ``answer`` uses in them, then by idle nodes, then by speed. A
    flexible request is limited to fewer components. For other requests, and for split options, the range is limited to
    the allowed number of clusters: sets that get the inputs first are tried first, then the set with the most idle
    nodes.
    """
    if isinstance(request, FixedRequest):
        return
    for inside in _speed_ranges(answer, grid, constraints.speed_ratio):
        if constraints.at_most is None:
            yield request, inside
        elif isinstance(request, FlexibleRequest) and not request.split_options:
            yield cap_components(request, constraints.at_most), inside
        else:
            for names in _sets_within_limit(request, inside, constraints.at_most):
                yield request, grid.select_clusters(names)


def cap_components(request: FlexibleRequest, at_most: int) -> FlexibleRequest:
    """Return the request with a limit of ``at_most`` components, or its own limit if that is lower."""
    maximum = request.max_components
    return replace(request, max_components=at_most if maximum is None else min(maximum, at_most))


def part_with(cluster: ClusterView, request: Request, grid: GridView, constraints: Constraints) -> GridView:
    """Return a grid of one cluster and those with the most idle nodes that the constraints allow together with it."""
    inside = [c for c in grid.by_idle if c.name != cluster.name and constraints.are_speeds_similar([c, cluster])]
    inside = _one_range(cluster, inside, constraints.speed_ratio)
    if constraints.at_most is not None and not (isinstance(request, FlexibleRequest) and not request.split_options):
        inside = inside[: constraints.at_most - 1]
    return grid.select_clusters(frozenset([cluster.name, *(c.name for c in inside)]))


def _one_range(cluster: ClusterView, candidates: Sequence[ClusterView], ratio: float | None) -> list[ClusterView]:
    """Return the largest set of clusters that may be combined with each other and with ``cluster``, by idle nodes."""
    if ratio is None:
        return list(candidates)
    tops = {c.speed for c in candidates if c.speed > cluster.speed} | {cluster.speed}
    ranges = [[c for c in candidates if top * ratio <= c.speed <= top] for top in sorted(tops, reverse=True)]
    return max(ranges, key=lambda clusters: sum(c.idle for c in clusters), default=[])


def _speed_ranges(answer: Placement, grid: GridView, ratio: float | None) -> list[GridView]:
    """Return parts of the grid, each with clusters of similar speeds; the whole grid if ``ratio`` is None.

    Parts are ordered by the nodes that ``answer`` uses in them, then by idle nodes.
    """
    if ratio is None:
        return [grid]

    def sets(grid: GridView) -> list[frozenset[ClusterName]]:
        return speed_sets({cluster.name: cluster.speed for cluster in grid.by_idle}, ratio)

    ranges = [grid.select_clusters(names) for names in grid.compute_once(("speeds", ratio), sets)]

    def rank(inside: GridView) -> tuple[int, int]:
        return -sum(answer.nodes_on(cluster.name) for cluster in inside), -inside.usable_idle

    return sorted(ranges, key=rank)


def speed_sets(speeds: Mapping[ClusterName, float], ratio: float) -> list[frozenset[ClusterName]]:
    """Return the maximal sets with all speeds at least ``ratio`` of the highest one in the set, the fastest first."""
    sets: list[frozenset[ClusterName]] = []
    for fastest in sorted(set(speeds.values()), reverse=True):
        inside = frozenset(name for name, speed in speeds.items() if fastest * ratio <= speed <= fastest)
        if not (sets and inside <= sets[-1]):
            sets.append(inside)
    return sets


def _sets_within_limit(request: Request, grid: GridView, at_most: int) -> Iterator[frozenset[ClusterName]]:
    """Yield sets of the allowed number of clusters that have enough idle nodes, from the best to the worst.

    The last set has the clusters with the most idle nodes: a request that worst-fit can place on any set of this size
    fits on it.
    """
    order = _by_distance(request, grid)
    near = [order[first : first + at_most] for first in range(max(1, len(order) - at_most + 1))]
    roomy = [cluster for cluster in grid.by_idle if cluster in order][:at_most]

    def suffices(clusters: Sequence[ClusterView]) -> bool:
        return sum(cluster.idle for cluster in clusters) >= request.total_size

    chosen = [*list(filter(suffices, near))[: MAX_PARTS_TRIED - 1], *filter(suffices, [roomy])]
    yield from dict.fromkeys(frozenset(cluster.name for cluster in clusters) for clusters in chosen)


def _by_distance(request: Request, grid: GridView) -> Sequence[ClusterView]:
    """Return the usable clusters that get all inputs, by the slowest transfer to each, ties by decreasing idle nodes.

    If no cluster gets all of them, for instance since components have different inputs, return all usable clusters.
    """
    if isinstance(request, FlexibleRequest):
        return grid.by_idle
    file_lists = {component.inputs for component in request.components} - {()}
    if not file_lists:
        return grid.by_idle

    def seconds(cluster: ClusterView) -> float:
        transfers = [estimate_transfer(cluster.name, files, grid) for files in file_lists]
        return max(inf if transfer is None else transfer.seconds for transfer in transfers)

    times = {cluster.name: seconds(cluster) for cluster in grid.by_idle}
    reached = [cluster for cluster in grid.by_idle if times[cluster.name] < inf]
    return sorted(reached or grid.by_idle, key=lambda cluster: times[cluster.name])
