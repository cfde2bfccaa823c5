"""What a job demands of the clusters it is combined of, whatever its policy: how many, and of how different speeds.

A policy knows nothing of it: it is asked with the whole grid, and if its answer breaks a constraint, with parts of
the grid on which an answer cannot, or breaks fewer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.placement import Placement
from koalapy.model.request import ClusterName, FixedRequest, FlexibleRequest, Request
from koalapy.model.transfer import estimate_transfer

MAX_PARTS_TRIED = 8
"""A policy is asked for so many parts of the grid at most, for each of its ranges of speed."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """``at_most`` so many clusters, the slowest with at least ``speed_ratio`` of the speed of the fastest."""

    at_most: int | None = None
    speed_ratio: float | None = None

    def __bool__(self) -> bool:
        return self.at_most is not None or self.speed_ratio is not None

    def broken(self, placement: Placement, grid: GridView) -> str:
        """Which of them a placement breaks, in words; empty when none."""
        names = {component.cluster for component in placement.components}
        broken = []
        if self.at_most is not None and len(names) > self.at_most:
            broken.append(f"coallocation is {self.at_most}, and it fits only on {len(names)} clusters together")
        used = sorted((cluster for cluster in grid if cluster.name in names), key=lambda c: (c.speed, c.name))
        if not self.similar(used):
            slow, fast = used[0], used[-1]
            ratio = f"{slow.name} has {slow.speed / fast.speed:.2g} of the speed of {fast.name}"
            broken.append(f"speed_ratio_min is {self.speed_ratio:g}, and {ratio}")
        return "; ".join(broken)

    def similar(self, clusters: Sequence[ClusterView]) -> bool:
        """Whether these clusters' speeds allow to combine them."""
        if self.speed_ratio is None or not clusters:
            return True
        speeds = [cluster.speed for cluster in clusters]
        return min(speeds) >= max(speeds) * self.speed_ratio


def parts(
    request: Request, answer: Placement, grid: GridView, constraints: Constraints
) -> Iterator[tuple[Request, GridView]]:
    """What to ask the policy for instead, in this order, after its ``answer`` to the whole broke a constraint.

    The ranges of speed that may be combined go by the nodes that the answer has in them, then by idle nodes, then by
    speed. A flexible request is asked for with fewer components; for others, and for split options, the range is cut
    down to as many clusters as are allowed: those with most idle nodes, or where the inputs are soonest, first.
    """
    if isinstance(request, FixedRequest):
        return
    for inside in _speed_ranges(answer, grid, constraints.speed_ratio):
        if constraints.at_most is None:
            yield request, inside
        elif isinstance(request, FlexibleRequest) and not request.split_options:
            yield capped(request, constraints.at_most), inside
        else:
            for names in _few(request, inside, constraints.at_most):
                yield request, grid.restrict_to(names)


def capped(request: FlexibleRequest, at_most: int) -> FlexibleRequest:
    most = request.max_components
    return replace(request, max_components=at_most if most is None else min(most, at_most))


def part_with(cluster: ClusterView, request: Request, grid: GridView, constraints: Constraints) -> GridView:
    """The clusters that have most to give beside a certain one, as the constraints allow."""
    inside = [c for c in grid.by_idle if c.name != cluster.name and constraints.similar([c, cluster])]
    inside = _one_range(cluster, inside, constraints.speed_ratio)
    if constraints.at_most is not None and not (isinstance(request, FlexibleRequest) and not request.split_options):
        inside = inside[: constraints.at_most - 1]
    return grid.restrict_to(frozenset([cluster.name, *(c.name for c in inside)]))


def _one_range(cluster: ClusterView, others: Sequence[ClusterView], ratio: float | None) -> list[ClusterView]:
    """Of clusters that may be combined with a certain one, those with most idle nodes that also may with each other."""
    if ratio is None:
        return list(others)
    tops = {c.speed for c in others if c.speed > cluster.speed} | {cluster.speed}
    ranges = [[c for c in others if top * ratio <= c.speed <= top] for top in sorted(tops, reverse=True)]
    return max(ranges, key=lambda clusters: sum(c.idle for c in clusters), default=[])


def _speed_ranges(answer: Placement, grid: GridView, ratio: float | None) -> list[GridView]:
    if ratio is None:
        return [grid]

    def sets(grid: GridView) -> list[frozenset[ClusterName]]:
        return speed_sets({cluster.name: cluster.speed for cluster in grid.by_idle}, ratio)

    ranges = [grid.restrict_to(names) for names in grid.compute_once(("speeds", ratio), sets)]

    def rank(inside: GridView) -> tuple[int, int]:
        return -sum(answer.nodes_on(cluster.name) for cluster in inside), -inside.usable_idle

    return sorted(ranges, key=rank)


def speed_sets(speeds: Mapping[ClusterName, float], ratio: float) -> list[frozenset[ClusterName]]:
    """The largest sets in which the slowest has at least ``ratio`` of the speed of the fastest; the fastest first."""
    sets: list[frozenset[ClusterName]] = []
    for fastest in sorted(set(speeds.values()), reverse=True):
        inside = frozenset(name for name, speed in speeds.items() if fastest * ratio <= speed <= fastest)
        if not (sets and inside <= sets[-1]):
            sets.append(inside)
    return sets


def _few(request: Request, grid: GridView, at_most: int) -> Iterator[frozenset[ClusterName]]:
    """Return sets of as many clusters as are allowed that have enough idle nodes, from the best to the worst.

    The last set has the clusters with most idle nodes: what fits by worst-fit on any so many clusters fits on these.
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

    Where none gets all of them, as when components have inputs of their own, all usable clusters are returned.
    """
    if isinstance(request, FlexibleRequest):
        return grid.by_idle
    wanted = {component.inputs for component in request.components} - {()}
    if not wanted:
        return grid.by_idle

    def seconds(cluster: ClusterView) -> float:
        transfers = [estimate_transfer(cluster.name, files, grid) for files in wanted]
        return max(inf if transfer is None else transfer.seconds for transfer in transfers)

    times = {cluster.name: seconds(cluster) for cluster in grid.by_idle}
    reached = [cluster for cluster in grid.by_idle if times[cluster.name] < inf]
    return sorted(reached or grid.by_idle, key=lambda cluster: times[cluster.name])
